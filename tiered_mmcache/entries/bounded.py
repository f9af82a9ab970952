"""Decoding msgpack of unknown origin without letting it take memory that it does not hold.

Owns: the look at every header before anything is built, and the limits on what is built.
Does not own: what the values mean. Imports no torch.

A header of five bytes can claim a list of millions, which msgpack then makes room for, once for
each level of nesting; and a byte can be an empty map, which takes seventy. So the items are
counted first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack

from tiered_mmcache.errors import RecordError

# What a first byte stands for: how many bytes follow it before the next item, and how many items
# follow. Where a length or a count follows the first byte, its struct, and what it counts.
_BYTES, _ITEMS, _PAIRS, _TEXT = range(4)
_COUNTED: dict[int, tuple[struct.Struct, int, int]] = {
    first: (struct.Struct(form), kind, extra)
    for first, form, kind, extra in [
        (0xC4, ">B", _BYTES, 0),
        (0xC5, ">H", _BYTES, 0),
        (0xC6, ">I", _BYTES, 0),
        (0xC7, ">B", _BYTES, 1),  # an extension's type lies between its length and its bytes
        (0xC8, ">H", _BYTES, 1),
        (0xC9, ">I", _BYTES, 1),
        (0xD9, ">B", _TEXT, 0),
        (0xDA, ">H", _TEXT, 0),
        (0xDB, ">I", _TEXT, 0),
        (0xDC, ">H", _ITEMS, 0),
        (0xDD, ">I", _ITEMS, 0),
        (0xDE, ">H", _PAIRS, 0),
        (0xDF, ">I", _PAIRS, 0),
    ]
}
_FIXED_BYTES = dict.fromkeys((*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)), 0)
_FIXED_BYTES |= {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # floats, unsigned
_FIXED_BYTES |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}  # signed
_FIXED_BYTES |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # extensions, with their type

SMALL_BYTES = 4096  # for unpack_small: what it builds takes less than 1 MB


def unpack_bounded(
    data: bytes | memoryview,
    *,
    most_items: int | None = None,
    most_text_bytes: int | None = None,
) -> Any:
    """Decode one msgpack value that fills ``data``.

    Args:
        data: The bytes.
        most_items: How many values there may be, containers and what is in them each counted; as
            many as bytes when None.
        most_text_bytes: How long all strings together may be; as long as ``data`` when None.

    Raises:
        RecordError: It is not msgpack, something follows it, or a bound is exceeded.
    """
    check_bounds(data, most_items=most_items, most_text_bytes=most_text_bytes)
    return build(data)


def build(
    data: bytes | memoryview, restore: Callable[[int, bytes], object] = msgpack.ExtType
) -> Any:
    """Decode what :func:`check_bounds` has looked at.

    Args:
        data: The whole input.
        restore: Makes a value of an extension's code and body; a ValueError refuses it.

    Raises:
        RecordError: It is not msgpack.
    """
    size = len(data)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=restore,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=size,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("malformed", f"not msgpack: {error}") from None


def unpack_small(data: bytes, *, most_listed: int) -> Any:
    """Decode one msgpack value of lists and scalars in few bytes, without looking at it before.

    msgpack's own limits bound what it builds: a list's room for each level of nesting. That takes
    a tenth of the time of :func:`unpack_bounded`.

    Args:
        data: The bytes, at most :data:`SMALL_BYTES`.
        most_listed: How many items a list may have.

    Raises:
        RecordError: It is not msgpack, something follows it, or a list is longer.
    """
    assert len(data) <= SMALL_BYTES
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            max_str_len=SMALL_BYTES,
            max_bin_len=SMALL_BYTES,
            max_array_len=most_listed,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("malformed", f"not msgpack: {error}") from None


def check_bounds(
    data: bytes | memoryview,
    *,
    most_items: int | None = None,
    most_text_bytes: int | None = None,
) -> int:
    """Look at every header of one msgpack value, and build nothing; how many values it has.

    Raises:
        RecordError: As for :func:`unpack_bounded`.
    """
    most_items = len(data) if most_items is None else most_items
    most_text_bytes = len(data) if most_text_bytes is None else most_text_bytes
    items, text_bytes = 1, 0  # claimed so far
    seen = position = 0
    try:
        while seen < items:
            first = data[position]
            position += 1
            seen += 1
            fixed = _FIXED_BYTES.get(first)
            if fixed is not None:
                position += fixed
                continue
            kind, count, position = _counted(data, first, position)
            if kind == _ITEMS:
                items += count
            elif kind == _PAIRS:
                items += 2 * count
            else:
                position += count
                text_bytes += count if kind == _TEXT else 0
            if items > most_items or text_bytes > most_text_bytes:
                raise RecordError("malformed", "more values or text than there can be")
    except (IndexError, struct.error):
        raise RecordError("malformed", "not msgpack: it ends too early") from None
    if position != len(data):
        raise RecordError("malformed", "not msgpack: its length is another")
    return items


def _counted(data: bytes | memoryview, first: int, position: int) -> tuple[int, int, int]:
    """What is counted after a first byte, how many, and where that begins."""
    if 0x80 <= first < 0x90:
        return _PAIRS, first & 0x0F, position
    if 0x90 <= first < 0xA0:
        return _ITEMS, first & 0x0F, position
    if 0xA0 <= first < 0xC0:
        return _TEXT, first & 0x1F, position
    if first not in _COUNTED:
        raise RecordError("malformed", "not msgpack: a byte that stands for nothing")
    form, kind, extra = _COUNTED[first]
    (count,) = form.unpack_from(data, position)
    return kind, count, position + form.size + extra
