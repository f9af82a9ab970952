"""The tiers below the hot one, over a worker that the test plays: order, faults, room.

Owns: what happens between memory and the worker's answers, step by step: frees and clears that
race with writes, back-pressure, failing copies, the end. Does not own: real workers
(tests/integration, tests/faults) or random sequences (tests/model).
"""

import dataclasses
import gc

import pytest
import torch

from tiered_mmcache import (
    CacheConfig,
    EmbeddingResult,
    Tier,
    TieredMultimodalCache,
    tiered_cache,
)
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.tier import DiskCopy
from tiered_mmcache.host.transfer import HostCopyEngine
from tiered_mmcache.testing import ManualCopyEngine, audit, audit_idle
from tiered_mmcache.tiers import spill as spill_module

SIZE = 1000
PAGE = 4096


@dataclasses.dataclass(kw_only=True)
class Unregistered(EmbeddingResult):
    pass


def config(
    tmp_path,
    *,
    hot=2 * SIZE,
    host=2,
    buffer=16,
    write="on_evict",
    page_locked="auto",
    demote_wait=0,
    **changes,
):
    sections = {
        "namespace": "unit/lower-tiers",
        "hot": {"max_size": hot, **changes},
        "disk": {
            "path": str(tmp_path / "store"),
            "max_size": "1MiB",
            "write_buffer": buffer * PAGE,
            "write": write,
            "close_timeout": "1s",
        },
    }
    if host:
        sections["host"] = {
            "max_size": host * PAGE,
            "page_locked": page_locked,
            "demote_wait": demote_wait,
        }
    return CacheConfig.from_mapping(sections)


