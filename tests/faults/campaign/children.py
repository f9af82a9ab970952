"""Servers as child processes, whose end is noticed and counted."""

import multiprocessing
import os
import resource
import select
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

_CONTEXT = multiprocessing.get_context("fork")


class ChildFailedError(Exception):
    """The child died, raised, or did not answer in time."""


class Child:
    """A function that runs in a process of its own and talks over a connection.

    Args:
        serve: Called with the child's end of the connection and the arguments.
        stderr: The file that takes what the child and its workers log.
    """

    def __init__(self, serve, *arguments, stderr):
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_be_child, args=(theirs, self.connection, serve, arguments, stderr)
        )
        self.process.start()
        theirs.close()

    def ask(self, message, timeout_s=120.0):
        """Send a message and return the answer."""
        self.tell(message)
        return self.answer(timeout_s)

    def tell(self, message):
        """Send a message."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise ChildFailedError(f"it ended: {error}") from None

    def answer(self, timeout_s=120.0):
        """The next message of the child.

        Raises:
            ChildFailedError: There is none; the child is gone afterwards.
        """
        ready = wait([self.connection, self.process.sentinel], timeout_s)
        if self.connection in ready:
            try:
                kind, value = self.connection.recv()
            except EOFError:
                pass
            else:
                if kind == "answer":
                    return value
                self.kill()
                raise ChildFailedError(value)
        if not ready:
            self.kill()
            raise ChildFailedError(f"no answer within {timeout_s} s")
        self.process.join()
        raise ChildFailedError(f"it ended with status {self.process.exitcode}")

    def kill(self):
        """End it at once, and wait for its end."""
        self.process.kill()
        self.process.join()

    def end(self, timeout_s=60.0):
        """Tell it to end; True when it does, and cleanly."""
        try:
            self.tell(None)
        except ChildFailedError:
            return False
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
        return self.process.exitcode == 0


class Answering:
    """The child's end: what it sends is an answer."""

    def __init__(self, connection):
        self._connection = connection

    def send(self, value):
        self._connection.send(("answer", value))

    def recv(self):
        return self._connection.recv()

    def ready(self):
        """Whether a message waits."""
        return self._connection.poll()

    def __iter__(self):
        """The messages until the one that ends the child."""
        return iter(self._connection.recv, None)


def _be_child(connection, other_end, serve, arguments, stderr):
    other_end.close()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    try:
        serve(Answering(connection), *arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, it is told
        connection.send(("error", traceback.format_exc()))
        os._exit(1)


class Watched:
    """A process that is not our child: when did it end?"""

    def __init__(self, pid):
        self._fd = os.pidfd_open(pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)

    def gone_after_s(self, limit_s):
        """Seconds until it ended; the limit when it did not."""
        began_s = time.monotonic()
        select.select([self._fd], [], [], limit_s)
        return time.monotonic() - began_s


def last_lines(file, count=30):
    """The end of a log, for a failure's report."""
    path = Path(file)
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-count:])
