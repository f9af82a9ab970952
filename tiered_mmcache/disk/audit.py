"""Is a store whole? Every row against every other, every digest against its bytes.

Owns: what must hold between the tables of :mod:`.layout`, and the words for what does not.
Does not own: reading (:mod:`.reader`), mending, or how findings are shown. Imports no torch.

Each entry is judged inside short transactions, so a store that is being written is judged fairly:
an entry that is replaced or evicted meanwhile is left out, and totals are compared only when
nothing was committed while the entries were counted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator

import lmdb
import xxhash

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.causes import cause_of
from tiered_mmcache.disk.layout import Bucket, Place
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.entries.keys import store_key as derived_store_key
from tiered_mmcache.entries.record import CHUNK_BYTES, DIGEST_BYTES, Record
from tiered_mmcache.errors import RecordError

_COUNT_ATTEMPTS = 3


class Cause(str, enum.Enum):
    """What is wrong, as a stable label."""

    STRUCTURE = "structure"  # LMDB itself cannot read a page
    ENTRY_ROW = "entry_row"  # no place, or no store key that could be one
    RECORD = "record"  # the record does not decode
    STORE_KEY = "store_key"  # the key is not the digest of what the record says
    BUCKET = "bucket"  # its generation is unknown or another's
    RECENCY = "recency"  # an entry without its recency row, or the reverse
    CHUNK_COUNT = "chunk_count"  # a chunk is missing or one too many
    CHUNK_LENGTH = "chunk_length"
    CHUNK_DIGEST = "chunk_digest"
    ORPHAN_CHUNKS = "orphan_chunks"  # chunks without an entry
    TOTALS = "totals"  # the totals row is damaged, or differs from a full count


class TotalsState(str, enum.Enum):
    """How the totals row compares with a full count."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"  # the store kept changing, or could not be counted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be.

    Attributes:
        cause: What kind of thing.
        store_key: The entry concerned, or None when it is the store as a whole.
        detail: What was found, in words.
    """

    cause: Cause
    store_key: bytes | None
    detail: str


class ChunkCheck:
    """Compares an entry's chunks with its record as they are visited in order."""

    def __init__(self, record: Record) -> None:
        self._payload_bytes = record.header.payload_bytes
        self._digests = record.digests
        self._expected = record.chunk_count
        self._seen = 0
        self.matching = 0
        self.problems: list[tuple[Cause, str]] = []

    def visit(self, number: int, data: memoryview) -> bool:
        """Judge one chunk; True when it is whole."""
        self._skip_to(min(number, self._expected))
        if number >= self._expected:
            self._wrong(Cause.CHUNK_COUNT, f"chunk {number} is one too many")
            return False
        self._seen += 1
        expected_bytes = min(CHUNK_BYTES, self._payload_bytes - number * CHUNK_BYTES)
        if len(data) != expected_bytes:
            length = f"{len(data)} of {expected_bytes} bytes"
            self._wrong(Cause.CHUNK_LENGTH, f"chunk {number} has {length}")
            return False
        at = number * DIGEST_BYTES
        if xxhash.xxh3_64_digest(data) != self._digests[at : at + DIGEST_BYTES]:
            self._wrong(Cause.CHUNK_DIGEST, f"chunk {number} does not match its digest")
            return False
        self.matching += 1
        return True

    def finish(self) -> None:
        """Say that the last chunk was visited."""
        self._skip_to(self._expected)

    def _skip_to(self, number: int) -> None:
        if number > self._seen:
            last = number - 1
            which = f"chunk {last} is" if last == self._seen else f"chunks {self._seen}-{last} are"
            self._wrong(Cause.CHUNK_COUNT, f"{which} missing")
            self._seen = number

    def _wrong(self, cause: Cause, detail: str) -> None:
        self.problems.append((cause, detail))


