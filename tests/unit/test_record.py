"""Records: what is written is read back, and damage is always a RecordError.

Owns: the record's bytes. Does not own: where they are stored (test_disk_store.py).
"""

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.entries import record
from tiered_mmcache.entries.record import (
    CHUNK_BYTES,
    EntryHeader,
    Record,
    chunk_count,
    decode_header,
    decode_record,
    digest,
    encode_header,
    encode_record,
    unpack_bounded,
)
from tiered_mmcache.errors import RecordError

headers = st.builds(
    EntryHeader,
    class_tag=st.text(max_size=20),
    dtype=st.text(min_size=1, max_size=20),
    item_bytes=st.sampled_from([1, 2, 4, 8, 16]),
    shape=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    extras=st.binary(max_size=40),
    device_type=st.text(min_size=1, max_size=10),
    cost_s=st.floats(0, 1e6),
)


@st.composite
def records(draw):
    header = draw(headers)
    count = chunk_count(header.payload_bytes) * record.DIGEST_BYTES
    return Record(
        header=header,
        full_key=draw(st.binary(max_size=40)),
        namespace=draw(st.text(max_size=20)),
        generation=draw(st.binary(min_size=16, max_size=16)),
        digests=draw(st.binary(min_size=4, max_size=4)) * (count // 4),
        created_s=draw(st.floats(0, 1e10)),
    )


def sample(**changes):
    header = EntryHeader(
        class_tag="EmbeddingResult",
        dtype="bfloat16",
        item_bytes=2,
        shape=(300, 1000),
        extras=b"",
        device_type="cuda",
        cost_s=0.25,
    )
    values = {
        "header": header,
        "full_key": b"full key",
        "namespace": "model",
        "generation": bytes(16),
        "digests": b"12345678" * 3,
        "created_s": 1.5,
    }
    return Record(**(values | changes))


def signed(fields):
    body = msgpack.packb(fields, use_bin_type=True)
    return digest(body) + body


def fields_of(data):
    return msgpack.unpackb(data[8:], raw=False)


# Round trips


@given(headers)
def test_a_header_comes_back(header):
    assert decode_header(encode_header(header)) == header


@given(records())
def test_a_record_comes_back(original):
    assert decode_record(encode_record(original)) == original


def test_the_payload_and_its_chunks():
    scalar = dataclasses.replace(sample().header, shape=())
    assert scalar.payload_bytes == 2
    empty = dataclasses.replace(sample().header, shape=(0, 5))
    assert empty.payload_bytes == 0
    assert sample(header=empty, digests=b"").chunk_count == 0
    assert sample().chunk_count == 3


@pytest.mark.parametrize(
    ("payload_bytes", "chunks"),
    [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (10 * CHUNK_BYTES, 10)],
)
def test_how_many_chunks_hold_a_payload(payload_bytes, chunks):
    assert chunk_count(payload_bytes) == chunks


def test_a_chunk_fills_whole_pages_of_lmdb():
    assert CHUNK_BYTES == 262_080
    assert CHUNK_BYTES <= 64 * 4096 - 16
    assert CHUNK_BYTES % 64 == 0


# Damage


@settings(max_examples=300)
@given(records(), st.data())
def test_any_change_of_the_bytes_is_noticed(original, data):
    encoded = bytearray(encode_record(original))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError) as error:
        decode_record(bytes(encoded))
    assert error.value.cause == "digest"


@given(records(), st.data())
def test_a_shorter_record_is_noticed(original, data):
    encoded = encode_record(original)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(RecordError):
        decode_record(encoded[:cut])


@given(records(), st.binary(min_size=1, max_size=20))
def test_a_longer_record_is_noticed(original, more):
    with pytest.raises(RecordError):
        decode_record(encode_record(original) + more)


@given(st.binary(max_size=100))
def test_garbage_is_noticed(data):
    with pytest.raises(RecordError):
        decode_record(data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300)
@given(anything)
def test_signed_nonsense_is_noticed(fields):
    with pytest.raises(RecordError):
        decode_record(signed(fields))


@settings(max_examples=500)
@given(records(), st.integers(1, 6), anything)
def test_a_signed_record_with_one_wrong_field_decodes_to_the_same_or_is_noticed(
    original, position, value
):
    fields = fields_of(encode_record(original))
    fields[position] = value
    encoded = signed(fields)
    try:
        decoded = decode_record(encoded)
    except RecordError:
        return
    assert encode_record(decoded) == encoded


