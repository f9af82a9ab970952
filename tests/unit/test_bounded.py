"""Decoding msgpack of unknown origin: what is claimed is counted before anything is built.

Owns: the count and the memory it bounds. Does not own: what the values mean (test_record.py,
test_extras.py) or hostile bytes by the thousand (tests/faults/campaign/fuzz.py).
"""

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_mmcache.entries.bounded import (
    SMALL_BYTES,
    check_bounds,
    unpack_bounded,
    unpack_small,
)
from tiered_mmcache.entries.extras import MAX_VALUES, NotPlainError, decode_extras, encode_extras
from tiered_mmcache.errors import RecordError

MIB = 1024 * 1024
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=40,
)


def count(value):
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1


@given(plain)
def test_every_value_is_counted(value):
    packed = msgpack.packb(value)
    assert check_bounds(packed) == count(value)
    assert unpack_bounded(packed, most_items=count(value)) == value
    with pytest.raises(RecordError):
        unpack_bounded(packed + b"\xc0")
    with pytest.raises(RecordError):
        unpack_bounded(packed[:-1])


@pytest.mark.parametrize("size", [16, 300, 70_000])
@pytest.mark.parametrize("make", [bytes, lambda n: "x" * n, lambda n: [None] * n])
def test_every_length_form_is_read(size, make):
    packed = msgpack.packb(make(size))
    assert unpack_bounded(packed) == make(size)
    extension = msgpack.packb(msgpack.ExtType(5, bytes(size)))
    assert check_bounds(extension) == 1


def test_a_bound_is_inclusive():
    packed = msgpack.packb(["ab", "cd"])
    assert unpack_bounded(packed, most_items=3, most_text_bytes=4) == ["ab", "cd"]
    for bounds in ({"most_items": 2}, {"most_text_bytes": 3}):
        with pytest.raises(RecordError):
            unpack_bounded(packed, **bounds)


@pytest.mark.parametrize(
    "body",
    [b"\xdd\x00\x00\xff\xff" * 1000, b"\xdc\xff\xff" * 1000, b"\xdf\x00\x00\xff\xff" * 1000],
)
def test_nested_claims_take_no_memory(body):
    tracemalloc.start()
    try:
        with pytest.raises(RecordError):
            unpack_bounded(body.ljust(60_000, b"\xc0"))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("wrap", "own", "each"), [(list, 3, 1), (tuple, 4, 1), (dict.fromkeys, 3, 2)]
)
def test_extra_fields_are_refused_at_the_same_number_as_they_are_decoded(wrap, own, each):
    room = (MAX_VALUES - own) // each
    fields = {"f": wrap(range(room))}
    assert decode_extras(encode_extras(fields)) == fields
    with pytest.raises(NotPlainError):
        encode_extras({"f": wrap(range(room + 1))})


def test_extra_fields_with_too_many_values_are_damage():
    packed = msgpack.packb({"f": [None] * MAX_VALUES})
    with pytest.raises(RecordError):
        decode_extras(packed)
    inner = msgpack.ExtType(1, msgpack.packb([None] * (MAX_VALUES // 2)))
    with pytest.raises(RecordError):
        decode_extras(msgpack.packb({"f": [inner, inner]}))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdc\x00\x40" * 1365,  # lists of 64, one in the other
        b"\xdd\x00\x00\x00\x40" * 819,
        b"\x9f" * SMALL_BYTES,
        b"\x91" * SMALL_BYTES,
        b"\x8f" * SMALL_BYTES,
    ],
)
def test_small_values_are_bounded_by_their_lists(body):
    tracemalloc.start()
    try:
        with pytest.raises(RecordError):
            unpack_small(body, most_listed=64)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91", b"\x01\x01", b"\xdc\x00\x41" + bytes(65), b"\xd9\x01\xff"]
)
def test_small_values_that_are_none_are_refused(body):
    with pytest.raises(RecordError):
        unpack_small(body, most_listed=64)


def test_small_values_are_what_the_others_are():
    body = msgpack.packb([1, b"x", "text", [2**63, [-1.5, None]]])
    assert unpack_small(body, most_listed=64) == unpack_bounded(body)
