"""Reads that would take longer than encoding, over a store whose speed the test sets.

Owns: which look-ups become misses, what stays readable all the same, and recovery. Does not own:
the estimate itself (test_read_speed.py) or real disks (tests/integration/test_encode_cost.py).
"""

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.testing import audit, audit_idle

SIZE = 1000
COST_S = 0.1


def result(value):
    return EmbeddingResult(embedding=torch.full((SIZE,), value, dtype=torch.uint8))


class Stage:
    """A cache on a fake worker, and the clock that its reads and its encoder move."""

    def __init__(self, tmp_path, fake_client, *, adaptive=True, host=0):
        sections = {
            "namespace": "unit/adaptive",
            "hot": {"max_size": 2 * SIZE},
            "disk": {
                "path": str(tmp_path / "store"),
                "max_size": "1MiB",
                "write_buffer": "64KiB",
                "adaptive_read": adaptive,
            },
        }
        if host:
            sections["host"] = {"max_size": host * 4096}
        self.now_s = 1000.0
        self.read_s = 0.001
        stage = self

        class Client(fake_client):
            def fill(self, **request):
                stage.now_s += stage.read_s
                return super().fill(**request)

        self.cache = TieredMultimodalCache(
            config=CacheConfig.from_mapping(sections), make_client=Client
        )
        disk = self.cache._below.disk
        for part in (disk, disk.read_speed, self.cache._encoding):
            part._clock = lambda: self.now_s
        self.client = disk.client
        self.encoded = []

    def encode(self, keys):
        self.encoded += keys
        self.now_s += COST_S * len(keys)
        return [result(key % 251) for key in keys]

    def store(self, numbers):
        """Encode entries and let them go to disk."""
        for number in numbers:
            (made,) = self.cache.get_or_encode([number], self.encode)
            assert made.embedding.eq(number % 251).all()
        self.cache.drain()

    def is_read(self, number):
        hot = number in self.cache.mm_cache
        reads = len(self.client.asked("fill"))
        found = self.cache.get_single(number)
        assert (found is not None) is (hot or len(self.client.asked("fill")) > reads)
        return found is not None

    @property
    def declined(self):
        return self.cache.stats().misses_by_reason.get("slower_than_encoding", 0)


@pytest.fixture
def make(tmp_path, fake_client):
    stages = []

    def make_stage(**changes):
        stages.append(Stage(tmp_path, fake_client, **changes))
        return stages[-1]

    yield make_stage
    for stage in stages:
        stage.client.speak_again()
        audit(stage.cache)
        assert stage.cache.drain()
        audit_idle(stage.cache)
        stage.cache.close()


def slow_down(stage, first=0):
    """Read entries from a disk that has become slow until it is known."""
    stage.read_s = 10 * COST_S
    numbers = range(first, first + 40)
    stage.store(numbers)
    for number in numbers:
        stage.cache.get_single(number)
    assert stage.declined > 0


def test_a_fast_disk_is_read(make):
    stage = make()
    stage.store(range(40))
    assert all(stage.is_read(number) for number in range(30))
    assert stage.declined == 0
    snapshot = stage.cache.stats().disk
    assert snapshot["mean_read_bytes"] == pytest.approx(SIZE)
    assert snapshot["mean_read_seconds"] == pytest.approx(0.001)


def test_what_would_be_slower_than_encoding_is_a_miss(make):
    stage = make()
    slow_down(stage)
    before, misses = stage.declined, stage.cache.stats().misses
    assert [stage.is_read(number) for number in range(3)] == [False] * 3
    assert stage.declined == before + 3
    assert stage.cache.stats().misses == misses + 3


def test_what_is_declined_is_encoded_and_found_afterwards(make):
    stage = make()
    slow_down(stage)
    stage.encoded.clear()
    stage.store([0])
    assert stage.encoded == [0]
    assert stage.cache.locate(0) is Tier.HOT
    stage.store(range(100, 104))  # the new one goes to disk
    assert stage.cache._below.disk.look_up(0).cost_s == pytest.approx(COST_S)


