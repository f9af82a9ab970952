"""The arena: shared memory in extents.

Owns: what is mapped, shared and sealed, and what of it is made ready ahead of need. Does not own:
which runs are chosen (test_host_extents.py), or the thread (test_host_preparation.py).
"""

import gc
import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.host import arena as arena_module
from tiered_mmcache.host import memory_policy
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import PAGE_BYTES, Extent
from tiered_mmcache.host.page_locking import NoPageLocking, PageLockingError
from tiered_mmcache.testing import ManualPageLocker, ManualThread

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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


# Ready ahead of need


@pytest.fixture
def thread():
    return ManualThread()


@pytest.fixture
def locker():
    return ManualPageLocker()


@pytest.fixture
def prepared(thread, locker, monkeypatch):
    """An arena of eight pages in segments of two, whose CUDA device is played by a fake."""
    monkeypatch.setattr(arena_module, "numa_node_of", lambda device: None)

    def make_locker(device):
        return locker if device.type == "cuda" else NoPageLocking()

    made = Arena(
        8 * PAGE_BYTES, make_locker=make_locker, segment_bytes=2 * PAGE_BYTES, start=thread
    )
    yield made
    made.close()
    thread.run()
    assert locker.locked == {}


def backed_pages(arena):
    """Blocks of the memfd, in pages."""
    return os.fstat(arena.fd).st_blocks * 512 // PAGE_BYTES


def test_construction_and_use_make_nothing_ready(prepared, thread):
    prepared.reserve(4 * PAGE_BYTES)
    assert thread.starts == 0
    assert backed_pages(prepared) == 0


def test_the_first_device_has_the_first_segment_made_ready(prepared, thread, locker):
    prepared.prepare_for(CUDA)
    prepared.prepare_for(CUDA)
    assert thread.starts == 1
    thread.run()
    assert backed_pages(prepared) == 2
    assert prepared.page_locked_bytes == 2 * PAGE_BYTES
    (address,) = locker.locked
    assert address == next(prepared.slices([Extent(0, 1)], 0, 1)).data_ptr()
    runs = prepared.reserve(2 * PAGE_BYTES)
    thread.run()
    assert runs == [Extent(0, 2 * PAGE_BYTES)]
    assert prepared.page_locked_bytes == 4 * PAGE_BYTES


def test_what_was_written_stays_when_memory_is_made_ready(prepared, thread):
    runs = prepared.reserve(8 * PAGE_BYTES)
    values = torch.arange(8 * PAGE_BYTES).to(torch.uint8)
    for part, some in zip(
        prepared.slices(runs, 0, 8 * PAGE_BYTES), values.split(2 * PAGE_BYTES), strict=True
    ):
        part.copy_(some)
    prepared.prepare_for(CUDA)
    thread.run()
    assert prepared.page_locked_bytes == 8 * PAGE_BYTES
    assert torch.equal(torch.cat(list(prepared.slices(runs, 0, 8 * PAGE_BYTES))), values)


def test_cpu_tensors_get_memory_that_is_backed_and_not_locked(prepared, thread, locker):
    prepared.prepare_for(CPU)
    thread.run()
    assert backed_pages(prepared) == 2
    assert prepared.page_locked_bytes == 0
    prepared.prepare_for(CUDA)
    thread.run()
    assert prepared.page_locked_bytes == 2 * PAGE_BYTES
    prepared.prepare_for(torch.device("xpu", 0))
    assert thread.starts == 2


def test_a_cpu_after_a_device_changes_nothing(prepared, thread):
    prepared.prepare_for(CUDA)
    thread.run()
    prepared.prepare_for(CPU)
    thread.run()
    assert prepared.page_locked_bytes == 2 * PAGE_BYTES


def test_locked_runs_are_used_before_others(prepared, thread, locker):
    prepared.prepare_for(CUDA)
    thread.step()
    locker.fails = "no more"
    held = [prepared.reserve(PAGE_BYTES) for _ in range(8)]
    thread.run()
    assert prepared.page_locked_bytes == 2 * PAGE_BYTES
    assert prepared.take_failure() == "no more"
    assert prepared.take_failure() is None
    prepared.release(held[1])
    for runs in held[4:]:
        prepared.release(runs)
    assert prepared.reserve(PAGE_BYTES) == [Extent(PAGE_BYTES, PAGE_BYTES)]
    assert prepared.reserve(PAGE_BYTES) == [Extent(4 * PAGE_BYTES, PAGE_BYTES)]


def test_no_slice_crosses_the_end_of_a_segment(prepared):
    runs = [Extent(PAGE_BYTES, 6 * PAGE_BYTES)]
    parts = list(prepared.slices(runs, 10, 5 * PAGE_BYTES))
    assert [part.numel() for part in parts] == [
        PAGE_BYTES - 10,
        2 * PAGE_BYTES,
        2 * PAGE_BYTES,
    ]
    assert parts[0].data_ptr() + parts[0].numel() == parts[1].data_ptr()


