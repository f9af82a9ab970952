"""Every combination of tiers, write policies and durabilities, with real spill workers.

Owns: what each combination keeps, gives back, frees, clears and finds again after a restart; how
a cache is configured; two caches on one store; several threads on one cache.
Does not own: kinds of entries (test_every_entry_comes_back.py) or failures (tests/faults).
"""

import random
import sys
import threading

import pytest
import torch
import yaml

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.errors import ConfigError
from tiered_mmcache.testing import ManualCopyEngine, audit, audit_idle

SIZE = 1000  # bytes of an entry
PAGE = 4096
IN_HOT = 4  # entries that each tier holds
IN_HOST = 3
COUNT = 20
JOIN_S = 60

WITHOUT_DISK = [("hot",), ("hot", "host")]
WITH_DISK = [("hot", "disk"), ("hot", "host", "disk")]
POLICIES = ["on_evict", "on_second_hit", "through"]
COMBINATIONS = [(tiers, None, None) for tiers in WITHOUT_DISK] + [
    (tiers, write, durability)
    for tiers in WITH_DISK
    for write in POLICIES
    for durability in ("ordered", "relaxed")
]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch):
    """The environment of whoever runs the tests must not add tiers."""
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)


def sections(folder, tiers=("hot", "host", "disk"), *, hot=None, host=None, disk=None):
    found = {
        "namespace": "combinations/test",
        "hot": {"max_size": IN_HOT * SIZE, **(hot or {})},
        "host": {"max_size": IN_HOST * PAGE, **(host or {})},
        "disk": {
            "path": str(folder / "store"),
            "max_size": "16MiB",
            "write_buffer": "1MiB",
            "read_timeout": "60s",
            **(disk or {}),
        },
    }
    return {name: found[name] for name in ("namespace", *tiers)}


@pytest.fixture
def opened():
    """Opens caches; at the end each is drained, audited and closed."""
    caches = []

    def open_cache(mapping, **arguments):
        config = CacheConfig.from_mapping(mapping)
        caches.append(TieredMultimodalCache(config=config, **arguments))
        return caches[-1]

    yield open_cache
    for cache in caches:
        finish(cache)


def finish(cache):
    if not cache._closed:
        audit(cache)
        assert cache.drain()
        audit_idle(cache)
        assert not cache.stats().faults
        cache.close()


def result(number, size=SIZE):
    generator = torch.Generator().manual_seed(number)
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return EmbeddingResult(embedding=payload)


def is_result(found, number, size=SIZE):
    return found is not None and torch.equal(found.embedding, result(number, size).embedding)


def settle(cache):
    audit(cache)
    assert cache.drain()
    audit_idle(cache)


def numbers_found(cache, numbers):
    """The numbers whose entry comes back; one that comes back wrong fails the test."""
    found = set()
    for number in numbers:
        answer = cache.get_single(number)
        audit(cache)
        if isinstance(cache._below and cache._below._engine, ManualCopyEngine):
            cache._below._engine.synchronize()  # as a consumer on the caller's stream
        if answer is not None:
            assert is_result(answer, number)
            found.add(number)
    return found


def newest(count, last=COUNT):
    return set(range(last - count, last))


# The life of entries


