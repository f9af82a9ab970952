"""The store against a dictionary: true totals, a kept budget, the right victims, no wrong bytes.

Owns: transactions, recency, generations, eviction, checks on reading. Does not own: opening
(test_disk_recovery.py), or the worker (tests/faults).
"""

import dataclasses
import math
import tempfile
from pathlib import Path

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiered_mmcache.disk import changes, layout
from tiered_mmcache.disk import store as store_module
from tiered_mmcache.disk.changes import BeginGeneration, DeleteEntry, Outcome, PutEntry, TouchEntry
from tiered_mmcache.disk.layout import Bookkeeping, Place
from tiered_mmcache.disk.recovery import (
    OpenSettings,
    check_length,
    open_for_reading,
    open_for_writing,
)
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.keys import encode_full_key, store_key
from tiered_mmcache.entries.record import CHUNK_BYTES, EntryHeader, decode_record, digest
from tiered_mmcache.errors import RecordError, StoreUnavailableError

KIB = 1024
GENERATIONS = [bytes([number] * 16) for number in (1, 2)]


def header_of(size_bytes, extras=b""):
    return EntryHeader(
        class_tag="EmbeddingResult",
        dtype="uint8",
        item_bytes=1,
        shape=(size_bytes,),
        extras=extras,
        device_type="cpu",
    )


def payload(size_bytes, fill):
    pattern = bytes((fill + step) % 256 for step in range(256))
    return (pattern * (size_bytes // 256 + 1))[:size_bytes]


def key_of(key, namespace="a", generation=GENERATIONS[0]):
    return store_key(namespace=namespace, generation=generation, full_key=encode_full_key(key))


def put(key, size_bytes=100, *, fill=0, namespace="a", generation=GENERATIONS[0], extras=b""):
    data = memoryview(payload(size_bytes, fill))
    middle = size_bytes // 3
    return PutEntry(
        store_key=key_of(key, namespace, generation),
        full_key=encode_full_key(key),
        namespace=namespace,
        generation=generation,
        header=header_of(size_bytes, extras),
        parts=[data[:middle], data[middle:]],
    )


def fill(store, key, size_bytes=100, extras=b"", **where):
    """The payload of an entry as the store copies it out, or None."""
    header = header_of(size_bytes, extras)
    memory = memoryview(bytearray(size_bytes))
    third = size_bytes // 3
    parts = [memory[:third], memory[third : 2 * third], memory[2 * third :]]
    there = store.fill(key_of(key, **where), encode_full_key(key), header, parts)
    return bytes(memory) if there else None


def rows_of(store):
    """Every row of the store, by table, read around its methods."""
    with store._environment.begin() as transaction:
        return {
            name: list(transaction.cursor(getattr(store._tables, name.decode())))
            for name in layout.DATABASES
        }


def audit(store):
    """Compare the totals and the recency table with everything that the store holds."""
    rows = rows_of(store)
    entries = dict(rows[layout.ENTRIES])
    chunk_bytes = dict.fromkeys(entries, 0)
    for key, value in rows[layout.CHUNKS]:
        chunk_bytes[layout.chunk_owner(key)] += len(value)  # KeyError: a chunk without an entry
    assert len(rows[layout.CHUNKS]) == sum(-(-n // CHUNK_BYTES) for n in chunk_bytes.values())
    costs = {
        key: layout.charged_entry_bytes(len(value) - layout.PLACE_BYTES, chunk_bytes[key])
        for key, value in entries.items()
    }
    totals = store.totals()
    assert totals.entries == len(entries)
    assert totals.payload_bytes == sum(chunk_bytes.values())
    assert totals.used_bytes == sum(costs.values()) <= store.budget_bytes
    places = {key: value[: layout.PLACE_BYTES] for key, value in entries.items()}
    assert dict(rows[layout.RECENCY]) == {place: key for key, place in places.items()}
    assert len(places) == len(set(places.values()))
    assert [(place.to_bytes(), key) for place, key in store.places()] == rows[layout.RECENCY]
    return costs


@pytest.fixture
def opened(tmp_path):
    """Opens stores that are audited and closed after the test."""
    made = []

    def make(budget_bytes=1024 * KIB, folder="store"):
        settings = OpenSettings(
            path=tmp_path / folder,
            budget_bytes=budget_bytes,
            largest_entry_bytes=budget_bytes,
            synchronous=False,
        )
        handle = open_for_writing(settings)
        store = Store(handle.environment, budget_bytes=budget_bytes)
        made.append((handle, store))
        return store

    yield make
    for handle, _ in made:
        handle.close()


@pytest.fixture
def store(opened):
    return opened()


def test_the_coldest_entry_is_that_of_the_namespace_and_its_generation(store, monkeypatch):
    clock = iter(range(100, 200))
    monkeypatch.setattr(changes.time, "time", lambda: float(next(clock)))
    assert store.coldest_created_s("a") == 0.0
    store.apply([BeginGeneration(namespace=name, generation=GENERATIONS[0]) for name in "ab"])
    assert store.coldest_created_s("a") == 0.0
    store.apply([put(0, namespace="b"), put(1), put(2)])
    assert [store.coldest_created_s(name) for name in "ab"] == [101, 100]
    store.apply([TouchEntry(store_key=key_of(1))])
    assert store.coldest_created_s("a") == 102  # when it was stored, not used
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[1])])
    assert store.coldest_created_s("a") == 0.0
    assert store.coldest_created_s("b") == 100


def test_a_damaged_coldest_entry_has_no_age(store):
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[0]), put(1)])
    with store._environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(key_of(1), db=store._tables.entries))
        value[-1] ^= 1
        transaction.put(key_of(1), bytes(value), db=store._tables.entries)
    assert store.coldest_created_s("a") == 0.0


