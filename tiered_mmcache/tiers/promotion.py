"""Promotion: bringing an entry from host memory or disk back to its device.

Owns: finding an entry below the hot tier, protecting it while it is copied up, and the overlap of
reading and copying: each part of an entry is copied as soon as the worker has checked it.
Does not own: room in the hot tier (:mod:`tiered_mmcache.tiered_cache`) or in host memory
(:mod:`.host_room`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable

import torch

from tiered_mmcache.contract import EmbeddingResult, Tier, class_of_tag
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.entries.results import empty_target, rebuild, target_device
from tiered_mmcache.errors import RecordError
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.recycled import RecycledBuffers
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier
from tiered_mmcache.host.transfer import CopyEngine, Transfer
from tiered_mmcache.metrics.counters import Counters, FaultLog
from tiered_mmcache.tiers.disk_tier import Absence, DiskTier, Read
from tiered_mmcache.tiers.host_room import HostRoom
from tiered_mmcache.tiers.prefetch import Prefetcher

# What torch raises when a device has no memory, is lost, or is not in this build.
DEVICE_ERRORS = (RuntimeError, MemoryError, OSError, AssertionError, ValueError, TypeError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An entry that a look-up found below the hot tier, protected until ``release``.

    Attributes:
        entry: With extents that hold the payload, or will when ``restore`` has read it.
        tier: Where it was found.
        deadline_s: When reading it is given up.
        read: What the worker was asked to read, or None when it is in host memory.
    """

    entry: HostEntry
    tier: Tier
    deadline_s: float
    read: Read | None = None


