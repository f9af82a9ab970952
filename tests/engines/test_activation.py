"""How the cache gets into SGLang, and what is said about it."""

import importlib.metadata
import logging
import multiprocessing
import tempfile
import types
from pathlib import Path

import pytest
import released
import releases
import torch
from conftest import on, on_every_release, versions
from serving import KIB, Request, hash_of, idle_scheduler

from tiered_mmcache import MultimodalCache
from tiered_mmcache.errors import ConfigError, UnsupportedEngineError
from tiered_mmcache.integrations import sglang
from tiered_mmcache.integrations.sglang import activation
from tiered_mmcache.integrations.sglang.cache import SGLangTieredCache
from tiered_mmcache.integrations.sglang.ranks import exchange_of_ranks

NEWEST = versions()[-1]
WITH_PLUGINS = versions("0.5.11")
WITHOUT_PLUGINS = versions()[:2]


def lines(caplog, level):
    """What we logged; SGLang logs its own."""
    ours = [r for r in caplog.records if r.name == "tiered_mmcache"]
    return [r.getMessage() for r in ours if r.levelno == level]


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="tiered_mmcache")


def test_the_class_is_one_of_sglangs_multimodal_caches(server):
    cache = server.activate().start()
    module = server.release.cache_module
    assert isinstance(cache, module.MultimodalCache)
    assert isinstance(cache, MultimodalCache)
    assert (
        type(cache)
        is module.MultiModalStaticCache
        is server.release.path_module.MultiModalStaticCache
    )


@on("0.5.11", *WITH_PLUGINS)
@pytest.mark.parametrize("imported", ["before", "after"])
def test_the_registry_replaces_the_class_wherever_it_was_imported(server, imported):
    from sglang.srt.plugins import load_plugins

    if imported == "before":
        _ = server.release.path_module
    load_plugins()  # finds us by our entry point
    assert isinstance(server.start(), SGLangTieredCache)
    server.check(Request([(hash_of(1), 8)]))


@on(*WITH_PLUGINS)
def test_the_scheduler_may_be_imported_after_the_plug_ins_ran(server):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    __import__(released.SCHEDULER)
    cache = server.start()
    server.check(Request([(hash_of(1), 8)]))
    idle_scheduler().flush_cache()
    assert len(cache) == 0


@on(*WITH_PLUGINS)
def test_without_the_variable_nothing_happens(server, monkeypatch):
    from sglang.srt.plugins import load_plugins

    monkeypatch.delenv("TIERED_MMCACHE_CONFIG")
    load_plugins()
    assert not isinstance(server.start(), SGLangTieredCache)


@on("0.5.10", *WITHOUT_PLUGINS)
@pytest.mark.parametrize("imported", ["before", "after"])
def test_install_replaces_the_class_wherever_it_was_imported(server, imported):
    if imported == "before":
        _ = server.release.path_module
        __import__(released.SCHEDULER)
    sglang.install()
    __import__(released.SCHEDULER)
    cache = server.start()
    assert isinstance(cache, SGLangTieredCache)
    server.check(Request([(hash_of(1), 8)]))
    idle_scheduler().flush_cache()
    assert len(cache) == 0


@on(NEWEST)
def test_install_and_the_plug_in_together_put_one_cache_in_place(server):
    from sglang.srt.plugins import load_plugins

    sglang.install()
    first = server.release.cache_module.MultiModalStaticCache
    load_plugins()
    assert server.release.cache_module.MultiModalStaticCache is first
    assert issubclass(first, SGLangTieredCache)


def test_one_line_tells_tiers_and_namespace(server, caplog):
    server.activate().start()
    (line,) = lines(caplog, logging.INFO)
    store = server.folder / "store"
    assert line.startswith(
        "the tiered cache is active in SGLang: hot 128.0KiB, host 512.0KiB, "
        f"disk 64.0MiB in {store}, namespace sglang/model@"
    )
    assert not lines(caplog, logging.ERROR)


