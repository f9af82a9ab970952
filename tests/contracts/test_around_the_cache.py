"""What the specification says around the hot tier: misses, what is evicted, configuration.

Owns: each sentence of its section "Around it", quoted by the test that checks it, and those
sentences about entries that hold for every tier. Does not own: the hot tier's own rules
(test_specified_interface.py, test_rules_of_engines.py).
"""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from tiered_mmcache import (
    CacheConfig,
    EmbeddingResult,
    MultimodalCache,
    Tier,
    TieredMultimodalCache,
    register_result_class,
)
from tiered_mmcache.config import DiskConfig

KIB = 1024
PRIME = 2**61 - 1


@dataclasses.dataclass(kw_only=True)
class StoredFrames(EmbeddingResult):
    """A registered class with a further field."""

    num_tokens_per_frame: list[int]


register_result_class("contracts.StoredFrames", StoredFrames)


def entry(size_bytes=KIB, fill=0):
    return EmbeddingResult(embedding=torch.full((size_bytes,), fill, dtype=torch.uint8))


def fill_with(cache, hashes):
    for mm_hash in hashes:
        assert cache.set(mm_hash, entry(fill=mm_hash % 251))


class Engine:
    """The few steps of an engine that concern the cache."""

    def __init__(self, cache):
        self.cache = cache
        self.encoded = []

    def embed(self, hashes):
        found = self.cache.get(hashes)
        if found is not None:
            return found
        self.encoded.append(list(hashes))
        made = entry(fill=sum(hashes) % 251)
        self.cache.set(self.cache.combine_hashes(hashes), made)
        return made


def test_an_images_key_is_its_hash_and_a_requests_key_the_combination(make):
    """A single image's key is the hash of its content; a request's the combination of its images'.

    So one image alone as a request is another key than the image.
    """
    cache = make(8 * KIB)
    image, request = entry(), entry()
    cache.set(11, image)
    cache.set(cache.combine_hashes([11]), request)
    assert cache.get_single(11) is image
    assert cache.get([11]) is request
    assert len(cache) == 2


def test_a_miss_means_that_the_engine_encodes_and_sets(make):
    """A miss means that the engine runs its vision encoder and calls `set`."""
    engine = Engine(make(8 * KIB))
    first = engine.embed([1, 2])
    assert engine.embed([1, 2]) is first
    engine.embed([2, 1])
    assert engine.encoded == [[1, 2], [2, 1]]


def test_without_lower_tiers_what_was_evicted_is_encoded_again(make_hot_only):
    """A miss means that the engine runs its vision encoder and calls `set`."""
    engine = Engine(make_hot_only(2 * KIB))
    for number in (1, 2, 3, 1):
        engine.embed([number])
    assert engine.encoded == [[1], [2], [3], [1]]


def test_what_was_evicted_comes_back_instead_of_being_encoded_again(make_tiered):
    """A later `get` brings it back to the device instead of encoding again."""
    engine = Engine(make_tiered(2 * KIB))
    for number in range(1, 9):
        engine.embed([number])
    assert engine.cache.drain()
    for number in range(1, 9):
        found = engine.embed([number])
        assert torch.equal(found.embedding, torch.full((KIB,), number, dtype=torch.uint8))
        assert found.embedding.device.type == "cpu"
    assert engine.encoded == [[number] for number in range(1, 9)]


def test_what_host_memory_evicts_goes_to_the_store(tmp_path):
    """What is evicted goes to page-locked ("pinned") host memory, from there to the LMDB store."""
    config = tmp_path / "mmcache.yaml"
    config.write_text(
        "namespace: contract\n"
        "host:\n  max_size: 16KiB\n"
        "disk:\n  path: store\n  max_size: 16MiB\n  write_buffer: 64KiB\n"
    )
    with TieredMultimodalCache.from_yaml(config, 2 * KIB) as cache:
        for mm_hash in range(20):
            assert cache.set(mm_hash, entry(fill=mm_hash))
            assert cache.drain()
        tiers = [cache.locate(mm_hash) for mm_hash in range(20)]
        # The hot tier holds two entries; host memory four, a page each.
        assert tiers == [Tier.DISK] * 14 + [Tier.HOST] * 4 + [Tier.HOT] * 2
        for mm_hash in range(20):
            found = cache.get_single(mm_hash)
            assert torch.equal(found.embedding, entry(fill=mm_hash).embedding)
            assert cache.locate(mm_hash) is Tier.HOT


def test_tier_sizes_come_from_yaml(tmp_path):
    """Tier sizes come from YAML."""
    config = tmp_path / "mmcache.yaml"
    config.write_text(
        "namespace: contract\n"
        "hot:\n  max_size: 3KiB\n"
        "host:\n  max_size: 64KiB\n"
        "disk:\n  path: store\n  max_size: 8MiB\n  write_buffer: 32KiB\n"
    )
    with TieredMultimodalCache.from_yaml(config) as cache:
        sizes = cache.stats().as_dict()
        assert cache.max_size == sizes["hot"]["budget_bytes"] == 3 * KIB
        assert sizes["host"]["budget_bytes"] == 64 * KIB
        assert sizes["disk"]["budget_bytes"] == 8 * KIB * KIB
        assert (tmp_path / "store" / "data.mdb").is_file()


