"""`mmcache stats`: a whole store in one screenful.

Owns: the sums over all entries, their histograms, the text and the JSON.
Does not own: whether the totals row is right (`mmcache verify`).
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import sys
import time
from typing import Any

from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import (
    print_fields,
    print_json,
    printable,
    written_bytes,
    written_span,
)
from mmcache_tools.inspection.selection import EVERYTHING, SelectedEntry, Selector
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk.folder import last_clean_close_s, last_use_was_clean
from tiered_mmcache.disk.layout import Bucket
from tiered_mmcache.disk.reader import StoreReader

__all__ = ["sum_up"]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_SIZE_EDGES = (4 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, _GIB)
_AGE_EDGES = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400)
_AGE_NAMES = ("1 min", "10 min", "1 h", "6 h", "1 d", "7 d", "30 d")
_BAR_CHARACTERS = 40


class _Histogram:
    """Counts of values below each edge, and of those beyond the last."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_right(self.edges, value)] += 1

    def as_list(self, edge_name: str) -> list[dict[str, int | None]]:
        """As JSON has it; the last edge is null."""
        edges: tuple[int | None, ...] = (*self.edges, None)
        return [
            {edge_name: edge, "entries": count}
            for edge, count in zip(edges, self.counts, strict=True)
        ]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Share:
    """What one generation of a namespace holds."""

    bucket: Bucket
    entries: int = 0
    payload_bytes: int = 0
    charged_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "namespace": self.bucket.namespace,
            "generation": self.bucket.generation.hex(),
            "stale": self.bucket.stale,
            "entries": self.entries,
            "payload_bytes": self.payload_bytes,
            "charged_bytes": self.charged_bytes,
        }


class _Sums:
    """One pass over the entries."""

    def __init__(self, reader: StoreReader) -> None:
        self.shares = {bucket.number: _Share(bucket=bucket) for bucket in reader.buckets()}
        self.sizes = _Histogram(_SIZE_EDGES)
        self.ages = _Histogram(_AGE_EDGES)
        now_s = time.time()
        selector = Selector(EVERYTHING, now_s=now_s)
        for entry in selector.selected(reader.entries()):
            self._add(entry, now_s)
        self.damaged = selector.damaged

    def _add(self, entry: SelectedEntry, now_s: float) -> None:
        self.sizes.add(entry.payload_bytes)
        self.ages.add(now_s - entry.created_s)
        share = self.shares.get(entry.bucket)
        if share is None:  # begun since, or an entry that verify complains about
            bucket = Bucket(
                number=entry.bucket,
                namespace=entry.namespace,
                generation=entry.generation,
                stale=False,
            )
            share = self.shares[bucket.number] = _Share(bucket=bucket)
        share.entries += 1
        share.payload_bytes += entry.payload_bytes
        share.charged_bytes += entry.charged_bytes

    @property
    def by_weight(self) -> list[_Share]:
        """The generations, the heaviest first."""
        return sorted(self.shares.values(), key=lambda share: -share.charged_bytes)


def sum_up(target: Target, *, as_json: bool) -> int:
    """Print the sums; the command's exit code."""
    with StoreReader.open(target.folder) as reader:
        answer = _facts(reader, target)
        sums = _Sums(reader)
    answer["namespaces"] = [share.as_dict() for share in sums.by_weight]
    answer["sizes"] = sums.sizes.as_list("below_bytes")
    answer["ages"] = sums.ages.as_list("below_s")
    answer["damaged"] = sums.damaged
    if as_json:
        print_json(answer)
    else:
        _print_text(answer, sums)
    if sums.damaged:
        complain(f"records that are damaged: {sums.damaged}. `mmcache verify` names them.")
    return ExitCode.FOUND if sums.damaged else ExitCode.FINE


def _facts(reader: StoreReader, target: Target) -> dict[str, Any]:
    totals = reader.totals()
    file_bytes = reader.file_bytes()
    others = [each for each in reader.readers() if each.pid != os.getpid()]
    return {
        "command": "stats",
        "store": str(target.folder),
        "entries": totals.entries,
        "used_bytes": totals.used_bytes,
        "payload_bytes": totals.payload_bytes,
        "budget_bytes": target.budget_bytes,
        "file_bytes": file_bytes,
        "file_to_used": file_bytes / totals.used_bytes if totals.used_bytes else None,
        "map_bytes": reader.map_bytes(),
        "last_clean_close_s": last_clean_close_s(target.folder),
        "in_use_or_not_closed": not last_use_was_clean(target.folder),
        "readers": [dataclasses.asdict(each) for each in others],
    }


def _print_text(answer: dict[str, Any], sums: _Sums) -> None:
    print_fields(_lines(answer))
    print("\nnamespaces")
    shares = sums.by_weight
    sizes = [written_bytes(share.charged_bytes) for share in shares]
    wide = max(map(len, sizes), default=0)
    digits = max((len(str(share.entries)) for share in shares), default=0)
    for size, share in zip(sizes, shares, strict=True):
        generation = f"{share.bucket.generation.hex()[:8]} {_state(share.bucket):<7}"
        name = printable(share.bucket.namespace)
        print(f"  {size:>{wide}}  {share.entries:>{digits}} entries  {generation}  {name}")
    _print_histogram("sizes", [written_bytes(edge) for edge in _SIZE_EDGES], sums.sizes)
    _print_histogram("ages", list(_AGE_NAMES), sums.ages)


def _lines(answer: dict[str, Any]) -> list[tuple[str, str]]:
    used = written_bytes(answer["used_bytes"])
    budget = answer["budget_bytes"]
    if budget is not None:
        share = answer["used_bytes"] / budget
        used += f", {share:.1%} of the budget of {written_bytes(budget)}"
    ratio = answer["file_to_used"]
    file = written_bytes(answer["file_bytes"])
    readers = [_written_reader(each) for each in answer["readers"]]
    return [
        ("store", printable(answer["store"])),
        ("entries", str(answer["entries"])),
        ("embeddings", written_bytes(answer["payload_bytes"])),
        ("used", used),
        ("file", file if ratio is None else f"{file}, {ratio:.2f} times what is used"),
        ("may grow to", written_bytes(answer["map_bytes"])),
        ("last close", _written_close(answer)),
        ("readers", ", ".join(readers) or "none"),
    ]


def _written_close(answer: dict[str, Any]) -> str:
    closed_s = answer["last_clean_close_s"]
    when = "unknown" if closed_s is None else f"{written_span(time.time() - closed_s)} ago"
    return f"{when}; in use since, or not closed" if answer["in_use_or_not_closed"] else when


def _written_reader(reader: dict[str, int | None]) -> str:
    transaction = reader["transaction"]
    at = "" if transaction is None else f" at transaction {transaction}"
    return f"process {reader['pid']}{at}"


def _state(bucket: Bucket) -> str:
    return "stale" if bucket.stale else "current"


def _print_histogram(title: str, names: list[str], histogram: _Histogram) -> None:
    print(f"\n{title}")
    most = max(histogram.counts)
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    labels = [*(f"< {name}" for name in names), f">= {names[-1]}"]
    filled = [index for index, count in enumerate(histogram.counts) if count]
    if not filled:
        print("  none")
        return
    for index in range(filled[0], filled[-1] + 1):
        count = histogram.counts[index]
        length = -(-count * _BAR_CHARACTERS // most)
        print(f"  {labels[index]:>12}  {count:>9}  {mark * length}".rstrip())
