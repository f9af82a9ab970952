"""What host and disk tiers of given sizes make of a trace, by the rules of the real ones.

Owns: those rules, on keys and sizes alone. Does not own: the tiers themselves
(:mod:`tiered_mmcache.tiers`), of which this must say the same, or the hot tier's stack distances
(:mod:`.distances`).

Below the hot tier the order of use alone does not decide. A promoted entry leaves a copy in host
memory that is the first to go; arena pages are whole; the disk's order is that in which entries
left memory or were read; entries that memory holds may be evicted from disk unnoticed. So each pair
of sizes is played, while the hot tier, whose contents do not depend on what is below, is played
once for all of them.

Nothing takes time here: every write is done at once, no read is late and none is declined.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

from tiered_mmcache.disk.layout import charged_entry_bytes
from tiered_mmcache.entries.record import CHUNK_BYTES
from tiered_mmcache.host.extents import rounded

__all__ = ["Entries", "Found", "HotTier", "LowerTiers"]

_RECORD_BYTES = 150  # of a usual record without its digests
_DIGEST_BYTES = 8
_BUDGET_TO_ROOM = 32  # as in tiered_mmcache.disk.changes: room ahead is at most this part


class Found(IntEnum):
    """Where a request was answered."""

    HOT = 0
    HOST = 1
    DISK = 2
    MISS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Entries:
    """What each key takes from each tier's budget; a key is an index."""

    hot_bytes: Sequence[int]
    host_bytes: Sequence[int]
    disk_bytes: Sequence[int]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Entries:
        """Entries of these sizes."""
        sizes = list(sizes)
        known = {size: (rounded(size), _store_bytes(size)) for size in set(sizes)}
        return cls(sizes, [known[size][0] for size in sizes], [known[size][1] for size in sizes])


