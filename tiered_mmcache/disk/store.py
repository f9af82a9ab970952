"""The store: entries in LMDB under a byte budget, least recently used first to go.

Owns: transactions over the tables, and reading entries back.
Does not own: what a change does (:mod:`.changes`), opening and its dangers (:mod:`.recovery`), or
who calls (:mod:`.worker`). Imports no torch. Only a spill worker may write through it.

A whole batch of changes is one transaction. Reading copies into the caller's memory and checks
the copy, since a view into the map is other data as soon as its transaction ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.changes import (
    MOST_EVICTED_BYTES,
    MOST_EVICTED_ENTRIES,
    Change,
    ChangeWriter,
    Outcome,
    taken_bytes,
)
from tiered_mmcache.disk.layout import Bucket, Place
from tiered_mmcache.disk.protocol import StoreTotals
from tiered_mmcache.disk.residency import is_resident, read_pages
from tiered_mmcache.disk.tables import Tables
from tiered_mmcache.entries.keys import namespace_digest
from tiered_mmcache.entries.record import (
    CHUNK_BYTES,
    EntryHeader,
    Record,
    decode_record,
    digest,
    digest_of_pieces,
)
from tiered_mmcache.errors import RecordError, UseAfterForkError

_CHUNKS_AT_ONCE = 16  # 4 MiB: steps of 1 MiB are read more slowly, longer ones tell progress late


class Store:
    """An open store.

    Args:
        environment: As :func:`tiered_mmcache.disk.recovery.open_for_writing` returns it.
        budget_bytes: What all entries together may be charged.
    """

    def __init__(self, environment: lmdb.Environment, *, budget_bytes: int) -> None:
        self._environment = environment
        self._pid = os.getpid()
        self.budget_bytes = budget_bytes
        self._tables = Tables(environment)
        self._data_file = Path(environment.path()) / layout.DATA_FILE

    def close(self) -> None:
        """Close the environment; the last commit is what stays."""
        self._environment.close()

    # Reading

    def totals(self) -> StoreTotals:
        """What the store holds, as of the last commit of any process."""
        with self._reading() as transaction:
            books = self._tables.bookkeeping(transaction)
        return StoreTotals(
            entries=books.entries,
            used_bytes=books.used_bytes,
            payload_bytes=books.payload_bytes,
            file_bytes=_size_on_disk(self._data_file),
        )

    def coldest_created_s(self, namespace: str) -> float:
        """When the entry of a namespace that was used longest ago was stored.

        Seconds since the epoch; 0 where there is none, or where its record is damaged.
        """
        with self._reading() as transaction:
            try:
                record = self._tables.coldest(transaction, namespace)
            except RecordError:  # found again, and counted, when it is looked up
                return 0.0
        return 0.0 if record is None else record.created_s

    def current_generation(self, namespace: str) -> bytes | None:
        """The namespace's current generation, or None when the store has never seen it."""
        with self._reading() as transaction:
            row = transaction.get(
                layout.namespace_row(namespace_digest(namespace)), db=self._tables.meta
            )
            return None if row is None else bytes(row)

    def look_up(self, store_key: bytes, full_key: bytes | None = None) -> Record | None:
        """The record of an entry, or None; does not change recency.

        Raises:
            RecordError: There is a record, but it is damaged.
        """
        with self._reading() as transaction:
            return self._tables.record(transaction, store_key, full_key)

    def fill(
        self,
        store_key: bytes,
        full_key: bytes,
        header: EntryHeader,
        parts: Sequence[memoryview],
        on_progress: Callable[[int], None] = lambda filled_bytes: None,
    ) -> bool:
        """Copy an entry's payload into ``parts`` and check it there; False when it is not there.

        After each chunk ``on_progress`` is called with the bytes that are there and right so far.

        Raises:
            RecordError: Something about the entry is damaged; what was copied is worthless.
        """
        with self._reading() as transaction:
            record = self._tables.record(transaction, store_key, full_key)
            if record is None or not record.header.describes_as(header):
                return False
            payload_bytes = header.payload_bytes
            values = self._chunks(transaction, store_key, record.chunk_count)
            for number, pieces in enumerate(layout.chunks_of(parts, payload_bytes)):
                value = next(values)
                _copy_checked(value, pieces, record.digests[8 * number : 8 * number + 8])
                on_progress(min((number + 1) * CHUNK_BYTES, payload_bytes))
        return True

    def records(self, *, after: bytes = b"", limit: int = 512) -> Iterator[tuple[bytes, Record]]:
        """Up to ``limit`` entries in the order of their store keys, from one short transaction.

        Damaged records are left out: :meth:`damaged` finds them.
        """
        for store_key, value in self._rows(after, limit):
            try:
                yield store_key, decode_record(value[layout.PLACE_BYTES :])
            except RecordError:
                continue

    def places(self) -> Iterator[tuple[Place, bytes]]:
        """Every row of the recency table, first to be evicted first within a bucket."""
        with self._reading() as transaction:
            for key, value in transaction.cursor(self._tables.recency):
                yield Place.from_bytes(bytes(key)), bytes(value)

    def buckets(self) -> list[Bucket]:
        """Every generation of every namespace."""
        with self._reading() as transaction:
            return self._tables.buckets(transaction)

    # Writing

    def apply(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make all changes in one transaction, or none of them.

        Raises:
            lmdb.Error: The transaction failed as a whole; nothing has changed.
            UseAfterForkError: The store was opened by another process.
        """
        self._check_process()
        with self._environment.begin(write=True, buffers=True) as transaction:
            writer = ChangeWriter(self._tables, transaction, budget_bytes=self.budget_bytes)
            outcomes = [writer.make(change) for change in changes]
            writer.finish()
        return outcomes

    def is_over_budget(self) -> bool:
        """Whether the entries take more than the budget, as after it was lowered."""
        with self._reading() as transaction:
            used_bytes = self._tables.bookkeeping(transaction).used_bytes
            return taken_bytes(self._tables, transaction, used_bytes) > self.budget_bytes

    def evict_some(self) -> int:
        """Bring the entries nearer to the budget, by one transaction of bounded size.

        Returns:
            How many entries it has evicted.

        Raises:
            lmdb.Error: The transaction failed; nothing has changed.
        """
        self._check_process()
        with self._environment.begin(write=True, buffers=True) as transaction:
            writer = ChangeWriter(self._tables, transaction, budget_bytes=self.budget_bytes)
            evicted = writer.evict_down_to(
                self.budget_bytes,
                most_evicted_bytes=MOST_EVICTED_BYTES,
                most_entries=MOST_EVICTED_ENTRIES,
            )
            writer.finish()
        return evicted

    def make_room(self, size_bytes: int) -> None:
        """Evict at least ``size_bytes`` and commit twice, after which their pages can be used.

        Raises:
            lmdb.Error: Even that needs more room than there is.
        """
        self._environment.reader_check()
        with self._environment.begin(write=True, buffers=True) as transaction:
            writer = ChangeWriter(self._tables, transaction, budget_bytes=self.budget_bytes)
            writer.evict_down_to(max(0, writer.used_bytes - size_bytes))
            writer.finish()
        for _ in range(2):
            with self._environment.begin(write=True, buffers=True) as transaction:
                meta = self._tables.meta
                transaction.put(layout.FORMAT_ROW, layout.format_value(), db=meta)

    # Shared by readers and the writer

    def _chunks(
        self, transaction: lmdb.Transaction, store_key: bytes, count: int
    ) -> Iterator[bytes | memoryview | None]:
        """The chunks of an entry in order, in steps whose pages are read together if need be."""
        for start in range(0, count, _CHUNKS_AT_ONCE):
            step = [
                transaction.get(layout.chunk_key(store_key, number), db=self._tables.chunks)
                for number in range(start, min(start + _CHUNKS_AT_ONCE, count))
            ]
            there = [value for value in step if value is not None]
            if there and not is_resident(there[0]):
                read_pages(there)
            yield from step

    def _reading(self) -> lmdb.Transaction:
        self._check_process()
        return self._environment.begin(buffers=True)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UseAfterForkError("an open LMDB environment must not be used after a fork")

    def _rows(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        with self._reading() as transaction:
            cursor = transaction.cursor(self._tables.entries)
            rows: list[tuple[bytes, bytes]] = []
            if cursor.set_range(after):
                for key, value in cursor:
                    if bytes(key) != after:
                        rows.append((bytes(key), bytes(value)))
                    if len(rows) == limit:
                        break
            return rows


def _size_on_disk(file: Path) -> int:
    """Bytes that a sparse file takes; 0 when it cannot be asked, which is no reason to end."""
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _copy_checked(
    value: bytes | memoryview | None, pieces: list[memoryview], expected_digest: bytes
) -> None:
    if value is None or len(value) != sum(map(len, pieces)):
        raise RecordError("truncated", "a chunk is missing or has another length")
    if len(pieces) == 1:  # nearly always
        pieces[0][:] = value
    else:
        done = 0
        for piece in pieces:
            piece[:] = value[done : done + len(piece)]
            done += len(piece)
    found = digest(pieces[0]) if len(pieces) == 1 else digest_of_pieces(pieces)
    if found != expected_digest:
        raise RecordError("digest", "a chunk does not match its digest")