def test_what_is_put_into_a_stale_generation_is_the_first_to_go(store):
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[0]), put(0, 900 * KIB)])
    store.apply([put(1, 8 * KIB, generation=GENERATIONS[1])])
    store.apply([put(2, 200 * KIB)])
    assert fill(store, 1, 8 * KIB, generation=GENERATIONS[1]) is None
    audit(store)


# A dictionary that does the same


@dataclasses.dataclass
class Held:
    namespace: str
    generation: bytes
    data: bytes
    extras: bytes
    used: int


WHERE = {
    "namespace": st.sampled_from(["a", "b"]),
    "generation": st.sampled_from(GENERATIONS),
    "key": st.integers(0, 4),
}


class StoreMachine(RuleBasedStateMachine):
    """Every change against a dictionary, with a full scan after each."""

    budget_bytes = 420 * KIB

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="mmcache-store-")
        settings = OpenSettings(
            path=Path(self.folder.name),
            budget_bytes=self.budget_bytes,
            largest_entry_bytes=self.budget_bytes,
            synchronous=False,
        )
        self.settings = settings
        self.handle = open_for_writing(settings)
        self.store = Store(self.handle.environment, budget_bytes=self.budget_bytes)
        self.model = {}
        self.current = {}
        self.ticks = 0

    def tick(self):
        self.ticks += 1
        return self.ticks

    def is_stale(self, held):
        current = self.current.get(held.namespace)
        return current is not None and current != held.generation

    def bucket_numbers(self):
        return {(b.namespace, b.generation): b.number for b in self.store.buckets()}

    def evict_down_to(self, most_bytes, costs, numbers, most_evicted_bytes=float("inf")):
        def turn(item):
            held = item[1]
            stale = self.is_stale(held)
            # One that is gone by now was made last, for the entry that was just put.
            bucket = numbers.get((held.namespace, held.generation), math.inf) if stale else 0
            return (not stale, bucket, held.used)

        evicted_bytes = 0
        for key, _ in sorted(self.model.items(), key=turn):
            held_bytes = sum(costs[each] for each in self.model)
            if held_bytes <= most_bytes or evicted_bytes >= most_evicted_bytes:
                return
            evicted_bytes += costs[key]
            del self.model[key]

    @rule(
        size_bytes=st.integers(0, 60 * KIB)
        | st.sampled_from([0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 390 * KIB, 415 * KIB, 430 * KIB]),
        fill=st.integers(0, 2),
        extras=st.sampled_from([b"", b"x" * 3000]),
        **WHERE,
    )
    def put(self, key, size_bytes, fill, extras, namespace, generation):
        change = put(
            key, size_bytes, fill=fill, namespace=namespace, generation=generation, extras=extras
        )
        data = payload(size_bytes, fill)
        held = self.model.get(change.store_key)
        costs = audit(self.store)
        if held is not None and (held.data, held.extras) == (data, extras):
            assert self.store.apply([change]) == [Outcome.DONE]
            held.used = self.tick()
            return
        self.model.pop(change.store_key, None)
        cost_bytes = self.cost_of(change)
        if cost_bytes > self.budget_bytes:
            assert self.store.apply([change]) == [Outcome.TOO_LARGE]
            return
        self.evict_down_to(self.budget_bytes - cost_bytes, costs, self.bucket_numbers())
        assert self.store.apply([change]) == [Outcome.DONE]
        self.model[change.store_key] = Held(namespace, generation, data, extras, self.tick())
        ahead_bytes = 2 * cost_bytes
        if ahead_bytes <= self.budget_bytes // 32:
            costs[change.store_key] = cost_bytes
            most_bytes = self.budget_bytes - ahead_bytes
            self.evict_down_to(most_bytes, costs, self.bucket_numbers(), ahead_bytes)

    def cost_of(self, change):
        """What a change will be charged: a record's length does not depend on its digests."""
        with tempfile.TemporaryDirectory(prefix="mmcache-cost-") as folder:
            settings = dataclasses.replace(
                self.settings, path=Path(folder), budget_bytes=1 << 22, largest_entry_bytes=1 << 20
            )
            handle = open_for_writing(settings)
            alone = Store(handle.environment, budget_bytes=1 << 22)
            alone.apply([change])
            used_bytes = alone.totals().used_bytes
            handle.close()
        return used_bytes

    @rule(**WHERE)
    def delete(self, key, namespace, generation):
        name = key_of(key, namespace, generation)
        assert self.store.apply([DeleteEntry(store_key=name)]) == [Outcome.DONE]
        self.model.pop(name, None)

    @rule(**WHERE)
    def touch(self, key, namespace, generation):
        name = key_of(key, namespace, generation)
        assert self.store.apply([TouchEntry(store_key=name)]) == [Outcome.DONE]
        if name in self.model:
            self.model[name].used = self.tick()

    @rule(namespace=WHERE["namespace"], generation=WHERE["generation"])
    def begin_generation(self, namespace, generation):
        change = BeginGeneration(namespace=namespace, generation=generation)
        assert self.store.apply([change]) == [Outcome.DONE]
        self.current[namespace] = generation

    @rule(size_bytes=st.integers(0, 500 * KIB))
    def make_room(self, size_bytes):
        costs, numbers = audit(self.store), self.bucket_numbers()
        used_bytes = self.store.totals().used_bytes
        self.store.make_room(size_bytes)
        self.evict_down_to(max(0, used_bytes - size_bytes), costs, numbers)

    @rule()
    def reopen(self):
        self.handle.close()
        self.handle = open_for_writing(self.settings)
        self.store = Store(self.handle.environment, budget_bytes=self.budget_bytes)

    @invariant()
    def totals_are_those_of_a_full_scan(self):
        audit(self.store)

    @invariant()
    def the_store_holds_what_the_model_does(self):
        records = dict(self.store.records())
        assert records.keys() == self.model.keys()
        for name, held in self.model.items():
            record = records[name]
            assert (record.namespace, record.generation) == (held.namespace, held.generation)
            assert record.header == header_of(len(held.data), held.extras)
            memory = memoryview(bytearray(len(held.data)))
            assert self.store.fill(name, record.full_key, record.header, [memory])
            assert memory == held.data

    @invariant()
    def generations_are_known(self):
        for namespace in ("a", "b"):
            current = self.store.current_generation(namespace)
            assert current == self.current.get(namespace)
        for bucket in self.store.buckets():
            current = self.current.get(bucket.namespace)
            assert bucket.stale == (current is not None and current != bucket.generation)

    def teardown(self):
        self.handle.close()
        self.folder.cleanup()


