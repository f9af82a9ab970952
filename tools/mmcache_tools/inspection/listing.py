"""`mmcache ls`: the entries of a store, in some order.

Owns: order, filter and limit; the table, the plain columns and the JSON.
Does not own: what a row says (:mod:`.rows`).

By recency, entries stream through in constant memory. Any other order needs one number and one
key of every entry, or of `--limit` entries, before the first row can be printed.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import (
    EntryRow,
    entry_row,
    print_json,
    printable,
    written_bytes,
    written_shape,
    written_span,
)
from mmcache_tools.inspection.selection import EVERYTHING, Selection
from mmcache_tools.inspection.target import Target
from mmcache_tools.inspection.tree import NamespaceTree
from tiered_mmcache.disk.layout import Bookkeeping, Bucket
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.entries.keys import describe_full_key
from tiered_mmcache.entries.record import Record
from tiered_mmcache.errors import RecordError

__all__ = ["Listing", "list_store"]

_TABLE_ROWS = 200  # beyond this a table that fits its columns to its cells is slow to lay out
_KEY_CHARACTERS = 60
_SHORT_STORE_KEY = 12
_HEADINGS = ("STORE KEY", "SIZE", "AGE", "COST", "DTYPE", "SHAPE", "CLASS", "NAMESPACE", "KEY")
_WIDTHS = (32, 9, 8, 8, 14, 12, 16, 24, 0)
_RIGHT = {"SIZE", "AGE", "COST"}
_MOST_WIDE = {"SHAPE": 18, "CLASS": 20, "NAMESPACE": 32}
_LEAST_KEY_WIDTH = 8
_GAP = 2
_WIDE_TERMINAL = 110

Rank = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What to list.

    Attributes:
        limit: The most rows; None is all.
        selection: Only entries that meet these conditions.
        order: ``recency``, ``size``, ``age`` or ``key``.
        tree: Sums by namespace instead of rows.
        as_json: JSON instead of text.
    """

    limit: int | None = None
    selection: Selection = EVERYTHING
    order: str = "recency"
    tree: bool = False
    as_json: bool


def list_store(target: Target, listing: Listing) -> int:
    """Print the entries; the command's exit code."""
    with StoreReader.open(target.folder) as reader:
        walk = _Walk(reader, listing)
        totals = reader.totals()
        rows = itertools.islice(walk.rows(), listing.limit)
        if listing.tree:
            _print_tree(rows, totals, target, walk)
        elif listing.as_json:
            _print_json(rows, totals, target, walk)
        else:
            shown = _print_text(rows)
            print(_totals_line(shown, totals))
    namespace = listing.selection.namespace
    if namespace is not None and not walk.buckets:
        complain(f"no entry here has the namespace {namespace!r}.")
    if walk.damaged:
        complain(f"records that are damaged: {walk.damaged}. `mmcache verify` names them.")
    return ExitCode.FOUND if walk.damaged else ExitCode.FINE


class _Walk:
    """The rows of a listing, and how many entries could not become one."""

    def __init__(self, reader: StoreReader, listing: Listing) -> None:
        self._reader = reader
        self._listing = listing
        self.as_json = listing.as_json
        self.buckets = _by_number(reader, listing.selection.namespace)
        self.damaged = 0
        self._now_s = time.time()

    def rows(self) -> Iterator[EntryRow]:
        """The rows in order."""
        for entry in self._entries():
            record = _readable(entry)
            if record is None:
                self.damaged += 1
            elif self._is_wanted(entry, record):
                yield entry_row(entry, record, self.buckets, now_s=self._now_s)

    def _is_wanted(self, entry: StoredEntry, record: Record) -> bool:
        selection = self._listing.selection
        return selection.includes(entry.store_key, record, now_s=self._now_s)

    def _entries(self) -> Iterator[StoredEntry]:
        if self._listing.order == "recency":
            return self._reader.newest(self.buckets)
        rank = _RANKS[self._listing.order]
        ranked = self._ranked(rank)
        limit = self._listing.limit
        best = sorted(ranked) if limit is None else heapq.nsmallest(limit, ranked)
        return self._reader.look_up(ranks[-1] for ranks in best)

    def _ranked(self, rank: Callable[[Record], Rank]) -> Iterator[Rank]:
        for entry in self._reader.entries():
            record = _readable(entry)
            if record is None:
                self.damaged += 1
            elif self._is_wanted(entry, record):
                yield *rank(record), entry.store_key


def _by_number(reader: StoreReader, namespace: str | None) -> dict[int, Bucket]:
    wanted = (b for b in reader.buckets() if namespace in (None, b.namespace))
    return {bucket.number: bucket for bucket in wanted}


def _readable(entry: StoredEntry) -> Record | None:
    try:
        assert entry.place is not None
        return entry.record()
    except RecordError:
        return None


def _rank_of_key(record: Record) -> Rank:
    text = describe_full_key(record.full_key)
    try:
        return (0, int(text), "")
    except ValueError:
        return (1, 0, text)


_RANKS: dict[str, Callable[[Record], Rank]] = {
    "size": lambda record: (-record.header.payload_bytes,),
    "age": lambda record: (record.created_s,),
    "key": _rank_of_key,
}


