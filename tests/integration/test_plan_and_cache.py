"""A plan says what the real cache does with the same requests.

Owns: the comparison, at every size that a plan tries. Does not own: the distances and the rules
themselves (tests/unit/test_stack_distances.py).
"""

import csv
import random

import pytest
import torch

from mmcache_tools.sizing.planning import PlanOptions, make_plan
from mmcache_tools.sizing.traces import Trace
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

REQUESTS = 600


def _popular(chance):
    """Some keys much more often than others."""
    keys = range(120)
    return chance.choices(keys, weights=[1 / (key + 1) for key in keys], k=REQUESTS)


def _conversations(chance):
    """A key is asked for a few times in short order, and hardly ever again."""
    return [max(0, number // 6 - chance.choice([0, 0, 1, 2, 5, 30])) for number in range(REQUESTS)]


def _scans(chance):
    """Popular keys, and passes over all others that push them out."""
    return [
        chance.randrange(12) if chance.random() < 0.5 else 12 + number % 90
        for number in range(REQUESTS)
    ]


# Of one size, of several with whole pages and chunks among them, and with a few that are larger
# than the smaller tiers.
SIZES = {
    "equal": lambda chance: 20_000,
    "mixed": lambda chance: chance.choice([1_000, 4_096, 9_000, 30_000, 30_001]),
    "large": lambda chance: 400_000 if chance.random() < 0.06 else chance.randrange(2_000, 30_000),
}
WORKLOADS = {"popular": _popular, "conversations": _conversations, "scans": _scans}
HOT_BYTES = 192 * 1024


def _trace(folder, workload, sizes):
    chance = random.Random(f"{workload} {sizes}")
    keys = WORKLOADS[workload](chance)
    size_of = {key: SIZES[sizes](chance) for key in range(max(keys) + 1)}
    path = folder / "trace.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "key", "bytes"])
        writer.writerows([number, key, size_of[key]] for number, key in enumerate(keys))
    return path, keys, size_of


def _played(folder, keys, size_of, sizes):
    """The share of requests that each tier of the real cache answers."""
    mapping = {"namespace": "plan", "hot": {"max_size": sizes.hot}}
    if sizes.host:
        mapping["host"] = {"max_size": sizes.host, "prefetch": 0}
    if sizes.disk:
        mapping["disk"] = {
            "path": str(folder / f"store-{sizes.host}-{sizes.disk}"),
            "max_size": sizes.disk,
            "write_buffer": "64MiB",
            "durability": "relaxed",
            "close_timeout": 0,
        }
    with TieredMultimodalCache(config=CacheConfig.from_mapping(mapping)) as cache:
        for key in keys:
            hits = cache._hot_hits
            if cache.get_single(key) is None:
                embedding = torch.zeros(size_of[key], dtype=torch.uint8)
                cache.set(key, EmbeddingResult(embedding=embedding))
            if cache._hot_hits == hits:  # let what was evicted arrive, as time does
                assert cache.drain()
        stats = cache.stats()
    assert not stats.faults
    return [tier["hits"] / len(keys) for tier in (stats.hot, stats.host, stats.disk)]


@pytest.mark.parametrize(
    ("workload", "sizes"),
    [
        ("popular", "equal"),
        ("popular", "large"),
        ("conversations", "mixed"),
        ("scans", "mixed"),
        ("scans", "large"),
    ],
)
def test_plan_and_cache_agree_at_every_size(workload, sizes, tmp_path):
    path, keys, size_of = _trace(tmp_path, workload, sizes)
    options = PlanOptions(
        trace=path,
        hot=str(HOT_BYTES),
        memory=str(3 * HOT_BYTES),
        disk="3MiB",
        store=tmp_path,
        sample=32_768,
    )
    plan = make_plan(Trace(path), options)
    assert len(plan.hot) >= 8
    assert len(plan.host) >= 3
    assert len(plan.disk) >= 3
    for point in [*plan.hot, *plan.host, *plan.disk]:
        hot, host, disk = _played(tmp_path, keys, size_of, point.sizes)
        assert point.hot == pytest.approx(hot), point
        assert point.host == pytest.approx(host, abs=0.01), point
        assert point.disk == pytest.approx(disk, abs=0.01), point
        assert point.hit_ratio == pytest.approx(hot + host + disk, abs=0.01), point
