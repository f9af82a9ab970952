"""`mmcache trace info`: what is in a trace.

Owns: the sums, their text and their JSON. Does not own: reading.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import print_json, printable, written_bytes, written_span
from mmcache_tools.sizing.curves import footprint_bytes
from mmcache_tools.sizing.sampling import Sample
from mmcache_tools.sizing.traces import Trace
from tiered_mmcache.tracing.format import Outcome

__all__ = ["describe"]

_MOST_KEYS = 1 << 18
_A_DATE_S = 1e9  # later than this, times are taken as seconds since 1970
_HITS = (Outcome.HOT, Outcome.HOST, Outcome.DISK)


def describe(path: Path, *, as_json: bool) -> int:
    """Print what a trace holds; the exit code.

    Raises:
        UsageError: The file is no trace.
    """
    answer = _answer(Trace(path))
    if as_json:
        print_json(answer)
    else:
        for name, text in _lines(answer):
            print(f"{name:<14} {text}")
    for problem in answer["damage"]:
        complain(f"{path}, {problem}; the rest was used.")
    return ExitCode.FOUND if answer["damage"] else ExitCode.FINE


def _answer(trace: Trace) -> dict[str, Any]:
    outcomes = np.zeros(256, np.int64)
    begins_s: float | None = None
    requested_bytes = 0
    for records in trace.blocks():
        outcomes += np.bincount(records["outcome"], minlength=256)
        requested_bytes += int(records["bytes"].sum())
        if len(records):
            earliest_s = float(records["time"].min())
            begins_s = earliest_s if begins_s is None else min(begins_s, earliest_s)
    with contextlib.closing(Sample(trace, most_keys=_MOST_KEYS)) as sample:
        uses = np.zeros(sample.keys, np.int64)
        for keys in sample.blocks():
            uses += np.bincount(keys, minlength=sample.keys)
    once = int((uses == 1).sum())
    counts = {each.name.lower(): int(outcomes[each]) for each in Outcome}
    known = sum(counts.values()) - counts["unknown"]
    hits = sum(int(outcomes[each]) for each in _HITS)
    return {
        "command": "trace info",
        "trace": str(trace.path),
        "requests": sample.requests,
        "keys": round(sample.keys / sample.rate),
        "once": round(once / sample.rate),
        "key_share_looked_at": sample.rate,
        "footprint_bytes": round(footprint_bytes(sample)),
        "requested_bytes": requested_bytes,
        "begins_s": begins_s,
        "span_s": sample.span_s,
        "outcomes": counts,
        "hit_ratio": hits / known if known else None,
        "unsized": sample.unsized,
        "damage": trace.damage,
    }


def _lines(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "trace", printable(answer["trace"])
    yield "requests", f"{answer['requests']:,}"
    if answer["begins_s"] is not None and answer["begins_s"] > _A_DATE_S:
        when = datetime.datetime.fromtimestamp(answer["begins_s"], datetime.timezone.utc)
        yield "begins", when.strftime("%Y-%m-%d %H:%M:%S UTC")
    yield "span", written_span(answer["span_s"])
    about = "" if answer["key_share_looked_at"] == 1 else "about "
    share = answer["once"] / max(1, answer["keys"])
    yield "keys", f"{about}{answer['keys']:,}, {share:.1%} of them asked for once"
    yield "embeddings", f"{about}{written_bytes(answer['footprint_bytes'])} in all"
    yield "asked for", written_bytes(answer["requested_bytes"])
    known = sum(count for name, count in answer["outcomes"].items() if name != "unknown")
    if not known:
        yield "outcomes", "not recorded"
    else:
        yield "hits", f"{answer['hit_ratio']:.1%} of the requests whose outcome is recorded"
        for name, count in answer["outcomes"].items():
            if count:
                yield "", f"{name.replace('_', ' '):<8} {count:>12,}  {count / known:.1%}"
    if answer["unsized"]:
        yield "without size", f"{answer['unsized']:,} requests"
