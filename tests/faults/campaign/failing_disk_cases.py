"""What can happen to the disk below a store: it refuses writes, cannot be read, or hangs.

Owns: these faults, on an ext4 file system whose device fails for real. Does not own: faults of the
files (store_cases.py), or trying them (store_faults.py).
"""

import os
import signal

from tiered_mmcache.disk import layout

from . import mounts
from .store_cases import SIZE, Case
from .subject import SubprocessWorker, await_that, ready_worker, result, worker_pid


class _OnADisk(Case):
    """The store lies on a disk of its own."""

    def __init__(self, folder):
        super().__init__(folder)
        self.disk = mounts.FailingDisk(folder / "image", folder / "disk")
        self.store = folder / "disk" / "store"

    @classmethod
    def why_not(cls):
        return mounts.why_no_failing_disk()

    def end(self):
        self.disk.find_sectors()

    def close(self):
        self.disk.close()


class RefusedWrites(_OnADisk):
    """EIO: what is written does not reach the disk."""

    causes = ("io_error",)
    while_open = True
    options = {"durability": "ordered"}  # noqa: RUF012 - never changed

    def begin(self):
        self.disk.lose_sectors()


class UnreadableFile(_OnADisk):
    """EIO: the file cannot be read when the store is opened."""

    causes = ("io_error",)

    def begin(self):
        self.make_store()
        self.disk.forget_cached(self.store / layout.DATA_FILE)
        self.disk.lose_sectors()


class UnreadablePages(_OnADisk):
    """Mapped pages cannot be read: the kernel sends SIGBUS to the worker."""

    causes = ("died",)
    while_open = True

    def __init__(self, folder):
        super().__init__(folder)
        self._workers = []
        self.launcher = self._launch

    def begin(self):
        for key in range(40):
            self.cache.set(key, result(key, 0, SIZE))
        ready_worker(self.cache)
        starts = len(self._workers)
        self._workers[-1].kill()  # what it has mapped would stay in the page cache
        self._workers[-1].reap(10.0)
        self.disk.forget_cached(self.store / layout.DATA_FILE)
        await_that(lambda: self.cache.drain(0.1) and len(self._workers) > starts)
        ready_worker(self.cache)
        self.disk.lose_sectors()

    def end(self):
        signals = [worker.exit_signal for worker in self._workers]
        assert signal.SIGBUS in signals, f"no worker died of SIGBUS: {signals}"
        super().end()

    def _launch(self, arena_fd):
        self._workers.append(SubprocessWorker(arena_fd))
        return self._workers[-1]


class HungDisk(_OnADisk):
    """Writes neither succeed nor fail, and a worker that waits for one cannot even be killed."""

    causes = ("disk_hangs",)
    while_open = True
    options = {"durability": "ordered", "read_timeout": "0.3s"}  # noqa: RUF012 - never changed

    def begin(self):
        self._pid = worker_pid(self.cache)
        self.disk.hang()

    def end(self):
        os.kill(self._pid, 0)  # it is still there, although it was killed
        assert worker_pid(self.cache) is None, "another worker was started beside it"
        self.disk.go_on()


CASES = [RefusedWrites, UnreadableFile, UnreadablePages, HungDisk]
