"""A store that was damaged at rest: what it serves is right, and the server never notices.

Owns: random damage of the store's file and what a cache on it answers: every entry as it was set,
or a miss; the worker may die, this process may not.
Does not own: damage that a command reports (tests/integration/test_store_audit.py).

``MMCACHE_DAMAGE_CASES`` says how many cases are tried, all kinds together. Each case is seeded by
its number, which a failure names together with the places.
"""

import os
import random
import resource
import shutil
import struct

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache, tiered_cache
from tiered_mmcache.disk import client, layout
from tiered_mmcache.testing import audit

CASES = int(os.environ.get("MMCACHE_DAMAGE_CASES", "120"))
KEYS = range(24)
PAGE = layout.PAGE_BYTES
_FLAGS = struct.Struct("<10xH")  # lmdb 0.9 mdb.c, MDB_page: mp_flags
_STRUCTURE = 0x01 | 0x02 | 0x08  # branch, leaf, meta


@pytest.fixture(autouse=True)
def _restart_without_pause(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(client, "_SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(tiered_cache, "_START_TIMEOUT_S", 5.0)


@pytest.fixture(autouse=True)
def _no_core_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def configuration(folder):
    return CacheConfig.from_mapping(
        {
            "namespace": "faults/damage",
            "hot": {"max_size": "4MiB"},
            "disk": {
                "path": str(folder),
                "max_size": "16MiB",
                "write_buffer": "4MiB",
                "durability": "relaxed",
                "read_timeout": "2s",
                "close_timeout": "5s",
            },
        }
    )


def result(number):
    size = (0, 10, 500, 5000, 40_000, 270_000)[number % 6]
    generator = torch.Generator().manual_seed(number)
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return EmbeddingResult(embedding=payload)


def is_right(found, number):
    return torch.equal(found.embedding, result(number).embedding)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The bytes of a store that was closed in peace, after some coming and going."""
    folder = tmp_path_factory.mktemp("damage") / "store"
    with TieredMultimodalCache(config=configuration(folder)) as cache:
        for number in (*KEYS, *range(100, 110)):
            assert cache.set(number, result(number))
        assert cache.drain()
    with TieredMultimodalCache(config=configuration(folder)) as cache:
        for number in range(100, 110):
            assert cache.free(number)
        assert cache.drain()
        assert all(is_right(cache.get_single(number), number) for number in KEYS)
        audit(cache)
    return (folder / layout.DATA_FILE).read_bytes()


# Kinds of damage: each changes the bytes and says where


def some_page(generator, data):
    """Any page, or every other time one that holds structure rather than payload."""
    pages = range(len(data) // PAGE)
    if generator.random() < 0.5:
        pages = [n for n in pages if _FLAGS.unpack_from(data, n * PAGE)[0] & _STRUCTURE]
    return generator.choice(pages)


def flip_bits(generator, data):
    places = []
    for _ in range(generator.choice([1, 1, 2, 8, 64])):
        place = some_page(generator, data) * PAGE + generator.randrange(PAGE)
        data[place] ^= 1 << generator.randrange(8)
        places.append(place)
    return f"bits flipped at {places}"


def truncate(generator, data):
    size = generator.choice([generator.randrange(len(data)), some_page(generator, data) * PAGE])
    del data[size:]
    return f"truncated to {size}"


def zero(generator, data):
    start = some_page(generator, data) * PAGE + generator.choice([0, generator.randrange(PAGE)])
    size = min(generator.choice([8, 512, PAGE, 4 * PAGE, 40 * PAGE]), len(data) - start)
    data[start : start + size] = bytes(size)
    return f"{size} bytes zeroed at {start}"


def swap_pages(generator, data):
    first, second = (some_page(generator, data) * PAGE for _ in range(2))
    one, other = data[first : first + PAGE], data[second : second + PAGE]
    data[first : first + PAGE], data[second : second + PAGE] = other, one
    return f"pages swapped at {first} and {second}"


KINDS = [flip_bits, truncate, zero, swap_pages]


def serve_from(folder, case):
    """Open a cache on a damaged store and ask it for everything: (hits, misses)."""
    with TieredMultimodalCache(config=configuration(folder)) as cache:
        hits = 0
        for number in KEYS:
            found = cache.get_single(number)
            audit(cache)
            if found is not None:
                assert is_right(found, number), f"entry {number} is wrong: {case}"
                hits += 1
        assert cache.set("new", result(3)), case
        assert is_right(cache.get_single("new"), 3), case
        audit(cache)
        return hits, len(KEYS) - hits


@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_nothing_wrong_is_served(pristine, tmp_path, damage):
    totals = [0, 0]
    for number in range(-(-CASES // len(KINDS))):
        generator = random.Random(f"{damage.__name__} {number}")
        data = bytearray(pristine)
        case = f"case {number}: {damage(generator, data)}"
        folder = tmp_path / "store"
        folder.mkdir(mode=0o700)
        (folder / layout.DATA_FILE).write_bytes(data)
        for index, count in enumerate(serve_from(folder, case)):
            totals[index] += count
        shutil.rmtree(folder)
    hits, misses = totals
    assert hits > 0, "the damage was never survived: the test proves nothing"
    assert misses > 0, "the damage was never met: the test proves nothing"