@pytest.fixture(autouse=True)
def _no_pause_after_a_failed_change(monkeypatch):
    monkeypatch.setattr(spill_module, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def make(tmp_path, fake_client):
    """Makes a cache on a fake worker: (cache, client). Both are audited at the end."""
    caches = []

    def make_cache(engine=None, **changes):
        cache = TieredMultimodalCache(
            config=config(tmp_path, **changes), engine=engine, make_client=fake_client
        )
        caches.append(cache)
        return cache, cache._below.disk.client

    yield make_cache
    for cache in caches:
        if cache._closed:
            continue
        client = cache._below.disk.client
        client.paused, client.fails, client.is_ready = False, {}, True
        client.speak_again()
        settle(cache)
        cache.close()


def settle(cache):
    audit(cache)
    assert cache.drain()
    audit_idle(cache)


def result(number, size=SIZE, result_class=EmbeddingResult):
    return result_class(embedding=torch.full((size,), number, dtype=torch.uint8))


def fill(cache, numbers):
    for number in numbers:
        assert cache.set(number, result(number))
        audit(cache)


def is_right(found, number, engine=None):
    if engine is not None:
        engine.synchronize()  # as a consumer on the caller's stream
    return found is not None and found.embedding.eq(number).all().item()


# Frees and clears that race with the worker


def test_a_freed_entry_is_a_miss_although_the_worker_would_still_find_it(make):
    cache, client = make()
    fill(cache, range(8))
    settle(cache)
    assert cache.locate(0) is Tier.DISK
    client.paused = True
    stored = dict(client.entries)
    assert cache.free(0)
    assert client.entries == stored  # the worker would answer FOUND
    assert cache.get_single(0) is None
    assert not cache.has(0)
    assert not cache.free(0)
    assert client.entries == stored
    client.paused = False
    settle(cache)
    assert len(client.entries) == len(stored) - 1
    assert cache.get_single(0) is None


def test_a_freed_entry_is_a_miss_although_its_write_is_under_way(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(3))
    assert len(client.asked("put")) == 1
    assert cache.locate(0) is Tier.HOST  # readable while it is written
    assert cache.free(0)
    audit(cache)
    assert cache.get_single(0) is None
    client.answer(until="put")
    audit(cache)
    assert len(client.entries) == 1  # written, and its deletion not made yet
    assert cache.get_single(0) is None
    client.paused = False
    settle(cache)
    assert client.entries == {}
    assert cache.get_single(0) is None


def test_an_entry_set_anew_is_the_new_one_in_every_order(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(3))  # 0 is being written
    assert cache.set(0, result(100))
    fill(cache, range(3, 6))
    assert cache.free(0)
    assert cache.set(0, result(200))
    fill(cache, range(6, 9))
    assert is_right(cache.get_single(0), 200)
    client.paused = False
    settle(cache)
    fill(cache, range(9, 12))
    settle(cache)
    assert cache.locate(0) is Tier.DISK
    assert is_right(cache.get_single(0), 200)


def test_a_failed_deletion_is_made_later(make):
    cache, client = make(host=0)
    fill(cache, range(4))
    settle(cache)
    client.fails = {"delete": "no_space"}
    assert cache.free(0)
    cache.has("poll")
    assert len(client.entries) == 2
    assert cache.get_single(0) is None
    client.fails = {}
    settle(cache)
    assert len(client.entries) == 1
    assert len(client.asked("delete")) >= 2


def test_what_is_freed_before_the_generation_is_known_is_deleted_when_it_is(make):
    cache, client = make(host=0)
    fill(cache, range(4))
    settle(cache)
    generation = client.generation
    client.die()
    client.generation = None
    assert cache.free(0) is False  # nobody can say; gone it is
    assert cache.get_single(0) is None
    assert cache.get_single(1) is None
    client.generation = generation
    client.start()
    assert cache.get_single(0) is None
    settle(cache)
    assert len(client.entries) == 1
    assert is_right(cache.get_single(1), 1)


def test_too_many_deletions_become_a_new_generation(make, monkeypatch):
    monkeypatch.setattr(spill_module, "_MOST_DELETIONS", 3)
    cache, client = make(host=0)
    fill(cache, range(8))
    settle(cache)
    generation = client.generation
    client.paused = True
    for number in range(4):
        assert cache.free(number)
        audit(cache)
    assert client.generation != generation
    assert all(cache.get_single(number) is None for number in range(4))
    client.paused = False
    settle(cache)
    assert client.asked("clear") == [client.generation]


def test_only_deletions_that_the_worker_has_not_got_are_sent(make):
    cache, client = make()
    client.paused = True
    fill(cache, range(40))  # none was looked for first: each voids what the store may hold
    assert len(client.asked("delete")) == 40
    client.fails = {"delete": "disk"}
    client.paused = False
    cache.has(0)
    assert len(client.asked("delete")) == 40 + 40
    client.fails = {}
    settle(cache)
    assert len(client.asked("delete")) == 40 + 40


def test_what_is_in_flight_is_known_without_a_look_at_every_entry(make, monkeypatch):
    cache, _ = make(host=8)
    fill(cache, range(8))

    def walk():
        raise AssertionError("walked over all entries")

    with monkeypatch.context() as patch:
        patch.setattr(cache._below.host, "every_entry", walk)
        assert cache.drain()
        assert not cache._below.in_flight()


def test_a_clear_that_fails_is_made_later(make):
    cache, client = make()
    fill(cache, range(8))
    settle(cache)
    client.fails = {"clear": "no_space"}
    cache._below.disk.read_timeout_s = 0.0
    cache.clear()
    assert cache._below.disk.spill.clear_pending
    assert all(cache.get_single(number) is None for number in range(8))
    client.fails = {}
    settle(cache)
    assert len(set(client.asked("clear"))) == 1
    assert len(client.asked("clear")) >= 2


def test_a_clear_voids_what_is_queued_and_what_is_being_written(make):
    engine = ManualCopyEngine()
    cache, client = make(engine, host=0)
    client.paused = True
    cache._below.disk.read_timeout_s = 0.0
    fill(cache, range(6))
    cache.clear("next")
    audit(cache)
    client.paused = False
    settle(cache)
    assert all(cache.get_single(number) is None for number in range(6))
    fill(cache, range(20, 26))
    settle(cache)
    assert all(is_right(cache.get_single(number), number, engine) for number in range(20, 26))


def test_a_key_that_only_looks_like_an_absent_one_is_still_deleted(make):
    engine = FailingEngine()
    cache, _ = make(engine, host=0)
    combined = cache.combine_hashes([1, 2])
    assert cache.set(combined, result(1))
    fill(cache, range(10, 13))
    settle(cache)
    assert cache.get_single(int(combined)) is None  # an equal number, but another key on disk
    assert cache.set(combined, result(2))
    engine.demote_error = RuntimeError("out of memory")
    fill(cache, range(13, 16))  # the new one is lost
    settle(cache)
    assert cache.get_single(combined) is None  # rather than what it was set to before
    engine.demote_error = None


# Failing writes


def test_a_resident_entry_whose_write_failed_stays_in_host_memory(make):
    cache, client = make(write="through")
    client.fails = {"put": "no_space"}
    fill(cache, range(2))
    settle(cache)
    assert client.entries == {}
    assert cache.stats().faults == {"no_space": 6}  # two entries, three attempts each
    assert not cache.stats().drops
    cache.mm_cache.clear()
    cache.current_size = 0
    assert is_right(cache.get_single(0), 0)


def test_an_entry_of_the_write_buffer_whose_write_failed_is_dropped_and_counted(make):
    cache, client = make(host=0)
    client.fails = {"put": "no_space"}
    fill(cache, range(3))
    settle(cache)
    assert cache.stats().drops == {"no_space": 1}
    assert cache.stats().faults == {"no_space": 3}  # one for each attempt
    assert cache.get_single(0) is None
    assert client.asked("put") != []


def test_a_write_that_nobody_wants_any_more_may_fail_unnoticed(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(3))
    assert cache.free(0)
    client.die()
    client.start()
    client.paused = False
    settle(cache)
    assert cache.stats().faults == {"died": 1}
    assert not cache.stats().drops


def test_an_entry_that_kills_its_worker_is_given_up(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(3))
    for attempt in range(1, 4):
        assert len(client.asked("put")) == attempt
        client.die()
        client.start()
        cache.has("poll")
        audit(cache)
    client.paused = False
    settle(cache)
    assert len(client.asked("put")) == 3
    assert cache.stats().drops == {"worker_died": 1}
    assert cache.get_single(0) is None


def test_an_answer_of_another_kind_is_a_failed_write(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(3))
    for _ in range(3):
        client.answer_oddly("put")
        cache.has("poll")
        audit(cache)
    assert cache.stats().drops == {"protocol": 1}


# Room


def test_when_the_write_buffer_is_full_victims_are_dropped_and_nobody_waits(make):
    cache, client = make(host=2, buffer=3)
    client.paused = True
    fill(cache, range(12))
    assert client.waits_s == []
    stats = cache.stats()
    assert stats.drops == {"write_buffer_full": 12 - 2 - 2 - 3}
    assert stats.host["write_buffer_entries"] == 3
    client.paused = False
    settle(cache)
    assert len(client.entries) == 3
    assert all(is_right(cache.get_single(number), number) for number in (0, 1, 2, 8, 9, 10, 11))


def test_without_host_memory_a_full_write_buffer_drops_the_newest_victim(make):
    cache, client = make(host=0, buffer=3)
    client.paused = True
    fill(cache, range(8))
    assert cache.stats().drops == {"no_room": 3}
    client.paused = False
    settle(cache)
    assert cache.get_single(4) is None
    assert is_right(cache.get_single(2), 2)


def test_without_room_to_read_into_it_is_a_miss(make):
    cache, client = make(host=0, buffer=3)
    fill(cache, range(3))
    settle(cache)
    client.paused = True
    fill(cache, range(3, 6))
    assert cache.stats().host["write_buffer_entries"] == 3
    assert cache.get_single(0) is None
    assert cache.stats().misses_by_reason == {"no_room": 1}
    client.paused = False
    settle(cache)
    assert is_right(cache.get_single(0), 0)


def test_entries_that_the_worker_reads_are_no_victims(make):
    cache, client = make(host=2, buffer=1, write="through")
    client.paused = True
    fill(cache, range(6))  # two copies in host memory and one in the buffer, all being written
    below = cache._below
    assert {entry.disk_copy for entry in below.host.every_entry()} == {DiskCopy.WRITING}
    assert len(below.host.resident) == 2
    assert cache.stats().drops["no_room"] >= 1
    client.paused = False
    settle(cache)
    assert is_right(cache.get_single(0), 0)


def test_at_most_so_many_victims_are_looked_at(make):
    cache, _ = make(host=70, hot=SIZE)
    fill(cache, range(71))
    pinned = list(cache._below.host.resident.values())
    assert len(pinned) == 70
    for entry in pinned[:64]:
        entry.pinned = True
    fill(cache, [100])  # 70 goes to the write buffer: host memory has no victim at hand
    assert cache._below.host.resident.keys() == {entry.key for entry in pinned}
    pinned[63].pinned = False
    fill(cache, [101])
    assert pinned[63].key not in cache._below.host.resident
    for entry in pinned:
        entry.pinned = False


def test_a_policy_that_wants_a_second_hit_keeps_the_first_eviction_off_the_disk(make):
    cache, client = make(host=0, write="on_second_hit")
    fill(cache, range(4))
    settle(cache)
    assert client.asked("put") == []
    assert cache.stats().drops == {"not_hit_again": 2}
    fill(cache, range(4))
    settle(cache)
    assert len(client.asked("put")) == 2


# Results that cannot leave, and copies that fail


class FailingEngine(HostCopyEngine):
    demote_error = None
    promote_error = None

    def demote(self, source, target):
        if self.demote_error is not None:
            raise self.demote_error
        return super().demote(source, target)

    def promote(self, source, target, after):
        if self.promote_error is not None:
            raise self.promote_error
        return super().promote(source, target, after)


def test_a_tensor_that_is_more_than_its_bytes_stays_in_the_hot_tier(make):
    cache, _ = make()
    sparse = EmbeddingResult(embedding=torch.eye(4).to_sparse())
    assert cache.set("sparse", sparse)
    assert cache.get_single("sparse") is sparse
    fill(cache, range(4))
    assert cache.stats().memory_only == {"tensor_kind": 1}
    assert cache.get_single("sparse") is None


def test_an_unregistered_class_leaves_host_memory_for_nowhere(make):
    cache, client = make()
    assert cache.set("kept", result(7, result_class=Unregistered))
    fill(cache, range(2))
    assert cache.locate("kept") is Tier.HOST
    fill(cache, range(10, 20))
    settle(cache)
    assert cache.get_single("kept") is None
    assert cache.stats().memory_only == {"key_or_class": 1}
    assert len(client.entries) == 8


def test_an_unregistered_class_too_large_for_host_memory_has_no_other_way(make):
    cache, _ = make(host=1, hot=PAGE + SIZE)
    assert cache.set("large", result(7, PAGE + 1, result_class=Unregistered))
    fill(cache, range(2))
    assert cache.get_single("large") is None
    assert cache.stats().drops == {"no_room": 1}


@pytest.mark.parametrize(
    "error", [RuntimeError("lost"), MemoryError(), OSError("none"), AssertionError("not compiled")]
)
def test_a_demotion_that_fails_loses_the_entry_and_nothing_else(make, error):
    engine = FailingEngine()
    cache, _ = make(engine)
    engine.demote_error = error
    fill(cache, range(3))
    assert cache._below.arena.used_bytes == 0
    assert cache.stats().faults == {"demotion": 1}
    engine.demote_error = None
    assert cache.get_single(0) is None
    fill(cache, range(3, 6))
    assert is_right(cache.get_single(2), 2)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_promotion_without_device_memory_is_a_miss_and_the_copy_stays(make, tier):
    engine = FailingEngine()
    cache, client = make(engine)
    fill(cache, range(8))
    settle(cache)
    key = next(number for number in range(8) if cache.locate(number) is tier)
    engine.promote_error = RuntimeError("CUDA out of memory")
    assert cache.get_single(key) is None
    # A read is awaited all the same: until it ends, the worker writes into the arena.
    assert client.reads_ended == (1 if tier is Tier.DISK else 0)
    audit(cache)
    assert cache.stats().misses_by_reason == cache.stats().faults == {"promotion": 1}
    assert key not in cache.mm_cache
    engine.promote_error = None
    settle(cache)
    assert is_right(cache.get_single(key), key)


def change_header(client, **changes):
    """Let every stored entry say something else about itself."""
    for store_key, (full_key, header, data) in client.entries.items():
        client.entries[store_key] = (full_key, dataclasses.replace(header, **changes), data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"class_tag": "test.never-registered"}, "unknown_class"),
        ({"device_type": "nosuchdevice"}, "no_device"),
        ({"dtype": "nosuchdtype"}, "unknown_dtype"),
        ({"extras": b"\x81\xa4rows\x05"}, "changed_class"),
        ({"extras": b"\xc1"}, "malformed"),
    ],
)
def test_an_entry_that_cannot_be_put_together_here_is_a_miss(make, changes, reason):
    cache, client = make(host=0)
    fill(cache, range(4))
    settle(cache)
    cache._below.disk._present.clear()
    change_header(client, **changes)
    assert cache.get_single(0) is None
    audit(cache)
    assert cache.stats().misses_by_reason == cache.stats().faults == {reason: 1}
    settle(cache)
    assert cache._below.arena.used_bytes == 0


