"""Copies between an accelerator and host memory, and a cache whose hot tier is on one.

Owns: streams, events, graphs and device memory: what only a machine with an accelerator can show.
Does not own: the contract on CPU tensors (tests/contracts/test_copy_engines.py), page-locking
(test_page_locked_memory.py), or what the device is asked (conftest.py).
"""

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.transfer import (
    DeviceCopyEngine,
    StreamCopyEngine,
    dtype_of,
    header_of,
    payload_bytes_of,
)
from tiered_mmcache.testing import audit, audit_idle

pytestmark = pytest.mark.gpu

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SIZE = 1024 * 1024


@pytest.fixture(params=[StreamCopyEngine, DeviceCopyEngine], ids=lambda engine: engine.__name__)
def engine(request):
    return request.param()


@pytest.fixture
def arena(machine):
    made = Arena(16 * SIZE)
    yield made
    machine.synchronize()
    made.close()


def random_tensor(dtype, count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).to(device)


def raw_bytes(tensor):
    return payload_bytes_of(tensor).cpu()


# The contract, on streams


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_there_and_back(engine, arena, device, dtype, transposed):
    tensor = random_tensor(dtype, 6000, device).reshape(60, 100)
    tensor = tensor.t() if transposed else tensor
    about = header_of(tensor, class_tag="", extras=b"", cost_s=0.0)
    extents = arena.reserve(about.payload_bytes)
    down = engine.demote(tensor, arena.slices(extents, 0, about.payload_bytes))
    target = torch.empty(about.shape, dtype=dtype_of(about), device=device)
    up = engine.promote(
        arena.slices(extents, 0, about.payload_bytes), payload_bytes_of(target), down
    )
    up.wait()
    assert up.done()
    assert down.done()  # the promotion came after it
    assert torch.equal(raw_bytes(target), raw_bytes(tensor))


def test_a_demotion_comes_after_the_work_that_makes_its_source(engine, arena, machine, device):
    machine.keep_busy()
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=device)
    tensor += 7
    extents = arena.reserve(SIZE)
    down = engine.demote(tensor, arena.slices(extents, 0, SIZE))
    down.wait()
    assert all(part.eq(7).all() for part in arena.slices(extents, 0, SIZE))


def test_the_source_may_be_let_go_at_once(engine, arena, machine, device):
    machine.keep_busy()
    tensor = torch.full((SIZE,), 7, dtype=torch.uint8, device=device)
    extents = arena.reserve(SIZE)
    down = engine.demote(tensor, arena.slices(extents, 0, SIZE))
    del tensor
    others = [torch.full((SIZE,), 9, dtype=torch.uint8, device=device) for _ in range(8)]
    down.wait()
    assert all(part.eq(7).all() for part in arena.slices(extents, 0, SIZE))
    assert all(other.eq(9).all() for other in others)


def test_a_promotion_is_in_order_on_the_stream_of_the_caller(engine, arena, machine, device):
    extents = arena.reserve(SIZE)
    for part in arena.slices(extents, 0, SIZE):
        part.fill_(5)
    side = machine.new_stream()
    with machine.on(side):
        target = torch.zeros(SIZE, dtype=torch.uint8, device=device)
        up = engine.promote(arena.slices(extents, 0, SIZE), target, None)
        doubled = target * 2  # no wait in between
    up.wait()
    side.synchronize()
    assert doubled.eq(10).all()


# A cache on the device


@pytest.fixture
def cache(tmp_path, device):
    config = CacheConfig.from_mapping(
        {
            "namespace": "gpu/test",
            "hot": {"max_size": 2 * SIZE},
            "host": {"max_size": 4 * SIZE},
            "disk": {
                "path": str(tmp_path / "store"),
                "max_size": "256MiB",
                "write_buffer": "64MiB",
                "read_timeout": "60s",
            },
        }
    )
    with TieredMultimodalCache(config=config) as made:
        yield made
        audit(made)
        assert made.drain()
        audit_idle(made)