@on(*WITH_PLUGINS)
def test_another_plug_in_that_takes_the_class_is_noticed(server, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    original = server.release.cache_module.MultiModalStaticCache

    class Theirs(original):
        pass

    sglang.register()
    HookRegistry.register(f"{released.CACHE}.MultiModalStaticCache", Theirs, HookType.REPLACE)
    HookRegistry.apply_hooks()
    (line,) = lines(caplog, logging.ERROR)
    assert "not active" in line
    assert "Theirs" in line


@on(*WITH_PLUGINS)
def test_a_hook_that_could_not_be_applied_is_noticed(server, caplog, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target.__func__

    def failing(cls, target, hooks):
        if target.endswith("flush_cache"):
            raise RuntimeError("as when it is wrapped twice")
        return apply(cls, target, hooks)

    monkeypatch.setattr(HookRegistry, "_apply_target", classmethod(failing))
    server.activate().start()
    (line,) = lines(caplog, logging.ERROR)
    assert "flush_cache cannot be watched" in line
    server.check(Request([(hash_of(1), 8)]))
    assert server.cache._below is None


@on(*WITH_PLUGINS)
def test_the_registry_is_as_it_was_after_it_applied_the_hooks(server):
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = HookRegistry.__dict__["apply_hooks"]
    server.activate()
    assert HookRegistry.__dict__["apply_hooks"] is before


@on(*WITH_PLUGINS)
def test_a_mistake_in_the_yaml_is_told_and_leaves_sglang_its_own_cache(server, caplog):
    server.configure(hots={"max_size": "1MiB"})
    server.activate()
    (line,) = lines(caplog, logging.ERROR)
    assert "there is no such key" in line
    assert "mmcache.yaml: hots" in line
    assert not isinstance(server.start(), SGLangTieredCache)


@on(*WITHOUT_PLUGINS)
def test_a_mistake_in_the_yaml_does_not_fail_the_import_of_sglang(server, caplog):
    server.configure(hots={"max_size": "1MiB"})
    server.activate()
    records = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert records
    assert all(isinstance(r.exc_info[1], ConfigError) for r in records)
    assert not isinstance(server.start(), SGLangTieredCache)


# Releases that are refused


@on(NEWEST)
@pytest.mark.parametrize("version", [releases.TOO_OLD, "0.5.3", "0.4.10.post2"])
def test_older_releases_are_refused_by_name(server, caplog, monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(
        UnsupportedEngineError, match=f"SGLang {version}: .* Upgrade SGLang to 0.5.6"
    ):
        sglang.install()
    sglang.register()
    (line,) = lines(caplog, logging.ERROR)
    assert f"SGLang {version}" in line
    assert not isinstance(server.start(), SGLangTieredCache)


def test_a_release_that_is_refused_has_another_interface():
    with released.loaded(releases.TOO_OLD) as old:
        assert not hasattr(old.cache_module, "MultiModalStaticCache")
        assert importlib.metadata.version("sglang") == releases.TOO_OLD


@on(NEWEST)
def test_a_newer_release_is_tried_with_a_warning(server, caplog, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0rc1")
    server.activate()
    assert isinstance(server.start(), SGLangTieredCache)
    (line,) = lines(caplog, logging.WARNING)
    assert "0.6.0rc1 is newer" in line


# What it costs, and how large it is


def test_a_model_without_images_pays_nothing(server):
    children = multiprocessing.active_children()
    arguments = server.release.arguments
    arguments.model_path = server.folder / "model"
    server.activate().start()
    assert server.cache._below is None
    assert not (server.folder / "store").exists()
    assert multiprocessing.active_children() == children
    idle_scheduler().flush_cache()
    for cache in (server.cache,):
        cache.weights_changed()
    assert server.cache._below is None
    assert not (server.folder / "store").exists()


@on(NEWEST)
@pytest.mark.parametrize(
    ("reserved", "asked", "hot"),
    [
        (100, None, 100),
        (100, "40B", 40),
        (100, "1MiB", 100),
        (0, "1MiB", KIB * KIB),
        (0, None, 0),
    ],
)
def test_the_hot_tier_takes_no_more_than_sglang_reserved(server, caplog, reserved, asked, hot):
    server.configure(hot=asked and {"max_size": asked})
    cache = server.activate().start(reserved)
    assert cache.max_size == hot
    told = lines(caplog, logging.WARNING) + lines(caplog, logging.ERROR)
    assert bool(told) == (asked == "1MiB" or hot == 0)


@on(NEWEST)
def test_without_bytes_sglang_works_without_a_cache(server, caplog):
    server.activate().start(0)
    server.check(Request([(hash_of(1), 8)]))
    server.check(Request([(hash_of(1), 8)]))
    assert server.encoder.runs == 2
    (line,) = lines(caplog, logging.ERROR)
    assert "SGLANG_VLM_CACHE_SIZE_MB" in line


# What is refused, and why


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tp_size": 2, "enable_pdmux": True}, "--enable-pdmux"),
        ({"tp_size": 2, "elastic_ep_backend": "mooncake"}, "--elastic-ep-backend"),
        ({"tp_size": 4, "attn_cp_size": 2}, "context parallelism"),
        ({"tp_size": 4, "enable_nsa_prefill_context_parallel": True}, "context parallelism"),
        ({"tp_size": 4, "encoder_only": True}, "this encoder server has tp_size=4"),
        ({"lora_paths": ["style=/nowhere/adapter"]}, "LoRA adapter '/nowhere/adapter'"),
    ],
)
def test_lower_tiers_are_refused_with_the_reason(server, caplog, arguments, reason):
    vars(server.release.arguments).update(arguments)
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    server.check(Request([(hash_of(1), 8)]))
    assert server.encoder.runs == 1  # the hot tier works
    assert server.cache._below is None
    assert not (server.folder / "store").exists()
    (line,) = lines(caplog, logging.ERROR)
    assert "tiers below the hot one are off" in line
    assert reason in line


@on(*versions())
def test_images_of_all_replicas_are_shared_in_old_releases_only(server, caplog):
    vars(server.release.arguments).update(
        tp_size=4, enable_dp_attention=True, mm_enable_dp_encoder=True
    )
    server.release.coordinator = types.SimpleNamespace(ranks=[3], device_group=None)
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    refused = "--mm-enable-dp-encoder" in "".join(lines(caplog, logging.ERROR))
    assert refused == (server.release.number < (0, 5, 9))
    assert (server.cache._below is None) == refused


@on(NEWEST)
@pytest.mark.parametrize("trouble", ["unset", "changed", "gone"])
def test_ranks_that_cannot_be_found_leave_the_hot_tier(server, caplog, trouble, monkeypatch):
    server.release.arguments.tp_size = 2
    if trouble == "changed":
        server.release.coordinator = types.SimpleNamespace(members=[0, 1])
    if trouble == "gone":
        monkeypatch.setattr(server.release, "defines", lambda module, name: False)
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    server.check(Request([(hash_of(1), 8)]))
    assert server.encoder.runs == 1
    (line,) = lines(caplog, logging.ERROR)
    assert "the ranks could not be brought together" in line
    assert "SGLang" in line
    assert server.cache.stats().faults == {"ranks_apart": 1}


@on_every_release
@pytest.mark.parametrize("with_replicas", [False, True])
def test_every_release_says_which_ranks_run_a_batch(release, with_replicas):
    """The rank of a replica that is alone needs no agreement, and is found to be alone."""
    release.coordinator = types.SimpleNamespace(ranks=[5], device_group=None)
    arguments = types.SimpleNamespace(enable_dp_attention=with_replicas)
    assert exchange_of_ranks(arguments) is None


@on(NEWEST)
def test_a_server_that_is_refused_lower_tiers_publishes_its_metrics(server):
    vars(server.release.arguments).update(tp_size=2, enable_pdmux=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-test-") as folder:
        server.configure(metrics={"folder": folder})
        server.activate().start()
        server.check(Request([(hash_of(1), 8)]))
        assert [file.suffix for file in Path(folder).iterdir()] == [".prom"]
        server.stop()


@on(NEWEST)
def test_random_hashes_are_refused(server, caplog, monkeypatch):
    monkeypatch.setenv("SGLANG_MM_SKIP_COMPUTE_HASH", "1")
    server.activate().start()
    assert "SGLANG_MM_SKIP_COMPUTE_HASH" in lines(caplog, logging.ERROR)[0]
    assert server.cache.get_single(hash_of(1)) is None
    assert server.cache._below is None


@on(NEWEST)
def test_a_model_that_cannot_be_identified_gets_no_disk(server, caplog):
    server.release.arguments.model_path = "somebody/something-that-is-not-here"
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    assert server.cache._below.disk is None
    assert "write a namespace" in lines(caplog, logging.ERROR)[0]


@on(NEWEST)
def test_a_server_that_cannot_be_asked_gets_the_hot_tier_alone(server, caplog):
    server.release.arguments.lora_paths = [object()]
    server.release.arguments.model_path = None
    server.release.arguments.tp_size = "two"
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    assert server.cache._below is None
    assert "tiers below the hot one are off" in lines(caplog, logging.ERROR)[-1]


@on(NEWEST)
def test_an_unexpected_error_in_the_plan_leaves_the_hot_tier(server, caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError("cannot be asked")

    monkeypatch.setattr(activation, "plan_for", broken)
    server.activate().start()
    server.check(Request([(hash_of(1), 8)]))
    server.check(Request([(hash_of(1), 8)]))
    assert server.encoder.runs == 1
    assert "cannot be asked" in lines(caplog, logging.ERROR)[-1]


@on(NEWEST)
def test_tiers_that_cannot_be_built_leave_the_hot_tier(server, caplog, monkeypatch):
    def broken(*_):
        raise OSError("no memory for the arena")

    cache = server.activate().start()
    monkeypatch.setattr(cache, "_open_lower_tiers", broken)
    server.check(Request([(hash_of(1), 8)]))
    server.check(Request([(hash_of(1), 8)]))
    assert server.encoder.runs == 1
    assert "no memory for the arena" in lines(caplog, logging.ERROR)[-1]


# The same answers as SGLang's own cache


def own_and_ours(server):
    own = server.release.cache_module.MultiModalStaticCache
    server.configure(host=None, disk=None, namespace=None)
    server.activate()
    return own, server.release.cache_module.MultiModalStaticCache


def test_with_the_hot_tier_alone_it_answers_like_sglangs_own(server):
    own_class, our_class = own_and_ours(server)
    own, ours = own_class(40_000), our_class(40_000)
    result = getattr(server.release.cache_module, "EmbeddingResult", None)
    generator = torch.Generator().manual_seed(7)
    batch = torch.arange(8_000.0).reshape(80, 100)
    for step in range(3_000):
        kind, key, rows = (int(torch.randint(n, (1,), generator=generator)) for n in (6, 60, 50))
        if kind <= 2:
            value = batch[rows : rows + 20] if kind else torch.zeros(rows * 7 + 1, 32)
            value = value.clone() if server.release.number < (0, 5, 22) else value
            value = value if result is None else result(embedding=value)
            if _would_empty(own, value):
                continue
            answers = [cache.set(key, value) for cache in (own, ours)]
        elif kind == 3:
            answers = [cache.get([key, key + 1]) for cache in (own, ours)]
        elif kind == 4:
            answers = [cache.free(key, None) for cache in (own, ours)]
        else:
            answers = [cache.has(key) for cache in (own, ours)]
        assert answers[0] == answers[1], step
        for attribute in ("current_size", "max_size"):
            assert getattr(own, attribute) == getattr(ours, attribute)
        assert list(own.mm_cache) == list(ours.mm_cache)
        assert (len(own), own.available_size()) == (len(ours), ours.available_size())


def _would_empty(own, value):
    """Before 0.5.23 SGLang empties its cache for an entry that is too large even then."""
    tensor = getattr(value, "embedding", value)
    return tensor.element_size() * tensor.numel() > own.max_size


def test_the_same_object_comes_back(server):
    cache = server.activate().start()
    tensor = torch.rand(4, 8)
    raw = server.release.number < (0, 5, 8)
    stored = tensor if raw else server.release.cache_module.EmbeddingResult(embedding=tensor)
    key = type(cache).combine_hashes([hash_of(1)])
    assert cache.set(key, stored)
    assert cache.get([hash_of(1)]) is stored