def test_a_look_up_goes_to_the_device_that_the_configuration_names(make):
    cache, _ = make(device="cpu")
    fill(cache, range(4))
    assert cache.get_single(0).embedding.device == torch.device("cpu")


class LateEngine(HostCopyEngine):
    """Promotions whose end is seen only when a test says so."""

    def __init__(self):
        self.ended = True

    def promote(self, source, target, after):
        super().promote(source, target, after)
        return self

    def done(self):
        return self.ended

    def wait(self):
        self.ended = True


def test_a_slot_is_not_used_again_before_its_last_copy_has_ended(make):
    engine = LateEngine()
    cache, _ = make(engine)
    fill(cache, range(4))
    engine.ended = False
    assert is_right(cache.get_single(0), 0)
    entry = cache._below.host.find(0)
    assert entry.leaving
    fill(cache, range(4, 8))  # audited: nobody else gets these pages
    assert cache._below.host.find(0) is None
    assert entry in cache._below.host.retired
    engine.ended = True
    settle(cache)
    assert entry not in cache._below.host.retired
    assert all(is_right(cache.get_single(number), number) for number in range(8))


def test_drain_waits_for_the_copies_that_leave(make):
    engine = LateEngine()
    cache, _ = make(engine)
    fill(cache, range(4))
    engine.ended = False
    assert is_right(cache.get_single(0), 0)
    fill(cache, range(4, 8))
    settle(cache)
    assert engine.ended


