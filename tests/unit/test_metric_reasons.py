"""Every label that a metric can have is made by something that happens.

Owns: one situation for each reason and outcome, played on a fake worker, and its count in the
exported metrics; that hits and misses are all look-ups. Does not own: names and formats
(test_prometheus.py), or what else happens in these situations.
"""

import dataclasses

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.disk import causes, protocol
from tiered_mmcache.entries.extras import encode_extras
from tiered_mmcache.host.transfer import HostCopyEngine
from tiered_mmcache.metrics import families as metric_families
from tiered_mmcache.metrics.families import FAMILIES
from tiered_mmcache.metrics.openmetrics import openmetrics_text
from tiered_mmcache.testing import ManualCopyEngine
from tiered_mmcache.tiers.read_speed import ReadSpeed

PAGE = 4096
SIZE = 1000


@dataclasses.dataclass(kw_only=True)
class Unregistered(EmbeddingResult):
    pass


@dataclasses.dataclass(kw_only=True)
class WithNote(EmbeddingResult):
    note: object


class Marked(torch.Tensor):
    pass


def result(size=SIZE, result_class=EmbeddingResult, **fields):
    return result_class(embedding=torch.ones(size, dtype=torch.uint8), **fields)


class Broken(HostCopyEngine):
    def promote(self, *arguments):
        raise RuntimeError("out of device memory")


class Stage:
    """Caches on fake workers, made small: two entries hot, two in host memory."""

    def __init__(self, folder, fake_client, monkeypatch):
        self.folder = folder
        self.fake_client = fake_client
        self.monkeypatch = monkeypatch
        self.caches = []

    def make(self, *, host=2, disk=True, buffer=16, write="on_evict", engine=None, **hot):
        sections = {"namespace": "unit/reasons", "hot": {"max_size": 2 * SIZE, **hot}}
        if host:
            sections["host"] = {"max_size": host * PAGE, "prefetch": PAGE}
        if disk:
            sections["disk"] = {
                "path": str(self.folder / "store"),
                "max_size": "1MiB",
                "write_buffer": buffer * PAGE,
                "write": write,
            }
        cache = TieredMultimodalCache(
            config=CacheConfig.from_mapping(sections), engine=engine, make_client=self.fake_client
        )
        self.caches.append(cache)
        return cache

    def filled(self, count=8, **settings):
        cache = self.make(**settings)
        for number in range(count):
            cache.set(number, result())
        return cache

    def restarted(self, size=SIZE, *, engine=None, buffer=16, host=2, **changes):
        """A second server on the store of a first, with the header of entry 0 changed."""
        first = self.make(host=0, max_size=size)
        first.set(0, result(size))
        first.set(1, result(size))
        first.drain()
        held = first._below.disk.client.entries
        ((key, (full_key, header, data)),) = held.items()
        second = self.make(engine=engine, buffer=buffer, host=host, max_size=size)
        changed = dataclasses.replace(header, **changes)
        second._below.disk.client.entries = {key: (full_key, changed, data)}
        return second

    def close(self):
        for cache in self.caches:
            if cache._below is not None and cache._below.disk is not None:
                client = cache._below.disk.client
                client.paused, client.is_ready = False, True
                client.speak_again()
            cache.close()


@pytest.fixture
def stage(tmp_path, fake_client, monkeypatch):
    made = Stage(tmp_path, fake_client, monkeypatch)
    yield made
    made.close()


def exported(cache, name):
    """The values of a metric that are not 0, by label."""
    (family,) = [family for family in FAMILIES if family.name == name]
    return {label: value for label, value in family.values(cache.stats()).items() if value}


# Misses


def never_seen(stage):
    return stage.make(), 7


def evicted(stage):
    return stage.filled(disk=False), 0


def freed(stage):
    cache = stage.filled()
    assert cache.free(0)
    return cache, 0


def cleared(stage):
    cache = stage.filled()
    cache.clear()
    return cache, 7


def refused(stage):
    cache = stage.make()
    assert not cache.set(0, result(3 * SIZE))
    return cache, 0


def capture(stage):
    engine = ManualCopyEngine()
    cache = stage.filled(count=3, engine=engine)
    engine.captures = True
    return cache, 0


def disk_down(stage):
    cache = stage.make()
    cache._below.disk.client.is_ready = False
    return cache, 0


def disk_fault(stage):
    cache = stage.make()
    failed = protocol.Failed(request=1, cause="digest", problem="as told")
    cache._below.disk.client.look_up = lambda **question: failed
    return cache, 0