TestStoreAgainstADictionary = StoreMachine.TestCase
TestStoreAgainstADictionary.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None
)


# Writing


def test_a_store_begins_empty(store):
    assert store.totals() == dataclasses.replace(store.totals(), entries=0, used_bytes=0)
    assert store.current_generation("a") is None
    assert list(store.records()) == []
    assert store.buckets() == []
    assert store.look_up(key_of(1)) is None
    assert fill(store, 1) is None
    audit(store)


def test_a_record_says_what_was_put(store):
    store.apply([put(1, 2 * CHUNK_BYTES + 5, fill=3)])
    record = store.look_up(key_of(1), encode_full_key(1))
    data = payload(2 * CHUNK_BYTES + 5, 3)
    starts = range(0, len(data), CHUNK_BYTES)
    assert record.digests == b"".join(digest(data[at : at + CHUNK_BYTES]) for at in starts)
    assert record.header.payload_bytes == len(data)
    assert record.created_s > 0
    assert fill(store, 1, len(data)) == data


def test_least_recently_used_goes_first(opened):
    store = opened(100 * KIB)
    store.apply([put(key, 20 * KIB, fill=key) for key in (1, 2, 3)])
    store.apply([TouchEntry(store_key=key_of(1))])
    store.apply([put(4, 40 * KIB), put(5, 20 * KIB)])
    found = [key for key in range(1, 6) if store.look_up(key_of(key)) is not None]
    assert found == [1, 4, 5]
    audit(store)


