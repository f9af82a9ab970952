"""Store keys in some order, however many there are, in constant memory.

Owns: ranks as bytes that compare as they are meant to, runs in a temporary file, and their merge.
Does not own: what is sorted by (:mod:`.listing`).

A few first ones need only a heap of that size. Otherwise what does not fit a run's memory is
written to a nameless file as sorted runs, which are then read side by side. The file takes the
ranks and store keys alone, some 30 bytes an entry.
"""

from __future__ import annotations

import heapq
import itertools
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

from tiered_mmcache.entries.keys import STORE_KEY_BYTES

__all__ = ["in_order", "rank_of_float", "rank_of_int", "rank_of_text"]

RUN_BYTES = 16 * 1024 * 1024  # what the ranks of a run take as Python's bytes
_MOST_IN_HEAP = 10_000
_OBJECT_BYTES = 33 + 8  # of a bytes object, and of its place in a list
_BLOCK_BYTES = 64 * 1024
_LEAST_BLOCK_BYTES = 4096
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct(">d")
_SIGN = 1 << 63


def rank_of_int(number: int) -> bytes:
    """Bytes that compare as integers of any size do."""
    length = (number.bit_length() + 7) // 8
    if number >= 0:
        return b"\1" + length.to_bytes(4, "big") + number.to_bytes(length, "big")
    below: int = 256**length - 1 + number  # as many bytes; the farther below zero, the smaller
    return b"\0" + (2**32 - 1 - length).to_bytes(4, "big") + below.to_bytes(length, "big")


def rank_of_float(number: float) -> bytes:
    """Eight bytes that compare as finite floats do."""
    (bits,) = struct.unpack(">Q", _FLOAT.pack(number + 0.0))  # minus zero is zero
    return int(bits ^ (2 * _SIGN - 1) if bits & _SIGN else bits | _SIGN).to_bytes(8, "big")


def rank_of_text(text: str) -> bytes:
    """Bytes that compare as texts do, behind all integers; none begins another."""
    packed = text.encode("utf-8", "surrogatepass")
    return b"\2" + packed.replace(b"\0", b"\0\xff") + b"\0\0"


def in_order(ranked: Iterable[bytes], *, limit: int | None = None) -> Iterator[bytes]:
    """The store keys behind the ranks, the lowest rank first, equal ones by their store key.

    Args:
        ranked: Each a rank of the above kinds, followed by its store key.
        limit: The most that are wanted.

    Raises:
        OSError: The temporary file cannot be written.
    """
    if limit is not None and limit <= _MOST_IN_HEAP:
        ordered: Iterable[bytes] = heapq.nsmallest(limit, ranked)
    else:
        ordered = itertools.islice(_merged(iter(ranked)), limit)
    for each in ordered:
        yield each[-STORE_KEY_BYTES:]


def _merged(ranked: Iterator[bytes]) -> Iterator[bytes]:
    run = _next_run(ranked)
    following = next(ranked, None)
    if following is None:
        yield from run
        return
    remaining = itertools.chain([following], ranked)
    with tempfile.TemporaryFile(buffering=_BLOCK_BYTES) as file:
        ends = [_written(file, run)]
        del run
        while run := _next_run(remaining):
            ends.append(_written(file, run))
        file.flush()
        block_bytes = max(_LEAST_BLOCK_BYTES, min(_BLOCK_BYTES, RUN_BYTES // len(ends)))
        spans = zip([0, *ends[:-1]], ends, strict=True)
        runs = [_read(file.fileno(), start, end, block_bytes) for start, end in spans]
        yield from heapq.merge(*runs)


def _next_run(ranked: Iterator[bytes]) -> list[bytes]:
    run = []
    left_bytes = RUN_BYTES
    for each in ranked:
        run.append(each)
        left_bytes -= len(each) + _OBJECT_BYTES
        if left_bytes <= 0:
            break
    run.sort()
    return run


def _written(file: IO[bytes], run: list[bytes]) -> int:
    """Append a run; where it ends."""
    for each in run:
        file.write(_LENGTH.pack(len(each)) + each)
    return file.tell()


def _read(descriptor: int, start: int, end: int, block_bytes: int) -> Iterator[bytes]:
    """The ranks of a run, with no more than a block and a rank of it in memory."""
    data = b""
    while start < end or data:
        position = 0
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            after = position + _LENGTH.size + length
            if after > len(data):
                break
            yield data[position + _LENGTH.size : after]
            position = after
        data = data[position:]
        block = os.pread(descriptor, min(block_bytes, end - start), start)
        if not block:
            return
        start += len(block)
        data += block
