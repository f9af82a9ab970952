"""`mmcache trace record`: a trace of requests from another cache's log, to keep or to share.

Owns: the conversion. Does not own: recording a running cache (:mod:`tiered_mmcache.tracing`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.sizing.traces import Records, Trace
from tiered_mmcache.tracing.format import block_of_array, header
from tiered_mmcache.tracing.recorder import key_digest

__all__ = ["record"]


def record(source: Path, out: Path, *, salt: str | None, as_json: bool) -> int:
    """Write the trace, and say what is in it; the exit code.

    Raises:
        UsageError: The source is no trace, or the file is there already; nothing is left of it.
    """
    trace = Trace(source)
    key = secrets.token_bytes(32) if salt is None else salt.encode()
    requests = 0
    try:
        with out.open("xb") as file:
            try:
                file.write(header(time.time()))
                for records in _salted(trace, key):
                    file.write(block_of_array(records))
                    requests += len(records)
            except BaseException:
                out.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise UsageError(f"{out} is there already: name a new file") from None
    size_bytes = out.stat().st_size
    if as_json:
        answer = {"command": "trace record", "source": str(source), "out": str(out)}
        print_json({**answer, "requests": requests, "file_bytes": size_bytes})
    else:
        print(f"{requests:,} requests in {out}, {written_bytes(size_bytes)}")
    for problem in trace.damage:
        complain(f"{source}, {problem}; the rest was used.")
    return ExitCode.FOUND if trace.damage else ExitCode.FINE


def _salted(trace: Trace, salt: bytes) -> Iterator[Records]:
    for records in trace.blocks():
        if not len(records):
            continue
        known, places = np.unique(records["key"], return_inverse=True)
        digests = np.array([key_digest(each, salt) for each in known.tolist()], np.uint64)
        salted = records.copy()
        salted["key"] = digests[places]
        yield salted