def test_namespaces_share_one_order(opened):
    store = opened(100 * KIB)
    store.apply([put(1, 30 * KIB), put(1, 30 * KIB, namespace="b"), put(2, 30 * KIB)])
    store.apply([TouchEntry(store_key=key_of(1)), put(3, 30 * KIB)])
    assert store.look_up(key_of(1)) is not None
    assert store.look_up(key_of(1, "b")) is None
    assert store.look_up(key_of(2)) is not None


def test_stale_generations_go_before_what_is_older(opened):
    store = opened(100 * KIB)
    store.apply([put(1, 30 * KIB, namespace="b"), put(2, 30 * KIB), put(3, 30 * KIB)])
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[1])])
    store.apply([put(4, 30 * KIB, generation=GENERATIONS[1])])
    assert store.look_up(key_of(1, "b")) is not None
    assert store.look_up(key_of(2)) is None
    assert store.look_up(key_of(3)) is not None
    store.apply([put(5, 30 * KIB, generation=GENERATIONS[1])])
    assert store.look_up(key_of(3)) is None
    assert store.look_up(key_of(1, "b")) is not None
    audit(store)


def test_a_generation_that_comes_back_is_no_longer_stale(store):
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[0]), put(1)])
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[1])])
    assert [bucket.stale for bucket in store.buckets()] == [True]
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[0])])
    assert [bucket.stale for bucket in store.buckets()] == [False]


def test_a_late_write_of_an_old_generation_is_stale_at_once(store):
    store.apply([BeginGeneration(namespace="a", generation=GENERATIONS[1]), put(1)])
    assert [bucket.stale for bucket in store.buckets()] == [True]


