"""The spill worker dies, hangs or cannot start; the server dies or forks.

Owns: what a cache answers meanwhile (the right embedding or a miss), that it recovers, and that
nothing is left behind: no process, no descriptor, no memory.
Does not own: damage on disk (campaign/damage.py) or supervision step by step
(tests/unit/test_disk_client.py).

Run as a script, this file is the server that is killed.
"""

import contextlib
import errno
import gc
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.disk import client as client_module
from tiered_mmcache.disk import launch
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.disk.launch import SubprocessWorker
from tiered_mmcache.testing import audit, audit_idle

NOBODY = 65534
SIZE = 3000
PAGE = 4096
IN_HOT = 4
IN_HOST = 4
DEADLY = [signal.SIGKILL, signal.SIGBUS, signal.SIGABRT]
WORKER_GONE_S = 20.0  # ten times what is promised
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _workers_restart_at_once(monkeypatch):
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture(autouse=True)
def _no_core_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def configuration(folder, **disk):
    return CacheConfig.from_mapping(
        {
            "namespace": "faults/worker",
            "hot": {"max_size": IN_HOT * SIZE},
            "host": {"max_size": IN_HOST * PAGE},
            "disk": {
                "path": str(folder / "store"),
                "max_size": "16MiB",
                "write_buffer": "4MiB",
                "durability": "relaxed",
                "read_timeout": "60s",
                "close_timeout": "60s",
                **disk,
            },
        }
    )


@pytest.fixture
def opened(tmp_path):
    """Opens caches on one store; at the end each recovers, is drained, audited and closed."""
    caches = []

    def open_cache(make_client=SpillClient, *, config=None, **disk):
        config = configuration(tmp_path, **disk) if config is None else config
        caches.append(TieredMultimodalCache(config=config, make_client=make_client))
        return caches[-1]

    yield open_cache
    for cache in caches:
        if not cache._closed:
            settle(cache)
            cache.close()
    assert psutil.Process().children() == []  # a zombie would be one


def settle(cache):
    audit(cache)
    assert cache.drain(LIMIT_S)
    audit_idle(cache)


def result(number):
    generator = torch.Generator().manual_seed(number)
    payload = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
    return EmbeddingResult(embedding=payload)


def is_right(found, number):
    return torch.equal(found.embedding, result(number).embedding)


def fill(cache, numbers):
    for number in numbers:
        assert cache.set(number, result(number))
        audit(cache)


def numbers_found(cache, numbers):
    found = set()
    for number in numbers:
        answer = cache.get_single(number)
        audit(cache)
        if answer is not None:
            assert is_right(answer, number)
            found.add(number)
    return found


def worker_of(cache):
    return cache._below.disk.client.pid


def kill(cache, number=signal.SIGKILL):
    """Send a signal to the worker, if there is one; True when there was."""
    pid = worker_of(cache)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return True


