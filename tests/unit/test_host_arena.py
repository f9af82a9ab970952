"""The arena: shared memory in extents.

Owns: what is mapped, shared and sealed. Does not own: which runs are chosen
(test_host_extents.py).
"""

import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import PAGE_BYTES, Extent


@pytest.fixture
def arena():
    made = Arena(8 * PAGE_BYTES)
    yield made
    made.close()


def test_the_capacity_is_whole_pages_and_at_least_one():
    for asked, pages in [(0, 1), (1, 1), (PAGE_BYTES, 1), (3 * PAGE_BYTES - 1, 2)]:
        arena = Arena(asked)
        assert arena.capacity_bytes == pages * PAGE_BYTES
        assert os.fstat(arena.fd).st_size == arena.capacity_bytes
        arena.close()


def test_what_is_reserved_is_used_until_it_is_released(arena):
    assert arena.used_bytes == 0
    runs = arena.reserve(PAGE_BYTES + 1)
    assert arena.used_bytes == 2 * PAGE_BYTES
    assert arena.reserve(7 * PAGE_BYTES) is None
    arena.release(runs)
    assert arena.used_bytes == 0
    assert arena.reserve(8 * PAGE_BYTES) is not None


def test_slices_hold_the_payload_in_order(arena):
    runs = [Extent(4 * PAGE_BYTES, PAGE_BYTES), Extent(0, 2 * PAGE_BYTES)]
    parts = list(arena.slices(runs, 0, PAGE_BYTES + 100))
    assert [part.numel() for part in parts] == [PAGE_BYTES, 100]
    assert {part.dtype for part in parts} == {torch.uint8}
    parts[0].fill_(1)
    parts[1].fill_(2)
    with mmap.mmap(arena.fd, 0) as memory:
        assert memory[4 * PAGE_BYTES : 5 * PAGE_BYTES] == b"\1" * PAGE_BYTES
        assert memory[:101] == b"\2" * 100 + b"\0"


def test_slices_leave_out_runs_that_the_payload_does_not_reach(arena):
    runs = [Extent(0, PAGE_BYTES), Extent(2 * PAGE_BYTES, PAGE_BYTES)]
    assert [part.numel() for part in arena.slices(runs, 0, PAGE_BYTES)] == [PAGE_BYTES]
    assert list(arena.slices(runs, 0, 0)) == []


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    edges=st.tuples(st.integers(0, 4 * 3 * PAGE_BYTES), st.integers(0, 4 * 3 * PAGE_BYTES)),
)
def test_any_part_of_a_payload_is_what_its_bytes_say(lengths, edges):
    """Runs in the reverse of their order in memory, so that a mistaken offset shows."""
    total_bytes = sum(lengths) * PAGE_BYTES
    start, stop = (min(edge, total_bytes) for edge in sorted(edges))
    arena = Arena(total_bytes)
    runs, offset = [], total_bytes
    for pages in lengths:
        offset -= pages * PAGE_BYTES
        runs.append(Extent(offset, pages * PAGE_BYTES))
    whole = list(arena.slices(runs, 0, total_bytes))
    assert [part.numel() for part in whole] == [run.length for run in runs]
    expected = (torch.arange(total_bytes) % 251).to(torch.uint8)
    for part, values in zip(whole, expected.split([run.length for run in runs]), strict=True):
        part.copy_(values)
    parts = list(arena.slices(runs, start, stop))
    assert all(part.numel() for part in parts)
    found = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    assert torch.equal(found, expected[start:stop])
    arena.close()


def test_another_process_sees_what_is_written(arena):
    runs = arena.reserve(PAGE_BYTES)
    next(arena.slices(runs, 0, 5)).copy_(torch.tensor(list(b"hello"), dtype=torch.uint8))
    assert os.pread(arena.fd, 5, runs[0].offset) == b"hello"
    os.pwrite(arena.fd, b"world", runs[0].offset)
    assert bytes(next(arena.slices(runs, 0, 5)).tolist()) == b"world"


def test_nobody_can_make_a_mapped_page_vanish(arena):
    for size_bytes in (0, PAGE_BYTES, 100 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)


def test_it_can_be_written_in_and_out_of_inference_mode():
    with torch.inference_mode():
        arena = Arena(PAGE_BYTES)
    runs = arena.reserve(PAGE_BYTES)
    next(arena.slices(runs, 0, 10)).fill_(7)
    with torch.inference_mode():
        part = next(arena.slices(runs, 0, 10))
        part.fill_(8)
    assert next(arena.slices(runs, 0, 10)).tolist() == [8] * 10
    arena.close()


def test_its_descriptor_is_not_inherited_by_accident(arena):
    assert not os.get_inheritable(arena.fd)


def test_closing_gives_the_descriptor_up_and_leaves_slices_alone():
    arena = Arena(PAGE_BYTES)
    part = next(arena.slices(arena.reserve(4), 0, 4))
    descriptor = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
    part.fill_(3)
    assert part.tolist() == [3] * 4


def test_untouched_memory_costs_nothing():
    arena = Arena(1 << 33)
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()