class Promoter:
    """Promotes entries of one cache.

    Args:
        host: The bookkeeping of host memory.
        arena: Its memory.
        engine: Copies between the arena and the device.
        room: Hands out host memory, and knows the disk tier.
        device: ``auto`` or the device to promote to.
        buffers: Memory for promoted CPU tensors.
        counters: Where events are counted.
        faults: Where failures are reported.
        clock: Monotonic seconds.

    Attributes:
        prefetcher: Reads ahead; None without a disk tier.
        objection: Why an engine cannot use a result that was brought back, as cause and problem
            of a fault, or None; such a look-up is a miss.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        arena: Arena,
        engine: CopyEngine,
        room: HostRoom,
        device: str,
        buffers: RecycledBuffers,
        counters: Counters,
        faults: FaultLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._arena = arena
        self._engine = engine
        self._room = room
        self._device = device
        self._buffers = buffers
        self._counters = counters
        self._faults = faults
        self._clock = clock
        self.prefetcher: Prefetcher | None = None
        self.objection: Callable[[EmbeddingResult], tuple[str, str] | None] = lambda result: None

    def find(self, key: Hashable) -> Found | None:
        """An entry below the hot tier, protected until :meth:`release`, or None.

        Counts a miss with its reason, but no hit: that is one only when :meth:`restore` succeeds.
        Waits at most ``disk.read_timeout`` for the disk.
        """
        deadline_s = self._clock()
        entry = self._host.find(key)
        if entry is not None:
            if self._is_capturing(entry.header):
                self._counters.count_miss("capture")
                return None
            entry.hits += 1
            entry.pinned = True
            tier = Tier.HOST if self.prefetcher is None else self.prefetcher.use(key)
            return Found(entry=entry, tier=tier, deadline_s=deadline_s)
        if self._room.disk is None:
            self._counters.count_miss("absent")
            return None
        deadline_s += self._room.disk.read_timeout_s
        read = self._begin_reading(self._room.disk, key, deadline_s)
        if isinstance(read, Absence):
            self._counters.count_miss(read.reason)
            return None
        read.entry.pinned = True
        read.entry.hits += 1
        return Found(entry=read.entry, tier=Tier.DISK, deadline_s=deadline_s, read=read)

    def restore(self, found: Found) -> EmbeddingResult | None:
        """The result of a found entry on its device, or None when it cannot be read or put there.

        Counts the hit, or the miss with its reason.
        """
        header = found.entry.header
        try:
            device = target_device(header, self._device)
            if device is None:
                raise RecordError("no_device", f"no {header.device_type} device here")
            target = empty_target(header, device, self._buffers)
            result = rebuild(found.entry.result_class, target, header.extras)
            reason = self._copy_up(found, target.reshape(-1).view(torch.uint8))
            objection = None if reason is not None else self.objection(result)
            if objection is not None:
                reason = self._fault(*objection)
        except RecordError as error:
            reason = self._fault(error.cause, str(error))
        except DEVICE_ERRORS as error:  # most often: out of device memory
            reason = self._fault("promotion", str(error))
        if reason is not None:
            self._counters.count_miss(reason)
            return None
        self._count_hit(found.tier)
        return result

    def release(self, found: Found, *, now_hot: bool) -> None:
        """End the protection of a found entry; it is the next victim if the hot tier holds it."""
        entry = found.entry
        entry.pinned = False
        self._host.note_leaving(entry)
        if entry is not self._host.find(entry.key):
            self._room.give_back(entry)  # reading it failed
        elif entry.ledger is self._host.buffer_ledger and entry.disk_copy is DiskCopy.PRESENT:
            self._host.forget(entry)  # it was read for this look-up only
        elif now_hot:
            self._host.first_to_go(entry)
        else:
            self._host.touch(entry)
        self._room.reclaim()

    def _begin_reading(self, disk: DiskTier, key: Hashable, deadline_s: float) -> Read | Absence:
        """Take over the read of an entry that is on its way, or start one."""
        if self.prefetcher is not None:
            coming = self.prefetcher.coming(key)
            if coming is not None and self._is_capturing(coming):
                return Absence(reason="capture")
            ahead = self.prefetcher.take(key, deadline_s)
            if ahead is not None:
                return ahead
        return self._start_reading(disk, key)

    def _start_reading(self, disk: DiskTier, key: Hashable) -> Read | Absence:
        header = disk.header_to_read(key)
        if isinstance(header, Absence):
            return header
        if self._is_capturing(header):
            return Absence(reason="capture")
        if disk.declines(header):
            return Absence(reason="slower_than_encoding")
        result_class = class_of_tag(header.class_tag)
        if result_class is None:
            problem = f"no class is registered as {header.class_tag!r}"
            return Absence(reason=self._fault("unknown_class", problem))
        entry = self._room.reserve(key, result_class, header)
        if entry is None:
            return Absence(reason="no_room")
        entry.disk_copy = DiskCopy.PRESENT
        read = disk.begin_read(entry)
        if isinstance(read, Absence):
            self._room.give_back(entry)
        return read

    def _is_capturing(self, header: EntryHeader) -> bool:
        """Whether the caller captures a graph there, so that nothing can be promoted."""
        device = target_device(header, self._device)
        return device is not None and self._engine.capturing(device)

    def _copy_up(self, found: Found, target: torch.Tensor) -> str | None:
        """Copy the payload to the target as it becomes readable; the reason when it does not."""
        entry = found.entry
        copier = _Copier(self._engine, self._arena, entry, target)
        if found.read is None:
            copier.copy_up_to(entry.header.payload_bytes)
        else:
            assert self._room.disk is not None
            absence = self._room.disk.finish_read(found.read, found.deadline_s, copier.copy_ahead)
            if absence is not None:
                return absence.reason
            copier.copy_up_to(entry.header.payload_bytes)
            self._host.admit(entry)
        self._counters.promotions += 1
        self._counters.moved_bytes["host_to_device"] += entry.header.payload_bytes
        return None

    def _count_hit(self, tier: Tier) -> None:
        if tier is Tier.HOST:
            self._counters.count_host_hit()
        else:
            self._counters.count_disk_hit()

    def _fault(self, cause: str, problem: str) -> str:
        self._faults.report(cause, problem)
        return cause


class _Copier:
    """Copies the leading bytes of an entry to its target as they become readable."""

    def __init__(
        self, engine: CopyEngine, arena: Arena, entry: HostEntry, target: torch.Tensor
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._entry = entry
        self._target = target
        self._after: Transfer | None = entry.arriving
        self._copied_bytes = 0

    def copy_ahead(self, readable_bytes: int) -> None:
        """As :meth:`copy_up_to` while the worker still writes the rest: raises nothing.

        An exception would end the wait for the worker's answer, and the extents be given to
        another entry under its hands. What failed here fails again, and is raised, at the end.
        """
        with contextlib.suppress(*DEVICE_ERRORS):
            self.copy_up_to(readable_bytes)

    def copy_up_to(self, readable_bytes: int) -> None:
        """Start copying what lies between the last call's bytes and these.

        Raises:
            RuntimeError: Or another of ``DEVICE_ERRORS``: the device cannot take the bytes.
        """
        start = self._copied_bytes
        if readable_bytes <= start:
            return
        source = self._arena.slices(self._entry.extents, start, readable_bytes)
        leaving = self._engine.promote(source, self._target[start:readable_bytes], self._after)
        if not leaving.done():
            self._entry.leaving += (leaving,)
        self._copied_bytes = readable_bytes