@pytest.mark.parametrize(
    ("tiers", "write", "durability"),
    COMBINATIONS,
    ids=lambda value: value if isinstance(value, str) else "-".join(value or ["no"]),
)
def test_set_evict_get_free_clear_close_and_reopen(opened, tmp_path, tiers, write, durability):
    mapping = sections(tmp_path, tiers)
    if write is not None:
        mapping["disk"] |= {"write": write, "durability": durability}
    cache = opened(mapping)
    in_memory = IN_HOT + (IN_HOST if "host" in tiers else 0)

    for number in range(COUNT):
        assert cache.set(number, result(number))
        audit(cache)
        assert cache.has(number)
    settle(cache)
    assert len(cache) == IN_HOT
    assert set(cache.mm_cache) == newest(IN_HOT)
    kept = {number for number in range(COUNT) if cache.has(number)}
    in_host = {number for number in range(COUNT) if cache.locate(number) is Tier.HOST}
    if "host" in tiers and write != "through":  # there the hot tier's entries have copies too
        assert in_host == newest(IN_HOST, COUNT - IN_HOT)
    if write in ("on_evict", "through"):
        assert kept == set(range(COUNT))
    else:
        assert kept == newest(in_memory)  # written is what goes for the second time
    found = numbers_found(cache, range(COUNT))
    assert found <= kept
    if write in ("on_evict", "through"):
        assert found == kept

    for _ in range(2):
        for number in range(COUNT):
            assert cache.set(number, result(number))
            audit(cache)
    settle(cache)
    if write is not None:
        assert numbers_found(cache, range(COUNT)) == set(range(COUNT))

    again = cache.get_single(COUNT - 1)
    assert is_result(again, COUNT - 1)
    assert cache.get_single(COUNT - 1) is again
    assert cache.free(COUNT - 1)
    assert not cache.has(COUNT - 1)
    assert cache.get_single(COUNT - 1) is None
    assert not cache.free(COUNT - 1)
    audit(cache)
    if write is not None:
        assert cache.free(0)
        assert cache.get_single(0) is None
        settle(cache)
        assert cache.get_single(0) is None
    assert not cache.free("never set")

    cache.clear()
    assert len(cache) == cache.available_size() == cache.current_size == 0
    audit(cache)
    assert numbers_found(cache, range(COUNT)) == set()
    settle(cache)
    assert numbers_found(cache, range(COUNT)) == set()

    for number in range(5):
        assert cache.set(number, result(number))
    assert cache.get([1, 2]) is None
    assert cache.set(cache.combine_hashes([1, 2]), result(12))
    assert is_result(cache.get([1, 2]), 12)
    assert cache.free(2)
    finish(cache)
    assert cache.get_single(1) is None
    assert not cache.set(1, result(1))
    assert not cache.free(1)
    assert cache.locate(1) is None
    cache.clear()
    cache.close()

    again = opened(mapping)
    expected = {0, 1, 3, 4} if write is not None else set()
    if write == "on_second_hit" and "host" not in tiers:
        expected = {3, 4}  # the others left memory for the first time before the end
    assert numbers_found(again, range(COUNT)) == expected
    assert is_result(again.get([1, 2]), 12) is (write is not None)
    assert again.get([2, 1]) is None


def test_without_a_configuration_it_is_the_static_cache(tmp_path):
    cache = TieredMultimodalCache(IN_HOT * SIZE)
    for number in range(COUNT):
        assert cache.set(number, result(number))
        audit(cache)
    assert numbers_found(cache, range(COUNT)) == newest(IN_HOT)
    assert cache.stats().host == cache.stats().disk == {"hits": 0}
    assert cache.drain()
    audit_idle(cache)
    cache.close()


@pytest.mark.parametrize("write", POLICIES)
def test_copies_that_end_late_lose_nothing(opened, tmp_path, write):
    engine = ManualCopyEngine()
    cache = opened(sections(tmp_path, disk={"write": write}), engine=engine)
    for _ in range(2):
        for number in range(COUNT):
            assert cache.set(number, result(number))
            audit(cache)
    assert cache.stats().host["demotions"]
    assert numbers_found(cache, range(COUNT)) >= newest(IN_HOT + IN_HOST)
    settle(cache)
    if write != "on_second_hit":
        assert numbers_found(cache, range(COUNT)) == set(range(COUNT))


# Configuration


def write_yaml(tmp_path, **changes):
    file = tmp_path / "mmcache.yaml"
    file.write_text(yaml.safe_dump(sections(tmp_path, **changes)))
    return file


def test_the_environment_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", str(write_yaml(tmp_path)))
    with TieredMultimodalCache() as cache:
        assert cache.max_size == IN_HOT * SIZE
        for number in range(COUNT):
            cache.set(number, result(number))
        settle(cache)
    with TieredMultimodalCache(SIZE) as cache:
        assert cache.max_size == SIZE
        assert numbers_found(cache, range(COUNT)) == set(range(COUNT))
        settle(cache)


def test_a_configuration_in_code_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", str(tmp_path / "nowhere.yaml"))
    config = CacheConfig.from_mapping({"hot": {"max_size": 10}})
    with TieredMultimodalCache(config=config) as cache:
        assert cache.max_size == 10
        audit(cache)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        TieredMultimodalCache()


