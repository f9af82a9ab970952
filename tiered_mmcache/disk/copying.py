"""A copy of a store, live or at rest, entry by entry.

Owns: which rows are copied, and that the copy is a whole store of its own.
Does not own: reading (:mod:`.reader`) or what makes an entry whole (:mod:`.audit`). No torch.

LMDB's own copy reads in one transaction from its beginning to its end. Beside a busy server the
file would grow all that time, until the map is full and the server's writes fail. Here each entry
is read in short transactions instead: what is replaced or evicted meanwhile is left out, and all
else keeps its record, its place in the order of eviction and its generation.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.audit import ChunkCheck
from tiered_mmcache.disk.causes import as_unavailable
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.disk.recovery import BATCH_BYTES, OpenSettings, open_for_writing
from tiered_mmcache.entries.keys import store_key as derived_store_key
from tiered_mmcache.entries.record import Record
from tiered_mmcache.errors import RecordError, StoreUnavailableError

_BATCH_ENTRIES = 256


@dataclasses.dataclass(slots=True, kw_only=True)
class Copied:
    """What came along.

    Attributes:
        entries: Entries that were copied.
        payload_bytes: Their embeddings' bytes.
        used_bytes: What they are charged.
        damaged: Entries left out because something about them is damaged.
        changed: Entries left out because they were replaced or removed meanwhile.
    """

    entries: int = 0
    payload_bytes: int = 0
    used_bytes: int = 0
    damaged: int = 0
    changed: int = 0


def copy_store(source: Path, destination: Path) -> Copied:
    """Copy a store into a folder that is not there yet; it appears there once it is whole.

    Raises:
        StoreUnavailableError: The source cannot be read, or the destination is there already or
            cannot be written.
    """
    if destination.exists():
        raise StoreUnavailableError(
            path=str(destination),
            cause="exists",
            problem="there is something at the destination already",
            remedy="Name a folder that is not there yet.",
        )
    partial = destination.parent / f".{destination.name}.partial"
    with as_unavailable(destination), StoreReader.open(source, readahead=True) as reader:
        if partial.exists():
            shutil.rmtree(partial)
        try:
            copied = _copy_into(partial, reader)
            partial.rename(destination)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return copied


def _copy_into(folder: Path, reader: StoreReader) -> Copied:
    settings = OpenSettings(
        path=folder,
        budget_bytes=reader.map_bytes(),
        largest_entry_bytes=BATCH_BYTES,
        synchronous=False,  # flushed at the end; before that nobody has the copy
    )
    opened = open_for_writing(settings)
    try:
        copied = _Copy(reader, opened.environment).everything()
        opened.environment.sync(True)
        opened.cover_last_page()
    finally:
        opened.close()
    return copied


class _Copy:
    """The copying of one store."""

    def __init__(self, reader: StoreReader, environment: lmdb.Environment) -> None:
        self._reader = reader
        self._environment = environment
        self._tables = {name: environment.open_db(name) for name in layout.DATABASES}
        self._copied = Copied()

    def everything(self) -> Copied:
        entries = self._reader.entries()
        while self._some(entries):
            pass
        with self._environment.begin(write=True) as transaction:
            self._copy_generations(transaction)
            totals = dataclasses.replace(  # read last: its next numbers are beyond every copied one
                self._reader.totals(),
                entries=self._copied.entries,
                used_bytes=self._copied.used_bytes,
                payload_bytes=self._copied.payload_bytes,
            )
            transaction.put(layout.TOTALS_ROW, totals.to_bytes(), db=self._tables[layout.META])
        return self._copied

    def _some(self, entries: Iterator[StoredEntry]) -> bool:
        """Copy a batch in one transaction; False when there is no more."""
        until_bytes = self._copied.used_bytes + BATCH_BYTES
        with self._environment.begin(write=True) as transaction:
            # Beforehand and at the end, so that every copied entry has its generation's row, also
            # where its generation is begun or dropped meanwhile.
            self._copy_generations(transaction)
            for number, entry in enumerate(entries, start=1):
                self._one(transaction, entry)
                if number == _BATCH_ENTRIES or self._copied.used_bytes >= until_bytes:
                    return True
        return False

    def _one(self, transaction: lmdb.Transaction, entry: StoredEntry) -> None:
        try:
            place = entry.place.to_bytes()
            record = entry.record()
        except RecordError:
            self._copied.damaged += 1
            return
        check = ChunkCheck(record)

        def visit(number: int, data: memoryview) -> None:
            if check.visit(number, data):
                key = layout.chunk_key(entry.store_key, number)
                transaction.put(key, data, db=self._tables[layout.CHUNKS])

        unchanged = self._reader.visit_chunks(entry, visit)
        check.finish()
        whole = not check.problems and _belongs(entry, record)
        if not unchanged or not whole:
            for number in range(record.chunk_count):
                key = layout.chunk_key(entry.store_key, number)
                transaction.delete(key, db=self._tables[layout.CHUNKS])
            self._copied.damaged += unchanged
            self._copied.changed += not unchanged
            return
        transaction.put(entry.store_key, entry.row, db=self._tables[layout.ENTRIES])
        transaction.put(place, entry.store_key, db=self._tables[layout.RECENCY])
        size_bytes = record.header.payload_bytes
        self._copied.entries += 1
        self._copied.payload_bytes += size_bytes
        self._copied.used_bytes += layout.charged_entry_bytes(entry.record_bytes, size_bytes)

    def _copy_generations(self, transaction: lmdb.Transaction) -> None:
        for key, value in self._reader.walk(layout.META):
            if key not in (layout.TOTALS_ROW, layout.FORMAT_ROW):
                transaction.put(key, value, db=self._tables[layout.META])


def _belongs(entry: StoredEntry, record: Record) -> bool:
    own_key = derived_store_key(
        namespace=record.namespace, generation=record.generation, full_key=record.full_key
    )
    return own_key == entry.store_key
