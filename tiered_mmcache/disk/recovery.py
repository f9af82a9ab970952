"""Opening a store safely: is the file whole, is it ours, can it be trusted.

Owns: the checks before LMDB maps the file and after, and setting an unreadable store aside.
Does not own: the folder and its lock (:mod:`.folder`), or what is in the store (:mod:`.store`).
Imports no torch.

LMDB maps the file and believes what it finds: reading past the end of a truncated file is a
SIGBUS, so a short file is padded before it is opened (LMDB's ``me_maxpg`` of the newest meta
page says how long it must be). Only a sole opener may pad or set aside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import os
import struct
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.causes import ForeignFileError, as_unavailable
from tiered_mmcache.disk.folder import (
    Openers,
    declare_format,
    declared_format,
    file_stays,
    last_use_was_clean,
    machine_restarted_since_last_use,
    note_use,
    prepare,
)
from tiered_mmcache.entries.record import FORMAT_VERSION
from tiered_mmcache.errors import RecordError, StoreUnavailableError
from tiered_mmcache.metrics.remedies import log_fields

BATCH_BYTES = 32 * 1024 * 1024  # the most that one transaction writes, one entry excepted
_LEAST_SPARE_BYTES = 16 * 1024 * 1024
_MAX_READERS = 1024
_CHECK_LIMIT_S = 0.5  # a million entries opened within a second, whatever went before
_KEYS_A_STEP = 1024
_LMDB_MAGIC = 0xBEEFC0DE
# lmdb 0.9 mdb.c: page header 16, then mm_magic u32, mm_version u32, mm_address u64, mm_mapsize
# u64, two MDB_db of 48 bytes (the first begins with the page size), mm_last_pg u64, mm_txnid u64.
_META = struct.Struct("<16xIIQQI44x48xQQ")
_LMDB_DATA_VERSION = 1
_SMALLEST_TABLES_FIRST = (layout.META, layout.RECENCY, layout.ENTRIES, layout.CHUNKS)
_PAGE_SIZES = frozenset(2**power for power in range(9, 17))

log = logging.getLogger("tiered_mmcache")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenSettings:
    """How a writer opens a store.

    Attributes:
        path: The store's folder; made when missing.
        budget_bytes: What all entries together may be charged.
        largest_entry_bytes: The largest payload that will ever be put.
        synchronous: Flush data before a commit is acknowledged (power loss keeps the store whole).
        allow_network: Open it on a network file system too.
        keep_quarantined: How many unreadable stores are kept aside.
        killed_worker: It killed its worker repeatedly: set it aside, whatever it looks like.
        as_it_is: For a person's command: the map stays as large as the last writer's, and what is
            unreadable is refused, not set aside.
    """

    path: Path
    budget_bytes: int
    largest_entry_bytes: int
    synchronous: bool
    allow_network: bool = False
    keep_quarantined: int = 2
    killed_worker: bool = False
    as_it_is: bool = False

    @property
    def map_bytes(self) -> int:
        """The fixed size of the map: budget x 1.25 + 4 x the largest transaction."""
        largest_bytes = min(self.largest_entry_bytes, self.budget_bytes)
        spare_bytes = max(4 * max(largest_bytes, self.batch_bytes), _LEAST_SPARE_BYTES)
        size = self.budget_bytes + self.budget_bytes // 4 + spare_bytes
        return -(-size // layout.PAGE_BYTES) * layout.PAGE_BYTES

    @property
    def map_bytes_to_open_with(self) -> int:
        """``map_bytes``, or 0 for LMDB to take what the file says."""
        return 0 if self.as_it_is else self.map_bytes

    @property
    def batch_bytes(self) -> int:
        """What one transaction writes at most, one entry excepted."""
        return max(1, min(BATCH_BYTES, self.budget_bytes // 16))


class OpenStore:
    """An environment and the lock that says that somebody has it open."""

    def __init__(self, environment: lmdb.Environment, folder: Path, openers: Openers) -> None:
        self.environment = environment
        self._openers = openers
        self._data_file = folder / layout.DATA_FILE
        self._identity = _identity(self._data_file)

    @property
    def sole(self) -> bool:
        """Whether no other process had the store open for writing when this one opened it."""
        return self._openers.sole

    def is_in_place(self) -> bool:
        """Whether the file that is open is still the one in the folder."""
        try:
            return _identity(self._data_file) == self._identity
        except OSError:
            return False

    def cover_last_page(self) -> None:
        """Make the file as long as its meta page says, after a commit.

        Pages that one transaction takes at the end of the file and frees again are counted, but
        never written. A reader cannot tell such a file from a truncated one.
        """
        pages = int(self.environment.info()["last_pgno"]) + 1
        needed_bytes = pages * int(self.environment.stat()["psize"])
        with contextlib.suppress(OSError):  # a full disk: the next commit tries again
            if self._data_file.stat().st_size < needed_bytes:
                fd = os.open(self._data_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:  # never cuts off what another process has appended meanwhile
                    os.posix_fallocate(fd, needed_bytes - 1, 1)
                finally:
                    os.close(fd)

    def close(self, *, cleanly: bool = True) -> None:
        """Close the environment, then give the lock back."""
        self.environment.close()
        self._openers.close(cleanly=cleanly)


def open_for_writing(settings: OpenSettings) -> OpenStore:
    """Open a store, making it when there is none and setting it aside when it is unreadable.

    Raises:
        StoreUnavailableError: It cannot be opened, or must not be touched.
    """
    folder = settings.path
    with as_unavailable(folder):
        prepare(folder, allow_network=settings.allow_network)
        _refuse_later_format(folder, declared_format(folder))
        openers = Openers(folder)
        try:
            environment = _open_locked(settings, sole=openers.sole)
            openers.share()
        except BaseException:
            openers.close(cleanly=False)
            raise
        return OpenStore(environment, folder, openers)


def open_for_reading(folder: Path, *, readahead: bool = False) -> lmdb.Environment:
    """Open an existing store, live or at rest, without the right to change it.

    Args:
        folder: The store's folder.
        readahead: Whether the kernel reads ahead: for a reader of everything.

    Raises:
        StoreUnavailableError: There is none, or it cannot be read.
    """
    with as_unavailable(folder):
        data_file = folder / layout.DATA_FILE
        if not data_file.is_file() or not data_file.stat().st_size:
            raise StoreUnavailableError(
                path=str(folder),
                cause="not_a_store",
                problem="there is no store here",
                remedy="Name the folder that the configuration calls disk.path, or the YAML file.",
            )
        _refuse_later_format(folder, declared_format(folder))
        check_length(folder)
        with file_stays(folder):
            environment = lmdb.open(
                str(folder),
                map_size=0,  # the writer's: a smaller map ends when the file outgrows it
                readonly=True,
                create=False,
                max_dbs=len(layout.DATABASES),
                readahead=readahead,
            )
        try:
            _check_format(environment, folder)
        except BaseException:
            environment.close()
            raise
        return environment


def check_length(folder: Path) -> None:
    """Refuse a file that is shorter than its newest meta page says.

    Raises:
        StoreUnavailableError: It is shorter, or it is no LMDB file.
    """
    needed_bytes, held_bytes = _needed_and_held_bytes(folder / layout.DATA_FILE)
    if held_bytes < needed_bytes:
        raise StoreUnavailableError(
            path=str(folder),
            cause="truncated",
            problem=f"the store's file has {held_bytes} of {needed_bytes} bytes",
            remedy="Start a server on it once: it is mended when it is next opened for writing.",
        )


def _open_locked(settings: OpenSettings, *, sole: bool) -> lmdb.Environment:
    check = False
    if sole:
        check = not last_use_was_clean(settings.path)
        if not settings.as_it_is:
            _set_aside_if_hopeless(settings)
            _mend_length(settings)
        note_use(settings.path)
    try:
        return _open_environment(settings, check=check)
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, ForeignFileError):
        if not sole or settings.as_it_is:
            raise
        set_aside(settings.path, keep=settings.keep_quarantined)
        return _open_environment(settings, check=False)


def _set_aside_if_hopeless(settings: OpenSettings) -> None:
    unflushed = not settings.synchronous and machine_restarted_since_last_use(settings.path)
    if settings.killed_worker or unflushed:
        why = "killed its worker twice" if settings.killed_worker else "was not flushed in time"
        fields = log_fields(
            "damaged", "Look at the disk's health, and at the lines before this one."
        )
        log.error("the store in %s %s", settings.path, why, extra=fields)
        set_aside(settings.path, keep=settings.keep_quarantined)


def _mend_length(settings: OpenSettings) -> None:
    data_file = settings.path / layout.DATA_FILE
    if not data_file.exists():
        return
    try:
        needed_bytes, held_bytes = _needed_and_held_bytes(data_file)
    except ForeignFileError:
        set_aside(settings.path, keep=settings.keep_quarantined)
        return
    if needed_bytes > max(held_bytes, settings.map_bytes):
        set_aside(
            settings.path, keep=settings.keep_quarantined
        )  # no file of ours was ever that long: the claim is damage
    elif held_bytes < needed_bytes:
        log.warning(
            "%s is short of %d bytes; padding it",
            data_file,
            needed_bytes - held_bytes,
            extra=log_fields("truncated"),
        )
        os.truncate(data_file, needed_bytes)


def quarantined_stores(folder: Path) -> list[Path]:
    """The folders of the unreadable stores that were set aside, oldest first."""
    return sorted(folder.glob(".quarantine-*"))


def set_aside(folder: Path, *, keep: int) -> None:
    """Rename an unreadable store's files, so that a new one can begin; keep the newest ``keep``."""
    if not (folder / layout.DATA_FILE).exists():
        return
    stamp = time.strftime("%Y%m%dT%H%M%S") + f"-{time.time_ns() % 10**9:09d}"
    aside = folder / f".quarantine-{stamp}"
    aside.mkdir(mode=0o700)
    for name in (layout.DATA_FILE, "lock.mdb"):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(aside / name)
    log.error(
        "the store in %s is unreadable; moved to %s and begun anew",
        folder,
        aside.name,
        extra=log_fields("damaged", "Keep it to find out why, or remove it."),
    )
    for old in quarantined_stores(folder)[: -keep or None]:
        for name in (layout.DATA_FILE, "lock.mdb"):
            with contextlib.suppress(FileNotFoundError):
                (old / name).unlink()
        old.rmdir()


