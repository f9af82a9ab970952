"""Keys: combined hashes that remember their parts, and the store's 16-byte keys.

Owns: what makes two look-ups the same entry, in memory and on disk.
Does not own: where entries are kept. Imports no torch: the spill worker and the command use it.

Python's ``hash`` maps 5 and 5 + 2**61 - 1, and -1 and -2, to the same value, so the specified
combined hash of two different requests can be equal. :class:`CombinedHash` therefore carries its
parts and compares them, and the full key is kept in every record and compared on every read.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgpack

from tiered_mmcache.entries.bounded import unpack_bounded, unpack_small
from tiered_mmcache.errors import RecordError

MAX_KEY_BYTES = 64 * 1024
MAX_KEY_DEPTH = 8
STORE_KEY_BYTES = 16
_SHORT_KEY_BYTES = 256
_SHORT_INTEGERS = {  # how an integer of so many characters begins: most keys are one
    length: b"\x92\xa1i" + bytes([0xA0 + length]) for length in range(32)
}
_PERSON = b"tiered-mmcache-1"  # 16 bytes, the most that blake2b takes


class CombinedHash(int):
    """The specified combined hash, equal to ``hash(tuple(parts))``, which also knows its parts.

    Two combined hashes are equal only when their parts are. Against a plain integer it compares
    as an integer, so a caller who kept only the number still finds the entry in memory.
    """

    parts: tuple[Hashable, ...]

    def __new__(cls, parts: Iterable[Hashable]) -> CombinedHash:
        """The combined hash of these parts, in this order."""
        as_tuple = tuple(parts)
        self = super().__new__(cls, hash(as_tuple))
        self.parts = as_tuple
        return self

    def __eq__(self, other: object) -> bool:
        if type(other) is CombinedHash:
            return self.parts == other.parts
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type[CombinedHash], tuple[tuple[Hashable, ...]]]:
        # The number of string parts differs between processes; the parts do not.
        return CombinedHash, (self.parts,)


def combine_hashes(mm_hashes: Sequence[Hashable]) -> CombinedHash | None:
    """The key of an ordered combination, or None when it is empty.

    Raises:
        TypeError: A part is not hashable.
    """
    if not mm_hashes:
        return None
    return CombinedHash(mm_hashes)


def encode_full_key(key: object) -> bytes | None:
    """The canonical bytes of a key, or None when it can only be kept in memory.

    Integers of any size, strings, bytes, tuples of these and combined hashes can be stored. The
    last answer is kept, since a call asks for the same key's several times.
    """
    last, packed = _last_encoded[0]
    if key is not last:
        packed = _encoded(key)
        _last_encoded[0] = key, packed  # together, so that another thread sees both or neither
    return packed


_last_encoded: list[tuple[object, bytes | None]] = [(None, None)]


def _encoded(key: object) -> bytes | None:
    try:
        packed: bytes = msgpack.packb(_node(key, MAX_KEY_DEPTH), use_bin_type=True)
    except (_NotStorableError, UnicodeEncodeError, ValueError):
        return None
    return packed if len(packed) <= MAX_KEY_BYTES else None


def describe_full_key(full_key: bytes) -> str:
    """A stored key as text for people; bytes that are not such a key are shown in hex."""
    try:
        digits = full_key[4:]
        if full_key[:4] == _SHORT_INTEGERS.get(len(digits)):
            return digits.decode()
        if len(full_key) <= _SHORT_KEY_BYTES:
            return _describe(unpack_small(full_key, most_listed=_SHORT_KEY_BYTES))
        return _describe(unpack_bounded(full_key))
    except (RecordError, ValueError, TypeError, RecursionError):
        return "0x" + full_key.hex()


def store_key(*, namespace: str, generation: bytes, full_key: bytes) -> bytes:
    """The 16-byte key of an entry in the store: a digest over everything that tells it apart."""
    name = namespace.encode()
    digest = hashlib.blake2b(digest_size=STORE_KEY_BYTES, person=_PERSON)
    for field in (name, generation, full_key):
        digest.update(len(field).to_bytes(4, "big"))
        digest.update(field)
    return digest.digest()


def full_key_digest(full_key: bytes) -> bytes:
    """16 bytes that stand for a full key in memory, within one namespace and generation."""
    return hashlib.blake2b(full_key, digest_size=STORE_KEY_BYTES, person=_PERSON).digest()


def namespace_digest(namespace: str) -> bytes:
    """16 bytes that stand for a namespace in the store's own tables."""
    return hashlib.blake2b(namespace.encode(), digest_size=16, person=_PERSON).digest()


def generation_of_version(version: str | None) -> bytes:
    """The generation that every process derives from one version; None is a namespace's first."""
    text = b"first" if version is None else b"version:" + version.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16, person=_PERSON).digest()


class _NotStorableError(Exception):
    """The key has a part that cannot be written down."""


def _node(key: object, depth: int) -> list[Any]:
    if type(key) is int and depth:  # nearly always; the general test for numbers takes longer
        return ["i", str(key)]
    if depth == 0:
        raise _NotStorableError
    if isinstance(key, CombinedHash):
        return ["c", [_node(part, depth - 1) for part in key.parts]]
    if isinstance(key, numbers.Integral):
        return ["i", str(int(key))]
    if type(key) is str:
        return ["s", key]
    if type(key) is bytes:
        return ["b", key]
    if type(key) is tuple:
        return ["t", [_node(part, depth - 1) for part in key]]
    raise _NotStorableError


def _describe(node: Any) -> str:
    kind, value = node
    if kind == "i":
        return str(value)
    if kind in ("s", "b"):
        return repr(value)
    inner = ", ".join(_describe(part) for part in value)
    return f"[{inner}]" if kind == "c" else f"({inner})"
