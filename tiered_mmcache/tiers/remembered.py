"""What was last heard about keys, in bounded memory.

Owns: a bounded memory from keys to small values, and headers that share their equal parts.
Does not own: what the values mean (:mod:`.disk_tier`). Imports no torch.

A server may remember a million keys, so each has to be small. A key is kept as 16 bytes, however
long it is; an entry's header, which most entries of a model have in common, is kept once.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Hashable
from typing import Generic, TypeVar

from tiered_mmcache.entries.keys import encode_full_key, full_key_digest
from tiered_mmcache.entries.record import EntryHeader

_LONGEST_SHARED_EXTRAS = 64
_MOST_SHARED = 1024
_KEYS_A_PART = 8192
_MOST_PARTS = 1 << 12  # of the 65,536 that two bytes tell apart, so that parts are alike

_Value = TypeVar("_Value")


class RememberedKeys(Generic[_Value]):
    """The values of the keys that were noted last; of keys that can be stored on disk only.

    Two keys are the same here exactly when they are on disk: a plain integer is another key than
    the combined hash that it equals.

    Args:
        most_keys: How many keys are remembered at most. Half as many, those noted last, always
            are; where they are so many that they are kept in parts, nearly as many.
    """

    def __init__(self, most_keys: int) -> None:
        self._count = min(max(1, most_keys // _KEYS_A_PART), _MOST_PARTS)
        most = most_keys // self._count
        self._parts: list[_Part[_Value]] = [_Part(most) for _ in range(self._count)]

    def note(self, key: Hashable, value: _Value) -> None:
        """Remember a value for a key, in place of an earlier one."""
        digest = _last_digest.of(key)
        if digest is not None:
            self._part(digest).note(digest, value)

    def get(self, key: Hashable) -> _Value | None:
        """The value of a key, or None when it is not remembered."""
        digest = _last_digest.of(key)
        if digest is None:
            return None
        part = self._part(digest)
        value = part.newer.get(digest)
        return part.older.get(digest) if value is None else value

    def forget(self, key: Hashable) -> bool:
        """Forget a key; False when it was not remembered."""
        digest = _last_digest.of(key)
        if digest is None:
            return False
        part = self._part(digest)
        known = digest in part.newer or digest in part.older
        if known:
            part.newer.pop(digest, None)
            part.older.pop(digest, None)
        return known

    def clear(self) -> None:
        """Forget all keys."""
        for part in self._parts:
            part.newer, part.older = {}, {}

    def __contains__(self, key: Hashable) -> bool:
        digest = _last_digest.of(key)
        if digest is None:
            return False
        part = self._part(digest)
        return digest in part.newer or digest in part.older

    def __len__(self) -> int:
        return sum(len(part.newer) + len(part.older) for part in self._parts)

    def _part(self, digest: bytes) -> _Part[_Value]:
        return self._parts[(digest[0] << 8 | digest[1]) % self._count]


class _LastDigest:
    """Digests of keys; the last one is kept, since a call asks for the same one several times."""

    def __init__(self) -> None:
        self._last: tuple[Hashable, bytes | None] = (None, None)

    def of(self, key: Hashable) -> bytes | None:
        last, digest = self._last
        if key is not last:
            full_key = encode_full_key(key)
            digest = None if full_key is None else full_key_digest(full_key)
            self._last = key, digest
        return digest


_last_digest = _LastDigest()


class _Part(Generic[_Value]):
    """Some of the keys, in two dictionaries: an ordered one would take twice the room.

    When the newer half is full, the older one is forgotten at once. A part is small, so that
    neither this nor a dictionary that grows holds up the caller.
    """

    __slots__ = ("_most_newer", "newer", "older")

    def __init__(self, most_keys: int) -> None:
        self._most_newer = max(1, most_keys // 2)
        self.newer: dict[bytes, _Value] = {}
        self.older: dict[bytes, _Value] = {}

    def note(self, digest: bytes, value: _Value) -> None:
        self.older.pop(digest, None)
        self.newer[digest] = value
        if len(self.newer) >= self._most_newer:
            self.newer, self.older = {}, self.newer


def shared(header: EntryHeader) -> EntryHeader:
    """An equal header, made of parts that other equal headers consist of too.

    Headers of equal entries become one object. One that has an encoding time of its own shares
    its other fields.
    """
    if len(header.extras) > _LONGEST_SHARED_EXTRAS:
        return header
    if not header.cost_s:
        return _first_equal_header(header)
    return dataclasses.replace(
        header,
        class_tag=sys.intern(header.class_tag),
        dtype=sys.intern(header.dtype),
        device_type=sys.intern(header.device_type),
        shape=_first_equal_shape(header.shape),
        extras=_first_equal_extras(header.extras),
    )


def is_small(header: EntryHeader) -> bool:
    """Whether a million such headers may be remembered: its other fields take little room."""
    return len(header.extras) <= _LONGEST_SHARED_EXTRAS


@functools.lru_cache(maxsize=_MOST_SHARED)
def _first_equal_header(header: EntryHeader) -> EntryHeader:
    return header


@functools.lru_cache(maxsize=_MOST_SHARED)
def _first_equal_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


@functools.lru_cache(maxsize=_MOST_SHARED)
def _first_equal_extras(extras: bytes) -> bytes:
    return extras
