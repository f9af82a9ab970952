"""Room in host memory: who gets arena bytes, and who gives way for them.

Owns: the choice of ledger and victim, and what becomes of a victim.
Does not own: the bookkeeping (:mod:`tiered_mmcache.host.tier`), copies, or the disk's own state
(:mod:`.disk_tier`).

A victim that the disk holds is let go. One that it does not hold is charged to the write buffer
instead and written; it stays readable until its commit is acknowledged. When the write buffer is
full, the disk is behind: the victim is dropped and counted. Nobody waits, unless the caller has
the patience that ``host.demote_wait`` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from itertools import islice

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier, Ledger
from tiered_mmcache.metrics.counters import Counters
from tiered_mmcache.tiers.disk_tier import DiskTier
from tiered_mmcache.tiers.remembered import shared

_MOST_VICTIMS_LOOKED_AT = 64
_BUFFER_PARTS_AHEAD = 4  # reading ahead takes no more than one of these parts of the write buffer


class Patience:
    """How long one call may wait for room, all its victims together: inside ``with``, else not.

    Args:
        most_s: Seconds that a call may wait.

    Attributes:
        left_s: What is left of them.
    """

    __slots__ = ("_most_s", "left_s")

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self.left_s = 0.0

    def __enter__(self) -> None:
        self.left_s = self._most_s

    def __exit__(self, *_: object) -> None:
        self.left_s = 0.0


class HostRoom:
    """Hands out room in one arena.

    Args:
        host: The bookkeeping.
        arena: The memory.
        counters: Where drops are counted.
        demote_wait_s: How long a call may wait for the disk to make room, once it is patient.
        clock: Monotonic seconds.

    Attributes:
        disk: Where dirty victims go, or None without a disk tier.
        patience: Entered by a call that may wait.
    """

    def __init__(
        self,
        host: HostTier,
        arena: Arena,
        counters: Counters,
        *,
        demote_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._arena = arena
        self._counters = counters
        self._clock = clock
        self.disk: DiskTier | None = None
        self.patience = Patience(demote_wait_s)

    def reserve(
        self, key: Hashable, result_class: type[EmbeddingResult], header: EntryHeader
    ) -> HostEntry | None:
        """An entry with room for its payload, charged but not findable yet; None without room."""
        size_bytes = rounded(header.payload_bytes)
        ledger = self._ledger_with_room(key, header, size_bytes)
        return self._charged(ledger, key, result_class, header)

    def reserve_ahead(
        self,
        key: Hashable,
        result_class: type[EmbeddingResult],
        header: EntryHeader,
        *,
        may_use_buffer: bool,
    ) -> HostEntry | None:
        """As :meth:`reserve`, but nothing is lost for it: victims are on disk or will be.

        Args:
            key: The caller's key.
            result_class: The class to restore.
            header: How large it is.
            may_use_buffer: Whether part of the write buffer will do.
        """
        size_bytes = rounded(header.payload_bytes)
        buffer = self._host.buffer_ledger
        ledger = None
        if self._make_room_in_host(size_bytes, may_drop=False):
            ledger = self._host.host_ledger
        elif may_use_buffer:
            fits = buffer.used_bytes + size_bytes <= buffer.budget_bytes // _BUFFER_PARTS_AHEAD
            ledger = buffer if fits else None
        return self._charged(ledger, key, result_class, header)

    def _charged(
        self,
        ledger: Ledger | None,
        key: Hashable,
        result_class: type[EmbeddingResult],
        header: EntryHeader,
    ) -> HostEntry | None:
        size_bytes = rounded(header.payload_bytes)
        extents = None if ledger is None else self._arena.reserve(size_bytes)
        if ledger is None or extents is None:
            return None
        ledger.used_bytes += size_bytes
        return HostEntry(key, result_class, shared(header), extents, size_bytes, ledger)

    def give_back(self, entry: HostEntry) -> None:
        """Return the room of an entry that never became findable, as soon as it is idle."""
        entry.wanted = False
        self._host.retired.append(entry)
        self.reclaim()

    def give_up(self, entry: HostEntry) -> None:
        """Let an entry go that is not to be written, and count why."""
        self._count_unwritten(entry)
        self._host.forget(entry)
        self.reclaim()

    def reclaim(self) -> None:
        """Return the room of all entries that nobody can find and nothing touches any more."""
        for entry in self._host.reclaim():
            self._arena.release(entry.extents)

    def _ledger_with_room(
        self, key: Hashable, header: EntryHeader, size_bytes: int
    ) -> Ledger | None:
        if self._make_room_in_host(size_bytes):
            return self._host.host_ledger
        storable = self.disk is not None and self.disk.may_hold(key, header)
        buffer = self._host.buffer_ledger
        while storable and not buffer.fits(size_bytes):
            if not self._waited_for_buffer(size_bytes):
                return None
        return buffer if storable else None

    def _make_room_in_host(self, size_bytes: int, *, may_drop: bool = True) -> bool:
        ledger = self._host.host_ledger
        if size_bytes > ledger.budget_bytes:
            return False
        while not ledger.fits(size_bytes):
            if not self._evict_one(may_drop=may_drop):
                return False
        return True

    def _evict_one(self, *, may_drop: bool) -> bool:
        victim = self._coldest(may_drop=may_drop)
        while victim is not None and self._lacks_buffer(victim):
            if not self._waited_for_buffer(victim.arena_bytes):
                break
            victim = self._coldest(may_drop=may_drop)  # what it was may have changed meanwhile
        if victim is None:
            return False
        self._evict(victim)
        self.reclaim()
        return True

    def _coldest(self, *, may_drop: bool) -> HostEntry | None:
        """The first entry that can give way now, without being lost unless it ``may_drop``."""
        for entry in islice(self._host.resident.values(), _MOST_VICTIMS_LOOKED_AT):
            moving = entry.disk_copy in (DiskCopy.QUEUED, DiskCopy.WRITING)
            stuck = moving and not self._host.buffer_ledger.fits(entry.arena_bytes)
            if not entry.pinned and not stuck and (may_drop or not self._would_be_lost(entry)):
                return entry
        return None

    def _would_be_lost(self, victim: HostEntry) -> bool:
        if victim.disk_copy is DiskCopy.PRESENT:
            return False
        fits = self._host.buffer_ledger.fits(victim.arena_bytes)
        return self.disk is None or not fits or not self.disk.wants(victim)

    def _evict(self, victim: HostEntry) -> None:
        disk = self.disk
        if disk is not None and victim.disk_copy is DiskCopy.PRESENT:
            disk.touch(victim.key)
        elif disk is None or not disk.wants(victim):
            self._count_unwritten(victim)
        elif self._host.to_buffer(victim):
            if victim.disk_copy is DiskCopy.NONE:
                disk.write(victim)
            return
        else:
            self._counters.drops["write_buffer_full"] += 1
        self._host.forget(victim)

    def _lacks_buffer(self, victim: HostEntry) -> bool:
        """Whether an entry would be lost for want of room in the write buffer."""
        if victim.disk_copy is DiskCopy.PRESENT or self.disk is None:
            return False
        fits = self._host.buffer_ledger.fits(victim.arena_bytes)
        return not fits and self.disk.wants(victim)

    def _waited_for_buffer(self, size_bytes: int) -> bool:
        """Wait for one answer of the worker; False when nobody may wait, or it is of no use."""
        disk = self.disk
        useless = size_bytes > self._host.buffer_ledger.budget_bytes
        if self.patience.left_s <= 0 or disk is None or useless or not disk.is_catching_up:
            return False
        began_s = self._clock()
        disk.wait(self.patience.left_s)
        disk.poll()
        self.reclaim()
        self.patience.left_s -= self._clock() - began_s
        self._counters.demote_waits += 1
        return True

    def _count_unwritten(self, victim: HostEntry) -> None:
        if self.disk is None:
            self._counters.drops["no_disk_tier"] += 1
        elif self.disk.may_hold(victim.key, victim.header):
            self._counters.drops["not_hit_again"] += 1
            self.disk.note_dropped(victim)
        else:
            self._counters.memory_only["key_or_class"] += 1
