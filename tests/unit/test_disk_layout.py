"""The store's tables: rows read back, chunks cut exactly, costs never below what LMDB takes.

Owns: the bytes of rows other than records. Does not own: transactions (test_disk_store.py).
"""

import dataclasses

import lmdb
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.layout import Bookkeeping, Bucket, Place, chunks_of
from tiered_mmcache.entries.record import CHUNK_BYTES, FORMAT_VERSION
from tiered_mmcache.errors import RecordError

counts = st.integers(0, 2**63 - 1)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_place_comes_back(bucket, sequence):
    place = Place(bucket, sequence)
    assert len(place.to_bytes()) == layout.PLACE_BYTES
    assert Place.from_bytes(place.to_bytes()) == place
    assert Place.from_bytes(place.to_bytes() + b"record") == place
    assert place.to_bytes().startswith(layout.bucket_prefix(bucket))


places = st.builds(Place, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))


@given(places, places)
def test_places_sort_as_their_bytes_do(one, other):
    assert (one < other) == (one.to_bytes() < other.to_bytes())


@pytest.mark.parametrize("length", range(layout.PLACE_BYTES))
def test_a_short_place_is_a_record_error(length):
    with pytest.raises(RecordError) as error:
        Place.from_bytes(bytes(length))
    assert error.value.cause == "truncated"


@given(st.lists(counts, min_size=5, max_size=5))
def test_the_totals_come_back(values):
    names = [field.name for field in dataclasses.fields(Bookkeeping)]
    books = Bookkeeping(**dict(zip(names, values, strict=True)))
    assert Bookkeeping.from_bytes(books.to_bytes()) == books


@pytest.mark.parametrize(
    "values", [5, [], [1] * 4, [1] * 6, [1, 2, 3, 4, -1], [1, 2, 3, 4, 5.0], [1, 2, 3, 4, True]]
)
def test_damaged_totals_are_a_record_error(values):
    with pytest.raises(RecordError):
        Bookkeeping.from_bytes(msgpack.packb(values))


@given(st.integers(0, 2**32 - 1), st.text(max_size=30), st.binary(max_size=16), st.booleans())
def test_a_bucket_comes_back(number, namespace, generation, stale):
    bucket = Bucket(number=number, namespace=namespace, generation=generation, stale=stale)
    assert Bucket.from_row(layout.bucket_row(number), bucket.to_bytes()) == bucket
    assert layout.bucket_row(number).startswith(layout.BUCKET_ROWS)


@pytest.mark.parametrize(
    "fields", [None, [], ["n", b"g"], ["n", "g", True], [b"n", b"g", True], ["n", b"g", 1]]
)
def test_a_damaged_bucket_is_a_record_error(fields):
    with pytest.raises(RecordError):
        Bucket.from_row(layout.bucket_row(1), msgpack.packb(fields))


@given(st.binary(max_size=40))
def test_garbage_rows_are_record_errors(data):
    for decode in (
        Bookkeeping.from_bytes,
        layout.format_version,
        lambda value: Bucket.from_row(layout.bucket_row(1), value),
    ):
        try:
            decode(data)
        except RecordError:
            continue


def test_the_format_row():
    assert layout.format_version(layout.format_value()) == FORMAT_VERSION
    assert layout.format_version(msgpack.packb([7, "more", "fields"])) == 7


@pytest.mark.parametrize("value", [5, [], ["1"], [True], [1.0]])
def test_a_damaged_format_row_is_a_record_error(value):
    with pytest.raises(RecordError):
        layout.format_version(msgpack.packb(value))


def test_rows_of_the_meta_table_do_not_collide():
    digest, generation = bytes(16), bytes(range(16))
    rows = [
        layout.FORMAT_ROW,
        layout.TOTALS_ROW,
        layout.namespace_row(digest),
        layout.generation_row(digest, generation),
        layout.bucket_row(0),
        layout.bucket_row(1),
    ]
    assert len(set(rows)) == len(rows)
    assert max(map(len, rows)) <= 511  # LMDB's longest key


