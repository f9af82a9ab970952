"""``mmcache workload``: write a trace.

Owns: which options a kind needs, and where the trace goes. Does not own: the kinds.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.workload import kinds
from mmcache_tools.workload.options import Kind
from mmcache_tools.workload.requests import Request, TraceError, write


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What the command line asked for."""

    kind: Kind
    requests: int
    seed: int = 0
    description: Path | None = None
    popularity: Path | None = None
    turns: Path | None = None
    start_s: float = 0.0
    keys: int = 1000
    alpha: float = 1.0
    repeated: float = 0.02


def generate(options: WorkloadOptions) -> Iterator[Request]:
    """The first requests of the workload that was asked for.

    Raises:
        UsageError: A file that this kind needs was not named.
        TraceError: A file is not what it should be.
    """
    return itertools.islice(_all_requests(options), options.requests)


def _all_requests(options: WorkloadOptions) -> Iterator[Request]:
    if options.kind is Kind.SERVICE:
        description = _named(options.description, "--servegen")
        popularity = _named(options.popularity, "--popularity")
        return kinds.service(description, popularity, start_s=options.start_s, seed=options.seed)
    if options.kind is Kind.CONVERSATION:
        return kinds.conversation(_named(options.turns, "--conversations"), seed=options.seed)
    if options.kind is Kind.ZIPF:
        return kinds.zipf(keys=options.keys, alpha=options.alpha, seed=options.seed)
    return kinds.unique(repeated=options.repeated, seed=options.seed)


def _named(path: Path | None, option: str) -> Path:
    if path is None:
        raise UsageError(f"this kind of workload is made from a trace: name it with {option}")
    return path


def write_workload(options: WorkloadOptions, out: Path | None) -> int:
    """Write the trace to a new file, or to stdout; always 0.

    Raises:
        UsageError: A trace that this kind needs was not named or is damaged, or the file is there
            already. Nothing is left of a file that was begun.
    """
    try:
        if out is None:
            write(generate(options), sys.stdout)
        else:
            print(f"{_write_file(options, out)} requests in {out}")
    except FileExistsError:
        raise UsageError(f"{out} is there already: name a new file") from None
    except TraceError as error:
        raise UsageError(str(error)) from None
    return 0


def _write_file(options: WorkloadOptions, out: Path) -> int:
    with out.open("x", newline="", encoding="utf-8") as file:
        try:
            return write(generate(options), file)
        except BaseException:
            out.unlink(missing_ok=True)
            raise
