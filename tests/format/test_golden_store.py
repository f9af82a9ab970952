"""Stores that earlier versions wrote are read by this one: every entry, to the last bit.

golden/store-1.mdb.gz was written once by make_golden.py and stays as it is. It is read by the
package's own reader, by the worker's store, and by a reader that knows docs/format.md alone.
"""

import gzip
import hashlib
import importlib.util
import struct
from pathlib import Path

import lmdb
import msgpack
import pytest
import xxhash

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.audit import Audit, TotalsState
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.disk.recovery import OpenSettings, open_for_reading, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.extras import decode_extras

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "store-1.mdb.gz"

_spec = importlib.util.spec_from_file_location("make_golden", HERE / "make_golden.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

entries = pytest.mark.parametrize(
    "entry", golden.ENTRIES, ids=lambda entry: entry.full_key.hex()[:32]
)


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden store."""
    data_file = tmp_path / "data.mdb"
    data_file.write_bytes(gzip.decompress(GOLDEN.read_bytes()))
    return tmp_path


@pytest.fixture
def reader(folder):
    with StoreReader.open(folder) as opened:
        yield opened


def payload_of(reader, stored):
    chunks = []
    assert reader.visit_chunks(stored, lambda number, data: chunks.append(bytes(data)))
    return b"".join(chunks)


def test_it_is_small():
    assert GOLDEN.stat().st_size <= 100 * 1024


@entries
def test_every_entry_is_read(reader, entry):
    (stored,) = reader.look_up([entry.store_key])
    record = stored.record()
    assert record.full_key == entry.full_key
    assert (record.namespace, record.generation) == (entry.namespace, entry.generation)
    assert record.created_s == golden.CREATED_S
    assert record.header == entry.header
    fields = decode_extras(record.header.extras)
    assert fields == entry.fields
    assert [type(value) for value in fields.values()] == [
        type(value) for value in entry.fields.values()
    ]
    assert payload_of(reader, stored) == entry.payload


@entries
def test_every_entry_is_served_by_the_workers_store(folder, entry):
    environment = open_for_reading(folder)
    store = Store(environment, budget_bytes=golden.BUDGET_BYTES)
    memory = bytearray(len(entry.payload))
    told = []
    try:
        parts = [memoryview(memory)] if memory else []
        assert store.fill(entry.store_key, entry.full_key, entry.header, parts, told.append)
    finally:
        store.close()
    assert bytes(memory) == entry.payload
    assert told[-1:] == ([len(memory)] if memory else [])


def test_the_whole_store_is_as_it_was_written(reader):
    audit = Audit(reader)
    assert list(audit.findings()) == []
    assert audit.totals is TotalsState.EQUAL
    assert audit.entries == reader.totals().entries == len(golden.ENTRIES)
    assert {(bucket.namespace, bucket.generation): bucket.stale for bucket in reader.buckets()} == {
        (golden.NAMESPACE, golden.FIRST): True,
        (golden.NAMESPACE, golden.SECOND): False,
        (golden.OTHER_NAMESPACE, golden.FIRST): False,
    }


def test_the_order_of_use_is_kept(reader):
    newest_first = [stored.store_key for stored in reader.newest([2, 3])]
    others = [entry for entry in golden.ENTRIES[2:] if entry is not golden.USED_LAST]
    expected = [golden.USED_LAST, *reversed(others)]
    assert newest_first == [entry.store_key for entry in expected]


def test_a_server_goes_on_with_it(folder):
    settings = OpenSettings(
        path=folder,
        budget_bytes=golden.BUDGET_BYTES,
        largest_entry_bytes=1 << 20,
        synchronous=False,
    )
    opened = open_for_writing(settings)
    try:
        store = Store(opened.environment, budget_bytes=golden.BUDGET_BYTES)
        assert store.current_generation(golden.NAMESPACE) == golden.SECOND
        assert store.apply([golden._put(entry) for entry in golden.ENTRIES])
        assert store.totals().entries == len(golden.ENTRIES)
    finally:
        opened.close()
    with StoreReader.open(folder) as reader:
        assert list(Audit(reader).findings()) == []
        (stored,) = reader.look_up([golden.ENTRIES[2].store_key])
        assert stored.record().created_s == golden.CREATED_S, "an equal entry was written again"


def test_this_version_still_writes_the_same_rows(reader, tmp_path):
    golden.write_store(tmp_path / "written now")
    with StoreReader.open(tmp_path / "written now") as written:
        for table in layout.DATABASES:
            assert list(written.walk(table)) == list(reader.walk(table)), table


# A second implementation: what docs/format.md says, and nothing of the package.


def read_by_the_specification(folder, namespace, full_key):
    with lmdb.open(str(folder), readonly=True, max_dbs=4, map_size=0) as environment:
        tables = {
            name: environment.open_db(name, create=False)
            for name in (b"entries", b"chunks", b"recency", b"meta")
        }
        with environment.begin() as transaction:

            def get(table, key):
                return transaction.get(key, db=tables[table])

            assert msgpack.unpackb(get(b"meta", b"format"))[0] == 1
            name = namespace.encode()
            generation = get(b"meta", b"namespace:" + _blake(name))
            parts = (name, generation, full_key)
            key = _blake(b"".join(struct.pack(">I", len(part)) + part for part in parts))
            value = get(b"entries", key)
            if value is None:
                return None
            assert get(b"recency", value[:12]) == key
            record_digest, body = value[12:20], value[20:]
            assert xxhash.xxh3_64_digest(body) == record_digest
            version, held_key, held_name, held_generation, _, digests, header = msgpack.unpackb(
                body
            )
            assert version == 1
            assert (held_key, held_name, held_generation) == (full_key, namespace, generation)
            payload = b""
            for number in range(len(digests) // 8):
                chunk = get(b"chunks", key + struct.pack(">I", number))
                assert xxhash.xxh3_64_digest(chunk) == digests[8 * number : 8 * number + 8]
                payload += chunk
            return header, payload


def _blake(data):
    return hashlib.blake2b(data, digest_size=16, person=b"tiered-mmcache-1").digest()


@entries
def test_a_reader_that_knows_the_specification_alone_reads_it(folder, entry):
    found = read_by_the_specification(folder, entry.namespace, entry.full_key)
    if entry.namespace == golden.NAMESPACE and entry.generation != golden.SECOND:
        assert found is None
        return
    (class_tag, dtype, item_bytes, shape, _, device_type, cost_s), payload = found
    assert (class_tag, dtype, item_bytes) == (entry.class_tag, entry.dtype, entry.item_bytes)
    assert (tuple(shape), device_type, cost_s) == (entry.shape, entry.device_type, entry.cost_s)
    assert payload == entry.payload
