"""Looking into a store without changing it, live or at rest, in short transactions.

Owns: walking all entries in bounded batches, finding single ones, visiting their chunks, and what
LMDB and the file system tell about the file.
Does not own: opening and its dangers (:mod:`.recovery`), judging what is found (:mod:`.audit`), or
serving payloads (:mod:`.store`). Imports no torch.

An open read transaction keeps every page that was freed since from being used again, so the file
of a busy store would grow for as long as somebody looks at a screenful. Each transaction here
therefore ends before anything is handed out; a walk resumes after the last key it saw. Entries
that come, go or are used meanwhile may be seen or missed, never half.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from tiered_mmcache.disk import layout, recovery
from tiered_mmcache.disk.layout import Bookkeeping, Bucket, Place
from tiered_mmcache.disk.residency import View, is_resident, read_soon
from tiered_mmcache.entries.record import Record, decode_fields, decode_record
from tiered_mmcache.errors import StoreUnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self

BATCH_ROWS = 512
VISIT_BYTES = 4 * 1024 * 1024  # of chunks in one transaction
_AHEAD_CHUNKS = 64  # 16 MB: four steps, where entries are large
_LEAST_ROWS = 16  # of one bucket in one transaction, where there are many buckets
_NEWEST_SEQUENCE = 2**64 - 1
_SEQUENCE_BYTES = 8
_READER_LINE = re.compile(r"^\s*(\d+)\s+\S+\s+(\d+|-)\s*$", re.MULTILINE)

ChunkVisitor = Callable[[int, memoryview], None]


class StoredEntry(NamedTuple):
    """One row of the entries table as it stood in some transaction.

    Attributes:
        store_key: The 16-byte key.
        row: The whole value: place, then record.
    """

    store_key: bytes
    row: bytes

    @property
    def place(self) -> Place:
        """Where the entry stands in the order of eviction.

        Raises:
            RecordError: The row is too short to have one.
        """
        return Place.from_bytes(self.row)

    @property
    def record_bytes(self) -> int:
        """Length of the encoded record."""
        return len(self.row) - layout.PLACE_BYTES

    def record(self) -> Record:
        """The record.

        Raises:
            RecordError: It is damaged, or of a later format.
        """
        return decode_record(self.row[layout.PLACE_BYTES :])

    def fields(self) -> tuple[list[Any], int]:
        """The record's fields as plain values, and the bytes of its payload.

        Raises:
            RecordError: It is damaged, or of a later format.
        """
        return decode_fields(self.row[layout.PLACE_BYTES :])

    def same_record(self, row: bytes) -> bool:
        """Whether that row holds the same record; a use only changes the place before it."""
        return self.row[layout.PLACE_BYTES :] == row[layout.PLACE_BYTES :]


# As quick as a tuple is made: there may be millions.
_stored: Callable[[tuple[bytes, bytes]], StoredEntry] = functools.partial(
    tuple.__new__, StoredEntry
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenReader:
    """A process that has a reader in the store's lock table.

    Attributes:
        pid: The process.
        transaction: Number of the transaction it holds open, or None.
    """

    pid: int
    transaction: int | None


class StoreReader:
    """A store opened for looking into; also a context manager.

    Args:
        environment: As :func:`tiered_mmcache.disk.recovery.open_for_reading` returns it.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment
        self._databases = {
            name: environment.open_db(name, create=False) for name in layout.DATABASES
        }

    @classmethod
    def open(cls, folder: Path, *, readahead: bool = False) -> Self:
        """Open the store in a folder.

        Raises:
            StoreUnavailableError: There is none, or it cannot be read.
        """
        environment = recovery.open_for_reading(folder, readahead=readahead)
        try:
            return cls(environment)
        except lmdb.NotFoundError:
            environment.close()
            raise StoreUnavailableError(
                path=str(folder),
                cause="not_a_store",
                problem="nothing was ever stored in this LMDB file",
                remedy="Start a server on it first, or name another folder.",
            ) from None
        except BaseException:
            environment.close()
            raise

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The whole store

    def totals(self) -> Bookkeeping:
        """The totals row as of the last commit.

        Raises:
            RecordError: It is damaged.
        """
        with self.transaction() as transaction:
            row = self.get(transaction, layout.META, layout.TOTALS_ROW)
        return Bookkeeping() if row is None else Bookkeeping.from_bytes(row)

    def buckets(self) -> list[Bucket]:
        """Every generation of every namespace.

        Raises:
            RecordError: A row is damaged.
        """
        with self.transaction() as transaction:
            rows = list(self.rows(transaction, layout.META, layout.BUCKET_ROWS))
        prefix = layout.BUCKET_ROWS
        return [Bucket.from_row(key, value) for key, value in rows if key.startswith(prefix)]

    def last_transaction(self) -> int:
        """The number of the last commit: equal numbers mean that nothing changed in between."""
        return int(self._environment.info()["last_txnid"])

    def map_bytes(self) -> int:
        """What the file may grow to."""
        return int(self._environment.info()["map_size"])

    def file_bytes(self) -> int:
        """The length of the file."""
        return (Path(self._environment.path()) / layout.DATA_FILE).stat().st_size

    def readers(self) -> list[OpenReader]:
        """Who is in the lock table, this process included once it has read."""
        found = _READER_LINE.findall(self._environment.readers())
        return [
            OpenReader(pid=int(pid), transaction=None if number == "-" else int(number))
            for pid, number in found
        ]

    def row_counts(self) -> list[int]:
        """How many rows each table has."""
        with self.transaction() as transaction:
            tables = self._databases.values()
            return [int(transaction.stat(table)["entries"]) for table in tables]

    def copy_compactly(self, folder: Path) -> None:
        """Write LMDB's own copy without free pages; for a store at rest, since it reads at length.

        Raises:
            lmdb.Error: It cannot be read or written.
        """
        self._environment.copy(str(folder), compact=True)

    # Entries

    def entries(self) -> Iterator[StoredEntry]:
        """All entries in the order of their store keys."""
        return map(_stored, self.walk(layout.ENTRIES))

    def newest(self, buckets: Iterable[int]) -> Iterator[StoredEntry]:
        """The entries of some buckets, most recently used first.

        An entry that is used while the walk is on its way moves to the front, behind its back.
        """
        numbers = list(buckets)
        rows = max(_LEAST_ROWS, BATCH_ROWS // max(1, len(numbers)))
        backward = [self._backward(number, rows) for number in numbers]
        merged = heapq.merge(*backward, key=_sequence_of, reverse=True)
        return self.look_up(store_key for _, store_key in merged)

    def look_up(self, store_keys: Iterable[bytes]) -> Iterator[StoredEntry]:
        """The entries under these keys, in this order; those not there are left out."""
        remaining = iter(store_keys)
        while batch := list(itertools.islice(remaining, BATCH_ROWS)):
            with self._environment.begin() as transaction:
                found = transaction.cursor(self._databases[layout.ENTRIES]).getmulti(batch)
            yield from map(_stored, found)

    def with_prefix(self, hex_digits: str, *, limit: int) -> list[StoredEntry]:
        """Up to ``limit`` entries whose store keys begin with these lower-case hex digits."""
        start = bytes.fromhex(hex_digits + "0" * (len(hex_digits) % 2))
        with self.transaction() as transaction:
            rows = self.rows(transaction, layout.ENTRIES, start)
            matching = itertools.takewhile(lambda row: row[0].hex().startswith(hex_digits), rows)
            return [StoredEntry(*row) for row in itertools.islice(matching, limit)]

    def visit_chunks(self, entry: StoredEntry, visit: ChunkVisitor) -> bool:
        """Show every chunk of an entry to ``visit``, in order; each view dies when it returns.

        Returns:
            False when the entry was replaced or removed meanwhile: what was seen is worth nothing.
        """
        number: int | None = 0
        while number is not None:
            with self.transaction() as transaction:
                row = self.get(transaction, layout.ENTRIES, entry.store_key)
                if row is None or not entry.same_record(row):
                    return False
                number = self._visit_some(transaction, entry.store_key, number, visit)
        return True

    # For those who check: raw rows inside a transaction of their own

    def transaction(self) -> lmdb.Transaction:
        """A read transaction; end it before doing anything slow."""
        return self._environment.begin(buffers=True)

    def get(self, transaction: lmdb.Transaction, database: bytes, key: bytes) -> bytes | None:
        """The value of one row, or None."""
        value = transaction.get(key, db=self._databases[database])
        return None if value is None else bytes(value)

    def rows(
        self, transaction: lmdb.Transaction, database: bytes, start: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """The rows of a table from ``start`` on."""
        cursor = transaction.cursor(self._databases[database])
        if cursor.set_range(start):
            for key, value in cursor:
                yield bytes(key), bytes(value)

    def walk(self, database: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All rows of a table of small values, in the order of their keys, a batch at a time."""
        start = b""
        while True:
            with self._environment.begin() as transaction:
                cursor = transaction.cursor(self._databases[database])
                found = cursor.set_range(start)
                batch = list(itertools.islice(cursor, BATCH_ROWS)) if found else []
            yield from batch
            if len(batch) < BATCH_ROWS:
                return
            start = batch[-1][0] + b"\0"

    def chunk_owners(self) -> Iterator[bytes]:
        """The distinct store keys of the chunks table, without touching the chunks."""
        beyond = b"\0"
        while True:
            with self.transaction() as transaction:
                batch, beyond = self._some_owners(transaction, beyond)
            yield from batch
            if len(batch) < BATCH_ROWS:
                return

    def _backward(self, bucket: int, rows: int) -> Iterator[tuple[bytes, bytes]]:
        """A bucket's rows of the recency table, the last first, some at a time."""
        below = Place(bucket, _NEWEST_SEQUENCE).to_bytes()
        prefix = layout.bucket_prefix(bucket)
        while True:
            with self._environment.begin() as transaction:
                cursor = transaction.cursor(self._databases[layout.RECENCY])
                found = cursor.set_range(below)
                found = cursor.prev() if found else cursor.last()
                batch = list(itertools.islice(cursor.iterprev(), rows)) if found else []
            for key, store_key in batch:
                if not key.startswith(prefix):
                    return
                if len(key) == layout.PLACE_BYTES:
                    yield key, store_key
            if len(batch) < rows:
                return
            below = batch[-1][0]

    # Inside one transaction

    def _visit_some(
        self, transaction: lmdb.Transaction, store_key: bytes, first: int, visit: ChunkVisitor
    ) -> int | None:
        """Visit chunks from ``first`` on; the number to go on with, or None after the last."""
        cursor = transaction.cursor(self._databases[layout.CHUNKS])
        found = cursor.set_range(layout.chunk_key(store_key, first))
        if found and not is_resident(cursor.value()):
            self._read_ahead(transaction, cursor.key())
        visited_bytes = 0
        while found:
            key = bytes(cursor.key())
            if not key.startswith(store_key):
                return None
            number = int.from_bytes(key[len(store_key) :], "big")
            if visited_bytes >= VISIT_BYTES:
                return number
            value = memoryview(cursor.value())
            visit(number, value)
            visited_bytes += len(value)
            found = cursor.next()
        return None

    def _read_ahead(self, transaction: lmdb.Transaction, start: View) -> None:
        """Have the disk begin with the chunks from here on, those of the next steps included.

        A walk over all entries thereby keeps it busy while digests are computed.
        """
        cursor = transaction.cursor(self._databases[layout.CHUNKS])
        if cursor.set_range(bytes(start)):
            read_soon(itertools.islice(cursor.iternext(keys=False), _AHEAD_CHUNKS))

    def _some_owners(
        self, transaction: lmdb.Transaction, beyond: bytes
    ) -> tuple[list[bytes], bytes]:
        cursor = transaction.cursor(self._databases[layout.CHUNKS])
        owners: list[bytes] = []
        while len(owners) < BATCH_ROWS and cursor.set_range(beyond):
            key = bytes(cursor.key())
            owners.append(layout.chunk_owner(key))
            beyond = max(key, layout.chunk_key(owners[-1], 2**32 - 1)) + b"\0"
        return owners, beyond


def _sequence_of(row: tuple[bytes, bytes]) -> bytes:
    return row[0][-_SEQUENCE_BYTES:]
