"""Fixed inputs have the bytes that docs/format.md says, and those bytes decode to them.

A failure here means that stores written before can no longer be read, or that other versions
cannot read what this one writes. Then the format's version has to change; the bytes do not.
"""

import json
import subprocess
import sys

import pytest

from tiered_mmcache.disk import layout
from tiered_mmcache.entries import keys
from tiered_mmcache.entries.extras import decode_extras, encode_extras
from tiered_mmcache.entries.record import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    EntryHeader,
    Record,
    decode_record,
    digest,
    encode_record,
)

NAMESPACE = "golden/ümlaut"
FIELDS = {"grid": (16, -1), "big": 2**70}
EXTRAS = "82a467726964c703019210ffa3626967c7160231313830353931363230373137343131333033343234"
FULL_KEY = "92a1639292a169a2313192a169a23132"
FIRST_GENERATION = "58d22e03585ec7e66c636aae8eb7c675"
RECORD = (
    "d40f4aab6e5497bb"  # xxh3 of what follows
    "97"  # seven fields
    "01"  # format version
    "c410" + FULL_KEY + "ae676f6c64656e2fc3bc6d6c617574"  # namespace
    "c410" + FIRST_GENERATION + "cb41dad27480100000"  # created
    "c408" + "5ace6a511c10894b"  # one chunk's digest
    "97"  # the header's seven fields
    "a6676f6c64656e"  # class tag
    "a862666c6f61743136"  # dtype
    "02"  # bytes of an element
    "920302"  # shape
    "c429" + EXTRAS + "a463756461"  # device type
    "cb3fc0000000000000"  # cost
)


def a_record():
    header = EntryHeader(
        class_tag="golden",
        dtype="bfloat16",
        item_bytes=2,
        shape=(3, 2),
        extras=bytes.fromhex(EXTRAS),
        device_type="cuda",
        cost_s=0.125,
    )
    return Record(
        header=header,
        full_key=bytes.fromhex(FULL_KEY),
        namespace=NAMESPACE,
        generation=bytes.fromhex(FIRST_GENERATION),
        digests=digest(bytes(range(12))),
        created_s=1_800_000_000.25,
    )


def test_the_version_and_the_chunk_size():
    assert FORMAT_VERSION == 1
    assert CHUNK_BYTES == 262_080


def test_a_record():
    assert encode_record(a_record()).hex() == RECORD
    assert decode_record(bytes.fromhex(RECORD)) == a_record()


def test_extra_fields():
    assert encode_extras(FIELDS).hex() == EXTRAS
    assert decode_extras(bytes.fromhex(EXTRAS)) == FIELDS
    assert encode_extras({}) == b""


@pytest.mark.parametrize(
    ("data", "expected"), [(b"", "2d06800538d394c2"), (b"tiered", "d312b7f6a408ff4b")]
)
def test_digests(data, expected):
    assert digest(data).hex() == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (0, "92a169a130"),
        (-1, "92a169a22d31"),
        (True, "92a169a131"),
        (2**64 - 1, "92a169b43138343436373434303733373039353531363135"),
        ("é", "92a173a2c3a9"),
        ("sha256:00", "92a173a97368613235363a3030"),
        (b"\x00\xff", "92a162c40200ff"),
        (("a", (1,)), "92a1749292a173a16192a1749192a169a131"),
        (keys.CombinedHash([11, 12]), FULL_KEY),
        (keys.CombinedHash(["x", (b"y",)]), "92a1639292a173a17892a1749192a162c40179"),
    ],
)
def test_full_keys(key, expected):
    assert keys.encode_full_key(key).hex() == expected


def test_digests_of_names():
    assert keys.generation_of_version(None).hex() == FIRST_GENERATION
    assert keys.generation_of_version("weights-2").hex() == "c39151084b78f24554dc53c2eee2c171"
    assert keys.namespace_digest(NAMESPACE).hex() == "66129c20fb6fd66f3617b9680cb9b9f1"
    key = keys.store_key(
        namespace=NAMESPACE,
        generation=bytes.fromhex(FIRST_GENERATION),
        full_key=bytes.fromhex(FULL_KEY),
    )
    assert key.hex() == "cef8b05327c9aaae6729b55f84ce8c6a"


def test_a_place():
    place = layout.Place(1, 4711)
    assert place.to_bytes().hex() == "00000001" + "0000000000001267"
    assert layout.Place.from_bytes(place.to_bytes()) == place


def test_the_rows_of_the_meta_table():
    books = layout.Bookkeeping(
        entries=2, used_bytes=300, payload_bytes=70_000, next_sequence=5_000_000_000, next_bucket=3
    )
    row = "9502cd012cce00011170cf000000012a05f20003"
    assert books.to_bytes().hex() == row
    assert layout.Bookkeeping.from_bytes(bytes.fromhex(row)) == books

    generation = bytes(range(16))
    bucket = layout.Bucket(number=258, namespace=NAMESPACE, generation=generation, stale=True)
    value = "93ae676f6c64656e2fc3bc6d6c617574c410" + generation.hex() + "c3"
    assert layout.bucket_row(258) == b"bucket:\x00\x00\x01\x02"
    assert bucket.to_bytes().hex() == value
    assert layout.Bucket.from_row(layout.bucket_row(258), bytes.fromhex(value)) == bucket

    assert layout.format_value().hex() == "9101"
    assert layout.format_version(bytes.fromhex("9101")) == 1
    assert (layout.FORMAT_ROW, layout.TOTALS_ROW) == (b"format", b"totals")
    name = keys.namespace_digest(NAMESPACE)
    assert layout.namespace_row(name) == b"namespace:" + name
    assert layout.generation_row(name, generation) == b"generation:" + name + generation


def test_the_key_of_a_chunk():
    assert layout.chunk_key(bytes(range(16)), 258) == bytes(range(16)) + b"\x00\x00\x01\x02"


@pytest.mark.parametrize(
    ("key_bytes", "value_bytes", "expected"),
    [(20, 0, 60), (20, 2010, 4080), (20, 2011, 4172), (20, 262_080, 262_220), (16, 212, 476)],
)
def test_what_a_row_is_charged(key_bytes, value_bytes, expected):
    assert layout.charged_bytes(key_bytes, value_bytes) == expected


@pytest.mark.parametrize(
    ("record_bytes", "payload_bytes", "expected"),
    [
        (214, 0, 580),
        (214, 1, 642),
        (214, 262_080, 262_800),
        (214, 262_081, 262_862),
        (3000, 524_160, 528_680),
    ],
)
def test_what_an_entry_is_charged(record_bytes, payload_bytes, expected):
    assert layout.charged_entry_bytes(record_bytes, payload_bytes) == expected


def test_a_store_can_be_read_without_torch():
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "import tiered_mmcache.disk.reader, tiered_mmcache.disk.store; "
        "import tiered_mmcache.entries.extras; "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