def _open_environment(settings: OpenSettings, *, check: bool) -> lmdb.Environment:
    environment = lmdb.open(
        str(settings.path),
        map_size=settings.map_bytes_to_open_with,
        max_dbs=len(layout.DATABASES),
        max_readers=_MAX_READERS,
        mode=0o600,
        metasync=False,
        sync=settings.synchronous,
    )
    try:
        _check_format(environment, settings.path)
        _write_format(environment)
        declare_format(settings.path, FORMAT_VERSION)
        _check_bookkeeping(environment)
        if check:
            _check_structure(environment)
        environment.reader_check()
    except BaseException:
        environment.close()
        raise
    return environment


def _check_format(environment: lmdb.Environment, folder: Path) -> None:
    with environment.begin() as transaction:
        if not transaction.stat()["entries"]:
            return  # nothing was ever written
        known = [name for name in layout.DATABASES if transaction.get(name)]
        if _is_half_made(environment, transaction, known):
            return
        if len(known) < len(layout.DATABASES):
            raise StoreUnavailableError(
                path=str(folder),
                cause="not_ours",
                problem="this LMDB environment is not a store of tiered_mmcache",
                remedy="Set disk.path to another folder.",
            )
        meta = environment.open_db(layout.META, transaction, create=False)
        row = transaction.get(layout.FORMAT_ROW, db=meta)
    try:
        version = 0 if row is None else layout.format_version(bytes(row))
    except RecordError as error:
        raise lmdb.CorruptedError(str(error)) from None
    _refuse_later_format(folder, version)


