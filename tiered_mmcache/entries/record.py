"""What is stored beside the bytes of an entry, and how it is written down.

Owns: the fields of a record, their encoding, and every check that a record must pass before
anything is believed (docs/format.md is the specification).
Does not own: chunks, budgets or recency (:mod:`tiered_mmcache.disk.store`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import xxhash

from tiered_mmcache.entries.bounded import SMALL_BYTES, unpack_bounded, unpack_small
from tiered_mmcache.errors import RecordError

FORMAT_VERSION = 1
CHUNK_BYTES = 64 * 4095  # 262,080: exactly 64 LMDB pages with their header, and 64-byte aligned
DIGEST_BYTES = 8  # xxh3, 64 bits
MAX_DIMENSIONS = 64
MAX_EXTRAS_BYTES = 64 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024
_MOST_ITEMS = 128  # of a record: two lists of seven, and the dimensions
_MOST_TEXT_BYTES = 64 * 1024
_ITEM_SIZES = (1, 2, 4, 8, 16)
_BIGGEST_INT = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """Everything needed to rebuild a result from its bytes.

    Attributes:
        class_tag: The registered tag of the result class; empty for a class kept in memory only.
        dtype: The torch name without its prefix, such as ``bfloat16``.
        item_bytes: Bytes of one element.
        shape: Any number of dimensions; ``()`` is a scalar.
        extras: The other fields of the result as :mod:`tiered_mmcache.entries.extras` encodes them.
        device_type: Where the embedding lived, such as ``cuda`` or ``cpu``.
        cost_s: Seconds that encoding took; 0.0 when unknown.
    """

    class_tag: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    extras: bytes
    device_type: str
    cost_s: float = 0.0

    @property
    def payload_bytes(self) -> int:
        """Bytes of the embedding."""
        return math.prod(self.shape) * self.item_bytes

    def describes_as(self, other: EntryHeader) -> bool:
        """Whether both rebuild the same result: all but the cost, which each run measures anew."""
        return dataclasses.replace(self, cost_s=other.cost_s) == other


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One stored entry without its payload.

    Attributes:
        header: How to rebuild the result.
        full_key: The whole key, compared on every read.
        namespace: What makes embeddings interchangeable.
        generation: The namespace's generation it was written under, 16 bytes.
        digests: xxh3 of each chunk of the payload, 8 bytes each.
        created_s: Seconds since the epoch.
    """

    header: EntryHeader
    full_key: bytes
    namespace: str
    generation: bytes
    digests: bytes
    created_s: float

    @property
    def chunk_count(self) -> int:
        """Chunks that hold the payload."""
        return chunk_count(self.header.payload_bytes)


