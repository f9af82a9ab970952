"""SGLang's own embedding path over our cache: every release, every tier."""

import pytest
import torch
from conftest import on, on_every_release, versions
from serving import KIB, Request, embedding_of, hash_of, rows_of

from tiered_mmcache import Tier

IMAGES = [(hash_of(number), 32) for number in range(30)]  # 32 KiB each


@on_every_release
def test_every_image_is_encoded_once_and_then_found_in_hot_host_and_disk(server):
    server.activate().start()
    for image in IMAGES:
        server.check(Request([image]))
    assert server.encoder.items == [mm_hash for mm_hash, _ in IMAGES]
    assert server.cache.drain(60)
    tiers = {server.cache.locate(server.key(mm_hash)) for mm_hash, _ in IMAGES}
    assert tiers == {Tier.HOT, Tier.HOST, Tier.DISK}
    for image in reversed(IMAGES):
        server.check(Request([image]))
    assert len(server.encoder.items) == len(IMAGES)
    stats = server.cache.stats()
    assert stats.hot["hits"]
    assert stats.host["hits"]
    assert stats.disk["hits"]
    assert server.cache.current_size <= server.cache.max_size == 128 * KIB


@on_every_release
def test_the_next_server_on_the_store_starts_warm(server):
    server.activate().start()
    for image in IMAGES:
        server.check(Request([image]))
    server.restart()
    for image in IMAGES:
        server.check(Request([image]))
    assert len(server.encoder.items) == len(IMAGES)
    assert server.cache.stats().disk["hits"] == len(IMAGES)


@on(versions()[-1])
@pytest.mark.parametrize("use", ["get_many", "prefetch", "has", "free"])
def test_whatever_is_asked_first_asks_the_store(server, use):
    server.activate().start()
    mm_hash = IMAGES[0][0]
    server.check(Request([IMAGES[0]]))
    cache = server.restart()
    if use == "get_many":
        assert torch.equal(cache.get_many([mm_hash])[0].embedding, embedding_of(*IMAGES[0]))
    elif use == "prefetch":
        assert cache.prefetch([mm_hash]) == 1
    else:
        assert getattr(cache, use)(mm_hash)


def test_prefill_in_chunks_encodes_once_though_the_entry_leaves_between_them(server):
    server.activate().start()
    mm_hash, rows = 2**41 + 1, 100
    others = iter(IMAGES)
    for step in range(0, 108, 27):
        server.check(Request([(mm_hash, rows)], prefix=step, extend=min(27, 106 - step)))
        for _ in range(5):
            server.check(Request([next(others)]))
        assert server.cache.locate(server.key(mm_hash)) is not Tier.HOT
    assert server.encoder.items.count(mm_hash) == 1


def test_several_images_of_a_request_in_chunks(server):
    server.activate().start()
    images = IMAGES[:3]
    whole = Request(images)
    for start in range(0, whole.length, 50):
        extend = min(50, whole.length - start)
        server.check(Request(images, prefix=start, extend=extend))
    assert sorted(set(server.encoder.items)) == sorted(mm_hash for mm_hash, _ in images)
    assert len(server.encoder.items) == len(images)


def test_a_video_of_several_runs_is_one_entry(server):
    server.activate().start()
    video = [(2**42 + 5, 16)] * 3
    server.check(Request(video, one_item=True))
    for image in IMAGES[:25]:
        server.check(Request([image]))
    server.check(Request(video, one_item=True))
    assert server.encoder.items.count(2**42 + 5) == 1
    server.restart()
    server.check(Request(video, one_item=True, prefix=10, extend=30))
    assert server.encoder.items.count(2**42 + 5) == 1


def test_the_same_image_twice_in_a_batch(server):
    server.activate().start()
    one, two = IMAGES[:2]
    batch = [Request([one, two]), Request([one]), Request([two, one])]
    server.check(*batch)
    if server.release.number >= (0, 5, 19):
        assert sorted(server.encoder.items) == sorted([one[0], two[0]])
    encoded = len(server.encoder.items)
    server.check(*batch)
    assert len(server.encoder.items) == encoded


def test_more_images_in_a_batch_than_the_hot_tier_holds(server):
    server.activate().start(40 * KIB)  # one image
    batch = [Request(IMAGES[:5]), Request(IMAGES[5:9])]
    server.check(*batch)
    server.check(*batch)
    assert len(server.cache) <= 1


def test_an_image_larger_than_the_hot_tier(server):
    server.configure(hot={"oversize": "spill"})
    server.activate().start(40 * KIB)
    large = (2**43 + 3, 64)
    server.check(Request([large]))
    server.check(Request([large]))
    assert server.encoder.items.count(large[0]) == 1
    assert len(server.cache) == 0


