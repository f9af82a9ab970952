"""Everything below the hot tier: the life of an entry in host memory and on disk.

Owns: demotion, and what is freed, cleared and spilled at the end.

* An evicted entry is copied into the arena and becomes *resident* in host memory. When it has to
  give way there, it is written to disk (:mod:`.host_room`).
* A look-up promotes (:mod:`.promotion`). The copy below is kept, so evicting the entry again
  moves no bytes.
* Whatever is freed or superseded is unfindable at once; its extents are given back as soon as no
  copy and no worker touches them.

Does not own: the hot tier (:mod:`tiered_mmcache.tiered_cache`) or the disk's state
(:mod:`.disk_tier`). No thread runs here: every call first makes what progress there is to make. The
caller holds the lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from tiered_mmcache.config import CacheConfig, WritePolicy
from tiered_mmcache.contract import EmbeddingResult, Tier
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.entries.results import CannotLeaveError, describe
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.recycled import RecycledBuffers
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier
from tiered_mmcache.host.transfer import CopyEngine
from tiered_mmcache.metrics.counters import Counters, FaultLog
from tiered_mmcache.tiers.disk_tier import Absence, DiskTier
from tiered_mmcache.tiers.host_room import HostRoom
from tiered_mmcache.tiers.prefetch import Prefetcher
from tiered_mmcache.tiers.promotion import DEVICE_ERRORS, Promoter
from tiered_mmcache.tiers.spill import NOTHING_TO_WAIT_FOR


class LowerTiers:
    """Host memory and disk of one cache.

    Args:
        host: The bookkeeping of host memory.
        arena: Its memory.
        engine: Copies between the device and the arena.
        client: The spill worker's handle, or None without a disk tier.
        config: The cache's settings.
        counters: Where events are counted.
        cost_of: Seconds that encoding a hot entry took; 0.0 when unknown.
        may_reach_disk: Whether a key is good enough to outlive the process.
        idle_buffer_bytes: Memory of promoted CPU tensors to keep for the next ones.
        clock: Monotonic seconds.

    Attributes:
        clean_ahead_bytes: How much of the hot tier's cold end is kept safe below; 0 turns it off.
        patience: Entered by a call that may wait for room, as long as ``host.demote_wait`` says.
        portable_only: Keep nothing under a key or of a class that another process cannot be told.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        arena: Arena,
        engine: CopyEngine,
        client: SpillClient | None,
        config: CacheConfig,
        counters: Counters,
        cost_of: Callable[[Hashable], float],
        may_reach_disk: Callable[[Hashable], bool] = lambda _: True,
        idle_buffer_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.arena = arena
        self.disk: DiskTier | None = None
        self.prefetcher: Prefetcher | None = None
        self._engine = engine
        self._counters = counters
        self._cost_of = cost_of
        self._clock = clock
        self._faults = FaultLog(counters, clock)
        self.clean_ahead_bytes = config.hot.clean_ahead or 0
        self.portable_only = False
        self._cleaned_ahead: set[Hashable] = set()  # of entries that the hot tier holds
        self._arriving: list[HostEntry] = []
        demote_wait_s = 0.0 if config.host is None else config.host.demote_wait_s
        self._room = HostRoom(host, arena, counters, demote_wait_s=demote_wait_s, clock=clock)
        self.patience = self._room.patience
        self.promoter = Promoter(
            host=host,
            arena=arena,
            engine=engine,
            room=self._room,
            device=config.hot.device,
            buffers=RecycledBuffers(idle_buffer_bytes),
            counters=counters,
            faults=self._faults,
            clock=clock,
        )
        if client is not None and config.disk is not None:
            self._room.disk = self.disk = DiskTier(
                client,
                config=config.disk,
                namespace=config.namespace or "",
                counters=counters,
                faults=self._faults,
                on_written=self._on_written,
                on_lost=self._on_lost,
                may_store=may_reach_disk,
                clock=clock,
            )
            self.promoter.prefetcher = self.prefetcher = Prefetcher(
                host=host,
                room=self._room,
                disk=self.disk,
                counters=counters,
                budget_bytes=0 if config.host is None else config.host.prefetch_bytes,
                clock=clock,
            )

    # Progress

    def poll(self) -> None:
        """Take note of copies that have ended and of the worker's answers; never waits."""
        if self._arriving:
            self._arriving = [entry for entry in self._arriving if not entry.arrived()]
        if self.disk is not None:
            self.disk.poll()
        if self.host.read_by_copies:
            self.host.settle_copies()
        if self.prefetcher is not None:
            self.prefetcher.advance()
        if self.host.retired:
            self._room.reclaim()
        problem = self.arena.take_failure()
        if problem is not None:
            slower = "host memory is not page-locked, copies are slower"
            self._faults.report("page_locking", problem, consequence=slower)

    def in_flight(self) -> bool:
        """Whether a copy, a write, a deletion or an unanswered read is under way.

        As of the last :meth:`poll`; takes no longer for a million entries than for one.
        """
        if self.prefetcher is not None and not self.prefetcher.idle:
            return True
        moving = self._arriving or self.host.read_by_copies or self.host.retired
        return bool(moving) or not (self.disk is None or self.disk.idle)

    def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is in flight and the worker is up; False when that takes too long."""
        while True:
            if self.disk is not None:
                self.disk.flush(deadline_s)
            self.poll()
            up = self.disk is None or self.disk.client.is_ready
            if up and not self.in_flight():
                return True
            left_s = deadline_s - self._clock()
            if (
                left_s <= 0
                or self._held_up()
                or (self.disk is not None and self.disk.client.is_closed)
            ):
                return False
            self._wait(left_s)

    def _held_up(self) -> bool:
        """Whether copies cannot be seen to end, since the caller captures a graph."""
        moving = [entry for entry in self._moving() if entry.arriving or entry.leaving]
        return any(self._engine.capturing(torch.device(e.header.device_type)) for e in moving)

    def _moving(self) -> list[HostEntry]:
        """The entries that copies may touch, found without a look at all the others."""
        return [*self._arriving, *self.host.read_by_copies, *self.host.retired]

    # Down

    def demote(self, key: Hashable, result: EmbeddingResult) -> None:
        """Take over an entry that the hot tier evicts; it is lost where there is no room for it."""
        if self._arriving:
            self._await_copies_of(key)
        known = self.host.find(key)
        if self._cleaned_ahead:
            self._end_clean_ahead(key, used=known is not None or self._is_on_disk(key))
        if known is not None:
            self.host.touch(known)
            self._counters.clean_evictions += 1
            return
        if self.disk is not None and self._is_on_disk(key):
            self._keep_a_clean_one(self.disk, key, result)
            return
        if self._is_capturing(result):
            self._counters.drops["capture"] += 1
            return
        entry = self._copy_down(key, result)
        if entry is not None:
            self._await_arrival(entry)
            self._pass_on(entry)

    def clean_ahead(self, coldest_first: Sequence[tuple[Hashable, EmbeddingResult]]) -> None:
        """Copy down the coldest hot entries that are not safe below, before they must go.

        Stops after ``clean_ahead_bytes``.
        """
        ahead_bytes = 0
        for key, result in coldest_first:
            ahead_bytes += result.embedding.element_size() * result.embedding.numel()
            if ahead_bytes > self.clean_ahead_bytes or self._is_capturing(result):
                return
            if self.host.find(key) is None and not self._is_on_disk(key):
                entry = self._copy_down(key, result)
                if entry is not None:
                    self._end_clean_ahead(key, used=False)  # an earlier copy is gone
                    self._cleaned_ahead.add(key)
                    self._counters.clean_ahead["copied"] += 1
                    self._pass_on(entry)

    def _end_clean_ahead(self, key: Hashable, *, used: bool) -> None:
        """Count what came of a copy that was made ahead of need, if there was one."""
        if key in self._cleaned_ahead:
            self._cleaned_ahead.discard(key)
            self._counters.clean_ahead["used" if used else "wasted"] += 1

    def _pass_on(self, entry: HostEntry) -> None:
        """Write an entry that cannot stay in host memory, or give it up."""
        if self.disk is None or not self._is_in_buffer(entry):
            return
        if self.disk.wants(entry):
            self.disk.write(entry)
        else:
            self._room.give_up(entry)

    def _is_capturing(self, result: EmbeddingResult) -> bool:
        """Whether the caller captures a graph, so that no copy may be started."""
        return self._engine.capturing(result.embedding.device)

    def _is_on_disk(self, key: Hashable) -> bool:
        return self.disk is not None and self.disk.has_copy(key)

    def _await_copies_of(self, key: Hashable) -> None:
        """Wait for copies of an entry that the hot tier gave up: its memory is free only then.

        Bounded by the bus. The hot tier's bytes are exact at every moment that way, and a copy
        that was made ahead is hardly waited for. None is while a graph is captured. Host memory
        may have given such a copy up meanwhile.
        """
        for entry in self._arriving:
            if entry.key == key:
                self._await_arrival(entry)

    def _await_arrival(self, entry: HostEntry) -> None:
        if entry.arriving is not None:
            entry.arriving.wait()

    def _keep_a_clean_one(self, disk: DiskTier, key: Hashable, result: EmbeddingResult) -> None:
        """Copy an entry that the disk holds into host memory, if it can be resident there."""
        disk.touch(key)
        wanted = self._fits_host(result) and not self._is_capturing(result)
        entry = self._copy_down(key, result) if wanted else None
        if entry is None:
            self._counters.clean_evictions += 1
            return
        self._await_arrival(entry)
        entry.disk_copy = DiskCopy.PRESENT
        if self._is_in_buffer(entry):
            self.host.forget(entry)
            self._room.reclaim()

    def write_through(self, key: Hashable, result: EmbeddingResult) -> None:
        """Copy an entry that was just set down to the disk at once, when the policy says so."""
        if self.disk is None or self.disk.policy is not WritePolicy.THROUGH:
            return
        if self._is_capturing(result):
            return  # it is written when it leaves host memory
        entry = self._copy_down(key, result)
        if entry is not None and self.disk.wants(entry):
            self.disk.write(entry)
            self.host.first_to_go(entry)  # the hot tier holds it

    def admit_directly(self, key: Hashable, result: EmbeddingResult) -> bool:
        """Keep an entry that is too large for the hot tier; True when a look-up will find it."""
        self.demote(key, result)
        return self.host.find(key) is not None

    def _is_in_buffer(self, entry: HostEntry) -> bool:
        return entry.ledger is self.host.buffer_ledger

    def _fits_host(self, result: EmbeddingResult) -> bool:
        embedding = result.embedding
        size_bytes = embedding.element_size() * embedding.numel()
        return size_bytes <= self.host.host_ledger.budget_bytes

    def _copy_down(self, key: Hashable, result: EmbeddingResult) -> HostEntry | None:
        try:
            header = describe(result, cost_s=self._cost_of(key))
            if self.portable_only and not (header.class_tag and encode_full_key(key)):
                raise CannotLeaveError("key_or_class")
        except CannotLeaveError as reason:
            self._counters.memory_only[reason.reason] += 1
            return None
        entry = self._room.reserve(key, type(result), header)
        if entry is None:
            self._counters.drops["no_room"] += 1
            return None
        target = self.arena.slices(entry.extents, 0, header.payload_bytes)
        try:
            entry.arriving = self._engine.demote(result.embedding, target)
        except DEVICE_ERRORS as error:  # no memory for a contiguous copy, or a lost device
            self._faults.report("demotion", str(error))
            self._room.give_back(entry)
            return None
        self.host.admit(entry)
        self._counters.demotions += 1
        self._counters.moved_bytes["device_to_host"] += header.payload_bytes
        if not entry.arrived():
            self._arriving.append(entry)
        return entry

    # Up

    def locate(self, key: Hashable) -> Tier | None:
        """The tier below the hot one where a look-up would find a key now."""
        if self.host.find(key) is not None:
            return Tier.HOST
        if self.prefetcher is not None and self.prefetcher.coming(key) is not None:
            return Tier.DISK
        header = None if self.disk is None else self.disk.look_up(key)
        if self.disk is None or header is None or isinstance(header, Absence):
            return None
        return None if self.disk.declines(header, asked_only=True) else Tier.DISK

    def prefetch(self, keys: Iterable[Hashable]) -> int:
        """Start bringing entries from disk into the host tier; how many are now on their way."""
        if self.prefetcher is None or not self.prefetcher.budget_bytes:
            return 0
        return self.prefetcher.start(keys)

    def read_for_call(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Start reading entries that are looked up next; :meth:`end_call` takes the answer."""
        return [] if self.prefetcher is None else self.prefetcher.start_for_call(keys)

    def end_call(self, keys: Iterable[Hashable]) -> None:
        """Let go of what :meth:`read_for_call` read and nobody looked up."""
        if self.prefetcher is not None:
            self.prefetcher.end_call(keys)

    # Away

    def supersede(self, key: Hashable) -> None:
        """Forget what the lower tiers hold under a key that is about to be set anew."""
        self._drop_from_host(key)
        if self.disk is not None:
            self.disk.supersede(key)

    def free(self, key: Hashable, *, known: bool) -> bool:
        """Drop every copy of a key; True when there was one here or, ``known``, in the hot tier."""
        self._end_clean_ahead(key, used=False)
        known = self._drop_from_host(key) or known
        return known if self.disk is None else self.disk.free(key, known=known)

    def clear(self, version: str | None) -> None:
        """Drop everything; on disk by a new generation, which is waited for within bounds."""
        self._forget_memory()
        if self.disk is not None:
            self.disk.clear(version)
        self.poll()

    def clear_memory(self) -> None:
        """Drop everything in host memory, and what was on its way to the disk and is not sent."""
        self._forget_memory()
        self._room.reclaim()

    def _forget_memory(self) -> None:
        for entry in [*self.host.resident.values(), *self.host.in_transit.values()]:
            entry.wanted = False
            self.host.forget(entry)
        self._counters.clean_ahead["wasted"] += len(self._cleaned_ahead)
        self._cleaned_ahead.clear()
        if self.prefetcher is not None:
            self.prefetcher.void_everything()
        for entry in self._arriving:
            self._await_arrival(entry)  # see _await_copies_of

    def _drop_from_host(self, key: Hashable) -> bool:
        if self.prefetcher is not None:
            self.prefetcher.void(key)
        if self._arriving:
            self._await_copies_of(key)
        entry = self.host.find(key)
        if entry is None:
            return False
        entry.wanted = False
        self.host.forget(entry)
        self._room.reclaim()
        return True

    # The end

    def spill_everything(
        self, hot: list[tuple[Hashable, EmbeddingResult]], deadline_s: float
    ) -> None:
        """Write what only memory holds, the hot tier's entries in the order given."""
        if self.disk is None or self._clock() >= deadline_s:
            return
        self.disk.policy = WritePolicy.ON_EVICT  # what is in memory at the end was worth keeping
        for entry in list(self.host.resident.values()):
            if entry.disk_copy is DiskCopy.NONE and self.disk.wants(entry):
                self.disk.write(entry)
        for key, result in hot:
            known = self.host.find(key) is not None or self._is_on_disk(key)
            if not known and not self._spill_one(self.disk, key, result, deadline_s):
                return
        while self._may_progress(self.disk, deadline_s):
            self._wait(deadline_s - self._clock())
            self.poll()

    def close(self, timeout_s: float) -> None:
        """End the worker and give the memory up, which no copy may touch any more."""
        if self.disk is not None:
            self.disk.client.close(timeout_s)
        with contextlib.suppress(*DEVICE_ERRORS):  # a lost device copies nothing any more
            self._wait_for_copies(self.host.every_entry())
        self.arena.close()

    def _spill_one(
        self, disk: DiskTier, key: Hashable, result: EmbeddingResult, deadline_s: float
    ) -> bool:
        entry = self._copy_down(key, result)
        while entry is None and self._may_progress(disk, deadline_s):
            self._wait(deadline_s - self._clock())
            self.poll()
            entry = self._copy_down(key, result)
        if entry is not None and disk.wants(entry):
            disk.write(entry)
        return self._clock() < deadline_s

    def _may_progress(self, disk: DiskTier, deadline_s: float) -> bool:
        """Whether waiting may end something: time is left, and there is a store to write to."""
        coming = disk.client.is_ready or disk.client.down_cause in ("", "died", "silent")
        return coming and self._clock() < deadline_s and self.in_flight()

    # Inside

    def host_snapshot(self) -> dict[str, float]:
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
            "page_locked_bytes": self.arena.page_locked_bytes,
            "demote_waits": self._counters.demote_waits,
            "promotions": self._counters.promotions,
            "coldest_age_seconds": self.host.coldest_age_s(),
        } | self._prefetch_snapshot()

    def _prefetch_snapshot(self) -> dict[str, int]:
        if self.prefetcher is None:
            return {}
        return {
            "prefetched_bytes": self.prefetcher.charged_bytes,
            "prefetch_budget_bytes": self.prefetcher.budget_bytes,
        }

    def _on_written(self, entry: HostEntry) -> None:
        self._counters.spills += 1
        self._counters.moved_bytes["host_to_disk"] += entry.header.payload_bytes
        if entry.wanted and self.disk is not None:
            self.disk.note_present(entry)
        if entry.wanted and self._is_in_buffer(entry) and not entry.pinned:
            self.host.forget(entry)

    def _on_lost(self, entry: HostEntry, cause: str) -> None:
        if not entry.wanted:
            return
        if cause in NOTHING_TO_WAIT_FOR:  # the others were reported with each attempt
            self._faults.report(cause, "an entry could not be written")
        if self._is_in_buffer(entry):
            self._counters.drops[cause] += 1
            self.host.forget(entry)

    def _wait(self, timeout_s: float) -> None:
        self._wait_for_copies(self._moving())
        if self.disk is not None:
            self.disk.wait(timeout_s)

    def _wait_for_copies(self, entries: Iterable[HostEntry]) -> None:
        for entry in entries:
            for transfer in [entry.arriving, *entry.leaving]:
                if transfer is not None:
                    transfer.wait()