def _print_text(rows: Iterable[EntryRow]) -> int:
    """Print the rows as a terminal or a pipe wants them; how many there were."""
    remaining = iter(rows)
    if not sys.stdout.isatty():
        return _print_columns(remaining)
    first = list(itertools.islice(remaining, _TABLE_ROWS + 1))
    if len(first) <= _TABLE_ROWS:
        _print_table(first)
        return len(first)
    return _print_columns(itertools.chain(first, remaining))


def _print_columns(rows: Iterable[EntryRow]) -> int:
    """One line for each row; an over-long cell moves the rest of its line, and nothing is lost."""
    sides = ["rjust" if heading in _RIGHT else "ljust" for heading in _HEADINGS]
    columns = list(zip(sides, _WIDTHS, strict=True))
    count = 0
    for count, cells in enumerate(itertools.chain([_HEADINGS], map(_cells, rows))):  # noqa: B007
        line = "  ".join(
            getattr(cell, side)(width) for cell, (side, width) in zip(cells, columns, strict=True)
        )
        sys.stdout.write(line.rstrip() + "\n")
    return count


def _print_table(rows: list[EntryRow]) -> None:
    """A table that fits the terminal: short cells stay whole, long ones end in an ellipsis."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    shown = _columns_for(rows, console.width)
    headings = [_HEADINGS[index] for index in shown]
    lines = [[cells[index] for index in shown] for cells in map(_short_cells, rows)]
    widths = _fitting_widths(headings, lines, console.width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, width in zip(headings, widths, strict=True):
        side: Literal["left", "right"] = "right" if heading in _RIGHT else "left"
        table.add_column(heading, justify=side, no_wrap=True, width=width)
    for row, line in zip(rows, lines, strict=True):
        cells = [Text(printable(cell, most)) for cell, most in zip(line, widths, strict=True)]
        table.add_row(*cells, style="dim" if row.stale else None)
    console.print(table)
    if (namespace := _common_namespace(rows)) is not None:
        print(f"All in the namespace {printable(namespace)}; stale entries are dim.")


def _fitting_widths(headings: list[str], lines: list[list[str]], width: int) -> list[int]:
    """As wide as the widest cell up to a limit; the last column, the key, takes what is left."""
    widest = [max(map(len, cells)) for cells in zip(headings, *lines, strict=True)]
    fitting = [
        min(most, _MOST_WIDE.get(heading, most))
        for heading, most in zip(headings, widest, strict=True)
    ]
    left = width - sum(fitting[:-1]) - _GAP * (len(fitting) - 1)
    return [*fitting[:-1], max(_LEAST_KEY_WIDTH, min(widest[-1], left))]


def _columns_for(rows: list[EntryRow], width: int) -> list[int]:
    """Which columns to show: fewer on a narrow terminal, and no namespace that all rows share."""
    dropped = {"COST", "CLASS"} if width < _WIDE_TERMINAL else set()
    if _common_namespace(rows) is not None:
        dropped.add("NAMESPACE")
    return [index for index, heading in enumerate(_HEADINGS) if heading not in dropped]


def _common_namespace(rows: list[EntryRow]) -> str | None:
    names = {row.namespace for row in rows}
    return names.pop() if len(names) == 1 else None


def _short_cells(row: EntryRow) -> tuple[str, ...]:
    store_key, *others = _cells(row)
    return store_key[:_SHORT_STORE_KEY], *others


def _cells(row: EntryRow) -> tuple[str, ...]:
    return (
        row.store_key,
        written_bytes(row.payload_bytes),
        written_span(row.age_s),
        written_span(row.cost_s),
        printable(row.dtype),
        written_shape(row.shape),
        printable(row.class_tag),
        printable(row.namespace) + (" (stale)" if row.stale else ""),
        printable(row.key, _KEY_CHARACTERS),
    )


def _totals_line(shown: int, totals: Bookkeeping) -> str:
    sizes = f"{written_bytes(totals.payload_bytes)} of embeddings"
    used = f"{written_bytes(totals.used_bytes)} used"
    return f"{shown} of {totals.entries} entries listed; the store holds {sizes}, {used}."


def _print_json(rows: Iterable[EntryRow], totals: Bookkeeping, target: Target, walk: _Walk) -> None:
    """The same shape as from one call of json.dumps, written as the rows come."""
    write = sys.stdout.write
    write(f'{{"command": "ls", "store": {json.dumps(str(target.folder))}, "entries": [')
    separator = "\n"
    shown = 0
    for row in rows:
        write(separator + json.dumps(row.as_dict()))
        separator = ",\n"
        shown += 1
    write("\n], " + json.dumps(_end(shown, totals, walk))[1:] + "\n")


def _print_tree(rows: Iterable[EntryRow], totals: Bookkeeping, target: Target, walk: _Walk) -> None:
    tree = NamespaceTree()
    for row in rows:
        tree.add(row)
    if walk.as_json:
        answer = {"command": "ls", "store": str(target.folder), "tree": tree.as_list()}
        print_json({**answer, **_end(tree.entries, totals, walk)})
        return
    for line in tree.lines():
        print(line)
    print(_totals_line(tree.entries, totals))


def _end(shown: int, totals: Bookkeeping, walk: _Walk) -> dict[str, Any]:
    return {
        "listed": shown,
        "damaged": walk.damaged,
        "totals": {
            "entries": totals.entries,
            "used_bytes": totals.used_bytes,
            "payload_bytes": totals.payload_bytes,
        },
    }