def _refuse_later_format(folder: Path, version: int) -> None:
    if version > FORMAT_VERSION:
        raise StoreUnavailableError(
            path=str(folder),
            cause="future_format",
            problem=f"the store has format version {version}, this release reads {FORMAT_VERSION}",
            remedy="Upgrade tiered_mmcache, or set disk.path to another folder.",
        )


def _is_half_made(
    environment: lmdb.Environment, transaction: lmdb.Transaction, known: list[bytes]
) -> bool:
    """Whether there is nothing but some of our tables, all empty: to be completed, not refused."""
    if len(known) == len(layout.DATABASES) or transaction.stat()["entries"] != len(known):
        return False
    tables = [environment.open_db(name, transaction, create=False) for name in known]
    return not any(transaction.stat(table)["entries"] for table in tables)


def _write_format(environment: lmdb.Environment) -> None:
    """Make the tables and say whose they are, in one transaction: all of it or nothing."""
    with environment.begin(write=True) as transaction:
        databases = {name: environment.open_db(name, transaction) for name in layout.DATABASES}
        meta = databases[layout.META]
        if transaction.get(layout.FORMAT_ROW, db=meta) is None:
            transaction.put(layout.FORMAT_ROW, layout.format_value(), db=meta)


def _check_bookkeeping(environment: lmdb.Environment) -> None:
    """Read the rows that every change needs: a store that lacks them is of no more use.

    Raises:
        lmdb.CorruptedError: One of them is damaged.
    """
    with environment.begin() as transaction:
        meta = environment.open_db(layout.META, transaction, create=False)
        try:
            totals = transaction.get(layout.TOTALS_ROW, db=meta)
            if totals is not None:
                layout.Bookkeeping.from_bytes(bytes(totals))
            layout.read_buckets(transaction.cursor(meta))
        except RecordError as error:
            raise lmdb.CorruptedError(str(error)) from None


