"""Opening a store: what is mended, what is set aside, and what is left alone.

Owns: files, locks, permissions and formats. Does not own: what is in a store
(test_disk_store.py), or crashes while it is written (tests/faults).
"""

import dataclasses
import errno
import fcntl
import os
import stat
import subprocess
import sys

import lmdb
import msgpack
import pytest

from tiered_mmcache.disk import layout, recovery
from tiered_mmcache.disk.causes import cause_of
from tiered_mmcache.disk.changes import PutEntry
from tiered_mmcache.disk.recovery import (
    OpenSettings,
    check_length,
    open_for_reading,
    open_for_writing,
    set_aside,
)
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.errors import StoreUnavailableError

MIB = 1 << 20
GENERATION = bytes(16)


def settings_of(folder, **changes):
    values = {
        "path": folder,
        "budget_bytes": 8 * MIB,
        "largest_entry_bytes": MIB,
        "synchronous": False,
    }
    return OpenSettings(**(values | changes))


def put(number, size_bytes=300_000):
    header = EntryHeader(
        class_tag="EmbeddingResult",
        dtype="uint8",
        item_bytes=1,
        shape=(size_bytes,),
        extras=b"",
        device_type="cpu",
    )
    return PutEntry(
        store_key=bytes([number]) * 16,
        full_key=bytes([number]),
        namespace="n",
        generation=GENERATION,
        header=header,
        parts=[memoryview(bytes([number]) * size_bytes)],
    )


def write_store(folder, entries=5):
    handle = open_for_writing(settings_of(folder))
    store = Store(handle.environment, budget_bytes=8 * MIB)
    for number in range(entries):
        store.apply([put(number)])
    handle.close()
    return folder / layout.DATA_FILE


def entries_in(folder):
    handle = open_for_writing(settings_of(folder))
    entries = Store(handle.environment, budget_bytes=8 * MIB).totals().entries
    handle.close()
    return entries


def refusal(call, *arguments):
    with pytest.raises(StoreUnavailableError) as error:
        call(*arguments)
    assert error.value.remedy
    assert error.value.path in str(error.value)
    return error.value.cause


