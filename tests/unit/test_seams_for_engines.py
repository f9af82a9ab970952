"""What an engine's plug-in changes about the tiered cache, and what it asks of it."""

import dataclasses

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.config import DiskConfig, HostConfig
from tiered_mmcache.errors import ConfigError
from tiered_mmcache.testing import audit_idle

KIB = 1024


def configuration(folder, **keys):
    disk = DiskConfig(path=folder / "store", max_size="32MiB", write_buffer="4MiB")
    whole = {"namespace": "model/bf16", "host": HostConfig(max_size=4 * KIB), "disk": disk, **keys}
    return CacheConfig(**whole)


def entry(fill):
    return EmbeddingResult(embedding=torch.full((KIB,), fill, dtype=torch.uint8))


@pytest.fixture
def make(tmp_path):
    made = []

    def make_cache(cache_class=TieredMultimodalCache, **keys):
        made.append(cache_class(2 * KIB, config=configuration(tmp_path, **keys)))
        return made[-1]

    yield make_cache
    for cache in made:
        assert cache.drain()
        audit_idle(cache)
        cache.close()


def test_an_underived_namespace_is_refused_with_a_disk(tmp_path):
    with pytest.raises(ConfigError) as refused:
        TieredMultimodalCache(KIB, config=configuration(tmp_path, namespace="auto"))
    assert refused.value.key == "namespace"
    assert "plug-in" in refused.value.problem
    assert not (tmp_path / "store").exists()


def test_without_a_disk_the_namespace_does_not_matter(make):
    cache = make(namespace="auto", disk=None)
    for key in range(4):
        cache.set(key, entry(key))
    assert cache.locate(1) is Tier.HOST


def test_clearing_memory_leaves_the_disk(make):
    cache = make()
    for key in range(12):
        cache.set(key, entry(key))
    assert cache.drain()
    places = [cache.locate(key) for key in range(12)]
    assert set(places) == set(Tier)
    cache.clear_memory()
    assert len(cache) == cache.current_size == 0
    assert cache.stats().host["entries"] == 0
    for key, place in enumerate(places):
        found = cache.get_single(key)
        assert (found is not None) == (place is Tier.DISK)
        assert found is None or torch.equal(found.embedding, entry(key).embedding)


def test_clearing_memory_without_lower_tiers():
    cache = TieredMultimodalCache(4 * KIB)
    cache.set(1, entry(1))
    cache.clear_memory()
    assert cache.get_single(1) is None
    assert cache.current_size == 0


class Distrustful(TieredMultimodalCache):
    """Keeps odd hashes in memory."""

    def _may_reach_disk(self, mm_hash):
        return mm_hash % 2 == 0


def test_hashes_that_are_distrusted_are_kept_in_memory_only(make):
    cache = make(Distrustful)
    for key in range(12):
        cache.set(key, entry(key))
    assert cache.drain()
    on_disk = [key for key in range(12) if cache.locate(key) is Tier.DISK]
    assert on_disk
    assert not [key for key in on_disk if key % 2]
    in_host = [key for key in range(12) if cache.locate(key) is Tier.HOST]
    assert [key for key in in_host if key % 2]
    assert cache.stats().memory_only["key_or_class"]
    cache.close()
    second = make(Distrustful)
    assert [key for key in range(12) if second.has(key)] == list(range(0, 12, 2))


def test_what_was_stored_under_a_hash_is_not_found_once_it_is_distrusted(make):
    trusting = make()
    trusting.set(3, entry(3))
    trusting.close()
    distrustful = make(Distrustful)
    assert distrustful.get_single(3) is None
    assert not distrustful.has(3)


@dataclasses.dataclass(kw_only=True)
class TheirResult:
    """An engine's own class, which does not know ours."""

    embedding: torch.Tensor


class Theirs(TieredMultimodalCache):
    """Takes that class."""

    result_class = TheirResult


def test_another_result_class_takes_the_place_of_ours():
    cache = Theirs(4 * KIB)
    stored = TheirResult(embedding=torch.zeros(KIB, dtype=torch.uint8))
    assert cache.set(1, stored)
    assert cache.get_single(1) is stored
    with pytest.raises(AssertionError):
        cache.set(2, entry(2))