def read_timeout(stage):
    cache = stage.make()
    cache._below.disk.client.silent = True
    return cache, 0


def no_room(stage):
    return stage.restarted(3 * PAGE, host=1, buffer=1), 0


def slower_than_encoding(stage):
    stage.monkeypatch.setattr(ReadSpeed, "decline", lambda *arguments: True)
    return stage.restarted(), 0


def internal(stage):
    cache = stage.make()

    def find(key):
        raise KeyError(key)

    cache._below.promoter.find = find
    return cache, 0


def unknown_class(stage):
    return stage.restarted(class_tag="unit.nobody-knows"), 0


def unknown_dtype(stage):
    return stage.restarted(dtype="float3"), 0


def changed_class(stage):
    return stage.restarted(extras=encode_extras({"gone": 1})), 0


def no_device(stage):
    return stage.restarted(device_type="hpu"), 0


def promotion(stage):
    return stage.restarted(engine=Broken()), 0


MISSES = [
    never_seen,
    evicted,
    freed,
    cleared,
    refused,
    capture,
    disk_down,
    disk_fault,
    no_room,
    slower_than_encoding,
    internal,
    read_timeout,
    unknown_class,
    unknown_dtype,
    changed_class,
    no_device,
    promotion,
]


@pytest.mark.parametrize("situation", MISSES, ids=lambda situation: situation.__name__)
def test_every_reason_of_a_miss(stage, situation):
    cache, key = situation(stage)
    assert cache.get_single(key) is None
    reason = situation.__name__
    assert exported(cache, "mmcache_misses") == {reason: 1}
    assert cache.stats().misses == 1
    if reason in metric_families.FAULTY_MISSES:
        assert cache.stats().faults == {reason: 1}
    assert sum(cache.stats().look_ups["miss"].counts) == 1


def test_no_other_reason_of_a_miss_is_known():
    names = [situation.__name__ for situation in MISSES]
    names += metric_families.GROUP_MISSES  # in test_agreement.py
    names.append("inconsistent_rows")  # in tests/engines/test_results.py
    assert sorted(names) == sorted(metric_families.MISS_REASONS)


def test_every_cause_of_a_fault_is_exported_from_the_start():
    """A rate over a series that begins at 1 is 0: an alert on the first fault would stay silent."""
    raised = {cause for cause, _ in causes._CAUSE_OF_ERRNO.values()}
    raised |= {cause for _, cause in causes._CAUSE_OF_LMDB_ERROR}
    assert raised <= set(metric_families.FAULT_CAUSES)
    with TieredMultimodalCache(SIZE) as cache:
        text = openmetrics_text(cache).decode()
    for cause in metric_families.FAULT_CAUSES:
        assert f'mmcache_faults_total{{namespace="",cache="0",cause="{cause}"}} 0.0' in text


def test_a_hot_tier_alone_explains_its_misses_too():
    cache = TieredMultimodalCache(SIZE)
    for key in (1, 2):
        cache.set(key, result())
    cache.set(3, result(2 * SIZE))
    for key in (1, 3, 4):
        assert cache.get_single(key) is None
    assert exported(cache, "mmcache_misses") == {"evicted": 1, "refused": 1, "never_seen": 1}


def test_what_is_set_again_is_not_freed_any_more(stage):
    cache = stage.make(disk=False, host=1)
    cache.set(0, result())
    cache.free(0)
    for number in range(8):
        cache.set(number, result())
    assert cache.get_single(0) is None
    assert exported(cache, "mmcache_misses") == {"evicted": 1}


# Drops, refusals, what stays in memory


def drop_capture(stage):
    engine = ManualCopyEngine()
    cache = stage.make(engine=engine)
    engine.captures = True
    for number in range(3):
        cache.set(number, result())
    return cache


def drop_no_disk_tier(stage):
    return stage.filled(disk=False)


def drop_no_room(stage):
    return stage.filled(disk=False, host=1, max_size=2 * PAGE, count=0), result(2 * PAGE)


def drop_not_hit_again(stage):
    return stage.filled(write="on_second_hit")


def drop_write_buffer_full(stage):
    cache = stage.make(buffer=1)
    cache._below.disk.client.paused = True
    for number in range(8):
        cache.set(number, result())
    return cache


DROPS = [
    drop_capture,
    drop_no_disk_tier,
    drop_no_room,
    drop_not_hit_again,
    drop_write_buffer_full,
]