def result(number, device, dtype=torch.bfloat16):
    return EmbeddingResult(embedding=random_tensor(dtype, SIZE // dtype.itemsize, device, number))


def is_right(found, number, dtype=torch.bfloat16):
    expected = random_tensor(dtype, SIZE // dtype.itemsize, "cpu", number)
    return found is not None and torch.equal(raw_bytes(found.embedding), raw_bytes(expected))


def test_every_tier_gives_back_what_was_set(cache, device):
    for number in range(20):
        assert cache.set(number, result(number, device, DTYPES[number % len(DTYPES)]))
        audit(cache)
    assert cache.drain()
    tiers = {cache.locate(number) for number in range(20)}
    assert tiers == {Tier.HOT, Tier.HOST, Tier.DISK}
    for number in range(20):
        dtype = DTYPES[number % len(DTYPES)]
        found = cache.get_single(number)
        assert found.embedding.device == device
        assert found.embedding.dtype is dtype
        assert is_right(found, number, dtype)
        audit(cache)
    assert not cache.stats().faults


def test_memory_of_an_evicted_entry_is_not_used_before_it_was_copied(cache, machine, device):
    for number in range(12):
        machine.keep_busy()
        assert cache.set(number, result(number, device))
        junk = [torch.full((SIZE,), 255, dtype=torch.uint8, device=device) for _ in range(4)]
        audit(cache)
        del junk
    assert all(is_right(cache.get_single(number), number) for number in range(12))


def test_on_side_streams(cache, machine, device):
    made_on, used_on = machine.new_stream(), machine.new_stream()
    with machine.on(made_on):
        for number in range(8):
            machine.keep_busy()
            assert cache.set(number, result(number, device))
    used_on.wait_stream(made_on)
    with machine.on(used_on):
        sums = [cache.get_single(n).embedding.view(torch.uint8).sum() for n in range(8)]
    used_on.synchronize()
    expected = [result(n, "cpu").embedding.view(torch.uint8).sum() for n in range(8)]
    assert [value.item() for value in sums] == [value.item() for value in expected]
    audit(cache)


@pytest.mark.parametrize("inference", [True, False])
def test_in_inference_mode_and_out_of_it(cache, device, inference):
    with torch.inference_mode(inference):
        for number in range(12):
            assert cache.set(number, result(number, device))
    assert cache.drain()
    with torch.inference_mode(not inference):
        assert all(is_right(cache.get_single(number), number) for number in range(12))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_promotion_without_device_memory_is_a_miss(cache, machine, device, tier):
    for number in range(12):
        assert cache.set(number, result(number, device))
    assert cache.drain()
    key = next(number for number in range(12) if cache.locate(number) is tier)
    with machine.without_memory():
        cache.max_size += SIZE  # nothing is evicted, whose memory would do
        assert cache.get_single(key) is None
        cache.max_size -= SIZE
        audit(cache)
    assert cache.stats().faults == {"promotion": 1}
    assert is_right(cache.get_single(key), key)


# Graphs


def filled(cache, device):
    """A cache with entries 0 to 11, some on every tier, and one key on each."""
    for number in range(12):
        assert cache.set(number, result(number, device))
    assert cache.drain()
    return {cache.locate(number): number for number in range(12)}


def test_a_look_up_below_during_a_capture_is_a_miss_and_leaves_the_capture_whole(
    cache, machine, device
):
    keys = filled(cache, device)
    counter = torch.zeros(4, device=device)
    with machine.capture() as replay:
        counter.add_(1)
        assert cache.get_single(keys[Tier.HOT]) is not None
        assert cache.get_single(keys[Tier.HOST]) is None
        assert cache.get_single(keys[Tier.DISK]) is None
        counter.add_(1)
    before = counter.clone()
    replay()
    machine.synchronize()
    if machine.has_graphs:
        assert (counter - before).tolist() == [2] * 4
    assert cache.stats().misses_by_reason == {"capture": 2}
    assert is_right(cache.get_single(keys[Tier.HOST]), keys[Tier.HOST])
    assert is_right(cache.get_single(keys[Tier.DISK]), keys[Tier.DISK])


def test_what_is_in_flight_is_not_asked_for_during_a_capture(machine, device):
    """An event that is asked for its state during a capture would end it with an error."""
    config = CacheConfig.from_mapping(
        {
            "hot": {"max_size": 4 * SIZE, "clean_ahead": 2 * SIZE},
            "host": {"max_size": 64 * SIZE},
        }
    )
    with TieredMultimodalCache(config=config) as cache:
        extra = [result(number, device) for number in range(8, 12)]
        for number in range(8):
            machine.keep_busy()
            assert cache.set(number, result(number, device))
        with machine.capture():
            for number, entry in enumerate(extra, start=8):
                assert cache.set(number, entry)
                audit(cache)
            assert cache.free(2)
            assert not cache.has(2)
        assert cache.drain()
        audit_idle(cache)
        lost = [number for number in range(12) if number != 2 and cache.locate(number) is None]
        assert cache.stats().drops == ({"capture": len(lost)} if lost else {})
        kept = [number for number in range(12) if number != 2 and number not in lost]
        assert all(is_right(cache.get_single(number), number) for number in kept)


# Several devices


def test_entries_of_another_device_come_back_bit_for_bit(cache, machine, device):
    """To the current device, as SGLang expects, and the current device stays the current one."""
    if not machine.others:
        pytest.skip("there is one device only")
    other = machine.others[0]
    for number in range(12):
        assert cache.set(number, result(number, other if number % 2 else device))
        assert torch.accelerator.current_device_index() == (device.index or 0)
    assert cache.drain()
    for number in range(12):
        hot = cache.locate(number) is Tier.HOT
        found = cache.get_single(number)
        assert is_right(found, number)
        assert found.embedding.device == device or hot
        assert torch.accelerator.current_device_index() == (device.index or 0)


def test_a_copy_of_another_device_runs_on_that_devices_streams(engine, arena, machine, device):
    if not machine.others:
        pytest.skip("there is one device only")
    other = machine.others[0]
    tensor = random_tensor(torch.float32, 60_000, other)
    extents = arena.reserve(240_000)
    down = engine.demote(tensor, arena.slices(extents, 0, 240_000))
    target = torch.empty(60_000, device=other)
    up = engine.promote(arena.slices(extents, 0, 240_000), payload_bytes_of(target), down)
    up.wait()
    assert torch.equal(raw_bytes(target), raw_bytes(tensor))
    assert torch.accelerator.current_device_index() == (device.index or 0)
