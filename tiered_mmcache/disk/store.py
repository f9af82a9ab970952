"""The store: entries in LMDB under a byte budget, least recently used first to go.

Owns: transactions over the tables of :mod:`.layout`, totals that are true after every commit,
recency, generations and eviction.
Does not own: opening and its dangers (:mod:`.recovery`), or who calls (:mod:`.worker`). Imports
no torch. Only a spill worker may write through it.

A whole batch of changes is one transaction. Reading copies into the caller's memory and checks
the copy, since a view into the map is other data as soon as its transaction ends.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator, Sequence

import lmdb
import xxhash

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.layout import Bookkeeping, Bucket, Place
from tiered_mmcache.disk.protocol import StoreTotals
from tiered_mmcache.errors import RecordError
from tiered_mmcache.keys import namespace_digest
from tiered_mmcache.record import CHUNK_BYTES, EntryHeader, Record, decode_record, encode_record


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
class BeginGeneration:
    """Make a generation the namespace's current one; the other ones become stale."""

    namespace: str
    generation: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TouchEntry:
    """Make an entry the most recently used, if it is still there."""

    store_key: bytes


Change = PutEntry | DeleteEntry | BeginGeneration | TouchEntry


class Store:
    """An open store.

    Args:
        environment: As :func:`tiered_mmcache.disk.recovery.open_environment` returns it.
        budget_bytes: What all entries together may be charged.
    """

    def __init__(self, environment: lmdb.Environment, *, budget_bytes: int) -> None:
        self._environment = environment
        self.budget_bytes = budget_bytes
        self._databases = {
            name: environment.open_db(name, create=not environment.flags()["readonly"])
            for name in layout.DATABASES
        }

    def close(self) -> None:
        """Close the environment; the last commit is what stays."""
        self._environment.close()

    # Reading

    def totals(self) -> StoreTotals:
        """What the store holds, as of the last commit of any process."""
        with self._reading() as transaction:
            books = self._bookkeeping(transaction)
        return StoreTotals(
            entries=books.entries, used_bytes=books.used_bytes, payload_bytes=books.payload_bytes
        )

    def current_generation(self, namespace: str) -> bytes | None:
        """The namespace's current generation, or None when the store has never seen it."""
        with self._reading() as transaction:
            row = transaction.get(
                layout.namespace_row(namespace_digest(namespace)), db=self._databases[layout.META]
            )
            return None if row is None else bytes(row)

    def look_up(self, store_key: bytes, full_key: bytes | None = None) -> Record | None:
        """The record of an entry, or None; does not change recency.

        Raises:
            RecordError: There is a record, but it is damaged.
        """
        with self._reading() as transaction:
            return self._record(transaction, store_key, full_key)

    def fill(
        self,
        store_key: bytes,
        full_key: bytes,
        payload_bytes: int,
        parts: Sequence[memoryview],
        on_progress: Callable[[int], None] = lambda filled_bytes: None,
    ) -> bool:
        """Copy an entry's payload into ``parts`` and check it there; False when it is not there.

        After each chunk ``on_progress`` is called with the bytes that are there and right so far.

        Raises:
            RecordError: Something about the entry is damaged; what was copied is worthless.
        """
        with self._reading() as transaction:
            record = self._record(transaction, store_key, full_key)
            if record is None or record.header.payload_bytes != payload_bytes:
                return False
            chunks = self._databases[layout.CHUNKS]
            for number, pieces in enumerate(layout.chunks_of(parts, payload_bytes)):
                value = transaction.get(layout.chunk_key(store_key, number), db=chunks)
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
            for key, value in transaction.cursor(self._databases[layout.RECENCY]):
                yield Place.from_bytes(bytes(key)), bytes(value)

    def buckets(self) -> list[Bucket]:
        """Every generation of every namespace."""
        with self._reading() as transaction:
            return self._buckets(transaction)

    # Writing

    def apply(self, changes: Sequence[Change]) -> list[Outcome]:
        """Make all changes in one transaction, or none of them.

        Raises:
            lmdb.Error: The transaction failed as a whole; nothing has changed.
        """
        with self._environment.begin(write=True, buffers=True) as transaction:
            writer = _Writer(self, transaction)
            outcomes = [writer.make(change) for change in changes]
            writer.finish()
        return outcomes

    def make_room(self, size_bytes: int) -> None:
        """Evict at least ``size_bytes`` and commit twice, after which their pages can be used.

        Raises:
            lmdb.Error: Even that needs more room than there is.
        """
        self._environment.reader_check()
        with self._environment.begin(write=True, buffers=True) as transaction:
            writer = _Writer(self, transaction)
            writer.evict_down_to(max(0, writer.used_bytes - size_bytes))
            writer.finish()
        for _ in range(2):
            with self._environment.begin(write=True, buffers=True) as transaction:
                meta = self._databases[layout.META]
                transaction.put(layout.FORMAT_ROW, layout.format_value(), db=meta)

    # Shared by readers and the writer

    def _reading(self) -> lmdb.Transaction:
        return self._environment.begin(buffers=True)

    def _bookkeeping(self, transaction: lmdb.Transaction) -> Bookkeeping:
        row = transaction.get(layout.TOTALS_ROW, db=self._databases[layout.META])
        return Bookkeeping() if row is None else Bookkeeping.from_bytes(bytes(row))

    def _buckets(self, transaction: lmdb.Transaction) -> list[Bucket]:
        return layout.read_buckets(transaction.cursor(self._databases[layout.META]))

    def _record(
        self, transaction: lmdb.Transaction, store_key: bytes, full_key: bytes | None
    ) -> Record | None:
        value = transaction.get(store_key, db=self._databases[layout.ENTRIES])
        if value is None:
            return None
        record = decode_record(bytes(value[layout.PLACE_BYTES :]))
        if full_key is not None and record.full_key != full_key:
            return None
        return record

    def _rows(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        with self._reading() as transaction:
            cursor = transaction.cursor(self._databases[layout.ENTRIES])
            rows: list[tuple[bytes, bytes]] = []
            if cursor.set_range(after):
                for key, value in cursor:
                    if bytes(key) != after:
                        rows.append((bytes(key), bytes(value)))
                    if len(rows) == limit:
                        break
            return rows


class _Writer:
    """The changes of one write transaction, with the bookkeeping they share."""

    def __init__(self, store: Store, transaction: lmdb.Transaction) -> None:
        self._store = store
        self._transaction = transaction
        self._entries = store._databases[layout.ENTRIES]
        self._chunks = store._databases[layout.CHUNKS]
        self._recency = store._databases[layout.RECENCY]
        self._meta = store._databases[layout.META]
        self._before = books = store._bookkeeping(transaction)
        self._counts: dict[str, int] = dataclasses.asdict(books)

    def make(self, change: Change) -> Outcome:
        """Make one change."""
        if isinstance(change, PutEntry):
            return self._put(change)
        if isinstance(change, DeleteEntry):
            self._remove(change.store_key)
        elif isinstance(change, TouchEntry):
            self._touch(change.store_key)
        else:
            self._begin_generation(change.namespace, change.generation)
        return Outcome.DONE

    def finish(self) -> None:
        """Write the totals, when they have changed."""
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
            digests=b"".join(_digest(pieces) for pieces in chunks),
            created_s=time.time(),
        )
        if self._has_equal(change.store_key, record):
            self._touch(change.store_key)
            return Outcome.DONE
        encoded = encode_record(record)
        cost_bytes = layout.charged_entry_bytes(len(encoded), payload_bytes)
        self._remove(change.store_key)
        if cost_bytes > self._store.budget_bytes:
            return Outcome.TOO_LARGE
        self.evict_down_to(self._store.budget_bytes - cost_bytes)
        for number, pieces in enumerate(chunks):
            value = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            key = layout.chunk_key(change.store_key, number)
            self._transaction.put(key, value, db=self._chunks)
        bucket = self._bucket_number(change.namespace, change.generation)
        self._write_entry(change.store_key, self._next_place(bucket), encoded)
        self._count(entries=1, used_bytes=cost_bytes, payload_bytes=payload_bytes)
        return Outcome.DONE

    def _has_equal(self, store_key: bytes, record: Record) -> bool:
        try:
            held = self._store._record(self._transaction, store_key, record.full_key)
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

    def evict_down_to(self, most_bytes: int) -> None:
        """Remove the least recently used entries until the others are charged no more than that."""
        if self.used_bytes <= most_bytes:
            return
        for place, store_key in self._victims():
            if self.used_bytes <= most_bytes:
                return
            self._remove(store_key)
            self._transaction.delete(place.to_bytes(), db=self._recency)  # also an orphan's row

    def _victims(self) -> Iterator[tuple[Place, bytes]]:
        buckets = self._store._buckets(self._transaction)
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
        for bucket in self._store._buckets(self._transaction):
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


def _digest(pieces: list[memoryview]) -> bytes:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def _copy_checked(
    value: bytes | memoryview | None, pieces: list[memoryview], expected_digest: bytes
) -> None:
    if value is None or len(value) != sum(len(piece) for piece in pieces):
        raise RecordError("truncated", "a chunk is missing or has another length")
    done = 0
    for piece in pieces:
        piece[:] = value[done : done + len(piece)]
        done += len(piece)
    if _digest(pieces) != expected_digest:
        raise RecordError("digest", "a chunk does not match its digest")
