"""Reasons why a store cannot be opened, or is lost while it is open.

Each case: the cache goes on with misses, counts the cause, says it in one log line at most, and
uses the store when the cause is gone, without being made anew.
"""

import contextlib
import functools
import logging
import os
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path

import lmdb

from tiered_mmcache import Tier
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.changes import ChangeWriter

from . import mounts
from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import (
    MIB,
    ForkedWorker,
    SubprocessWorker,
    await_that,
    configuration,
    is_right,
    open_cache,
    ready_worker,
    restart_quickly,
    result,
)

_SIZE = 50_000
_NOBODY = 65534


class _Lines(logging.Handler):
    """Counts the fault lines by cause."""

    def __init__(self):
        super().__init__()
        self.causes = Counter()

    def emit(self, record):
        if record.msg.startswith("fault "):
            self.causes[record.args[0]] += 1


class _Case:
    """What one fault needs: a folder, how it begins, how it ends.

    Attributes:
        causes: One of these has to be counted.
        while_open: The fault begins when the store is open and holds an entry.
    """

    causes: tuple = ()
    while_open = False
    launcher = SubprocessWorker

    def __init__(self, folder):
        self.folder = folder
        self.store = folder / "store"

    def begin(self):
        """Let the fault begin."""

    def end(self):
        """Let it be gone."""


class NoRight(_Case):
    """EACCES: the worker's user may not enter the folder."""

    causes = ("permission",)

    def __init__(self, folder):
        super().__init__(folder)
        self.launcher = functools.partial(ForkedWorker, first=_become_nobody)

    def begin(self):
        for parent in self.folder.parents[:2]:
            parent.chmod(0o711)
        self.folder.chmod(0o700)

    def end(self):
        os.chown(self.folder, _NOBODY, _NOBODY)


def _become_nobody():
    with tempfile.TemporaryDirectory() as folder:
        lmdb.open(folder).close()  # imports the rest of lmdb, which nobody may be unable to read
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


class AnothersFolder(_Case):
    """The folder belongs to another user."""

    causes = ("another_owner",)

    def begin(self):
        self.store.mkdir()
        os.chown(self.store, _NOBODY, _NOBODY)

    def end(self):
        os.chown(self.store, os.geteuid(), -1)


class ReadOnly(_Case):
    """EROFS: the file system is read-only."""

    causes = ("read_only_file_system",)

    def __init__(self, folder):
        super().__init__(folder)
        self._mounted = contextlib.ExitStack()

    def begin(self):
        self._mounted.enter_context(mounts.tmpfs(self.folder, 64 * MIB))
        mounts.make_read_only(self.folder, read_only=True)

    def end(self):
        mounts.make_read_only(self.folder, read_only=False)


class NotAFolder(_Case):
    """ENOTDIR: a file lies where the folder should be."""

    causes = ("not_a_folder",)

    def __init__(self, folder):
        super().__init__(folder)
        self.store = folder / "file" / "store"

    def begin(self):
        (self.folder / "file").write_text("in the way")

    def end(self):
        (self.folder / "file").unlink()


class LostFolder(_Case):
    """The folder is removed, and a file put in its place, while the store is open."""

    causes = ("not_a_folder",)
    while_open = True

    def begin(self):
        shutil.rmtree(self.store)
        self.store.write_text("in the way")

    def end(self):
        self.store.unlink()


class ReplacedFile(_Case):
    """Somebody puts another file under the store's name while it is open: not LMDB's at all."""

    causes = ("died",)
    while_open = True

    def begin(self):
        other = self.folder / "other"
        other.write_bytes(b"something else" * 10_000)
        other.chmod(0o600)
        other.rename(self.store / layout.DATA_FILE)


class OtherLmdb(_Case):
    """The file is of another LMDB version."""

    causes = ("other_lmdb_version",)

    def begin(self):
        with open_cache(configuration(self.store)) as cache:
            cache.set(0, result(0, 0, _SIZE))
        self._write_version(999)

    def end(self):
        self._write_version(1)

    def _write_version(self, version):
        with (self.store / layout.DATA_FILE).open("r+b") as file:
            for page in (0, 1):
                file.seek(page * layout.PAGE_BYTES + 16 + 4)  # mdb.c: mm_version
                file.write(struct.pack("<I", version))


class DeadProcess(_Case):
    """Another server's worker is killed within a write transaction, and leaves its lock."""

    while_open = True

    def begin(self):
        config = configuration(self.store, hot=2 * _SIZE, write="through")
        launcher = functools.partial(ForkedWorker, first=_die_writing)
        with open_cache(config, launcher) as cache:
            cache.set(1, result(1, 0, _SIZE))
            await_that(lambda: cache.drain(0.0) or cache.stats().faults.get("died"))
            assert cache.stats().faults.get("died"), "it did not die"


