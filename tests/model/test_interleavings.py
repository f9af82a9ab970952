"""Whenever copies end and the worker answers: the same hot tier, and never a wrong byte.

Owns: how many interleavings are played, and that the property would notice what it is for.
Does not own: what a play is and what must hold in it (interleavings.py).
"""

import gc
import logging
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interleavings import (
    AMPLE,
    LARGE,
    SETTINGS,
    TIGHT,
    Choices,
    KeptStore,
    Play,
    calls_of,
    made_small,
    play,
)

from tiered_mmcache.disk import client as client_module
from tiered_mmcache.host.tier import DiskCopy, HostEntry
from tiered_mmcache.tiered_cache import TieredMultimodalCache
from tiered_mmcache.tiers.disk_tier import DiskTier
from tiered_mmcache.tiers.lower_tiers import LowerTiers
from tiered_mmcache.tiers.spill import SpillQueue

LEAST_INTERLEAVINGS = 10_000
CALLS = 7
OF_THE_SAME_CALLS = 8  # in ample room, where they have to end alike
MOST_TRIES = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    kept = KeptStore(tmp_path_factory.mktemp("interleavings"))
    yield kept
    kept.close()


@pytest.fixture(autouse=True)
def _on_one_thread_and_silent(monkeypatch):
    """The worker moves in the wait only, on the same thread; faults are not worth a line each."""
    monkeypatch.setattr(client_module, "_LOOKS_BEFORE_SLEEP", 0)
    monkeypatch.setattr(logging.getLogger("tiered_mmcache"), "disabled", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several take longer for so few bytes
    yield
    torch.set_num_threads(threads)


def setting_of(seed):
    if seed % 50 == 0:
        return LARGE[seed // 50 % len(LARGE)]
    kind = AMPLE if seed % 2 else TIGHT
    return kind[seed // 2 % len(kind)]


class Tally:
    """What was played, so that the number alone does not stand for it."""

    def __init__(self):
        self.different = set()
        self.events = Counter()

    def note(self, seed, played):
        counters = played.cache._counters
        self.different.add((seed, tuple(played.choices.taken)))
        self.events["host hits"] += counters.host_hits
        self.events["disk hits"] += counters.disk_hits
        self.events["clean evictions"] += counters.clean_evictions
        self.events["spills"] += counters.spills
        self.events["drops"] += sum(counters.drops.values())
        self.events["late answers"] += counters.faults["read_timeout"]
        self.events["dead workers"] += counters.faults["died"]
        self.events["hanging workers"] += counters.faults["disk_hangs"]


def play_seed(seed, store, tally=None):
    """Play the interleavings of one seed; a failure is made small and told with its seed."""
    setting = setting_of(seed)
    rng = random.Random(seed)
    calls = calls_of(rng.randrange, CALLS, setting)
    choices = None  # everything at once, for reference
    reference = None
    try:
        if setting.ample:
            reference = play(setting, store, calls, None)
        for _ in range(OF_THE_SAME_CALLS):
            store.empty()
            choices = Choices(rest=rng)
            played = Play(setting, store, choices)
            answers = played.run(calls)
            assert reference is None or answers == reference, "another outcome"
            if tally is not None:
                tally.note(seed, played)
    except AssertionError as problem:
        numbers = [] if choices is None else choices.taken
        told = made_small(setting, store, calls, numbers)
        problem.args = (f"seed {seed}: {problem}; {setting}, calls {told[0]}, choices {told[1]}",)
        raise


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_outcome_does_not_depend_on_when_copies_and_answers_come(store):
    tally = Tally()
    for seed in range(-(-LEAST_INTERLEAVINGS // OF_THE_SAME_CALLS)):
        play_seed(seed, store, tally)
        if seed % 50 == 0:
            gc.collect()  # the sockets of earlier plays, which refer to themselves
    assert len(tally.different) >= LEAST_INTERLEAVINGS
    assert all(count >= 3 for count in tally.events.values()), tally.events


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    setting=st.sampled_from(SETTINGS),
    wanted=st.lists(st.integers(0, 10_000), max_size=30),
    numbers=st.lists(st.integers(0, 60), max_size=120),
)
def test_the_same_with_calls_and_choices_that_are_made_small(store, setting, wanted, numbers):
    calls = calls_of(Choices(wanted).pick, len(wanted) // 3, setting)
    reference = play(setting, store, calls, None) if setting.ample else None
    answers = play(setting, store, calls, Choices(numbers))
    assert reference is None or answers == reference


# What the property would notice


def _copies_of(entry):
    entry.leaving = tuple(copy for copy in entry.leaving if not copy.done())
    return entry.leaving


def extents_reused_before_the_copy_down_has_ended(patch):
    patch.setattr(
        HostEntry,
        "settle",
        lambda entry: (
            not (entry.filling or _copies_of(entry) or entry.disk_copy is DiskCopy.WRITING)
        ),
    )


def extents_reused_before_the_copy_up_has_ended(patch):
    def settle(entry):
        entry.leaving = ()
        return entry.arrived() and entry.disk_copy is not DiskCopy.WRITING

    patch.setattr(HostEntry, "settle", settle)


def extents_reused_before_the_worker_has_read_them(patch):
    patch.setattr(HostEntry, "settle", lambda entry: entry.arrived() and not _copies_of(entry))


def extents_of_an_unanswered_read_reused(patch):
    def arrived(entry):
        entry.filling = False
        return real(entry)

    real = HostEntry.arrived
    patch.setattr(HostEntry, "arrived", arrived)


def a_write_handed_over_before_its_copy_has_ended(patch):
    real = SpillQueue._send_writes

    def send_writes(queue):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(HostEntry, "arrived", lambda entry: True)
            real(queue)

    patch.setattr(SpillQueue, "_send_writes", send_writes)


def victims_released_before_their_copy_has_ended(patch):
    patch.setattr(LowerTiers, "_await_arrival", lambda tiers, entry: None)


def victims_released_while_an_earlier_copy_reads_them(patch):
    patch.setattr(LowerTiers, "_await_copies_of", lambda tiers, key: None)


def a_read_that_was_not_answered_in_time_taken_for_one_that_was(patch):
    real = DiskTier.finish_read

    def finish_read(tier, *arguments):
        absence = real(tier, *arguments)
        return None if absence is not None and absence.reason == "read_timeout" else absence

    patch.setattr(DiskTier, "finish_read", finish_read)


def a_deletion_left_out_while_something_is_written(patch):
    real = SpillQueue.delete
    patch.setattr(
        SpillQueue, "delete", lambda queue, key: None if queue._writing else real(queue, key)
    )


def a_freed_entry_still_written(patch):
    real = LowerTiers._drop_from_host

    def drop_from_host(tiers, key):
        entry = tiers.host.find(key)
        dropped = real(tiers, key)
        if entry is not None:
            entry.wanted = True
        return dropped

    patch.setattr(LowerTiers, "_drop_from_host", drop_from_host)


def a_set_that_leaves_the_old_copies_below(patch):
    patch.setattr(LowerTiers, "supersede", lambda tiers, key: None)


def victims_chosen_by_which_copy_has_ended(patch):
    def evict_until_fits(cache, size_bytes):
        for key in list(cache.mm_cache):
            if cache.current_size + size_bytes <= cache.max_size:
                return
            entry = cache._below.host.find(key)
            if entry is not None and entry.arriving is not None:
                cache.mm_cache.move_to_end(key)
        real(cache, size_bytes)

    real = TieredMultimodalCache._evict_until_fits
    patch.setattr(TieredMultimodalCache, "_evict_until_fits", evict_until_fits)


FAULTS = [
    extents_reused_before_the_copy_down_has_ended,
    extents_reused_before_the_copy_up_has_ended,
    extents_reused_before_the_worker_has_read_them,
    extents_of_an_unanswered_read_reused,
    a_write_handed_over_before_its_copy_has_ended,
    victims_released_before_their_copy_has_ended,
    victims_released_while_an_earlier_copy_reads_them,
    a_read_that_was_not_answered_in_time_taken_for_one_that_was,
    a_deletion_left_out_while_something_is_written,
    a_freed_entry_still_written,
    a_set_that_leaves_the_old_copies_below,
    victims_chosen_by_which_copy_has_ended,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_property_notices(store, monkeypatch, fault):
    fault(monkeypatch)
    for seed in range(MOST_TRIES):
        try:
            play_seed(seed, store)
        except AssertionError as problem:
            print(seed, problem)
            return
    pytest.fail(f"not noticed in {MOST_TRIES} times {OF_THE_SAME_CALLS} interleavings")