def stop(pid):
    """Stop a child for good, and return when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def make_restart(cache, starts):
    """Call the cache until it has started that many workers."""
    deadline_s = time.monotonic() + LIMIT_S
    while cache.stats().disk["worker_starts"] < starts:
        assert time.monotonic() < deadline_s
        cache.drain(0.05)


class ClientThatActs(SpillClient):
    """A client on which a test does something to the worker at a certain step."""

    before_fill = None
    while_waiting = None

    def fill(self, **arguments):
        if self.before_fill is not None:
            action, self.before_fill = self.before_fill, None
            action(self.pid)
        return super().fill(**arguments)

    def wait(self, timeout_s):
        if self.while_waiting is not None and self.is_ready:
            action, self.while_waiting = self.while_waiting, None
            action(self.pid)
        super().wait(timeout_s)


# Death


@pytest.mark.parametrize("number", DEADLY, ids=lambda number: number.name)
def test_at_random_moments(opened, number):
    cache = opened()
    generator = random.Random(int(number))
    known = {}
    freed = set()
    kills = 0
    for step in range(400):
        key = generator.randrange(40)
        call = generator.randrange(10)
        if call < 4:
            assert cache.set(key, result(known.get(key, key)))
            known.setdefault(key, key)
            freed.discard(key)
        elif call < 9:
            answer = cache.get_single(key)
            assert answer is None or (key in known and key not in freed)
            assert answer is None or is_right(answer, key)
        else:
            cache.free(key)
            freed.add(key)
            assert cache.get_single(key) is None
        if step % 25 == 24:
            kills += kill(cache, number)
        audit(cache)
    settle(cache)
    stats = cache.stats()
    assert kills >= 5
    assert 2 <= stats.disk["worker_starts"] <= kills + 1
    assert stats.faults["died"] >= 1
    assert numbers_found(cache, freed) == set()
    fill(cache, range(100, 120))
    settle(cache)
    assert numbers_found(cache, range(100, 120)) == set(range(100, 120))


@pytest.mark.parametrize("number", DEADLY, ids=lambda number: number.name)
def test_what_it_was_about_to_write_is_written_by_the_next_one(opened, number):
    cache = opened()
    stop(worker_of(cache))
    fill(cache, range(60))
    assert cache.stats().host["write_buffer_entries"] == 60 - IN_HOT - IN_HOST
    kill(cache, number)
    kill(cache, signal.SIGCONT)
    settle(cache)
    stats = cache.stats()
    assert stats.disk["worker_starts"] == 2
    assert stats.disk["entries"] == 60 - IN_HOT - IN_HOST
    assert stats.faults == {"died": 1}
    assert not stats.drops
    assert numbers_found(cache, range(60)) == set(range(60))


@pytest.fixture
def memory_group():
    """A control group whose memory can be limited, and what says how often that killed."""
    for root, limit, events in (
        ("memory", "memory.limit_in_bytes", "memory.oom_control"),
        ("", "memory.max", "memory.events"),
    ):
        group = Path("/sys/fs/cgroup") / root / f"tiered-mmcache-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if os.access(group / limit, os.W_OK):
                yield group, group / limit, group / events
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("no control group of memory can be made here")


def test_the_kernel_kills_it_for_want_of_memory(opened, memory_group):
    """By a limit that has no room for a transaction of a few megabytes."""
    group, limit, events = memory_group
    numbers = range(100, 103)
    huge = {number: torch.full((6_000_000,), number, dtype=torch.uint8) for number in numbers}
    cache = opened(write="through", write_buffer="64MiB", max_size="64MiB")
    cache.max_size = 20_000_000
    settle(cache)
    (group / "cgroup.procs").write_text(str(worker_of(cache)))
    limit.write_text("1M")
    for number, payload in huge.items():
        assert cache.set(number, EmbeddingResult(embedding=payload))
        audit(cache)
    make_restart(cache, 2)
    assert "oom_kill 1" in events.read_text().splitlines()
    settle(cache)
    assert cache.stats().faults["died"] == 1
    assert not cache.stats().drops
    assert cache.stats().disk["entries"] == len(numbers)
    for number, payload in huge.items():
        cache.mm_cache.clear()
        cache.current_size = 0
        assert cache.locate(number) is not None
        assert torch.equal(cache.get_single(number).embedding, payload)


def test_while_a_look_up_waits_for_it(opened):
    cache = opened(ClientThatActs)
    fill(cache, range(20))
    settle(cache)
    starts = cache.stats().disk["worker_starts"]
    client = cache._below.disk.client
    stop(client.pid)
    client.while_waiting = lambda pid: os.kill(pid, signal.SIGKILL)
    assert cache.get_single(0) is None
    settle(cache)
    assert cache.stats().disk["worker_starts"] == starts + 1
    assert cache.stats().misses_by_reason == {"disk_fault": 1}
    assert numbers_found(cache, range(20)) == set(range(20))


def test_while_it_reads(opened):
    cache = opened(ClientThatActs)
    fill(cache, range(20))
    settle(cache)
    client = cache._below.disk.client
    used_bytes = cache._below.arena.used_bytes
    client.before_fill = lambda pid: os.kill(pid, signal.SIGKILL)
    assert cache.get_single(0) is None
    settle(cache)
    assert cache._below.arena.used_bytes <= used_bytes
    assert numbers_found(cache, range(20)) == set(range(20))


def test_what_was_freed_meanwhile_does_not_come_back(opened):
    cache = opened(read_timeout="0.2s")
    fill(cache, range(20))
    settle(cache)
    stop(worker_of(cache))
    for number in (0, 1, 19):
        assert cache.free(number) is (number == 19)  # of the others nobody can say
    kill(cache)
    settle(cache)
    assert numbers_found(cache, range(20)) == set(range(2, 19))
    cache.close()
    assert numbers_found(opened(), range(20)) == set(range(2, 19))


def test_what_was_cleared_meanwhile_does_not_come_back(opened):
    cache = opened(read_timeout="0.2s")
    fill(cache, range(20))
    settle(cache)
    stop(worker_of(cache))
    cache.clear()
    kill(cache)
    settle(cache)
    assert numbers_found(cache, range(20)) == set()
    cache.close()
    assert numbers_found(opened(), range(20)) == set()


# Not starting


def test_killed_before_it_is_ready(opened):
    started = []

    def launch(arena_fd):
        started.append(SubprocessWorker(arena_fd))
        if len(started) <= 3:
            started[-1].kill()
        return started[-1]

    cache = opened(lambda settings, fd: SpillClient(settings, fd, launcher=launch))
    fill(cache, range(20))
    assert numbers_found(cache, range(20 - IN_HOT, 20)) == set(range(20 - IN_HOT, 20))
    settle(cache)
    stats = cache.stats()
    assert stats.disk["worker_starts"] == 4
    assert stats.faults["died"] == 3
    assert numbers_found(cache, range(20)) == set(range(20))


def works_without_a_disk(cache, cause):
    """The tiers in memory answer, the disk is a miss, and the cause is counted."""
    fill(cache, range(20))
    memory = set(range(20 - IN_HOT - IN_HOST, 20))
    assert memory <= numbers_found(cache, reversed(range(20)))
    assert cache.get_single("never set") is None
    assert not cache.has("never set")
    assert cache.free("never set") is False
    assert not cache.drain(0.0)
    stats = cache.stats()
    assert stats.faults[cause] >= 1
    assert stats.faults["disk_not_ready"] == 1
    assert stats.misses_by_reason["disk_down"] >= 1
    assert stats.disk["entries"] == 0


def recovers(cache):
    settle(cache)
    assert numbers_found(cache, range(20)) == set(range(20))
    assert cache.stats().disk["entries"] > 0
    assert not cache.stats().drops


def test_it_cannot_be_started(opened):
    fails = [True]

    def launch(arena_fd):
        if fails[0]:
            raise OSError(errno.EMFILE, "too many open files")
        return SubprocessWorker(arena_fd)

    cache = opened(lambda settings, fd: SpillClient(settings, fd, launcher=launch))
    works_without_a_disk(cache, "not_started")
    assert cache.stats().disk["worker_starts"] == 0
    fails[0] = False
    recovers(cache)


def test_its_program_is_missing(opened, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        before = len(descriptors())
        cache = opened()
        works_without_a_disk(cache, "not_started")
        assert len(descriptors()) == before + 3  # the arena, its mapping, and what backs it ahead
    recovers(cache)


def test_the_store_is_a_file(opened, tmp_path):
    file = tmp_path / "store"
    config = configuration(tmp_path)
    file.write_text("somebody's notes")
    cache = opened(config=config)
    works_without_a_disk(cache, "not_a_folder")
    assert file.read_text() == "somebody's notes"
    file.unlink()
    recovers(cache)


def test_the_store_may_not_be_written(opened, tmp_path):
    """For root, who may write everywhere, it is somebody else's instead."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o500)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, NOBODY, NOBODY)
    cache = opened()
    works_without_a_disk(cache, "another_owner" if is_root else "permission")
    folder.chmod(0o700)
    os.chown(folder, os.geteuid(), os.getegid())
    recovers(cache)


