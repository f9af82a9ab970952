"""What a hostile caller, or whoever wrote the store, cannot do.

Owns: names that would be paths, and records that claim much, against a whole cache.
Does not own: decoding alone (campaign/fuzz.py, tests/unit/test_bounded.py), rights and owners
(tests/unit/test_disk_folder.py), or unregistered classes (tests/unit/test_lower_tiers.py).
"""

import lmdb
import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.disk import layout
from tiered_mmcache.entries.keys import encode_full_key, namespace_digest, store_key
from tiered_mmcache.entries.record import (
    CHUNK_BYTES,
    EntryHeader,
    Record,
    chunk_count,
    encode_record,
)
from tiered_mmcache.testing import audit

MIB = 1024 * 1024
FILES = {"data.mdb", "format-version", "last-close.json", "lock.mdb", "openers.lock"}
HOSTILE = [
    "../escape",
    "/tmp/escape",
    "..",
    "a/b",
    "nul\0",
    "-rf",
    "$(id)",
    "%s{0}",
    "\n",
    "é" * 99,
]


NAMESPACE = "faults/hostile"


def configuration(folder, namespace=NAMESPACE):
    return CacheConfig.from_mapping(
        {
            "namespace": namespace,
            "hot": {"max_size": 4096},
            "disk": {
                "path": str(folder),
                "max_size": "16MiB",
                "write_buffer": "4MiB",
                "durability": "relaxed",
                "read_timeout": "30s",
            },
        }
    )


def result(number):
    return EmbeddingResult(embedding=torch.full((3000,), number, dtype=torch.uint8))


@pytest.mark.parametrize("namespace", ["../../escape", "/etc/passwd", "a/../../b"])
def test_no_text_of_a_caller_reaches_a_path(tmp_path, namespace):
    store = tmp_path / "store"
    keys = [*HOSTILE, *(key.encode() for key in HOSTILE), ("../escape", b"/escape")]
    with TieredMultimodalCache(config=configuration(store, namespace)) as cache:
        for number, key in enumerate(keys):
            assert cache.set(key, result(number))
        cache.clear("../version")
        for number, key in enumerate(keys):
            assert cache.set(key, result(number))
        assert cache.set("last", result(0))
        assert cache.drain()
        for number, key in enumerate(keys):
            assert torch.equal(cache.get_single(key).embedding, result(number).embedding)
        audit(cache)
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    assert {path.name for path in store.iterdir()} == FILES


def put_record(store, key, shape):
    """Write what the cache will find under a key: a record in order, without any chunk."""
    full_key = encode_full_key(key)
    header = EntryHeader(
        class_tag="EmbeddingResult",
        dtype="uint8",
        item_bytes=1,
        shape=shape,
        extras=b"",
        device_type="cpu",
    )
    with lmdb.open(str(store), max_dbs=4, map_size=64 * MIB) as environment:
        meta, entries = (environment.open_db(name) for name in (layout.META, layout.ENTRIES))
        with environment.begin(write=True) as transaction:
            namespace_row = layout.namespace_row(namespace_digest(NAMESPACE))
            record = Record(
                header=header,
                full_key=full_key,
                namespace=NAMESPACE,
                generation=transaction.get(namespace_row, db=meta),
                digests=bytes(8 * chunk_count(header.payload_bytes)),
                created_s=1.0,
            )
            name = store_key(namespace=NAMESPACE, generation=record.generation, full_key=full_key)
            row = layout.Place(0, 0).to_bytes() + encode_record(record)
            transaction.put(name, row, db=entries)


@pytest.mark.parametrize(
    ("shape", "misses", "faults"),
    [
        ((1_000_000 * CHUNK_BYTES,), {"no_room": 1}, {}),  # 244 GiB, by a record of 8 MB
        ((2 * MIB,), {"disk_fault": 1}, {"truncated": 1}),  # fits, but has no chunks
    ],
    ids=["more than there is", "more than it has"],
)
def test_a_record_that_claims_more_than_it_has_is_a_miss(tmp_path, shape, misses, faults):
    store = tmp_path / "store"
    config = configuration(store)
    with TieredMultimodalCache(config=config) as cache:
        assert cache.set("good", result(1))
        assert cache.set("pushes it out", result(2))
        assert cache.drain()
    put_record(store, "hostile", shape)
    with TieredMultimodalCache(config=config) as cache:
        assert cache.get_single("hostile") is None
        audit(cache)
        assert cache.drain()
        stats = cache.stats()
        assert (stats.misses_by_reason, stats.faults) == (misses, faults)
        assert torch.equal(cache.get_single("good").embedding, result(1).embedding)
