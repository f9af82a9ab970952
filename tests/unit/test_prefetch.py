"""Reading ahead, over a worker that the test plays: what is found, when, and what it may cost.

Owns: ``prefetch`` and ``get_many`` step by step, in every order of the worker's answers. Does not
own: real workers (tests/model, tests/faults/test_prefetch_faults.py).
"""

import dataclasses
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.config import WritePolicy
from tiered_mmcache.host.transfer import DeviceCopyEngine
from tiered_mmcache.testing import ManualCopyEngine, audit, audit_idle
from tiered_mmcache.tiers import prefetch as module

SIZE = 1000
PAGE = 4096
STORED = range(6)


def config(folder, *, hot=2, host=8, ahead=None, buffer=16, write="on_evict"):
    sections = {
        "namespace": "unit/prefetch",
        "hot": {"max_size": hot * SIZE},
        "disk": {
            "path": str(folder / "store"),
            "max_size": "1MiB",
            "write_buffer": buffer * PAGE,
            "write": write,
        },
    }
    if host:
        sections["host"] = {"max_size": host * PAGE}
        if ahead is not None:
            sections["host"]["prefetch"] = ahead * PAGE
    return CacheConfig.from_mapping(sections)


def result(number):
    return EmbeddingResult(embedding=torch.full((SIZE,), number, dtype=torch.uint8))


class LateCopies(ManualCopyEngine):
    """Copies end when their consumer, on the same stream, looks at what they brought."""

    made: ClassVar = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self.made.add(self)

    @classmethod
    def synchronize_all(cls):
        for engine in cls.made:
            engine.synchronize()


def is_right(found, number):
    LateCopies.synchronize_all()
    return found is not None and found.embedding.eq(number).all().item()


def settle(cache):
    audit(cache)
    assert cache.drain()
    audit_idle(cache)


@pytest.fixture(params=[DeviceCopyEngine, LateCopies], ids=["real", "manual"])
def stage(request, tmp_path, fake_client):
    """Makes a cache whose store, and no other tier, holds ``STORED``: (cache, client)."""
    caches = []

    def make(**changes):
        cache = TieredMultimodalCache(
            config=config(tmp_path, **changes), engine=request.param(), make_client=fake_client
        )
        caches.append(cache)
        put_on_disk(cache)
        return cache, cache._below.disk.client

    yield make
    for cache in caches:
        client = cache._below.disk.client
        client.paused = client.reads_held = False
        client.is_ready = True
        client.speak_again()
        settle(cache)
        cache.close()


def put_on_disk(cache):
    for number in STORED:
        assert cache.set(number, result(number))
    below = cache._below
    newest_first = list(reversed(cache.mm_cache.items()))
    below.spill_everything(newest_first, below._clock() + 60.0)
    cache.mm_cache.clear()
    cache.current_size = 0
    for entry in list(below.host.resident.values()):
        below.host.forget(entry)
    settle(cache)
    assert all(cache.locate(number) is Tier.DISK for number in STORED)
    below.disk.client.log.clear()
    below.disk.client.waits_s.clear()


def forget_what_the_store_holds(cache):
    cache._below.disk._present.clear()
    cache._below.disk.client.log.clear()


def outcomes(cache):
    return cache.stats().prefetches


# Prefetch


@pytest.mark.parametrize("known", [True, False], ids=["header known", "header unknown"])
def test_a_prefetched_entry_is_a_hit_in_host_memory(stage, known):
    cache, client = stage(ahead=4)
    if not known:
        forget_what_the_store_holds(cache)
    client.reads_held = True
    assert cache.prefetch([0, 1]) == 2
    audit(cache)
    assert len(client.asked("look_up")) == (0 if known else 2)
    assert client.waits_s == []
    client.reads_held = False
    settle(cache)
    assert len(client.asked("fill")) == 2
    assert cache.locate(0) is Tier.HOST
    log = len(client.log)
    assert is_right(cache.get_single(0), 0)
    assert len(client.log) == log
    assert cache.stats().host["hits"] == 1
    assert cache.stats().disk["hits"] == 0
    assert outcomes(cache) == {"asked": 2, "used": 1}
    assert cache.stats().host["prefetched_bytes"] == PAGE


