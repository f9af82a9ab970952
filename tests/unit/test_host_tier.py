"""Residency in host memory: two ledgers, recency, and what is given back when.

Owns: the bookkeeping of entries. Does not own: memory or copies.
"""

import pytest

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.extents import Extent
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier, Ledger

HEADER = EntryHeader(
    class_tag="", dtype="uint8", item_bytes=1, shape=(1,), extras=b"", device_type="cpu"
)


class ManualTransfer:
    """A copy that ends on command."""

    def __init__(self):
        self.ended = False

    def done(self):
        return self.ended

    def wait(self):
        self.ended = True


@pytest.fixture
def tier():
    return HostTier(budget_bytes=100, buffer_bytes=50)


def entry(ledger, key=1, size_bytes=10):
    return HostEntry(key, EmbeddingResult, HEADER, [Extent(0, 4096)], size_bytes, ledger)


def admit(tier, charged):
    """Charge an entry and make it findable, as a reservation and the end of its copy do."""
    charged.ledger.used_bytes += charged.arena_bytes
    tier.admit(charged)
    return charged


def audit(tier):
    for ledger in (tier.host_ledger, tier.buffer_ledger):
        charged = sum(e.arena_bytes for e in tier.every_entry() if e.ledger is ledger)
        assert charged == ledger.used_bytes
    assert all(e.ledger is tier.host_ledger for e in tier.resident.values())
    assert all(e.ledger is tier.buffer_ledger for e in tier.in_transit.values())


def test_a_ledger_fits_what_stays_within_its_budget():
    ledger = Ledger(10, used_bytes=4)
    assert ledger.fits(0)
    assert ledger.fits(6)
    assert not ledger.fits(7)


def test_an_admitted_entry_is_found(tier):
    resident, on_its_way = entry(tier.host_ledger, 1), entry(tier.buffer_ledger, 2, 20)
    admit(tier, resident)
    admit(tier, on_its_way)
    assert tier.find(1) is resident
    assert tier.find(2) is on_its_way
    assert tier.find(3) is None
    assert (tier.host_ledger.used_bytes, tier.buffer_ledger.used_bytes) == (10, 20)
    assert list(tier.every_entry()) == [resident, on_its_way]
    audit(tier)


def test_a_charge_comes_before_an_entry_is_found(tier):
    charged = entry(tier.host_ledger)
    charged.ledger.used_bytes += charged.arena_bytes
    assert tier.find(1) is None
    tier.admit(charged)
    assert tier.host_ledger.used_bytes == 10


def test_recency(tier):
    entries = {key: entry(tier.host_ledger, key) for key in (1, 2, 3)}
    for each in entries.values():
        admit(tier, each)
    tier.find(1)
    assert list(tier.resident) == [1, 2, 3]
    tier.touch(entries[1])
    assert list(tier.resident) == [2, 3, 1]
    tier.first_to_go(entries[3])
    assert list(tier.resident) == [3, 2, 1]


def test_recency_is_only_of_resident_entries(tier):
    on_its_way = entry(tier.buffer_ledger)
    admit(tier, on_its_way)
    tier.touch(on_its_way)
    tier.first_to_go(on_its_way)
    assert list(tier.resident) == []
    assert tier.find(1) is on_its_way


def test_a_victim_moves_to_the_buffer_and_stays_readable(tier):
    victim = entry(tier.host_ledger)
    admit(tier, victim)
    assert tier.to_buffer(victim)
    assert tier.find(1) is victim
    assert (tier.host_ledger.used_bytes, tier.buffer_ledger.used_bytes) == (0, 10)
    assert list(tier.in_transit) == [1]
    audit(tier)


def test_a_full_buffer_takes_no_victim(tier):
    admit(tier, entry(tier.buffer_ledger, 9, 45))
    victim = entry(tier.host_ledger)
    admit(tier, victim)
    assert not tier.to_buffer(victim)
    assert list(tier.resident) == [1]
    audit(tier)