def test_an_entry_too_large_evicts_nothing_and_is_not_stored(opened):
    store = opened(100 * KIB)
    store.apply([put(1, 90 * KIB)])
    assert store.apply([put(2, 100 * KIB)]) == [Outcome.TOO_LARGE]
    assert store.look_up(key_of(1)) is not None
    assert store.look_up(key_of(2)) is None
    audit(store)


def test_a_replaced_entry_leaves_nothing_behind(store):
    store.apply([put(1, 2 * CHUNK_BYTES + 7, fill=1)])
    store.apply([put(1, 50, fill=2)])
    assert fill(store, 1, 50) == payload(50, 2)
    assert fill(store, 1, 2 * CHUNK_BYTES + 7) is None
    assert store.totals().entries == 1
    audit(store)


def test_putting_the_same_again_only_makes_it_most_recently_used(store):
    store.apply([put(1), put(2)])
    before = store.look_up(key_of(1))
    store.apply([put(1)])
    assert store.look_up(key_of(1)) == before
    assert [key for _, key in store.places()] == [key_of(2), key_of(1)]
    audit(store)


def test_changes_of_one_batch_are_made_in_order(store):
    store.apply([put(1), DeleteEntry(store_key=key_of(1)), put(2), put(2, fill=9)])
    assert store.look_up(key_of(1)) is None
    assert fill(store, 2) == payload(100, 9)


def test_a_batch_is_made_as_a_whole_or_not_at_all(store):
    store.apply([put(1, 300, fill=1)])
    before = rows_of(store)
    broken = dataclasses.replace(put(3, 500), parts=[memoryview(b"too short")])
    with pytest.raises(IndexError):
        store.apply([put(1, 50, fill=2), put(2), DeleteEntry(store_key=key_of(1)), broken])
    assert rows_of(store) == before
    audit(store)


def test_touching_and_deleting_what_is_not_there_changes_nothing(store):
    store.apply([put(1)])
    before = rows_of(store)
    changes = [TouchEntry(store_key=key_of(9)), DeleteEntry(store_key=key_of(9))]
    assert store.apply(changes) == [Outcome.DONE, Outcome.DONE]
    assert rows_of(store) == before


def test_an_empty_payload_has_a_record_and_no_chunks(store):
    store.apply([put(1, 0)])
    assert fill(store, 1, 0) == b""
    assert rows_of(store)[layout.CHUNKS] == []
    audit(store)


def test_making_room(store):
    store.apply([put(key, 20 * KIB) for key in range(10)])
    used_bytes = store.totals().used_bytes
    store.make_room(50 * KIB)
    assert store.totals().used_bytes <= used_bytes - 50 * KIB
    assert store.look_up(key_of(0)) is None
    assert store.look_up(key_of(9)) is not None
    store.make_room(1 << 40)
    assert store.totals().entries == 0
    store.make_room(0)
    audit(store)


def test_room_for_two_more_batches_is_made_ahead(opened):
    store = opened(8 * KIB * KIB)
    batch_bytes = 0
    for batch in range(100):
        before_bytes = store.totals().used_bytes
        store.apply([put((batch, number), 30 * KIB) for number in range(3)])
        if batch == 0:
            batch_bytes = store.totals().used_bytes - before_bytes
    assert batch_bytes * 100 > store.budget_bytes
    assert store.totals().used_bytes <= store.budget_bytes - 2 * batch_bytes
    assert store.totals().used_bytes > store.budget_bytes - 3 * batch_bytes