@pytest.mark.parametrize("known", [True, False], ids=["header known", "header unknown"])
def test_a_look_up_waits_for_the_read_that_is_under_way(stage, known):
    cache, client = stage()
    if not known:
        forget_what_the_store_holds(cache)
    client.reads_held = True
    assert cache.prefetch([0, 1]) == 2
    assert is_right(cache.get_single(0), 0)
    audit(cache)
    full_key = client.asked("fill")[0]
    assert client.asked("fill").count(full_key) == 1
    assert client.asked("look_up").count(full_key) == (0 if known else 1)
    assert cache.stats().disk["hits"] == 1
    assert outcomes(cache) == {"asked": 2, "used": 1}


def test_it_never_touches_the_hot_tier(stage):
    cache, _ = stage()
    cache.set(10, result(10))
    cache.set(11, result(11))
    order = list(cache.mm_cache.items())
    assert cache.prefetch([10, 0, 10]) == 1
    settle(cache)
    assert cache.locate(0) is Tier.HOST
    assert list(cache.mm_cache.items()) == order
    assert cache.stats().hot["hits"] == 0


def test_what_is_there_or_on_its_way_is_not_fetched_again(stage):
    cache, client = stage(ahead=4)
    client.reads_held = True
    assert cache.prefetch([0, 0, 1]) == 2
    assert cache.prefetch([0, 1]) == 0
    client.reads_held = False
    settle(cache)
    assert cache.prefetch([0, 1]) == 0
    assert len(client.asked("fill")) == 2
    assert outcomes(cache) == {"asked": 2}


def test_what_is_in_host_memory_becomes_the_most_recently_used_there(stage):
    cache, _ = stage(ahead=4)
    cache.prefetch([0, 1])
    settle(cache)
    assert list(cache._below.host.resident) == [0, 1]
    assert cache.prefetch([0]) == 0
    assert list(cache._below.host.resident) == [1, 0]


def test_what_the_store_does_not_have_is_counted(stage):
    cache, client = stage()
    client.reads_held = True
    assert cache.prefetch(["unknown", 1.5]) == 1  # a float is no key that can be stored
    assert cache.get_single("unknown") is None
    assert len(client.asked("look_up")) == 1
    assert cache.stats().misses_by_reason == {"absent": 1}
    assert outcomes(cache) == {"asked": 2, "absent": 2}


def test_an_entry_that_vanished_from_the_store_is_a_miss(stage):
    cache, client = stage()
    client.entries.clear()
    assert cache.prefetch([0]) == 1  # it was there when last heard of
    settle(cache)
    assert outcomes(cache) == {"asked": 1, "failed": 1}
    assert cache._below.arena.used_bytes == 0
    assert cache.get_single(0) is None


def test_without_a_host_tier_nothing_is_fetched(stage):
    cache, client = stage(host=0)
    assert cache.prefetch(STORED) == 0
    assert client.log == []
    assert outcomes(cache) == {}


def test_zero_turns_it_off(stage):
    cache, client = stage(ahead=0)
    assert cache.prefetch(STORED) == 0
    assert client.log == []


def test_after_close_nothing_is_fetched(tmp_path, fake_client):
    cache = TieredMultimodalCache(config=config(tmp_path), make_client=fake_client)
    cache.close()
    assert cache.prefetch([0]) == 0
    assert cache.get_many([0, 1]) == [None, None]


def test_without_lower_tiers_nothing_is_fetched():
    cache = TieredMultimodalCache(2 * SIZE)
    cache.set(1, result(1))
    assert cache.prefetch([1, 2]) == 0
    assert [found is None for found in cache.get_many([1, 2])] == [False, True]


def test_while_a_graph_is_captured_reading_ahead_goes_on_for_later(tmp_path, fake_client):
    engine = LateCopies()
    cache = TieredMultimodalCache(config=config(tmp_path), engine=engine, make_client=fake_client)
    put_on_disk(cache)
    client = cache._below.disk.client
    client.reads_held = True
    engine.captures = True
    assert cache.prefetch([0]) == 1
    assert cache.get_single(0) is None
    assert cache.stats().misses_by_reason == {"capture": 1}
    audit(cache)
    engine.captures = False
    assert is_right(cache.get_single(0), 0)
    assert len(client.asked("fill")) == 1
    assert outcomes(cache) == {"asked": 1, "used": 1}
    client.reads_held = False
    settle(cache)
    cache.close()


