"""`mmcache ls`: the entries of a store, in some order.

Owns: order, filter and limit; the table, and what stands around the rows.
Does not own: what a row says (:mod:`.rows`), or how a million of them become text (:mod:`.lines`).

Entries stream through in constant memory. Any order but recency goes through all of them twice,
and sorts ranks and store keys in between (:mod:`.sorting`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mmcache_tools.inspection.lines import HEADINGS, RIGHT_SIDE, JsonLines, TextLines, cells
from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import (
    EntryRow,
    entry_row,
    print_json,
    printable,
    written_bytes,
)
from mmcache_tools.inspection.selection import EVERYTHING, SelectedEntry, Selection, Selector
from mmcache_tools.inspection.sorting import in_order, rank_of_float, rank_of_int, rank_of_text
from mmcache_tools.inspection.target import Target
from mmcache_tools.inspection.tree import NamespaceTree
from tiered_mmcache.configuration.quantities import LARGEST_SIZE_BYTES
from tiered_mmcache.disk.layout import Bookkeeping, Bucket
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.keys import describe_full_key

__all__ = ["Listing", "list_store"]

_TABLE_ROWS = 200  # beyond this a table that fits its columns to its cells is slow to lay out
_SHORT_STORE_KEY = 12
_LINES_A_WRITE = 256
_LEAST_WIDTHS = {"SHAPE": 18, "CLASS": 20, "NAMESPACE": 22, "KEY": 20}
_LEAST_TELLING = ("CLASS", "COST", "DTYPE", "SHAPE", "NAMESPACE", "AGE")  # on a narrow terminal
_NARROWEST_KEY = 8
_GAP = 2


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
        if listing.tree:
            _print_tree(totals, target, walk)
        elif listing.as_json:
            _print_json(totals, target, walk)
        else:
            shown = _print_text(walk)
            print(_totals_line(shown, totals))
    namespace = listing.selection.namespace
    if namespace is not None and not walk.buckets:
        complain(f"no entry here has the namespace {namespace!r}.")
    if walk.damaged:
        complain(f"records that are damaged: {walk.damaged}. `mmcache verify` names them.")
    return ExitCode.FOUND if walk.damaged else ExitCode.FINE


class _Walk:
    """The entries of a listing, and how many could not be read."""

    def __init__(self, reader: StoreReader, listing: Listing) -> None:
        self._reader = reader
        self._listing = listing
        self.as_json = listing.as_json
        self.unlimited = listing.limit is None
        self.buckets = _by_number(reader, listing.selection.namespace)
        self.stale = frozenset(number for number, each in self.buckets.items() if each.stale)
        self.now_s = time.time()
        self._selector = Selector(listing.selection, now_s=self.now_s)

    @property
    def damaged(self) -> int:
        """Records that could not be read."""
        return self._selector.damaged

    def entries(self) -> Iterator[SelectedEntry]:
        """The entries in order, no more than the limit."""
        limit = self._listing.limit
        if limit is not None:
            limit = min(limit, sys.maxsize)
        if self._listing.order == "recency":
            entries = self._selector.selected(self._reader.newest(self.buckets))
            return itertools.islice(entries, limit)
        rank = _RANKS[self._listing.order]
        ranked = (rank(entry) + entry.store_key for entry in self.in_any_order())
        # What was damaged is counted by now, and again only if it became so since.
        return self._selector.selected(self._reader.look_up(in_order(ranked, limit=limit)))

    def in_any_order(self) -> Iterator[SelectedEntry]:
        """All of them, as they lie in the store: the quickest way."""
        return self._selector.selected(self._reader.entries())


def _by_number(reader: StoreReader, namespace: str | None) -> dict[int, Bucket]:
    wanted = (b for b in reader.buckets() if namespace in (None, b.namespace))
    return {bucket.number: bucket for bucket in wanted}


def _rank_of_key(entry: SelectedEntry) -> bytes:
    text = describe_full_key(entry.full_key)
    try:
        return rank_of_int(int(text))
    except ValueError:
        return rank_of_text(text)


_RANKS: dict[str, Callable[[SelectedEntry], bytes]] = {
    "size": lambda entry: (LARGEST_SIZE_BYTES - entry.payload_bytes).to_bytes(8, "big"),
    "age": lambda entry: rank_of_float(entry.created_s),
    "key": _rank_of_key,
}


def _print_text(walk: _Walk) -> int:
    """Print the entries as a terminal or a pipe wants them; how many there were."""
    remaining = walk.entries()
    if not sys.stdout.isatty():
        return _print_columns(walk, remaining)
    first = list(itertools.islice(remaining, _TABLE_ROWS + 1))
    if len(first) <= _TABLE_ROWS:
        _print_table([entry_row(entry, walk.stale, now_s=walk.now_s) for entry in first])
        return len(first)
    return _print_columns(walk, itertools.chain(first, remaining))


def _print_columns(walk: _Walk, entries: Iterator[SelectedEntry]) -> int:
    """One line for each entry, under the headings."""
    lines = TextLines(walk.stale, now_s=walk.now_s)
    sys.stdout.write(lines.heading() + "\n")
    return _write(map(lines.line, entries), separator="\n", end="\n")


def _write(pieces: Iterator[str], *, separator: str, end: str = "") -> int:
    """Write what streams past, some hundred pieces at a time; how many there were."""
    count = 0
    while batch := list(itertools.islice(pieces, _LINES_A_WRITE)):
        before = separator if count and not end else ""
        sys.stdout.write(before + separator.join(batch) + end)
        count += len(batch)
    return count


def _print_table(rows: list[EntryRow]) -> None:
    """A table that fits the terminal: whole short cells, fewer columns where there is no room."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    shared = _common_namespace(rows)
    lines = [_short_cells(row) for row in rows]
    widths = _fitting_widths(lines, console.width, without={"NAMESPACE"} if shared else set())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, width in widths.items():
        side: Literal["left", "right"] = "right" if heading in RIGHT_SIDE else "left"
        table.add_column(heading, justify=side, no_wrap=True, width=width)
    for row, line in zip(rows, lines, strict=True):
        shown = dict(zip(HEADINGS, line, strict=True))
        fitting = [Text(_fitted(shown[heading], heading, most)) for heading, most in widths.items()]
        table.add_row(*fitting, style="dim" if row.stale else None)
    console.print(table)
    if shared is not None:
        print(f"All in the namespace {printable(shared)}.")
    if any(row.stale for row in rows):
        print("Dim rows are stale: they are of a generation that was cleared.")


