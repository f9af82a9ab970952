"""``get_or_encode``: entries from any tier, and the encoder for those that are in none.

Owns: the order of looking up, encoding and keeping; the checks on what an encoder returns; the
counters of encoder runs.
Does not own: who encodes and who waits (:mod:`.single_flight`), the tiers
(:mod:`tiered_mmcache.tiered_cache`), or how a run is measured (:mod:`.encoder_time`).

The cache's lock is taken for each look-up and for each result that is kept, never while an
encoder runs or while a caller waits for another's.

A key is looked up again by whoever becomes its leader: the run of somebody else may have ended
between the first look and the claim.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence

import torch

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.encoding.encoder_time import Cost, EncodingTime, Stopwatch, divided
from tiered_mmcache.encoding.single_flight import Flight, SingleFlight, identity_of
from tiered_mmcache.encoding.stream_marks import follow, mark
from tiered_mmcache.metrics.counters import Counters

Encode = Callable[[list[Hashable]], Sequence[EmbeddingResult]]
AsyncEncode = Callable[[list[Hashable]], Awaitable[Sequence[EmbeddingResult]]]

DEFAULT_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What is asked of the cache.

    Attributes:
        find_hot: The entry of a key in the hot tier, now most recently used; counts no miss.
        find: The entry of a key in any tier; counts the hit or the miss.
        hot_cost_s: Seconds that an entry in the hot tier cost; 0.0 when unknown.
        keep: Admits a result, unless the last argument says that it was freed or cleared
            meanwhile; atomically against both. Returns the result to hand out.
    """

    find_hot: Callable[[Hashable], EmbeddingResult | None]
    find: Callable[[Hashable], EmbeddingResult | None]
    hot_cost_s: Callable[[Hashable], float]
    keep: Callable[[Hashable, EmbeddingResult, Cost, Callable[[], bool]], EmbeddingResult]


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A result, and the work on its device that has to come before its use."""

    result: EmbeddingResult
    ready: torch.Event | None

    @classmethod
    def now(cls, result: EmbeddingResult) -> _Made:
        return cls(result, mark(result.embedding.device))

    def here(self) -> EmbeddingResult:
        """The result, for use on the caller's current stream."""
        follow(self.ready, self.result.embedding.device)
        return self.result


