"""The tiered cache of one rank among several that must not disagree, as in tensor parallelism.

Owns: which calls the ranks take together, in which steps, and what a failure on one of them means
for all.
Does not own: how the ranks come together (:mod:`.tensor_parallel`, :mod:`.introduction`), the
messages (:mod:`.exchange`), what they say of an entry (:mod:`.announcement`), its place on the
other ranks (:mod:`.receiver`) or the tiers (:mod:`tiered_mmcache.tiered_cache`).

Each rank has a hot tier. Only the leader, rank 0 of the group, has host memory and a disk. Where
the hot tier does not know the answer, the leader finds it and tells the others, so everything that
depends on time or chance (a read that takes too long, a dead worker, a damaged record, whether
reading is worth it) is decided once.

What is assumed: all ranks make the same calls, with equal arguments, in the same order, one at a
time. Schedulers of tensor-parallel engines do. A rank that does not is met at the next step with
:class:`tiered_mmcache.GroupOutOfStepError`, as are all others.

The steps of a look-up that misses the hot tier. What is before a colon happens on all ranks.

1. ``FIND``: the leader looks below, and says what it found: a header, or nothing, which is a miss.
2. Make room in the hot tier, and allocate the tensor; the leader fills its own.
3. ``TAKE``: who could not says so, and then it is a miss on all ranks.
4. The leader's bytes are broadcast, and the entry is admitted.

Between the steps nothing may fail on one rank alone without being told in the next one; if it does
all the same, that rank is out of the group. It then holds nothing, and every call that would have
to agree raises :class:`tiered_mmcache.GroupLostError`: a miss could be a hit elsewhere, and the
engine hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import xxhash

from tiered_mmcache.contract import EmbeddingResult, Tier
from tiered_mmcache.encoding.encoder_time import Cost, HostTime
from tiered_mmcache.encoding.get_or_encode import (
    DEFAULT_WAIT_S,
    AsyncEncode,
    Encode,
    awaitable_answer,
    checked_answer,
)
from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.entries.results import detached
from tiered_mmcache.errors import PeerFailedError
from tiered_mmcache.host.transfer import payload_bytes_of
from tiered_mmcache.metrics.counters import CacheStats
from tiered_mmcache.ranks.announcement import announce, announced, changed, digest_of, layout_of
from tiered_mmcache.ranks.exchange import LEADER, NO_KEY, Kind, Meeting, RankExchange, Step
from tiered_mmcache.ranks.receiver import Receiver
from tiered_mmcache.static_cache import MultiModalStaticCache, admitted_size, compact
from tiered_mmcache.tiered_cache import TieredMultimodalCache, close_at_exit
from tiered_mmcache.tiers.promotion import DEVICE_ERRORS, Found

_YES = b"\1"


class RankMultimodalCache(TieredMultimodalCache):
    """The tiered cache of one rank; alone until it enters a group.

    For engines that build a cache before its group is known. Most callers want
    :class:`tiered_mmcache.TensorParallelMultimodalCache`, which is in its group from the start.

    From the moment on when all ranks have entered, with hot tiers that are alike, answers are equal
    on all ranks, and so is what the hot tiers hold. Nothing is sent on a hot hit; a hot miss costs
    one small collective, a hit below three and the broadcast of the tensor. An embedding that comes
    from below has the leader's bits on every rank.

    ``stats``, ``drain``, ``close``, ``len`` and the attributes concern this rank alone and need no
    other. ``clear`` sends nothing, but has to be called on all ranks.

    In a group, only keys and classes that can be told to another process are kept below the hot
    tier: integers, strings, bytes, tuples and combinations of these, and registered classes.

    Alone this is :class:`TieredMultimodalCache`, and nothing is ever sent. So is it in a forked
    child, which is no rank, with the hot tier alone.
    """

    _exchange: RankExchange | None = None
    _abandoned: RankExchange | None = None
    _state = 0
    _leader_has_tiers = False

    # Look-up

    def locate(self, mm_hash: Hashable) -> Tier | None:
        """As :meth:`TieredMultimodalCache.locate`; the leader's tiers are every rank's.

        Raises:
            GroupError: As for every call that the hot tier alone cannot answer.
        """
        if mm_hash in self.mm_cache or self._exchange is None:
            return super().locate(mm_hash)
        with self._lock:
            if not self._asks_leader(mm_hash):
                return None
            tier = super().locate(mm_hash)
            said = b"" if tier is None else tier.value.encode()
            answer = self._meet(Kind.LOCATE, digest_of(mm_hash), answer=said).answer
            return Tier(answer.decode()) if answer else None

    def prefetch(self, mm_hashes: Sequence[Hashable]) -> int:
        """As :meth:`TieredMultimodalCache.prefetch`; the leader starts, and all get its count.

        Waits for the other ranks to make the call, though not for a disk.

        Raises:
            GroupError: As for every call that the hot tier alone cannot answer.
        """
        if self._exchange is None:
            return super().prefetch(mm_hashes)
        with self._lock:
            cold = [mm_hash for mm_hash in mm_hashes if mm_hash not in self.mm_cache]
            asked = [mm_hash for mm_hash in cold if self._asks_leader(mm_hash)]
            if not asked:
                return 0
            said = super().prefetch(asked).to_bytes(8, "little")
            answer = self._meet(Kind.PREFETCH, digest_of(*asked), answer=said).answer
            return int.from_bytes(answer, "little")

    def get_or_encode(
        self,
        hashes: Sequence[Hashable],
        encode: Encode,
        *,
        timeout_s: float | None = DEFAULT_WAIT_S,
    ) -> list[EmbeddingResult]:
        """As :meth:`TieredMultimodalCache.get_or_encode`, with one run on every rank.

        All ranks run their ``encode`` for the same hashes.

        Raises:
            PeerFailedError: ``encode`` failed on other ranks only; nothing is kept anywhere.
            GroupError: As for every call that the hot tier alone cannot answer.
        """

        def encode_with_others(keys: list[Hashable]) -> Sequence[EmbeddingResult]:
            with self._encoding_with_others(keys) as answers:
                answers.append(checked_answer(encode(keys), len(keys)))
            return answers[0]

        run = encode if self._exchange is None or self._closed else encode_with_others
        return super().get_or_encode(hashes, run, timeout_s=timeout_s)

    async def aget_or_encode(
        self,
        hashes: Sequence[Hashable],
        encode: AsyncEncode,
        *,
        timeout_s: float | None = DEFAULT_WAIT_S,
    ) -> list[EmbeddingResult]:
        """As :meth:`get_or_encode`, with an encoder to be awaited.

        Await one call before the next: tasks that interleave differently are out of step.
        """

        async def encode_with_others(keys: list[Hashable]) -> Sequence[EmbeddingResult]:
            with self._encoding_with_others(keys) as answers:
                answer = await awaitable_answer(encode(keys))
                answers.append(checked_answer(answer, len(keys)))
            return answers[0]

        run = encode if self._exchange is None or self._closed else encode_with_others
        return await super().aget_or_encode(hashes, run, timeout_s=timeout_s)

    @contextlib.contextmanager
    def _encoding_with_others(
        self, keys: list[Hashable]
    ) -> Iterator[list[Sequence[EmbeddingResult]]]:
        """Run an encoder inside; then all ranks have its answer, or an exception is raised."""
        error: Exception | None = None
        try:
            yield []
        except Exception as raised:  # noqa: BLE001 - told to all ranks, then raised
            error = raised
        try:
            with self._lock:
                failed = self._meet(Kind.ENCODE, digest_of(*keys), ok=error is None).failed
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: no circle, or its tensors stay
        if failed:
            raise PeerFailedError(failed, "the encoder")

    def _look_below(self, mm_hash: Hashable) -> EmbeddingResult | None:
        if self._exchange is None:
            return super()._look_below(mm_hash)
        began_s = self._clock()
        with self._lock:
            if self._asks_leader(mm_hash):
                try:
                    result = self._look_below_together(mm_hash)
                except BaseException:
                    if self._counters.look_up == "absent":  # the leader's count of it stays
                        self._count_absence(mm_hash)
                    raise
                self._count_look_up(mm_hash, began_s)
            else:
                result = None
                self._count_absent(mm_hash)
        self._write_metrics()
        return result

    def _look_below_together(self, mm_hash: Hashable) -> EmbeddingResult | None:
        self._counters.look_up = ""
        found = self._below_or(lambda below: below.promoter.find(mm_hash), None)
        try:
            return self._agree_on(mm_hash, found)
        finally:
            if found is not None:
                hot = mm_hash in self.mm_cache
                self._below_or(lambda below: below.promoter.release(found, now_hot=hot), None)

    def _agree_on(self, mm_hash: Hashable, found: Found | None) -> EmbeddingResult | None:
        """Take the steps of a look-up; ``found`` is what the leader found, and None elsewhere."""
        assert self._exchange is not None
        said = b"" if found is None else announce(found.entry.header, found.tier)
        answer = self._meet(Kind.FIND, digest_of(mm_hash), answer=said).answer
        if not answer:
            if not self._exchange.leads:
                self._counters.count_miss("leader")
            return None
        with self._in_step():
            header, tier = announced(answer)
            fits = header.payload_bytes <= self.max_size
            if fits:
                with self._patience():
                    self._evict_until_fits(header.payload_bytes)
            result = self._fill(found) if found is not None else self._receiver.allocate(header)
        failed = self._meet(Kind.TAKE, digest_of(mm_hash), ok=result is not None).failed
        if result is None or failed:
            if result is not None:
                self._count_failure_elsewhere(failed, tier)
            return None
        with self._in_step():
            self._exchange.share(payload_bytes_of(result.embedding))
            if fits:
                self._insert(mm_hash, result)
                self._costs.record(mm_hash, Cost(HostTime(header.cost_s), 1.0))
            self._history.admitted(mm_hash, hot=fits)
            self._counters.saved_below_s += header.cost_s
            if not self._exchange.leads:  # the leader counted when it had read the entry
                self._count_hit(tier)
        return result

    def _fill(self, found: Found) -> EmbeddingResult | None:
        """On the leader: the result, read and copied to its device; None when it cannot be."""
        result = self._below_or(lambda below: below.promoter.restore(found), None)
        if result is None or self._receiver.carries(result.embedding.device):
            return result
        self._take_back_hit(found.tier)
        return None

    # Change

    def _set(self, mm_hash: Hashable, embedding: EmbeddingResult, cost: Cost) -> bool:
        """As in a single process, once it is clear that no rank lacks the memory for it.

        False, on all ranks, where one of them does.
        """
        if self._exchange is None:
            return super()._set(mm_hash, embedding, cost)
        with self._lock:
            self._exchange.check()
            if self._closed or mm_hash in self.mm_cache:
                self._note_change(b"renew", mm_hash)
                return super()._set(mm_hash, embedding, cost)
            ready = self._ready_to_admit(embedding)
            ok, layout = ready is not None, layout_of(embedding)
            failed = self._meet(Kind.SET, digest_of(mm_hash), ok=ok, detail=layout).failed
            if ready is None or failed:
                self._report_failure_elsewhere(failed)
                return False
            with self._in_step():
                kept = super()._set(mm_hash, ready, cost)
            if mm_hash in self.mm_cache or not self._spill_oversize:
                return kept
            said = _YES if kept else b""  # in the leader's host memory
            return bool(self._meet(Kind.KEEP_BELOW, digest_of(mm_hash), answer=said).answer)

    def _ready_to_admit(self, embedding: EmbeddingResult) -> EmbeddingResult | None:
        """What can be admitted without asking for memory any more; None when there is none."""
        if self._leader_has_tiers:
            embedding = detached(embedding)
        if admitted_size(embedding.embedding) > self.max_size:
            return embedding
        try:
            return compact(embedding)
        except DEVICE_ERRORS as error:
            self._faults.report("admission", str(error))
            return None

    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """As :meth:`TieredMultimodalCache.free`; the leader's tiers are every rank's.

        Nothing is sent when the hot tiers hold the entry.

        Raises:
            GroupError: As for every call that the hot tier alone cannot answer.
        """
        if self._exchange is None:
            return super().free(mm_hash)
        with self._lock:
            hot = mm_hash in self.mm_cache
            asks = not hot and self._asks_leader(mm_hash)
            known = super().free(mm_hash)
            if hot:
                self._note_change(b"free", mm_hash)
            if not asks:
                return known
            said = _YES if known else b""
            return bool(self._meet(Kind.FREE, digest_of(mm_hash), answer=said).answer)

    def clear(self, version: str | None = None) -> None:
        """As :meth:`TieredMultimodalCache.clear`; on all ranks, with the same version.

        Nothing is sent. It works on a rank that is out of its group, too.
        """
        with self._lock:
            super().clear(version)
            self._note_change(b"clear", version)

    def clear_memory(self) -> None:
        """As :meth:`TieredMultimodalCache.clear_memory`; on all ranks. Nothing is sent."""
        with self._lock:
            super().clear_memory()
            self._note_change(b"clear_memory", None)

    def _insert(self, mm_hash: Hashable, result: EmbeddingResult) -> None:
        super()._insert(mm_hash, result)
        self._note_change(b"insert", mm_hash)

    def _on_evict(self, mm_hash: Hashable, result: EmbeddingResult) -> None:
        self._note_change(b"evict", mm_hash)
        super()._on_evict(mm_hash, result)

    # The whole

    def stats(self) -> CacheStats:
        """This rank's counters. ``group`` says where it stands among the others.

        Ranks that do not lead count hits below as the leader does, and misses as ``leader`` when
        the leader has said so. ``other_rank`` is what failed on another rank only.
        """
        return dataclasses.replace(super().stats(), group=self._group_snapshot())

    def close(self, timeout_s: float | None = None) -> None:
        """As :meth:`TieredMultimodalCache.close`; lets go of the group, and needs no other rank."""
        super().close(timeout_s)
        if self._exchange is not None:
            self._exchange.close()

    def _group_snapshot(self) -> dict[str, Any]:
        exchange = self._exchange
        if exchange is None:
            return {}
        return {
            "rank": exchange.rank,
            "size": exchange.size,
            "steps": exchange.steps,
            "shared_bytes": exchange.shared_bytes,
            "failure": exchange.failure,
        }

    def _abandon_lower_tiers(self) -> None:
        # A child is no rank, and the connections are the parent's. So are the threads of the group,
        # whose end it must not wait for: the group is kept, unused.
        self._abandoned, self._exchange = self._exchange, None
        super()._abandon_lower_tiers()

    # Agreement

    def _enter_group(self, exchange: RankExchange) -> None:
        """From now on answer as the other ranks do; all of them call this at the same step.

        The hot tiers have to be alike: of one size, under the same rules, and empty. Whether the
        leader has tiers below is what it says here; other ranks must have none.

        Raises:
            GroupError: The others are elsewhere, or one of them did not come.
        """
        said = _YES if self._below is not None else b""
        step = Step(kind=Kind.SETTINGS, key=NO_KEY, state=0, hot_hits=0, detail=self._settings())
        self._leader_has_tiers = bool(exchange.meet(step, answer=said).answer)
        device = "auto" if self.config is None else self.config.hot.device
        self._receiver = Receiver(device, exchange.carries, self._counters, self._faults)
        if self._below is not None:
            self._below.portable_only = True
        self._exchange = exchange
        if self._at_exit is None:
            self._at_exit = close_at_exit(self)  # for the sake of the group

    def _namespace_of_group(self) -> str | None:
        return None if self.config is None else self.config.namespace

    def _settings(self) -> int:
        """What has to be equal on all ranks."""
        settings = repr((self.max_size, self._namespace_of_group(), self._spill_oversize))
        return xxhash.xxh3_64_intdigest(settings.encode())

    def _ranks_against(self, *, objects: bool) -> list[int]:
        """The ranks that object to what all are about to do; on all ranks.

        Raises:
            GroupError: As for every call that the hot tier alone cannot answer.
        """
        return self._meet(Kind.VOTE, NO_KEY, ok=not objects).failed

    def _asks_leader(self, mm_hash: Hashable) -> bool:
        """Whether the leader may know a key that the hot tiers do not hold.

        Raises:
            GroupLostError: This rank is out of the group: it cannot ask, nor answer alone.
        """
        assert self._exchange is not None
        self._exchange.check()
        if self._closed or not self._leader_has_tiers:
            return False
        return encode_full_key(mm_hash) is not None

    def _meet(
        self, kind: Kind, key: bytes, *, ok: bool = True, answer: bytes = b"", detail: int = 0
    ) -> Meeting:
        assert self._exchange is not None
        step = Step(kind=kind, key=key, state=self._state, hot_hits=self._hot_hits, detail=detail)
        with self._in_step():
            return self._exchange.meet(step, ok=ok, answer=answer)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Do inside what all ranks do; when this one cannot, it is out of the group.

        What it holds may not be what the others hold then. It is dropped, so that every look-up
        has to ask, and is refused.
        """
        try:
            yield
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.leave(repr(error))
            self._costs.clear()
            self._history.cleared()
            MultiModalStaticCache.clear(self)
            raise

    def _note_change(self, change: bytes, key: Hashable) -> None:
        """Let the state stand for one more change of the hot tier."""
        if self._exchange is not None:
            self._state = changed(self._state, change, key)

    def _count_failure_elsewhere(self, failed: Sequence[int], tier: Tier) -> None:
        assert self._exchange is not None
        if LEADER in failed:
            self._counters.count_miss("leader")
            return
        self._report_failure_elsewhere(failed)
        self._counters.count_miss("other_rank")
        if self._exchange.leads:
            self._take_back_hit(tier)

    def _report_failure_elsewhere(self, failed: Sequence[int]) -> None:
        assert self._exchange is not None
        others = [rank for rank in failed if rank != self._exchange.rank]
        if others:
            self._faults.report("other_rank", f"rank {others} had no room for an entry")

    def _count_hit(self, tier: Tier) -> None:
        if tier is Tier.HOST:
            self._counters.count_host_hit()
        else:
            self._counters.count_disk_hit()

    def _take_back_hit(self, tier: Tier) -> None:
        """What was counted when the leader had read the entry did not become an answer."""
        if tier is Tier.HOST:
            self._counters.host_hits -= 1
        else:
            self._counters.disk_hits -= 1
