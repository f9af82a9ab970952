"""What can happen to a store from outside: how each fault begins, what it counts, how it ends.

Owns: the faults of the folder, its files and its neighbours. Does not own: faults of the disk below
(failing_disk_cases.py), or trying them (store_faults.py).
"""

import contextlib
import functools
import os
import resource
import shutil
import struct
import tempfile
from pathlib import Path

import lmdb

from tiered_mmcache.disk import folder as folder_module
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.changes import ChangeWriter

from . import mounts
from .subject import (
    MIB,
    ForkedWorker,
    SubprocessWorker,
    await_that,
    configuration,
    open_cache,
    result,
    worker_pid,
)

SIZE = 50_000
_NOBODY = 65534
_IS_ROOT = os.geteuid() == 0


class Case:
    """What one fault needs: a folder, how it begins, how it ends.

    Attributes:
        causes: One of these has to be counted.
        while_open: The fault begins when the store is open and holds entries.
        options: Of the section ``disk``.
        cache: The cache on the store, from when it is made.
    """

    causes: tuple = ()
    while_open = False
    options: dict = {}  # noqa: RUF012 - never changed
    launcher = SubprocessWorker
    cache = None

    def __init__(self, folder):
        self.folder = folder
        self.store = folder / "store"

    @classmethod
    def why_not(cls):
        """Why it cannot be tried here, if it cannot."""
        return ""

    def begin(self):
        """Let the fault begin."""

    def end(self):
        """Let it be gone."""

    def close(self):
        """Leave nothing behind."""

    def make_store(self):
        """A store with one entry, at rest."""
        with open_cache(configuration(self.store, **self.options)) as cache:
            cache.set(0, result(0, 0, SIZE))


class NoRight(Case):
    """EACCES: the worker's user may not enter the folder. Root may, so its worker is nobody's."""

    causes = ("permission",)

    def __init__(self, folder):
        super().__init__(folder)
        if _IS_ROOT:
            self.launcher = functools.partial(ForkedWorker, first=_become_nobody)

    def begin(self):
        if _IS_ROOT:
            for parent in self.folder.parents[:2]:
                parent.chmod(0o711)
        self.folder.chmod(0o700 if _IS_ROOT else 0)

    def end(self):
        self.folder.chmod(0o700)
        if _IS_ROOT:
            os.chown(self.folder, _NOBODY, _NOBODY)


def _become_nobody():
    with tempfile.TemporaryDirectory() as folder:
        lmdb.open(folder).close()  # imports the rest of lmdb, which nobody may be unable to read
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


class AnothersFolder(Case):
    """The folder belongs to another user."""

    causes = ("another_owner",)

    @classmethod
    def why_not(cls):
        return "" if _IS_ROOT else "changing owners needs root"

    def begin(self):
        self.store.mkdir()
        os.chown(self.store, _NOBODY, _NOBODY)

    def end(self):
        os.chown(self.store, os.geteuid(), -1)


class ReadOnly(Case):
    """EROFS: the file system is read-only."""

    causes = ("read_only_file_system",)

    def __init__(self, folder):
        super().__init__(folder)
        self._mounted = contextlib.ExitStack()

    @classmethod
    def why_not(cls):
        return mounts.why_not()

    def begin(self):
        self._mounted.enter_context(mounts.tmpfs(self.folder, 64 * MIB))
        mounts.make_read_only(self.folder, read_only=True)

    def end(self):
        mounts.make_read_only(self.folder, read_only=False)

    def close(self):
        self._mounted.close()


class NotAFolder(Case):
    """ENOTDIR: a file lies where the folder should be."""

    causes = ("not_a_folder",)

    def __init__(self, folder):
        super().__init__(folder)
        self.store = folder / "file" / "store"

    def begin(self):
        (self.folder / "file").write_text("in the way")

    def end(self):
        (self.folder / "file").unlink()


class LostFolder(Case):
    """The folder is removed, and a file put in its place, while the store is open."""

    causes = ("not_a_folder",)
    while_open = True

    def begin(self):
        shutil.rmtree(self.store)
        self.store.write_text("in the way")

    def end(self):
        self.store.unlink()


class ReplacedFile(Case):
    """Somebody puts another file under the store's name while it is open: not LMDB's at all."""

    causes = ("died",)
    while_open = True

    def begin(self):
        other = self.folder / "other"
        other.write_bytes(b"something else" * 10_000)
        other.chmod(0o600)
        other.rename(self.store / layout.DATA_FILE)


