"""What a person does to a store: removing entries, mending, and making it small again.

Owns: opening an existing store as it is, changes in bounded transactions beside a live server,
mending what :mod:`.audit` found, and the compact copy that takes the file's place.
Does not own: which entries are meant (the command), or what a change does (:mod:`.changes`).
Imports no torch.

Beside a live server these are changes like those of a second server: each transaction is short,
and a server that still believes in a removed entry finds a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.audit import Cause, Finding
from tiered_mmcache.disk.causes import as_unavailable
from tiered_mmcache.disk.changes import (
    MOST_EVICTED_BYTES,
    MOST_EVICTED_ENTRIES,
    Change,
    DeleteEntry,
    DropEntry,
)
from tiered_mmcache.disk.folder import COMPACTING, Openers, file_stays
from tiered_mmcache.disk.layout import Bookkeeping
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.record import decode_record
from tiered_mmcache.errors import RecordError, StoreUnavailableError

_LOCK_FILE = "lock.mdb"
# After these there is nothing worth keeping under the key; `totals` and `structure` have none.
_DROPPED = frozenset(Cause) - {Cause.TOTALS, Cause.STRUCTURE}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """What mending came to.

    Attributes:
        dropped: Store keys under which everything was dropped.
        rows: Rows of the order of eviction that led nowhere, removed.
        totals_counted: Whether the totals were counted anew; not beside a live server.
        left: Findings that cannot be mended.
    """

    dropped: int
    rows: int
    totals_counted: bool
    left: int


class OpenedAsItIs:
    """An existing store opened for changes; :func:`opened_as_it_is` makes it.

    Attributes:
        store: For changes.
        reader: For looking, in short transactions.
        sole: Whether no server had the store open.
    """

    def __init__(self, environment: lmdb.Environment, *, sole: bool) -> None:
        map_bytes = int(environment.info()["map_size"])
        self.store = Store(environment, budget_bytes=map_bytes)
        self.reader = StoreReader(environment)
        self.sole = sole
        self._environment = environment

    def remove(self, entries: Iterable[StoredEntry]) -> Iterator[StoredEntry]:
        """Remove entries in bounded transactions, and hand each out once it is gone."""
        batch: list[StoredEntry] = []
        batch_bytes = 0
        for entry in entries:
            batch.append(entry)
            batch_bytes += _payload_bytes(entry)
            if batch_bytes >= MOST_EVICTED_BYTES or len(batch) >= MOST_EVICTED_ENTRIES:
                yield from self._remove_batch(batch)
                batch, batch_bytes = [], 0
        yield from self._remove_batch(batch)

    def evict_to(self, most_bytes: int) -> int:
        """Evict the least recently used until the rest takes no more; how many that were."""
        self.store.budget_bytes = most_bytes
        evicted = 0
        while self.store.is_over_budget() and (some := self.store.evict_some()):
            evicted += some
        return evicted

    def mend(self, findings: Iterable[Finding]) -> Mended:
        """Drop what is bad; the totals are counted anew where no server has to wait for that."""
        found = list(findings)
        keys = {each.store_key for each in found if each.cause in _DROPPED} - {None}
        changes: list[Change] = [DropEntry(store_key=key) for key in sorted(filter(None, keys))]
        for start in range(0, len(changes), MOST_EVICTED_ENTRIES):
            self.store.apply(changes[start : start + MOST_EVICTED_ENTRIES])
        rows = self._remove_loose_rows() if found else 0
        if found and self.sole:
            self._count_totals()
        left = sum(
            each.cause is Cause.STRUCTURE or (each.cause is Cause.TOTALS and not self.sole)
            for each in found
        )
        return Mended(
            dropped=len(changes), rows=rows, totals_counted=bool(found) and self.sole, left=left
        )

    def _remove_batch(self, batch: list[StoredEntry]) -> Iterator[StoredEntry]:
        if batch:
            self.store.apply([DeleteEntry(store_key=entry.store_key) for entry in batch])
        yield from batch

    def _remove_loose_rows(self) -> int:
        """Rows of the order of eviction whose entry is not there, or stands elsewhere."""
        recency = self._environment.open_db(layout.RECENCY, create=False)
        entries = self._environment.open_db(layout.ENTRIES, create=False)
        removed = 0
        for key, store_key in self.reader.walk(layout.RECENCY):
            if self._is_in_order(key, store_key):
                continue
            with self._environment.begin(write=True) as transaction:  # judged again, alone now
                row = transaction.get(store_key, db=entries) if store_key else None
                if row is None or row[: layout.PLACE_BYTES] != key:
                    removed += transaction.delete(key, db=recency)
        return removed

    def _is_in_order(self, key: bytes, store_key: bytes) -> bool:
        if not store_key:
            return False
        with self.reader.transaction() as transaction:
            row = self.reader.get(transaction, layout.ENTRIES, store_key)
        return row is not None and row[: layout.PLACE_BYTES] == key

    def _count_totals(self) -> None:
        """Write the totals that a full count gives, in one transaction."""
        entries_table = self._environment.open_db(layout.ENTRIES, create=False)
        meta = self._environment.open_db(layout.META, create=False)
        with self._environment.begin(write=True) as transaction:
            row = transaction.get(layout.TOTALS_ROW, db=meta)
            held = Bookkeeping() if row is None else Bookkeeping.from_bytes(row)
            entries = used_bytes = payload_bytes = 0
            for _, value in transaction.cursor(entries_table):
                record_bytes = len(value) - layout.PLACE_BYTES
                size_bytes = decode_record(value[layout.PLACE_BYTES :]).header.payload_bytes
                entries += 1
                payload_bytes += size_bytes
                used_bytes += layout.charged_entry_bytes(record_bytes, size_bytes)
            counted = dataclasses.replace(
                held, entries=entries, used_bytes=used_bytes, payload_bytes=payload_bytes
            )
            transaction.put(layout.TOTALS_ROW, counted.to_bytes(), db=meta)


@contextlib.contextmanager
def opened_as_it_is(folder: Path) -> Iterator[OpenedAsItIs]:
    """Open an existing store for changes, live or at rest.

    Raises:
        StoreUnavailableError: There is none, it cannot be read, or it must not be written.
    """
    StoreReader.open(folder).close()  # refuses what is no store, before anything is touched
    settings = OpenSettings(
        path=folder,
        budget_bytes=layout.PAGE_BYTES,
        largest_entry_bytes=layout.PAGE_BYTES,
        synchronous=True,
        allow_network=True,  # a server has decided that
        as_it_is=True,
    )
    opened = open_for_writing(settings)
    try:
        yield OpenedAsItIs(opened.environment, sole=opened.sole)
        opened.cover_last_page()
    finally:
        opened.close()


def compact(folder: Path) -> tuple[int, int]:
    """Put a copy without free pages in the place of the store's file.

    The file is replaced in one step: whenever this is interrupted, the folder has a whole store.
    A server that starts meanwhile waits.

    Returns:
        The file's bytes before and after.

    Raises:
        StoreUnavailableError: Somebody has the store open for writing, it cannot be read, or there
            is no room for the copy.
    """
    StoreReader.open(folder).close()
    with as_unavailable(folder):
        openers = Openers(folder)
        try:
            if not openers.sole:
                raise StoreUnavailableError(
                    path=str(folder),
                    cause="in_use",
                    problem="a server or another command has the store open",
                    remedy="Stop it first: the file is put in the place of the other.",
                )
            return _compact_alone(folder)
        finally:
            openers.close(cleanly=False)  # leaves the note of an unclean last use where it was


def _compact_alone(folder: Path) -> tuple[int, int]:
    for left_behind in folder.glob(f"{COMPACTING}*"):
        shutil.rmtree(left_behind)
    data_file = folder / layout.DATA_FILE
    before_bytes = data_file.stat().st_size
    aside = folder / f"{COMPACTING}{os.getpid()}"
    aside.mkdir(mode=0o700)
    try:
        _copy_compactly(folder, aside)
        copy = aside / layout.DATA_FILE
        after_bytes = copy.stat().st_size
        copy.chmod(0o600)
        with file_stays(folder, replacing=True):
            # Readers that have both files open keep them. The lock file goes first: it is made
            # anew from whichever data file is there.
            (folder / _LOCK_FILE).unlink(missing_ok=True)
            copy.replace(data_file)
        _flush_folder(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return before_bytes, after_bytes


def _copy_compactly(folder: Path, aside: Path) -> None:
    """Copy the rows, flush the copy, and compare what it says of itself with the store.

    Raises:
        StoreUnavailableError: The copy is not what it must be.
    """
    with StoreReader.open(folder) as reader:
        reader.copy_compactly(aside)
        wanted = reader.row_counts()
    _flush(aside / layout.DATA_FILE)
    with StoreReader.open(aside) as copied:
        if copied.row_counts() != wanted:
            raise StoreUnavailableError(
                path=str(folder),
                cause="damaged",
                problem="the compact copy lacks rows of the store, which is left as it was",
                remedy="`mmcache verify` tells what is wrong with it.",
            )


def _payload_bytes(entry: StoredEntry) -> int:
    try:
        return entry.record().header.payload_bytes
    except RecordError:
        return 0


def _flush(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
