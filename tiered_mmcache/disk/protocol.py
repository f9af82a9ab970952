"""The messages between the server and its spill worker.

Owns: their fields, their encoding, and the checks on what arrives.
Does not own: sockets (:mod:`.client`, :mod:`.worker`). Imports no torch.

One message is one packet of a ``SOCK_SEQPACKET`` socket pair: a msgpack list that begins with
the message's kind. Payloads never travel here: both sides map the same arena, and a message
names the extents. Requests are answered in the order in which they take effect.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import msgpack

from tiered_mmcache.entries.bounded import unpack_bounded
from tiered_mmcache.entries.record import EntryHeader, decode_header, encode_header
from tiered_mmcache.errors import RecordError

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 192 * 1024  # below the default send buffer of a Unix socket, 208 KiB

Extents = list[tuple[int, int]]


class Kind(enum.IntEnum):
    """The first field of every message."""

    OPEN = 1
    PUT = 2
    LOOK_UP = 3
    FILL = 4
    DELETE = 5
    CLEAR = 6
    FLUSH = 7
    CLOSE = 8
    TOUCH = 9
    READY = 20
    UNAVAILABLE = 21
    DONE = 22
    FOUND = 23
    ABSENT = 24
    FAILED = 25
    PROGRESS = 26


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreTotals:
    """What a store held after its last commit.

    Attributes:
        entries: Number of entries.
        used_bytes: Bytes charged to the budget: whole pages, records included.
        payload_bytes: Bytes of the embeddings alone.
        file_bytes: What the store's file takes on disk.
        coldest_created_s: When the server's own entry that was used longest ago was stored, in
            whole seconds since the epoch; 0 where that is not known. As of a second ago at most.
    """

    entries: int = 0
    used_bytes: int = 0
    payload_bytes: int = 0
    file_bytes: int = 0
    coldest_created_s: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open the store; the first message of all.

    Attributes:
        generation: The server's generation when a worker is restarted; empty to take the
            namespace's current one.
        killed_worker: The store made workers die: set it aside.
    """

    path: str
    budget_bytes: int
    largest_entry_bytes: int
    synchronous: bool
    namespace: str
    allow_network: bool
    keep_quarantined: int
    generation: bytes
    killed_worker: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Store the bytes in the extents, which stay as they are until the answer."""

    request: int
    store_key: bytes
    full_key: bytes
    generation: bytes
    header: EntryHeader
    extents: Extents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """Ask whether the store has the entry; answered by FOUND or ABSENT."""

    request: int
    store_key: bytes
    full_key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Copy the entry's payload into the extents, check it there; DONE if every digest holds.

    ABSENT when there is no such entry, or one with another header.
    """

    request: int
    store_key: bytes
    full_key: bytes
    header: EntryHeader
    extents: Extents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Remove an entry; DONE also when there was none."""

    request: int
    store_key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Make another generation the namespace's current one."""

    request: int
    generation: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Answered when everything before it is committed."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """Make an entry the most recently used; not answered."""

    store_key: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Commit what is left, close the store and exit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The store is open.

    Attributes:
        quarantined_stores: How many unreadable ones lie beside it.
    """

    generation: bytes
    totals: StoreTotals
    quarantined_stores: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The store cannot be opened; the worker exits."""

    cause: str
    problem: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The request took effect."""

    request: int
    totals: StoreTotals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The first bytes of a payload that is being filled in are there, and right."""

    request: int
    filled_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The store has the entry."""

    request: int
    header: EntryHeader


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The store does not have the entry."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request took no effect.

    Attributes:
        cause: A short, stable label that is counted, such as ``no_space`` or ``digest``.
    """

    request: int
    cause: str
    problem: str


Request = Open | Put | LookUp | Fill | Delete | Clear | Flush | Touch | Close
Reply = Ready | Unavailable | Done | Progress | Found | Absent | Failed
Message = Request | Reply

_KIND_OF: dict[type[Any], Kind] = {
    Open: Kind.OPEN,
    Put: Kind.PUT,
    LookUp: Kind.LOOK_UP,
    Fill: Kind.FILL,
    Delete: Kind.DELETE,
    Clear: Kind.CLEAR,
    Flush: Kind.FLUSH,
    Touch: Kind.TOUCH,
    Close: Kind.CLOSE,
    Ready: Kind.READY,
    Unavailable: Kind.UNAVAILABLE,
    Done: Kind.DONE,
    Found: Kind.FOUND,
    Absent: Kind.ABSENT,
    Failed: Kind.FAILED,
    Progress: Kind.PROGRESS,
}
_CLASS_OF = {kind: message_class for message_class, kind in _KIND_OF.items()}
_TYPE_OF_FIELD: dict[str, type[Any]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "bytes": bytes,
}
_SHAPES: dict[Kind, list[tuple[str, str]]] = {
    kind: [(field.name, str(field.type)) for field in dataclasses.fields(message_class)]
    for kind, message_class in _CLASS_OF.items()
}


def encode_message(message: Message) -> bytes:
    """A message as one packet."""
    kind = _KIND_OF[type(message)]
    fields = [_encode_field(getattr(message, name)) for name, _ in _SHAPES[kind]]
    packed: bytes = msgpack.packb([int(kind), *fields], use_bin_type=True)
    return packed


def decode_message(packet: bytes) -> Message:
    """The message in a packet.

    Raises:
        RecordError: It is not a message of this protocol.
    """
    values = unpack_bounded(packet)
    numbered = isinstance(values, list) and bool(values) and type(values[0]) is int
    if not isinstance(values, list) or not numbered or values[0] not in _SHAPES:
        raise RecordError("protocol", "not a message of this protocol")
    kind = Kind(values[0])
    shape = _SHAPES[kind]
    if len(values) != 1 + len(shape):
        raise RecordError("protocol", f"{kind.name} has {len(shape)} fields")
    fields = {
        name: _decode_field(type_name, value)
        for (name, type_name), value in zip(shape, values[1:], strict=True)
    }
    message: Message = _CLASS_OF[kind](**fields)
    return message


def _encode_field(value: object) -> object:
    if isinstance(value, EntryHeader):
        return encode_header(value)
    if isinstance(value, StoreTotals):
        return list(dataclasses.astuple(value))
    return value


def _decode_field(type_name: str, value: Any) -> object:
    if type_name == "EntryHeader":
        return decode_header(value)
    if type_name == "StoreTotals":
        if _are_counts(value, len(dataclasses.fields(StoreTotals))):
            return StoreTotals(
                **{f.name: n for f, n in zip(dataclasses.fields(StoreTotals), value, strict=True)}
            )
    elif type_name == "Extents":
        if isinstance(value, list) and all(_are_counts(run, 2) for run in value):
            return [(run[0], run[1]) for run in value]
    elif type(value) is _TYPE_OF_FIELD[type_name]:
        return value
    raise RecordError("protocol", f"{value!r} is not of type {type_name}")


def _are_counts(value: object, length: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == length
        and all(type(item) is int and item >= 0 for item in value)
    )
