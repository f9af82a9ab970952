"""The tiered cache: the specified hot tier, over host memory, over a store on disk.

Owns: the public calls, the lock, and the order of steps between the hot tier and what is below.
Does not own: the hot tier's rules (:mod:`.static_cache`) or the lower tiers
(:mod:`.tiers.lower_tiers`).

Concurrency. A hot hit takes no lock and polls nothing: a dictionary look-up, a move to the end,
one counter. Every other public call takes the one re-entrant lock and first notes what has ended
in the meantime. No thread runs on the cache's behalf: what is in flight when calls stop sits
safely in host memory until the next one. Waits under the lock are bounded: the worker's answer to
a look-up by ``disk.read_timeout``, room for what a call evicts by ``host.demote_wait``, ``drain``
and ``close`` by their own limits.

What the hot tier holds depends on the calls and on which look-ups below succeeded, never on when
a copy ended.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tiered_mmcache.config import CacheConfig, Oversize, load_config
from tiered_mmcache.contract import EmbeddingResult, Tier
from tiered_mmcache.disk.client import SpillClient, StoreSettings
from tiered_mmcache.encoding.encoder_time import UNKNOWN_COST, Cost, HostTime, HotCosts
from tiered_mmcache.encoding.get_or_encode import (
    DEFAULT_WAIT_S,
    AsyncEncode,
    Encode,
    Encoding,
    Tiers,
)
from tiered_mmcache.entries.results import detached
from tiered_mmcache.host.transfer import CopyEngine
from tiered_mmcache.metrics.counters import CacheStats, Counters, FaultLog
from tiered_mmcache.metrics.file import MetricsFile
from tiered_mmcache.metrics.key_history import KeyHistory
from tiered_mmcache.metrics.remedies import log_fields
from tiered_mmcache.static_cache import MultiModalStaticCache, admitted_size
from tiered_mmcache.tiers.assembly import (
    build_lower_tiers,
    config_or_environment,
    hot_size,
    metrics_file_for,
    trace_recorder_for,
)
from tiered_mmcache.tiers.lower_tiers import LowerTiers
from tiered_mmcache.tiers.promotion import DEVICE_ERRORS
from tiered_mmcache.tracing.recording import Recording

_START_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 60.0
_GIVE_UP_TIMEOUT_S = 1.0
_MOST_CLEANED_AT_ONCE = 16  # a call does not look further: the next one goes on

_Answer = TypeVar("_Answer")

log = logging.getLogger("tiered_mmcache")
_caches: weakref.WeakSet[TieredMultimodalCache] = weakref.WeakSet()


class TieredMultimodalCache(MultiModalStaticCache):
    """The specified static cache, whose evicted entries come back instead of being encoded again.

    Args:
        max_size: Bytes of the hot tier; wins over ``hot.max_size``.
        config: The tiers. Without it, the file that ``TIERED_MMCACHE_CONFIG`` names is read;
            without that too, this is the static cache and nothing more.
        engine: Copies between the device and host memory; for tests.
        make_client: Makes the handle on the spill worker; for tests.
        clock: Monotonic seconds; for tests.

    Raises:
        ConfigError: The configuration cannot be used, or no size is given for the hot tier.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        config: CacheConfig | None = None,
        engine: CopyEngine | None = None,
        make_client: Callable[[StoreSettings, int], SpillClient] = SpillClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config_or_environment(config)
        super().__init__(hot_size(max_size, config))
        self.config = config
        self._lock = threading.RLock()
        self._clock = clock
        self._counters = Counters()
        self._faults = FaultLog(self._counters, clock)
        self._hot_hits = 0
        self._closed = False
        self._at_exit: Callable[[], None] | None = None
        self._costs = HotCosts()
        self._history = KeyHistory(clock)
        self._encoding = Encoding(
            Tiers(
                # Looked up anew each time: a trace shadows them.
                find_hot=lambda mm_hash: self._find_hot(mm_hash),  # noqa: PLW0108
                find=lambda mm_hash: self.get_single(mm_hash),  # noqa: PLW0108
                hot_cost_s=self._costs.seconds,
                keep=self._keep_encoded,
            ),
            self._counters,
        )
        self._engine = engine
        self._make_client = make_client
        self._below: LowerTiers | None = None
        self._metrics_file: MetricsFile | None = None
        self._recording: Recording | None = None
        self._spill_oversize = config is not None and config.hot.oversize is Oversize.SPILL
        _caches.add(self)
        self._open_lower_tiers(config, _START_TIMEOUT_S)

    def _open_lower_tiers(self, config: CacheConfig | None, timeout_s: float) -> None:
        """Build what the configuration has below the hot tier, and wait for the store to open."""
        self._below = build_lower_tiers(
            config,
            self.max_size,
            self._engine,
            self._make_client,
            self._counters,
            self._costs.seconds,
            self._may_reach_disk,
            self._clock,
        )
        self._metrics_file = self._metrics_file or metrics_file_for(config, self, self._faults)
        recorder = None if self._recording else trace_recorder_for(config, self._faults)
        if recorder is not None:
            self._recording = Recording(self, recorder, self._counters, self._costs)
            self._at_exit = self._at_exit or close_at_exit(self)
        if self._below is not None and self._below.disk is not None:
            self._below.disk.wait_until_ready(timeout_s)
            self._at_exit = self._at_exit or close_at_exit(self)

    def _may_reach_disk(self, mm_hash: Hashable) -> bool:
        """Whether a hash tells contents apart for good; a plug-in may distrust its engine's."""
        return True

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], max_size: int | None = None
    ) -> TieredMultimodalCache:
        """A cache as a YAML file describes it.

        Raises:
            ConfigError: The file cannot be used.
        """
        return cls(max_size, config=load_config(Path(path)))

    # Look-up

    def get_single(self, mm_hash: Hashable) -> EmbeddingResult | None:
        """The result of one hash, now most recently used, or None.

        A hot hit is the stored object. A hit below is a new result on the current device, equal
        bit for bit; it is admitted to the hot tier unless it is larger than that. It may be used
        on the stream that was current during the call, at any time.
        """
        hot = self.mm_cache
        try:
            result = hot[mm_hash]
            hot.move_to_end(mm_hash)
        except KeyError:
            return self._look_below(mm_hash)
        self._hot_hits += 1
        return result

    def get_or_encode(
        self,
        hashes: Sequence[Hashable],
        encode: Encode,
        *,
        timeout_s: float | None = DEFAULT_WAIT_S,
    ) -> list[EmbeddingResult]:
        """The results of all hashes: from any tier, or from the encoder, which runs once.

        Each hash is looked up as by :meth:`get_single`; the key of a combination is what
        :meth:`combine_hashes` returns. ``encode`` is called at most once, with the different
        hashes that no tier holds and nobody else is encoding, in the order of their first
        mention. Whoever asks for one of them meanwhile, on another thread or in an asyncio task,
        waits for that run and gets its result. The lock is not held meanwhile.

        A result that the cache refuses is returned all the same. So is that of a run during
        which the hash was freed, or the cache cleared; it is not kept, and whoever asks after
        the ``free`` starts a run of its own.

        The run's time, divided in proportion to the bytes, is recorded as the entries' cost.

        Args:
            hashes: Any number, repetitions included.
            encode: Returns one result for each hash that it is given, in that order. It may call
                the cache, but not ask for what it is encoding.
            timeout_s: How long to wait for the runs of others. Then this call encodes what it
                still lacks itself, so that one that hangs does not hold up everybody. None waits
                without a limit, 0 does not wait.

        Returns:
            A result for each hash, in the order of ``hashes``.

        Raises:
            Exception: What ``encode`` raised, here or in the run that was waited for. Nothing of
                that run is kept, and the next call tries again. A run that ended by anything
                else, as by Ctrl-C, concerns its caller alone: who waited for it encodes itself.
            TypeError: ``encode`` returned no sequence of results.
            ValueError: It returned another number of results than it got hashes; or a hash is
                None, which is what :meth:`combine_hashes` makes of an empty list.
            RuntimeError: The wait would never end: an encoder asks for what it is encoding, also
                by way of others; or an asyncio task on this thread is encoding it.
        """
        return self._encoding.get_or_encode(hashes, encode, timeout_s)

    async def aget_or_encode(
        self,
        hashes: Sequence[Hashable],
        encode: AsyncEncode,
        *,
        timeout_s: float | None = DEFAULT_WAIT_S,
    ) -> list[EmbeddingResult]:
        """As :meth:`get_or_encode`, with an encoder to be awaited.

        Runs and waits are awaited; tasks and threads wait for each other's runs. Looking below
        the hot tier happens on the event loop's thread and takes as long as in
        :meth:`get_single`. When the task that encodes is cancelled, those who wait for it are
        not: one of them encodes.
        """
        return await self._encoding.aget_or_encode(hashes, encode, timeout_s)

    def get_many(self, mm_hashes: Sequence[Hashable]) -> list[EmbeddingResult | None]:
        """What :meth:`get_single` would return for one hash after the other, and faster.

        The worker reads the entries on disk one behind the other while earlier ones are promoted.
        Answers and recency are those of the single calls. Each entry is waited for no longer than
        ``disk.read_timeout``. A late hash may push an early one out of the hot tier again; its
        result stays valid.
        """
        cold = [mm_hash for mm_hash in mm_hashes if mm_hash not in self.mm_cache]
        started: list[Hashable] = []
        if len(cold) > 1:
            started = self._below_or(lambda below: below.read_for_call(cold), started)
        try:
            return [self.get_single(mm_hash) for mm_hash in mm_hashes]
        finally:
            if started:
                self._below_or(lambda below: below.end_call(started), None)

    def prefetch(self, mm_hashes: Sequence[Hashable]) -> int:
        """Start bringing entries from disk into host memory, for look-ups that come later.

        Never waits and never changes the hot tier. A look-up of an entry on its way waits for
        that read; one after its arrival costs what a hit in host memory costs. What is freed, set
        anew or cleared meanwhile is not found. Arrived entries that are not used within a minute
        are the next to leave host memory. ``stats().prefetches`` says what became of them.

        Args:
            mm_hashes: Keys as :meth:`get_single` takes them; for a request of several items, what
                :meth:`combine_hashes` returns. Each is worth as much as the earlier ones: what
                ``host.prefetch`` has no room for is left out.

        Returns:
            How many entries are now on their way by this call. Not counted: those in memory or
            on their way already, those known not to be there, and those left out. Without a host
            or a disk tier it is 0.
        """
        hot = self.mm_cache
        cold = [mm_hash for mm_hash in mm_hashes if mm_hash not in hot]
        return self._below_or(lambda below: below.prefetch(cold), 0)

    def has(self, mm_hash: Hashable) -> bool:
        """Whether a look-up would find the hash in any tier; does not change recency."""
        return self.locate(mm_hash) is not None

    def locate(self, mm_hash: Hashable) -> Tier | None:
        """The tier where a look-up would find the hash now, or None.

        Waits at most ``disk.read_timeout`` for the disk.
        """
        if mm_hash in self.mm_cache:
            return Tier.HOT
        return self._below_or(lambda below: below.locate(mm_hash), None)

    def _find_hot(self, mm_hash: Hashable) -> EmbeddingResult | None:
        hot = self.mm_cache
        try:
            result = hot[mm_hash]
            hot.move_to_end(mm_hash)
        except KeyError:
            return None
        self._hot_hits += 1
        return result

    def _look_below(self, mm_hash: Hashable) -> EmbeddingResult | None:
        if self._below is None or self._closed:
            self._count_absent(mm_hash)
            self._write_metrics()
            return None
        began_s = self._clock()
        with self._lock:
            result = super().get_single(mm_hash)  # another thread may have promoted it meanwhile
            if result is not None:
                self._hot_hits += 1
                return result
            self._counters.look_up = ""
            result = self._below_or(lambda below: self._promote_patiently(below, mm_hash), None)
            self._count_look_up(mm_hash, began_s)
        self._write_metrics()
        return result

    def _count_look_up(self, mm_hash: Hashable, began_s: float) -> None:
        """Complete the counts of a look-up below the hot tier, whatever became of it."""
        counters = self._counters
        if not counters.look_up:  # it failed before it was counted, or the cache was just closed
            counters.count_miss("absent" if self._closed else "internal")
        if counters.look_up == "absent":
            self._count_absence(mm_hash)
        outcome = counters.look_up if counters.look_up in counters.look_ups else "miss"
        counters.look_ups[outcome].observe(self._clock() - began_s)

    def _count_absent(self, mm_hash: Hashable) -> None:
        self._counters.count_miss("absent")
        self._count_absence(mm_hash)

    def _count_absence(self, mm_hash: Hashable) -> None:
        """Say of a miss that was counted as ``absent`` what became of the entry."""
        self._counters.absences[self._history.why_absent(mm_hash)] += 1

    def _promote_patiently(self, below: LowerTiers, mm_hash: Hashable) -> EmbeddingResult | None:
        with below.patience:
            return self._promote(below, mm_hash)

    def _promote(self, below: LowerTiers, mm_hash: Hashable) -> EmbeddingResult | None:
        found = below.promoter.find(mm_hash)
        if found is None:
            return None
        size_bytes = found.entry.header.payload_bytes
        cost_s = found.entry.header.cost_s
        fits = size_bytes <= self.max_size
        result = None
        try:
            if fits:
                self._evict_until_fits(size_bytes)
            result = below.promoter.restore(found)
            if result is not None and fits:
                self._insert(mm_hash, result)
                self._costs.record(mm_hash, Cost(HostTime(cost_s), 1.0))
        finally:
            below.promoter.release(found, now_hot=fits and result is not None)
        if result is not None:
            self._history.admitted(mm_hash, hot=fits)
        self._counters.saved_below_s += 0.0 if result is None else cost_s
        return result

    # Change

    def set(  # type: ignore[override]  # as in the static cache
        self,
        mm_hash: Hashable,
        embedding: EmbeddingResult,
        loc: object = None,
        *,
        mm_embedding_allocator: object = None,
    ) -> bool:
        """Admit an entry; see :meth:`MultiModalStaticCache.set`.

        A hash that the hot tier does not hold is set anew: what lower tiers held under it is
        forgotten. With lower tiers, a result that requires a gradient is stored detached. With
        ``hot.oversize: spill`` an entry larger than the hot tier goes to host memory at once.

        Raises:
            AssertionError: ``embedding`` is not an :class:`EmbeddingResult`.
        """
        assert isinstance(embedding, self.result_class), type(embedding)
        admitted = self._set(mm_hash, embedding, UNKNOWN_COST)
        self._write_metrics()
        return admitted

    def _set(self, mm_hash: Hashable, embedding: EmbeddingResult, cost: Cost) -> bool:
        with self._lock:
            if self._closed:
                self._counters.refusals["closed"] += 1
                return False
            if mm_hash in self.mm_cache:
                self._below_or(lambda below: None, None)
                self.mm_cache.move_to_end(mm_hash)
                return True
            if self._below is not None:
                embedding = detached(embedding)
            if admitted_size(embedding.embedding) > self.max_size:
                return self._set_oversized(mm_hash, embedding, cost)
            self._below_or(lambda below: below.supersede(mm_hash), None, voids=True)
            with self._patience():
                admitted = self._admit(mm_hash, embedding)
            held = self.mm_cache[mm_hash]
            self._count_admission(mm_hash, hot=True)
            self._costs.record(mm_hash, cost)
            self._below_or(
                lambda below: self._after_admission(below, mm_hash, held), None, poll=False
            )
            return admitted

    def _keep_encoded(
        self,
        mm_hash: Hashable,
        result: EmbeddingResult,
        cost: Cost,
        still_valid: Callable[[], bool],
    ) -> EmbeddingResult:
        with self._lock:  # `free` and `clear` hold it while they void what is being encoded
            if not still_valid() or mm_hash in self.mm_cache:
                return result
            try:
                admitted = self._set(mm_hash, result, cost)
            except DEVICE_ERRORS as error:  # no memory to clone a view: the caller has it anyway
                self._faults.report("admission", str(error))
                return result
            return self.mm_cache.get(mm_hash, result) if admitted else result

    def _after_admission(
        self, below: LowerTiers, mm_hash: Hashable, result: EmbeddingResult
    ) -> None:
        below.arena.prepare_for(result.embedding.device)
        below.write_through(mm_hash, result)
        if below.clean_ahead_bytes and self.current_size + below.clean_ahead_bytes > self.max_size:
            # At once, since a hot hit on another thread moves entries without the lock.
            coldest_first = list(islice(self.mm_cache.items(), _MOST_CLEANED_AT_ONCE))
            below.clean_ahead(coldest_first)

    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """Drop every copy in every tier; False when there is none.

        What is being written or deleted at that moment cannot bring the entry back.
        """
        with self._lock:
            self._encoding.flights.void(mm_hash)
            self._costs.forget(mm_hash)
            held = self.mm_cache.get(mm_hash)  # as long as a copy may read it
            known = super().free(mm_hash)
            known = self._below_or(lambda b: b.free(mm_hash, known=known), known, voids=True)
            if known:
                self._history.freed(mm_hash)
            del held
            return known

    def clear(self, version: str | None = None) -> None:
        """Drop everything in every tier.

        Args:
            version: What the embeddings now depend on, such as a weight version. On disk,
                processes that clear to the same version share entries again; without one, nobody
                but this process and later ones do.
        """
        with self._lock:
            self._encoding.flights.void_all()
            self._costs.clear()
            held = list(self.mm_cache.values())  # as long as copies may read them
            self._history.cleared()
            super().clear()
            self._below_or(lambda below: below.clear(version), None, voids=True)
            del held

    def clear_memory(self) -> None:
        """Drop everything in the hot and the host tier; what is on disk stays."""
        with self._lock:
            self._encoding.flights.void_all()
            self._costs.clear()
            self._history.cleared()
            held = list(self.mm_cache.values())  # as long as copies may read them
            super().clear()
            self._below_or(lambda below: below.clear_memory(), None, voids=True)
            del held

    def _set_oversized(self, mm_hash: Hashable, result: EmbeddingResult, cost: Cost) -> bool:
        if not self._spill_oversize:
            self._count_refusal(mm_hash, "larger_than_hot_tier")
            return False

        def keep(below: LowerTiers) -> bool:
            below.supersede(mm_hash)
            self._costs.record(mm_hash, cost)
            with below.patience:
                return below.admit_directly(mm_hash, result)

        try:
            kept = self._below_or(keep, False, voids=True)
        finally:
            self._costs.forget(mm_hash)
        if kept:
            self._count_admission(mm_hash, hot=False)
        else:
            self._count_refusal(mm_hash, "no_room_below")
        return kept

    def _count_admission(self, mm_hash: Hashable, *, hot: bool) -> None:
        self._counters.admissions += 1
        self._history.admitted(mm_hash, hot=hot)

    def _count_refusal(self, mm_hash: Hashable, reason: str) -> None:
        self._counters.refusals[reason] += 1
        self._history.refused(mm_hash)

    def _patience(self) -> AbstractContextManager[None]:
        """What the victims of this call may wait for room below; lower tiers may be given up."""
        return nullcontext() if self._below is None else self._below.patience

    def _on_evict(self, mm_hash: Hashable, result: EmbeddingResult) -> None:
        below = self._below
        try:
            if below is not None and not self._closed:
                below.demote(mm_hash, result)
        except Exception as error:  # noqa: BLE001 - a fault below must never reach the engine
            self._faults.report("internal", repr(error))
        finally:
            self._costs.forget(mm_hash)
            self._history.left_hot(mm_hash)

    # The whole

    def drain(self, timeout_s: float = _DRAIN_TIMEOUT_S) -> bool:
        """Wait until nothing is in flight any more; False when that takes longer.

        In flight are copies to and from host memory, writes to disk, deletions there, and a spill
        worker that is being started again.
        """
        deadline_s = self._clock() + timeout_s
        return self._below_or(lambda below: below.drain(deadline_s), True)

    def stats(self) -> CacheStats:
        """A snapshot of the counters and of how full the tiers are."""
        with self._lock:
            self._counters.hot_hits = self._hot_hits
            return self._snapshot(None if self._closed else self._below)

    def close(self, timeout_s: float | None = None) -> None:
        """Spill what only memory holds, then give memory and worker up. Safe to call twice.

        Afterwards every look-up is a miss and every ``set`` is refused.

        Args:
            timeout_s: How long spilling may take; ``disk.close_timeout`` when None.
        """
        if self._metrics_file is not None:
            self._metrics_file.remove()
        with self._lock:
            if self._closed:
                return
            below = self._below
            if below is not None:
                limit_s = self._close_timeout_s() if timeout_s is None else timeout_s
                deadline_s = self._clock() + limit_s
                newest_first = list(reversed(self.mm_cache.items()))
                self._below_or(lambda tiers: tiers.spill_everything(newest_first, deadline_s), None)
                below.close(max(1.0, deadline_s - self._clock()))
            self._closed = True
            self._end_recording()
            self._costs.clear()
            super().clear()
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)

    def _snapshot(self, below: LowerTiers | None) -> CacheStats:
        counters = self._counters
        hot = {
            "hits": counters.hot_hits,
            "entries": len(self),
            "bytes": self.current_size,
            "budget_bytes": self.max_size,
            "coldest_age_seconds": self._coldest_age_s(),
        }
        host: dict[str, float] = {"hits": counters.host_hits}
        disk: dict[str, float] = {"hits": counters.disk_hits}
        if below is not None:
            host |= below.host_snapshot()
            disk |= {} if below.disk is None else below.disk.snapshot()
        return CacheStats(
            hot=hot,
            host=host,
            disk=disk,
            misses=sum(counters.misses.values()),
            misses_by_reason=dict(counters.misses),
            drops=dict(counters.drops),
            memory_only=dict(counters.memory_only),
            faults=dict(counters.faults),
            encoding=self._encoding.snapshot(),
            prefetches=dict(counters.prefetches),
            absences=dict(counters.absences),
            admissions=counters.admissions,
            refusals=dict(counters.refusals),
            clean_ahead=dict(counters.clean_ahead),
            moved_bytes=dict(counters.moved_bytes),
            look_ups=copy.deepcopy(counters.look_ups),
            namespace="" if self.config is None else self.config.namespace or "",
        )

    def _coldest_age_s(self) -> float:
        """Seconds since the next victim was admitted; hot hits take no time, nor note it."""
        with contextlib.suppress(StopIteration, RuntimeError):  # a hit on another thread moved it
            return self._history.hot_age_s(next(iter(self.mm_cache)))
        return 0.0

    def _write_metrics(self) -> None:
        if self._metrics_file is not None:
            self._metrics_file.write_if_due()

    def _close_timeout_s(self) -> float:
        disk = None if self.config is None else self.config.disk
        return 0.0 if disk is None else disk.close_timeout_s

    def _abandon_lower_tiers(self) -> None:
        """In a forked child: memory and worker below are the parent's; the hot tier stays."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._encoding.reset_after_fork()
        self._metrics_file = None
        self._end_recording(abandon=True)
        below, self._below = self._below, None
        if below is not None:
            below.arena.close()

    def _end_recording(self, *, abandon: bool = False) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.end(abandon=abandon)

    def __enter__(self) -> TieredMultimodalCache:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _below_or(
        self,
        call: Callable[[LowerTiers], _Answer],
        otherwise: _Answer,
        *,
        voids: bool = False,
        poll: bool = True,
    ) -> _Answer:
        """Make progress below, then the call; ``otherwise`` without lower tiers or on a fault.

        The one place where a fault of the lower tiers becomes a miss, a counter and a log line.
        When a call that ``voids`` copies fails, a copy that must not be served may still be
        below: the lower tiers are given up for this process.
        """
        if self._below is None:
            return otherwise
        with self._lock:
            if self._closed:
                return otherwise
            try:
                if poll:
                    self._below.poll()
                return call(self._below)
            except Exception as error:  # noqa: BLE001 - a fault below must never reach the engine
                self._faults.report("internal", repr(error))
                if voids:
                    self._give_up_lower_tiers(self._below)
                return otherwise

    def _give_up_lower_tiers(self, below: LowerTiers) -> None:
        self._below = None
        log.error(
            "the lower tiers are off until a restart: a copy could not be voided",
            extra=log_fields("internal"),
        )
        try:
            below.close(_GIVE_UP_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a fault below must never reach the engine
            self._faults.report("internal", repr(error))


def close_at_exit(cache: TieredMultimodalCache) -> Callable[[], None]:
    """Have a cache closed when the interpreter exits, if it is alive then."""
    reference = weakref.ref(cache)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return atexit.register(close)


def _after_fork_in_child() -> None:
    for cache in list(_caches):
        cache._abandon_lower_tiers()


os.register_at_fork(after_in_child=_after_fork_in_child)
