"""The tiered cache of one rank of a group that is known when the cache is made.

Owns: that all ranks are built, and alike, or none.
Does not own: what they do together afterwards (:mod:`.agreement`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from tiered_mmcache.config import CacheConfig, load_config
from tiered_mmcache.disk.client import SpillClient, StoreSettings
from tiered_mmcache.errors import GroupError, PeerFailedError
from tiered_mmcache.host.transfer import CopyEngine
from tiered_mmcache.ranks.agreement import RankMultimodalCache
from tiered_mmcache.ranks.exchange import NO_KEY, Kind, RankExchange, Step
from tiered_mmcache.tiers.assembly import config_or_environment


class TensorParallelMultimodalCache(RankMultimodalCache):
    """The tiered cache of one rank of a group: all ranks see the same hits and misses.

    All ranks construct it, and make all calls but those named below, with equal arguments, in
    the same order, one at a time. Then answers are equal on all ranks, and so is what the hot
    tiers hold. Nothing is sent on a hot hit; a hot miss costs one small collective, a hit below
    three and the broadcast of the tensor. An embedding that comes from below has the leader's
    bits on every rank.

    ``stats``, ``drain``, ``close``, ``len`` and the attributes concern this rank alone and need no
    other. ``clear`` sends nothing, but has to be called on all ranks.

    In a group, only keys and classes that can be told to another process are kept below the hot
    tier: integers, strings, bytes, tuples and combinations of these, and registered classes.

    With a group of one rank this is :class:`TieredMultimodalCache`, and nothing is ever sent. In a
    forked child, which is no rank, it is the hot tier alone.

    Args:
        max_size: As for :class:`TieredMultimodalCache`; the same on all ranks.
        group: The ranks that make the same calls, such as those of one tensor-parallel scheduler.
            Carries messages and CPU tensors, as a gloo group does. Its time limit is what ends
            the wait for a rank that does not come: make it longer than 10 s, and several times
            ``disk.read_timeout``.
        device_group: Carries device tensors among the same ranks, as an NCCL group does;
            ``group`` when None.
        config: The tiers. Ranks other than 0 leave ``host`` and ``disk`` out. ``hot.device`` has to
            be ``auto`` where each rank has a device of its own.
        engine: Copies between the device and host memory; for tests.
        make_client: Makes the handle on the spill worker; for tests.

    Raises:
        ConfigError: As for :class:`TieredMultimodalCache`, on the rank where it happens.
        PeerFailedError: Another rank could not be built.
        GroupOutOfStepError: The ranks were given different sizes or namespaces.
        GroupLostError: A rank did not come within the group's limit.
        TypeError: ``group`` is no group that this process is in.
        ValueError: ``group`` does not carry CPU tensors, or ``device_group`` is another group.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        group: dist.ProcessGroup,
        device_group: dist.ProcessGroup | None = None,
        config: CacheConfig | None = None,
        engine: CopyEngine | None = None,
        make_client: Callable[[StoreSettings, int], SpillClient] = SpillClient,
    ) -> None:
        exchange = RankExchange(group, device_group)
        problem: Exception | None = None
        try:
            config = config_or_environment(config)
            own = config if exchange.leads else _without_lower_tiers(config)
            super().__init__(max_size, config=own, engine=engine, make_client=make_client)
        except Exception as error:  # noqa: BLE001 - told to all ranks, then raised
            problem = error
        if exchange.size > 1:
            self._join(exchange, problem)
        elif problem is not None:
            raise problem

    @classmethod
    def from_yaml(  # type: ignore[override]  # a rank needs its group
        cls,
        path: str | os.PathLike[str],
        max_size: int | None = None,
        *,
        group: dist.ProcessGroup,
        device_group: dist.ProcessGroup | None = None,
    ) -> TensorParallelMultimodalCache:
        """One rank's cache, as a YAML file describes it.

        Raises:
            ConfigError: The file cannot be used.
        """
        config = load_config(Path(path))
        return cls(max_size, group=group, device_group=device_group, config=config)

    def _join(self, exchange: RankExchange, problem: Exception | None) -> None:
        """Learn whether all ranks were built, and alike."""
        step = Step(kind=Kind.JOIN, key=NO_KEY, state=0, hot_hits=0)
        if problem is not None:
            with contextlib.suppress(GroupError):  # the reason is the problem
                exchange.meet(step, ok=False)
            raise problem
        try:
            failed = exchange.meet(step).failed
            if failed:
                raise PeerFailedError(failed, "constructing the cache")
            self._enter_group(exchange)
        except BaseException:
            self.close(0.0)
            raise


def _without_lower_tiers(config: CacheConfig | None) -> CacheConfig | None:
    """What a rank that does not lead builds."""
    return None if config is None else config.model_copy(update={"host": None, "disk": None})
