"""Everything below the hot tier: host memory, the way to the disk and back, and what it may cost.

Owns: demotion and promotion, who gives way in host memory, and the life of an entry below the
hot tier:

* An evicted entry is copied into the arena and becomes *resident* in host memory.
* A resident victim that the disk does not hold is charged to the write buffer instead and handed
  to the worker. It stays readable until its commit is acknowledged, then its extents are free.
* A look-up promotes: from host memory by one copy, from disk after the worker has filled extents
  and checked them. The copy below is kept, so evicting the entry again moves no bytes.
* Whatever is freed or superseded is unfindable at once; its extents are given back as soon as no
  copy and no worker touches them.

Does not own: the hot tier (:mod:`.tiered_cache`), the queue of writes (:mod:`.spill`), or the
worker (:mod:`tiered_mmcache.disk.client`). No thread runs here: every method that is called
first makes what progress there is to make.
"""

from __future__ import annotations

import enum
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from tiered_mmcache.config import DiskConfig, WritePolicy
from tiered_mmcache.contract import EmbeddingResult, class_of_tag
from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.errors import RecordError
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier, Ledger
from tiered_mmcache.host.transfer import CopyEngine
from tiered_mmcache.keys import encode_full_key, generation_of_version
from tiered_mmcache.metrics import Counters, FaultLog
from tiered_mmcache.record import EntryHeader
from tiered_mmcache.results import (
    CannotLeaveError,
    describe,
    empty_target,
    rebuild,
    target_device,
)
from tiered_mmcache.spill import SpillQueue

_REMEMBERED_KEYS = 65_536
_MOST_VICTIMS_LOOKED_AT = 64
# What torch raises when a device has no memory, is lost, or is not in this build.
_DEVICE_ERRORS = (RuntimeError, MemoryError, AssertionError, ValueError, TypeError)


class Tier(enum.Enum):
    """Where an entry is."""

    HOT = "hot"
    HOST = "host"
    DISK = "disk"