def _die_writing():
    ChangeWriter.finish = lambda _: os.kill(os.getpid(), 9)


class TooManyFiles(_Case):
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


_CASES = [
    NoRight,
    AnothersFolder,
    ReadOnly,
    NotAFolder,
    LostFolder,
    ReplacedFile,
    OtherLmdb,
    DeadProcess,
    TooManyFiles,
]
_NEED_ROOT = (NoRight, AnothersFolder)


# In the server


def _try(case, lines, calls):
    """What came of one case."""
    config = configuration(case.store, hot=2 * _SIZE)
    if not case.while_open:
        case.begin()
    cache = open_cache(config, case.launcher)
    if case.while_open:
        for key in range(6):
            cache.set(key, result(key, 0, _SIZE))
        ready_worker(cache)
        case.begin()
    wrong, longest_s = _live_with_it(cache, case, calls)
    counted = dict(cache.stats().faults)
    began_s = time.monotonic()
    case.end()
    await_that(lambda: _uses_its_store(cache))
    back_s = time.monotonic() - began_s
    for key in range(20):
        found = cache.get_single(key)
        wrong += found is not None and not is_right(found, key, 0, _SIZE)
    cache.close()
    return {
        "wrong": wrong,
        "longest_s": longest_s,
        "faults": counted,
        "most_lines": max(lines.causes.values(), default=0),
        "back_s": back_s,
    }


def _live_with_it(cache, case, least_calls):
    """Calls until the cause is counted, and some more: (wrong answers, longest get)."""
    wrong = 0
    longest_s = 0.0
    deadline_s = time.monotonic() + 20.0
    calls = 0
    while calls < least_calls or not _counted(cache, case):
        if time.monotonic() > deadline_s:
            break
        key = calls % 20
        cache.set(key, result(key, 0, _SIZE))
        cache.drain(0.005)
        began_s = time.monotonic()
        found = cache.get_single((key + 7) % 20)
        longest_s = max(longest_s, time.monotonic() - began_s)
        wrong += found is not None and not is_right(found, (key + 7) % 20, 0, _SIZE)
        calls += 1
    return wrong, longest_s


def _counted(cache, case):
    return not case.causes or any(cache.stats().faults.get(cause) for cause in case.causes)


def _uses_its_store(cache):
    for key in range(20):
        cache.set(key, result(key, 0, _SIZE))
    cache.drain(0.5)
    return any(cache.locate(key) is Tier.DISK for key in range(20))


def _serve(connection, folder, private):
    if private:
        mounts.in_private_namespace()
    restart_quickly(0.01, 0.2)
    log = logging.getLogger("tiered_mmcache")
    for number, round_number, calls in connection:
        place = folder / f"{number}-{round_number}"
        place.mkdir()
        lines = _Lines()
        log.addHandler(lines)
        connection.send(_try(_CASES[number](place), lines, calls))
        log.removeHandler(lines)


def run(folder, *, full):
    outcome = Outcome(campaign="opening faults")
    why_not = mounts.why_not()
    server = Child(_serve, folder, why_not is None, stderr=folder / "stderr.log")
    longest_s = back_s = 0.0
    most_lines = 0
    counted = Counter()
    for number, case in enumerate(_CASES):
        if case is ReadOnly and why_not:
            outcome.not_run.append(f"{case.__name__}: {why_not}")
            continue
        if case in _NEED_ROOT and os.geteuid() != 0:
            outcome.not_run.append(f"{case.__name__}: changing owners needs root")
            continue
        for round_number in range(3 if full else 1):
            outcome.cases += 1
            try:
                report = server.ask((number, round_number, 200 if full else 40))
            except ChildFailedError as error:
                outcome.deaths += 1
                outcome.missed.append(f"{case.__name__}: {error}")
                server = Child(_serve, folder, why_not is None, stderr=folder / "stderr.log")
                break
            outcome.wrong += report["wrong"]
            longest_s = max(longest_s, report["longest_s"])
            back_s = max(back_s, report["back_s"])
            most_lines = max(most_lines, report["most_lines"])
            counted.update(report["faults"])
            told = not case.causes or any(report["faults"].get(cause) for cause in case.causes)
            outcome.expect(told, f"{case.__name__}: counted {report['faults']}")
    server.end()
    outcome.figures.append(f"causes counted {dict(counted)}")
    outcome.bound("most log lines of one cause in a case:", most_lines, "<= 1")
    outcome.bound("s, longest get:", longest_s, "<= 2.1")
    outcome.bound("s from the end of the cause to the next use of the store:", back_s, "<= 10")
    return outcome
