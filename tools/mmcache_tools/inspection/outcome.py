"""How an inspection command ends: its exit code, and one clear line instead of a traceback.

Owns: exit codes, and the child process that a damaged store may bring down.
Does not own: what the commands do.

LMDB trusts the pages it maps: a damaged one can end the process with SIGBUS, SIGSEGV or SIGABRT
before any Python code could say so. The work is therefore done in a forked child, and the parent
turns such an end into a line on stderr. Where output does not go straight to a file descriptor,
as in a test that captures it, a child could not write it, and the work is done in place.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum

import typer

from tiered_mmcache.errors import ConfigError, RecordError, StoreUnavailableError

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "ExitCode",
    "UsageError",
    "complain",
    "ended",
    "ended_or_explained",
    "ready_for_output",
]

ENVIRONMENT_VARIABLE = "TIERED_MMCACHE_CONFIG"
_SIGNALS_OF_DAMAGE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}
_LOOK_AT_THE_LOG = "Look at the system's log for this file system."
_REMEDY_OF_ERRNO = {
    errno.ENOENT: "Name one that is there.",
    errno.EEXIST: "Name one that is not there yet, or move it away.",
    errno.ENOTDIR: "A file stands where a folder must be: name another place.",
    errno.EISDIR: "Name a file, not a folder.",
    errno.ENAMETOOLONG: "Name one with a shorter name.",
    errno.ELOOP: "Links lead back to themselves: name the place itself.",
    errno.EACCES: "Run this as its owner, or give your user the right to it.",
    errno.EPERM: "Run this as its owner, or give your user the right to it.",
    errno.EROFS: "Name a place that can be written to.",
    errno.ENOSPC: "Free space there, or name another place (TMPDIR for temporary files).",
    errno.EDQUOT: "Raise the quota there, or name another place.",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f).",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the system's limit of open files (fs.file-max).",
    errno.ENOMEM: "Free memory, or raise its limit.",
    errno.EAGAIN: "Raise the limit of processes (ulimit -u), or end some.",
}
_DAMAGE_REMEDY = "Stop the servers that use it and move it away: a new one is begun."


class ExitCode(IntEnum):
    """What a script learns."""

    FINE = 0
    FOUND = 1
    USAGE = 2
    CANNOT_OPEN = 3


class UsageError(Exception):
    """The arguments cannot be followed: the message says what to write instead."""


def ended(work: Callable[[], int]) -> None:
    """Do the work and end the command with its code.

    Raises:
        typer.Exit: Always.
    """
    if _writes_to_descriptors():
        raise typer.Exit(_in_child(work))
    raise typer.Exit(_explained(work))


def complain(line: str) -> None:
    """One line on stderr."""
    print(f"mmcache: {line}", file=sys.stderr)


def _explained(work: Callable[[], int]) -> int:
    import lmdb

    from tiered_mmcache.disk.causes import cause_of

    try:
        return work()
    except UsageError as error:
        complain(str(error))
        return ExitCode.USAGE
    except (ConfigError, StoreUnavailableError) as error:
        complain(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(_what_the_system_says(error))
    except MemoryError:
        complain("memory is used up. Free some, or raise the limit (ulimit -v).")
    except RecordError as error:
        complain(f"the store is damaged: {error}. `mmcache verify` tells more. {_DAMAGE_REMEDY}")
    except lmdb.Error as error:
        cause = cause_of(error)
        complain(f"the store cannot be read on ({cause}): {error}. {_DAMAGE_REMEDY}")
    return ExitCode.CANNOT_OPEN


def _what_the_system_says(error: OSError) -> str:
    """Which file, what is wrong with it, and what to do."""
    what = error.strerror or str(error)
    place = error.filename2 or error.filename
    named = what if place is None else f"{os.fsdecode(place)}: {what}"
    return f"{named}. {_REMEDY_OF_ERRNO.get(error.errno or 0, _LOOK_AT_THE_LOG)}"


def ready_for_output() -> None:
    """Give the process the three standard streams where it was started without.

    Else the first files that are opened get their numbers, and what is meant for a person would
    be written into a store.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the end
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def ended_or_explained(command: Callable[[], object]) -> int | None:
    """Run the command line; an exit code where its own words could not be written.

    Raises:
        SystemExit: As the command line ends by itself.
    """
    try:
        try:
            command()
        finally:
            _flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # nothing of what is left is wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.FINE
    except OSError as error:
        complain(_what_the_system_says(error))
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.CANNOT_OPEN
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return None


def _writes_to_descriptors() -> bool:
    try:
        return sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return False


def _in_child(work: Callable[[], int]) -> int:
    _flush()
    child = os.fork()
    if child == 0:
        os._exit(_child_code(work))
    with _signals_passed_to(child):
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code in _SIGNALS_OF_DAMAGE:
        name = signal.Signals(-code).name
        complain(f"the store is damaged: reading it ended in {name}. {_DAMAGE_REMEDY}")
        return ExitCode.CANNOT_OPEN
    return 128 - code


def _child_code(work: Callable[[], int]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # keys may have what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _explained(work)
        _flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the last words did not fit
            complain(_what_the_system_says(error))
            return ExitCode.CANNOT_OPEN
        return ExitCode.FINE  # whoever reads has seen enough
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001  a forked child must never run on into its caller
        import traceback

        traceback.print_exc()
        return ExitCode.CANNOT_OPEN
    return code


@contextlib.contextmanager
def _signals_passed_to(child: int) -> Iterator[None]:
    """Ctrl-C reaches the child by itself; what was sent to this process alone is passed on."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate = signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