# Silence


def test_an_unanswered_look_up_is_a_miss_and_the_next_ones_do_not_ask(make):
    cache, client = make(host=0)
    fill(cache, range(6))
    settle(cache)
    cache._below.disk._present.clear()
    client.silent = True
    assert cache.get_single(0) is None
    asked = len(client.log)
    assert cache.get_single(1) is None
    assert not cache.has(2)
    assert len(client.log) == asked
    assert cache.stats().misses_by_reason == {"read_timeout": 1, "disk_down": 1}
    client.speak_again()
    assert is_right(cache.get_single(1), 1)


def test_a_late_read_writes_where_nobody_else_is(make):
    cache, client = make(host=0)
    fill(cache, range(6))
    settle(cache)
    client.silent = True
    assert cache.get_single(0) is None
    (quarantined,) = cache._below.host.retired
    assert quarantined.filling
    fill(cache, range(10, 14))
    assert quarantined in cache._below.host.retired
    client.speak_again()  # the worker writes entry 0 into its extents only now
    settle(cache)
    assert not cache._below.host.retired
    for number in (*range(6), *range(10, 14)):
        assert is_right(cache.get_single(number), number)


def test_a_read_that_died_gives_its_room_back(make):
    cache, client = make(host=0)
    fill(cache, range(6))
    settle(cache)
    client.silent = True
    assert cache.get_single(0) is None
    client.silent = False
    client.die()
    client.start()
    settle(cache)
    assert cache._below.arena.used_bytes == 0
    assert is_right(cache.get_single(0), 0)


