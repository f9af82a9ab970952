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
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum

import typer

from tiered_mmcache.errors import ConfigError, RecordError, StoreUnavailableError

__all__ = ["ENVIRONMENT_VARIABLE", "ExitCode", "UsageError", "complain", "ended"]

ENVIRONMENT_VARIABLE = "TIERED_MMCACHE_CONFIG"
_SIGNALS_OF_DAMAGE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}
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
        complain(f"{error}.")
    except RecordError as error:
        complain(f"the store is damaged: {error}. `mmcache verify` tells more. {_DAMAGE_REMEDY}")
    except lmdb.Error as error:
        cause = cause_of(error)
        complain(f"the store cannot be read on ({cause}): {error}. {_DAMAGE_REMEDY}")
    return ExitCode.CANNOT_OPEN


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
    except BrokenPipeError:
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