def quarantined(folder):
    return sorted(folder.glob(".quarantine-*"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


FILES = {"data.mdb", "format-version", "last-close.json", "lock.mdb", "openers.lock"}


# Making and reopening


def test_a_store_is_made_where_there_is_none(tmp_path):
    folder = tmp_path / "a" / "b" / "store"
    assert entries_in(folder) == 0
    assert {path.name for path in folder.iterdir()} == FILES


def test_what_was_written_is_there_after_reopening(folder):
    write_store(folder)
    assert entries_in(folder) == 5
    assert quarantined(folder) == []


@pytest.mark.parametrize("mask", [0o022, 0o000, 0o077])
def test_only_the_owner_may_enter(folder, mask):
    before = os.umask(mask)
    try:
        write_store(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(FILES, 0o600)


@pytest.mark.parametrize("synchronous", [True, False])
def test_durability_is_passed_on(folder, synchronous):
    handle = open_for_writing(settings_of(folder, synchronous=synchronous))
    flags = handle.environment.flags()
    assert flags["sync"] is synchronous
    assert flags["metasync"] is False
    assert flags["writemap"] is False
    handle.close()


@pytest.mark.parametrize("budget_bytes", [1, 4096, 8 * MIB, 1 << 33])
@pytest.mark.parametrize("largest_bytes", [0, MIB, 1 << 40])
def test_the_map_has_room_for_the_budget_and_the_largest_transactions(budget_bytes, largest_bytes):
    settings = settings_of(None, budget_bytes=budget_bytes, largest_entry_bytes=largest_bytes)
    assert settings.map_bytes % layout.PAGE_BYTES == 0
    room_bytes = settings.map_bytes - budget_bytes - budget_bytes // 4
    assert room_bytes >= 4 * min(largest_bytes, budget_bytes)
    assert room_bytes >= 4 * settings.batch_bytes
    assert room_bytes >= 16 * MIB
    assert 1 <= settings.batch_bytes <= recovery.BATCH_BYTES


# Somebody else has it open


def test_a_second_opener_shares_the_store_and_mends_nothing(folder):
    write_store(folder)
    with (folder / layout.OPENERS_FILE).open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert entries_in(folder) == 5
        (folder / layout.DATA_FILE).write_bytes(b"garbage" * 10_000)
        assert refusal(open_for_writing, settings_of(folder)) == "damaged"
    assert (folder / layout.DATA_FILE).read_bytes() == b"garbage" * 10_000
    assert quarantined(folder) == []


def test_an_open_store_is_locked_shared(folder):
    handle = open_for_writing(settings_of(folder))
    with (folder / layout.OPENERS_FILE).open("r+") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
        handle.close()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_failed_opening_gives_the_lock_back(folder):
    write_foreign(folder)
    refusal(open_for_writing, settings_of(folder))
    with (folder / layout.OPENERS_FILE).open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Length

OPEN_AND_READ = """
import sys
from pathlib import Path
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.errors import RecordError
handle = open_for_writing(OpenSettings(path=Path(sys.argv[1]), budget_bytes=8 << 20,
                                       largest_entry_bytes=1 << 20, synchronous=False))
store = Store(handle.environment, budget_bytes=8 << 20)
served = 0
for number in range(5):
    memory = memoryview(bytearray(300_000))
    name = bytes([number]) * 16
    try:
        record = store.look_up(name)
        if record and store.fill(name, bytes([number]), record.header, [memory]):
            assert memory == bytes([number]) * 300_000
            served += 1
    except (RecordError, __import__("lmdb").Error):
        pass
print("served", served)
"""


@pytest.mark.parametrize("pages", [1, 40, 150])
def test_a_truncated_file_is_padded_and_nothing_wrong_is_served(folder, pages):
    data_file = write_store(folder)
    whole_bytes = data_file.stat().st_size
    os.truncate(data_file, whole_bytes - pages * layout.PAGE_BYTES)
    # In a process of its own: reading past the end of a mapped file would end this one.
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AND_READ, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("served")
    needed_bytes, held_bytes = recovery._needed_and_held_bytes(folder / layout.DATA_FILE)
    assert held_bytes >= needed_bytes


def test_a_reader_refuses_a_truncated_file_and_leaves_it_alone(folder):
    data_file = write_store(folder)
    os.truncate(data_file, data_file.stat().st_size // 2 // 4096 * 4096)
    short_bytes = data_file.stat().st_size
    assert refusal(check_length, folder) == "truncated"
    assert refusal(open_for_reading, folder) == "truncated"
    assert data_file.stat().st_size == short_bytes


def test_a_whole_file_has_the_length_that_it_needs(folder):
    data_file = write_store(folder)
    needed_bytes, held_bytes = recovery._needed_and_held_bytes(data_file)
    assert 0 < needed_bytes <= held_bytes == data_file.stat().st_size
    check_length(folder)


# Garbage


@pytest.mark.parametrize(
    "content",
    [b"x", b"garbage" * 10_000, bytes(8192), bytes(100_000)],
    ids=["one byte", "text", "two empty pages", "zeros"],
)
def test_garbage_is_set_aside_and_a_new_store_begun(folder, content, caplog):
    folder.mkdir()
    (folder / layout.DATA_FILE).write_bytes(content)
    assert entries_in(folder) == 0
    (aside,) = quarantined(folder)
    assert (aside / layout.DATA_FILE).read_bytes() == content
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert "unreadable" in caplog.text
    write_store(folder)
    assert entries_in(folder) == 5


@pytest.mark.parametrize("last_page", [2**63 - 1, 2**40])
def test_a_meta_page_that_claims_more_than_the_map_is_not_believed(folder, last_page):
    data_file = write_store(folder)
    whole_bytes = data_file.stat().st_size
    with data_file.open("r+b") as file:
        for page in range(2):
            file.seek(page * layout.PAGE_BYTES + 16 + 24 + 96)
            file.write(last_page.to_bytes(8, "little"))
    assert recovery._META.unpack_from(data_file.read_bytes())[5] == last_page
    assert entries_in(folder) == 0
    assert len(quarantined(folder)) == 1
    assert data_file.stat().st_size <= whole_bytes


@pytest.mark.parametrize("page", [0, 1])
def test_a_store_without_one_of_its_meta_pages_is_set_aside(folder, page):
    data_file = write_store(folder)
    with data_file.open("r+b") as file:
        file.seek(page * layout.PAGE_BYTES)
        file.write(bytes(layout.PAGE_BYTES))
    assert entries_in(folder) in (0, 5)
    assert len(quarantined(folder)) <= 1


def test_an_empty_file_becomes_a_store(folder):
    folder.mkdir()
    (folder / layout.DATA_FILE).write_bytes(b"")
    assert entries_in(folder) == 0
    assert quarantined(folder) == []


def test_only_the_newest_of_what_was_set_aside_are_kept(folder):
    folder.mkdir()
    for number in range(5):
        (folder / layout.DATA_FILE).write_bytes(b"garbage %d" % number)
        (folder / "lock.mdb").write_bytes(b"lock")
        set_aside(folder, keep=2)
    kept = [(aside / layout.DATA_FILE).read_bytes() for aside in quarantined(folder)]
    assert kept == [b"garbage 3", b"garbage 4"]
    assert not (folder / layout.DATA_FILE).exists()


def test_a_damaged_format_row_is_set_aside(folder):
    write_store(folder)
    write_format_row(folder, b"\xc1")
    assert entries_in(folder) == 0
    assert len(quarantined(folder)) == 1


# Not ours


def write_foreign(folder):
    folder.mkdir()
    with lmdb.open(str(folder), max_dbs=4) as environment:
        database = environment.open_db(b"somebody's")
        with environment.begin(write=True) as transaction:
            transaction.put(b"key", b"value", db=database)
            transaction.put(b"key", b"value")


def test_the_environment_of_another_program_is_refused_and_left_alone(folder):
    write_foreign(folder)
    before = (folder / layout.DATA_FILE).read_bytes()
    assert refusal(open_for_writing, settings_of(folder)) == "not_ours"
    assert refusal(open_for_reading, folder) == "not_ours"
    assert (folder / layout.DATA_FILE).read_bytes() == before
    assert quarantined(folder) == []


@pytest.mark.parametrize("made", [1, 2, 3])
def test_a_store_whose_making_was_interrupted_is_completed(folder, made):
    folder.mkdir()
    with lmdb.open(str(folder), max_dbs=4) as environment:
        for name in layout.DATABASES[:made]:
            environment.open_db(name)
    assert entries_in(folder) == 0


def write_format_row(folder, value):
    with lmdb.open(str(folder), max_dbs=4) as environment:
        meta = environment.open_db(layout.META)
        with environment.begin(write=True) as transaction:
            transaction.put(layout.FORMAT_ROW, value, db=meta)


def test_a_later_format_is_refused_and_left_alone(folder):
    write_store(folder)
    write_format_row(folder, msgpack.packb([2]))
    before = (folder / layout.DATA_FILE).read_bytes()
    assert refusal(open_for_writing, settings_of(folder)) == "future_format"
    assert refusal(open_for_reading, folder) == "future_format"
    assert (folder / layout.DATA_FILE).read_bytes() == before
    assert quarantined(folder) == []


# Reading


def test_a_reader_needs_a_store(folder, tmp_path):
    assert refusal(open_for_reading, folder) == "not_a_store"
    folder.mkdir()
    assert refusal(open_for_reading, folder) == "not_a_store"
    (folder / layout.DATA_FILE).write_bytes(b"garbage" * 1000)
    assert refusal(open_for_reading, folder) == "not_a_store"
    assert [path.name for path in folder.iterdir()] == [layout.DATA_FILE]


def test_a_reader_of_a_live_store_sees_its_last_commit(folder):
    write_store(folder, entries=2)
    environment = open_for_reading(folder)
    reader = Store(environment, budget_bytes=0)
    assert reader.totals().entries == 2
    assert environment.flags()["readonly"]
    environment.close()


# Errors of the system


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert refusal(open_for_writing, settings_of(tmp_path / "file")) == "not_a_folder"
    assert refusal(open_for_writing, settings_of(tmp_path / "file" / "store")) == "not_a_folder"


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, "permission"),
        (errno.EPERM, "permission"),
        (errno.EROFS, "read_only_file_system"),
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EFBIG, "file_size_limit"),
        (errno.EMFILE, "too_many_files"),
        (errno.ENFILE, "too_many_files"),
        (errno.EIO, "io_error"),
        (errno.ENXIO, "io_error"),
    ],
)
def test_errors_of_the_system_say_what_to_do(folder, monkeypatch, number, cause):
    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(recovery.os, "open", fail)
    assert refusal(open_for_writing, settings_of(folder)) == cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (lmdb.VersionMismatchError("v"), "other_lmdb_version"),
        (lmdb.ReadersFullError("r"), "readers_full"),
        (lmdb.MapFullError("m"), "map_full"),
        (lmdb.LockError("l"), "same_process_number"),
        (lmdb.MemoryError("m"), "out_of_memory"),
        (lmdb.Error("store: No space left on device"), "no_space"),
        (lmdb.Error("store: Permission denied"), "permission"),
        (lmdb.Error("something else"), "io_error"),
    ],
)
def test_errors_of_lmdb_say_what_to_do(folder, monkeypatch, error, cause):
    def fail(*arguments, **keywords):
        raise error

    monkeypatch.setattr(recovery.lmdb, "open", fail)
    assert refusal(open_for_writing, settings_of(folder)) == cause
    assert quarantined(folder) == []


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (lmdb.LockError("l"), "lock"),
        (lmdb.CorruptedError("c"), "damaged"),
        (lmdb.PageNotFoundError("p"), "damaged"),
        (lmdb.InvalidError("i"), "damaged"),
        (lmdb.ReadonlyError("r"), "permission"),
        (lmdb.DiskError("d"), "disk"),
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), "no_space"),
        (lmdb.Error("mdb_txn_commit: Input/output error"), "io_error"),
        (lmdb.Error("mdb_txn_commit: Disk quota exceeded"), "no_space"),
        (lmdb.Error("mdb_txn_commit: File too large"), "file_size_limit"),
        (lmdb.PanicError("mdb_txn_begin: MDB_PANIC: Update of meta page failed"), "io_error"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data.mdb"), "no_space"),
        (OSError(errno.ENXIO, os.strerror(errno.ENXIO)), "io_error"),
    ],
)
def test_the_label_of_an_error(error, cause):
    assert cause_of(error) == cause