def test_a_store_over_its_budget_is_brought_under_it_in_bounded_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_EVICTED_ENTRIES", 7)
    monkeypatch.setattr(store_module, "MOST_EVICTED_BYTES", 300 * KIB)
    settings = OpenSettings(
        path=tmp_path, budget_bytes=4 << 20, largest_entry_bytes=1 << 20, synchronous=False
    )
    handle = open_for_writing(settings)
    large = Store(handle.environment, budget_bytes=4 << 20)
    large.apply([put(number, 100) for number in range(20)])
    large.apply([put(number, 100 * KIB) for number in range(20, 40)])
    lowered = Store(handle.environment, budget_bytes=1 << 20)
    steps = []
    while lowered.is_over_budget():
        entries = lowered.totals().entries
        evicted = lowered.evict_some()
        assert entries - lowered.totals().entries == evicted
        steps.append(evicted)
    assert steps[:2] == [7, 7]  # of the small ones, by number
    assert max(steps[3:]) <= 3  # of the large ones, by bytes
    assert lowered.evict_some() == 0
    audit(lowered)
    assert lowered.look_up(key_of(39)) is not None
    handle.close()


def test_a_full_map_can_be_written_again_after_making_room(tmp_path):
    settings = OpenSettings(
        path=tmp_path, budget_bytes=64 << 20, largest_entry_bytes=1 << 20, synchronous=False
    )
    handle = open_for_writing(settings)
    handle.environment.set_mapsize(8 << 20)
    store = Store(handle.environment, budget_bytes=64 << 20)
    written = 0
    while True:
        try:
            store.apply([put(written, 500 * KIB)])
        except lmdb.MapFullError:
            break
        written += 1
    assert written > 4
    audit(store)
    store.make_room(2 << 20)
    store.apply([put(written, 500 * KIB)])
    assert store.look_up(key_of(written)) is not None
    audit(store)
    handle.close()


# Reading


def test_another_full_key_under_the_same_store_key_is_a_miss(store):
    """A collision of store keys answers with nothing, never with another entry."""
    store.apply([put(1)])
    other = encode_full_key(2)
    assert store.look_up(key_of(1), other) is None
    assert store.look_up(key_of(1)) is not None
    memory = memoryview(bytearray(100))
    assert store.fill(key_of(1), other, header_of(100), [memory]) is False
    assert bytes(memory) == bytes(100)


def test_progress_counts_what_is_there_and_right(store):
    data = payload(2 * CHUNK_BYTES + 5, 3)
    store.apply([put(1, len(data), fill=3)])
    memory = memoryview(bytearray(len(data)))
    told = []

    def check(filled_bytes):
        told.append(filled_bytes)
        assert memory[:filled_bytes] == data[:filled_bytes]

    assert store.fill(key_of(1), encode_full_key(1), header_of(len(data)), [memory], check)
    assert told == [CHUNK_BYTES, 2 * CHUNK_BYTES, len(data)]


def test_another_header_than_expected_is_a_miss(store):
    store.apply([put(1, 100)])
    assert fill(store, 1, 100) is not None
    assert fill(store, 1, 100, extras=b"other") is None
    assert fill(store, 1, 99) is None
    assert fill(store, 1, 101) is None


def test_the_same_entry_at_another_cost_is_read(store):
    """Another process may have encoded it anew, in another time."""
    store.apply(
        [dataclasses.replace(put(1), header=dataclasses.replace(header_of(100), cost_s=2.5))]
    )
    assert fill(store, 1, 100) == payload(100, 0)


def test_reading_changes_no_recency(store):
    store.apply([put(1), put(2)])
    before = rows_of(store)
    store.look_up(key_of(1))
    fill(store, 1)
    list(store.records())
    assert rows_of(store) == before


def test_records_are_read_in_pages(store):
    store.apply([put(key, key) for key in range(30)])
    found = []
    after = b""
    while page := list(store.records(after=after, limit=7)):
        assert len(page) <= 7
        found += page
        after = page[-1][0]
    assert [key for key, _ in found] == sorted(key_of(key) for key in range(30))
    assert sorted(record.header.payload_bytes for _, record in found) == list(range(30))


