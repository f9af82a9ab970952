"""Flushes, new weights and adapters, by the functions of the published scheduler."""

import dataclasses
import json
import os
import signal
import types
from unittest import mock

import pytest
import released
from conftest import on, versions
from serving import Request, hash_of, idle_scheduler

from tiered_mmcache import Tier

IMAGES = [(hash_of(number), 32) for number in range(24)]
UPDATE = types.SimpleNamespace(
    model_path="/new",
    load_format=None,
    flush_cache=False,
    torch_empty_cache=False,
    recapture_cuda_graph=False,
    weight_version="v2",
    token_step=0,
    abort_all_requests=False,
    keep_pause=False,
)


def filled(server):
    server.activate().start()
    for image in IMAGES:
        server.check(Request([image]))
    assert server.cache.drain(60)
    assert {server.cache.locate(server.key(h)) for h, _ in IMAGES} == set(Tier)
    return server


def updater(server, *, succeeds=True):
    """What updates weights in this release, over a worker that pretends to."""
    runner = mock.MagicMock()
    answer = (succeeds, "done" if succeeds else "no room")
    runner.weight_updater.update_weights_from_disk.return_value = answer
    worker = mock.MagicMock()
    worker.update_weights_from_disk.return_value = answer
    worker.weight_update_runners.return_value = [("target", runner)]
    owner = server.release.updates_class
    if owner.__name__ == "SchedulerUpdateWeightsMixin":
        return idle_scheduler(tp_worker=worker, draft_worker=None)
    members = {
        "tp_worker": worker,
        "draft_worker": None,
        "flush_cache": mock.MagicMock(return_value=True),
        "scheduler": idle_scheduler(),
    }
    needed = [f.name for f in dataclasses.fields(owner) if f.init and _has_no_default(f)]
    return owner(**{name: mock.MagicMock() for name in needed} | members)


def _has_no_default(field):
    return field.default is field.default_factory is dataclasses.MISSING


# Flush


def test_flush_empties_hot_and_host_and_leaves_the_disk(server):
    cache = filled(server).cache
    on_disk = [h for h, _ in IMAGES if cache.locate(server.key(h)) is Tier.DISK]
    assert idle_scheduler().flush_cache()
    assert len(cache) == 0
    assert cache.stats().host["entries"] == 0
    left = [h for h, _ in IMAGES if cache.has(server.key(h))]
    assert left == on_disk
    server.check(*[Request([image]) for image in IMAGES[:3]])


def test_a_flush_that_is_refused_empties_nothing(server):
    cache = filled(server).cache
    held = len(cache)
    busy = {
        name: mock.MagicMock(return_value=False)
        for name in ("is_fully_idle", "is_no_request", "_is_no_request")
    }
    assert not idle_scheduler(**busy).flush_cache()
    assert len(cache) == held


# Weights


@pytest.mark.parametrize("succeeds", [True, False])
def test_new_weights_are_never_served_old_embeddings(server, succeeds):
    cache = filled(server).cache
    updater(server, succeeds=succeeds).update_weights_from_disk(UPDATE)
    assert len(cache) == 0
    assert not [h for h, _ in IMAGES if cache.has(server.key(h))]
    encoded = len(server.encoder.items)
    for image in IMAGES:
        server.check(Request([image]))
    assert len(server.encoder.items) == encoded + len(IMAGES)
    for image in IMAGES:  # the lower tiers work on
        server.check(Request([image]))
    assert len(server.encoder.items) == encoded + len(IMAGES)


def test_an_update_that_raises_counts_as_one(server):
    cache = filled(server).cache
    broken = updater(server)
    broken.tp_worker.update_weights_from_disk.side_effect = RuntimeError("lost the disk")
    broken.tp_worker.weight_update_runners.side_effect = RuntimeError("lost the disk")
    with pytest.raises(RuntimeError, match="lost the disk"):
        broken.update_weights_from_disk(UPDATE)
    assert not [h for h, _ in IMAGES if cache.has(server.key(h))]


