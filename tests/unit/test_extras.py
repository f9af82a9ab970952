"""Extra fields: restored exactly, or refused.

Owns: the encoding of plain values. Does not own: which classes are stored (test_results.py).
"""

import enum
import math
import struct
from collections import OrderedDict, namedtuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.entries.extras import MAX_DEPTH, NotPlainError, decode_extras, encode_extras
from tiered_mmcache.entries.record import MAX_EXTRAS_BYTES
from tiered_mmcache.errors import RecordError

BIG = 10**400
hashables = st.recursive(
    st.none() | st.booleans() | st.integers(-BIG, BIG) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
    ),
    max_leaves=10,
)


def exact(value):
    """A value so that equality sees types, signs of zero, bits of NaN and order."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, dict):
        return ("dict", [(exact(k), exact(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [exact(item) for item in value])
    return (type(value).__name__, value)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=10), values, max_size=4))
def test_plain_fields_come_back_exactly(fields):
    assert exact(decode_extras(encode_extras(fields))) == exact(fields)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63,
        2**64 - 1,
        2**64,
        -(2**63),
        -(2**63) - 1,
        10**1000,
        -(10**1000),
        0.0,
        -0.0,
        math.inf,
        math.nan,
        -math.nan,
        5e-324,
        "",
        "ünï\x00",
        b"",
        b"\xff",
        [],
        (),
        {},
        [()],
        ([],),
        ((1, (2, [3, (4,)])), {"a": (5,)}),
        {(1, 2): [3], 2**70: "big", None: None, b"b": "b", 1.5: "f"},
        [1, 1.0, True],
    ],
    ids=repr,
)
def test_a_value_comes_back_exactly(value):
    assert exact(decode_extras(encode_extras({"field": value}))) == exact({"field": value})


def test_no_fields_take_no_bytes():
    assert encode_extras({}) == b""
    assert decode_extras(b"") == {}


class _Number(int):
    """An integer with a class of its own."""


class _Colour(enum.IntEnum):
    RED = 1


_Pair = namedtuple("_Pair", "one two")


@pytest.mark.parametrize(
    "value",
    [
        _Number(5),
        _Colour.RED,
        np.int64(5),
        np.float64(5),
        np.zeros(2),
        _Pair(1, 2),
        OrderedDict(a=1),
        bytearray(b"a"),
        memoryview(b"a"),
        {1, 2},
        object(),
        int,
        1j,
        "\ud800",
        {"\ud800": 1},
        msgpack.ExtType(1, b""),
        msgpack.Timestamp(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_exactly_is_refused(value):
    for fields in ({"f": value}, {"f": [value]}, {"f": (value,)}, {"f": {"g": value}}):
        with pytest.raises(NotPlainError):
            encode_extras(fields)


def test_a_subclass_is_refused_as_a_key_too():
    with pytest.raises(NotPlainError):
        encode_extras({"f": {_Number(5): 1}})


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_nesting_ends_at_the_documented_depth(wrap):
    value = 1
    for _ in range(MAX_DEPTH - 2):  # the fields are the first level, the number is the last
        value = wrap(value)
    assert exact(decode_extras(encode_extras({"f": value}))) == exact({"f": value})
    with pytest.raises(NotPlainError):
        encode_extras({"f": wrap(value)})


def test_a_list_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(NotPlainError):
        encode_extras({"f": endless})


def test_an_integer_too_long_for_text_is_refused():
    with pytest.raises(NotPlainError):
        encode_extras({"f": 10**400_000})


def test_the_size_has_a_bound():
    room = MAX_EXTRAS_BYTES - len(encode_extras({"f": bytes(60_000)})) + 60_000
    assert decode_extras(encode_extras({"f": bytes(room)})) == {"f": bytes(room)}
    with pytest.raises(NotPlainError):
        encode_extras({"f": bytes(room + 1)})


# Decoding what was not written here


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=80))
def test_garbage_is_fields_or_a_record_error(data):
    try:
        fields = decode_extras(data)
    except RecordError as error:
        assert error.cause == "malformed"
    else:
        assert all(type(name) is str for name in fields)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=3), st.data())
def test_damaged_fields_are_fields_or_a_record_error(fields, data):
    encoded = bytearray(encode_extras(fields))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(encoded)))
    for damaged in (bytes(encoded), bytes(encoded[:cut])):
        try:
            decode_extras(damaged)
        except RecordError as error:
            assert error.cause == "malformed"


def tuples(levels):
    packed = msgpack.packb([])
    for _ in range(levels):
        packed = msgpack.packb([msgpack.ExtType(1, packed)])
    return packed


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb("text"),
        msgpack.packb({"f": msgpack.ExtType(1, msgpack.packb(5))}),
        msgpack.packb({"f": msgpack.ExtType(1, b"")}),
        msgpack.packb({"f": msgpack.ExtType(2, b"x")}),
        msgpack.packb({"f": msgpack.ExtType(2, b"9" * 5000)}),
        msgpack.packb({"f": msgpack.ExtType(3, b"")}),
        msgpack.packb({"f": msgpack.Timestamp(1)}),
        msgpack.packb({"f": msgpack.ExtType(1, tuples(MAX_DEPTH))}),
        b"\x81\xa1f" + b"\x91" * 60_000,
        b"\x81\xa1f\xdd\xff\xff\xff\xff",
        b"\x81\xc7\x01\x01\x90\xc0",
        bytes(MAX_EXTRAS_BYTES + 1),
    ],
    ids=range(14),
)
def test_what_was_never_written_is_malformed(data):
    with pytest.raises(RecordError) as error:
        decode_extras(data)
    assert error.value.cause == "malformed"