def test_a_store_that_is_read_only_shows_the_same(store, tmp_path):
    store.apply([put(1, 1000, fill=4), BeginGeneration(namespace="a", generation=GENERATIONS[0])])
    audit(store)
    expected = (store.totals(), list(store.records()), list(store.places()), store.buckets())
    store.close()
    environment = open_for_reading(tmp_path / "store")
    reader = Store(environment, budget_bytes=0)
    found = (reader.totals(), list(reader.records()), list(reader.places()), reader.buckets())
    assert found == expected
    assert fill(reader, 1, 1000) == payload(1000, 4)
    with pytest.raises(lmdb.ReadonlyError):
        reader.apply([put(2)])
    reader.close()


# Damage


def overwrite(store, table, key, value):
    with store._environment.begin(write=True) as transaction:
        database = getattr(store._tables, table.decode())
        if value is None:
            transaction.delete(key, db=database)
        else:
            transaction.put(key, value, db=database)


SIZE = CHUNK_BYTES + 100


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_chunks_that_are_not_in_memory_are_read_together(opened, monkeypatch, resident, at_once):
    store = opened(4096 * KIB)
    size = 4 * CHUNK_BYTES + 5
    store.apply([put(1, size, fill=1)])
    told, steps = [], []
    monkeypatch.setattr(store_module, "_CHUNKS_AT_ONCE", at_once)
    monkeypatch.setattr(store_module, "is_resident", lambda view: resident)
    monkeypatch.setattr(
        store_module,
        "read_pages",
        lambda views: steps.append((len(told), [len(view) for view in views])),
    )
    memory = memoryview(bytearray(size))
    header = header_of(size)
    assert store.fill(key_of(1), encode_full_key(1), header, [memory], told.append)
    assert bytes(memory) == payload(size, 1)
    lengths = [*[CHUNK_BYTES] * 4, 5]
    expected = [(first, lengths[first : first + at_once]) for first in range(0, 5, at_once)]
    assert steps == ([] if resident else expected)


@pytest.fixture
def damaged(store):
    store.apply([put(1, SIZE, fill=1), put(2, 50, fill=2)])
    return store


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda value: bytes([value[0] ^ 1]) + value[1:], "digest"),
        (lambda value: value[:-1] + bytes([value[-1] ^ 128]), "digest"),
        (lambda value: bytes(len(value)), "digest"),
        (lambda value: value[:-1], "truncated"),
        (lambda value: value + b"x", "truncated"),
        (lambda value: b"", "truncated"),
        (lambda value: None, "truncated"),
    ],
    ids=["first bit", "last bit", "zeros", "short", "long", "empty", "gone"],
)
def test_a_damaged_chunk_is_a_record_error(damaged, number, change, cause):
    key = layout.chunk_key(key_of(1), number)
    whole = dict(rows_of(damaged)[layout.CHUNKS])[key]
    overwrite(damaged, layout.CHUNKS, key, change(whole))
    with pytest.raises(RecordError) as error:
        fill(damaged, 1, SIZE)
    assert error.value.cause == cause
    assert fill(damaged, 2, 50) == payload(50, 2)


def test_swapped_chunks_are_a_record_error(damaged):
    damaged.apply([put(3, 2 * CHUNK_BYTES + 1, fill=3)])
    first, second = (layout.chunk_key(key_of(3), number) for number in (0, 1))
    chunks = dict(rows_of(damaged)[layout.CHUNKS])
    assert chunks[first] != chunks[second]
    overwrite(damaged, layout.CHUNKS, first, chunks[second])
    overwrite(damaged, layout.CHUNKS, second, chunks[first])
    with pytest.raises(RecordError):
        fill(damaged, 3, 2 * CHUNK_BYTES + 1)