class OtherLmdb(Case):
    """The file is of another LMDB version."""

    causes = ("other_lmdb_version",)

    def begin(self):
        self.make_store()
        self._write_version(999)

    def end(self):
        self._write_version(1)

    def _write_version(self, version):
        with (self.store / layout.DATA_FILE).open("r+b") as file:
            for page in (0, 1):
                file.seek(page * layout.PAGE_BYTES + 16 + 4)  # mdb.c: mm_version
                file.write(struct.pack("<I", version))


class DeadProcess(Case):
    """Another server's worker is killed within a write transaction, and leaves its lock."""

    while_open = True

    def begin(self):
        config = configuration(self.store, hot=2 * SIZE, write="through")
        launcher = functools.partial(ForkedWorker, first=_die_writing)
        with open_cache(config, launcher) as cache:
            cache.set(1, result(1, 0, SIZE))
            await_that(lambda: cache.drain(0.0) or cache.stats().faults.get("died"))
            assert cache.stats().faults.get("died"), "it did not die"


def _die_writing():
    ChangeWriter.finish = lambda _: os.kill(os.getpid(), 9)


class TooManyFiles(Case):
    """EMFILE: the worker may open too few files."""

    causes = ("too_many_files",)

    def __init__(self, folder):
        super().__init__(folder)
        self._few = True
        # One for the arena; the next ones are refused at different steps of opening.
        self._left = 1 + int(folder.name.rpartition("-")[2])
        self.launcher = functools.partial(ForkedWorker, first=self._limit)

    def end(self):
        self._few = False

    def _limit(self):
        if self._few:
            held = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
            devnull = os.open(os.devnull, os.O_RDONLY)
            for number in range(held + 1):  # no gaps below the limit
                with contextlib.suppress(OSError):
                    os.fstat(number)
                    continue
                os.dup2(devnull, number)
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1 + self._left, hard))


class LaterFormat(Case):
    """The store was written by a later release; then it is moved away."""

    causes = ("future_format",)

    def begin(self):
        self.make_store()
        statement = self.store / folder_module.FORMAT_FILE
        statement.write_text("2\n")
        self._content = (self.store / layout.DATA_FILE).read_bytes()

    def end(self):
        assert (self.store / layout.DATA_FILE).read_bytes() == self._content, "it was touched"
        assert not list(self.store.glob(".quarantine-*")), "it was set aside"
        self.store.rename(self.folder / "away")


class NetworkFileSystem(Case):
    """The folder lies on a network file system, says the kernel's table, and then no more."""

    causes = ("network_file_system",)

    def __init__(self, folder):
        super().__init__(folder)
        self._table = folder / "mountinfo"
        self.launcher = functools.partial(ForkedWorker, first=self._read_our_table)

    def begin(self):
        self.store.mkdir(mode=0o700)
        device = self.store.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        self._table.write_text(f"36 35 {number} / / rw - nfs4 server:/export rw\n")

    def end(self):
        self._table.write_text("")

    def _read_our_table(self):
        folder_module._MOUNTS_FILE = self._table


class OverriddenNetworkFileSystem(NetworkFileSystem):
    """The same, with the key that allows it: no fault at all."""

    causes = ()
    options = {"allow_network_file_system": True}  # noqa: RUF012 - never changed


class FileSizeLimit(Case):
    """EFBIG, and the short writes before it: the worker may not make the file larger.

    The one way to have writes fail that needs neither root nor a file system of its own.
    """

    causes = ("file_size_limit", "io_error")
    while_open = True

    def begin(self):
        held_bytes = (self.store / layout.DATA_FILE).stat().st_size
        self._limit(held_bytes + layout.PAGE_BYTES // 2)

    def end(self):
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size_bytes):
        pid = worker_pid(self.cache)
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        soft = hard if size_bytes == resource.RLIM_INFINITY else size_bytes
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


CASES = [
    NoRight,
    AnothersFolder,
    ReadOnly,
    NotAFolder,
    LostFolder,
    ReplacedFile,
    OtherLmdb,
    LaterFormat,
    NetworkFileSystem,
    OverriddenNetworkFileSystem,
    DeadProcess,
    TooManyFiles,
    FileSizeLimit,
]
