"""What every copy engine has to do, real or fake.

Owns: the contract on CPU tensors. Does not own: dtypes and layouts one by one
(tests/unit/test_host_transfer.py), or streams (tests/gpu, which runs the same cases there).
"""

import pytest
import torch

from tiered_mmcache.host.transfer import (
    FINISHED,
    DeviceCopyEngine,
    HostCopyEngine,
    dtype_of,
    header_of,
    payload_bytes_of,
)
from tiered_mmcache.testing import ManualCopyEngine

ENGINES = [HostCopyEngine, DeviceCopyEngine, ManualCopyEngine]
TENSORS = {
    "bytes": torch.arange(100, dtype=torch.uint8),
    "bfloat16": torch.linspace(-3, 3, 1000, dtype=torch.bfloat16).reshape(10, 100),
    "transposed": torch.arange(60.0).reshape(6, 10).t(),
    "every second": torch.arange(64, dtype=torch.int16)[1::2],
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(3, 0, 2),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "with gradient": torch.ones(5, requires_grad=True) * 2,
}


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.__name__)
def engine(request):
    return request.param()


@pytest.fixture(params=TENSORS, ids=str)
def tensor(request):
    return TENSORS[request.param]


def arena_parts(size, cut):
    """Parts of an arena for so many bytes, cut in two where the cut lies within."""
    whole = torch.full((size + 8,), 0xEE, dtype=torch.uint8)
    if 0 < cut < size:
        return whole, [whole[:cut], whole[cut:size]]
    return whole, [whole[:size]]


def parts_of(parts, start, stop):
    """The bytes from start to stop of consecutive parts."""
    before = 0
    for part in parts:
        first, last = max(start - before, 0), min(stop - before, part.numel())
        if first < last:
            yield part[first:last]
        before += part.numel()


def exact(tensor):
    return payload_bytes_of(tensor).clone()


@pytest.mark.parametrize("cut", [0, 1, 16, 50])
def test_there_and_back(engine, tensor, cut):
    about = header_of(tensor, class_tag="", extras=b"", cost_s=0.0)
    whole, parts = arena_parts(about.payload_bytes, cut)
    down = engine.demote(tensor, iter(parts))
    down.wait()
    assert down.done()
    assert whole[about.payload_bytes :].tolist() == [0xEE] * 8  # not a byte beyond
    target = torch.empty(about.shape, dtype=dtype_of(about))
    up = engine.promote(iter(parts), payload_bytes_of(target), down)
    up.wait()
    assert up.done()
    assert torch.equal(payload_bytes_of(target), exact(tensor))


def test_a_promotion_comes_after_the_demotion_it_is_told_of(engine):
    tensor = TENSORS["bfloat16"]
    _, parts = arena_parts(2000, 700)
    down = engine.demote(tensor, parts)
    target = torch.empty_like(tensor)
    engine.promote(parts, payload_bytes_of(target), down).wait()
    assert torch.equal(target, tensor)
    assert down.done()


@pytest.mark.parametrize("after", [None, FINISHED])
def test_a_promotion_may_depend_on_nothing(engine, after):
    source = torch.arange(10, dtype=torch.uint8)
    target = torch.zeros(10, dtype=torch.uint8)
    engine.promote([source[:3], source[3:]], target, after).wait()
    assert torch.equal(target, source)


def test_a_promotion_may_be_made_in_steps(engine):
    tensor = TENSORS["bfloat16"]
    _, parts = arena_parts(2000, 700)
    down = engine.demote(tensor, parts)
    target = torch.empty_like(tensor)
    flat = payload_bytes_of(target)
    ups = [
        engine.promote(parts_of(parts, start, stop), flat[start:stop], down)
        for start, stop in ((0, 1), (1, 1999), (1999, 2000))
    ]
    for up in ups:
        up.wait()
    assert torch.equal(target, tensor)


def test_copies_do_not_disturb_each_other(engine):
    tensors = [torch.full((300,), number, dtype=torch.uint8) for number in range(5)]
    slots = [arena_parts(300, 100)[1] for _ in tensors]
    downs = [engine.demote(tensor, slot) for tensor, slot in zip(tensors, slots, strict=True)]
    targets = [torch.zeros(300, dtype=torch.uint8) for _ in tensors]
    for down, slot, target in reversed(list(zip(downs, slots, targets, strict=True))):
        engine.promote(slot, target, down).wait()
    assert all(map(torch.equal, targets, tensors))