def test_the_next_server_starts_cold_after_an_update_of_weights(server):
    filled(server)
    updater(server).update_weights_from_disk(UPDATE)
    for image in IMAGES:
        server.check(Request([image]))  # with the new weights: of no use to anybody else
    encoded = len(server.encoder.items)
    server.restart()
    for image in IMAGES[:5]:
        server.check(Request([image]))
    assert len(server.encoder.items) == encoded + 5


@on(versions()[-1])
def test_an_update_while_the_worker_is_dead_reaches_the_store_all_the_same(server):
    cache = filled(server).cache
    os.kill(cache._below.disk.client.pid, signal.SIGKILL)
    updater(server).update_weights_from_disk(UPDATE)
    server.restart()
    assert not [h for h, _ in IMAGES if server.cache.has(h)]


@on(versions()[-1])
def test_a_store_that_cannot_be_told_of_new_weights_is_named(server, caplog, monkeypatch):
    cache = filled(server).cache
    monkeypatch.setattr(type(cache._below.disk.spill), "clear_pending", property(lambda _: True))
    updater(server).update_weights_from_disk(UPDATE)
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"remove {server.folder / 'store'}" in error
    assert not [h for h, _ in IMAGES if cache.has(h)]


def test_two_updates_in_a_row(server):
    cache = filled(server).cache
    for _ in range(2):
        updater(server).update_weights_from_disk(UPDATE)
        for image in IMAGES:
            server.check(Request([image]))
        assert cache.drain(60)
        assert {cache.locate(server.key(h)) for h, _ in IMAGES} == set(Tier)
    assert server.encoder.items == [h for h, _ in IMAGES] * 3


def test_an_update_before_the_first_image(server):
    filled(server)
    server.restart()
    updater(server).update_weights_from_disk(UPDATE)
    encoded = len(server.encoder.items)
    server.check(Request([IMAGES[0]]))
    assert len(server.encoder.items) == encoded + 1


@on(*versions("0.5.19"))
def test_a_new_name_for_the_weights_counts_as_an_update(server):
    cache = filled(server).cache
    idle_scheduler().record_weight_version_change("v2")
    assert not cache.has(IMAGES[0][0])


@on(*versions("0.5.22"))
def test_weights_that_were_written_past_sglang_count_once_the_update_ends(server):
    cache = filled(server).cache
    update = updater(server)
    with mock.patch("torch.distributed.barrier"):
        update.begin_weight_update(types.SimpleNamespace(selector="all"))
        update.end_weight_update(types.SimpleNamespace())
    assert not cache.has(IMAGES[0][0])


def test_every_way_to_update_weights_is_watched(server):
    server.activate()
    owner = server.release.updates_class
    ways = [name for name in dir(owner) if name.startswith("update_weights_from")]
    assert len(ways) == 4
    for name in [*ways, *(["end_weight_update"] if server.release.number >= (0, 5, 22) else [])]:
        assert hasattr(getattr(owner, name), "__wrapped__"), name


# Adapters


def adapter(folder, names):
    folder.mkdir()
    header = json.dumps({name: {"dtype": "F32"} for name in names}).encode()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return types.SimpleNamespace(lora_path=str(folder), lora_name="one", lora_id="1")


def test_an_adapter_for_the_language_model_changes_nothing(server):
    cache = filled(server).cache
    request = adapter(server.folder / "one", ["base.model.layers.0.self_attn.q_proj.lora_A.weight"])
    idle_scheduler().load_lora_adapter(request)
    assert cache.has(server.key(IMAGES[0][0]))


@pytest.mark.parametrize("name", ["base.model.visual.blocks.0.attn.qkv.lora_A.weight", None])
def test_an_adapter_that_reaches_the_encoder_ends_the_lower_tiers(server, name):
    cache = filled(server).cache
    names = [name] if name else []
    idle_scheduler().load_lora_adapter(adapter(server.folder / "one", names))
    assert cache._below is None
    assert len(cache) == 0
    server.check(Request([IMAGES[0]]))
    updater(server).update_weights_from_disk(UPDATE)
    server.check(Request([IMAGES[0]]))
    assert cache._below is None


def test_the_scheduler_is_really_the_published_one(server):
    server.activate()
    flush = idle_scheduler().flush_cache.__wrapped__
    file = server.release.file(released.SCHEDULER)
    assert flush.__code__.co_filename == str(file)