def _check_structure(environment: lmdb.Environment) -> None:
    """Walk every table's keys, after a use that did not end with a close.

    Payloads are not read: their digests are checked whenever they are. A large store is walked for
    a bounded time only, since its server waits.

    Raises:
        lmdb.CorruptedError: A table's keys are out of order, or LMDB cannot follow its pages.
    """
    deadline_s = time.monotonic() + _CHECK_LIMIT_S
    with environment.begin(buffers=True) as transaction:
        for name in _SMALLEST_TABLES_FIRST:
            table = environment.open_db(name, transaction, create=False)
            before: list[bytes] = []
            keys = transaction.cursor(table).iternext(values=False)
            while step := list(map(bytes, islice(keys, _KEYS_A_STEP))):
                if time.monotonic() > deadline_s:
                    log.warning(
                        "the store was not closed, and is too large to be walked whole",
                        extra=log_fields("not_closed", "Run `mmcache verify` when there is time."),
                    )
                    return
                followers = [*before[-1:], *step]
                if not all(map(operator.lt, followers, followers[1:])):
                    raise lmdb.CorruptedError(f"table {name.decode()}: keys are out of order")
                before = step


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


def _needed_and_held_bytes(data_file: Path) -> tuple[int, int]:
    """How long the newest meta page says the file is, and how long it is.

    Raises:
        ForeignFileError: Neither meta page is LMDB's.
        lmdb.VersionMismatchError: They are another LMDB's, whose file is not ours to touch.
    """
    with data_file.open("rb") as file:
        head = file.read(max(_PAGE_SIZES) + _META.size)
        held_bytes = os.fstat(file.fileno()).st_size
    if not head:
        return 0, held_bytes  # created, and never written
    metas = [meta for page_bytes in sorted(_PAGE_SIZES) for meta in _metas(head, page_bytes)]
    ours = [meta for meta in metas if meta.data_version == _LMDB_DATA_VERSION]
    if metas and not ours:
        raise lmdb.VersionMismatchError(f"LMDB data version {metas[0].data_version}")
    if not ours or len(ours) < len(metas):
        raise ForeignFileError(data_file)
    _, page_bytes, last_page, _ = max(ours)
    return (last_page + 1) * page_bytes, held_bytes


class _Meta(NamedTuple):
    """What a meta page says."""

    transaction: int
    page_bytes: int
    last_page: int
    data_version: int


def _metas(head: bytes, page_bytes: int) -> Iterator[_Meta]:
    """The meta pages, if pages have that size."""
    for start in (0, page_bytes):
        meta = head[start : start + _META.size]
        if len(meta) < _META.size:
            continue
        magic, version, _, _, stated_page_bytes, last_page, transaction = _META.unpack(meta)
        if magic == _LMDB_MAGIC and stated_page_bytes == page_bytes:
            yield _Meta(transaction, page_bytes, last_page, version)