def test_waiting_and_asking_again_are_harmless(engine):
    down = engine.demote(TENSORS["bytes"], arena_parts(100, 0)[1])
    for _ in range(3):
        down.wait()
        assert down.done()


@pytest.mark.parametrize("inference", [True, False])
def test_in_inference_mode_and_out_of_it(engine, inference):
    tensor = torch.arange(9.0)
    _, parts = arena_parts(36, 8)
    with torch.inference_mode(inference):
        down = engine.demote(tensor, parts)
    with torch.inference_mode(not inference):
        target = torch.empty(9)
        engine.promote(parts, payload_bytes_of(target), down).wait()
    assert torch.equal(target, tensor)


def test_nothing_is_captured_on_a_cpu(engine):
    assert not engine.capturing(torch.device("cpu"))


# What only the manual engine does


def test_a_manual_engine_refuses_copies_while_it_captures():
    engine = ManualCopyEngine()
    tensor, (_, parts) = TENSORS["bytes"], arena_parts(100, 10)
    down = engine.demote(tensor, parts)
    engine.captures = True
    assert engine.capturing(torch.device("cpu"))
    for start in (
        lambda: engine.demote(tensor, parts),
        lambda: engine.promote(parts, torch.empty(100, dtype=torch.uint8), None),
    ):
        with pytest.raises(AssertionError, match="captured"):
            start()
    down.wait()
    assert not down.done()
    engine.complete()  # by itself, as a copy on a device would
    assert not down.done()
    engine.captures = False
    assert down.done()


def test_a_manual_copy_ends_on_command_and_shows_poison_before():
    engine = ManualCopyEngine()
    slots = [arena_parts(10, 4) for _ in range(3)]
    tensors = [torch.full((10,), number, dtype=torch.uint8) for number in range(3)]
    downs = [engine.demote(t, parts) for t, (_, parts) in zip(tensors, slots, strict=True)]
    assert not any(down.done() for down in downs)
    assert all(whole[:10].tolist() == [0xA5] * 10 for whole, _ in slots)
    engine.complete(1)
    assert [down.done() for down in downs] == [False, True, False]
    downs[0].wait()
    engine.complete(7)  # of the one that is left
    assert [down.done() for down in downs] == [True, True, True]
    assert [whole[0].item() for whole, _ in slots] == [0, 1, 2]
    engine.complete()  # none is left
    assert engine.pending == []


def test_a_manual_promotion_ends_on_command_after_those_before_it():
    engine = ManualCopyEngine()
    source = torch.arange(10, dtype=torch.uint8)
    targets = [torch.zeros(10, dtype=torch.uint8) for _ in range(2)]
    ups = [engine.promote([source], target, None) for target in targets]
    assert not any(up.done() for up in ups)
    assert all(target.eq(0xA5).all() for target in targets)
    ups[1].wait()
    assert all(up.done() for up in ups)
    assert all(torch.equal(target, source) for target in targets)


def test_a_manual_demotion_reads_what_was_promoted_before_it():
    engine = ManualCopyEngine()
    source, target = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    engine.promote([source], target, None)
    whole, parts = arena_parts(10, 4)
    engine.demote(target, parts).wait()
    assert torch.equal(whole[:10], source)


@pytest.mark.parametrize("held", [True, False])
def test_a_manual_demotion_reads_garbage_once_its_source_was_let_go(held):
    engine = ManualCopyEngine()
    whole, parts = arena_parts(10, 4)
    tensor = torch.full((10,), 7, dtype=torch.uint8)
    engine.demote(tensor, parts)
    if not held:
        del tensor
    engine.complete()
    assert whole[:10].tolist() == [7 if held else 0xA5] * 10


def test_a_manual_engine_knows_what_its_copies_touch():
    engine = ManualCopyEngine()
    whole, parts = arena_parts(10, 4)
    engine.demote(TENSORS["bytes"][:10], parts)
    assert engine.touches(whole[9:10])
    assert not engine.touches(whole[10:])
    engine.complete()
    assert not engine.touches(whole)