class _Call:
    """One call: what it wants, what it has, and how long it may wait."""

    def __init__(
        self, hashes: Sequence[Hashable], timeout_s: float | None, clock: Callable[[], float]
    ) -> None:
        self._hashes = list(hashes)
        if None in self._hashes:
            raise ValueError("None is no hash: combine_hashes gives it for an empty list")
        self._clock = clock
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._wanted = {identity_of(key): key for key in self._hashes}
        self._results: dict[Hashable, EmbeddingResult] = {}

    @property
    def missing(self) -> list[Hashable]:
        """The keys without a result, each once, in the order of their first mention."""
        return [key for known, key in self._wanted.items() if known not in self._results]

    @property
    def left_s(self) -> float | None:
        """How long it may still wait for others; None without a limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._clock())

    def has(self, key: Hashable, result: EmbeddingResult) -> None:
        """Note the result of a key."""
        self._results[identity_of(key)] = result

    @property
    def results(self) -> list[EmbeddingResult]:
        """One result for each hash that was given."""
        return [self._results[identity_of(key)] for key in self._hashes]


class Encoding:
    """Runs encoders for one cache.

    Args:
        tiers: The cache.
        counters: Where runs and waits are counted.
        clock: Monotonic seconds.

    Attributes:
        flights: The entries that are being made now.
    """

    def __init__(
        self, tiers: Tiers, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers = tiers
        self._counters = counters
        self._clock = clock
        self._time = EncodingTime()
        self._counting = threading.Lock()
        self.flights: SingleFlight[_Made] = SingleFlight()

    def get_or_encode(
        self, hashes: Sequence[Hashable], encode: Encode, timeout_s: float | None
    ) -> list[EmbeddingResult]:
        """See :meth:`tiered_mmcache.TieredMultimodalCache.get_or_encode`."""
        call = _Call(hashes, timeout_s, self._clock)
        self._take_hot(call)
        while call.missing:
            own, others = self._claim(call)
            with self.flights.leading(own):
                self._look_up(call, own)
                if own:
                    watch = self._start_run()
                    answer = encode([flight.key for flight in own])
                    self._end_run(call, own, watch, answer)
            while others:
                self._join(call, others.pop(0))
        return call.results

    async def aget_or_encode(
        self, hashes: Sequence[Hashable], encode: AsyncEncode, timeout_s: float | None
    ) -> list[EmbeddingResult]:
        """See :meth:`tiered_mmcache.TieredMultimodalCache.aget_or_encode`."""
        call = _Call(hashes, timeout_s, self._clock)
        self._take_hot(call)
        while call.missing:
            own, others = self._claim(call)
            with self.flights.leading(own):
                self._look_up(call, own)
                if own:
                    watch = self._start_run()
                    answer = await awaitable_answer(encode([flight.key for flight in own]))
                    self._end_run(call, own, watch, answer)
            while others:
                await self._ajoin(call, others.pop(0))
        return call.results

    def reset_after_fork(self) -> None:
        """In a forked child: nobody leads there, and nobody holds a lock."""
        self._counting = threading.Lock()
        self.flights.reset()

    def snapshot(self) -> dict[str, float]:
        """Encoder runs, what they took, and what was saved."""
        counters = self._counters
        with self._counting:
            return {
                "encoder_runs": counters.encoder_runs,
                "encoder_failures": counters.encoder_failures,
                "encoded_items": counters.encoded_items,
                "encode_seconds": self._time.seconds(),
                "saved_seconds": counters.saved_below_s + counters.saved_hot_s,
                "single_flight_waits": counters.single_flight_waits,
                "single_flight_timeouts": counters.single_flight_timeouts,
            }

    # The steps of a call

    def _take_hot(self, call: _Call) -> None:
        saved_s = 0.0
        for key in call.missing:
            result = self._tiers.find_hot(key)
            if result is not None:
                call.has(key, result)
                saved_s += self._tiers.hot_cost_s(key)
        with self._counting:
            self._counters.saved_hot_s += saved_s

    def _claim(self, call: _Call) -> tuple[list[Flight[_Made]], list[Flight[_Made]]]:
        alone = call.left_s == 0.0
        own, others = self.flights.claim(call.missing, alone=alone)
        with self._counting:
            self._counters.single_flight_waits += len(others)
        return own, others

    def _look_up(self, call: _Call, own: list[Flight[_Made]]) -> None:
        """Answer what the tiers hold; the flights that stay in the list are to be encoded."""
        for flight in list(own):
            result = self._tiers.find(flight.key)
            if result is not None:
                call.has(flight.key, result)
                self.flights.end(flight, answer=_Made.now(result))
                own.remove(flight)

    def _start_run(self) -> Stopwatch:
        with self._counting:
            self._counters.encoder_runs += 1
            self._counters.encoder_failures += 1  # until it has returned what it should
        return Stopwatch(self._clock)

    def _end_run(
        self, call: _Call, flights: list[Flight[_Made]], watch: Stopwatch, answer: object
    ) -> None:
        results = checked_answer(answer, len(flights))
        run = watch.stop(results)
        with self._counting:
            self._counters.encoder_failures -= 1
            self._counters.encoded_items += len(results)
            self._time.add(run)
        for flight, result, cost in zip(flights, results, divided(run, results), strict=True):
            kept = self._tiers.keep(flight.key, result, cost, _still_valid(flight))
            call.has(flight.key, kept)
            self.flights.end(flight, answer=_Made.now(kept))

    def _join(self, call: _Call, flight: Flight[_Made]) -> None:
        try:
            with self.flights.joining(flight, blocking=True):
                flight.wait(call.left_s)
            self._take(call, flight)
            if flight.error is not None:
                raise flight.error
        finally:
            del flight  # the error's traceback holds this frame: no circle, or its tensors stay

    async def _ajoin(self, call: _Call, flight: Flight[_Made]) -> None:
        try:
            with self.flights.joining(flight, blocking=False):
                await flight.wait_async(call.left_s)
            self._take(call, flight)
            if flight.error is not None:
                raise flight.error
        finally:
            del flight  # as above

    def _take(self, call: _Call, flight: Flight[_Made]) -> None:
        """Note what another's flight has come to; without an answer the call goes on."""
        if flight.answer is not None:
            call.has(flight.key, flight.answer.here())
        elif not flight.ended.done():
            with self._counting:
                self._counters.single_flight_timeouts += 1


def _still_valid(flight: Flight[_Made]) -> Callable[[], bool]:
    return lambda: not flight.voided


def awaitable_answer(
    answer: Awaitable[Sequence[EmbeddingResult]],
) -> Awaitable[Sequence[EmbeddingResult]]:
    """What an asynchronous encoder returned, if it can be awaited.

    Raises:
        TypeError: It cannot.
    """
    if not inspect.isawaitable(answer):
        raise TypeError(
            "encode has to be awaitable, such as an async function; for one that blocks, "
            "await asyncio.to_thread(encode, hashes) inside"
        )
    return answer


def checked_answer(answer: object, count: int) -> Sequence[EmbeddingResult]:
    """What an encoder returned, if it can be believed.

    Raises:
        TypeError: It is no sequence of results.
        ValueError: It has not one result for each hash.
    """
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("encode is an async function: await aget_or_encode instead")
    if not isinstance(answer, Sequence):
        raise TypeError(f"encode has to return a list of results, not {type(answer).__name__}")
    for result in answer:
        if not isinstance(result, EmbeddingResult):
            raise TypeError(f"encode has to return EmbeddingResults, not {type(result).__name__}")
        if not isinstance(result.embedding, torch.Tensor):
            raise TypeError(
                f"an embedding has to be a tensor, not {type(result.embedding).__name__}"
            )
    if len(answer) != count:
        raise ValueError(f"encode returned {len(answer)} results for {count} hashes")
    return answer
