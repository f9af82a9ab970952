"""A real worker dies or is stopped while it reads ahead.

Owns: that such a read costs misses at most, never a wrong answer, a hang or memory. Does not own:
the steps one by one (tests/unit/test_prefetch.py) or other faults (test_worker_death.py).
"""

import contextlib
import os
import random
import signal

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.disk import client as client_module
from tiered_mmcache.testing import audit, audit_idle

SIZE = 300_000  # two chunks
ARENA_BYTES = 303_104  # as whole pages
ENTRIES = 24
READ_TIMEOUT_S = 0.5
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _workers_restart_at_once(monkeypatch):
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.001)


def result(number):
    generator = torch.Generator().manual_seed(number)
    payload = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
    return EmbeddingResult(embedding=payload)


def is_right(found, number):
    return torch.equal(found.embedding, result(number).embedding)


def settle(cache):
    audit(cache)
    assert cache.drain(LIMIT_S)
    audit_idle(cache)


@pytest.fixture
def cache(tmp_path):
    """A cache whose store holds entries 0 to 23, all but the last ones there alone."""
    config = CacheConfig.from_mapping(
        {
            "namespace": "faults/prefetch",
            "hot": {"max_size": 2 * SIZE},
            "host": {"max_size": 16 * ARENA_BYTES, "prefetch": 16 * ARENA_BYTES},
            "disk": {
                "path": str(tmp_path / "store"),
                "max_size": "64MiB",
                "write_buffer": "16MiB",
                "read_timeout": f"{READ_TIMEOUT_S}s",
                "durability": "relaxed",
            },
        }
    )
    with TieredMultimodalCache(config=config) as first:
        for number in range(ENTRIES):
            first.set(number, result(number))
            first.drain(LIMIT_S)
    with TieredMultimodalCache(config=config) as opened:
        settle(opened)
        yield opened
        settle(opened)


def worker_of(cache):
    return cache._below.disk.client.pid


def stop(pid):
    """Stop a child for good, and return when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def check_all(cache):
    for number in range(ENTRIES):
        found = cache.get_single(number)
        assert found is not None
        assert is_right(found, number)


def test_what_is_prefetched_arrives_and_is_right(cache):
    assert cache.prefetch(range(16)) == 16
    settle(cache)
    assert all(cache.locate(number) is Tier.HOST for number in range(16))
    for number in range(16):
        assert is_right(cache.get_single(number), number)
    assert cache.stats().host["hits"] == 16
    assert cache.stats().prefetches == {"asked": 16, "used": 16}
    assert cache.prefetch(range(16, 24)) == 8
    found = cache.get_many(range(16, 24))
    assert all(is_right(found[number - 16], number) for number in range(16, 24))
    assert cache.stats().prefetches == {"asked": 24, "used": 24}


def test_killed_with_reads_on_the_way(cache):
    stop(worker_of(cache))
    assert cache.prefetch(range(8)) == 8
    os.kill(worker_of(cache), signal.SIGKILL)
    settle(cache)
    assert cache.stats().prefetches == {"asked": 8, "failed": 8}
    assert cache._below.arena.used_bytes == 0
    assert cache.stats().disk["worker_starts"] == 2
    check_all(cache)


def test_stopped_with_reads_on_the_way(cache):
    assert all(cache.has(number) for number in (1, 2))  # so that they need not be asked for
    pid = worker_of(cache)
    stop(pid)
    assert cache.prefetch([1, 2]) == 2
    assert cache.get_single(1) is None
    assert cache.stats().misses_by_reason == {"read_timeout": 1}
    assert cache.get_single(2) is None
    assert cache.get_many([1, 2, 3]) == [None] * 3
    # The first one waited for as long as it may; the others did not wait again.
    assert cache.stats().misses_by_reason == {"read_timeout": 1, "disk_down": 4}
    assert sum(entry.filling for entry in cache._below.host.retired) == 2
    assert cache.set(1, result(1))
    audit(cache)
    os.kill(pid, signal.SIGCONT)
    settle(cache)
    assert worker_of(cache) == pid
    assert not cache._below.host.retired
    assert is_right(cache.get_single(2), 2)


def test_killed_at_random_moments(cache):
    generator = random.Random(5)
    freed = set()
    for step in range(200):
        keys = [generator.randrange(ENTRIES) for _ in range(4)]
        cache.prefetch(keys)
        if step % 20 == 10:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(worker_of(cache), signal.SIGKILL)
        for number, found in zip(keys, cache.get_many(keys), strict=True):
            assert found is None or (number not in freed and is_right(found, number))
        if step % 5 == 0:
            cache.prefetch([keys[0]])
            cache.free(keys[0])
            freed.add(keys[0])
            assert cache.get_single(keys[0]) is None
        if step % 5 == 2:
            cache.set(keys[0], result(keys[0]))
            freed.discard(keys[0])
        audit(cache)
    settle(cache)
    assert cache.stats().disk["worker_starts"] >= 2
    for number in freed:
        assert cache.get_single(number) is None
    for number in set(range(ENTRIES)):
        cache.set(number, result(number))
    settle(cache)
    check_all(cache)


def test_killed_without_anybody_waiting(cache):
    """Nobody calls while it dies: the next call finds out."""
    pid = worker_of(cache)
    stop(pid)
    assert cache.prefetch(range(4)) == 4
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert cache.get_single(0) is None
    audit(cache)
    settle(cache)
    check_all(cache)
