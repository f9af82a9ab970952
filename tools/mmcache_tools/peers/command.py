"""``mmcache compare``: measure the systems side by side and show what came of it.

Owns: what each form of the command measures, and where the result goes.
Does not own: the measurements, the page.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.peers import bounds, endings, page, tables, turns
from mmcache_tools.peers.registry import SYSTEMS
from mmcache_tools.workload import kinds
from mmcache_tools.workload.requests import Request, TraceError

_MB = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What the command line asked for."""

    quick: bool = False
    systems: tuple[str, ...] = ()
    environments: Path = Path("build/peers")
    page: Path | None = None
    as_json: bool = False
    servegen: Path | None = None
    popularity: Path | None = None
    conversations: Path | None = None


def compare(options: CompareOptions) -> int:
    """Measure and show; 1 when a bound that the project sets itself is missed, else 0.

    Raises:
        UsageError: A system is not known, or charts cannot be drawn here.
    """
    unknown = set(options.systems) - set(SYSTEMS)
    if unknown:
        raise UsageError(f"{', '.join(sorted(unknown))}: choose among {', '.join(SYSTEMS)}")
    if options.page is not None:
        page.check(options.page)
    result = measure(options)
    result["bounds"] = [dataclasses.asdict(bound) for bound in bounds.of(result)]
    if options.page is not None:
        page.write(result, options.page)
    if options.as_json:
        print(json.dumps(result, indent=2))
    else:
        tables.show(result)
    return 0 if all(bound["holds"] for bound in result["bounds"]) else 1


def measure(options: CompareOptions) -> dict[str, Any]:
    """All figures of one run, as they would be printed as JSON."""
    began_s = time.monotonic()
    played = _played(options)
    chosen = options.systems or [
        name for name, entry in SYSTEMS.items() if entry.is_quick or not options.quick
    ]
    systems = turns.Systems(chosen, options.environments.resolve(), _say)
    try:
        result: dict[str, Any] = {
            "machine": _machine(),
            "quick": options.quick,
            "systems": systems.described,
            "cannot_run": systems.cannot_run,
        }
        _measure(systems, played, result)
    finally:
        systems.close()
    result["took_s"] = time.monotonic() - began_s
    return result


def _measure(
    systems: turns.Systems, played: dict[str, list[Request]], result: dict[str, Any]
) -> None:
    if result["quick"]:
        result["micro"] = turns.micro(systems, sizes_bytes=[4 * _MB], turns=2, rounds=2)
        result["replay"] = turns.replay(systems, played, scale=16)
        return
    parts = [
        turns.micro(systems, sizes_bytes=[_MB // 2, 4 * _MB, 20 * _MB], turns=2, rounds=2),
        turns.micro(systems, sizes_bytes=[64 * _MB], turns=2, rounds=1),
        turns.micro(systems, sizes_bytes=[128 * _MB], turns=1, rounds=1),
    ]
    result["micro"] = {
        kind: {name: each for part in parts for name, each in part[kind].items()}
        for kind in ("figures", "failures")
    }
    result["interference"] = endings.interference(systems, size_bytes=4 * _MB, seconds=4.0)
    result["replay"] = turns.replay(systems, played, scale=32)
    result["growth"] = endings.growth(systems, most=1_000_000, fill_s=8.0)
    result["faults"] = endings.faults(systems)


def workloads(options: CompareOptions) -> dict[str, Iterator[Request]]:
    """The traces that are played; those that need a file only where it was named."""
    if options.quick:
        return {"Zipf 0.8": itertools.islice(kinds.zipf(keys=180, alpha=0.8), 800)}
    found: dict[str, Iterator[Request]] = {
        f"Zipf {alpha:g}": itertools.islice(kinds.zipf(keys=320, alpha=alpha), 1600)
        for alpha in (0.6, 0.8, 1.1)
    }
    found["98% unique"] = itertools.islice(kinds.unique(repeated=0.02), 800)
    if options.servegen and options.popularity:
        service = kinds.service(options.servegen, options.popularity)
        found["ServeGen, AdaptSize's popularity"] = itertools.islice(service, 2000)
    if options.conversations:
        shown = kinds.conversation(options.conversations)
        found["Mooncake's conversations"] = itertools.islice(shown, 1600)
    return found


def _played(options: CompareOptions) -> dict[str, list[Request]]:
    """The traces in memory: a damaged one ends the command before it has measured for minutes."""
    try:
        return {name: list(requests) for name, requests in workloads(options).items()}
    except (TraceError, OSError) as error:
        raise UsageError(str(error)) from None


def _say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{platform.machine()}, {line.partition(':')[2].strip()}"
    return platform.machine()
