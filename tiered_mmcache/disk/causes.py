"""Causes: what the system and LMDB raise, as short labels that are counted, with remedies.

Owns: the labels. Does not own: what is done about them. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tiered_mmcache.errors import StoreUnavailableError


class ForeignFileError(Exception):
    """Neither meta page looks like LMDB's."""


_LOOK_AT_THE_LOG = "Look at the system's log for this file system."
_CAUSE_OF_ERRNO = {
    errno.EACCES: ("permission", "Give the server's user the right to read and write it."),
    errno.EPERM: ("permission", "Give the server's user the right to read and write it."),
    errno.EROFS: ("read_only_file_system", "Set disk.path to a writable file system."),
    errno.ENOSPC: ("no_space", "Free space on that file system, or lower disk.max_size."),
    errno.EDQUOT: ("no_space", "Raise the quota on that file system, or lower disk.max_size."),
    errno.EFBIG: ("file_size_limit", "Raise the limit of a file's size (ulimit -f)."),
    errno.ENOENT: ("io_error", "Set disk.path to a place that is there and can be written to."),
    errno.EISDIR: ("io_error", "Move the folder away that has the name of one of the files."),
    errno.EIO: ("io_error", _LOOK_AT_THE_LOG),
    errno.EMFILE: ("too_many_files", "Raise the limit of open files (ulimit -n)."),
    errno.ENFILE: ("too_many_files", "Raise the system's limit of open files (fs.file-max)."),
    errno.ENOTDIR: ("not_a_folder", "Set disk.path to a folder."),
    errno.EEXIST: ("not_a_folder", "Set disk.path to a folder."),
    errno.ENOMEM: ("out_of_memory", "Free memory, or raise its limit (ulimit -v)."),
}


@contextlib.contextmanager
def as_unavailable(folder: Path) -> Iterator[None]:
    """Turn what the system or LMDB raises into a cause and a remedy.

    Raises:
        StoreUnavailableError: Something was raised inside.
    """
    try:
        yield
    except OSError as error:
        cause, remedy = _CAUSE_OF_ERRNO.get(error.errno or 0, ("io_error", _LOOK_AT_THE_LOG))
        raise _unavailable(folder, cause, _told(error, folder), remedy) from error
    except lmdb.LockError as error:  # LMDB locks the number of each process that reads
        raise same_process_number(folder) from error
    except lmdb.VersionMismatchError as error:
        remedy = "Set disk.path to another folder: this one belongs to another LMDB version."
        raise _unavailable(folder, "other_lmdb_version", str(error), remedy) from error
    except ForeignFileError as error:
        remedy = "Set disk.path to another folder, or move the file away."
        raise _unavailable(folder, "not_a_store", f"{error} is not LMDB's", remedy) from error
    except lmdb.Error as error:
        cause = cause_of(error)
        remedy = _remedy_of(error) or "Move the folder away, or restart every server that uses it."
        problem = str(error).removeprefix(f"{folder}: ")  # it is named before anyway
        raise _unavailable(folder, cause, problem, remedy) from error


def _remedy_of(error: lmdb.Error) -> str | None:
    """What helps against the system's error that LMDB passes on as a text."""
    text = str(error)
    remedies = (
        remedy for number, (_, remedy) in _CAUSE_OF_ERRNO.items() if os.strerror(number) in text
    )
    return next(remedies, None)


def _told(error: OSError, folder: Path) -> str:
    """What the system says, and of which file where that is not the folder."""
    if error.strerror is None or error.filename is None:
        return error.strerror or str(error)
    name = os.fsdecode(error.filename)
    return error.strerror if name == str(folder) else f"{error.strerror} ({name})"


def same_process_number(folder: Path) -> StoreUnavailableError:
    """The refusal of a process whose number another one that has the store open has, too.

    LMDB tells its readers apart by these numbers, so one would give away the slot of the other.
    """
    return _unavailable(
        folder,
        "same_process_number",
        f"another process with number {os.getpid()} has the store open",
        "Two containers share it. The next process has another number; if this goes on, run both "
        "in one pid namespace, or give each a store of its own.",
    )


def _unavailable(folder: Path, cause: str, problem: str, remedy: str) -> StoreUnavailableError:
    return StoreUnavailableError(path=str(folder), cause=cause, problem=problem, remedy=remedy)


_CAUSE_OF_LMDB_ERROR: list[tuple[type[lmdb.Error], str]] = [
    (lmdb.MapFullError, "map_full"),
    (lmdb.DiskError, "disk"),
    (lmdb.ReadersFullError, "readers_full"),
    (lmdb.CorruptedError, "damaged"),
    (lmdb.PageNotFoundError, "damaged"),
    (lmdb.InvalidError, "damaged"),
    (lmdb.BadTxnError, "damaged"),  # a reader's, in which a page could not be read before
    (lmdb.ReadonlyError, "permission"),
    (lmdb.LockError, "lock"),
    (lmdb.MemoryError, "out_of_memory"),
]


def cause_of(error: lmdb.Error | OSError) -> str:
    """A short, stable label for an error of LMDB or the system."""
    text = str(error)  # first, since LMDB's DiskError is a full disk as often as a broken one
    for number, (cause, _) in _CAUSE_OF_ERRNO.items():
        if os.strerror(number) in text:
            return cause
    for error_class, cause in _CAUSE_OF_LMDB_ERROR:
        if isinstance(error, error_class):
            return cause
    return "io_error"