@on(*versions("0.5.19"))
def test_a_pruned_video_takes_its_frames_with_it_to_disk(server):
    """Its result moves the placeholders of the prompt, which is done anew with each prefill."""
    from sglang.srt.multimodal.evs import EVSEmbeddingResult

    server.activate().start()
    embedding = embedding_of(hash_of("pruned"), 20)
    runs = []

    def prune(items):
        runs.append(len(items))
        return EVSEmbeddingResult(embedding=embedding, num_tokens_per_frame=[14, 6])

    def prefill():
        request = Request([(hash_of("pruned"), 10)] * 2, one_item=True)
        request.items[0].model_specific_data["pre_chunked_input_ids"] = request.ids().tolist()
        server.encoder = prune
        assert torch.equal(server.prefill(request), embedding)
        return server.answer[1].flatten().tolist()

    mask = prefill()
    assert mask == [False] * 3 + [True] * 14 + [False] * 3 + [True] * 6 + [False] * 3
    server.restart()
    assert prefill() == mask
    assert runs == [1]
    assert server.cache.stats().disk["hits"] == 1


@on(*versions("0.5.19"))
@pytest.mark.parametrize("tier", list(Tier))
def test_an_entry_with_other_rows_is_discarded_on_every_tier(server, tier):
    server.activate().start()
    mm_hash = 2**44 + 9
    server.check(Request([(mm_hash, 24)]))
    if tier is not Tier.HOT:
        fillers = IMAGES[:10] if tier is Tier.HOST else IMAGES
        for image in fillers:
            server.check(Request([image]))
        assert server.cache.drain(60)
    assert server.cache.locate(mm_hash) is tier
    server.check(Request([(mm_hash, 20)]))
    assert server.encoder.items.count(mm_hash) == 2
    server.restart()
    server.check(Request([(mm_hash, 20)]))
    assert server.encoder.items.count(mm_hash) == 2  # what came back is the one with 20 rows


@on(*versions("0.5.19"))
def test_a_combined_entry_with_other_rows_is_discarded_on_disk(server):
    server.activate().start()
    video = 2**44 + 21
    server.check(Request([(video, 16)] * 3, one_item=True))
    server.restart()
    server.check(Request([(video, 15)] * 3, one_item=True))
    assert server.encoder.items.count(video) == 2
    server.restart()
    server.check(Request([(video, 15)] * 3, one_item=True))
    assert server.encoder.items.count(video) == 2


@on(*versions("0.5.19"))
def test_an_encoder_that_returns_one_tensor_for_each_item(server):
    server.activate().start()
    together = server.encoder

    def apart(items):
        return list(together(items).split([rows_of(item) for item in items]))

    server.encoder = apart
    server.check(Request(IMAGES[:3]))
    server.check(Request(IMAGES[:3]))
    assert len(together.items) == 3


@on(*versions("0.5.10"))
def test_colliding_combinations_are_different_entries(server):
    server.configure(disk=server.disk(allow_weak_hashes=True))  # so that -1 gets there, too
    server.activate().start()
    combine = type(server.cache).combine_hashes
    prime = 2**61 - 1
    result = server.release.cache_module.EmbeddingResult
    for one, other in ([2**40 + 5], [2**40 + 5 + prime]), ([-1], [-2]):
        assert hash(tuple(one)) == hash(tuple(other))
        server.cache.set(combine(one), result(embedding=embedding_of(1, 4)))
        assert server.cache.get(other) is None
        server.cache.set(combine(other), result(embedding=embedding_of(2, 4)))
        for image in IMAGES:
            server.check(Request([image]))
        assert torch.equal(server.cache.get(one).embedding, embedding_of(1, 4))
        assert torch.equal(server.cache.get(other).embedding, embedding_of(2, 4))


@on(*versions("0.5.10"))
def test_string_keys_reach_every_tier(server):
    server.activate().start()
    result = server.release.cache_module.EmbeddingResult
    key = "sha256:" + "ab" * 32
    server.cache.set(key, result(embedding=embedding_of(3, 4)))
    server.restart()
    assert torch.equal(server.cache.get_single(key).embedding, embedding_of(3, 4))


@on(*versions("0.5.10"))
@pytest.mark.parametrize("mm_hash", [0, 5, 0xABCD << 48])
def test_weak_hashes_stay_in_memory(server, mm_hash):
    server.activate().start()
    result = server.release.cache_module.EmbeddingResult
    assert server.cache.set(mm_hash, result(embedding=embedding_of(4, 4)))
    for image in IMAGES[:12]:
        server.check(Request([image]))
    assert server.cache.locate(mm_hash) is Tier.HOST
    assert torch.equal(server.cache.get_single(mm_hash).embedding, embedding_of(4, 4))
    server.restart()
    assert server.cache.get_single(mm_hash) is None


@on(versions()[-1])
def test_weak_hashes_reach_the_disk_when_the_yaml_allows_it(server):
    server.configure(disk=server.disk(allow_weak_hashes=True))
    server.activate().start()
    result = server.release.cache_module.EmbeddingResult
    server.cache.set(5, result(embedding=embedding_of(4, 4)))
    server.restart()
    assert server.cache.get_single(5) is not None
