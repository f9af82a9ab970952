"""Ranks as threads of one process, for the tests of this package and of engines that use it.

Owns: groups without torch's own registry of them, and :class:`UnisonCache`, which makes every
call on all ranks and compares what they answer and hold.
Does not own: anything that runs in a server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tiered_mmcache.config import CacheConfig
from tiered_mmcache.contract import EmbeddingResult, Tier
from tiered_mmcache.host.transfer import CopyEngine
from tiered_mmcache.ranks.gloo import gloo_group
from tiered_mmcache.ranks.tensor_parallel import TensorParallelMultimodalCache
from tiered_mmcache.testing.fakes import audit

_CPU = torch.device("cpu")
_Answer = TypeVar("_Answer")


def on_all_ranks(size: int, call: Callable[[int], _Answer]) -> list[Future[_Answer]]:
    """Call a function with each rank, on a thread for each, and await the end of all."""
    with ThreadPoolExecutor(size) as threads:
        return [threads.submit(call, rank) for rank in range(size)]


def gloo_groups(
    size: int, timeout_s: float = 60.0, *, device: torch.device = _CPU
) -> list[dist.ProcessGroup]:
    """A gloo group within this process: each rank's end of it.

    Args:
        size: The number of ranks.
        timeout_s: The group's time limit.
        device: A kind of device whose tensors it carries beside those of the CPU.
    """
    store = HashStore()
    joining = on_all_ranks(size, lambda rank: gloo_group(store, rank, size, timeout_s, device))
    return [future.result() for future in joining]


class UnisonCache(TensorParallelMultimodalCache):
    """The leader of a group whose other ranks live in threads and follow each call.

    After each call, answers, contents and recency of all ranks are compared.

    Args:
        max_size: Bytes of each hot tier.
        size: The number of ranks.
        config: The tiers.
        engine: The leader's copies between the device and host memory. A promotion whose copy
            ends on command ends before its bytes are sent or compared, as on a stream.

    Attributes:
        followers: The caches of the other ranks.

    Raises:
        AssertionError: From any call: the ranks disagree.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        size: int = 2,
        config: CacheConfig | None = None,
        engine: CopyEngine | None = None,
    ) -> None:
        groups = gloo_groups(size)
        self._following = True  # nothing is to be followed while the caches are built
        self._threads = ThreadPoolExecutor(size)
        building = [
            self._threads.submit(
                TensorParallelMultimodalCache, max_size, group=group, config=config
            )
            for group in groups[1:]
        ]
        super().__init__(max_size, group=groups[0], config=config, engine=engine)
        self.followers = [future.result() for future in building]
        self._synchronize: Callable[[], None] = getattr(engine, "synchronize", lambda: None)
        if self._exchange is not None:
            self._exchange.share = self._in_stream_order(  # type: ignore[method-assign, assignment]
                self._exchange.share
            )
        self._following = False

    def get(
        self, mm_hashes: Sequence[Hashable], combined_hash: int | None = None
    ) -> EmbeddingResult | None:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("get", super().get, mm_hashes, combined_hash)

    def get_single(self, mm_hash: Hashable) -> EmbeddingResult | None:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("get_single", super().get_single, mm_hash)

    def set(
        self, mm_hash: Hashable, embedding: EmbeddingResult, *rest: object, **named: object
    ) -> bool:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("set", super().set, mm_hash, embedding, *rest, **named)

    def has(self, mm_hash: Hashable) -> bool:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("has", super().has, mm_hash)

    def locate(self, mm_hash: Hashable) -> Tier | None:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("locate", super().locate, mm_hash)

    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("free", super().free, mm_hash, mm_embedding_allocator)

    def clear(self, version: str | None = None) -> None:
        """See :class:`TensorParallelMultimodalCache`."""
        self._in_unison("clear", super().clear, version)

    def get_many(self, mm_hashes: Sequence[Hashable]) -> list[EmbeddingResult | None]:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("get_many", super().get_many, mm_hashes)

    def prefetch(self, mm_hashes: Sequence[Hashable]) -> int:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("prefetch", super().prefetch, mm_hashes)

    def get_or_encode(self, *arguments: Any, **named: Any) -> list[EmbeddingResult]:
        """See :class:`TensorParallelMultimodalCache`."""
        return self._in_unison("get_or_encode", super().get_or_encode, *arguments, **named)

    def close(self, timeout_s: float | None = None) -> None:
        """See :class:`TensorParallelMultimodalCache`."""
        self._in_unison("close", super().close, timeout_s)
        self._threads.shutdown()

    def _in_unison(
        self, name: str, own: Callable[..., _Answer], *arguments: Any, **named: Any
    ) -> _Answer:
        if self._following:  # one call of the cache made by another
            return own(*arguments, **named)
        self._following = True
        try:
            others = [
                self._threads.submit(getattr(cache, name), *arguments, **named)
                for cache in self.followers
            ]
            try:
                answer = own(*arguments, **named)
            except BaseException as error:
                _compare_errors(error, [other.exception() for other in others])
                raise
            results = [other.result() for other in others]
            self._synchronize()
            for result in results:
                _compare(name, answer, result)
            self._compare_hot_tiers()
        finally:
            self._following = False
        return answer

    def _in_stream_order(
        self, share: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        def share_when_there(payload: torch.Tensor) -> None:
            self._synchronize()
            share(payload)

        return share_when_there

    def _compare_hot_tiers(self) -> None:
        for cache in self.followers:
            audit(cache)
            # By the base class's methods: a test may have put a dictionary here that counts walks.
            mine, theirs = (OrderedDict.items(held.mm_cache) for held in (self, cache))
            for (key, result), (their_key, their_result) in zip(mine, theirs, strict=True):
                assert key == their_key, f"{key!r}, {their_key!r}"
                _compare("the hot tier", result, their_result)


def _compare_errors(mine: BaseException, theirs: list[BaseException | None]) -> None:
    for error in theirs:
        assert type(error) is type(mine), f"{mine!r}, {error!r}"


def _compare(what: str, mine: object, theirs: object) -> None:
    """Whether two ranks' answers are equal, tensors bit for bit."""
    if isinstance(mine, list) and isinstance(theirs, list):
        assert len(mine) == len(theirs), what
        for one, other in zip(mine, theirs, strict=True):
            _compare(what, one, other)
    elif isinstance(mine, EmbeddingResult):
        assert type(mine) is type(theirs), f"{what}: {mine!r}, {theirs!r}"
        for name, value in vars(mine).items():
            _compare_values(f"{what}: {name}", value, getattr(theirs, name))
    else:
        assert mine == theirs, f"{what}: {mine!r}, {theirs!r}"


def _compare_values(what: str, mine: object, theirs: object) -> None:
    if not isinstance(mine, torch.Tensor):
        assert mine == theirs, f"{what}: {mine!r}, {theirs!r}"
        return
    assert isinstance(theirs, torch.Tensor), what
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), what
    if mine is not theirs:
        bits = [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, theirs)
        ]
        assert torch.equal(*bits), what
