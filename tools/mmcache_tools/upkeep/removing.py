"""`mmcache rm` and `mmcache prune`: entries removed by key, by condition, or down to a size.

Owns: what is asked for, and what is said of it. Does not own: the transactions
(:mod:`tiered_mmcache.disk.maintenance`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from mmcache_tools.inspection.lookup import the_one
from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.inspection.selection import EVERYTHING, Selection, Selector
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.maintenance import OpenedAsItIs, opened_as_it_is
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.errors import RecordError

__all__ = ["Pruning", "prune_store", "remove_entries"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What is to go.

    Attributes:
        selection: Entries that meet these conditions.
        to_size_bytes: Afterwards, the least recently used until the rest is charged no more.
        dry_run: Only say what would go.
        as_json: JSON instead of text.
    """

    selection: Selection
    to_size_bytes: int | None
    dry_run: bool
    as_json: bool


@dataclasses.dataclass(slots=True)
class _Gone:
    entries: int = 0
    charged_bytes: int = 0

    def add(self, entry: StoredEntry) -> None:
        self.entries += 1
        self.charged_bytes += _charged_bytes(entry)


def remove_entries(
    target: Target, keys: Sequence[str], *, namespace: str | None, as_json: bool
) -> int:
    """Remove the entries that these KEYs mean, or none when one is unclear; the exit code."""
    with opened_as_it_is(target.folder) as opened:
        looked_up = [(key, the_one(opened.reader, key, namespace)) for key in keys]
        missing = [key for key, entry in looked_up if entry is None]
        wanted = {entry.store_key: entry for _, entry in looked_up if entry is not None}
        removed = [entry.store_key.hex() for entry in opened.remove(wanted.values())]
    if as_json:
        answer = {"command": "rm", "store": str(target.folder)}
        print_json({**answer, "removed": removed, "missing": missing})
    else:
        for store_key in removed:
            print(f"removed {store_key}")
    for key in missing:
        complain(f"{target.folder} has no entry {key!r}. `mmcache ls` lists what is there.")
    return ExitCode.FOUND if missing else ExitCode.FINE


def prune_store(target: Target, pruning: Pruning) -> int:
    """Remove what is selected and what is above the size; the exit code.

    Raises:
        UsageError: Nothing says what is to go.
    """
    if pruning.selection.is_everything() and pruning.to_size_bytes is None:
        raise UsageError("say what is to go: --older-than, --namespace or --to-size, for example.")
    removed = _Gone()
    evicted = 0
    if pruning.dry_run:
        with StoreReader.open(target.folder) as reader:
            for entry in _selected(reader, pruning.selection):
                removed.add(entry)
            evicted = _to_be_evicted(reader, removed, pruning)
            left_bytes = reader.totals().used_bytes
    else:
        with opened_as_it_is(target.folder) as opened:
            for entry in opened.remove(_selected(opened.reader, pruning.selection)):
                removed.add(entry)
            evicted = _evict(opened, pruning.to_size_bytes)
            left_bytes = opened.reader.totals().used_bytes
    _print(target, pruning, removed, evicted=evicted, used_bytes=left_bytes)
    return ExitCode.FINE


def _print(
    target: Target, pruning: Pruning, removed: _Gone, *, evicted: int, used_bytes: int
) -> None:
    if pruning.as_json:
        print_json(
            {
                "command": "prune",
                "store": str(target.folder),
                "dry_run": pruning.dry_run,
                "removed": removed.entries,
                "removed_bytes": removed.charged_bytes,
                "evicted": evicted,
                "used_bytes": used_bytes,
            }
        )
        return
    would = "would be " if pruning.dry_run else ""
    size = written_bytes(removed.charged_bytes)
    print(f"{removed.entries} entries ({size}) {would}removed by condition, {evicted} by size")
    print(f"the store uses {written_bytes(used_bytes)}")


def _selected(reader: StoreReader, selection: Selection) -> Iterator[StoredEntry]:
    """What the conditions name; damaged records are for `mmcache verify --repair`."""
    if selection.is_everything():
        return
    for entry in Selector(selection, now_s=time.time()).selected(reader.entries()):
        yield entry.stored


def _evict(opened: OpenedAsItIs, to_size_bytes: int | None) -> int:
    return 0 if to_size_bytes is None else opened.evict_to(to_size_bytes)


def _to_be_evicted(reader: StoreReader, removed: _Gone, pruning: Pruning) -> int:
    """About how many would go by size: those from the least recently used on, by their charges."""
    if pruning.to_size_bytes is None:
        return 0
    kept_bytes = kept = 0
    buckets = [bucket.number for bucket in reader.buckets() if not bucket.stale]
    now_s = time.time()
    conditions = pruning.selection
    for entry in Selector(EVERYTHING, now_s=now_s).selected(reader.newest(buckets)):
        if not conditions.is_everything() and conditions.includes(entry, now_s=now_s):
            continue
        kept_bytes += entry.charged_bytes
        if kept_bytes > pruning.to_size_bytes:
            break
        kept += 1
    return max(0, reader.totals().entries - removed.entries - kept)


def _charged_bytes(entry: StoredEntry) -> int:
    try:
        payload_bytes = entry.record().header.payload_bytes
    except RecordError:
        return 0
    return layout.charged_entry_bytes(entry.record_bytes, payload_bytes)
