"""Room in host memory: who gets arena bytes, and who gives way for them.

Owns: the choice of ledger and victim, and what becomes of a victim.
Does not own: the bookkeeping (:mod:`tiered_mmcache.host.tier`), copies, or the disk's own state
(:mod:`.disk_tier`).

A victim that the disk holds is let go. One that it does not hold is charged to the write buffer
instead and written; it stays readable until its commit is acknowledged. When the write buffer is
full, the disk is behind: the victim is dropped and counted, nobody waits.
"""

from __future__ import annotations

from collections.abc import Hashable

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.disk_tier import DiskTier
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier, Ledger
from tiered_mmcache.metrics import Counters
from tiered_mmcache.record import EntryHeader

_MOST_VICTIMS_LOOKED_AT = 64
_BUFFER_PARTS_AHEAD = 4  # reading ahead takes no more than one of these parts of the write buffer


class HostRoom:
    """Hands out room in one arena.

    Args:
        host: The bookkeeping.
        arena: The memory.
        counters: Where drops are counted.

    Attributes:
        disk: Where dirty victims go, or None without a disk tier.
    """

    def __init__(self, host: HostTier, arena: Arena, counters: Counters) -> None:
        self._host = host
        self._arena = arena
        self._counters = counters
        self.disk: DiskTier | None = None

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
        return HostEntry(key, result_class, header, extents, size_bytes, ledger)

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
        if storable and self._host.buffer_ledger.fits(size_bytes):
            return self._host.buffer_ledger
        return None

    def _make_room_in_host(self, size_bytes: int, *, may_drop: bool = True) -> bool:
        ledger = self._host.host_ledger
        if size_bytes > ledger.budget_bytes:
            return False
        while not ledger.fits(size_bytes):
            if not self._evict_one(may_drop=may_drop):
                return False
        return True

    def _evict_one(self, *, may_drop: bool) -> bool:
        for looked_at, victim in enumerate(self._host.resident.values()):
            if looked_at == _MOST_VICTIMS_LOOKED_AT:
                return False
            if not victim.pinned and self._evict(victim, may_drop=may_drop):
                self.reclaim()
                return True
        return False

    def _evict(self, victim: HostEntry, *, may_drop: bool) -> bool:
        disk = self.disk
        if disk is not None and victim.disk_copy is DiskCopy.PRESENT:
            disk.touch(victim.key)
        elif disk is not None and disk.wants(victim):
            if self._host.to_buffer(victim):
                if victim.disk_copy is DiskCopy.NONE:
                    disk.write(victim)
                return True
            if victim.disk_copy is not DiskCopy.NONE or not may_drop:
                return False  # the worker reads it, or is about to; or it may not be lost
            self._counters.drops["write_buffer_full"] += 1
        elif may_drop:
            self._count_unwritten(victim)
        else:
            return False
        self._host.forget(victim)
        return True

    def _count_unwritten(self, victim: HostEntry) -> None:
        if self.disk is None:
            self._counters.drops["no_disk_tier"] += 1
        elif self.disk.may_hold(victim.key, victim.header):
            self._counters.drops["not_hit_again"] += 1
            self.disk.note_dropped(victim)
        else:
            self._counters.memory_only["key_or_class"] += 1
