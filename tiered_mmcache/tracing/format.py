"""The file of an access trace: a header, then blocks of records that each stand for one request.

Owns: the bytes; docs/format.md is the specification. Does not own: when a block is written
(:mod:`.recorder`). Imports no torch.

A block has its length and its digest, so that a file which was cut off, as by a kill in the middle
of a write, can be read up to its last whole block, and damage elsewhere costs one block.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

MAGIC = b"MMTRACE\0"
VERSION = 1
MOST_RECORDS = 1 << 16  # of a block
_BLOCK_MAGIC = b"BLCK"
_HEADER = struct.Struct("<8sHHId")
_DIGEST = struct.Struct("<Q")
_BLOCK_HEADER = struct.Struct("<4sIQ")
_RECORD = struct.Struct("<dQQIfB7x")
HEADER_BYTES = _HEADER.size + _DIGEST.size
BLOCK_HEADER_BYTES = _BLOCK_HEADER.size
_LOOK_AHEAD_BYTES = 1 << 20

RECORD = np.dtype(
    [
        ("time", "<f8"),
        ("key", "<u8"),
        ("bytes", "<u8"),
        ("tokens", "<u4"),
        ("cost", "<f4"),
        ("outcome", "u1"),
        ("unused", "V7"),
    ]
)
Records = NDArray[Any]


class Outcome(IntEnum):
    """What came of a request; ``UNKNOWN`` where a trace does not say."""

    UNKNOWN = 0
    HOT = 1
    HOST = 2
    DISK = 3
    MISS = 4
    REFUSED = 5
    NOT_SET = 6


class TraceFormatError(Exception):
    """A file is no trace, or one of a version that is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes of a trace that cannot be used.

    Attributes:
        offset: Where they begin.
        problem: What is wrong with them.
    """

    offset: int
    problem: str


def header(began_s: float) -> bytes:
    """What a file begins with.

    Args:
        began_s: Seconds since 1970.
    """
    fields = _HEADER.pack(MAGIC, VERSION, RECORD.itemsize, 0, began_s)
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


packed = _RECORD.pack
"""One record: time, digest of the key, bytes, tokens, cost, outcome."""


def block(records: Sequence[bytes]) -> bytes:
    """Records as :data:`packed` makes them, at most ``MOST_RECORDS``, as a block."""
    payload = b"".join(records)
    return _BLOCK_HEADER.pack(_BLOCK_MAGIC, len(records), _digest(len(records), payload)) + payload


def block_of_array(records: Records) -> bytes:
    """The same of an array of the dtype ``RECORD``."""
    payload = records.tobytes()
    return _BLOCK_HEADER.pack(_BLOCK_MAGIC, len(records), _digest(len(records), payload)) + payload


def _digest(count: int, payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(count.to_bytes(4, "little") + payload)


class TraceReader:
    """Reads a trace from its beginning, once.

    Args:
        file: Open at its beginning.

    Attributes:
        damage: What could not be used, as far as :meth:`blocks` has come.

    Raises:
        TraceFormatError: There is no header of a known version.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.damage: list[Damage] = []
        found = file.read(HEADER_BYTES)
        if len(found) < HEADER_BYTES or not found.startswith(MAGIC):
            raise TraceFormatError("this is not a trace")
        fields = found[: _HEADER.size]
        if _DIGEST.pack(xxhash.xxh3_64_intdigest(fields)) != found[_HEADER.size :]:
            raise TraceFormatError("the header is damaged")
        _, version, record_bytes, _, self.began_s = _HEADER.unpack(fields)
        if version != VERSION or record_bytes != RECORD.itemsize:
            raise TraceFormatError(f"its version is {version}, and this one reads {VERSION}")

    def blocks(self) -> Iterator[Records]:
        """The records of each whole block, in the order in which they were written."""
        offset = HEADER_BYTES
        while head := self._file.read(BLOCK_HEADER_BYTES):
            records, problem = self._block(head)
            if records is None:
                self.damage.append(Damage(offset=offset, problem=problem))
                found = self._next_block(offset + 1)
                if found is None:
                    return
                offset = found
                continue
            yield records
            offset += BLOCK_HEADER_BYTES + records.nbytes

    def _block(self, head: bytes) -> tuple[Records | None, str]:
        if len(head) < BLOCK_HEADER_BYTES:
            return None, "the last block is cut off"
        magic, count, digest = _BLOCK_HEADER.unpack(head)
        if magic != _BLOCK_MAGIC or not 0 < count <= MOST_RECORDS:
            return None, "no block begins here"
        payload = self._file.read(count * RECORD.itemsize)
        if len(payload) < count * RECORD.itemsize:
            return None, "the last block is cut off"
        if _digest(count, payload) != digest:
            return None, "a block does not match its digest"
        return np.frombuffer(payload, RECORD), ""

    def _next_block(self, offset: int) -> int | None:
        """Where the next block begins, which is read on from there; None when there is none."""
        self._file.seek(offset)
        carried = b""
        while piece := self._file.read(_LOOK_AHEAD_BYTES):
            window = carried + piece
            found = window.find(_BLOCK_MAGIC)
            if found >= 0:
                self._file.seek(offset + found)
                return offset + found
            carried = window[1 - len(_BLOCK_MAGIC) :]
            offset += len(window) - len(carried)
        return None