def entry_row(store, key):
    return dict(rows_of(store)[layout.ENTRIES])[key_of(key)]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row[:-1] + bytes([row[-1] ^ 1]),
        lambda row: row[: layout.PLACE_BYTES + 5],
        lambda row: row[: layout.PLACE_BYTES],
        lambda row: row[: layout.PLACE_BYTES] + bytes(100),
    ],
)
def test_a_damaged_record_is_a_record_error_and_can_be_replaced(damaged, change):
    overwrite(damaged, layout.ENTRIES, key_of(1), change(entry_row(damaged, 1)))
    with pytest.raises(RecordError):
        damaged.look_up(key_of(1), encode_full_key(1))
    with pytest.raises(RecordError):
        fill(damaged, 1, SIZE)
    assert [key for key, _ in damaged.records()] == [key_of(2)]
    damaged.apply([put(1, SIZE, fill=5)])
    assert fill(damaged, 1, SIZE) == payload(SIZE, 5)


def test_a_record_of_another_entry_is_not_served(damaged):
    damaged.apply([put(3, 50, fill=3)])
    overwrite(damaged, layout.ENTRIES, key_of(2), entry_row(damaged, 3))
    assert decode_record(entry_row(damaged, 2)[layout.PLACE_BYTES :]).header.payload_bytes == 50
    assert fill(damaged, 2, 50) is None


def test_a_damaged_entry_can_be_removed(damaged):
    row = entry_row(damaged, 1)
    overwrite(damaged, layout.ENTRIES, key_of(1), row[:-1] + bytes([row[-1] ^ 1]))
    damaged.apply([DeleteEntry(store_key=key_of(1))])
    assert damaged.look_up(key_of(1)) is None
    audit(damaged)


def test_a_recency_row_without_an_entry_does_not_stop_eviction(damaged):
    bucket = damaged.buckets()[0].number
    orphan = Place(bucket, 0).to_bytes()
    overwrite(damaged, layout.RECENCY, orphan, key_of(99))
    damaged.make_room(1 << 40)
    assert rows_of(damaged)[layout.RECENCY] == []
    assert damaged.totals().entries == 0


def test_totals_that_are_too_low_do_not_become_negative(damaged):
    overwrite(damaged, layout.META, layout.TOTALS_ROW, Bookkeeping(next_sequence=9).to_bytes())
    damaged.apply([DeleteEntry(store_key=key_of(1)), DeleteEntry(store_key=key_of(2))])
    totals = damaged.totals()
    assert (totals.entries, totals.used_bytes, totals.payload_bytes) == (0, 0, 0)


def test_damaged_totals_are_a_record_error(damaged):
    overwrite(damaged, layout.META, layout.TOTALS_ROW, b"\xc1")
    with pytest.raises(RecordError):
        damaged.totals()
    with pytest.raises(RecordError):
        damaged.apply([put(3)])


# The file's length


def test_pages_that_were_taken_and_freed_at_once_leave_a_file_that_can_be_read(tmp_path):
    settings = OpenSettings(
        path=tmp_path / "store",
        budget_bytes=8 * KIB * KIB,
        largest_entry_bytes=KIB * KIB,
        synchronous=False,
    )
    opened = open_for_writing(settings)
    try:
        store = Store(opened.environment, budget_bytes=settings.budget_bytes)
        store.apply([put(0, 3000), put(1, 200_000)])
        store.apply([DeleteEntry(store_key=key_of(1))])
        store.apply([put(3), put(3, 600_000), DeleteEntry(store_key=key_of(3)), put(1)])
        with pytest.raises(StoreUnavailableError, match="bytes"):
            check_length(settings.path)
        opened.cover_last_page()
        check_length(settings.path)
    finally:
        opened.close()


def test_a_record_under_the_key_of_another_is_damage(store):
    """Namespace, generation and full key make the key: a row that was moved is never served."""
    store.apply([put(1), put(2)])
    tables = store._tables
    with store._environment.begin(write=True) as transaction:
        transaction.put(key_of(2), transaction.get(key_of(1), db=tables.entries), db=tables.entries)
    with pytest.raises(RecordError) as caught:
        store.look_up(key_of(2), encode_full_key(1))
    assert caught.value.cause == "misplaced"
    assert store.look_up(key_of(2), encode_full_key(2)) is None
