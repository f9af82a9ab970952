"""Which entries are meant: by namespace, class, key, size and age.

Owns: the conditions, judging entries by them, and how a span of time is written on the command
line. Does not own: in which order entries come, or what is done with them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from mmcache_tools.inspection.outcome import UsageError
from tiered_mmcache.configuration.quantities import UnusableValueError, size_bytes
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.reader import StoredEntry
from tiered_mmcache.entries.keys import describe_full_key
from tiered_mmcache.errors import RecordError

__all__ = ["EVERYTHING", "SelectedEntry", "Selection", "Selector", "read_size", "read_span"]

_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(s|min|h|d|w)")
_UNIT_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


_charged_bytes = functools.lru_cache(maxsize=4096)(layout.charged_entry_bytes)


class SelectedEntry(NamedTuple):
    """An entry whose record was read: a tuple, since there may be millions.

    Attributes:
        store_key: The 16-byte key.
        row: The whole row: place, then record.
        full_key: The caller's key as it is stored.
        namespace: Its namespace.
        generation: The namespace's generation, 16 bytes.
        created_s: When it was stored, in seconds since 1970.
        header: The header's plain values, in the order of
            :class:`~tiered_mmcache.entries.record.EntryHeader`.
        payload_bytes: Bytes of the embedding.
    """

    store_key: bytes
    row: bytes
    full_key: bytes
    namespace: str
    generation: bytes
    created_s: float
    header: list[Any]
    payload_bytes: int

    @property
    def stored(self) -> StoredEntry:
        """The row as the store has it."""
        return StoredEntry(self.store_key, self.row)

    @property
    def bucket(self) -> int:
        """Number of the generation in which it is evicted."""
        return int.from_bytes(self.row[: layout.BUCKET_BYTES], "big")

    @property
    def charged_bytes(self) -> int:
        """What it takes from the budget."""
        return _charged_bytes(len(self.row) - layout.PLACE_BYTES, self.payload_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that an entry meets all of; None is no condition.

    Attributes:
        namespace: The whole name of its namespace.
        class_tag: The tag of its result class.
        prefix: What its store key in hex, or the caller's key as it is printed, begins with.
        older_than_s: Stored at least so long ago.
        newer_than_s: Stored no longer ago than that.
        larger_than_bytes: The embedding has at least so many bytes.
        smaller_than_bytes: The embedding has no more bytes than that.
    """

    namespace: str | None = None
    class_tag: str | None = None
    prefix: str | None = None
    older_than_s: float | None = None
    newer_than_s: float | None = None
    larger_than_bytes: int | None = None
    smaller_than_bytes: int | None = None

    def is_everything(self) -> bool:
        """Whether there is no condition at all."""
        return self == EVERYTHING

    def includes(self, entry: SelectedEntry, *, now_s: float) -> bool:
        """Whether an entry meets all conditions."""
        return (
            self.namespace in (None, entry.namespace)
            and self.class_tag in (None, entry.header[0])
            and self._age_fits(now_s - entry.created_s)
            and self._size_fits(entry.payload_bytes)
            and self._key_fits(entry)
        )

    def _age_fits(self, age_s: float) -> bool:
        old_enough = self.older_than_s is None or age_s >= self.older_than_s
        return old_enough and (self.newer_than_s is None or age_s <= self.newer_than_s)

    def _size_fits(self, payload_bytes: int) -> bool:
        large_enough = self.larger_than_bytes is None or payload_bytes >= self.larger_than_bytes
        return large_enough and (
            self.smaller_than_bytes is None or payload_bytes <= self.smaller_than_bytes
        )

    def _key_fits(self, entry: SelectedEntry) -> bool:
        if self.prefix is None or entry.store_key.hex().startswith(self.prefix.lower()):
            return True
        text = describe_full_key(entry.full_key)
        return text.startswith((self.prefix, f"'{self.prefix}", f'"{self.prefix}'))


EVERYTHING = Selection()


class Selector:
    """Judges entries as they stream past.

    Args:
        selection: The conditions.
        now_s: Until when ages are counted, in seconds since 1970.

    Attributes:
        damaged: Entries that could not be judged, since their record is damaged.
    """

    def __init__(self, selection: Selection, *, now_s: float) -> None:
        self._selection = selection
        self._now_s = now_s
        self.damaged = 0

    def selected(self, entries: Iterable[StoredEntry]) -> Iterator[SelectedEntry]:
        """Those that meet the conditions, in the order in which they come."""
        all_of_them = self._selection.is_everything()
        includes = self._selection.includes
        now_s = self._now_s
        made = functools.partial(tuple.__new__, SelectedEntry)  # half the time of the class's own
        for stored in entries:
            try:
                fields, payload_bytes = stored.fields()
            except RecordError:
                self.damaged += 1
                continue
            _, full_key, namespace, generation, created_s, _, header = fields
            store_key, row = stored
            entry = made(
                (store_key, row, full_key, namespace, generation, created_s, header, payload_bytes)
            )
            if all_of_them or includes(entry, now_s=now_s):
                yield entry


def read_span(text: str | None, *, option: str) -> float | None:
    """A span of time such as ``90s``, ``15min``, ``12h``, ``7d`` or ``2w``, in seconds.

    Raises:
        UsageError: It is not one.
    """
    if text is None:
        return None
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{option} {text!r} is not a span of time. Write 90s, 15min, 12h, 7d or 2w."
        )
    return float(match[1]) * _UNIT_S[match[2]]


def read_size(text: str | None, *, option: str) -> int | None:
    """A size such as ``64KiB`` in bytes.

    Raises:
        UsageError: It is not one.
    """
    if text is None:
        return None
    try:
        return size_bytes(int(text) if text.isascii() and text.isdigit() else text)
    except UnusableValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from None