def test_a_chunks_key_names_its_owner():
    key = layout.chunk_key(bytes(range(16)), 258)
    assert key == bytes(range(16)) + b"\0\0\1\2"
    assert layout.chunk_owner(key) == bytes(range(16))
    assert layout.chunk_key(b"k" * 16, 2) < layout.chunk_key(b"k" * 16, 10)


# Chunks


@st.composite
def payloads(draw):
    """A payload in parts, some of them empty, perhaps with more room than the payload needs."""
    sizes = draw(
        st.lists(
            st.integers(0, 40)
            | st.integers(CHUNK_BYTES - 2, CHUNK_BYTES + 2)
            | st.just(3 * CHUNK_BYTES),
            max_size=6,
        )
    )
    data = memoryview(bytes(range(251)) * (sum(sizes) // 251 + 1))
    parts = []
    for size in sizes:
        start = sum(len(part) for part in parts)
        parts.append(data[start : start + size])
    return parts, draw(st.integers(0, sum(sizes))), data


@settings(max_examples=100, deadline=None)
@given(payloads())
def test_chunks_are_the_payload_in_order(payload):
    parts, payload_bytes, data = payload
    chunks = list(chunks_of(parts, payload_bytes))
    sizes = [sum(map(len, pieces)) for pieces in chunks]
    assert all(size == CHUNK_BYTES for size in sizes[:-1])
    assert all(0 < size <= CHUNK_BYTES for size in sizes[-1:])
    assert sum(sizes) == payload_bytes
    assert b"".join(piece for pieces in chunks for piece in pieces) == data[:payload_bytes]


def test_chunks_are_views_that_can_be_written():
    memory = bytearray(CHUNK_BYTES + 10)
    whole = memoryview(memory)
    for pieces in chunks_of([whole[5:], whole[:5]], CHUNK_BYTES + 10):
        for piece in pieces:
            piece[:] = b"x" * len(piece)
    assert memory == b"x" * (CHUNK_BYTES + 10)


# Costs


def test_a_chunk_costs_exactly_its_pages():
    assert layout.charged_bytes(20, CHUNK_BYTES) - 64 * layout.PAGE_BYTES < 100
    assert layout.charged_bytes(20, 64 * layout.PAGE_BYTES - 16 + 1) > 65 * layout.PAGE_BYTES


@given(st.integers(0, 511), st.integers(0, 10**6), st.integers(0, 10**4))
def test_a_larger_value_never_costs_less(key_bytes, value_bytes, more):
    assert layout.charged_bytes(key_bytes, value_bytes) > value_bytes
    assert layout.charged_bytes(key_bytes, value_bytes + more) >= layout.charged_bytes(
        key_bytes, value_bytes
    )


@pytest.mark.parametrize("payload_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES])
def test_an_entry_costs_its_chunks_its_record_and_its_place(payload_bytes):
    cost_bytes = layout.charged_entry_bytes(150, payload_bytes)
    rows = [(16, layout.PLACE_BYTES + 150), (layout.PLACE_BYTES, 16)]
    whole, rest = divmod(payload_bytes, CHUNK_BYTES)
    rows += [(20, CHUNK_BYTES)] * whole + ([(20, rest)] if rest else [])
    assert cost_bytes == sum(layout.charged_bytes(*row) for row in rows)


@pytest.mark.parametrize("value_bytes", [10, 500, 1900, 2000, 2030, 4080, 4081, 60_000])
def test_what_is_charged_covers_what_lmdb_takes(tmp_path, value_bytes):
    """Random keys, the order that splits pages worst."""
    rows = 300
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        with environment.begin(write=True) as transaction:
            for number in range(rows):
                key = (number * 7919 % rows).to_bytes(16, "little")
                transaction.put(key, bytes(value_bytes))
        stat = environment.stat()
        pages = stat["leaf_pages"] + stat["overflow_pages"]
    assert pages * layout.PAGE_BYTES <= rows * layout.charged_bytes(16, value_bytes) + 4096
