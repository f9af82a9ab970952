"""Starting the spill worker as a process of its own.

Owns: the command line, which descriptors are inherited, and the end of the process.
Does not own: what is said to it (:mod:`.client`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tiered_mmcache.disk.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


# LMDB takes and frees 256 KiB for every chunk of a transaction. By default glibc gives such memory
# back to the system each time, and the page faults that follow cost more than the write (measured:
# 8 MB take 6.0 ms with them, 2.3 ms without). The most that is kept is one transaction's worth.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
}


class WorkerProcess(Protocol):
    """A running worker and this process's end of its socket."""

    connection: socket.socket

    @property
    def pid(self) -> int:
        """The process number."""

    def kill(self) -> None:
        """End it at once, whatever it is doing; safe to call twice."""

    @property
    def exit_signal(self) -> int | None:
        """The signal that it died of, once it was reaped; None when it ended by itself."""

    def reap(self, timeout_s: float) -> bool:
        """Collect its exit status; False when it is still running after ``timeout_s``."""


class SubprocessWorker:
    """The real worker: a Python without ``site`` that imports what this process can import."""

    def __init__(self, arena_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection = ours
        with theirs:
            inherited = (theirs.fileno(), arena_fd)
            try:
                self._process = subprocess.Popen(
                    worker_command(*inherited),
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={**os.environ, **_KEEP_FREED_MEMORY},
                    start_new_session=True,  # the server's Ctrl-C is not the worker's
                )
            except BaseException:
                ours.close()
                raise

    @property
    def pid(self) -> int:
        """See :class:`WorkerProcess`."""
        return self._process.pid

    def kill(self) -> None:
        """See :class:`WorkerProcess`."""
        self._process.send_signal(signal.SIGKILL)

    @property
    def exit_signal(self) -> int | None:
        """See :class:`WorkerProcess`."""
        status = self._process.returncode
        return None if status is None or status >= 0 else -status

    def reap(self, timeout_s: float) -> bool:
        """See :class:`WorkerProcess`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def worker_command(connection_fd: int, arena_fd: int) -> list[str]:
    """The command line of a worker that inherits these descriptors."""
    package_root = str(Path(__file__).resolve().parents[2])
    search_path = [entry for entry in sys.path if entry] + [package_root]
    numbers = [str(connection_fd), str(arena_fd)]
    return [sys.executable, "-S", "-E", "-c", _BOOT, json.dumps(search_path), *numbers]