def _fitted(cell: str, heading: str, most: int) -> str:
    """A cell cut to its width; a name keeps both ends, which tell names apart."""
    if heading != "NAMESPACE" or len(cell) <= most:
        return printable(cell, most)
    end = cell[-(most // 2) :]
    return f"{cell[: most - 1 - len(end)]}…{end}"


def _fitting_widths(lines: list[tuple[str, ...]], width: int, without: set[str]) -> dict[str, int]:
    """How wide each column is that is shown; the least telling ones go until the rest fits.

    Cells stay whole, but for names and keys: those share what is left.
    """
    columns = zip(HEADINGS, zip(HEADINGS, *lines, strict=True), strict=True)
    widest = {name: max(map(len, cells)) for name, cells in columns if name not in without}
    least = {name: min(most, _LEAST_WIDTHS.get(name, most)) for name, most in widest.items()}
    for name in _LEAST_TELLING:
        if sum(least.values()) + _GAP * (len(least) - 1) <= width:
            break
        least.pop(name, None)
    left = width - sum(least.values()) - _GAP * (len(least) - 1)
    for name in ("NAMESPACE", "KEY"):
        if name in least:
            grown = max(0, min(widest[name] - least[name], left))
            least[name] += grown
            left -= grown
    least["KEY"] = max(_NARROWEST_KEY, least["KEY"] + min(0, left))
    return least


def _common_namespace(rows: list[EntryRow]) -> str | None:
    names = {row.namespace for row in rows}
    return names.pop() if len(names) == 1 else None


def _short_cells(row: EntryRow) -> tuple[str, ...]:
    store_key, *others = cells(row)
    return store_key[:_SHORT_STORE_KEY], *others


def _totals_line(shown: int, totals: Bookkeeping) -> str:
    sizes = f"{written_bytes(totals.payload_bytes)} of embeddings"
    used = f"{written_bytes(totals.used_bytes)} used"
    return f"{shown} of {totals.entries} entries listed; the store holds {sizes}, {used}."


def _print_json(totals: Bookkeeping, target: Target, walk: _Walk) -> None:
    """The same shape as from one call of json.dumps, written as the rows come."""
    lines = JsonLines(walk.stale, now_s=walk.now_s)
    sys.stdout.write(f'{{"command": "ls", "store": {json.dumps(str(target.folder))}, "entries": [')
    sys.stdout.write("\n")
    shown = _write(map(lines.line, walk.entries()), separator=",\n")
    sys.stdout.write("\n], " + json.dumps(_end(shown, totals, walk))[1:] + "\n")


def _print_tree(totals: Bookkeeping, target: Target, walk: _Walk) -> None:
    tree = NamespaceTree(walk.in_any_order() if walk.unlimited else walk.entries())
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
