"""Which parts of the arena are free: pure bookkeeping, without memory.

Owns: the free runs of an address range and the choice of runs for a request.
Does not own: the memory itself, or when a run may be given back (:mod:`.arena`, :mod:`.tier`).

Free runs are kept in size classes, 16 to each power of two, and a bit set of the classes that
are not empty: taking and giving a run costs a constant number of dictionary operations. A
request gets one run where one is large enough, several when memory is in pieces, so
fragmentation alone never refuses what fits. The choice depends on the calls alone.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

PAGE_BYTES = 4096
_SUBCLASS_BITS = 4
_LOOK_AT_MOST = 64  # runs of the request's own size class, when no larger class has one


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


class ExtentAllocator:
    """Hands out runs of an address range of ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = 0
        self._length_at: dict[int, int] = {}  # offset of a free run -> its length
        self._start_of_end: dict[int, int] = {}  # end of a free run -> its offset
        self._classes: dict[int, OrderedDict[int, None]] = {}  # size class -> offsets, oldest first
        self._filled = 0  # bit per size class that has a run
        if self.capacity_bytes:
            self.release([Extent(0, self.capacity_bytes)])

    def reserve(self, size_bytes: int) -> list[Extent] | None:
        """Runs that together hold ``size_bytes``, in whole pages; None when too few are free."""
        wanted = rounded(size_bytes)
        if wanted > self.free_bytes:
            return None
        runs = []
        while wanted:
            offset = self._fitting(wanted)
            if offset is None:
                offset = self._largest()
            taken = min(wanted, self._length_at[offset])
            self._take(offset, taken)
            runs.append(Extent(offset, taken))
            wanted -= taken
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
        # Every run of a class above the request's own is large enough; its own class holds some.
        own = _class_of(wanted)
        above = self._filled >> (own + 1)
        if above:
            lowest = own + 1 + ((above & -above).bit_length() - 1)
            return next(iter(self._classes[lowest]))
        for offset in islice(self._classes.get(own, ()), _LOOK_AT_MOST):
            if self._length_at[offset] >= wanted:
                return offset
        return None

    def _largest(self) -> int:
        return next(iter(self._classes[self._filled.bit_length() - 1]))

    def _take(self, offset: int, size_bytes: int) -> None:
        length = self._length_at[offset]
        self._forget(offset)
        if length > size_bytes:
            self._remember(offset + size_bytes, length - size_bytes)
        self.free_bytes -= size_bytes

    def _remember(self, offset: int, length: int) -> None:
        self._length_at[offset] = length
        self._start_of_end[offset + length] = offset
        number = _class_of(length)
        self._classes.setdefault(number, OrderedDict())[offset] = None
        self._filled |= 1 << number

    def _forget(self, offset: int) -> None:
        length = self._length_at.pop(offset)
        del self._start_of_end[offset + length]
        number = _class_of(length)
        members = self._classes[number]
        del members[offset]
        if not members:
            del self._classes[number]
            self._filled &= ~(1 << number)


def _class_of(length: int) -> int:
    pages = length // PAGE_BYTES
    power = pages.bit_length() - 1
    if power < _SUBCLASS_BITS:
        return pages
    fraction = (pages >> (power - _SUBCLASS_BITS)) & ((1 << _SUBCLASS_BITS) - 1)
    return ((power - _SUBCLASS_BITS + 1) << _SUBCLASS_BITS) | fraction