def test_where_an_entry_would_be_declined_nobody_says_that_it_would_be_found(make):
    stage = make()
    slow_down(stage)
    assert stage.cache.locate(0) is None
    assert not stage.cache.has(0)
    for _ in range(100):  # asking brings the next trial no nearer
        assert not stage.cache.has(0)
    assert stage.cache.free(0)  # yet it is there


def test_an_entry_of_unknown_cost_is_read_however_slow_that_is(make):
    stage = make()
    slow_down(stage)
    for number in range(200, 204):
        stage.cache.set(number, result(7))
    stage.cache.drain()
    assert stage.cache.locate(200) is Tier.DISK
    assert stage.is_read(200)


def test_what_is_in_host_memory_is_served_however_slow_the_disk_is(make):
    stage = make(host=4)
    slow_down(stage)
    stage.store(range(300, 304))
    assert stage.cache.locate(300) is Tier.HOST
    assert stage.cache.get_single(300) is not None


def test_a_disk_that_recovers_is_found_out(make):
    stage = make()
    slow_down(stage)
    stage.read_s = 0.001
    read = [stage.is_read(number % 30) for number in range(300)]
    assert not any(read[:10])
    assert all(read[-100:])


def test_after_a_while_one_is_read_again(make):
    stage = make()
    slow_down(stage)
    assert not stage.is_read(0)
    stage.now_s += 31.0
    assert stage.is_read(0)
    assert not stage.is_read(1)


def test_a_read_that_is_given_up_counts_as_slow(make):
    stage = make()
    stage.store(range(40))
    for number in range(20):
        assert stage.is_read(number)
    stage.client.silent = True
    stage.read_s = 2.0
    before_s = stage.cache.stats().disk["mean_read_seconds"]
    assert not stage.cache.get_single(30)
    stage.client.speak_again()
    assert stage.cache.stats().disk["mean_read_seconds"] > before_s


def test_a_read_that_finds_nothing_says_nothing_of_the_speed(make):
    stage = make()
    stage.store(range(40))
    for number in range(20):
        assert stage.is_read(number)
    before_s = stage.cache.stats().disk["mean_read_seconds"]
    stage.client.entries.clear()
    stage.read_s = 5.0
    assert stage.cache.get_single(30) is None
    assert stage.cache.stats().disk["mean_read_seconds"] == before_s


def test_it_can_be_turned_off(make):
    stage = make(adaptive=False)
    stage.read_s = 100 * COST_S
    stage.store(range(40))
    assert all(stage.is_read(number) for number in range(30))
    assert stage.cache.locate(30) is Tier.DISK


def test_several_at_once_are_declined_as_single_ones_are(make):
    stage = make()
    slow_down(stage)
    reads, declined = len(stage.client.asked("fill")), stage.declined
    numbers = [number for number in range(40) if number not in stage.cache.mm_cache][:3]
    assert stage.cache.get_many(numbers) == [None] * 3
    assert stage.declined == declined + 3
    assert len(stage.client.asked("fill")) == reads


def test_prefetching_is_not_declined_since_nobody_waits(make):
    stage = make(host=8)
    slow_down(stage)
    number = next(n for n in range(40) if stage.cache._below.host.find(n) is None)
    assert number not in stage.cache.mm_cache
    assert stage.cache.get_single(number) is None
    assert stage.cache.prefetch([number]) == 1
    assert stage.cache.drain()
    found = stage.cache.get_single(number)
    assert found is not None
    assert found.embedding.eq(number % 251).all()
    assert stage.cache.stats().host["hits"] == 1


def test_a_read_that_queued_behind_others_says_nothing_of_the_disk(make):
    stage = make()
    stage.store(range(20))
    speed = stage.cache._below.disk.read_speed
    before = speed._reads
    stage.client.reads_held = True
    stage.read_s = 1.0
    found = stage.cache.get_many([0, 1, 2, 3])
    assert all(answer is not None for answer in found)
    assert speed._reads == before + 1  # the first one did not queue
    stage.client.reads_held = False
