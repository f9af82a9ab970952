"""Keys: equality, hashes, copies, and bytes that tell every two keys apart.

Owns: properties of the keys alone. Does not own: keys in caches (tests/contracts).
"""

import copy
import pickle
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiered_mmcache.entries import keys
from tiered_mmcache.entries.keys import (
    CombinedHash,
    combine_hashes,
    describe_full_key,
    encode_full_key,
    generation_of_version,
    namespace_digest,
    store_key,
)

PRIME = 2**61 - 1

integers = st.one_of(
    st.integers(),
    st.integers(0, 2**64 - 1),
    st.sampled_from([-1, -2, 0, 1, PRIME, PRIME + 1, 5, 5 + PRIME, 2**64 - 1]),
)
plain_keys = st.one_of(integers, st.booleans(), st.text(max_size=20), st.binary(max_size=20))
all_keys = st.recursive(
    plain_keys,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, min_size=1, max_size=3).map(CombinedHash),
    ),
    max_leaves=8,
)


def depth(key):
    parts = key.parts if isinstance(key, CombinedHash) else key
    if not isinstance(parts, tuple):
        return 1
    return 1 + max(map(depth, parts), default=0)


def shape(key):
    """What tells keys apart: combinations are not tuples, text is not bytes."""
    if isinstance(key, CombinedHash):
        return ("combination", *map(shape, key.parts))
    if isinstance(key, tuple):
        return ("tuple", *map(shape, key))
    if isinstance(key, int):
        return ("integer", int(key))
    return (type(key).__name__, key)


# Combined hashes


@given(st.lists(all_keys, min_size=2, max_size=6))
def test_a_key_is_encoded_alike_whatever_was_asked_before(several):
    alone = []
    for key in several:
        encode_full_key(None)
        alone.append(encode_full_key(key))
    assert [encode_full_key(key) for key in several for _ in range(2)] == [
        packed for packed in alone for _ in range(2)
    ]


@given(st.lists(all_keys, min_size=1, max_size=4))
def test_the_value_is_the_hash_of_the_tuple(parts):
    combined = CombinedHash(parts)
    assert combined == hash(tuple(parts))
    assert (combined != hash(tuple(parts))) is False
    assert int(combined) == hash(tuple(parts))
    assert hash(combined) == hash(int(combined))
    assert combined.parts == tuple(parts)


@given(st.lists(integers, max_size=4), st.lists(integers, max_size=4))
def test_combinations_are_equal_only_when_their_parts_are(one, other):
    assert (CombinedHash(one) == CombinedHash(other)) == (one == other)
    assert (CombinedHash(one) != CombinedHash(other)) == (one != other)


@given(st.lists(plain_keys, max_size=4))
def test_equal_combinations_have_equal_hashes(parts):
    assert hash(CombinedHash(parts)) == hash(CombinedHash(list(parts)))


@given(st.lists(all_keys, max_size=4))
def test_copies_and_pickles_are_equal(parts):
    combined = CombinedHash(parts)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(combined, protocol)) == combined
    for other in (copy.copy(combined), copy.deepcopy(combined)):
        assert type(other) is CombinedHash
        assert other == combined
        assert other.parts == combined.parts


@pytest.mark.parametrize(
    ("one", "other"), [([5], [5 + PRIME]), ([-1], [-2]), ([1, -1], [1, -2]), ([0], [PRIME])]
)
def test_collisions_are_different_dictionary_keys(one, other):
    assert hash(tuple(one)) == hash(tuple(other))
    found = {CombinedHash(one): "one", CombinedHash(other): "other"}
    assert len(found) == 2
    assert found[CombinedHash(one)] == "one"
    assert found[CombinedHash(other)] == "other"


def test_a_plain_number_finds_its_combination():
    combined = CombinedHash([1, 2])
    assert {combined: "found"}[hash((1, 2))] == "found"
    assert {hash((1, 2)): "found"}[combined] == "found"
    assert hash((1, 2)) == combined
    assert combined != hash((1, 2)) + 1


@pytest.mark.parametrize("kind", [np.int64, float, str])
def test_against_another_type_it_compares_as_an_integer_does(kind):
    combined = CombinedHash([1, 2])
    number = int(combined)
    assert (combined == kind(number)) == (number == kind(number))
    assert (kind(number) == combined) == (kind(number) == number)
    assert (combined != kind(number)) == (number != kind(number))


def test_a_numpy_integer_finds_a_combination_as_it_finds_an_integer():
    assert {CombinedHash([1, 2]): "found"}[np.int64(hash((1, 2)))] == "found"


def test_it_is_unequal_to_what_is_no_number():
    assert CombinedHash([1]) != "1"
    assert CombinedHash([1]) != None  # noqa: E711 - the operator is what is tested
    assert CombinedHash([1]) != (1,)


def test_nothing_has_no_combination():
    assert combine_hashes([]) is None
    assert combine_hashes(()) is None
    assert combine_hashes([0]) == hash((0,))


def test_a_part_must_be_hashable():
    with pytest.raises(TypeError):
        combine_hashes([[1]])


# Full keys


@settings(max_examples=300)
@given(all_keys, all_keys)
def test_different_keys_have_different_bytes(one, other):
    assume(depth(one) <= keys.MAX_KEY_DEPTH)
    assume(depth(other) <= keys.MAX_KEY_DEPTH)
    assert (encode_full_key(one) == encode_full_key(other)) == (shape(one) == shape(other))