def test_a_forgotten_entry_is_unfindable_but_charged_until_it_is_idle(tier):
    held = entry(tier.host_ledger)
    held.leaving = (ManualTransfer(),)
    admit(tier, held)
    tier.forget(held)
    assert tier.find(1) is None
    assert tier.reclaim() == []
    assert tier.host_ledger.used_bytes == 10
    audit(tier)
    held.leaving[0].ended = True
    assert tier.reclaim() == [held]
    assert tier.host_ledger.used_bytes == 0
    assert tier.reclaim() == []
    audit(tier)


def test_forgetting_an_entry_does_not_forget_its_successor(tier):
    old, new = entry(tier.host_ledger), entry(tier.host_ledger)
    admit(tier, old)
    tier.forget(old)
    admit(tier, new)
    other = entry(tier.buffer_ledger, 1)
    other.ledger.used_bytes += other.arena_bytes
    tier.forget(other)  # it never was in a table: a read that was given up
    assert tier.find(1) is new
    assert set(tier.reclaim()) == {old, other}
    audit(tier)


class CountingEntry(HostEntry):
    """Counts how often it is asked whether it is idle."""

    looks = 0

    def settle(self):
        type(self).looks += 1
        return super().settle()


def test_thousands_that_wait_for_the_worker_are_not_all_looked_at_each_time(tier, monkeypatch):
    monkeypatch.setattr(CountingEntry, "looks", 0)
    waiting = []
    for key in range(1000):
        held = CountingEntry(key, EmbeddingResult, HEADER, [], 0, tier.buffer_ledger)
        held.disk_copy = DiskCopy.WRITING
        waiting.append(held)
        tier.forget(admit(tier, held))
    assert tier.reclaim() == []
    assert 0 < CountingEntry.looks < 100
    idle = admit(tier, entry(tier.host_ledger, "idle"))
    tier.forget(idle)
    assert tier.reclaim() == [idle]  # at once, although the others were there before
    for held in waiting[:500]:
        held.disk_copy = DiskCopy.PRESENT
    given_back = {held for _ in range(20) for held in tier.reclaim()}
    assert given_back == set(waiting[:500])
    assert set(tier.retired) == set(waiting[500:])
    audit(tier)


def test_findable_entries_that_copies_read_are_known_without_a_search(tier):
    resident = admit(tier, entry(tier.host_ledger))
    tier.note_leaving(resident)
    assert not tier.read_by_copies
    first, second = resident.leaving = (ManualTransfer(), ManualTransfer())
    resident.disk_copy = DiskCopy.WRITING  # it is not idle either way
    tier.note_leaving(resident)
    first.ended = True
    tier.settle_copies()
    assert list(tier.read_by_copies) == [resident]
    second.ended = True
    tier.settle_copies()
    assert not tier.read_by_copies


def busy(state):
    held = entry(Ledger(100))
    if state == "arriving":
        held.arriving = ManualTransfer()
    elif state == "leaving":
        held.leaving = (ManualTransfer(), ManualTransfer())
    elif state == "filling":
        held.filling = True
    else:
        held.disk_copy = DiskCopy.WRITING
    return held


def finish(held):
    for transfer in [held.arriving, *held.leaving]:
        if transfer is not None:
            transfer.ended = True
    held.filling = False
    held.disk_copy = DiskCopy.PRESENT


@pytest.mark.parametrize("state", ["arriving", "leaving", "filling", "writing"])
def test_an_entry_is_idle_when_nothing_touches_its_extents(state):
    held = busy(state)
    assert not held.settle()
    finish(held)
    assert held.settle()
    assert held.arriving is None
    assert not held.leaving


def test_copies_that_ended_are_forgotten_one_by_one():
    held = busy("leaving")
    first, second = held.leaving
    second.ended = True
    assert not held.settle()
    assert held.leaving == (first,)


def test_an_entry_has_arrived_when_its_copy_ended_and_no_worker_fills_it():
    held = busy("arriving")
    assert not held.arrived()
    held.filling = True
    held.arriving.ended = True
    assert not held.arrived()
    held.filling = False
    assert held.arrived()


@pytest.mark.parametrize("copy", [DiskCopy.NONE, DiskCopy.QUEUED, DiskCopy.PRESENT])
def test_only_a_write_under_way_holds_the_extents(copy):
    held = entry(Ledger(100))
    held.disk_copy = copy
    assert held.settle()