def quarantines(tmp_path):
    return list((tmp_path / "store").glob(".quarantine-*"))


@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGABRT, signal.SIGSEGV])
def test_a_store_that_kills_its_worker_twice_is_set_aside(opened, tmp_path, number):
    """What the kernel and LMDB do to whoever reads damaged pages; here a test sends the signal."""
    cache = opened()
    fill(cache, range(20))
    settle(cache)
    held = cache.stats().disk["entries"]
    assert kill(cache, number)
    make_restart(cache, 2)
    settle(cache)
    assert cache.stats().disk["entries"] >= held
    assert quarantines(tmp_path) == []
    assert kill(cache, number)
    make_restart(cache, 3)
    settle(cache)
    assert len(quarantines(tmp_path)) == 1
    assert numbers_found(cache, range(20)) >= set(cache.mm_cache)
    fill(cache, range(100, 120))
    settle(cache)
    assert numbers_found(cache, range(100, 120)) == set(range(100, 120))


def test_a_worker_that_others_kill_costs_no_store(opened, tmp_path):
    cache = opened()
    fill(cache, range(20))
    settle(cache)
    for starts in (2, 3, 4):
        assert kill(cache, signal.SIGKILL)
        make_restart(cache, starts)
        settle(cache)
    assert quarantines(tmp_path) == []
    assert numbers_found(cache, range(20)) == set(range(20))