# Its bounds


@pytest.mark.parametrize("known", [True, False], ids=["header known", "header unknown"])
def test_what_is_not_used_keeps_its_share_of_the_host_tier(stage, known):
    cache, _ = stage(host=8, ahead=2)
    if not known:
        forget_what_the_store_holds(cache)
    assert cache.prefetch(STORED) == (2 if known else len(STORED))
    settle(cache)
    assert len(cache._below.host.resident) == 2
    assert cache.stats().host["prefetched_bytes"] == 2 * PAGE
    assert outcomes(cache) == {"asked": 6, "refused": 4}
    assert is_right(cache.get_single(0), 0)  # used: another may come
    assert cache.prefetch([2, 3]) == 1
    settle(cache)
    assert len(cache._below.host.resident) == 3


def test_the_default_share_is_a_quarter(stage):
    cache, _ = stage(host=8)
    assert cache.stats().host["prefetch_budget_bytes"] == 2 * PAGE
    assert cache.prefetch(STORED) == 2


def test_so_many_bytes_are_read_at_once(stage, monkeypatch):
    monkeypatch.setattr(module, "_MOST_READ_AT_ONCE_BYTES", 2 * module._LEAST_READ_BYTES)
    cache, client = stage(ahead=8)
    client.reads_held = True
    assert cache.prefetch(range(5)) == 5
    assert len(client.asked("fill")) == 2
    client.answer_read()
    cache._below.poll()
    assert len(client.asked("fill")) == 3
    assert is_right(cache.get_single(4), 4)  # waiting: read by the look-up, not twice
    client.reads_held = False
    settle(cache)
    assert len(client.asked("fill")) == 5
    assert outcomes(cache) == {"asked": 5, "used": 1}


def test_an_entry_larger_than_that_is_read_alone(stage, monkeypatch):
    monkeypatch.setattr(module, "_MOST_READ_AT_ONCE_BYTES", 1)
    cache, client = stage(ahead=8)
    client.reads_held = True
    assert cache.prefetch(range(2)) == 2
    assert len(client.asked("fill")) == 1
    client.reads_held = False
    settle(cache)
    assert len(client.asked("fill")) == 2


