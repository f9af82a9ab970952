"""The situations that docs/operations.md works through, each brought about and read off.

Owns: that the exported numbers tell these situations apart. Does not own: the numbers of other
situations (tests/unit/test_metric_reasons.py).
"""

import os
import signal

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.disk.layout import DATA_FILE
from tiered_mmcache.metrics.families import FAMILIES

SIZE = 20_000
HOT = 2
REQUESTS = 12


def config(folder, *, namespace="model@main/bf16", host=64, **disk):
    return CacheConfig.from_mapping(
        {
            "namespace": namespace,
            "hot": {"max_size": HOT * SIZE},
            "host": {"max_size": host * 4096},
            "disk": {
                "path": str(folder / "store"),
                "max_size": "16MiB",
                "write_buffer": "4MiB",
                "read_timeout": "30s",
                **disk,
            },
        }
    )


def result(number):
    payload = torch.arange(SIZE // 4, dtype=torch.int32) * 7 + number * 1_000_003
    return EmbeddingResult(embedding=payload)


def serve(cache, numbers):
    """Look each up, and set what is missing, as an engine does."""
    for number in numbers:
        if cache.get_single(number) is None:
            cache.set(number, result(number))


def exported(cache, name):
    (family,) = [family for family in FAMILIES if family.name == name]
    return {label: value for label, value in family.values(cache.stats()).items() if value}


def test_cold_start(tmp_path):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        serve(cache, range(REQUESTS))
        assert exported(cache, "mmcache_misses") == {"never_seen": REQUESTS}
        assert exported(cache, "mmcache_faults") == {}
        serve(cache, range(REQUESTS))
        assert exported(cache, "mmcache_misses") == {"never_seen": REQUESTS}  # no more of them
        assert sum(exported(cache, "mmcache_hits").values()) == REQUESTS


def test_host_too_small(tmp_path):
    without_disk = CacheConfig.from_mapping(
        {"hot": {"max_size": HOT * SIZE}, "host": {"max_size": 2 * 5 * 4096}}
    )
    with TieredMultimodalCache(config=without_disk) as cache:
        for _ in range(3):
            serve(cache, range(REQUESTS))
        misses = exported(cache, "mmcache_misses")
        assert misses == {"never_seen": REQUESTS, "evicted": 2 * REQUESTS}
        assert set(exported(cache, "mmcache_drops")) == {"no_disk_tier"}
        used, budget = (
            exported(cache, "mmcache_used_bytes"),
            exported(cache, "mmcache_budget_bytes"),
        )
        assert used["host"] == budget["host"]


def test_disk_too_slow(tmp_path):
    slow = config(tmp_path, host=5, write_buffer="64KiB", read_timeout="50ms")
    with TieredMultimodalCache(config=slow) as cache:
        worker = cache._below.disk.client.pid
        os.kill(worker, signal.SIGSTOP)
        try:
            for number in range(REQUESTS):
                cache.set(number, result(number))
            assert cache.get_single("not in memory") is None
            assert cache.get_single("nor this") is None
        finally:
            os.kill(worker, signal.SIGCONT)
        misses = exported(cache, "mmcache_misses")
        assert misses == {"read_timeout": 1, "disk_down": 1}
        assert exported(cache, "mmcache_drops")["write_buffer_full"] > 0
        assert exported(cache, "mmcache_faults") == {"read_timeout": 1}
        cache.drain()


def test_corrupt_store(tmp_path):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        serve(cache, range(REQUESTS))
    damage(tmp_path / "store" / DATA_FILE, result(3).embedding)
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        serve(cache, range(REQUESTS))
        assert exported(cache, "mmcache_misses") == {"disk_fault": 1}
        assert exported(cache, "mmcache_faults") == {"digest": 1}
        assert exported(cache, "mmcache_hits") == {"disk": REQUESTS - 1}


def damage(file, embedding):
    data = bytearray(file.read_bytes())
    at = data.index(embedding.numpy().tobytes()[:64])
    data[at] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("namespace", ["model@main/bf16", "model@other/bf16"])
def test_wrong_namespace(tmp_path, namespace):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        serve(cache, range(REQUESTS))
    with TieredMultimodalCache(config=config(tmp_path, namespace=namespace)) as cache:
        assert exported(cache, "mmcache_entries")["disk"] == REQUESTS
        serve(cache, range(REQUESTS))
        right = namespace == "model@main/bf16"
        assert exported(cache, "mmcache_misses") == ({} if right else {"never_seen": REQUESTS})
        assert exported(cache, "mmcache_hits") == ({"disk": REQUESTS} if right else {})


def test_the_next_server_says_how_old_the_coldest_entry_on_disk_is(tmp_path):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        assert "disk" not in exported(cache, "mmcache_coldest_age_seconds")
        serve(cache, range(REQUESTS))
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        assert exported(cache, "mmcache_coldest_age_seconds")["disk"] > 0
    with TieredMultimodalCache(config=config(tmp_path, namespace="another")) as cache:
        assert "disk" not in exported(cache, "mmcache_coldest_age_seconds")