def test_the_environment_names_the_yaml(tmp_path, monkeypatch):
    """Tier sizes come from YAML; an explicit size of the hot tier wins."""
    config = tmp_path / "mmcache.yaml"
    config.write_text("hot:\n  max_size: 3KiB\nhost:\n  max_size: 64KiB\n")
    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", str(config))
    with TieredMultimodalCache() as cache:
        assert cache.max_size == 3 * KIB
        assert cache.stats().host["budget_bytes"] == 64 * KIB
    with TieredMultimodalCache(5 * KIB) as cache:
        assert cache.max_size == 5 * KIB


def test_the_cache_is_usable_wherever_the_interface_is(make):
    """The cache is usable wherever a `MultimodalCache` is."""

    def serve(cache: MultimodalCache):
        combined = cache.combine_hashes([1, 2])
        assert cache.set(combined, entry(), None)
        assert cache.get([1, 2], combined) is not None
        assert cache.has(combined)
        assert cache.available_size() == 1
        assert cache.free(combined, None)
        cache.clear()

    cache = make(8 * KIB)
    assert isinstance(cache, MultimodalCache)
    serve(cache)


def test_without_a_configuration_there_are_no_lower_tiers(tmp_path, monkeypatch):
    """The cache without a configuration is the static cache: no files, no memory, no process."""
    monkeypatch.chdir(tmp_path)
    cache = TieredMultimodalCache(2 * KIB)
    fill_with(cache, range(5))
    assert cache.get_single(0) is None
    assert cache.stats().host == cache.stats().disk == {"hits": 0}
    assert cache.drain()
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_spilled_entries_can_be_inspected_with_the_command(tmp_path):
    """Spilled entries can be inspected with the command."""
    disk = DiskConfig(path=tmp_path / "store", max_size="16MiB", write_buffer="1MiB")
    config = CacheConfig(namespace="contract", disk=disk)
    with TieredMultimodalCache(2 * KIB, config=config) as cache:
        fill_with(cache, [101, 102, 103, 104])
    listed = subprocess.run(
        [sys.executable, "-m", "mmcache_tools", "ls", str(tmp_path / "store"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stderr
    assert all(str(key) in listed.stdout for key in (101, 102, 103, 104))
    assert json.loads(listed.stdout)


# Sentences that hold for every tier


def test_free_removes_every_copy(make_tiered):
    """`free`: gone from every tier, or a mismatched entry would be promoted again for ever."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, range(1, 9))
    assert cache.drain()
    for mm_hash in range(1, 9):
        assert cache.free(mm_hash) is True
        assert cache.get_single(mm_hash) is None
        assert cache.has(mm_hash) is False
        assert cache.free(mm_hash) is False
    assert cache.current_size == 0


def test_a_freed_entry_does_not_come_back_from_what_was_in_flight(make_tiered):
    """`free`: what is being written at that moment cannot bring the entry back."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, range(1, 9))  # no drain: copies and writes may be under way
    for mm_hash in range(1, 9):
        cache.free(mm_hash)
    assert cache.drain()
    assert [cache.get_single(mm_hash) for mm_hash in range(1, 9)] == [None] * 8


def test_a_freed_hash_can_be_set_to_another_value(make_tiered):
    """A repeated `set` keeps the first value, but a freed hash is unknown."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, [1, 2, 3, 4])
    cache.free(1)
    assert cache.set(1, entry(fill=99))
    fill_with(cache, [5, 6, 7])
    assert cache.drain()
    assert cache.get_single(1).embedding[0] == 99


def test_clear_empties_every_tier(make_tiered):
    """`clear`: everything, in every tier."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, range(1, 9))
    assert cache.drain()
    cache.clear()
    assert [cache.get_single(mm_hash) for mm_hash in range(1, 9)] == [None] * 8
    assert (cache.current_size, len(cache)) == (0, 0)
    fill_with(cache, range(1, 5))
    assert cache.drain()
    assert all(cache.get_single(mm_hash) is not None for mm_hash in range(1, 5))


def test_has_sees_every_tier_and_changes_no_recency(make_tiered):
    """`has` | does not change recency."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, range(1, 6))
    assert cache.drain()
    hot = list(cache.mm_cache)
    assert all(cache.has(mm_hash) for mm_hash in range(1, 6))
    assert not cache.has(99)
    assert list(cache.mm_cache) == hot


def test_a_promotion_keeps_within_the_hot_tier(make_tiered):
    """Entries are taken from the front until the new one fits: a promoted one too."""
    cache = make_tiered(3 * KIB)
    fill_with(cache, range(1, 7))
    assert cache.drain()
    assert cache.get_single(1) is not None
    assert list(cache.mm_cache) == [5, 6, 1]
    assert cache.current_size == 3 * KIB


def test_a_promoted_entry_is_the_stored_object_from_then_on(make_tiered):
    """A hit returns the stored `EmbeddingResult`."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, [1, 2, 3])
    assert cache.drain()
    promoted = cache.get_single(1)
    assert cache.get_single(1) is promoted


@pytest.mark.parametrize(("asked", "other"), [([5], [5 + PRIME]), ([-1], [-2])])
def test_colliding_combinations_stay_apart_in_every_tier(make_tiered, asked, other):
    """`[h1, h2]` and `[h2, h1]` differ, and so do combinations whose hashes are equal."""
    cache = make_tiered(2 * KIB)
    cache.set(cache.combine_hashes(asked), entry(fill=1))
    fill_with(cache, [101, 102, 103])
    assert cache.drain()
    assert cache.get(other) is None
    cache.set(cache.combine_hashes(other), entry(fill=2))
    fill_with(cache, [104, 105, 106])
    assert cache.drain()
    assert cache.get(asked).embedding[0] == 1
    assert cache.get(other).embedding[0] == 2


def test_several_look_ups_at_once_answer_as_one_after_the_other(make_tiered):
    """Single look-ups in order: what one admits may push another out again."""
    cache = make_tiered(3 * KIB)
    fill_with(cache, range(1, 9))
    assert cache.drain()
    wanted = [1, 99, 8, 2, 3, 1, 4, 8]
    found = cache.get_many(wanted)
    assert [answer is None for answer in found] == [mm_hash == 99 for mm_hash in wanted]
    for mm_hash, answer in zip(wanted, found, strict=True):
        assert answer is None or torch.equal(answer.embedding, entry(fill=mm_hash).embedding)
    assert list(cache.mm_cache) == [1, 4, 8]
    assert cache.get_many([]) == []


def test_what_was_prefetched_is_found_and_the_hot_tier_is_left_alone(make_tiered):
    """`prefetch`: start disk to host now, so that `get` later finds it resident."""
    cache = make_tiered(2 * KIB)
    fill_with(cache, range(1, 9))
    assert cache.drain()
    hot = list(cache.mm_cache.items())
    assert cache.prefetch([*range(1, 9), 99]) >= 0
    assert list(cache.mm_cache.items()) == hot
    for mm_hash in range(1, 9):
        found = cache.get_single(mm_hash)
        assert torch.equal(found.embedding, entry(fill=mm_hash).embedding)
    assert cache.get_single(99) is None


def test_order_matters_in_every_tier(make_tiered):
    """The whole ordered combination is the key, `[h1, h2]` and `[h2, h1]` differ."""
    cache = make_tiered(2 * KIB)
    cache.set(cache.combine_hashes([1, 2]), entry(fill=12))
    cache.set(cache.combine_hashes([2, 1]), entry(fill=21))
    fill_with(cache, [101, 102, 103])
    assert cache.drain()
    assert cache.get([1]) is None
    assert cache.get([2, 1]).embedding[0] == 21
    assert cache.get([1, 2]).embedding[0] == 12


def test_the_exact_class_and_its_fields_come_back(make_tiered):
    """Engines subclass it with further fields: `sum(num_tokens_per_frame) == rows` must hold."""
    cache = make_tiered(2 * KIB)
    stored = StoredFrames(embedding=torch.randn(6, 32), num_tokens_per_frame=[1, 2, 3])
    expected = stored.embedding.clone()
    cache.set(1, stored)
    fill_with(cache, [101, 102, 103])
    assert cache.drain()
    found = cache.get_single(1)
    assert type(found) is StoredFrames
    assert found.num_tokens_per_frame == [1, 2, 3]
    assert torch.equal(found.embedding, expected)
    assert sum(found.num_tokens_per_frame) == found.embedding.shape[0]


def test_an_entry_needs_no_gradient_below_the_hot_tier(make_tiered):
    """What is stored must not keep the encoder's graph alive."""
    cache = make_tiered(2 * KIB)
    weight = torch.ones(256, requires_grad=True)
    cache.set(1, EmbeddingResult(embedding=weight * 2))
    assert not cache.get_single(1).embedding.requires_grad
    fill_with(cache, [101, 102, 103])
    assert cache.drain()
    found = cache.get_single(1).embedding
    assert torch.equal(found, torch.full((256,), 2.0))
    assert not found.requires_grad


def test_tensors_of_one_mode_are_promoted_in_the_other(make_tiered):
    """The scheduler runs under inference mode; other callers do not."""
    cache = make_tiered(2 * KIB)
    with torch.inference_mode():
        cache.set(1, EmbeddingResult(embedding=torch.arange(256.0)))
    cache.set(2, EmbeddingResult(embedding=torch.arange(256.0) + 1))
    fill_with(cache, [101, 102, 103])
    assert cache.drain()
    assert torch.equal(cache.get_single(1).embedding, torch.arange(256.0))
    with torch.inference_mode():
        assert torch.equal(cache.get_single(2).embedding, torch.arange(256.0) + 1)
        fill_with(cache, [104, 105, 106])
        assert torch.equal(cache.get_single(101).embedding, entry(fill=101).embedding)