@given(all_keys)
def test_a_key_always_has_the_same_bytes(key):
    encoded = encode_full_key(key)
    if depth(key) > keys.MAX_KEY_DEPTH:
        assert encoded is None
    else:
        assert isinstance(encoded, bytes)
        assert encode_full_key(pickle.loads(pickle.dumps(key))) == encoded


def test_a_number_and_its_text_are_different_keys():
    different = [5, "5", b"5", (5,), CombinedHash([5]), CombinedHash([(5,)]), ("5",), ((5,),)]
    assert len({encode_full_key(key) for key in different}) == len(different)


def test_a_combination_is_not_its_number_on_disk():
    """A number that was kept without its parts could be that of another combination."""
    combined = CombinedHash([1, 2])
    assert encode_full_key(combined) != encode_full_key(int(combined))


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint64, bool, int])
def test_equal_integers_of_any_kind_are_one_key(kind):
    assert encode_full_key(kind(1)) == encode_full_key(1)
    assert encode_full_key((kind(1), "a")) == encode_full_key((1, "a"))
    assert encode_full_key(CombinedHash([kind(1)])) == encode_full_key(CombinedHash([1]))


def test_the_largest_unsigned_hash_is_a_key():
    assert encode_full_key(np.uint64(2**64 - 1)) == encode_full_key(2**64 - 1)


class _Text(str):
    """A string that may compare as it likes."""


class _Pair(tuple):
    """A tuple that may compare as it likes."""

    __slots__ = ()


@pytest.mark.parametrize(
    "key",
    [
        None,
        1.0,
        object(),
        frozenset([1]),
        (1, 2.0),
        _Text("a"),
        _Pair([1]),
        np.str_("a"),
        CombinedHash([1.5]),
        "\ud800",
        "x" * keys.MAX_KEY_BYTES,
        b"x" * keys.MAX_KEY_BYTES,
        10 ** (sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else 70_000),
    ],
    ids=lambda key: type(key).__name__,
)
def test_what_cannot_be_written_down_stays_in_memory(key):
    assert encode_full_key(key) is None


def test_a_key_may_be_nested_so_deep_and_no_deeper():
    key = 1
    for _ in range(keys.MAX_KEY_DEPTH - 1):
        key = (key,)
    assert encode_full_key(key) is not None
    assert encode_full_key((key,)) is None


def test_a_key_may_be_so_long_and_no_longer():
    frame_bytes = len(encode_full_key(b"x" * 1000)) - 1000
    largest = b"x" * (keys.MAX_KEY_BYTES - frame_bytes)
    assert len(encode_full_key(largest)) == keys.MAX_KEY_BYTES
    assert encode_full_key(largest + b"x") is None


# For people


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (5, "5"),
        (-1, "-1"),
        ("sha256:ab", "'sha256:ab'"),
        (b"\x00", r"b'\x00'"),
        ((1, "a"), "(1, 'a')"),
        (CombinedHash([1, 2]), "[1, 2]"),
        (CombinedHash([(1, b"a")]), "[(1, b'a')]"),
    ],
)
def test_a_key_as_text(key, text):
    assert describe_full_key(encode_full_key(key)) == text


@given(st.binary(max_size=60))
def test_any_bytes_can_be_shown(data):
    assert isinstance(describe_full_key(data), str)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb(["t", 5]),
        msgpack.packb(["t", [5]]),
        msgpack.packb([1]),
        msgpack.packb({}),
        msgpack.packb(["i", "5"]) + b"\x00",
        b"\x92\xa1t\x91" * 500 + b"\xc0",
        b"\x92\xa1t\x91" * 3000 + b"\xc0",
        b"\x91" * 5000,
    ],
    ids=range(11),
)
def test_bytes_that_are_no_key_are_shown_in_hex(damaged):
    assert describe_full_key(damaged) == "0x" + damaged.hex()


# Store keys


def test_a_store_key_has_16_bytes_that_never_change():
    """A digest that changed would lose every store that exists."""
    full_key = encode_full_key(CombinedHash([1, 2]))
    assert full_key.hex() == "92a1639292a169a13192a169a132"
    key = store_key(namespace="model", generation=bytes(16), full_key=full_key)
    assert key.hex() == store_key(namespace="model", generation=bytes(16), full_key=full_key).hex()
    assert len(key) == keys.STORE_KEY_BYTES == 16


fields = st.tuples(st.text(max_size=8), st.binary(max_size=8), st.binary(max_size=8))


@given(fields, fields)
def test_no_two_sets_of_fields_share_a_store_key(one, other):
    names = ("namespace", "generation", "full_key")
    digests = [store_key(**dict(zip(names, field, strict=True))) for field in (one, other)]
    assert (digests[0] == digests[1]) == (one == other)


def test_namespaces_and_generations_are_told_apart():
    assert len({namespace_digest(name) for name in ("", "a", "b", "ab")}) == 4
    versions = [None, "", "first", "1", "2", "version:", "\ud800"]
    generations = {generation_of_version(version) for version in versions}
    assert len(generations) == len(versions)
    assert {len(generation) for generation in generations} == {16}
    assert generation_of_version("1") == generation_of_version("1")