# While the caller captures a graph, no copy is started and none is waited for: the engine says so


def captured(make, **changes):
    """Entries 0 and 1 hot, 2 to 5 below on every tier, and a graph that is being captured."""
    engine = ManualCopyEngine()
    cache, client = make(engine, host=2, **changes)
    fill(cache, [2, 3, 4, 5, 0, 1])
    settle(cache)
    engine.captures = True
    return cache, client, engine


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_look_up_below_during_a_capture_is_a_miss_and_the_copy_stays(make, tier):
    cache, client, engine = captured(make)
    key = next(number for number in range(2, 6) if cache.locate(number) is tier)
    hot = list(cache.mm_cache)
    assert cache.get_single(key) is None
    audit(cache)
    assert cache.stats().misses_by_reason == {"capture": 1}
    assert list(cache.mm_cache) == hot  # nothing was evicted for it
    assert client.asked("fill") == []
    engine.captures = False
    assert is_right(cache.get_single(key), key, engine)


def test_a_victim_of_a_capture_is_dropped_and_counted(make):
    cache, _, engine = captured(make)
    assert cache.set(10, result(10))
    audit(cache)
    assert cache.stats().drops == {"capture": 1}
    assert is_right(cache.get_single(1), 1, engine)  # a hot hit needs no copy
    assert is_right(cache.get_single(10), 10, engine)
    engine.captures = False
    assert cache.get_single(0) is None
    assert cache.stats().misses_by_reason == {"absent": 1}


def test_a_hot_hit_does_not_ask_whether_a_graph_is_captured(make, monkeypatch):
    engine = ManualCopyEngine()
    cache, _ = make(engine)
    fill(cache, range(2))
    asked = []
    monkeypatch.setattr(engine, "capturing", lambda device: asked.append(device) or False)
    assert is_right(cache.get_single(0), 0, engine)
    assert is_right(cache.get_single(1), 1, engine)
    assert asked == []
    fill(cache, [2])
    assert is_right(cache.get_single(1), 1, engine)
    assert asked != []


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_clean_victim_of_a_capture_is_not_lost(make, tier):
    cache, _, engine = captured(make)
    engine.captures = False
    key = next(number for number in range(2, 6) if cache.locate(number) is tier)
    assert is_right(cache.get_single(key), key, engine)
    cache.free(1)
    settle(cache)
    engine.captures = True
    clean = cache.stats().host["clean_evictions"]
    fill(cache, [10, 11])
    assert key not in cache.mm_cache
    assert cache.stats().host["clean_evictions"] == clean + 1
    assert not cache.stats().drops
    engine.captures = False
    assert is_right(cache.get_single(key), key, engine)