@settings(max_examples=500)
@given(headers, st.integers(0, 6), anything)
def test_a_header_with_one_wrong_field_decodes_to_the_same_or_is_noticed(header, position, value):
    fields = encode_header(header)
    fields[position] = value
    try:
        decoded = decode_header(fields)
    except RecordError:
        return
    assert encode_header(decoded) == fields


@given(st.binary(max_size=60))
def test_unpacking_garbage_gives_a_value_or_a_record_error(data):
    try:
        unpack_bounded(data)
    except RecordError as error:
        assert error.cause == "malformed"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list that claims four thousand million items
        b"\xdf\xff\xff\xff\xff",  # a map that does
        b"\xc6\xff\xff\xff\xff",  # bytes that do
        b"\xdb\xff\xff\xff\xff",  # a text that does
        b"\xc9\xff\xff\xff\xff\x01",  # an extension that does
        b"\x91" * 100_000,
        b"\x81\x90\xc0",  # a map with a list as its key
        b"\xa1\xff",  # text that is not UTF-8
        b"\xc0\xc0",
    ],
    ids=range(11),
)
def test_bombs_are_malformed(data):
    with pytest.raises(RecordError) as error:
        unpack_bounded(data)
    assert error.value.cause == "malformed"


def cause_of(data):
    with pytest.raises(RecordError) as error:
        decode_record(data)
    return error.value.cause


def test_the_cause_of_a_short_or_huge_record():
    assert cause_of(b"") == "truncated"
    assert cause_of(bytes(8)) == "truncated"
    assert cause_of(bytes(record.MAX_RECORD_BYTES + 1)) == "truncated"


@pytest.mark.parametrize("version", [0, 2, 1000, -1])
def test_another_version_is_not_guessed_at(version):
    assert cause_of(signed([version])) == "future_version"
    assert cause_of(signed([version, *fields_of(encode_record(sample()))[1:]])) == "future_version"


@pytest.mark.parametrize(
    "fields", [[], {}, "text", ["1"], [True], [1.0], [1], [1, 2, 3, 4, 5, 6, 7, 8]]
)
def test_a_record_is_a_list_of_seven_that_begins_with_its_version(fields):
    assert cause_of(signed(fields)) == "malformed"


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (1, "text"),
        (2, b"bytes"),
        (3, bytes(15)),
        (3, bytes(17)),
        (3, "1234567890123456"),
        (4, 1),
        (4, math.nan),
        (4, math.inf),
        (5, bytes(16)),
        (5, bytes(32)),
        (5, "1" * 24),
        (6, []),
        (6, None),
    ],
)
def test_fields_out_of_bounds(position, value):
    fields = fields_of(encode_record(sample()))
    fields[position] = value
    assert cause_of(signed(fields)) == "malformed"


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, None),
        (0, "x" * 256),
        (1, ""),
        (1, "x" * 65),
        (2, 3),
        (2, 0),
        (2, True),
        (2, 2.0),
        (3, 5),
        (3, [1] * 65),
        (3, [-1]),
        (3, [True]),
        (3, [2**63]),
        (3, ["1"]),
        (3, [2**62, 2]),
        (4, "text"),
        (4, bytes(record.MAX_EXTRAS_BYTES + 1)),
        (5, ""),
        (5, "x" * 33),
        (6, 0),
        (6, -0.5),
        (6, math.inf),
        (6, math.nan),
    ],
)
def test_header_fields_out_of_bounds(position, value):
    fields = encode_header(sample().header)
    fields[position] = value
    with pytest.raises(RecordError) as error:
        decode_header(fields)
    assert error.value.cause == "malformed"


@pytest.mark.parametrize("fields", [None, (1,), [], [1] * 6, [1] * 8, "1234567"])
def test_a_header_is_a_list_of_seven(fields):
    with pytest.raises(RecordError):
        decode_header(fields)


def test_the_largest_header_is_accepted():
    header = EntryHeader(
        class_tag="x" * 255,
        dtype="y" * 64,
        item_bytes=16,
        shape=(1,) * 63 + (2**58,),
        extras=bytes(record.MAX_EXTRAS_BYTES),
        device_type="z" * 32,
        cost_s=1e300,
    )
    assert decode_header(encode_header(header)) == header
