"""Which parts of the arena are free: pure bookkeeping, without memory.

Owns: the free runs of an address range and the choice of runs for a request.
Does not own: the memory itself, or when a run may be given back (:mod:`.arena`, :mod:`.tier`).

Free runs are kept in size classes, 16 to each power of two, each a heap by offset, and a bit set
of the classes that are not empty: taking and giving a run costs O(log n). A request gets one run
where one is large enough, several when memory is in pieces, so fragmentation alone never refuses
what fits. Of the runs that serve equally well the one with the lowest offset is taken, so that
memory which was never used is used last. The choice depends on the calls alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

PAGE_BYTES = 4096
_SUBCLASS_BITS = 4
_LOOK_AT_MOST = 64  # runs of the request's own size class, when no larger class has one
_MOST_GONE = 64  # offsets in a heap that are no longer free runs of its class, beside the others


class Extent(NamedTuple):
    """A run of arena pages.

    Attributes:
        offset: Bytes from the start of the arena, a multiple of ``PAGE_BYTES``.
        length: Bytes, a multiple of ``PAGE_BYTES``.
    """

    offset: int
    length: int


def rounded(payload_bytes: int) -> int:
    """Arena bytes that a payload occupies: whole pages, at least one."""
    return max(1, -(-payload_bytes // PAGE_BYTES)) * PAGE_BYTES


class _SizeClass:
    """The free runs of one size class: a heap of offsets, some of which are gone already."""

    __slots__ = ("members", "offsets")

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.offsets: list[int] = []

    def add(self, offset: int) -> None:
        self.members.add(offset)
        heapq.heappush(self.offsets, offset)

    def remove(self, offset: int) -> None:
        self.members.remove(offset)
        if len(self.offsets) > 2 * len(self.members) + _MOST_GONE:
            self.offsets = sorted(self.members)  # a sorted list is a heap

    def lowest(self) -> int:
        """The lowest offset of a class that is not empty."""
        while self.offsets[0] not in self.members:
            heapq.heappop(self.offsets)
        return self.offsets[0]

    def some(self, count: int) -> Iterator[int]:
        """So many members at most, roughly from the lowest offset on."""
        return islice((offset for offset in self.offsets if offset in self.members), count)


class ExtentAllocator:
    """Hands out runs of an address range of ``capacity_bytes``.

    Attributes:
        free_bytes: What is not handed out.
        high_water_bytes: Where the highest run that was ever handed out ended.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = 0
        self.high_water_bytes = 0
        self._length_at: dict[int, int] = {}  # offset of a free run -> its length
        self._start_of_end: dict[int, int] = {}  # end of a free run -> its offset
        self._classes: dict[int, _SizeClass] = {}
        self._filled = 0  # bit per size class that has a run
        if self.capacity_bytes:
            self.release([Extent(0, self.capacity_bytes)])

    def reserve(self, size_bytes: int, *, preferred_bytes: int = 0) -> list[Extent] | None:
        """Runs that together hold ``size_bytes``, in whole pages; None when too few are free.

        Args:
            size_bytes: The payload.
            preferred_bytes: One run that ends below this offset is taken before any other.
        """
        wanted = rounded(size_bytes)
        if wanted > self.free_bytes:
            return None
        runs = []
        offset = self._fitting_below(wanted, preferred_bytes)
        while wanted:
            if offset is None:
                offset = self._fitting(wanted)
            if offset is None:
                offset = self._largest()
            taken = min(wanted, self._length_at[offset])
            self._take(offset, taken)
            runs.append(Extent(offset, taken))
            wanted -= taken
            offset = None
        return runs

    def release(self, runs: list[Extent]) -> None:
        """Give runs back; neighbours grow together."""
        for offset, length in runs:
            self.free_bytes += length
            start, end = offset, offset + length
            before = self._start_of_end.get(start)
            if before is not None:
                self._forget(before)
                start = before
            after_length = self._length_at.get(end)
            if after_length is not None:
                self._forget(end)
                end += after_length
            self._remember(start, end - start)

    @property
    def free_runs(self) -> int:
        """Into how many pieces the free memory is cut."""
        return len(self._length_at)

    def _fitting(self, wanted: int) -> int | None:
        """A run that is large enough, from the lowest size class that is known to have one."""
        return next(self._candidates(wanted), None)

    def _fitting_below(self, wanted: int, end_bytes: int) -> int | None:
        """A run whose first ``wanted`` bytes end at ``end_bytes`` or before, if one is found."""
        if wanted > end_bytes or self.high_water_bytes + wanted <= end_bytes:
            return None  # none can, or the usual choice does
        fitting = (run for run in self._candidates(wanted) if run + wanted <= end_bytes)
        return next(fitting, None)

    def _candidates(self, wanted: int) -> Iterator[int]:
        """Offsets of runs that are large enough: those that leave least over first.

        Every run of a class above the request's own is large enough; its own class holds some.
        """
        own = _class_of(wanted)
        if self._filled >> own & 1:
            for offset in self._classes[own].some(_LOOK_AT_MOST):
                if self._length_at[offset] >= wanted:
                    yield offset
        above = self._filled >> (own + 1)
        while above:
            yield self._classes[own + 1 + _lowest_bit(above)].lowest()
            above &= above - 1

    def _largest(self) -> int:
        return self._classes[self._filled.bit_length() - 1].lowest()

    def _take(self, offset: int, size_bytes: int) -> None:
        length = self._length_at[offset]
        self._forget(offset)
        if length > size_bytes:
            self._remember(offset + size_bytes, length - size_bytes)
        self.free_bytes -= size_bytes
        self.high_water_bytes = max(self.high_water_bytes, offset + size_bytes)

    def _remember(self, offset: int, length: int) -> None:
        self._length_at[offset] = length
        self._start_of_end[offset + length] = offset
        number = _class_of(length)
        self._classes.setdefault(number, _SizeClass()).add(offset)
        self._filled |= 1 << number

    def _forget(self, offset: int) -> None:
        length = self._length_at.pop(offset)
        del self._start_of_end[offset + length]
        number = _class_of(length)
        size_class = self._classes[number]
        size_class.remove(offset)
        if not size_class.members:
            del self._classes[number]
            self._filled &= ~(1 << number)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _class_of(length: int) -> int:
    pages = length // PAGE_BYTES
    power = pages.bit_length() - 1
    if power < _SUBCLASS_BITS:
        return pages
    fraction = (pages >> (power - _SUBCLASS_BITS)) & ((1 << _SUBCLASS_BITS) - 1)
    return ((power - _SUBCLASS_BITS + 1) << _SUBCLASS_BITS) | fraction
