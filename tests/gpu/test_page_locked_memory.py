"""Page-locked host memory: that the runtime takes the arena, and what copies do with it.

Owns: registering with a real runtime, copies over locked and plain memory, graphs beside it.
Does not own: when memory is locked (tests/unit/test_host_preparation.py).
"""

import threading

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.host import page_locking
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.transfer import StreamCopyEngine
from tiered_mmcache.testing import ManualThread, audit, audit_idle

pytestmark = pytest.mark.gpu

SEGMENT = 1024 * 1024


@pytest.fixture
def thread():
    return ManualThread()


@pytest.fixture
def arena(machine, thread):
    """Eight segments, of which none is locked yet."""
    locker = machine.new_locker()
    made = Arena(
        8 * SEGMENT, make_locker=lambda device: locker, segment_bytes=SEGMENT, start=thread
    )
    yield made
    machine.synchronize()
    thread.none_left = True  # unlocked at once
    made.close()


def random_bytes(size, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


def test_a_segment_is_locked_and_unlocked(machine, device):
    locker = machine.new_locker()
    arena = Arena(2 * SEGMENT)
    (part,) = arena.slices(arena.reserve(SEGMENT), 0, SEGMENT)
    part.fill_(7)
    assert not machine.is_locked(part)
    locker.lock(part.data_ptr(), SEGMENT)
    assert machine.is_locked(part)
    assert part.eq(7).all()
    locker.unlock(part.data_ptr())
    assert not machine.is_locked(part)
    arena.close()


def test_locking_what_cannot_be_locked_says_what_to_change(machine):
    locker = machine.new_locker()
    if hasattr(locker, "fails"):
        locker.fails = "lower host.max_size"  # a rehearsal
    with pytest.raises(page_locking.PageLockingError, match=r"lower host\.max_size"):
        locker.lock(1 << 44, SEGMENT)  # where nothing is mapped
    torch.zeros(4, device=machine.device).add_(1).sum().item()  # the device goes on


@pytest.mark.parametrize("locked_segments", [0, 1, 2, 8])
def test_copies_over_locked_and_plain_memory_keep_every_bit(
    machine, device, arena, thread, locked_segments
):
    """CUDA refuses a copy of memory that is locked in part: none may cross that edge."""
    size = 3 * SEGMENT + 12_345
    extents = arena.reserve(size)
    arena.prepare_for(device)
    if locked_segments == 8:
        arena.reserve(arena.capacity_bytes - arena.used_bytes)
        thread.run()
    for _ in range(locked_segments if locked_segments < 8 else 0):
        thread.step()
    assert arena.page_locked_bytes == locked_segments * SEGMENT
    source = random_bytes(size, device)
    engine = StreamCopyEngine()
    down = engine.demote(source, arena.slices(extents, 0, size))
    target = torch.zeros_like(source)
    up = engine.promote(arena.slices(extents, 0, size), target, down)
    up.wait()
    assert torch.equal(target.cpu(), source.cpu())
    assert down.done()


def test_memory_that_is_locked_while_a_copy_runs_keeps_every_bit(machine, device, arena, thread):
    size = 2 * SEGMENT
    extents = arena.reserve(size)
    source = random_bytes(size, device)
    machine.keep_busy()
    engine = StreamCopyEngine()
    down = engine.demote(source, arena.slices(extents, 0, size))
    arena.prepare_for(device)
    thread.run()
    down.wait()
    found = torch.cat([part.clone() for part in arena.slices(extents, 0, size)])
    assert torch.equal(found, source.cpu())
    assert arena.page_locked_bytes >= size


def test_memory_is_locked_while_a_graph_is_captured(machine, device):
    """In CUDA's default mode a call from another thread could fail, and spoil the capture."""
    locker = machine.new_locker()
    arena = Arena(SEGMENT)
    (part,) = arena.slices(arena.reserve(SEGMENT), 0, SEGMENT)
    problems = []

    def lock():
        try:
            locker.lock(part.data_ptr(), SEGMENT)
        except page_locking.PageLockingError as error:
            problems.append(error)

    counter = torch.zeros(4, device=device)
    with machine.capture() as replay:
        counter.add_(1)
        other = threading.Thread(target=lock)
        other.start()
        other.join(60)
        counter.add_(1)
    replay()
    machine.synchronize()
    assert problems == []
    assert machine.is_locked(part)
    locker.unlock(part.data_ptr())
    arena.close()


def test_a_cache_locks_its_host_memory_by_itself_and_unlocks_it(machine, device, monkeypatch):
    """With the real thread; a rehearsal locks with a fake."""
    locker = machine.new_locker()
    monkeypatch.setattr(
        "tiered_mmcache.tiers.assembly.page_locker_for", lambda setting, device: locker
    )
    config = CacheConfig.from_mapping(
        {"hot": {"max_size": 2 * SEGMENT}, "host": {"max_size": 16 * SEGMENT, "page_locked": "on"}}
    )
    cache = TieredMultimodalCache(config=config)
    assert cache._below.arena.page_locked_bytes == 0
    for number in range(10):
        assert cache.set(number, EmbeddingResult(embedding=random_bytes(SEGMENT, device, number)))
        audit(cache)
    preparation = cache._below.arena._preparation
    while preparation._running:
        preparation._thread.join(60)
    assert cache.stats().host["page_locked_bytes"] == cache._below.arena.capacity_bytes
    for number in range(10):
        found = cache.get_single(number)
        assert torch.equal(found.embedding.cpu(), random_bytes(SEGMENT, "cpu", number))
    assert cache.drain()
    audit_idle(cache)
    assert cache.stats().faults == {}
    cache.close()
    assert preparation.locked_bytes == 0