def _store_bytes(size_bytes: int) -> int:
    digests = _DIGEST_BYTES * -(-size_bytes // CHUNK_BYTES)
    return charged_entry_bytes(_RECORD_BYTES + digests, size_bytes)


class HotTier:
    """The hot tier's contents.

    Args:
        entries: The sizes.
        budget_bytes: The tier's size.
        largest_bytes: The largest entry it takes; more than the budget where that is scaled down
            with a sample, in which case it holds one such entry.
    """

    def __init__(self, entries: Entries, budget_bytes: int, largest_bytes: int) -> None:
        self._sizes = entries.hot_bytes
        self._budget_bytes = budget_bytes
        self._largest_bytes = largest_bytes
        self._held: OrderedDict[int, None] = OrderedDict()
        self._used_bytes = 0

    def misses(self, keys: Iterable[int]) -> Iterator[tuple[int, bool, list[int]]]:
        """The requests that it does not answer.

        Each comes with its key, whether that is admitted, and what has to go for it, the next
        victim first.
        """
        held = self._held
        for key in keys:
            if key in held:
                held.move_to_end(key)
            elif self._sizes[key] > self._largest_bytes:
                yield key, False, []
            else:
                victims = self._make_room(self._sizes[key])
                held[key] = None
                self._used_bytes += self._sizes[key]
                yield key, True, victims

    def _make_room(self, size_bytes: int) -> list[int]:
        victims = []
        while self._held and self._used_bytes + size_bytes > self._budget_bytes:
            victim, _ = self._held.popitem(last=False)
            self._used_bytes -= self._sizes[victim]
            victims.append(victim)
        return victims


class _Store:
    """The disk: least recently stored, read or given up by memory goes first."""

    def __init__(self, sizes: Sequence[int], budget_bytes: int, largest_bytes: int) -> None:
        self._sizes = sizes
        self._budget_bytes = budget_bytes
        self._largest_bytes = largest_bytes
        self._held: OrderedDict[int, None] = OrderedDict()
        self._used_bytes = 0
        self._put_bytes = 0

    def touch(self, key: int) -> bool:
        """Make a key the last to go; False when the store does not hold it."""
        if key not in self._held:
            return False
        self._held.move_to_end(key)
        return True

    def put(self, key: int) -> None:
        """Store a key; the least recently used ones go for it."""
        size_bytes = self._sizes[key]
        self.remove(key)
        if size_bytes > self._largest_bytes:
            return
        self._evict_down_to(self._budget_bytes - size_bytes)
        self._held[key] = None
        self._used_bytes += size_bytes
        self._put_bytes += size_bytes

    def commit(self) -> None:
        """End a transaction, in which the store makes room for two more like it."""
        if 0 < 2 * self._put_bytes <= self._budget_bytes // _BUDGET_TO_ROOM:
            self._evict_down_to(self._budget_bytes - 2 * self._put_bytes)
        self._put_bytes = 0

    def remove(self, key: int) -> None:
        """Remove a key if it is there."""
        if key in self._held:
            del self._held[key]
            self._used_bytes -= self._sizes[key]

    def _evict_down_to(self, most_bytes: int) -> None:
        while self._held and self._used_bytes > most_bytes:
            self.remove(next(iter(self._held)))


class LowerTiers:
    """Host memory and disk below a hot tier.

    Args:
        entries: The sizes.
        host_bytes: The host tier's size; 0 is none.
        disk_bytes: The disk tier's size; 0 is none.
        scale: The part of the keys that is played; budgets are scaled down by it, and what is too
            large for a tier is not.
    """

    def __init__(
        self, entries: Entries, host_bytes: int, disk_bytes: int, *, scale: float = 1.0
    ) -> None:
        self._sizes = entries.host_bytes
        self._largest_bytes = host_bytes
        self._budget_bytes = int(host_bytes * scale)
        self._used_bytes = 0
        self._resident: OrderedDict[int, bool] = OrderedDict()  # key -> whether the disk has it
        self._store = None
        if disk_bytes:
            self._store = _Store(entries.disk_bytes, int(disk_bytes * scale), disk_bytes)
        self._thought_stored: set[int] = set()

    def request(self, key: int, *, admitted: bool, victims: Iterable[int]) -> Found:
        """A request that the hot tier did not answer; its victims come down meanwhile."""
        found = self._request(key, admitted, victims)
        if self._store is not None:
            self._store.commit()
        return found

    def _request(self, key: int, admitted: bool, victims: Iterable[int]) -> Found:
        if key in self._resident:
            for victim in victims:
                self._demote(victim, pinned=key)
            self._resident.move_to_end(key, last=not admitted)
            return Found.HOST
        if key in self._thought_stored:
            return self._read(key, admitted=admitted, victims=victims)
        if admitted:  # it is set anew: what is below is superseded
            self._forget(key)
        for victim in victims:
            self._demote(victim)
        return Found.MISS

    def _read(self, key: int, *, admitted: bool, victims: Iterable[int]) -> Found:
        """Room in host memory is taken before anything else, and given back if it was in vain."""
        assert self._store is not None
        reserved = self._make_room(self._sizes[key])
        self._used_bytes += self._sizes[key] if reserved else 0
        is_there = self._store.touch(key)  # asked for before the victims are written
        for victim in victims:
            self._demote(victim)
        if not is_there:
            self._used_bytes -= self._sizes[key] if reserved else 0
            self._thought_stored.discard(key)
            return Found.MISS
        if reserved:
            self._resident[key] = True
            self._resident.move_to_end(key, last=not admitted)
        return Found.DISK

    def _forget(self, key: int) -> None:
        if self._store is not None:
            self._thought_stored.discard(key)
            self._store.remove(key)

    def _demote(self, key: int, *, pinned: int | None = None) -> None:
        if key in self._resident:
            self._resident.move_to_end(key)
            return
        stored = key in self._thought_stored
        if stored and self._store is not None:
            self._store.touch(key)
        if self._make_room(self._sizes[key], pinned):
            self._resident[key] = stored
            self._used_bytes += self._sizes[key]
        elif not stored:
            self._spill(key)

    def _spill(self, key: int) -> None:
        if self._store is not None:
            self._store.put(key)
            self._thought_stored.add(key)

    def _make_room(self, size_bytes: int, pinned: int | None = None) -> bool:
        if size_bytes > self._largest_bytes:
            return False
        while self._used_bytes + size_bytes > self._budget_bytes:
            victim = next((key for key in self._resident if key != pinned), None)
            if victim is None:
                return self._used_bytes == 0  # a budget that is scaled down holds one entry
            self._evict(victim)
        return True

    def _evict(self, victim: int) -> None:
        stored = self._resident.pop(victim)
        self._used_bytes -= self._sizes[victim]
        if not stored:
            self._spill(victim)
        elif self._store is not None:
            self._store.touch(victim)