class Audit:
    """One pass over a store.

    Args:
        reader: The store.
        on_bytes: Called with the bytes of payload read since it was last called.

    Attributes:
        entries: Entries judged so far.
        chunks: Chunks judged so far.
        payload_bytes: Bytes of payload judged so far.
        totals: How the totals row compares; known at the end.
    """

    def __init__(
        self, reader: StoreReader, *, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        self._reader = reader
        self._on_bytes = on_bytes
        self._buckets: dict[int, Bucket] = {}
        self.entries = 0
        self.chunks = 0
        self.payload_bytes = 0
        self.totals = TotalsState.NOT_COMPARED

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, as it is found."""
        for part in (self._judge_entries, self._judge_recency, self._judge_chunk_owners):
            yield from _surviving(part())
        yield from _surviving(self._judge_totals())

    def _judge_entries(self) -> Iterator[Finding]:
        for seen in self._reader.entries():
            entry = self._as_of_now(seen.store_key)
            if entry is not None:
                yield from self._judge_entry(entry)
                self.entries += 1

    def _as_of_now(self, store_key: bytes) -> StoredEntry | None:
        return next(self._reader.look_up([store_key]), None)

    def _judge_entry(self, entry: StoredEntry) -> Iterator[Finding]:
        try:
            place = entry.place
        except RecordError as error:
            yield _finding(Cause.ENTRY_ROW, entry, str(error))
            return
        try:
            record = entry.record()
        except RecordError as error:
            yield _finding(Cause.RECORD, entry, str(error))
            return
        yield from self._judge_place(entry, place, record)
        yield from self._judge_chunks(entry, record)

    def _judge_place(self, entry: StoredEntry, place: Place, record: Record) -> Iterator[Finding]:
        derived = derived_store_key(
            namespace=record.namespace, generation=record.generation, full_key=record.full_key
        )
        if derived != entry.store_key:
            yield _finding(Cause.STORE_KEY, entry, f"its record belongs under {derived.hex()}")
        if not self._has_recency_row(entry):
            yield _finding(Cause.RECENCY, entry, "it has no row in the recency table")
        bucket = self._bucket(place.bucket)
        if bucket is None:
            if self._as_of_now(entry.store_key) is None:
                return  # evicted just now, and its generation with it
            yield _finding(Cause.BUCKET, entry, f"there is no generation number {place.bucket}")
        elif (bucket.namespace, bucket.generation) != (record.namespace, record.generation):
            yield _finding(Cause.BUCKET, entry, "its place is in another generation")

    def _has_recency_row(self, entry: StoredEntry) -> bool:
        """Judged on the entry's row of the same transaction: a use moves it between two."""
        with self._reader.transaction() as transaction:
            row = self._reader.get(transaction, layout.ENTRIES, entry.store_key)
            if row is None:
                return True
            place = row[: layout.PLACE_BYTES]
            return self._reader.get(transaction, layout.RECENCY, place) == entry.store_key

    def _bucket(self, number: int) -> Bucket | None:
        if number not in self._buckets:
            self._buckets = {bucket.number: bucket for bucket in self._reader.buckets()}
        return self._buckets.get(number)

    def _judge_chunks(self, entry: StoredEntry, record: Record) -> Iterator[Finding]:
        check = ChunkCheck(record)

        def visit(number: int, data: memoryview) -> None:
            check.visit(number, data)
            self.chunks += 1
            self.payload_bytes += len(data)
            self._on_bytes(len(data))

        if self._reader.visit_chunks(entry, visit):
            check.finish()
            for cause, detail in check.problems:
                yield _finding(cause, entry, detail)

    def _judge_recency(self) -> Iterator[Finding]:
        for key, store_key in self._reader.walk(layout.RECENCY):
            with self._reader.transaction() as transaction:
                if self._reader.get(transaction, layout.RECENCY, key) != store_key:
                    continue  # used or removed since
                row = self._reader.get(transaction, layout.ENTRIES, store_key)
            if row is None or row[: layout.PLACE_BYTES] != key:
                detail = f"recency row {key.hex()} names it, and it is not there"
                yield Finding(cause=Cause.RECENCY, store_key=store_key, detail=detail)

    def _judge_chunk_owners(self) -> Iterator[Finding]:
        for store_key in self._reader.chunk_owners():
            with self._reader.transaction() as transaction:
                if self._reader.get(transaction, layout.ENTRIES, store_key) is not None:
                    continue
                first = next(self._reader.rows(transaction, layout.CHUNKS, store_key), None)
            if first is not None and layout.chunk_owner(first[0]) == store_key:
                detail = "it has chunks and no entry"
                yield Finding(cause=Cause.ORPHAN_CHUNKS, store_key=store_key, detail=detail)

    def _judge_totals(self) -> Iterator[Finding]:
        for _ in range(_COUNT_ATTEMPTS):
            before = self._reader.last_transaction()
            held = self._held_totals()
            counted = self._count()
            if self._reader.last_transaction() != before:
                continue
            if held is not None and counted is None:
                return
            self.totals = TotalsState.DIFFERENT
            if held is None or counted is None:
                yield _of_totals("the totals row is damaged")
            elif held != counted:
                yield _of_totals(_differing(held, counted))
            else:
                self.totals = TotalsState.EQUAL
            return

    def _held_totals(self) -> tuple[int, int, int] | None:
        try:
            books = self._reader.totals()
        except RecordError:
            return None
        return books.entries, books.used_bytes, books.payload_bytes

    def _count(self) -> tuple[int, int, int] | None:
        """Entries, used bytes and payload bytes; None when a damaged record hides its size."""
        entries = used_bytes = payload_bytes = 0
        for entry in self._reader.entries():
            try:
                size_bytes = entry.record().header.payload_bytes
            except RecordError:
                return None
            entries += 1
            used_bytes += layout.charged_entry_bytes(entry.record_bytes, size_bytes)
            payload_bytes += size_bytes
        return entries, used_bytes, payload_bytes


def _surviving(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings, and one more where LMDB or a row of the tables ends the walk."""
    try:
        yield from findings
    except lmdb.Error as error:
        detail = f"LMDB cannot read on ({cause_of(error)}): {error}"
        yield Finding(cause=Cause.STRUCTURE, store_key=None, detail=detail)
    except RecordError as error:
        yield Finding(cause=Cause.STRUCTURE, store_key=None, detail=str(error))


def _finding(cause: Cause, entry: StoredEntry, detail: str) -> Finding:
    return Finding(cause=cause, store_key=entry.store_key, detail=detail)


def _of_totals(detail: str) -> Finding:
    return Finding(cause=Cause.TOTALS, store_key=None, detail=detail)


def _differing(held: tuple[int, int, int], counted: tuple[int, int, int]) -> str:
    names = ("entries", "used bytes", "payload bytes")
    parts = [
        f"{name}: {says} kept, {is_so} counted"
        for name, says, is_so in zip(names, held, counted, strict=True)
        if says != is_so
    ]
    return "; ".join(parts)