@pytest.mark.parametrize("situation", DROPS, ids=lambda situation: situation.__name__)
def test_every_reason_of_a_drop(stage, situation):
    cache = situation(stage)
    if isinstance(cache, tuple):
        cache, large = cache
        cache.set(0, large)
        cache.set(1, large)
    assert list(exported(cache, "mmcache_drops")) == [situation.__name__.removeprefix("drop_")]


def test_no_other_reason_of_a_drop_is_known():
    names = [situation.__name__.removeprefix("drop_") for situation in DROPS]
    assert sorted(names) == sorted(metric_families.DROP_REASONS)


def test_every_reason_of_a_refusal(stage):
    cache = stage.make(disk=False, host=1, oversize="spill")
    assert not cache.set(0, result(2 * PAGE))
    closed = stage.make()
    assert not closed.set(0, result(2 * PAGE))
    closed.close()
    assert not closed.set(0, result())
    made = {**exported(cache, "mmcache_refusals"), **exported(closed, "mmcache_refusals")}
    assert made == {"no_room_below": 1, "larger_than_hot_tier": 1, "closed": 1}
    assert sorted(made) == sorted(metric_families.REFUSAL_REASONS)


def test_every_reason_to_stay_in_memory(stage):
    cache = stage.make(host=1)
    cache.set(0, result(result_class=WithNote, note=object()))
    cache.set(1, EmbeddingResult(embedding=torch.ones(9).as_subclass(Marked)))
    cache.set(2, result(result_class=Unregistered))
    for number in range(3, 8):
        cache.set(number, result())
    made = exported(cache, "mmcache_memory_only")
    assert sorted(made) == sorted(metric_families.MEMORY_ONLY_REASONS)


def test_every_outcome_of_a_prefetch(stage):
    cache = stage.filled(count=12)
    cache.drain()
    client = cache._below.disk.client
    assert cache.prefetch([0, 99, 1]) == 2  # there is room for one, and 99 is not known
    cache.drain()
    assert cache.get_single(0) is not None
    cache.prefetch([2])
    cache.drain()
    cache.free(2)
    client.is_ready = False
    cache.prefetch([3])
    made = exported(cache, "mmcache_prefetches")
    assert made == {"asked": 5, "absent": 1, "refused": 1, "used": 1, "wasted": 1, "failed": 1}
    assert sorted(made) == sorted(metric_families.PREFETCH_OUTCOMES)


# Copies ahead, prefetches, bytes


def test_what_becomes_of_copies_ahead_of_need(stage):
    cache = stage.make(clean_ahead=SIZE)
    for number in range(3):
        cache.set(number, result())
    assert exported(cache, "mmcache_clean_ahead_copies") == {"copied": 2, "used": 1}
    assert cache.free(1)
    made = exported(cache, "mmcache_clean_ahead_copies")
    assert made == {"copied": 2, "used": 1, "wasted": 1}
    assert sorted(made) == sorted(metric_families.CLEAN_AHEAD_OUTCOMES)


def test_bytes_are_counted_each_way(stage):
    cache = stage.filled(count=3, host=0)
    cache.drain()
    assert exported(cache, "mmcache_moved_bytes") == {
        "device_to_host": SIZE,
        "host_to_disk": SIZE,
    }
    assert cache.get_single(0) is not None
    made = exported(cache, "mmcache_moved_bytes")
    assert made["disk_to_host"] == made["host_to_device"] == SIZE
    assert sorted(made) == sorted(metric_families.WAYS)
    assert exported(cache, "mmcache_hits") == {"disk": 1}


def test_look_ups_are_timed_by_what_they_come_to(stage):
    cache = stage.filled(count=3, disk=False)
    assert cache.get_single(0) is not None  # host
    assert cache.get_single(0) is not None  # hot: not timed
    assert cache.get_single(9) is None
    counts = {name: sum(of.counts) for name, of in cache.stats().look_ups.items()}
    assert counts == {"host": 1, "disk": 0, "miss": 1}


def test_ages_and_fills(stage):
    cache = stage.filled(count=4, disk=False)
    cache._history._clock = lambda: 10.0**9
    cache._below.host._clock = lambda: 10.0**9
    ages = exported(cache, "mmcache_coldest_age_seconds")
    assert set(ages) == {"hot", "host"}
    assert all(age > 10.0**6 for age in ages.values())
    assert exported(cache, "mmcache_used_bytes") == {"hot": 2 * SIZE, "host": 2 * PAGE}
    assert exported(cache, "mmcache_budget_bytes") == {"hot": 2 * SIZE, "host": 2 * PAGE}
    assert exported(cache, "mmcache_admissions") == {"": 4}
