"""The store's folder: whose it is, on what it lies, and who has the store open.

Owns: rights and owner, the kind of file system, the lock of the openers, and the notes that say
that the store is in use, and when it was last closed.
Does not own: what LMDB finds in the files (:mod:`.recovery`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.causes import same_process_number
from tiered_mmcache.errors import StoreUnavailableError
from tiered_mmcache.metrics.remedies import log_fields

IN_USE_FILE = "in-use.json"
LAST_CLOSE_FILE = "last-close.json"
FORMAT_FILE = "format-version"
_OURS = (
    layout.DATA_FILE,
    layout.OPENERS_FILE,
    "lock.mdb",
    IN_USE_FILE,
    LAST_CLOSE_FILE,
    FORMAT_FILE,
)
COMPACTING = ".compact-"  # what the folder of a half-made compact copy begins with
_OUR_FOLDERS = (".quarantine-", COMPACTING)
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs"}
    | {"gpfs", "orangefs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"}
)
_MOUNTS_FILE = Path("/proc/self/mountinfo")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_F_OFD_SETLK = 37  # linux/fcntl.h; the fcntl module does not name it before Python 3.13
_F_OFD_SETLKW = 38
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_REPLACING_BYTE = 0
_FIRST_PID_BYTE = 1024
_OPEN_TO_OTHERS = log_fields("permission", "Find out who else could read what is stored here.")

log = logging.getLogger("tiered_mmcache")


def prepare(folder: Path, *, allow_network: bool) -> None:
    """Make the folder, or check that it is fit to be a store's and nobody else's.

    Rights that are too wide are taken back where the folder is ours; everything else is refused.

    Raises:
        StoreUnavailableError: It must not be used.
        OSError: It cannot be made or looked at.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not allow_network:
        refuse_network_file_system(folder)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise _refusal(
            folder,
            "another_owner",
            f"the folder belongs to user {found.st_uid}, this process is user {os.geteuid()}",
            "Give it to the server's user (chown), or set disk.path to another folder.",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        _narrow(folder)
    for name in _OURS:
        _check_file(folder / name)


def refuse_network_file_system(folder: Path) -> None:
    """Refuse a file system on which LMDB's shared memory and locks do not work.

    Raises:
        StoreUnavailableError: It is one.
    """
    kind = file_system_of(folder)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise _refusal(
            folder,
            "network_file_system",
            f"the folder lies on {kind}, where LMDB's locks and maps do not hold",
            "Set disk.path to a local disk. If only one machine ever opens it and you accept "
            "damage, set disk.allow_network_file_system: true.",
        )
    if kind == "overlay":
        fields = log_fields("overlayfs", "Set disk.path to a folder on a volume.")
        log.warning(
            "%s lies on overlayfs: put the store on a volume for speed", folder, extra=fields
        )


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder lies on, such as ``ext4``; empty when unknown."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    with contextlib.suppress(OSError):
        for line in _MOUNTS_FILE.read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[2] == number and "-" in fields:
                kind = fields[fields.index("-") + 1]
    return kind


class Openers:
    """The lock that tells how many processes have the store open.

    Attributes:
        sole: Whether this process was alone when it opened the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(folder / layout.OPENERS_FILE, flags, 0o600)
        try:
            self._claim_pid()
            self.sole = self._try_alone()
            if not self.sole:
                fcntl.flock(self._fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(self._fd)
            raise

    def share(self) -> None:
        """Let others open the store too."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self, *, cleanly: bool) -> None:
        """Give the lock back; the last one out who closes cleanly takes the note away."""
        if cleanly and self._try_alone():
            with contextlib.suppress(OSError):
                (self._folder / IN_USE_FILE).unlink(missing_ok=True)
                _write(self._folder / LAST_CLOSE_FILE, json.dumps({"closed_s": time.time()}))
        os.close(self._fd)

    def _try_alone(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _claim_pid(self) -> None:
        """LMDB tells processes apart by their number, which two containers may both use."""
        claim = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_PID_BYTE + os.getpid(), 1, 0)
        try:
            fcntl.fcntl(self._fd, _F_OFD_SETLK, claim)
        except BlockingIOError:
            raise same_process_number(self._folder) from None


@contextlib.contextmanager
def file_stays(folder: Path, *, replacing: bool = False) -> Iterator[None]:
    """Keep LMDB's two files a pair while a reader opens them, or while one replaces them.

    LMDB opens the data file and then the lock file. Were they replaced in between, the lock file
    would tell the next writer the transaction number of another data file.
    """
    flags = (os.O_RDWR if replacing else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(folder / layout.OPENERS_FILE, flags)
    except OSError:
        if replacing:
            raise
        yield  # nobody could replace them either: never opened for writing, or not ours to lock
        return
    try:
        kind = fcntl.F_WRLCK if replacing else fcntl.F_RDLCK
        lock = _FLOCK.pack(kind, os.SEEK_SET, _REPLACING_BYTE, 1, 0)
        fcntl.fcntl(fd, _F_OFD_SETLKW, lock)
        yield
    finally:
        os.close(fd)


def last_use_was_clean(folder: Path) -> bool:
    """Whether nobody left the store without closing it."""
    return not (folder / IN_USE_FILE).exists()


def last_clean_close_s(folder: Path) -> float | None:
    """When the store was last closed by the last one who had it open, in seconds since 1970.

    None when it never was, or this cannot be read.
    """
    try:
        note = json.loads((folder / LAST_CLOSE_FILE).read_text(encoding="utf-8"))
        closed_s = float(note["closed_s"])
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return closed_s if math.isfinite(closed_s) else None


def machine_restarted_since_last_use(folder: Path) -> bool:
    """Whether the note of the last use was made before the machine's last start.

    Raises:
        OSError: The note cannot be read now, as with too many open files: nothing is known.
    """
    try:
        note = json.loads((folder / IN_USE_FILE).read_text(encoding="utf-8"))
        return bool(note["boot_id"] != _boot_id())
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # the note itself is damaged: assume the worst


def note_use(folder: Path) -> None:
    """Write the note that the store is in use, since this start of the machine."""
    _write(folder / IN_USE_FILE, json.dumps({"boot_id": _boot_id(), "pid": os.getpid()}))


def declared_format(folder: Path) -> int:
    """The format version that the folder states; 0 when it states none.

    It is a file of its own so that a store of a later version can be told, and left alone, before
    anything of it is opened or mended.

    Raises:
        OSError: It cannot be read now, as with too many open files: nothing is known.
    """
    try:
        return int((folder / FORMAT_FILE).read_bytes()[:16])
    except (FileNotFoundError, ValueError):
        return 0


def declare_format(folder: Path, version: int) -> None:
    """State the format version."""
    if declared_format(folder) != version:
        _write(folder / FORMAT_FILE, f"{version}\n")


def _write(file: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(file, flags, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _boot_id() -> str:
    try:
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _narrow(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()}
    foreign = {name for name in names if name not in _OURS and not name.startswith(_OUR_FOLDERS)}
    if foreign:
        raise _refusal(
            folder,
            "shared_folder",
            f"others can read the folder, and it holds other things, such as {min(foreign)}",
            "Set disk.path to a folder of its own.",
        )
    folder.chmod(0o700)
    log.warning("%s was open to others; its rights are 0700 now", folder, extra=_OPEN_TO_OTHERS)


def _check_file(file: Path) -> None:
    try:
        found = file.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _refusal(
            file.parent,
            "not_our_file",
            f"{file.name} is no plain file of this user",
            "Move it away, or set disk.path to another folder.",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        file.chmod(0o600)
        log.warning("%s was open to others; its rights are 0600 now", file, extra=_OPEN_TO_OTHERS)


def _refusal(folder: Path, cause: str, problem: str, remedy: str) -> StoreUnavailableError:
    return StoreUnavailableError(path=str(folder), cause=cause, problem=problem, remedy=remedy)