def test_an_explicit_size_wins_over_the_file(tmp_path):
    file = write_yaml(tmp_path)
    for size, expected in ((None, IN_HOT * SIZE), (SIZE, SIZE), (0, 0)):
        with TieredMultimodalCache.from_yaml(file, size) as cache:
            assert cache.max_size == expected
            cache.set(1, result(1))
            audit(cache)
            assert len(cache) == (1 if expected >= SIZE else 0)


@pytest.mark.parametrize("mapping", [None, {"host": {"max_size": "1MiB"}}])
def test_a_cache_without_a_size_is_refused(mapping):
    config = None if mapping is None else CacheConfig.from_mapping(mapping)
    with pytest.raises(ConfigError, match=r"hot\.max_size") as caught:
        TieredMultimodalCache(config=config)
    assert "max_size" in caught.value.remedy


# Entries that are too large for a tier


@pytest.mark.parametrize("tiers", WITHOUT_DISK + WITH_DISK, ids="-".join)
def test_an_entry_larger_than_the_hot_tier_is_refused(opened, tmp_path, tiers):
    cache = opened(sections(tmp_path, tiers))
    for number in range(IN_HOT):
        cache.set(number, result(number))
    order = list(cache.mm_cache)
    assert not cache.set("large", result(1, IN_HOT * SIZE + 1))
    assert list(cache.mm_cache) == order
    assert not cache.has("large")
    assert cache.stats().drops == {}


@pytest.mark.parametrize("tiers", WITHOUT_DISK[1:] + WITH_DISK, ids="-".join)
def test_an_entry_larger_than_the_hot_tier_goes_below_when_asked_to(opened, tmp_path, tiers):
    size = IN_HOT * SIZE + 1
    cache = opened(sections(tmp_path, tiers, hot={"oversize": "spill"}))
    cache.set("small", result(1))
    assert cache.set("large", result(2, size))
    audit(cache)
    assert cache.locate("large") is Tier.HOST
    for _ in range(3):
        found = cache.get_single("large")
        assert is_result(found, 2, size)
        assert list(cache.mm_cache) == ["small"]  # returned without being admitted
        settle(cache)
    assert cache.set("large", result(3, size))
    assert is_result(cache.get_single("large"), 3, size)  # it was set anew
    settle(cache)
    assert is_result(cache.get_single("large"), 3, size)
    assert cache.free("large")
    assert cache.get_single("large") is None
    settle(cache)
    assert cache.get_single("large") is None
    assert cache.has("small")


def test_without_room_below_an_entry_larger_than_the_hot_tier_is_refused(opened, tmp_path):
    mapping = sections(tmp_path, ("hot", "host"), hot={"oversize": "spill"})
    cache = opened(mapping)
    assert not cache.set("large", result(1, IN_HOST * PAGE + 1))
    assert not cache.has("large")
    assert cache.stats().drops == {"no_room": 1}
    hot_only = opened({"hot": {"max_size": SIZE, "oversize": "spill"}})
    assert not hot_only.set("large", result(1, SIZE + 1))


def test_entries_larger_than_host_memory_go_through_the_write_buffer(opened, tmp_path):
    size = IN_HOST * PAGE + 1
    cache = opened(sections(tmp_path, hot={"max_size": 2 * size}))
    for number in range(10):
        assert cache.set(number, result(number, size))
        settle(cache)
    stats = cache.stats()
    assert stats.host["entries"] == 0
    assert stats.disk["entries"] == stats.disk["spills"] == 8
    for number in range(10):
        assert is_result(cache.get_single(number), number, size)
        settle(cache)
    assert not cache.stats().drops


def test_an_entry_larger_than_the_store_is_dropped_and_counted(opened, tmp_path):
    mapping = sections(
        tmp_path, ("hot", "disk"), hot={"max_size": "256KiB"}, disk={"max_size": "128KiB"}
    )
    cache = opened(mapping)
    cache.set("large", result(1, 200_000))
    cache.set("other", result(2, 100_000))
    assert cache.drain()
    audit_idle(cache)
    assert cache.get_single("large") is None
    stats = cache.stats()
    assert stats.drops == stats.faults == {"too_large": 1}
    assert is_result(cache.get_single("other"), 2, 100_000)
    cache.close()