def test_a_setting_that_cannot_be_kept_is_told_and_memory_is_backed_all_the_same(thread):
    def make_locker(device):
        raise PageLockingError("write auto")

    arena = Arena(8 * PAGE_BYTES, make_locker=make_locker, start=thread)
    arena.prepare_for(CPU)
    thread.run()
    assert arena.take_failure() == "write auto"
    assert arena.take_failure() is None
    assert backed_pages(arena) == 8
    arena.close()
    arena.prepare_for(CUDA)
    assert arena.take_failure() is None


def test_memory_that_is_still_being_locked_stays_mapped_after_the_end(thread, locker):
    arena = Arena(PAGE_BYTES, make_locker=lambda device: locker, start=thread)
    part = next(arena.slices([Extent(0, PAGE_BYTES)], 0, PAGE_BYTES))
    address = part.data_ptr()
    del part
    arena.prepare_for(CPU)
    arena.close()  # the thread has not come to its first step
    del arena
    gc.collect()
    assert is_mapped(address)
    thread.run()
    assert locker.locked == {}
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= address < end:
            return "tiered_mmcache" in line
    return False


def test_memory_is_given_back_at_the_end_while_the_arena_is_still_referred_to(thread, locker):
    arena = Arena(PAGE_BYTES, make_locker=lambda device: locker, start=thread)
    arena.prepare_for(CPU)
    thread.run()
    (address,) = locker.locked
    assert is_mapped(address)
    thread.none_left = True  # unlocked at once then
    arena.close()
    assert locker.locked == {}
    assert not is_mapped(address)


def test_an_arena_that_is_dropped_is_unlocked_first(thread, locker):
    arena = Arena(PAGE_BYTES, make_locker=lambda device: locker, start=thread)
    arena.prepare_for(CPU)
    thread.run()
    (address,) = locker.locked
    del arena
    gc.collect()
    assert is_mapped(address)  # not unmapped before it is unlocked
    thread.run()
    assert locker.locked == {}


def test_descriptors_are_not_left_behind(thread, locker):
    before = len(list(Path("/proc/self/fd").iterdir()))
    arena = Arena(PAGE_BYTES, make_locker=lambda device: locker, start=thread)
    arena.prepare_for(CPU)
    thread.run()
    arena.close()
    thread.run()
    del arena
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_node_of_the_device_is_preferred_for_the_whole_arena(monkeypatch, locker, thread):
    asked = []
    monkeypatch.setattr(arena_module, "numa_node_of", lambda device: device.index)
    monkeypatch.setattr(
        memory_policy, "prefer_node", lambda *arguments: asked.append(arguments) or False
    )
    arena = Arena(3 * PAGE_BYTES, make_locker=lambda device: locker, start=thread)
    arena.prepare_for(torch.device("cuda", 1))
    address = next(arena.slices([Extent(0, 1)], 0, 1)).data_ptr()
    assert asked == [(address, 3 * PAGE_BYTES, 1)]
    arena.close()


@pytest.mark.parametrize("problem", [None, "the kernel has none"])
def test_huge_pages_are_asked_for_when_wanted_and_a_refusal_is_logged(
    monkeypatch, caplog, thread, problem
):
    mappings = []
    monkeypatch.setattr(
        memory_policy, "advise_huge_pages", lambda memory: mappings.append(memory) or problem
    )
    committed = []
    monkeypatch.setattr(memory_policy, "commit", lambda *arguments: committed.append(arguments))
    Arena(PAGE_BYTES).close()
    assert mappings == []
    with caplog.at_level(logging.WARNING, logger="tiered_mmcache"):
        arena = Arena(PAGE_BYTES, huge_pages=True, start=thread)
    assert [len(memory) for memory in mappings] == [PAGE_BYTES]
    arena.prepare_for(CPU)
    thread.run()
    # A memfd that is backed before it is touched is backed by small pages.
    assert len(committed) == (0 if problem is None else 1)
    assert [record.getMessage() for record in caplog.records] == (
        [] if problem is None else ["host.huge_pages has no effect: the kernel has none"]
    )
    mappings.clear()
    arena.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on any fork
def test_a_fork_works_while_memory_is_being_made_ready_and_the_child_ends():
    """The real thread; the child has none, and must neither wait for it nor unlock."""
    locker = ManualPageLocker()
    arena = Arena(1 << 28, make_locker=lambda device: locker)
    arena.prepare_for(CPU)
    arena.reserve(1 << 27)
    child = os.fork()
    if child == 0:
        try:
            before = dict(locker.locked)
            arena.close()
            os._exit(0 if locker.locked == before else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    arena.close()
    assert locker.locked == {}


def test_a_process_may_end_while_memory_is_being_made_ready():
    code = (
        "import torch\n"
        "from tiered_mmcache.host.arena import Arena\n"
        "arena = Arena(1 << 28)\n"
        "arena.prepare_for(torch.device('cpu'))\n"
        "arena.reserve(1 << 28)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, b"")