# Silence

READ_TIMEOUT_S = 0.5


def seconds_of(call):
    began_s = time.monotonic()
    answer = call()
    return time.monotonic() - began_s, answer


def test_a_stopped_worker_costs_one_read_timeout_and_then_nothing(opened):
    cache = opened(read_timeout=f"{READ_TIMEOUT_S}s")
    fill(cache, range(20))
    settle(cache)
    pid = worker_of(cache)
    stop(pid)
    took_s, answer = seconds_of(lambda: cache.get_single(0))
    assert answer is None
    assert READ_TIMEOUT_S <= took_s < 3 * READ_TIMEOUT_S
    calls = [
        lambda: cache.get_single(1),
        lambda: cache.get_single(2),
        lambda: cache.has(3),
        lambda: cache.set(50, result(50)),
        lambda: cache.free(50),
    ]
    for call in calls:
        took_s, _ = seconds_of(call)
        assert took_s < READ_TIMEOUT_S / 2
        audit(cache)
    assert cache.get_single(19) is not None
    assert cache.stats().misses_by_reason == {"read_timeout": 1, "disk_down": 2}
    assert cache.stats().faults == {"read_timeout": 1}
    os.kill(pid, signal.SIGCONT)
    settle(cache)
    assert worker_of(cache) == pid
    assert numbers_found(cache, range(20)) == set(range(20))


DEMOTE_WAIT_S = 0.5


@pytest.mark.parametrize("demote_wait_s", [0, DEMOTE_WAIT_S])
def test_a_stopped_worker_holds_a_set_up_as_long_as_it_may_and_no_longer(
    opened, tmp_path, demote_wait_s
):
    config = configuration(tmp_path, write_buffer=4 * PAGE)
    host = config.host.model_copy(update={"demote_wait_s": demote_wait_s})
    cache = opened(config=config.model_copy(update={"host": host}))
    pid = worker_of(cache)
    stop(pid)
    fill(cache, range(IN_HOT + IN_HOST + 4))  # hot tier, host tier and write buffer are full
    assert not cache.stats().drops
    for number in (100, 101):
        took_s, admitted = seconds_of(lambda number=number: cache.set(number, result(number)))
        audit(cache)
        assert admitted
        assert demote_wait_s <= took_s < demote_wait_s + 3 * DEMOTE_WAIT_S
    assert cache.stats().drops == {"write_buffer_full": 2}
    assert cache.stats().host["demote_waits"] == (2 if demote_wait_s else 0)
    os.kill(pid, signal.SIGCONT)
    settle(cache)
    assert numbers_found(cache, [*range(20), 100, 101]) >= {*range(6, 12), 100, 101}


def test_the_worker_does_not_take_the_core_of_whoever_wakes_it(opened):
    cache = opened()
    settle(cache)
    assert os.sched_getscheduler(worker_of(cache)) == os.SCHED_BATCH


def test_the_slot_of_an_unanswered_read_is_not_used_meanwhile(opened):
    cache = opened(ClientThatActs, read_timeout=f"{READ_TIMEOUT_S}s")
    fill(cache, range(20))
    settle(cache)
    client = cache._below.disk.client
    pid = client.pid
    client.before_fill = stop
    took_s, answer = seconds_of(lambda: cache.get_single(0))
    assert answer is None
    assert READ_TIMEOUT_S <= took_s < 3 * READ_TIMEOUT_S
    (quarantined,) = [entry for entry in cache._below.host.retired if entry.filling]
    fill(cache, range(30, 60))  # audited: nobody else gets these pages
    assert quarantined in cache._below.host.retired
    assert not cache.drain(0.0)
    os.kill(pid, signal.SIGCONT)
    settle(cache)
    assert not quarantined.filling
    assert not cache._below.host.retired
    expected = {*range(20), *range(30, 60)}
    assert numbers_found(cache, expected) == expected


def test_the_slot_is_free_again_when_the_silent_worker_dies(opened):
    cache = opened(ClientThatActs, read_timeout=f"{READ_TIMEOUT_S}s")
    fill(cache, range(20))
    settle(cache)
    cache._below.disk.client.before_fill = stop
    assert cache.get_single(0) is None
    assert any(entry.filling for entry in cache._below.host.retired)
    kill(cache)
    settle(cache)
    assert not cache._below.host.retired
    assert numbers_found(cache, range(20)) == set(range(20))