class LowerTiers:
    """Host memory and disk of one cache. The caller holds the cache's lock.

    Args:
        host: The bookkeeping of host memory.
        arena: Its memory.
        engine: Copies between the device and the arena.
        client: The spill worker's handle, or None without a disk tier.
        namespace: What makes embeddings interchangeable; needed with a client.
        device: ``auto`` or the device to promote to.
        config: The disk tier's settings, or None without one.
        counters: Where events are counted.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        arena: Arena,
        engine: CopyEngine,
        client: SpillClient | None,
        namespace: str,
        device: str,
        config: DiskConfig | None,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.arena = arena
        self.client = client
        self._engine = engine
        self._device = device
        self._write_policy = WritePolicy.ON_EVICT if config is None else config.write
        self._read_timeout_s = 0.0 if config is None else config.read_timeout_s
        self._counters = counters
        self._clock = clock
        self._faults = FaultLog(counters, clock)
        self._arriving: list[HostEntry] = []
        self._filling: dict[int, HostEntry] = {}  # unanswered reads
        self._absent: OrderedDict[Hashable, None] = OrderedDict()  # not on disk when last asked
        self._seen: OrderedDict[Hashable, None] = OrderedDict()  # dropped once unwritten
        self.spill: SpillQueue | None = None
        if client is not None:
            self.spill = SpillQueue(
                client,
                namespace=namespace,
                on_written=self._on_written,
                on_lost=self._on_lost,
                new_generation=_fresh_generation,
            )

    # Progress

    def poll(self) -> None:
        """Take note of copies that have ended and of the worker's answers; never waits."""
        self._arriving = [entry for entry in self._arriving if not entry.arrived()]
        if self.client is not None and self.spill is not None:
            for reply in self.client.poll():
                self._take(reply)
            self.spill.advance()
        self._reclaim()

    def in_flight(self) -> bool:
        """Whether a copy, a write, a deletion or an unanswered read is under way."""
        entries = [*self.host.resident.values(), *self.host.in_transit.values()]
        moving = any(not entry.settle() for entry in entries)
        waiting = self.spill is not None and not self.spill.idle
        return bool(moving or waiting or self.host.retired or self._filling)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is in flight and the worker is up; False when that takes too long."""
        while True:
            self._flush(deadline_s)
            self.poll()
            up = self.client is None or self.client.is_ready
            if up and not self.in_flight():
                return True
            left_s = deadline_s - self._clock()
            if left_s <= 0 or (self.client is not None and self.client.is_closed):
                return False
            self._wait(left_s)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first worker to open the store, or to say that it cannot."""
        deadline_s = self._clock() + timeout_s
        self.poll()
        while self.client is not None and not self.client.is_ready:
            left_s = deadline_s - self._clock()
            if left_s <= 0 or self.client.pid is None:
                problem = f"no worker ({self.client.down_cause or 'still starting'})"
                self._faults.report("disk_not_ready", problem)
                return
            self.client.wait(left_s)
            self.poll()

    # Down

    def demote(self, key: Hashable, result: EmbeddingResult) -> None:
        """Take over an entry that the hot tier evicts; it is lost where there is no room for it."""
        known = self.host.find(key)
        if known is not None:
            self.host.touch(known)
            self._counters.clean_evictions += 1
            return
        entry = self._copy_down(key, result)
        if entry is not None and entry.ledger is self.host.buffer_ledger:
            self._write(entry)

    def write_through(self, key: Hashable, result: EmbeddingResult) -> None:
        """Copy an entry that was just set down to the disk at once, when the rule says so."""
        if self._write_policy is not WritePolicy.THROUGH or self.spill is None:
            return
        entry = self._copy_down(key, result)
        if entry is not None and self._may_write(entry):
            self._write(entry)

    def admit_directly(self, key: Hashable, result: EmbeddingResult) -> bool:
        """Keep an entry that is too large for the hot tier; True when a look-up will find it."""
        self.demote(key, result)
        return self.host.find(key) is not None

    def _copy_down(self, key: Hashable, result: EmbeddingResult) -> HostEntry | None:
        try:
            header = describe(result)
        except CannotLeaveError as reason:
            self._counters.memory_only[reason.reason] += 1
            return None
        entry = self._reserve(key, type(result), header)
        if entry is None:
            self._counters.drops["no_room"] += 1
            return None
        target = self.arena.slices(entry.extents, header.payload_bytes)
        try:
            entry.arriving = self._engine.demote(result.embedding, target)
        except _DEVICE_ERRORS as error:  # no memory for a contiguous copy, or a lost device
            self._faults.report("demotion", str(error))
            self.arena.release(entry.extents)
            return None
        self.host.admit(entry)
        self._counters.demotions += 1
        if not entry.arrived():
            self._arriving.append(entry)
        return entry

    def _reserve(
        self, key: Hashable, result_class: type[EmbeddingResult], header: EntryHeader
    ) -> HostEntry | None:
        size_bytes = rounded(header.payload_bytes)
        ledger = self._ledger_with_room(size_bytes, storable=self._is_storable(key, header))
        extents = None if ledger is None else self.arena.reserve(size_bytes)
        if ledger is None or extents is None:
            return None
        return HostEntry(key, result_class, header, extents, size_bytes, ledger)

    def _ledger_with_room(self, size_bytes: int, *, storable: bool) -> Ledger | None:
        if self._make_host_room(size_bytes):
            return self.host.host_ledger
        if storable and self.host.buffer_ledger.fits(size_bytes):
            return self.host.buffer_ledger
        return None

    def _make_host_room(self, size_bytes: int) -> bool:
        ledger = self.host.host_ledger
        if size_bytes > ledger.budget_bytes:
            return False
        while not ledger.fits(size_bytes):
            if not self._evict_one_from_host():
                return False
        return True

    def _evict_one_from_host(self) -> bool:
        for looked_at, victim in enumerate(self.host.resident.values()):
            if looked_at == _MOST_VICTIMS_LOOKED_AT:
                return False
            if not victim.pinned and self._evict_from_host(victim):
                self._reclaim()
                return True
        return False

    def _evict_from_host(self, victim: HostEntry) -> bool:
        if victim.disk_copy is DiskCopy.PRESENT or not self._may_write(victim):
            self._remember_dropped(victim)
        elif self.host.to_buffer(victim):
            if victim.disk_copy is DiskCopy.NONE:
                self._write(victim)
            return True
        elif victim.disk_copy is not DiskCopy.NONE:
            return False  # the worker is about to read it, or reads it
        else:
            self._counters.drops["write_buffer_full"] += 1
        self.host.forget(victim)
        return True

    def _remember_dropped(self, victim: HostEntry) -> None:
        if victim.disk_copy is DiskCopy.PRESENT:
            return
        if self.spill is None:
            self._counters.drops["no_disk_tier"] += 1
        elif self._is_storable(victim.key, victim.header):
            self._counters.drops["not_hit_again"] += 1
            _remember(self._seen, victim.key)
        else:
            self._counters.memory_only["key_or_class"] += 1

    def _is_storable(self, key: Hashable, header: EntryHeader) -> bool:
        return (
            self.spill is not None and bool(header.class_tag) and encode_full_key(key) is not None
        )

    def _may_write(self, entry: HostEntry) -> bool:
        if not self._is_storable(entry.key, entry.header):
            return False
        if self._write_policy is not WritePolicy.ON_SECOND_HIT:
            return True
        return entry.hits > 0 or entry.key in self._seen

    def _write(self, entry: HostEntry) -> None:
        assert self.spill is not None
        self.spill.write(entry)
        self.spill.advance()

    # Up

    def locate(self, key: Hashable) -> Tier | None:
        """The tier below the hot one where a look-up would find a key now."""
        if self.host.find(key) is not None:
            return Tier.HOST
        return None if self._look_up_on_disk(key, count=False) is None else Tier.DISK

    def find(self, key: Hashable) -> tuple[HostEntry, Tier] | None:
        """An entry in host memory, read from disk if need be, pinned until :meth:`unpin`.

        Waits at most ``read_timeout_s`` for the disk. Counts a miss with its reason, but no hit:
        that is one only when :meth:`restore` succeeds.
        """
        entry = self.host.find(key)
        if entry is not None:
            entry.hits += 1
            entry.pinned = True
            return entry, Tier.HOST
        deadline_s = self._clock() + self._read_timeout_s
        header = self._look_up_on_disk(key, count=True)
        read = None if header is None else self._read(key, header, deadline_s)
        return None if read is None else (read, Tier.DISK)

    def restore(self, entry: HostEntry) -> EmbeddingResult | None:
        """The result of a found entry on its device, or None when it cannot be put there."""
        try:
            device = target_device(entry.header, self._device)
            if device is None:
                raise RecordError("no_device", f"no {entry.header.device_type} device here")
            target = empty_target(entry.header, device)
            result = rebuild(entry.result_class, target, entry.header.extras)
            source = self.arena.slices(entry.extents, entry.header.payload_bytes)
            leaving = self._engine.promote(source, target, entry.arriving)
        except RecordError as error:
            self._missed(error.cause, str(error))
            return None
        except _DEVICE_ERRORS as error:  # most often: out of device memory
            self._missed("promotion", str(error))
            return None
        if not leaving.done():
            entry.leaving.append(leaving)
        self._counters.promotions += 1
        return result

    def unpin(self, entry: HostEntry, *, now_hot: bool) -> None:
        """Allow a found entry to be a victim again; at once, when the hot tier holds it now."""
        entry.pinned = False
        if entry.ledger is self.host.buffer_ledger and entry.disk_copy is DiskCopy.PRESENT:
            self.host.forget(entry)  # it was read for this look-up only
        elif now_hot:
            self.host.first_to_go(entry)
        else:
            self.host.touch(entry)
        self._reclaim()

    def _look_up_on_disk(self, key: Hashable, *, count: bool) -> EntryHeader | None:
        reason, header = self._ask_disk(key)
        if header is None and count:
            self._counters.misses[reason] += 1
        return header

    def _ask_disk(self, key: Hashable) -> tuple[str, EntryHeader | None]:
        full_key = None if self.client is None else encode_full_key(key)
        if self.client is None or self.spill is None or full_key is None:
            return "absent", None
        if self.spill.is_deleted(full_key):
            return "absent", None
        if not self.client.answers:
            return "disk_down", None
        reply = self.client.look_up(
            store_key=self.spill.store_key(full_key),
            full_key=full_key,
            timeout_s=self._read_timeout_s,
        )
        if isinstance(reply, protocol.Found):
            return "", reply.header
        if isinstance(reply, protocol.Absent):
            _remember(self._absent, full_key)
            return "absent", None
        return self._read_fault(reply), None

    def _read_fault(self, reply: object) -> str:
        if isinstance(reply, protocol.Failed):
            self._faults.report(reply.cause, reply.problem)
            return "disk_fault"
        self._faults.report("read_timeout", f"no answer within {self._read_timeout_s} s")
        return "read_timeout"

    def _read(self, key: Hashable, header: EntryHeader, deadline_s: float) -> HostEntry | None:
        result_class = class_of_tag(header.class_tag)
        if result_class is None:
            self._missed("unknown_class", f"no class is registered as {header.class_tag!r}")
            return None
        entry = self._reserve(key, result_class, header)
        if entry is None:
            self._counters.misses["no_room"] += 1
            return None
        entry.pinned = True
        entry.disk_copy = DiskCopy.PRESENT
        if not self._fill(entry, deadline_s):
            return None
        entry.hits = 1
        self.host.admit(entry)
        return entry

    def _fill(self, entry: HostEntry, deadline_s: float) -> bool:
        assert self.client is not None
        assert self.spill is not None
        full_key = encode_full_key(entry.key)
        assert full_key is not None
        number, reply = self.client.fill(
            store_key=self.spill.store_key(full_key),
            full_key=full_key,
            payload_bytes=entry.header.payload_bytes,
            extents=list(entry.extents),
            timeout_s=max(0.0, deadline_s - self._clock()),
        )
        if isinstance(reply, protocol.Done):
            return True
        if reply is None and number in self.client.unanswered:
            self._quarantine(number, entry)  # the worker may still write there
        else:
            self.arena.release(entry.extents)
        if isinstance(reply, protocol.Absent):
            self._counters.misses["absent"] += 1
        else:
            self._counters.misses[self._read_fault(reply)] += 1
        return False

    def _quarantine(self, number: int, entry: HostEntry) -> None:
        entry.filling = True
        entry.wanted = False
        entry.ledger.used_bytes += entry.arena_bytes
        self._filling[number] = entry
        self.host.retired.append(entry)

    def _missed(self, cause: str, problem: str) -> None:
        self._faults.report(cause, problem)
        self._counters.misses[cause] += 1

    # Away

    def supersede(self, key: Hashable) -> None:
        """Forget what the lower tiers hold under a key that is about to be set anew."""
        self._drop_from_host(key)
        full_key = None if self.spill is None else encode_full_key(key)
        if self.spill is None or full_key is None:
            return
        if self._absent.pop(full_key, full_key) is None:
            return  # the look-up before this call found that the disk does not have it
        self.spill.delete(full_key)
        self.spill.advance()

    def free(self, key: Hashable, *, known: bool) -> bool:
        """Drop every copy of a key; True when there was one here or, ``known``, in the hot tier."""
        known = self._drop_from_host(key) or known
        full_key = None if self.spill is None else encode_full_key(key)
        if self.spill is None or full_key is None:
            return known
        if not known:
            reason, header = self._ask_disk(key)
            if reason == "absent":
                return False
            known = header is not None
        self.spill.delete(full_key)
        self.spill.advance()
        return known

    def clear(self, version: str | None) -> None:
        """Drop everything; on disk by a new generation, which is waited for within bounds."""
        for entry in [*self.host.resident.values(), *self.host.in_transit.values()]:
            entry.wanted = False
            self.host.forget(entry)
        self._absent.clear()
        self._seen.clear()
        if self.spill is not None:
            fresh = _fresh_generation() if version is None else generation_of_version(version)
            self.spill.begin_generation(fresh)
            self._wait_for_clear(self._clock() + self._read_timeout_s)
        self.poll()

    def _wait_for_clear(self, deadline_s: float) -> None:
        assert self.client is not None
        assert self.spill is not None
        self.poll()
        while self.client.answers and self.spill.clear_pending:
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                return
            self.client.wait(left_s)
            self.poll()

    def _drop_from_host(self, key: Hashable) -> bool:
        entry = self.host.find(key)
        if entry is None:
            return False
        entry.wanted = False
        self.host.forget(entry)
        self._reclaim()
        return True

    # The end

    def spill_everything(
        self, hot: list[tuple[Hashable, EmbeddingResult]], deadline_s: float
    ) -> None:
        """Write what only memory holds, the hot tier's entries in the order given."""
        if self.spill is None:
            return
        self._write_policy = WritePolicy.ON_EVICT  # what is in memory at the end was worth keeping
        for entry in list(self.host.resident.values()):
            if entry.disk_copy is DiskCopy.NONE and self._may_write(entry):
                self._write(entry)
        for key, result in hot:
            if self.host.find(key) is None and not self._spill_one(key, result, deadline_s):
                return
        while self._may_progress(deadline_s):
            self._wait(deadline_s - self._clock())
            self.poll()

    def close(self, timeout_s: float) -> None:
        """End the worker and give the memory up."""
        if self.client is not None:
            self.client.close(timeout_s)
        self.arena.close()

    def _spill_one(self, key: Hashable, result: EmbeddingResult, deadline_s: float) -> bool:
        entry = self._copy_down(key, result)
        while entry is None and self._may_progress(deadline_s):
            self._wait(deadline_s - self._clock())
            self.poll()
            entry = self._copy_down(key, result)
        if entry is not None and self._may_write(entry):
            self._write(entry)
        return self._clock() < deadline_s

    def _may_progress(self, deadline_s: float) -> bool:
        """Whether waiting may end something: time is left, and there is a store to write to."""
        assert self.client is not None
        coming = self.client.is_ready or self.client.down_cause in ("", "died", "silent")
        return coming and self._clock() < deadline_s and self.in_flight()

    def host_snapshot(self) -> dict[str, int]:
        """How full host memory is, and what moved through it."""
        return {
            "entries": len(self.host.resident),
            "bytes": self.host.host_ledger.used_bytes,
            "budget_bytes": self.host.host_ledger.budget_bytes,
            "write_buffer_entries": len(self.host.in_transit),
            "write_buffer_bytes": self.host.buffer_ledger.used_bytes,
            "write_buffer_budget_bytes": self.host.buffer_ledger.budget_bytes,
            "demotions": self._counters.demotions,
            "clean_evictions": self._counters.clean_evictions,
            "promotions": self._counters.promotions,
        }

    def disk_snapshot(self) -> dict[str, int]:
        """How full the store was when the worker last said so, and what was written."""
        if self.client is None:
            return {}
        return {
            "entries": self.client.totals.entries,
            "bytes": self.client.totals.used_bytes,
            "payload_bytes": self.client.totals.payload_bytes,
            "budget_bytes": self.client.budget_bytes,
            "spills": self._counters.spills,
            "worker_starts": self.client.starts,
        }

    # Inside

    def _take(
        self, reply: protocol.Done | protocol.Found | protocol.Absent | protocol.Failed
    ) -> None:
        entry = self._filling.pop(reply.request, None)
        if entry is not None:
            entry.filling = False
        elif self.spill is not None:
            self.spill.take(reply)

    def _on_written(self, entry: HostEntry) -> None:
        self._counters.spills += 1
        if entry.wanted and entry.ledger is self.host.buffer_ledger and not entry.pinned:
            self.host.forget(entry)

    def _on_lost(self, entry: HostEntry, cause: str) -> None:
        if not entry.wanted:
            return
        self._faults.report(cause, "an entry could not be written")
        if entry.ledger is self.host.buffer_ledger:
            self._counters.drops[cause] += 1
            self.host.forget(entry)

    def _reclaim(self) -> None:
        for entry in self.host.reclaim():
            self.arena.release(entry.extents)

    def _flush(self, deadline_s: float) -> None:
        """Ask a live worker for an answer, so that a dead one is noticed."""
        if self.client is None or not self.client.answers:
            return
        number = self.client.flush()
        while number in self.client.unanswered and self._clock() < deadline_s:
            self.client.wait(deadline_s - self._clock())
            self.poll()

    def _wait(self, timeout_s: float) -> None:
        for entry in [*self._arriving, *self.host.retired]:
            for transfer in [entry.arriving, *entry.leaving]:
                if transfer is not None:
                    transfer.wait()
        if self.client is not None and (self.client.unanswered or not self.client.is_ready):
            self.client.wait(timeout_s)


def _fresh_generation() -> bytes:
    return os.urandom(16)


def _remember(memory: OrderedDict[Hashable, None], key: Hashable) -> None:
    memory[key] = None
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED_KEYS:
        memory.popitem(last=False)
