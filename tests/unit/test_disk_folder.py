"""The store's folder: owner, rights, file system, process numbers and the note of use."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiered_mmcache.disk import folder as folder_module
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.folder import (
    FORMAT_FILE,
    IN_USE_FILE,
    LAST_CLOSE_FILE,
    Openers,
    declare_format,
    declared_format,
    file_stays,
    file_system_of,
    last_clean_close_s,
    last_use_was_clean,
    machine_restarted_since_last_use,
    note_use,
    prepare,
)
from tiered_mmcache.errors import StoreUnavailableError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "store"
    prepare(path, allow_network=False)
    return path


def refusal(path, **options):
    with pytest.raises(StoreUnavailableError) as caught:
        prepare(path, allow_network=False, **options)
    assert caught.value.remedy
    return caught.value.cause


def rights(path):
    return stat.S_IMODE(path.stat().st_mode)


# Owner and rights


def test_a_folder_is_made_for_its_owner_alone(folder):
    assert rights(folder) == 0o700


def test_an_empty_folder_that_others_may_read_is_narrowed(tmp_path, caplog):
    path = tmp_path / "store"
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    prepare(path, allow_network=False)
    assert rights(path) == 0o700
    assert "0700" in caplog.text


def test_a_wide_folder_with_other_things_is_refused_and_left_alone(tmp_path):
    """Such as /tmp: taking its rights back would harm everybody else."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o777)
    (path / "somebody's").write_text("file")
    assert refusal(path) == "shared_folder"
    assert rights(path) == 0o777


def test_files_that_others_may_read_are_narrowed(folder):
    (folder / "data.mdb").write_bytes(b"")
    (folder / "data.mdb").chmod(0o644)
    prepare(folder, allow_network=False)
    assert rights(folder / "data.mdb") == 0o600


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "openers.lock", IN_USE_FILE, FORMAT_FILE])
def test_a_link_in_place_of_a_file_is_refused(folder, tmp_path, name):
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    (folder / name).symlink_to(target)
    assert refusal(folder) == "not_our_file"
    assert target.read_text() == "precious"


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: os.getuid() + 1)
    assert refusal(folder) == "another_owner"


def test_a_file_of_another_user_in_our_folder_is_refused(folder):
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    (folder / "data.mdb").write_bytes(b"")
    os.chown(folder / "data.mdb", 65534, 65534)
    assert refusal(folder) == "not_our_file"
    assert (folder / "data.mdb").stat().st_uid == 65534


# File systems


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused_unless_allowed(folder, tmp_path, monkeypatch, kind):
    device = folder.stat().st_dev
    mounts = tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"36 35 {number} / / rw - {kind} server:/export rw\n")
    monkeypatch.setattr(folder_module, "_MOUNTS_FILE", mounts)
    assert file_system_of(folder) == kind
    assert refusal(folder) == "network_file_system"
    prepare(folder, allow_network=True)


def test_the_file_system_is_found_in_the_real_table(folder):
    assert file_system_of(folder) not in {"", *folder_module._NETWORK_FILE_SYSTEMS}


def test_without_the_table_the_file_system_is_unknown(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_MOUNTS_FILE", tmp_path / "missing")
    assert file_system_of(folder) == ""
    prepare(folder, allow_network=False)


def test_overlay_is_allowed_with_a_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(folder_module, "file_system_of", lambda folder: "overlay")
    prepare(folder, allow_network=False)
    assert "overlayfs" in caplog.text


# Openers


def test_the_first_opener_is_alone_and_the_second_is_not(folder):
    first = Openers(folder)
    assert first.sole
    first.share()
    script = (
        "import sys; from pathlib import Path; from tiered_mmcache.disk.folder import Openers; "
        "print(Openers(Path(sys.argv[1])).sole)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
    first.close(cleanly=True)


def test_a_second_process_with_the_same_number_is_refused(folder):
    """As in two containers: here the same process opens it twice."""
    first = Openers(folder)
    with pytest.raises(StoreUnavailableError) as caught:
        Openers(folder)
    assert caught.value.cause == "same_process_number"
    first.close(cleanly=True)
    Openers(folder).close(cleanly=True)


def test_a_failed_opening_leaks_no_descriptor(folder):
    first = Openers(folder)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StoreUnavailableError):
        Openers(folder)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    first.close(cleanly=True)


# The note of use


def test_the_note_stays_when_the_use_did_not_end_with_a_close(folder):
    openers = Openers(folder)
    note_use(folder)
    assert not last_use_was_clean(folder)
    openers.close(cleanly=False)
    assert not last_use_was_clean(folder)
    assert not machine_restarted_since_last_use(folder)


def test_the_last_one_out_takes_the_note_away(folder):
    openers = Openers(folder)
    note_use(folder)
    openers.share()
    with (folder / "openers.lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        openers.close(cleanly=True)
        assert not last_use_was_clean(folder)
    openers = Openers(folder)
    openers.close(cleanly=True)
    assert last_use_was_clean(folder)
    assert not machine_restarted_since_last_use(folder)


def test_a_note_of_an_earlier_start_of_the_machine(folder, tmp_path, monkeypatch):
    note_use(folder)
    other = tmp_path / "boot_id"
    other.write_text("another start\n")
    monkeypatch.setattr(folder_module, "_BOOT_ID_FILE", other)
    assert machine_restarted_since_last_use(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"boot_id": 7})])