def test_the_disk_drops_the_least_recently_used_within_its_budget(opened, tmp_path):
    cache = opened(sections(tmp_path, disk={"max_size": "128KiB"}))
    for number in range(60):
        cache.set(number, result(number))
        settle(cache)
        assert is_result(cache.get_single(0), 0)  # kept in use, it is never the oldest
    found = numbers_found(cache, reversed(range(60)))
    assert 0 in found
    assert 1 not in found
    assert newest(IN_HOT + IN_HOST, 60) <= found
    assert cache.stats().disk["bytes"] <= 128 * 1024


# Two caches on one store


def spill_all(cache, numbers):
    for number in numbers:
        assert cache.set(number, result(number))
    for filler in range(1000, 1000 + IN_HOT + IN_HOST):  # pushes the others out of memory
        cache.set(filler, result(filler))
    settle(cache)


def test_two_caches_share_what_either_has_written(opened, tmp_path):
    first, second = (opened(sections(tmp_path)) for _ in range(2))
    assert numbers_found(second, range(5)) == set()
    spill_all(first, range(5))
    assert numbers_found(second, range(5)) == set(range(5))
    assert first.free(3)
    settle(first)
    third = opened(sections(tmp_path))
    assert numbers_found(third, range(5)) == {0, 1, 2, 4}


def test_caches_that_clear_to_the_same_version_share_again(opened, tmp_path):
    first, second = (opened(sections(tmp_path)) for _ in range(2))
    first.clear("weights-1")
    second.clear("weights-1")
    spill_all(first, range(5))
    assert numbers_found(second, range(5)) == set(range(5))

    first.clear("weights-2")
    assert numbers_found(first, range(5)) == set()
    assert numbers_found(second, range(5)) == set(range(5))  # not cleared yet
    second.clear("weights-2")
    assert numbers_found(second, range(5)) == set()
    spill_all(second, range(5, 8))
    assert numbers_found(first, range(8)) == {5, 6, 7}

    third = opened(sections(tmp_path))  # starts with the version of the last to clear
    assert numbers_found(third, range(8)) == {5, 6, 7}


def test_a_cache_that_clears_without_a_version_shares_with_later_ones_only(opened, tmp_path):
    first, second = (opened(sections(tmp_path)) for _ in range(2))
    spill_all(first, range(3))
    first.clear()
    assert numbers_found(first, range(3)) == set()
    spill_all(first, range(3, 6))
    assert numbers_found(second, range(6)) == {0, 1, 2}
    assert numbers_found(opened(sections(tmp_path)), range(6)) == {3, 4, 5}


def test_namespaces_on_one_store_are_strangers(opened, tmp_path):
    first = opened(sections(tmp_path))
    other = opened(sections(tmp_path) | {"namespace": "combinations/other"})
    spill_all(first, range(3))
    assert numbers_found(other, range(3)) == set()
    other.clear()
    settle(other)
    assert numbers_found(opened(sections(tmp_path)), range(3)) == {0, 1, 2}


# Several threads


@pytest.fixture
def _eager_switches():
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval_s)


def run_threads(*targets):
    """Run all to the end; the first error of any is raised here."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("tiers", WITHOUT_DISK + WITH_DISK, ids="-".join)
@pytest.mark.usefixtures("_eager_switches")
def test_threads_get_what_was_set(opened, tmp_path, tiers):
    cache = opened(sections(tmp_path, tiers))
    keys = [*range(8), *(cache.combine_hashes([n, n + 1]) for n in range(8))]

    def work(seed):
        generator = random.Random(seed)
        for _ in range(300):
            number = generator.randrange(len(keys))
            call = generator.randrange(10)
            if call < 5:
                found = cache.get_single(keys[number])
                assert found is None or is_result(found, number)
            elif call < 8:
                assert cache.set(keys[number], result(number))
            elif call == 8:
                cache.free(keys[number])
            else:
                cache.has(keys[number])

    run_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
    settle(cache)
    for number, key in enumerate(keys):
        assert cache.set(key, result(number))
        assert is_result(cache.get_single(key), number)


def test_a_hot_hit_takes_no_lock(opened, tmp_path):
    cache = opened(sections(tmp_path))
    cache.set(1, result(1))
    found = []
    with cache._lock:
        run_threads(lambda: found.append(cache.get_single(1)))
    assert is_result(found[0], 1)
