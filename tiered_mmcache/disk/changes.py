"""Changes of the store, and making them inside one write transaction.

Owns: what a change does to every table, eviction, generations, and the totals.
Does not own: when a transaction begins and ends (:mod:`.store`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections.abc import Iterator, Sequence

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.layout import Bookkeeping, Bucket, Place
from tiered_mmcache.disk.tables import Tables
from tiered_mmcache.entries.keys import namespace_digest
from tiered_mmcache.entries.record import (
    EntryHeader,
    Record,
    decode_record,
    digest_of_pieces,
    encode_record,
)
from tiered_mmcache.errors import RecordError


class Outcome(enum.Enum):
    """What became of one change of a batch."""

    DONE = "done"
    TOO_LARGE = "too_large"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PutEntry:
    """Store an entry; ``parts`` hold its payload and stay unchanged during the call."""

    store_key: bytes
    full_key: bytes
    namespace: str
    generation: bytes
    header: EntryHeader
    parts: Sequence[memoryview]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEntry:
    """Remove an entry if there is one."""

    store_key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropEntry:
    """Remove all that lies under a store key, also chunks that no entry holds together."""

    store_key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeginGeneration:
    """Make a generation the namespace's current one; the other ones become stale."""

    namespace: str
    generation: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TouchEntry:
    """Make an entry the most recently used, if it is still there."""

    store_key: bytes


Change = PutEntry | DeleteEntry | DropEntry | BeginGeneration | TouchEntry

# What one transaction evicts at most to get back under a budget: some tens of milliseconds.
MOST_EVICTED_BYTES = 64 * 1024 * 1024
MOST_EVICTED_ENTRIES = 1024
_BUDGET_TO_ROOM = 32  # room made ahead is at most this part of the budget