def test_a_damaged_note_means_the_worst(folder, text):
    (folder / IN_USE_FILE).write_text(text)
    assert machine_restarted_since_last_use(folder)


def test_a_clean_close_by_the_last_one_is_noted(folder):
    assert last_clean_close_s(folder) is None
    one = Openers(folder)
    one.share()
    with (folder / layout.OPENERS_FILE).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        one.close(cleanly=True)
    assert last_clean_close_s(folder) is None
    began_s = time.time()
    Openers(folder).close(cleanly=True)
    assert began_s <= last_clean_close_s(folder) <= time.time()


def test_another_end_is_no_clean_close(folder):
    Openers(folder).close(cleanly=False)
    assert last_clean_close_s(folder) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        *(f'{{"closed_s": {value}}}' for value in ('"now"', "NaN", "1e999", "1" + "0" * 400)),
    ],
    ids=range(9),
)
def test_a_damaged_note_of_a_close_says_nothing(folder, text):
    (folder / LAST_CLOSE_FILE).write_text(text)
    assert last_clean_close_s(folder) is None


def test_a_note_that_cannot_be_read_now_says_nothing(folder, monkeypatch):
    note_use(folder)

    def refuse(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        machine_restarted_since_last_use(folder)


def test_without_a_boot_id_there_is_still_a_note(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_BOOT_ID_FILE", tmp_path / "missing")
    note_use(folder)
    assert not machine_restarted_since_last_use(folder)


# The stated format


def test_the_format_is_stated_once(folder):
    assert declared_format(folder) == 0
    declare_format(folder, 1)
    assert declared_format(folder) == 1
    before = (folder / FORMAT_FILE).stat().st_mtime_ns
    declare_format(folder, 1)
    assert (folder / FORMAT_FILE).stat().st_mtime_ns == before


def test_a_damaged_statement_states_nothing(folder):
    (folder / FORMAT_FILE).write_bytes(b"\xff" * 100)
    assert declared_format(folder) == 0


def test_a_statement_that_cannot_be_read_now_states_nothing_either_way(folder, monkeypatch):
    """Else a store of a later version might be set aside because of too many open files."""
    declare_format(folder, 2)

    def refuse(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        declared_format(folder)


@pytest.mark.parametrize(
    ("replacing", "wanted", "refused"),
    [
        (False, fcntl.F_RDLCK, False),
        (False, fcntl.F_WRLCK, True),
        (True, fcntl.F_RDLCK, True),
        (True, fcntl.F_WRLCK, True),
    ],
)
def test_readers_share_the_moment_of_opening_and_a_replacement_has_it_alone(
    tmp_path, replacing, wanted, refused
):
    openers = Openers(tmp_path)
    other = os.open(tmp_path / "openers.lock", os.O_RDWR)
    lock = folder_module._FLOCK.pack(wanted, os.SEEK_SET, 0, 1, 0)
    try:
        with file_stays(tmp_path, replacing=replacing):
            if refused:
                with pytest.raises(BlockingIOError):
                    fcntl.fcntl(other, folder_module._F_OFD_SETLK, lock)
            else:
                fcntl.fcntl(other, folder_module._F_OFD_SETLK, lock)
        fcntl.fcntl(other, folder_module._F_OFD_SETLK, lock)  # free again
    finally:
        os.close(other)
        openers.close(cleanly=True)


def test_a_folder_that_was_never_opened_for_writing_is_read_without_a_lock(tmp_path):
    with file_stays(tmp_path):
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError), file_stays(tmp_path, replacing=True):
        pass
