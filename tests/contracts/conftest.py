"""Every cache that has to keep the contract, made the same way and audited after each test.

"ranks" are two, in threads, which make each call together and are compared after it.

Owns: how the caches are made, and the audit. Does not own: what they must do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_mmcache import (
    CacheConfig,
    MultiModalStaticCache,
    TensorParallelMultimodalCache,
    TieredMultimodalCache,
)
from tiered_mmcache.config import DiskConfig, HostConfig
from tiered_mmcache.testing import audit, audit_idle
from tiered_mmcache.testing.ranks import UnisonCache, gloo_groups

HOT_ONLY = ["static", "tiered", "ranks"]
WITH_LOWER_TIERS = ["host", "host-disk", "disk", "one-rank-host", "ranks-host", "ranks-disk"]

MakeCache = Callable[..., MultiModalStaticCache]


def _config(kind: str, folder: Path) -> CacheConfig:
    host = HostConfig(max_size="1MiB") if "host" in kind else None
    disk = None
    if "disk" in kind:
        disk = DiskConfig(path=folder / "store", max_size="16MiB", write_buffer="1MiB")
    return CacheConfig(namespace="contract", host=host, disk=disk)


def _build(kind: str, max_size: int, folder: Path) -> MultiModalStaticCache:
    if kind == "static":
        return MultiModalStaticCache(max_size)
    if kind == "tiered":
        return TieredMultimodalCache(max_size)
    if kind == "ranks":
        return UnisonCache(max_size)
    if "ranks" in kind:
        return UnisonCache(max_size, config=_config(kind, folder))
    if "one-rank" in kind:
        (group,) = gloo_groups(1)
        config = _config(kind, folder)
        return TensorParallelMultimodalCache(max_size, group=group, config=config)
    return TieredMultimodalCache(max_size, config=_config(kind, folder))


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch):
    """The environment of whoever runs the tests must not add tiers."""
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)


def _maker(kind: str, folder: Path) -> Iterator[MakeCache]:
    made: list[MultiModalStaticCache] = []

    def make(max_size: int) -> MultiModalStaticCache:
        made.append(_build(kind, max_size, folder))
        return made[-1]

    yield make
    for cache in made:
        audit(cache)
        if isinstance(cache, TieredMultimodalCache):
            assert cache.drain()
            audit_idle(cache)
            cache.close()


@pytest.fixture(params=[*HOT_ONLY, *WITH_LOWER_TIERS])
def make(request, tmp_path):
    """Makes a cache of ``max_size`` bytes; every kind of cache in turn."""
    yield from _maker(request.param, tmp_path)


@pytest.fixture(params=HOT_ONLY)
def make_hot_only(request, tmp_path):
    """Makes a cache where an evicted entry is gone: sentences that lower tiers make untrue."""
    yield from _maker(request.param, tmp_path)


@pytest.fixture(params=WITH_LOWER_TIERS)
def make_tiered(request, tmp_path):
    """Makes a cache that keeps what the hot tier evicts."""
    yield from _maker(request.param, tmp_path)