def test_a_victim_that_is_still_being_copied_is_not_waited_for_during_a_capture(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    (copy,) = engine.pending  # of entry 0
    engine.captures = True
    assert cache.set(2, result(2))  # evicts it
    engine.captures = False
    assert not copy.done()
    audit(cache)
    assert is_right(cache.get_single(0), 0, engine)
    assert copy.done()


def test_nothing_is_cleaned_ahead_or_written_through_during_a_capture(make):
    engine = ManualCopyEngine()
    cache, client = make(engine, host=8, clean_ahead=SIZE, write="through")
    engine.captures = True
    fill(cache, range(2))
    assert engine.pending == []
    assert client.asked("put") == []
    engine.captures = False
    fill(cache, [2])
    settle(cache)
    assert len(client.asked("put")) == 1  # of 2, when it was set
    assert cache.locate(0) is Tier.HOST  # written when it leaves host memory


def test_draining_during_a_capture_does_not_wait_for_what_cannot_end(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    engine.captures = True
    assert not cache.drain(timeout_s=1000)
    assert cache.free(0)  # its pages are given back when its copy is seen to have ended
    assert cache._below.arena.used_bytes == PAGE
    engine.captures = False
    settle(cache)
    assert cache._below.arena.used_bytes == 0


# Memory made ready


def test_the_first_set_has_memory_made_ready_and_construction_does_not(make, monkeypatch):
    devices = []
    monkeypatch.setattr(Arena, "prepare_for", lambda arena, device: devices.append(device))
    cache, _ = make()
    assert cache.get_single(0) is None
    assert devices == []
    fill(cache, [0])
    assert devices == [torch.device("cpu")]


def test_memory_that_is_not_page_locked_though_it_should_be_is_counted_and_logged_once(
    make, caplog
):
    cache, _ = make(page_locked="on")
    with caplog.at_level("WARNING", logger="tiered_mmcache"):
        fill(cache, range(3))
    assert cache.stats().faults == {"page_locking": 1}
    assert cache.stats().host["page_locked_bytes"] == 0
    (record,) = caplog.records
    assert "host memory is not page-locked, copies are slower: " in record.getMessage()
    assert "write host.page_locked: auto" in record.getMessage()


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_without_a_device_nobody_misses_page_locked_memory(make, setting):
    cache, _ = make(page_locked=setting)
    fill(cache, range(3))
    assert cache.stats().faults == {}


def test_memory_is_given_up_only_after_the_last_copy(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    (copy,) = engine.pending
    held_at_the_end = []
    close = cache._below.arena.close

    def check_and_close():
        held_at_the_end.append(copy.done())
        close()

    cache._below.arena.close = check_and_close
    cache.close(timeout_s=0)
    assert held_at_the_end == [True]


# Clean-ahead


@pytest.mark.parametrize("away", ["free", "clear"])
def test_what_is_freed_is_kept_until_its_copy_has_ended(make, away):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    (copy,) = engine.pending  # of entry 0
    if away == "free":
        assert cache.free(0)
    else:
        cache.clear()
    assert copy.ended
    assert copy.target[0].eq(0).all()  # of the entry, not of what came after it


def test_a_victim_whose_copy_host_memory_gave_up_is_waited_for(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    (copy,) = engine.pending  # of entry 0
    entry = cache._below.host.find(0)
    cache._below._room.give_up(entry)
    assert not copy.ended
    fill(cache, [2])  # evicts it
    assert copy.ended


def test_the_coldest_are_copied_down_before_they_must_go(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    assert len(engine.pending) == 1
    assert list(cache._below.host.resident) == [0]
    assert cache.locate(0) is Tier.HOT
    demotions = cache.stats().host["demotions"]
    fill(cache, [2])  # evicts 0, which is clean, and copies 1
    stats = cache.stats()
    assert stats.host["clean_evictions"] == 1
    assert stats.host["demotions"] == demotions + 1
    assert is_right(cache.get_single(0), 0, engine)


# Ends


def test_what_only_memory_holds_is_written_at_the_end_newest_first(make):
    cache, client = make()
    fill(cache, range(4))
    assert client.entries == {}
    put_before = len(client.asked("put"))
    cache.close()
    assert len(client.entries) == 4
    puts = client.asked("put")[put_before:]
    assert puts[2:] == [spill_module.encode_full_key(3), spill_module.encode_full_key(2)]


def test_the_end_waits_for_room_in_the_write_buffer(make):
    cache, client = make(hot=8 * SIZE, host=0, buffer=2)
    fill(cache, range(8))
    cache.close()
    assert len(client.entries) == 8


def test_the_end_keeps_its_time_when_nothing_moves(make):
    cache, client = make(hot=8 * SIZE, host=0, buffer=2)
    client.paused = True
    fill(cache, range(8))
    cache.close(timeout_s=0.05)
    assert client.is_closed
    assert len(client.entries) == 2  # what it had been handed


def test_the_end_does_not_wait_for_a_store_that_cannot_be_opened(make):
    cache, client = make()
    fill(cache, range(4))
    client.die("permission")
    cache.close(timeout_s=3600.0)
    assert client.waits_s == []
    assert client.entries == {}


def test_what_cannot_leave_is_passed_over_at_the_end(make):
    cache, client = make(hot=4 * SIZE)
    cache.set("sparse", EmbeddingResult(embedding=torch.eye(4).to_sparse()))
    cache.set("unregistered", result(1, result_class=Unregistered))
    fill(cache, range(2))
    cache.close()
    assert len(client.entries) == 2


def test_nothing_is_written_at_the_end_without_a_disk():
    config = CacheConfig.from_mapping({"hot": {"max_size": 10}, "host": {"max_size": PAGE}})
    cache = TieredMultimodalCache(config=config)
    fill_small = EmbeddingResult(embedding=torch.zeros(10, dtype=torch.uint8))
    cache.set(1, fill_small)
    audit(cache)
    cache.close()
    assert cache.get_single(1) is None
    assert cache.stats().host == {"hits": 0}


def test_drain_says_when_something_stays_in_flight(make):
    cache, client = make(host=0)
    client.paused = True
    fill(cache, range(4))
    assert not cache.drain(timeout_s=0.01)
    client.paused = False
    assert cache.drain(timeout_s=60)
    client.is_closed, client.is_ready = True, False
    assert not cache.drain(timeout_s=3600)  # there will never be a worker again
    client.is_closed = False


def test_copies_are_waited_for_by_drain(make):
    engine = ManualCopyEngine()
    cache, _ = make(engine, host=8, clean_ahead=SIZE)
    fill(cache, range(2))
    assert cache._below.in_flight()
    (copy,) = engine.pending
    settle(cache)
    assert copy.done()


# A fault below never reaches the engine


def test_an_internal_fault_is_a_miss_and_fails_the_audit(make, monkeypatch, caplog):
    cache, _ = make()
    fill(cache, range(4))
    with monkeypatch.context() as patch:
        patch.setattr(cache._below, "poll", lambda: 1 / 0)
        assert cache.get_single(0) is None
        assert not cache.has(0)
    with monkeypatch.context() as patch:
        patch.setattr(cache._below, "demote", lambda *arguments: 1 / 0)
        assert cache.set(10, result(10))
    assert "ZeroDivisionError" in caplog.text
    assert cache.stats().faults == {"internal": 3}
    with pytest.raises(AssertionError, match="3 internal faults"):
        audit(cache)
    cache._counters.faults.clear()
    assert is_right(cache.get_single(0), 0)


@pytest.mark.parametrize(
    ("broken", "call"),
    [
        ("supersede", lambda cache: cache.set(0, result(99))),
        ("free", lambda cache: cache.free(0)),
        ("clear", lambda cache: cache.clear()),
    ],
)
@pytest.mark.parametrize("close_fails", [False, True])
def test_when_copies_cannot_be_voided_nothing_below_is_served(
    make, monkeypatch, caplog, broken, call, close_fails
):
    """A stale copy would be a wrong answer: better no lower tiers than that."""
    cache, client = make()
    fill(cache, range(8))
    settle(cache)
    assert 0 not in cache.mm_cache
    below = cache._below
    monkeypatch.setattr(below, broken, lambda *arguments, **options: 1 / 0)
    if close_fails:
        monkeypatch.setattr(client, "close", lambda timeout_s: 1 / 0)
    call(cache)
    assert cache._below is None
    assert client.is_closed is not close_fails
    assert "could not be voided" in caplog.text
    assert cache.stats().faults == {"internal": 2 if close_fails else 1}
    for number in range(20, 24):  # the hot tier goes on, as the static cache
        assert cache.set(number, result(number))
    assert cache.get_single(0) is None
    assert is_right(cache.get_single(23), 23)
    below.arena.close()
    cache.close()


# The process


def test_a_cache_is_closed_at_exit_unless_it_is_gone(make, monkeypatch, tmp_path, fake_client):
    registered = []
    monkeypatch.setattr(tiered_cache.atexit, "register", registered.append)
    cache, client = make()
    fill(cache, range(2))
    (at_exit,) = registered
    at_exit()
    assert client.is_closed
    assert len(client.entries) == 2
    folder = tmp_path / "other"
    other = TieredMultimodalCache(config=config(folder), make_client=fake_client)
    other_client = other._below.disk.client
    other._below.arena.close()
    del other
    gc.collect()
    registered[1]()
    assert not other_client.is_closed


def test_a_forked_child_keeps_the_hot_tier_only(make, monkeypatch):
    cache, client = make()
    fill(cache, range(4))
    below, lock = cache._below, cache._lock
    monkeypatch.setattr(tiered_cache, "_caches", {cache})
    tiered_cache._after_fork_in_child()
    assert cache._below is None
    assert cache._lock is not lock
    assert is_right(cache.get_single(3), 3)
    assert cache.get_single(0) is None
    fill(cache, range(10, 14))
    cache.close()
    assert client.entries == {}
    assert below.arena.fd == -1
    tiered_cache._after_fork_in_child()


# Waiting for a disk that is behind


class SlowDisk:
    """A worker that answers only while it is waited for, on a clock that only waiting moves.

    Attributes:
        answer_after_s: How long a wait must last for one write to be answered; None: for ever.
    """

    def __init__(self, cache, client):
        self.now_s = 1000.0
        self.answer_after_s = None
        self.client = client
        client.paused = True
        client.wait = self.wait
        cache._below._room._clock = lambda: self.now_s

    def wait(self, timeout_s):
        assert timeout_s > 0
        self.client.waits_s.append(timeout_s)
        if self.answer_after_s is not None and self.answer_after_s <= timeout_s:
            self.now_s += self.answer_after_s
            self.client.answer(until="put")
        else:
            self.now_s += timeout_s


@pytest.fixture
def slow(make, tmp_path, fake_client):
    def make_slow(**changes):
        cache, client = make(buffer=2, **changes)
        return cache, client, SlowDisk(cache, client)

    return make_slow


def test_by_default_nobody_waits_for_a_slow_disk(slow):
    cache, client, disk = slow()
    disk.answer_after_s = 0.0
    fill(cache, range(12))
    assert client.waits_s == []
    assert cache.stats().drops == {"write_buffer_full": 6}
    assert cache.stats().host["demote_waits"] == 0


@pytest.mark.parametrize("host", [2, 1])
def test_a_patient_caller_loses_nothing_to_a_slow_disk(slow, host):
    cache, client, disk = slow(host=host, demote_wait="1s")
    disk.answer_after_s = 0.25
    fill(cache, range(20))
    assert not cache.stats().drops
    assert cache.stats().host["demote_waits"] == len(client.waits_s) == 20 - 2 - host - 2
    assert disk.now_s == 1000.0 + 0.25 * len(client.waits_s)
    client.paused = False
    settle(cache)
    assert all(cache.has(number) for number in range(20))


def test_one_call_waits_no_longer_than_it_may_whatever_it_evicts(slow):
    cache, client, disk = slow(hot=4 * SIZE, demote_wait="1s")
    fill(cache, range(8))  # hot, host and buffer are full
    assert client.waits_s == []
    assert cache.set("large", result(9, size=4 * SIZE))  # four victims
    audit(cache)
    assert client.waits_s == [1.0]
    assert disk.now_s == 1001.0
    assert cache.stats().drops == {"write_buffer_full": 4}
    assert cache.set("next", result(10, size=4 * SIZE))  # a call of its own
    assert disk.now_s == 1002.0


def test_what_is_left_of_the_patience_is_for_the_next_victim(slow):
    cache, client, disk = slow(hot=4 * SIZE, demote_wait="1s")
    disk.answer_after_s = 0.4
    fill(cache, range(8))
    assert cache.set("large", result(9, size=4 * SIZE))
    assert client.waits_s == pytest.approx([1.0, 0.6, 0.2])
    assert disk.now_s == pytest.approx(1001.0)
    assert cache.stats().drops == {"write_buffer_full": 2}


def test_a_look_up_waits_for_room_too(slow):
    cache, client, disk = slow(demote_wait="1s")
    disk.answer_after_s = 0.25
    client.paused = False
    fill(cache, range(12))
    settle(cache)
    client.paused = True
    fill(cache, range(12, 18))
    waits = len(client.waits_s)
    assert is_right(cache.get_single(0), 0)
    assert len(client.waits_s) > waits
    assert not cache.stats().drops


def test_nobody_waits_for_a_worker_that_is_down_or_cannot_help(slow):
    cache, client, _ = slow(demote_wait="1s")
    fill(cache, range(6))
    client.die()
    fill(cache, range(6, 9))
    client.start()
    client.silent = True
    assert cache.get_single("unknown") is None  # the worker owes an answer from now on
    fill(cache, range(9, 12))
    assert client.waits_s == []
    assert cache.stats().drops["write_buffer_full"] == 6


def test_copying_ahead_does_not_wait(slow):
    cache, client, _ = slow(demote_wait="1s", clean_ahead=SIZE)
    fill(cache, range(6))
    waits = len(client.waits_s)
    cache._below.clean_ahead([("ahead", result(9))])
    assert len(client.waits_s) == waits
    assert cache.stats().drops["write_buffer_full"] > 0
