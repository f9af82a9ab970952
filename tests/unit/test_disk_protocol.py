"""Messages: each comes back as it was sent, and nothing else is believed.

Owns: the encoding of messages. Does not own: sockets (test_disk_client.py).
"""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.protocol import Kind, decode_message, encode_message
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.errors import RecordError

numbers = st.integers(0, 2**63 - 1)
keys = st.binary(min_size=16, max_size=16)
full_keys = st.binary(max_size=30)
headers = st.builds(
    EntryHeader,
    class_tag=st.text(max_size=10),
    dtype=st.just("bfloat16"),
    item_bytes=st.just(2),
    shape=st.lists(st.integers(0, 100), max_size=4).map(tuple),
    extras=st.binary(max_size=20),
    device_type=st.just("cuda"),
    cost_s=st.floats(0, 100),
)
extents = st.lists(st.tuples(numbers, numbers), max_size=5)
totals = st.builds(
    protocol.StoreTotals,
    entries=numbers,
    used_bytes=numbers,
    payload_bytes=numbers,
    file_bytes=numbers,
)
STRATEGY_OF_FIELD = {
    "request": numbers,
    "store_key": keys,
    "full_key": full_keys,
    "generation": st.binary(max_size=16),
    "header": headers,
    "extents": extents,
    "payload_bytes": numbers,
    "filled_bytes": numbers,
    "path": st.text(max_size=20),
    "budget_bytes": numbers,
    "largest_entry_bytes": numbers,
    "synchronous": st.booleans(),
    "allow_network": st.booleans(),
    "keep_quarantined": numbers,
    "quarantined_stores": numbers,
    "killed_worker": st.booleans(),
    "namespace": st.text(max_size=20),
    "totals": totals,
    "cause": st.text(max_size=10),
    "problem": st.text(max_size=20),
}
CLASSES = sorted(protocol._KIND_OF, key=lambda message_class: message_class.__name__)
MESSAGES = {
    message_class: st.builds(
        message_class,
        **{name: STRATEGY_OF_FIELD[name] for name in message_class.__dataclass_fields__},
    )
    for message_class in CLASSES
}
messages = st.one_of(*MESSAGES.values())


def test_every_kind_has_a_message():
    assert {protocol._KIND_OF[message_class] for message_class in CLASSES} == set(Kind)


@pytest.mark.parametrize("message_class", CLASSES, ids=lambda c: c.__name__)
def test_a_message_comes_back(message_class):
    @settings(max_examples=30, deadline=None)
    @given(MESSAGES[message_class])
    def comes_back(message):
        decoded = decode_message(encode_message(message))
        assert type(decoded) is message_class
        assert decoded == message

    comes_back()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_a_message_or_a_record_error(data):
    try:
        decode_message(data)
    except RecordError:
        return


@settings(max_examples=300, deadline=None)
@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_a_record_error(message, data):
    packet = bytearray(encode_message(message))
    position = data.draw(st.integers(0, len(packet) - 1))
    packet[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(packet)))
    for damaged in (bytes(packet), bytes(packet[:cut])):
        try:
            decode_message(damaged)
        except RecordError:
            continue


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
    | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=7) | st.dictionaries(st.integers(-9, 9), inner, max_size=2)
    ),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(values, max_size=8) | st.tuples(st.sampled_from(list(Kind)), values, values))
def test_nonsense_is_a_message_or_a_record_error(fields):
    packet = msgpack.packb([int(f) if isinstance(f, Kind) else f for f in fields])
    try:
        message = decode_message(packet)
    except RecordError:
        return
    assert encode_message(message) == packet


@settings(max_examples=300, deadline=None)
@given(messages, st.integers(0, 10), values)
def test_one_wrong_field_is_noticed_or_kept(message, position, value):
    fields = msgpack.unpackb(encode_message(message), raw=False)
    fields[position % len(fields)] = value
    packet = msgpack.packb(fields, use_bin_type=True)
    try:
        decoded = decode_message(packet)
    except RecordError:
        return
    assert encode_message(decoded) == packet


@pytest.mark.parametrize(
    "fields",
    [
        None,
        5,
        {},
        [],
        [0],
        [9],
        [99],
        ["8"],
        [[8]],
        [{}],
        [8.0],
        [True, "", 1, 1, True, "", b""],
        [8, 1],
        [7],
        [7, -0.0],
        [7, True],
        [7, "1"],
        [22, 1, [1, 2]],
        [22, 1, [1, 2, -3]],
        [22, 1, [1, 2, 3.0]],
        [22, 1, "123"],
        [4, 1, b"k", b"f", 1, [[1]]],
        [4, 1, b"k", b"f", 1, [[1, -1]]],
        [4, 1, b"k", b"f", 1, {}],
        [4, 1, b"k", b"f", 1, [5]],
        [23, 1, []],
        [5, 1, "text"],
    ],
    ids=repr,
)
def test_what_is_no_message(fields):
    with pytest.raises(RecordError):
        decode_message(msgpack.packb(fields, use_bin_type=True))


def test_messages_are_values():
    message = protocol.Flush(request=1)
    with pytest.raises(AttributeError):
        message.request = 2
    assert protocol.Flush(request=1) == message
    assert not hasattr(message, "__dict__")
