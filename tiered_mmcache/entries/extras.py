"""The fields of a result beside its embedding, written down exactly or not at all.

Owns: the encoding of plain values (None, bool, int, float, str, bytes, list, tuple, dict).
Does not own: which classes may be stored (:mod:`tiered_mmcache.contract`). Imports no torch.

No pickle: decoding can only build the values listed above.
"""

from __future__ import annotations

from typing import Any

import msgpack

from tiered_mmcache.entries.bounded import build, check_bounds
from tiered_mmcache.entries.record import MAX_EXTRAS_BYTES
from tiered_mmcache.errors import RecordError

MAX_DEPTH = 16
MAX_VALUES = 4096  # a map of one byte takes seventy in memory: length alone is no bound
_TUPLE = 1
_BIG_INTEGER = 2


class NotPlainError(Exception):
    """A field holds something that cannot be restored exactly."""


def encode_extras(fields: dict[str, object]) -> bytes:
    """Plain fields as bytes.

    Raises:
        NotPlainError: A value is of another type (a subclass too), nested deeper than
            ``MAX_DEPTH``, or the whole has more than ``MAX_VALUES`` values or
            ``MAX_EXTRAS_BYTES``.
    """
    if not fields:
        return b""
    try:
        packed: bytes = msgpack.packb(_plain(fields, MAX_DEPTH, _Room()), use_bin_type=True)
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        raise NotPlainError(str(error)) from None
    if len(packed) > MAX_EXTRAS_BYTES:
        raise NotPlainError(f"{len(packed)} bytes of extra fields")
    return packed


def decode_extras(data: bytes) -> dict[str, Any]:
    """The fields in such bytes.

    Raises:
        RecordError: They are not such bytes.
    """
    if not data:
        return {}
    if len(data) > MAX_EXTRAS_BYTES:
        raise RecordError("malformed", f"{len(data)} bytes of extra fields")
    fields = _unpack(data, MAX_DEPTH, _Room())
    if not isinstance(fields, dict) or not all(type(name) is str for name in fields):
        raise RecordError("malformed", "extra fields are a map of names")
    if not _would_write(fields, data):
        raise RecordError("malformed", "extra fields hold what is never written")
    return fields


def _would_write(fields: dict[str, Any], data: bytes) -> bool:
    """Whether the bytes are those of the fields; msgpack also builds timestamps, for one."""
    try:
        return encode_extras(fields) == data
    except NotPlainError:
        return False


class _Room:
    """How many values there may still be, as they lie in the bytes."""

    def __init__(self) -> None:
        self.values = MAX_VALUES

    def take(self) -> None:
        self.values -= 1
        if self.values < 0:
            raise NotPlainError(f"more than {MAX_VALUES} values")


def _plain(value: object, depth: int, room: _Room) -> object:
    room.take()
    if depth == 0:
        raise NotPlainError("nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if isinstance(value, int) and kind is int:
        fits = -(2**63) <= value < 2**64
        return value if fits else msgpack.ExtType(_BIG_INTEGER, str(value).encode())
    if isinstance(value, list) and kind is list:
        return [_plain(item, depth - 1, room) for item in value]
    if isinstance(value, tuple) and kind is tuple:
        room.take()  # the list in the extension
        items = [_plain(item, depth - 1, room) for item in value]
        return msgpack.ExtType(_TUPLE, msgpack.packb(items, use_bin_type=True))
    if isinstance(value, dict) and kind is dict:
        below = depth - 1
        return {_plain(k, below, room): _plain(v, below, room) for k, v in value.items()}
    raise NotPlainError(f"{kind.__qualname__} is not a plain value")


def _unpack(data: bytes, depth: int, room: _Room) -> Any:
    if depth == 0:
        raise RecordError("malformed", "extra fields are nested too deeply")

    room.values -= check_bounds(data, most_items=room.values)

    def restore(code: int, body: bytes) -> object:
        if code == _TUPLE:
            items = _unpack(body, depth - 1, room)
            if isinstance(items, list):
                return tuple(items)
        elif code == _BIG_INTEGER:
            return int(body)
        raise ValueError(f"unknown extension {code}")

    return build(data, restore)
