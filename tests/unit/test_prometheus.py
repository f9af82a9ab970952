"""The export to Prometheus: names, types, labels, and what a scraper reads.

Owns: the exposition of several caches, checked with Prometheus's own parser. Does not own: what
is counted (test_metric_reasons.py).
"""

import dataclasses
import re

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.metrics.families import FAMILIES, Kind
from tiered_mmcache.metrics.openmetrics import openmetrics_text
from tiered_mmcache.prometheus import CacheCollector

SIZE = 1000


@pytest.fixture
def caches(tmp_path, fake_client):
    config = CacheConfig.from_mapping(
        {
            "namespace": "unit/prometheus",
            "hot": {"max_size": 2 * SIZE},
            "host": {"max_size": "64KiB"},
            "disk": {
                "path": str(tmp_path / "store"),
                "max_size": "1MiB",
                "write_buffer": "64KiB",
            },
        }
    )
    tiered = TieredMultimodalCache(config=config, make_client=fake_client)
    alone = TieredMultimodalCache(SIZE)
    yield tiered, alone
    tiered.close()


def fill(cache, count):
    for number in range(count):
        cache.set(number, EmbeddingResult(embedding=torch.ones(SIZE, dtype=torch.uint8)))


def test_a_scraper_reads_what_stats_say(caches):
    tiered, alone = caches
    fill(tiered, 4)
    for key in (0, 3, 99):
        tiered.get_single(key)
    alone.get_single(5)
    registry = CollectorRegistry()
    registry.register(CacheCollector(tiered, alone))

    def value(name, cache="0", namespace="unit/prometheus", **labels):
        return registry.get_sample_value(name, {"namespace": namespace, "cache": cache, **labels})

    assert value("mmcache_hits_total", tier="hot") == 1
    assert value("mmcache_hits_total", tier="host") == 1
    assert value("mmcache_misses_total", reason="never_seen") == 1
    assert value("mmcache_misses_total", reason="read_timeout") == 0
    assert value("mmcache_misses_total", "1", "", reason="never_seen") == 1
    assert value("mmcache_look_up_seconds_count", outcome="host") == 1
    assert value("mmcache_look_up_seconds_bucket", outcome="miss", le="+Inf") == 1
    assert value("mmcache_demotions_total") == tiered.stats().host["demotions"]
    assert value("mmcache_demotions_total", "1", "") is None  # it has no tier below
    tiered.get_single(3)
    assert value("mmcache_hits_total", tier="hot") == 2  # no second copy of the numbers


def test_every_metric_is_in_the_text_under_its_type(caches):
    fill(caches[0], 4)
    caches[0]._faults.report("digest", "as told")
    text = openmetrics_text(*caches).decode()
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(parsed) == {family.name for family in FAMILIES}
    for family in FAMILIES:
        assert parsed[family.name].type == family.kind.value
        assert parsed[family.name].documentation == family.meaning
        assert parsed[family.name].samples, family.name


def test_the_text_is_that_of_prometheus_client(caches):
    fill(caches[0], 4)
    for key in (0, 3, 99):
        caches[0].get_single(key)
    odd = dataclasses.replace(caches[0].stats(), namespace='a "quoted" \\\\ name\nof two lines')
    snapshots = [Snapshot(odd), Snapshot(caches[1].stats())]
    registry = CollectorRegistry()
    registry.register(CacheCollector(*snapshots))
    theirs = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert list(text_string_to_metric_families(openmetrics_text(*snapshots).decode())) == theirs


class Snapshot:
    def __init__(self, stats):
        self.held = stats

    def stats(self):
        return self.held


def test_no_two_samples_are_one(caches):
    fill(caches[0], 4)
    lines = openmetrics_text(*caches, *caches).decode().splitlines()
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series)) > 0


def test_names_follow_the_conventions():
    for family in FAMILIES:
        assert re.fullmatch(r"mmcache(_[a-z]+)+", family.name)
        assert not family.name.endswith("_total")
        assert not family.unit or family.name.endswith("_" + family.unit)
        assert family.meaning.endswith(".")
        assert family.exported_name.endswith("_total") is (family.kind is Kind.COUNTER)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_registering_reads_nothing():
    class Unreadable:
        def stats(self):
            raise AssertionError("read")

    CollectorRegistry(auto_describe=True).register(CacheCollector(Unreadable()))


def test_a_closed_cache_is_still_read(caches):
    caches[0].close()
    assert b"mmcache_hits_total" in openmetrics_text(*caches)