def test_settings_are_values(folder):
    settings = settings_of(folder)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.budget_bytes = 1


# What the folder states, and what killed its workers


@pytest.mark.parametrize("harm", ["truncated", "garbage", "whole"])
def test_a_later_format_is_left_alone_whatever_its_state(folder, harm):
    """Nothing of a store of a later version may be mended: what it means is not known here."""
    data_file = write_store(folder)
    (folder / "format-version").write_text("2\n")
    content = data_file.read_bytes()
    content = {"truncated": content[:20_000], "garbage": b"x" * 20_000, "whole": content}[harm]
    data_file.write_bytes(content)
    for settings in (settings_of(folder), settings_of(folder, killed_worker=True)):
        assert refusal(open_for_writing, settings) == "future_format"
    assert data_file.read_bytes() == content
    assert quarantined(folder) == []


def test_a_store_that_killed_its_workers_is_set_aside(folder):
    write_store(folder)
    open_for_writing(settings_of(folder, killed_worker=True)).close()
    assert entries_in(folder) == 0
    assert len(quarantined(folder)) == 1


@pytest.mark.parametrize("synchronous", [True, False])
def test_after_a_power_failure_only_a_flushed_store_is_believed(folder, synchronous):
    write_store(folder)
    (folder / "in-use.json").write_text('{"boot_id": "another start"}')
    open_for_writing(settings_of(folder, synchronous=synchronous)).close()
    assert entries_in(folder) == (5 if synchronous else 0)
    assert len(quarantined(folder)) == (0 if synchronous else 1)


