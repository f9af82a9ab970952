"""The extent allocator against a bitmap: nothing overlaps, nothing that fits is refused.

Owns: the bookkeeping of free runs. Does not own: memory (test_host_arena.py).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_mmcache.host import extents
from tiered_mmcache.host.extents import PAGE_BYTES, Extent, ExtentAllocator, rounded

PAGES = 600


class AllocatorMachine(RuleBasedStateMachine):
    """Reserves and releases against one boolean for each page."""

    def __init__(self):
        super().__init__()
        self.allocator = ExtentAllocator(PAGES * PAGE_BYTES)
        self.taken = [False] * PAGES
        self.held = []

    def free_runs(self):
        runs = []
        start = None
        for page, taken in enumerate([*self.taken, True]):
            if not taken and start is None:
                start = page
            elif taken and start is not None:
                runs.append((start, page - start))
                start = None
        return runs

    def mark(self, runs, taken):
        for offset, length in runs:
            assert offset % PAGE_BYTES == 0 == length % PAGE_BYTES
            assert length > 0
            for page in range(offset // PAGE_BYTES, (offset + length) // PAGE_BYTES):
                assert self.taken[page] is not taken
                self.taken[page] = taken

    def must_be_one_run(self, pages):
        """Whether the documented choice finds a single run: a larger class, or one of 64."""
        own = extents._class_of(pages * PAGE_BYTES)
        classes = [
            (extents._class_of(length * PAGE_BYTES), length) for _, length in self.free_runs()
        ]
        same = [length for number, length in classes if number == own]
        larger = any(number > own for number, _ in classes)
        return larger or (len(same) <= 64 and any(length >= pages for length in same))

    @rule(
        size_bytes=st.integers(0, 40 * PAGE_BYTES) | st.integers(0, PAGES * PAGE_BYTES + 1),
        preferred_pages=st.just(0) | st.integers(0, PAGES),
    )
    def reserve(self, size_bytes, preferred_pages):
        pages = rounded(size_bytes) // PAGE_BYTES
        free = self.taken.count(False)
        one_run = self.must_be_one_run(pages)
        runs = self.allocator.reserve(size_bytes, preferred_bytes=preferred_pages * PAGE_BYTES)
        if pages > free:
            assert runs is None
            return
        assert runs is not None
        assert sum(run.length for run in runs) == pages * PAGE_BYTES
        assert not one_run or len(runs) == 1
        self.mark(runs, True)
        self.held.append(runs)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        runs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.mark(runs, False)
        self.allocator.release(runs)

    @precondition(lambda self: self.held)
    @rule()
    def release_everything(self):
        while self.held:
            runs = self.held.pop()
            self.mark(runs, False)
            self.allocator.release(runs)

    @invariant()
    def the_books_agree(self):
        runs = self.free_runs()
        assert self.allocator.free_bytes == self.taken.count(False) * PAGE_BYTES
        assert self.allocator.free_runs == len(runs)
        assert self.allocator._length_at == {
            start * PAGE_BYTES: length * PAGE_BYTES for start, length in runs
        }
        assert self.allocator._start_of_end == {
            (start + length) * PAGE_BYTES: start * PAGE_BYTES for start, length in runs
        }
        by_class = {}
        for start, length in runs:
            number = extents._class_of(length * PAGE_BYTES)
            by_class.setdefault(number, set()).add(start * PAGE_BYTES)
        classes = self.allocator._classes
        assert {number: found.members for number, found in classes.items()} == by_class
        for number, found in classes.items():
            assert found.lowest() == min(by_class[number])
            assert by_class[number] <= set(found.offsets)
            assert len(found.offsets) <= 2 * len(found.members) + extents._MOST_GONE
        assert self.allocator._filled == sum(1 << number for number in by_class)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("payload_bytes", "expected"),
    [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (262_080, 262_144)],
)
def test_a_payload_takes_whole_pages_and_at_least_one(payload_bytes, expected):
    assert rounded(payload_bytes) == expected


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_longer_run_is_never_in_a_lower_class(one, other):
    shorter, longer = sorted([one, other])
    assert extents._class_of(shorter * PAGE_BYTES) <= extents._class_of(longer * PAGE_BYTES)


@given(st.integers(1, 10**7))
def test_a_class_is_at_most_a_sixteenth_wide(pages):
    number = extents._class_of(pages * PAGE_BYTES)
    wider = pages + pages // 16 + 1
    assert extents._class_of(wider * PAGE_BYTES) > number


def test_the_capacity_is_whole_pages():
    allocator = ExtentAllocator(3 * PAGE_BYTES - 1)
    assert allocator.capacity_bytes == allocator.free_bytes == 2 * PAGE_BYTES


def test_without_a_page_everything_is_refused():
    allocator = ExtentAllocator(PAGE_BYTES - 1)
    assert allocator.capacity_bytes == 0
    assert allocator.free_runs == 0
    assert allocator.reserve(0) is None


def test_fragments_serve_a_request_that_fits_no_single_run():
    allocator = ExtentAllocator(8 * PAGE_BYTES)
    pages = [allocator.reserve(1) for _ in range(8)]
    for runs in pages[::2]:
        allocator.release(runs)
    assert allocator.free_runs == 4
    runs = allocator.reserve(4 * PAGE_BYTES)
    assert len(runs) == 4
    assert allocator.free_bytes == 0
    assert allocator.reserve(1) is None
    allocator.release(runs)
    for kept in pages[1::2]:
        allocator.release(kept)
    assert allocator.free_runs == 1
    assert allocator.reserve(8 * PAGE_BYTES) == [Extent(0, 8 * PAGE_BYTES)]


def allocator_with_runs(pages_of_runs):
    """An allocator with free runs of these lengths, each parted from the next by a used page."""
    allocator = ExtentAllocator((sum(pages_of_runs) + len(pages_of_runs)) * PAGE_BYTES)
    parts = []
    for pages in pages_of_runs:
        parts.append(allocator.reserve(pages * PAGE_BYTES))
        assert len(parts[-1]) == 1
        allocator.reserve(1)
    for runs in parts:
        allocator.release(runs)
    return allocator


def test_a_run_beyond_the_sixty_fourth_of_a_class_is_not_looked_for():
    """The bound on the search: the request is then served in two runs, and still served."""
    assert extents._class_of(32 * PAGE_BYTES) == extents._class_of(33 * PAGE_BYTES)
    found = allocator_with_runs([32] * 63 + [33]).reserve(33 * PAGE_BYTES)
    assert [run.length // PAGE_BYTES for run in found] == [33]
    split = allocator_with_runs([32] * 64 + [33]).reserve(33 * PAGE_BYTES)
    assert [run.length // PAGE_BYTES for run in split] == [32, 1]


def test_offsets_of_runs_that_are_gone_do_not_gather():
    """A heap forgets by itself only what is at its top: here that is a run too short to be used."""
    allocator = allocator_with_runs([32, 33])
    number = extents._class_of(33 * PAGE_BYTES)
    most = 0
    for _ in range(1000):
        (taken,) = allocator.reserve(33 * PAGE_BYTES)
        assert taken.offset == 33 * PAGE_BYTES
        allocator.release([taken])
        most = max(most, len(allocator._classes[number].offsets))
    assert extents._MOST_GONE < most <= 2 * 2 + extents._MOST_GONE


def test_memory_that_was_never_used_is_used_last():
    allocator = ExtentAllocator(100 * PAGE_BYTES)
    held = [allocator.reserve(7 * PAGE_BYTES) for _ in range(3)]
    for _ in range(20):
        allocator.release(held.pop(0))
        held.append(allocator.reserve(7 * PAGE_BYTES))
    assert allocator.high_water_bytes == 21 * PAGE_BYTES


def test_of_equal_runs_the_lowest_is_taken():
    allocator = allocator_with_runs([3, 3, 3])
    allocator.reserve(1)  # from the first of them
    assert allocator.reserve(3 * PAGE_BYTES) == [Extent(4 * PAGE_BYTES, 3 * PAGE_BYTES)]


def test_preferred_memory_is_taken_even_where_more_is_left_over():
    allocator = allocator_with_runs([9, 3])
    assert allocator.reserve(3 * PAGE_BYTES, preferred_bytes=9 * PAGE_BYTES) == [
        Extent(0, 3 * PAGE_BYTES)
    ]
    assert allocator.reserve(3 * PAGE_BYTES) == [Extent(10 * PAGE_BYTES, 3 * PAGE_BYTES)]


@pytest.mark.parametrize("preferred_pages", [1, 2])
def test_what_fits_no_preferred_run_is_served_from_the_rest(preferred_pages):
    """In one run: preferred memory is not worth pieces."""
    allocator = allocator_with_runs([2, 5])
    found = allocator.reserve(4 * PAGE_BYTES, preferred_bytes=preferred_pages * PAGE_BYTES)
    assert found == [Extent(3 * PAGE_BYTES, 4 * PAGE_BYTES)]


def test_the_choice_depends_on_the_calls_alone():
    def play():
        allocator = ExtentAllocator(1000 * PAGE_BYTES)
        held = []
        for step in range(300):
            if step % 3 == 2:
                allocator.release(held.pop(step * 7 % len(held)))
            else:
                held.append(allocator.reserve(step % 9 * PAGE_BYTES))
        return held

    assert play() == play()
