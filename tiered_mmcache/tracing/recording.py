"""What is recorded of a cache's calls: the look-ups, their outcomes, and what is set after a miss.

Owns: which call is a request, and what is told of it. Does not own: the file (:mod:`.recorder`).

The cache's own methods are shadowed, on that one object and only while it is traced: without a
trace a hot hit costs what it did. Nothing that goes wrong here reaches the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tiered_mmcache.encoding.encoder_time import Cost, HotCosts
from tiered_mmcache.metrics.counters import Counters
from tiered_mmcache.tracing.format import Outcome
from tiered_mmcache.tracing.recorder import TraceRecorder

__all__ = ["Recording"]

_SHADOWED = ("get_single", "_find_hot", "_set")
_BELOW = {"host": Outcome.HOST, "disk": Outcome.DISK}


class Recording:
    """Records one cache, from its construction on until :meth:`end`.

    Args:
        cache: The cache.
        recorder: Where records go; closed by :meth:`end`.
        counters: The cache's, which say where a look-up ended.
        costs: The cache's, which say what hot entries cost.
    """

    def __init__(
        self, cache: Any, recorder: TraceRecorder, counters: Counters, costs: HotCosts
    ) -> None:
        self.recorder = recorder
        self._cache = cache
        self._counters = counters
        self._costs = costs
        shadows: tuple[Callable[[Any], Any], ...] = (self._get_single, self._find_hot, self._set)
        for name, shadow in zip(_SHADOWED, shadows, strict=True):
            vars(cache)[name] = shadow(getattr(cache, name))

    def end(self, *, abandon: bool = False) -> None:
        """Take the shadows away and close the trace, or leave it to the parent process."""
        for name in _SHADOWED:
            vars(self._cache).pop(name, None)
        if abandon:
            self.recorder.abandon()
        else:
            self.recorder.close()

    def _get_single(self, get_single: Callable[[Hashable], Any]) -> Callable[[Hashable], Any]:
        hot, recorder, note = self._cache.mm_cache, self.recorder, self._note_hit

        def recorded_get_single(mm_hash: Hashable) -> Any:
            was_hot = mm_hash in hot
            result = get_single(mm_hash)
            if recorder.ended:
                return result
            if result is None:
                recorder.missed(mm_hash)
            else:
                note(mm_hash, result, was_hot=was_hot)
            return result

        return recorded_get_single

    def _find_hot(self, find_hot: Callable[[Hashable], Any]) -> Callable[[Hashable], Any]:
        def recorded_find_hot(mm_hash: Hashable) -> Any:
            result = find_hot(mm_hash)
            if result is not None and not self.recorder.ended:
                self._note_hit(mm_hash, result, was_hot=True)
            return result  # a miss is recorded when the tiers below are asked

        return recorded_find_hot

    def _set(self, set_entry: Callable[..., bool]) -> Callable[..., bool]:
        def recorded_set(mm_hash: Hashable, embedding: Any, cost: Cost) -> bool:
            admitted = set_entry(mm_hash, embedding, cost)
            if not self.recorder.ended:
                try:
                    size_bytes, tokens = _measured(embedding)
                    self.recorder.was_set(
                        mm_hash, size_bytes, tokens, cost.seconds, admitted=admitted
                    )
                except Exception as error:  # noqa: BLE001 - it must not reach the engine
                    self.recorder.end(repr(error))
            return admitted

        return recorded_set

    def _note_hit(self, mm_hash: Hashable, result: Any, *, was_hot: bool) -> None:
        try:
            outcome = Outcome.HOT if was_hot else _BELOW.get(self._counters.look_up, Outcome.HOT)
            size_bytes, tokens = _measured(result)
            self.recorder.hit(mm_hash, outcome, size_bytes, tokens, self._costs.seconds(mm_hash))
        except Exception as error:  # noqa: BLE001 - it must not reach the engine
            self.recorder.end(repr(error))


def _measured(result: Any) -> tuple[int, int]:
    """Bytes and rows of a result, or of the bare tensor that some engines are given."""
    embedding = getattr(result, "embedding", result)
    shape = embedding.shape
    return embedding.element_size() * embedding.numel(), shape[0] if len(shape) > 1 else 0