def test_the_walk_after_an_unclean_use_is_bounded(folder, monkeypatch, caplog):
    write_store(folder)
    (folder / "in-use.json").write_text("{}")
    monkeypatch.setattr(recovery, "_CHECK_LIMIT_S", -1.0)
    open_for_writing(settings_of(folder)).close()
    assert "too large to be walked" in caplog.text


def test_keys_out_of_order_are_found_wherever_they_are(monkeypatch):
    monkeypatch.setattr(recovery, "_KEYS_A_STEP", 3)
    keys = [bytes([number]) for number in range(1, 9)]

    class Cursor:
        def __init__(self, keys):
            self.keys = keys

        def iternext(self, *, values):
            return iter(self.keys)

    class Transaction:
        def __init__(self, keys):
            self.keys = keys

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def cursor(self, table):
            return Cursor(self.keys)

    class Environment:
        def __init__(self, keys):
            self.keys = keys

        def begin(self, *, buffers):
            return Transaction(self.keys)

        def open_db(self, *_, create):
            return None

    recovery._check_structure(Environment(keys))
    for place in range(7):
        swapped = [*keys]
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        with pytest.raises(lmdb.CorruptedError):
            recovery._check_structure(Environment(swapped))


def test_another_lmdb_is_refused_and_left_alone(folder):
    data_file = write_store(folder)
    with data_file.open("r+b") as file:
        for page in range(2):
            file.seek(page * layout.PAGE_BYTES + 16 + 4)
            file.write((999).to_bytes(4, "little"))
    before = data_file.read_bytes()
    assert refusal(open_for_writing, settings_of(folder)) == "other_lmdb_version"
    assert data_file.read_bytes() == before


def test_one_damaged_version_beside_a_whole_one_is_damage(folder):
    data_file = write_store(folder)
    with data_file.open("r+b") as file:
        file.seek(16 + 4)
        file.write((999).to_bytes(4, "little"))
    assert entries_in(folder) == 0
    assert len(quarantined(folder)) == 1


def test_a_removed_or_replaced_file_is_noticed(folder):
    write_store(folder)
    handle = open_for_writing(settings_of(folder))
    assert handle.is_in_place()
    (folder / "data.mdb").rename(folder / "away.mdb")
    assert not handle.is_in_place()
    (folder / "data.mdb").write_bytes(b"another")
    assert not handle.is_in_place()
    handle.close()