class ChangeWriter:
    """The changes of one write transaction, with the bookkeeping they share.

    Args:
        tables: The tables.
        transaction: A write transaction.
        budget_bytes: What all entries together may be charged.
    """

    def __init__(self, tables: Tables, transaction: lmdb.Transaction, *, budget_bytes: int) -> None:
        self._tables = tables
        self._transaction = transaction
        self._budget_bytes = budget_bytes
        self._entries = tables.entries
        self._chunks = tables.chunks
        self._recency = tables.recency
        self._meta = tables.meta
        self._before = books = tables.bookkeeping(transaction)
        self._counts: dict[str, int] = dataclasses.asdict(books)
        self._put_bytes = 0

    def make(self, change: Change) -> Outcome:
        """Make one change."""
        if isinstance(change, PutEntry):
            return self._put(change)
        if isinstance(change, DeleteEntry):
            self._remove(change.store_key)
        elif isinstance(change, DropEntry):
            self._drop(change.store_key)
        elif isinstance(change, TouchEntry):
            self._touch(change.store_key)
        else:
            self._begin_generation(change.namespace, change.generation)
        return Outcome.DONE

    def finish(self) -> None:
        """Evict ahead, and write the totals when they have changed.

        Pages that this transaction frees can be used by the second one after it, so room for two
        more like this one is made now; not where that would be a notable part of the budget.
        """
        ahead_bytes = 2 * self._put_bytes
        if 0 < ahead_bytes <= self._budget_bytes // _BUDGET_TO_ROOM:
            self.evict_down_to(self._budget_bytes - ahead_bytes, most_evicted_bytes=ahead_bytes)
        books = Bookkeeping(**self._counts)
        if books != self._before:
            self._transaction.put(layout.TOTALS_ROW, books.to_bytes(), db=self._meta)

    def _put(self, change: PutEntry) -> Outcome:
        payload_bytes = change.header.payload_bytes
        chunks = list(layout.chunks_of(change.parts, payload_bytes))
        record = Record(
            header=change.header,
            full_key=change.full_key,
            namespace=change.namespace,
            generation=change.generation,
            digests=b"".join(digest_of_pieces(pieces) for pieces in chunks),
            created_s=time.time(),
        )
        if self._has_equal(change.store_key, record):
            self._touch(change.store_key)
            return Outcome.DONE
        encoded = encode_record(record)
        cost_bytes = layout.charged_entry_bytes(len(encoded), payload_bytes)
        self._remove(change.store_key)
        if cost_bytes > self._budget_bytes:
            return Outcome.TOO_LARGE
        self.evict_down_to(self._budget_bytes - cost_bytes)
        for number, pieces in enumerate(chunks):
            value = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            key = layout.chunk_key(change.store_key, number)
            self._transaction.put(key, value, db=self._chunks)
        bucket = self._bucket_number(change.namespace, change.generation)
        self._write_entry(change.store_key, self._next_place(bucket), encoded)
        self._count(entries=1, used_bytes=cost_bytes, payload_bytes=payload_bytes)
        self._put_bytes += cost_bytes
        return Outcome.DONE

    def _has_equal(self, store_key: bytes, record: Record) -> bool:
        try:
            held = self._tables.record(self._transaction, store_key, record.full_key)
        except RecordError:
            return False
        if held is None:
            return False
        return dataclasses.replace(held, created_s=record.created_s) == record

    def _touch(self, store_key: bytes) -> None:
        value = self._transaction.get(store_key, db=self._entries)
        if value is None:
            return
        row = bytes(value)
        try:
            place = Place.from_bytes(row)
        except RecordError:
            self._remove(store_key)  # nobody could be served from it
            return
        self._transaction.delete(place.to_bytes(), db=self._recency)
        self._write_entry(store_key, self._next_place(place.bucket), row[layout.PLACE_BYTES :])

    def _write_entry(self, store_key: bytes, place: Place, encoded: bytes) -> None:
        self._transaction.put(store_key, place.to_bytes() + encoded, db=self._entries)
        self._transaction.put(place.to_bytes(), store_key, db=self._recency)

    def _remove(self, store_key: bytes) -> None:
        value = self._transaction.get(store_key, db=self._entries)
        if value is None:
            return
        row = bytes(value)
        removed_bytes = self._remove_chunks(store_key)
        try:
            payload_bytes = decode_record(row[layout.PLACE_BYTES :]).header.payload_bytes
        except RecordError:
            payload_bytes = removed_bytes  # the best that is left to go by
        if len(row) >= layout.PLACE_BYTES:
            self._transaction.delete(row[: layout.PLACE_BYTES], db=self._recency)
        self._transaction.delete(store_key, db=self._entries)
        cost_bytes = layout.charged_entry_bytes(len(row) - layout.PLACE_BYTES, payload_bytes)
        self._count(entries=-1, used_bytes=-cost_bytes, payload_bytes=-payload_bytes)

    def _drop(self, store_key: bytes) -> None:
        """As ``_remove``, where the row may be a stray copy of another entry's."""
        value = self._transaction.get(store_key, db=self._entries)
        place = b"" if value is None else bytes(value[: layout.PLACE_BYTES])
        owner = self._transaction.get(place, db=self._recency) if place else None
        owner = None if owner is None else bytes(owner)
        self._remove(store_key)
        self._remove_chunks(store_key)
        if owner is not None and owner != store_key:
            self._transaction.put(place, owner, db=self._recency)

    def _remove_chunks(self, store_key: bytes) -> int:
        removed_bytes = 0
        with self._transaction.cursor(self._chunks) as cursor:
            found = cursor.set_range(store_key)
            while found and bytes(cursor.key()[: len(store_key)]) == store_key:
                removed_bytes += len(cursor.value())
                found = cursor.delete() and bool(cursor.key())
        return removed_bytes

    @property
    def used_bytes(self) -> int:
        """What the entries are charged now, inside this transaction."""
        return self._counts["used_bytes"]

    @property
    def taken_bytes(self) -> int:
        """What the budget has to bear: the charges, or the pages really used if they are more."""
        return taken_bytes(self._tables, self._transaction, self.used_bytes)

    def evict_down_to(
        self,
        most_bytes: int,
        *,
        most_evicted_bytes: float = math.inf,
        most_entries: float = math.inf,
    ) -> int:
        """Remove the least recently used entries until the others take no more than that.

        Stops earlier once it has removed that many bytes or entries.

        Returns:
            How many it has removed.
        """
        first_bytes = self.taken_bytes
        removed = 0
        if first_bytes <= most_bytes:
            return removed
        for place, store_key in self._victims():
            left_bytes = self.taken_bytes
            done = left_bytes <= most_bytes
            if done or first_bytes - left_bytes >= most_evicted_bytes or removed >= most_entries:
                break
            self._remove(store_key)
            self._transaction.delete(place.to_bytes(), db=self._recency)  # also an orphan's row
            removed += 1
        return removed

    def _victims(self) -> Iterator[tuple[Place, bytes]]:
        buckets = self._tables.buckets(self._transaction)
        for bucket in buckets:
            if bucket.stale:
                while (row := self._oldest(bucket)) is not None:
                    yield row
                self._drop_bucket(bucket)
        current = [bucket for bucket in buckets if not bucket.stale]
        while rows := [row for row in map(self._oldest, current) if row is not None]:
            yield min(rows, key=lambda row: row[0].sequence)

    def _oldest(self, bucket: Bucket) -> tuple[Place, bytes] | None:
        prefix = layout.bucket_prefix(bucket.number)
        with self._transaction.cursor(self._recency) as cursor:
            if not cursor.set_range(prefix) or bytes(cursor.key()[:4]) != prefix:
                return None
            return Place.from_bytes(bytes(cursor.key())), bytes(cursor.value())

    def _drop_bucket(self, bucket: Bucket) -> None:
        row = layout.generation_row(namespace_digest(bucket.namespace), bucket.generation)
        self._transaction.delete(row, db=self._meta)
        self._transaction.delete(layout.bucket_row(bucket.number), db=self._meta)

    def _begin_generation(self, namespace: str, generation: bytes) -> None:
        for bucket in self._tables.buckets(self._transaction):
            if bucket.namespace == namespace:
                stale = bucket.generation != generation
                self._write_bucket(dataclasses.replace(bucket, stale=stale))
        row = layout.namespace_row(namespace_digest(namespace))
        self._transaction.put(row, generation, db=self._meta)

    def _bucket_number(self, namespace: str, generation: bytes) -> int:
        row = layout.generation_row(namespace_digest(namespace), generation)
        known = self._transaction.get(row, db=self._meta)
        if known is not None:
            return int.from_bytes(bytes(known), "big")
        current = self._transaction.get(
            layout.namespace_row(namespace_digest(namespace)), db=self._meta
        )
        number = self._counts["next_bucket"]
        self._count(next_bucket=1)
        self._transaction.put(row, layout.bucket_prefix(number), db=self._meta)
        stale = current is not None and bytes(current) != generation
        self._write_bucket(
            Bucket(number=number, namespace=namespace, generation=generation, stale=stale)
        )
        return number

    def _write_bucket(self, bucket: Bucket) -> None:
        self._transaction.put(layout.bucket_row(bucket.number), bucket.to_bytes(), db=self._meta)

    def _next_place(self, bucket: int) -> Place:
        sequence = self._counts["next_sequence"]
        self._count(next_sequence=1)
        return Place(bucket, sequence)

    def _count(self, **changes: int) -> None:
        for name, change in changes.items():
            self._counts[name] = max(0, self._counts[name] + change)


def taken_bytes(tables: Tables, transaction: lmdb.Transaction, used_bytes: int) -> int:
    """What a budget has to bear: the charges, or the pages really used if they are more."""
    pages = tables.pages_in_use(transaction) - len(layout.DATABASES)
    return max(used_bytes, pages * layout.PAGE_BYTES)
