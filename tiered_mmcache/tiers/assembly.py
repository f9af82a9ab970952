"""Putting a cache together from its configuration.

Owns: which parts there are for which configuration, and how large.
Does not own: what they do.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path

from tiered_mmcache.config import (
    AUTO_NAMESPACE,
    CacheConfig,
    Durability,
    PageLocked,
    load_config,
)
from tiered_mmcache.configuration.rules import NAMESPACE_REMEDY
from tiered_mmcache.disk.client import SpillClient, StoreSettings
from tiered_mmcache.errors import ConfigError
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.page_locking import page_locker_for
from tiered_mmcache.host.tier import HostTier
from tiered_mmcache.host.transfer import CopyEngine, DeviceCopyEngine
from tiered_mmcache.metrics.counters import Counters, FaultLog, HasStats
from tiered_mmcache.metrics.file import MetricsFile
from tiered_mmcache.metrics.openmetrics import openmetrics_text
from tiered_mmcache.tiers.lower_tiers import LowerTiers
from tiered_mmcache.tracing.recorder import TraceRecorder

CONFIG_VARIABLE = "TIERED_MMCACHE_CONFIG"
_MOST_IDLE_BUFFER_BYTES = 256 * 1024 * 1024


def config_or_environment(config: CacheConfig | None) -> CacheConfig | None:
    """The configuration given, else the one that the environment names, else none.

    Raises:
        ConfigError: The file that the environment names cannot be used.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if config is None and path:
        return load_config(Path(path))
    return config


def hot_size(max_size: int | None, config: CacheConfig | None) -> int:
    """The bytes of the hot tier.

    Raises:
        ConfigError: Neither the argument nor the configuration says.
    """
    if max_size is not None:
        return max_size
    if config is not None and config.hot.max_size is not None:
        return config.hot.max_size
    raise ConfigError(
        file=None,
        key="hot.max_size",
        value=None,
        problem="the hot tier has no size",
        remedy="Write hot.max_size, such as 4GiB, or pass max_size.",
    )


def metrics_file_for(
    config: CacheConfig | None, cache: HasStats, faults: FaultLog
) -> MetricsFile | None:
    """The file of a cache's metrics, or None when the configuration names none."""
    if config is None or config.metrics is None:
        return None
    alive = weakref.ref(cache)

    def text() -> bytes:
        held = alive()
        return b"" if held is None else openmetrics_text(held)

    return MetricsFile(config.metrics.folder, config.metrics.interval_s, text, faults.report)


def trace_recorder_for(config: CacheConfig | None, faults: FaultLog) -> TraceRecorder | None:
    """Where a cache's requests are recorded, or None when the configuration asks for no trace."""
    if config is None or config.trace is None:
        return None
    trace = config.trace
    salt = None if trace.salt is None else hashlib.blake2b(trace.salt.encode()).digest()
    return TraceRecorder(trace.folder, trace.max_size, salt, faults.report)


def build_lower_tiers(
    config: CacheConfig | None,
    hot_bytes: int,
    engine: CopyEngine | None,
    make_client: Callable[[StoreSettings, int], SpillClient],
    counters: Counters,
    cost_of: Callable[[Hashable], float],
    may_reach_disk: Callable[[Hashable], bool],
    clock: Callable[[], float] = time.monotonic,
) -> LowerTiers | None:
    """The tiers below the hot one, or None when the configuration has none.

    Raises:
        ConfigError: The namespace was left to an engine's plug-in, which did not derive it.
    """
    if config is None or (config.host is None and config.disk is None):
        return None
    _refuse_underived_namespace(config)
    host_bytes = 0 if config.host is None else config.host.max_size
    buffer_bytes = 0 if config.disk is None else config.disk.write_buffer
    arena = _arena(config, rounded(host_bytes) + rounded(buffer_bytes))
    client = None
    if config.disk is not None:
        settings = _store_settings(config, max(host_bytes, buffer_bytes))
        client = make_client(settings, arena.fd)
    return LowerTiers(
        host=HostTier(budget_bytes=host_bytes, buffer_bytes=buffer_bytes, clock=clock),
        arena=arena,
        engine=DeviceCopyEngine() if engine is None else engine,
        client=client,
        config=config,
        counters=counters,
        cost_of=cost_of,
        may_reach_disk=may_reach_disk,
        idle_buffer_bytes=min(hot_bytes // 4, _MOST_IDLE_BUFFER_BYTES),
        clock=clock,
    )


def _refuse_underived_namespace(config: CacheConfig) -> None:
    if config.disk is not None and config.namespace == AUTO_NAMESPACE:
        raise ConfigError(
            file=None,
            key="namespace",
            value=config.namespace,
            problem="only an engine's plug-in can derive it",
            remedy=NAMESPACE_REMEDY,
        )


def _arena(config: CacheConfig, capacity_bytes: int) -> Arena:
    setting = PageLocked.AUTO if config.host is None else config.host.page_locked
    return Arena(
        capacity_bytes,
        make_locker=functools.partial(page_locker_for, setting),
        huge_pages=config.host is not None and config.host.huge_pages,
    )


def _store_settings(config: CacheConfig, largest_entry_bytes: int) -> StoreSettings:
    assert config.disk is not None
    return StoreSettings(
        path=str(config.disk.path),
        budget_bytes=config.disk.max_size,
        largest_entry_bytes=largest_entry_bytes,
        synchronous=config.disk.durability is Durability.ORDERED,
        namespace=config.namespace or "",
        allow_network=config.disk.allow_network_file_system,
        keep_quarantined=config.disk.keep_quarantined,
    )
