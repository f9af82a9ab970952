"""Recycled buffers: never used again under a tensor that anybody still holds.

Owns: the stock of idle buffers. Does not own: what is copied into them.
"""

import errno
import itertools
import math
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiered_mmcache.host import recycled
from tiered_mmcache.host.recycled import RecycledBuffers

MIB = 1 << 20


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_buffer_is_used_again_once_nobody_holds_the_tensor():
    buffers = RecycledBuffers(8 * MIB)
    first = buffers.empty((2, MIB), torch.uint8)
    where = address(first)
    del first
    again = buffers.empty((MIB,), torch.bfloat16)
    assert address(again) == where
    assert buffers.idle_bytes == 0


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[5:7],
        lambda t: t.view(torch.uint8)[:1],
        lambda t: t.detach(),
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
    ],
    ids=["tensor", "view", "bytes", "detached", "storage", "array", "parameter"],
)
def test_whoever_holds_the_memory_keeps_it(hold):
    buffers = RecycledBuffers(8 * MIB)
    tensor = buffers.empty((MIB,), torch.float32)
    where = address(tensor)
    held = hold(tensor)
    del tensor
    other = buffers.empty((MIB,), torch.float32)
    assert address(other) != where
    del held
    assert address(buffers.empty((MIB,), torch.float32)) == where


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float8_e5m2, torch.complex128])
@pytest.mark.parametrize("inference", [True, False])
def test_a_tensor_is_as_any_other(dtype, inference):
    buffers = RecycledBuffers(64 * MIB)
    with torch.inference_mode(inference):
        tensor = buffers.empty((2, MIB), dtype)
    assert (tensor.shape, tensor.dtype) == ((2, MIB), dtype)
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert tensor.is_inference() == inference
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.storage_offset() == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (10,), (MIB - 1,)])
def test_small_tensors_are_left_to_the_allocator(shape):
    buffers = RecycledBuffers(8 * MIB)
    tensor = buffers.empty(shape, torch.uint8)
    assert tensor.shape == shape
    del tensor
    buffers.empty((MIB,), torch.uint8)
    assert buffers.idle_bytes == 0


def test_a_tensor_larger_than_the_stock_is_left_to_the_allocator():
    buffers = RecycledBuffers(2 * MIB)
    large = buffers.empty((3 * MIB,), torch.uint8)
    del large
    assert buffers._take(MIB) is None
    assert buffers.idle_bytes == 0


def test_a_much_larger_buffer_is_not_wasted_on_a_small_tensor():
    buffers = RecycledBuffers(16 * MIB)
    large = buffers.empty((4 * MIB,), torch.uint8)
    where = address(large)
    del large
    small = buffers.empty((2 * MIB,), torch.uint8)
    assert address(small) != where
    assert address(buffers.empty((4 * MIB,), torch.uint8)) == where


def test_what_is_idle_is_bounded_and_the_oldest_is_given_back():
    buffers = RecycledBuffers(4 * MIB)
    tensors = [buffers.empty((MIB + number * 400_000,), torch.uint8) for number in range(4)]
    sizes = [tensor.nbytes for tensor in tensors]
    while tensors:
        del tensors[0]
    assert buffers._take(64 * MIB) is None
    assert buffers.idle_bytes <= 4 * MIB
    assert buffers._take(sizes[0]) is None
    assert buffers._take(sizes[-1]) is not None


def test_memory_that_does_not_exist_is_an_error_that_is_expected():
    buffers = RecycledBuffers(1 << 62)
    with pytest.raises((OSError, RuntimeError, OverflowError)):
        buffers.empty((1 << 60,), torch.uint8)


def mapping_of(tensor):
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, *_ = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= address(tensor) < end:
            return flags
    raise AssertionError("the tensor's memory is not mapped")


def test_a_forked_child_keeps_its_own_copy():
    tensor = RecycledBuffers(8 * MIB).empty((2 * MIB,), torch.uint8)
    assert mapping_of(tensor).endswith("p")


class BuffersMachine(RuleBasedStateMachine):
    """Tensors come and go; those alive keep what was written, and never overlap."""

    def __init__(self):
        super().__init__()
        self.buffers = RecycledBuffers(6 * MIB)
        self.alive = []
        self.ticks = 0

    @rule(size_bytes=st.sampled_from([10, MIB, MIB + 1, MIB + 300_000, 2 * MIB, 7 * MIB]))
    def make(self, size_bytes):
        if len(self.alive) < 8:
            tensor = self.buffers.empty((size_bytes,), torch.uint8)
            self.ticks = self.ticks % 250 + 1
            self.alive.append((tensor.fill_(self.ticks), self.ticks))

    @rule(number=st.integers(0, 7))
    def drop(self, number):
        if number < len(self.alive):
            del self.alive[number]

    @invariant()
    def nothing_overlaps(self):
        spans = sorted((address(t), address(t) + t.nbytes) for t, _ in self.alive)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    @invariant()
    def what_was_written_stays(self):
        for tensor, tick in self.alive:
            assert tensor[0] == tensor[-1] == tensor[math.floor(len(tensor) / 2)] == tick

    @invariant()
    def the_count_is_true(self):
        assert self.buffers.idle_bytes == sum(map(len, self.buffers._idle.values()))
        assert self.buffers.idle_bytes <= 6 * MIB


TestBuffers = BuffersMachine.TestCase
TestBuffers.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


class WithoutHugePages(mmap.mmap):
    """Memory of a kernel that was built without them."""

    def madvise(self, *arguments):
        raise OSError(errno.EINVAL, "no such advice")


def test_new_memory_asks_for_huge_pages_and_does_without(monkeypatch):
    advised = []

    class Noted(mmap.mmap):
        def madvise(self, *arguments):
            advised.append(arguments)

    for kind in (Noted, WithoutHugePages):
        monkeypatch.setattr(recycled.mmap, "mmap", kind)
        tensor = RecycledBuffers(8 * MIB).empty((4 * MIB,), torch.uint8)
        assert tensor.fill_(7).eq(7).all()
    assert advised == [(mmap.MADV_HUGEPAGE,)]
