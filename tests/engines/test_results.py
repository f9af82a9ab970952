"""SGLang's own result classes, through every tier and a restart."""

import pytest
import torch
from conftest import on, versions
from serving import WIDTH, hash_of

from tiered_mmcache import Tier
from tiered_mmcache.integrations.sglang import cache as sglang_cache

KEY = hash_of("a video")
WITH_RESULTS = versions("0.5.8")


def pruned(rows=20, frames=(8, 12)):
    from sglang.srt.multimodal.evs import EVSEmbeddingResult

    embedding = torch.arange(rows * WIDTH, dtype=torch.bfloat16).reshape(rows, WIDTH)
    return EVSEmbeddingResult(embedding=embedding, num_tokens_per_frame=list(frames))


def push_down_to(server, tier):
    """Fill the tiers until the entry is in that one."""
    result = server.release.cache_module.EmbeddingResult
    for number in range(100):
        if server.cache.locate(KEY) is tier:
            return
        server.cache.set(hash_of(number), result(embedding=torch.rand(32, WIDTH)))
        assert server.cache.drain(60)
    raise AssertionError(f"the entry did not reach {tier}")


@on(*WITH_RESULTS)
@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("kind", ["plain", "pruned"])
def test_exactly_the_same_class_comes_back_from(server, tier, kind):
    cache = server.activate().start()
    plain = server.release.cache_module.EmbeddingResult(embedding=torch.rand(20, WIDTH))
    stored = pruned() if kind == "pruned" else plain
    assert cache.set(KEY, stored)
    push_down_to(server, tier)
    found = cache.get_single(KEY)
    assert type(found) is type(stored)
    assert torch.equal(found.embedding, stored.embedding)
    assert found.embedding.dtype == stored.embedding.dtype
    assert getattr(found, "num_tokens_per_frame", None) == getattr(
        stored, "num_tokens_per_frame", None
    )


@on(*WITH_RESULTS)
def test_a_pruned_video_survives_a_restart(server):
    server.activate().start().set(KEY, pruned())
    found = server.restart().get_single(KEY)
    assert type(found) is type(pruned())
    assert found.num_tokens_per_frame == [8, 12]


@on(*WITH_RESULTS)
def test_a_pruned_video_whose_rows_are_not_those_of_its_frames_is_refused(server):
    cache = server.activate().start()
    assert cache.set(KEY, pruned(frames=(8, 13))) is False
    assert cache.get_single(KEY) is None
    assert cache.stats().drops == {"inconsistent_rows": 1}


@on(*WITH_RESULTS)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_such_an_entry_found_below_is_removed_from_every_tier(server, monkeypatch, tier):
    cache = server.activate().start()
    with monkeypatch.context() as patch:  # as if a former version had not checked
        patch.setattr(sglang_cache, "rows_agree", lambda result: True)
        cache.set(KEY, pruned(frames=(8, 13)))
        push_down_to(server, tier)
    assert cache.get_single(KEY) is None
    assert cache.locate(KEY) is None
    assert cache.stats().faults == {"inconsistent_rows": 1}
    assert cache.stats().misses_by_reason == {"inconsistent_rows": 1}
    assert cache.stats().host["hits"] + cache.stats().disk["hits"] == 0


@on(*WITH_RESULTS)
@pytest.mark.parametrize("shape", [(2, 10, WIDTH), (20, WIDTH), (1, 20, WIDTH)])
def test_rows_of_more_dimensions_are_counted_as_sglang_does(server, shape):
    cache = server.activate().start()
    result = pruned()
    result.embedding = result.embedding.reshape(shape)
    assert cache.set(KEY, result)


@on(*WITH_RESULTS)
def test_other_objects_are_refused_as_sglang_refuses_them(server):
    cache = server.activate().start()
    with pytest.raises(AssertionError):
        cache.set(KEY, torch.rand(4, WIDTH))


@on("0.5.6")
def test_releases_without_results_are_given_tensors_and_return_them(server):
    cache = server.activate().start()
    tensor = torch.rand(20, WIDTH)
    assert cache.set(KEY, tensor)
    assert cache.get_single(KEY) is tensor
    server.restart()
    found = server.cache.get_single(KEY)
    assert torch.equal(found, tensor)
