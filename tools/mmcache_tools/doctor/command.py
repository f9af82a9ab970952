"""`mmcache doctor`: all checks, and what they come to.

Owns: the order, the text and the JSON. Does not own: the checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from mmcache_tools.doctor.disk_checks import disk_findings
from mmcache_tools.doctor.findings import Finding, State
from mmcache_tools.doctor.machine_checks import machine_findings
from mmcache_tools.inspection.outcome import ExitCode
from mmcache_tools.inspection.rows import print_json, printable
from tiered_mmcache.config import CacheConfig, load_config
from tiered_mmcache.errors import ConfigError

__all__ = ["examine"]


def examine(file: Path | None, *, measure: bool, as_json: bool) -> int:
    """Check the machine, and a configuration on it; the exit code."""
    findings = list(_findings(file, measure=measure))
    if as_json:
        answer = {"command": "doctor", "file": None if file is None else str(file)}
        print_json({**answer, "findings": [dataclasses.asdict(each) for each in findings]})
    else:
        for each in findings:
            print(f"{each.state.value:<5} {each.check:<14} {printable(each.found)}")
            if each.remedy is not None:
                print(f"{'':<20} {printable(each.remedy)}")
    bad = any(each.state is State.BAD for each in findings)
    return ExitCode.FOUND if bad else ExitCode.FINE


def _findings(file: Path | None, *, measure: bool) -> Iterator[Finding]:
    config: CacheConfig | None = None
    if file is not None:
        try:
            config = load_config(file, check_machine=False)
            load_config(file)
            yield Finding(check="configuration", state=State.OK, found=f"{file} can be used")
        except ConfigError as error:
            found = str(error).removesuffix(f" {error.remedy}")
            yield Finding(check="configuration", state=State.BAD, found=found, remedy=error.remedy)
    yield from machine_findings(config)
    if config is not None and config.disk is not None:
        wanted_bytes = config.disk.max_size
        yield from disk_findings(config.disk.path, wanted_bytes=wanted_bytes, measure=measure)