def test_a_worker_that_stays_silent_is_killed(opened, monkeypatch):
    monkeypatch.setattr(client_module, "_SILENCE_LIMIT_S", 0.1)
    cache = opened(read_timeout="0.1s")
    fill(cache, range(20))
    settle(cache)
    pid = worker_of(cache)
    stop(pid)
    assert cache.get_single(0) is None
    settle(cache)  # waits no longer than the limit for an answer
    assert not psutil.pid_exists(pid)
    assert cache.stats().disk["worker_starts"] == 2
    assert cache.stats().faults == {"read_timeout": 1, "silent": 1}
    cache._below.disk.read_timeout_s = LIMIT_S
    assert numbers_found(cache, range(20)) == set(range(20))


def start_workers_with(monkeypatch, code):
    """Have the workers to come run this code first; imports need not be made before."""
    boot = launch._BOOT.replace("from tiered_mmcache", code + "; from tiered_mmcache", 1)
    assert boot != launch._BOOT
    monkeypatch.setattr(launch, "_BOOT", boot)


def test_a_slow_disk_costs_read_timeouts_and_nothing_else(opened, tmp_path, monkeypatch):
    """Every read takes longer than it may, but is answered: the worker is kept."""
    flag = tmp_path / "slow"
    start_workers_with(
        monkeypatch,
        "import os, time; from tiered_mmcache.disk.store import Store; fill = Store.fill; "
        f"Store.fill = lambda *given: (os.path.exists({str(flag)!r}) and "
        f"time.sleep({3 * READ_TIMEOUT_S}), fill(*given))[1]",
    )
    cache = opened(read_timeout=f"{READ_TIMEOUT_S}s")
    fill(cache, range(20))
    settle(cache)
    pid = worker_of(cache)
    flag.touch()
    for number in range(2):
        took_s, answer = seconds_of(lambda number=number: cache.get_single(number))
        assert answer is None
        assert READ_TIMEOUT_S <= took_s < 3 * READ_TIMEOUT_S
        took_s, answer = seconds_of(lambda: cache.get_single(10))
        assert answer is None
        assert took_s < READ_TIMEOUT_S / 2  # not asked while it owes an answer
        settle(cache)
    assert cache.stats().faults == {"read_timeout": 2}
    assert cache.stats().misses_by_reason == {"read_timeout": 2, "disk_down": 2}
    assert worker_of(cache) == pid
    flag.unlink()
    assert numbers_found(cache, range(20)) == set(range(20))


def test_what_fails_again_and_again_in_the_worker_is_logged_once(
    opened, tmp_path, monkeypatch, capfd
):
    """Such as noting that entries were used, which nobody waits for and nobody counts."""
    flag = tmp_path / "refused"
    start_workers_with(
        monkeypatch,
        "import lmdb, os\nfrom tiered_mmcache.disk.store import Store\napply = Store.apply\n"
        "def refuse(self, changes):\n"
        f"    if not os.path.exists({str(flag)!r}):\n"
        "        return apply(self, changes)\n"
        f"    open({str(flag)!r}, 'a').write('x')\n"
        "    raise lmdb.Error('mdb_txn_commit: Input/output error')\n"
        "Store.apply = refuse\n0",
    )
    cache = opened(write="through")  # so that reading leads to no write but that note
    fill(cache, range(20))
    settle(cache)
    flag.touch()
    for times in (1, 2, 3):  # each time that the worker has been idle for a while
        assert numbers_found(cache, range(20)) == set(range(20))
        deadline_s = time.monotonic() + LIMIT_S
        while flag.stat().st_size < times:
            assert time.monotonic() < deadline_s
            select.select([], [], [], 0.01)
    assert not cache.stats().faults
    flag.unlink()
    assert capfd.readouterr().err.count("recency was not written") == 1


def test_closing_a_cache_whose_worker_is_stopped(opened):
    limit_s = 0.3
    cache = opened(close_timeout=f"{limit_s}s")
    fill(cache, range(20))
    settle(cache)
    fill(cache, range(30, 40))
    pid = worker_of(cache)
    stop(pid)
    took_s, _ = seconds_of(cache.close)
    assert (
        took_s < limit_s + 1.0 + client_module._LAST_REAP_S
    )  # one second at least to say good-bye
    assert not psutil.pid_exists(pid)
    assert set(range(12)) <= numbers_found_later(opened)


def numbers_found_later(opened):
    return numbers_found(opened(), range(40))


# Nothing stays behind


def descriptors():
    """What the descriptors of this process are open on."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that reads the folder
            links.append(str(entry.readlink()))
    return links


def arenas():
    """Descriptors and mappings of memory shared with workers."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [name for name in [*descriptors(), *maps] if "memfd:tiered_mmcache" in name]