def chunk_count(payload_bytes: int) -> int:
    """How many chunks hold a payload; an empty payload has none."""
    return -(-payload_bytes // CHUNK_BYTES)


def digest(data: bytes | memoryview) -> bytes:
    """The digest that every chunk and record carries."""
    return xxhash.xxh3_64_digest(data)


def digest_of_pieces(pieces: list[memoryview]) -> bytes:
    """The digest of a chunk that lies in several pieces."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.digest()


def encode_header(header: EntryHeader) -> list[Any]:
    """A header as plain values, in the order of its fields."""
    return [
        header.class_tag,
        header.dtype,
        header.item_bytes,
        list(header.shape),
        header.extras,
        header.device_type,
        header.cost_s,
    ]


def decode_header(fields: object) -> EntryHeader:
    """The header of such a list.

    Raises:
        RecordError: It is not one, or its values are out of bounds.
    """
    check_header(fields)
    return _header(fields)


def _header(fields: Any) -> EntryHeader:
    class_tag, dtype, item_bytes, shape, extras, device_type, cost_s = fields
    return EntryHeader(
        class_tag=class_tag,
        dtype=dtype,
        item_bytes=item_bytes,
        shape=tuple(shape),
        extras=extras,
        device_type=device_type,
        cost_s=cost_s,
    )


def check_header(fields: object) -> int:
    """Check a header's plain values; the bytes of its payload.

    Raises:
        RecordError: It is not a header, or its values are out of bounds.
    """
    if not isinstance(fields, list) or len(fields) != 7:
        raise RecordError("malformed", "a header has seven fields")
    class_tag, dtype, item_bytes, shape, extras, device_type, cost_s = fields
    if not (isinstance(class_tag, str) and len(class_tag) <= 255):
        raise _out_of_bounds("class tag")
    if not (isinstance(dtype, str) and 0 < len(dtype) <= 64):
        raise _out_of_bounds("dtype")
    if not (type(item_bytes) is int and item_bytes in _ITEM_SIZES):
        raise _out_of_bounds("item size")
    if not (isinstance(extras, bytes) and len(extras) <= MAX_EXTRAS_BYTES):
        raise _out_of_bounds("extras")
    if not (isinstance(device_type, str) and 0 < len(device_type) <= 32):
        raise _out_of_bounds("device type")
    if not (type(cost_s) is float and 0.0 <= cost_s < math.inf):
        raise _out_of_bounds("cost")
    payload_bytes = _elements(shape) * item_bytes
    if payload_bytes > _BIGGEST_INT:
        raise _out_of_bounds("payload size")
    return payload_bytes


def _elements(shape: object) -> int:
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS):
        raise _out_of_bounds("shape")
    elements = 1
    for dimension in shape:  # a loop is quicker than math.prod beside the check
        if not (type(dimension) is int and 0 <= dimension <= _BIGGEST_INT):
            raise _out_of_bounds("dimension")
        elements *= dimension
    return elements


def encode_record(record: Record) -> bytes:
    """A record as bytes, its own digest first."""
    body: bytes = msgpack.packb(
        [
            FORMAT_VERSION,
            record.full_key,
            record.namespace,
            record.generation,
            record.created_s,
            record.digests,
            encode_header(record.header),
        ],
        use_bin_type=True,
    )
    return digest(body) + body


def decode_record(data: bytes) -> Record:
    """The record in such bytes.

    Raises:
        RecordError: The digest does not match, the version is a later one, or a field is wrong.
    """
    _, full_key, namespace, generation, created_s, digests, header = decode_fields(data)[0]
    return Record(
        header=_header(header),
        full_key=full_key,
        namespace=namespace,
        generation=generation,
        digests=digests,
        created_s=created_s,
    )


def decode_fields(data: bytes) -> tuple[list[Any], int]:
    """The record's seven fields as plain values, checked, and the bytes of its payload.

    For those who look at a million records: building a :class:`Record` takes longer than this.

    Raises:
        RecordError: As for :func:`decode_record`.
    """
    if not DIGEST_BYTES < len(data) <= MAX_RECORD_BYTES:
        raise RecordError("truncated", f"a record cannot have {len(data)} bytes")
    body = data[DIGEST_BYTES:]
    if digest(body) != data[:DIGEST_BYTES]:
        raise RecordError("digest", "the record does not match its digest")
    if len(body) <= SMALL_BYTES:
        fields = unpack_small(body, most_listed=MAX_DIMENSIONS)
    else:
        fields = unpack_bounded(body, most_items=_MOST_ITEMS, most_text_bytes=_MOST_TEXT_BYTES)
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int:
        raise RecordError("malformed", "the record is not a list that begins with a version")
    if fields[0] != FORMAT_VERSION:
        raise RecordError("future_version", f"the record has format version {fields[0]}")
    if len(fields) != 7:
        raise RecordError("malformed", "a record has seven fields")
    return fields, _check_fields(fields)


def _check_fields(fields: list[Any]) -> int:
    """Check the record's fields; the bytes of its payload."""
    _, full_key, namespace, generation, created_s, digests, header = fields
    if not isinstance(full_key, bytes):
        raise _out_of_bounds("full key")
    if not isinstance(namespace, str):
        raise _out_of_bounds("namespace")
    if not (isinstance(generation, bytes) and len(generation) == 16):
        raise _out_of_bounds("generation")
    if not (type(created_s) is float and math.isfinite(created_s)):
        raise _out_of_bounds("creation time")
    payload_bytes = check_header(header)
    expected = chunk_count(payload_bytes) * DIGEST_BYTES
    if not (isinstance(digests, bytes) and len(digests) == expected):
        raise _out_of_bounds("digests")
    return payload_bytes


def _out_of_bounds(field: str) -> RecordError:
    return RecordError("malformed", f"the {field} is out of bounds")
