"""How the store's tables are laid out: names, keys, small values and what a value costs.

Owns: the bytes of every row but the record itself (:mod:`tiered_mmcache.entries.record`);
docs/format.md is the specification. Does not own: transactions (:mod:`.store`) or opening
(:mod:`.recovery`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence

import lmdb
import msgpack

from tiered_mmcache.entries.bounded import unpack_bounded
from tiered_mmcache.entries.keys import STORE_KEY_BYTES
from tiered_mmcache.entries.record import CHUNK_BYTES, FORMAT_VERSION
from tiered_mmcache.errors import RecordError

ENTRIES = b"entries"  # store key -> place, record
CHUNKS = b"chunks"  # store key, chunk number -> bytes of the payload
RECENCY = b"recency"  # place -> store key; lower sequences were used longer ago
META = b"meta"
DATABASES = (ENTRIES, CHUNKS, RECENCY, META)

DATA_FILE = "data.mdb"
OPENERS_FILE = "openers.lock"
PAGE_BYTES = 4096

FORMAT_ROW = b"format"
TOTALS_ROW = b"totals"
_NAMESPACE_ROW = b"namespace:"
_GENERATION_ROW = b"generation:"
BUCKET_ROWS = b"bucket:"

_PLACE = struct.Struct(">IQ")
_CHUNK_NUMBER = struct.Struct(">I")
_BUCKET = struct.Struct(">I")
_MOST_ITEMS = 64  # of a row of the meta table; a later version's may have more fields
_MOST_TEXT_BYTES = 64 * 1024
PLACE_BYTES = _PLACE.size
BUCKET_BYTES = _BUCKET.size

# LMDB moves a value to pages of its own when the node would fill half a page (mdb.c, me_nodemax).
_NODE_HEADER_BYTES = 8
_LARGEST_NODE_BYTES = 2038
_PAGE_HEADER_BYTES = 16
_LEAF_FILL = 2  # leaf pages split in the middle: count small nodes double


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Place:
    """An entry's position in the order of eviction.

    Attributes:
        bucket: The number of its namespace's generation.
        sequence: Grows with every use in the whole store.
    """

    bucket: int
    sequence: int

    def to_bytes(self) -> bytes:
        """As a key of the recency table: a bucket's entries lie together, oldest first."""
        return _PLACE.pack(self.bucket, self.sequence)

    @classmethod
    def from_bytes(cls, data: bytes) -> Place:
        """The place in the first bytes of such a key or of an entry's value.

        Raises:
            RecordError: There are too few bytes.
        """
        if len(data) < PLACE_BYTES:
            raise RecordError("truncated", "an entry without a place")
        return cls(*_PLACE.unpack_from(data))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """The totals row: what the store holds, and the next numbers to give out."""

    entries: int = 0
    used_bytes: int = 0
    payload_bytes: int = 0
    next_sequence: int = 1
    next_bucket: int = 1

    def to_bytes(self) -> bytes:
        """As the value of the totals row."""
        return _packed([getattr(self, field.name) for field in dataclasses.fields(self)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Bookkeeping:
        """The totals in such a value.

        Raises:
            RecordError: They are not five counts.
        """
        values = _unpacked(data)
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, list) or len(values) != len(names):
            raise RecordError("malformed", "the totals row is damaged")
        if not all(type(value) is int and value >= 0 for value in values):
            raise RecordError("malformed", "the totals row is damaged")
        return cls(**dict(zip(names, values, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One generation of one namespace.

    Attributes:
        number: Its number, part of every place in it.
        stale: The namespace has moved on; what is left here is evicted first.
    """

    number: int
    namespace: str
    generation: bytes
    stale: bool

    def to_bytes(self) -> bytes:
        """As the value of the bucket's row."""
        return _packed([self.namespace, self.generation, self.stale])

    @classmethod
    def from_row(cls, key: bytes, value: bytes) -> Bucket:
        """The bucket of such a row.

        Raises:
            RecordError: The row is damaged.
        """
        fields = _unpacked(value)
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, bytes, bool]:
            raise RecordError("malformed", "a bucket row is damaged")
        number = int.from_bytes(key[len(BUCKET_ROWS) :], "big")
        return cls(number=number, namespace=fields[0], generation=fields[1], stale=fields[2])


def format_value() -> bytes:
    """The value of the format row of this version."""
    return _packed([FORMAT_VERSION])


def format_version(value: bytes) -> int:
    """The version in such a value.

    Raises:
        RecordError: There is none.
    """
    fields = _unpacked(value)
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int:
        raise RecordError("malformed", "the format row is damaged")
    return fields[0]


def namespace_row(namespace_digest: bytes) -> bytes:
    """The row that names a namespace's current generation."""
    return _NAMESPACE_ROW + namespace_digest


def generation_row(namespace_digest: bytes, generation: bytes) -> bytes:
    """The row that gives a generation's bucket number."""
    return _GENERATION_ROW + namespace_digest + generation


def bucket_row(number: int) -> bytes:
    """The row that describes a bucket."""
    return BUCKET_ROWS + _BUCKET.pack(number)


def read_buckets(cursor: lmdb.Cursor) -> list[Bucket]:
    """Every bucket in the meta table that a cursor stands in.

    Raises:
        RecordError: A row is damaged.
    """
    found = []
    if cursor.set_range(BUCKET_ROWS):
        for key, value in cursor:
            if not bytes(key).startswith(BUCKET_ROWS):
                break
            found.append(Bucket.from_row(bytes(key), bytes(value)))
    return found


def bucket_prefix(number: int) -> bytes:
    """What the places of a bucket begin with."""
    return _BUCKET.pack(number)


def chunk_key(store_key: bytes, number: int) -> bytes:
    """The key of one chunk."""
    return store_key + _CHUNK_NUMBER.pack(number)


def chunk_owner(key: bytes) -> bytes:
    """The store key in a chunk's key."""
    return key[: -_CHUNK_NUMBER.size]


def charged_bytes(key_bytes: int, value_bytes: int) -> int:
    """What a row takes from the budget: the pages of a large value, twice a small one's bytes."""
    node_bytes = _NODE_HEADER_BYTES + key_bytes + value_bytes
    if node_bytes <= _LARGEST_NODE_BYTES:
        return _LEAF_FILL * (node_bytes + 2)
    pages = -(-(_PAGE_HEADER_BYTES + value_bytes) // PAGE_BYTES)
    return pages * PAGE_BYTES + _LEAF_FILL * (_NODE_HEADER_BYTES + key_bytes + 10)


def charged_entry_bytes(record_bytes: int, payload_bytes: int) -> int:
    """What a whole entry takes from the budget: its chunks, its record and its recency row."""
    whole, rest = divmod(payload_bytes, CHUNK_BYTES)
    key_bytes = STORE_KEY_BYTES + _CHUNK_NUMBER.size
    cost_bytes = whole * charged_bytes(key_bytes, CHUNK_BYTES)
    if rest:
        cost_bytes += charged_bytes(key_bytes, rest)
    cost_bytes += charged_bytes(STORE_KEY_BYTES, PLACE_BYTES + record_bytes)
    return cost_bytes + charged_bytes(PLACE_BYTES, STORE_KEY_BYTES)


def chunks_of(parts: Sequence[memoryview], payload_bytes: int) -> Iterator[list[memoryview]]:
    """A payload that lies in consecutive parts, cut into chunks; a chunk may span several parts."""
    remaining = payload_bytes
    index = offset = 0
    while remaining:
        wanted = min(CHUNK_BYTES, remaining)
        remaining -= wanted
        pieces = []
        while wanted:
            part = parts[index]
            taken = min(wanted, len(part) - offset)
            pieces.append(part[offset : offset + taken])
            wanted -= taken
            offset += taken
            if offset == len(part):
                index, offset = index + 1, 0
        yield pieces


def _packed(values: list[object]) -> bytes:
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    return packed


def _unpacked(data: bytes) -> object:
    return unpack_bounded(data, most_items=_MOST_ITEMS, most_text_bytes=_MOST_TEXT_BYTES)