def test_twenty_caches_leave_nothing_behind(tmp_path):
    gc.collect()
    held = []  # even while somebody still holds the closed caches
    before = len(descriptors()), len(arenas())
    for number in range(20):
        cache = TieredMultimodalCache(config=configuration(tmp_path))
        fill(cache, range(number, number + 12))
        if number % 4 == 1:
            kill(cache, DEADLY[number % 3])
        if number % 4 == 2:
            kill(cache)
            settle(cache)
        audit(cache)
        cache.close()
        held.append(cache)
    assert psutil.Process().children() == []
    assert (len(descriptors()), len(arenas())) == before


def test_a_worker_that_died_is_no_zombie_after_the_next_call(opened):
    cache = opened()
    fill(cache, range(20))
    settle(cache)
    pid = worker_of(cache)
    kill(cache)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    cache.has("anything")
    make_restart(cache, 2)
    assert pid not in {child.pid for child in psutil.Process().children()}
    settle(cache)


# The server


@contextlib.contextmanager
def server(folder, mode):
    """A server in a process of its own: (process, the numbers that it prints)."""
    command = [sys.executable, __file__, str(folder), mode]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            yield process, [int(word) for word in line.split()]
        finally:
            process.kill()


def is_gone(pid_fd):
    return bool(select.select([pid_fd], [], [], WORKER_GONE_S)[0])


@contextlib.contextmanager
def watched(pid):
    pid_fd = os.pidfd_open(pid)
    yield pid_fd
    os.close(pid_fd)


def test_the_worker_ends_with_a_killed_server_and_the_store_is_whole(opened, tmp_path):
    with server(tmp_path, "write") as (process, (worker, written)), watched(worker) as pid_fd:
        process.kill()
        assert is_gone(pid_fd)
    cache = opened()
    assert set(range(written)) <= numbers_found(cache, range(written + 60))
    assert list((tmp_path / "store").glob(".quarantine-*")) == []


def test_the_worker_ends_with_the_server_although_a_forked_child_lives(opened, tmp_path):
    with server(tmp_path, "fork") as (process, (worker, child)), watched(worker) as pid_fd:
        try:
            with watched(child) as child_fd:
                process.kill()
                assert is_gone(pid_fd)
                assert not select.select([child_fd], [], [], 0)[0]
        finally:
            os.kill(child, signal.SIGKILL)
    assert numbers_found(opened(), range(12)) == set(range(12))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_changes_what_is_the_parents(opened):
    cache = opened()
    fill(cache, range(20))
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.read(go[0], 1)
            assert cache.get_single(19) is not None
            assert cache.get_single(0) is None
            for number in range(100, 140):
                cache.set(number, result(number))
            assert cache.drain(0.0)
            cache.close()
            status = 0
        os.write(ready[1], b"x")
        os._exit(status)
    fill(cache, range(20, 40))  # takes pages that the child believes to be free
    settle(cache)
    os.write(go[1], b"x")
    os.read(ready[0], 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (*ready, *go):
        os.close(end)
    audit(cache)
    assert numbers_found(cache, reversed(range(40))) == set(range(40))
    assert cache.stats().disk["worker_starts"] == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_holds_the_lock(opened):
    cache = opened()
    fill(cache, range(20))
    held, enough = threading.Event(), threading.Event()

    def hold():
        with cache._lock:
            held.set()
            assert enough.wait(LIMIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT_S)
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            assert cache.get_single(19) is not None
            assert cache.set(20, result(20))
            assert not cache.has(0)
            cache.stats()
            status = 0
        os._exit(status)
    with watched(pid) as pid_fd:
        ended = select.select([pid_fd], [], [], LIMIT_S)[0]
    os.kill(pid, signal.SIGKILL)
    enough.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ended
    assert numbers_found(cache, range(20)) == set(range(20))


def serve(folder, mode):
    """Be a server: fill a cache, say whom to watch, and live until killed."""
    cache = TieredMultimodalCache(config=configuration(Path(folder)))
    fill(cache, range(40))
    assert cache.drain()
    if mode == "fork":
        child = os.fork()
        if child == 0:
            signal.pause()
        print(worker_of(cache), child, flush=True)
    else:
        written = next(n for n in range(40) if cache.locate(n) is not Tier.DISK)
        fill(cache, range(40, 100))
        print(worker_of(cache), written, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(*sys.argv[1:])