def test_so_many_entries_are_on_their_way_at_once(stage, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ON_THE_WAY", 2)
    cache, client = stage(ahead=8)
    client.reads_held = True
    assert cache.prefetch(range(5)) == 2
    assert outcomes(cache) == {"asked": 5, "refused": 3}


def test_nothing_is_lost_for_it(stage):
    """Host memory is full of what only memory holds, and the write buffer too."""
    cache, client = stage(host=4, ahead=4, buffer=2)
    client.paused = True
    for number in range(100, 108):
        cache.set(number, result(number))
    assert cache.stats().host["write_buffer_entries"] == 2
    assert not cache.stats().drops
    assert cache.prefetch([0, 1]) == 2
    audit(cache)
    assert not cache.stats().drops
    assert outcomes(cache) == {"asked": 2, "refused": 2}
    client.paused = False
    settle(cache)
    assert all(is_right(cache.get_single(number), number) for number in range(100, 108))


def test_what_a_policy_would_give_up_does_not_give_way(stage):
    cache, _ = stage(host=4, ahead=4)
    for number in range(100, 106):
        cache.set(number, result(number))
    cache._below.disk.policy = WritePolicy.ON_SECOND_HIT
    assert cache.prefetch([0]) == 1
    settle(cache)
    assert not cache.stats().drops
    assert outcomes(cache) == {"asked": 1, "refused": 1}


# Void, wasted


def void_by(cache, how):
    if how == "free":
        assert cache.free(0)
    elif how == "clear":
        cache.clear()
    else:
        assert cache.set(0, result(200))


@pytest.mark.parametrize("how", ["free", "clear", "set"])
@pytest.mark.parametrize("step", ["asking", "waiting", "reading", "unused"])
def test_what_is_voided_on_its_way_is_never_found(stage, monkeypatch, how, step):
    cache, client = stage(ahead=4)
    client.reads_held = True
    if step == "asking":
        forget_what_the_store_holds(cache)
    if step == "waiting":
        monkeypatch.setattr(module, "_MOST_READ_AT_ONCE_BYTES", 1)
        assert cache.prefetch([5]) == 1
    assert cache.prefetch([0]) == 1
    if step == "unused":
        client.answer_read()
        assert cache.locate(0) is Tier.HOST
    assert cache._below.prefetcher._ahead[0].step.value == step
    client.reads_held = how == "set"  # a free and a clear wait for the worker
    void_by(cache, how)
    audit(cache)
    client.reads_held = False
    settle(cache)
    assert cache.stats().prefetches["wasted"] >= 1
    assert cache._below.prefetcher.charged_bytes == (PAGE if step == "waiting" else 0) * (
        how != "clear"
    )
    found = cache.get_single(0)
    assert is_right(found, 200) if how == "set" else found is None
    for number in (20, 21, 22):  # what was set anew goes below, and comes back
        cache.set(number, result(number))
    settle(cache)
    found = cache.get_single(0)
    assert is_right(found, 200) if how == "set" else found is None


def test_an_absence_heard_too_late_does_not_spare_a_deletion(stage):
    """The store says that it has nothing; before that is heard the key is set and written."""
    cache, client = stage(hot=1, host=0)
    below = cache._below
    client.reads_held = True
    assert below.read_for_call(["late"]) == ["late"]
    client.answer_read()
    (late_answer,) = client._arrived
    client._arrived.clear()
    for number, key in enumerate(["late", 100, 101]):
        assert cache.set(key, result(number))
    assert len(client.asked("put")) == 2
    client._arrived.append(late_answer)
    cache._below.poll()
    deletions = len(client.asked("delete"))
    assert cache.set("late", result(50))
    assert len(client.asked("delete")) == deletions + 1


def test_evicted_unused_is_wasted(stage):
    cache, _ = stage(host=4, ahead=1)
    assert cache.prefetch([0]) == 1
    settle(cache)
    for number in range(100, 110):
        cache.set(number, result(number))
    settle(cache)
    assert outcomes(cache) == {"asked": 1, "wasted": 1}
    assert cache.stats().host["prefetched_bytes"] == 0
    assert is_right(cache.get_single(0), 0)  # from disk


def test_unused_for_long_it_is_the_next_victim_and_no_longer_charged(stage):
    cache, _ = stage(ahead=2)
    prefetcher = cache._below.prefetcher
    now_s = [0.0]
    prefetcher._clock = lambda: now_s[0]
    assert cache.prefetch([0, 1]) == 2
    settle(cache)
    now_s[0] = module._HELD_S - 1
    assert cache.prefetch([2]) == 0
    now_s[0] = module._HELD_S
    cache._below.poll()
    assert cache.prefetch([2]) == 1
    settle(cache)
    assert set(list(cache._below.host.resident)[:2]) == {0, 1}
    assert outcomes(cache) == {"asked": 4, "refused": 1, "wasted": 2}
    assert is_right(cache.get_single(0), 0)


def test_asking_again_keeps_it_longer(stage):
    cache, _ = stage(ahead=2)
    now_s = [0.0]
    cache._below.prefetcher._clock = lambda: now_s[0]
    assert cache.prefetch([0, 1]) == 2
    settle(cache)
    now_s[0] = module._HELD_S - 1
    assert cache.prefetch([0]) == 0
    now_s[0] = module._HELD_S
    cache._below.poll()
    assert outcomes(cache) == {"asked": 2, "wasted": 1}
    assert list(cache._below.host.resident) == [1, 0]


# Faults


def test_a_silent_worker_costs_one_read_timeout_and_the_extents_stay_out_of_use(stage):
    cache, client = stage()
    client.silent = True
    assert cache.prefetch([0]) == 1
    assert cache.get_single(0) is None
    assert cache.stats().misses_by_reason == {"read_timeout": 1}
    (quarantined,) = cache._below.host.retired
    assert quarantined.filling
    assert cache.prefetch([1]) == 0
    cache.set(0, result(50))
    audit(cache)
    assert cache._below.prefetcher.under_way_bytes == 0  # a look-up has taken that over
    client.speak_again()  # it writes into the extents only now
    settle(cache)
    assert not cache._below.host.retired
    assert is_right(cache.get_single(0), 50)
    assert is_right(cache.get_single(1), 1)


def test_an_unanswered_question_costs_one_read_timeout(stage):
    cache, client = stage()
    forget_what_the_store_holds(cache)
    client.silent = True
    assert cache.prefetch([0]) == 1
    assert cache.get_single(0) is None
    assert cache.stats().misses_by_reason == {"read_timeout": 1}
    assert outcomes(cache) == {"asked": 1, "failed": 1}
    client.speak_again()
    settle(cache)
    assert is_right(cache.get_single(0), 0)


@pytest.mark.parametrize("known", [True, False], ids=["reading", "asking"])
def test_a_worker_that_dies_gives_the_room_back(stage, known):
    cache, client = stage()
    if not known:
        forget_what_the_store_holds(cache)
    client.reads_held = True
    assert cache.prefetch([0, 1]) == 2
    client.die()
    assert cache.prefetch([2]) == 0
    audit(cache)
    assert cache._below.arena.used_bytes == 0
    assert outcomes(cache) == {"asked": 3, "failed": 3}
    client.reads_held = False
    client.start()
    settle(cache)
    assert all(is_right(cache.get_single(number), number) for number in STORED)


def test_what_waits_fails_with_the_worker(stage, monkeypatch):
    monkeypatch.setattr(module, "_MOST_READ_AT_ONCE_BYTES", 1)
    cache, client = stage(ahead=4)
    client.reads_held = True
    assert cache.prefetch([0, 1, 2]) == 3
    client.die()
    cache._below.poll()
    assert outcomes(cache) == {"asked": 3, "failed": 3}


def test_a_worker_found_dead_while_room_is_made_costs_no_room(stage, monkeypatch):
    cache, client = stage()
    room = cache._below._room
    reserve = room.reserve_ahead

    def find_it_dead(*arguments, **options):
        client.is_ready = False
        return reserve(*arguments, **options)

    monkeypatch.setattr(room, "reserve_ahead", find_it_dead)
    assert cache.prefetch([0]) == 1
    audit(cache)
    assert outcomes(cache) == {"asked": 1, "failed": 1}
    assert cache._below.arena.used_bytes == 0
    assert client.asked("fill") == []


def test_an_unknown_class_is_left_to_the_look_up(stage):
    cache, client = stage()
    forget_what_the_store_holds(cache)
    for key, (full_key, header, data) in client.entries.items():
        client.entries[key] = (full_key, dataclasses.replace(header, class_tag="never"), data)
    assert cache.prefetch([0]) == 1
    settle(cache)
    assert outcomes(cache) == {"asked": 1, "failed": 1}
    assert not cache.stats().faults
    assert cache.get_single(0) is None
    assert cache.stats().faults == {"unknown_class": 1}


# Several at once


@pytest.mark.parametrize("host", [0, 2, 8])
@pytest.mark.parametrize("known", [True, False], ids=["header known", "header unknown"])
def test_several_are_asked_for_at_once(stage, host, known):
    cache, client = stage(host=host)
    if not known:
        forget_what_the_store_holds(cache)
    client.reads_held = True
    before_first_answer = []
    answer_to = client.answer_to

    def first_answer(*arguments):
        before_first_answer.append(len(client.log))
        return answer_to(*arguments)

    client.answer_to = first_answer
    found = cache.get_many([0, 1, 2, 3])
    assert all(is_right(found[number], number) for number in range(4))
    assert before_first_answer[0] == 4
    assert len(client.asked("fill")) == 4
    assert cache.stats().disk["hits"] == 4
    assert list(cache.mm_cache) == [2, 3]
    assert outcomes(cache) == {}


def test_what_was_read_for_a_call_and_not_used_does_not_stay_in_the_write_buffer(stage):
    cache, client = stage(host=0)
    below = cache._below
    assert below.read_for_call([0, 1]) == [0, 1]
    below.poll()
    client.reads_held = True
    assert below.read_for_call([2]) == [2]
    assert below.host.find(0) is not None
    below.end_call([0, 1, 2])
    assert below.host.find(0) is None
    assert below.prefetcher.idle
    client.reads_held = False
    settle(cache)
    assert below.arena.used_bytes == 0


def test_a_call_takes_only_part_of_the_write_buffer(stage):
    cache, client = stage(host=0, buffer=8)
    client.reads_held = True
    assert cache._below.read_for_call(STORED) == [0, 1]
    assert len(client.asked("fill")) == 2
    cache._below.end_call(STORED)


def test_a_prefetched_entry_serves_a_call(stage):
    cache, client = stage()
    client.reads_held = True
    assert cache.prefetch([1]) == 1
    found = cache.get_many([0, 1])
    assert [is_right(found[number], number) for number in range(2)] == [True, True]
    assert len(client.asked("fill")) == 2
    assert outcomes(cache) == {"asked": 1, "used": 1}


def test_a_silent_worker_costs_a_call_one_read_timeout(stage):
    cache, client = stage()
    client.silent = True
    assert cache.get_many([0, 1, 2]) == [None, None, None]
    assert cache.stats().misses_by_reason["read_timeout"] == 1
    audit(cache)
    client.speak_again()
    settle(cache)
    assert is_right(cache.get_many([0, 1, 2])[1], 1)


@pytest.mark.parametrize("held", [True, False])
def test_a_call_asks_once_for_what_is_not_there(stage, held):
    cache, client = stage()
    forget_what_the_store_holds(cache)
    client.reads_held = held
    assert [found is None for found in cache.get_many(["a", 0, "b", "a"])] == [
        True,
        False,
        True,
        True,
    ]
    assert len(client.asked("look_up")) == 4  # the second "a" is asked for anew, as a single one
    assert cache.stats().misses_by_reason == {"absent": 3}
    assert cache._below.prefetcher.idle


def test_the_absence_of_a_number_is_not_that_of_an_equal_combination(stage):
    cache, client = stage(host=0)
    combined = cache.combine_hashes([1, 2])
    assert cache.set(combined, result(50))
    for number in (60, 61):
        cache.set(number, result(number))
    settle(cache)
    cache._below.disk._present.clear()
    client.reads_held = True
    assert cache._below.read_for_call([int(combined)]) == [int(combined)]
    assert is_right(cache.get_single(combined), 50)
    cache._below.end_call([int(combined)])


KEYS = st.integers(0, 9)
CALLS = st.lists(
    st.tuples(st.sampled_from(["get", "set", "free", "prefetch"]), st.lists(KEYS, max_size=8)),
    min_size=1,
    max_size=8,
)


def play(cache, calls, *, at_once):
    """Everything that the calls answer, and what the hot tier then holds."""
    seen = []
    version = 0
    for what, keys in calls:
        if what == "get":
            answers = cache.get_many(keys) if at_once else [cache.get_single(key) for key in keys]
            LateCopies.synchronize_all()
            seen.append([None if found is None else found.embedding.tolist() for found in answers])
        elif what == "prefetch" and at_once:
            cache.prefetch(keys)
        for key in keys:
            if what == "set":
                version += 1
                cache.set(key, result(version))
            elif what == "free":
                cache.free(key)
        audit(cache)
        LateCopies.synchronize_all()
        seen.append([(key, int(held.embedding[0])) for key, held in cache.mm_cache.items()])
    return seen


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is a class
)
@given(
    calls=CALLS,
    host=st.sampled_from([0, 1, 2, 8]),
    ahead=st.booleans(),
    held=st.booleans(),
    engine=st.sampled_from([DeviceCopyEngine, LateCopies]),
)
def test_answers_and_hot_tier_are_those_of_single_look_ups(
    fake_client, calls, host, ahead, held, engine
):
    folder = Path(tempfile.mkdtemp(prefix="mmcache-prefetch-"))
    try:
        seen = []
        for at_once in (True, False):
            settings_ = config(folder, host=host, ahead=host if host and ahead else None, buffer=64)
            cache = TieredMultimodalCache(
                config=settings_, engine=engine(), make_client=fake_client
            )
            put_on_disk(cache)
            cache._below.disk.client.reads_held = held
            seen.append(play(cache, calls, at_once=at_once))
            cache._below.disk.client.reads_held = False
            settle(cache)
            cache.close()
        assert seen[0] == seen[1]
    finally:
        shutil.rmtree(folder)
