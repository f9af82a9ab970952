"""Which entries are meant: by namespace, class, key, size and age.

Owns: the conditions, and how a span of time is written on the command line.
Does not own: finding the entries, or what is done with them.
"""

from __future__ import annotations

import dataclasses
import re

from mmcache_tools.inspection.outcome import UsageError
from tiered_mmcache.configuration.quantities import UnusableValueError, size_bytes
from tiered_mmcache.entries.keys import describe_full_key
from tiered_mmcache.entries.record import Record

__all__ = ["EVERYTHING", "Selection", "read_size", "read_span"]

_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(s|min|h|d|w)")
_UNIT_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


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

    def includes(self, store_key: bytes, record: Record, *, now_s: float) -> bool:
        """Whether an entry meets all conditions."""
        return (
            self.namespace in (None, record.namespace)
            and self.class_tag in (None, record.header.class_tag)
            and self._age_fits(now_s - record.created_s)
            and self._size_fits(record.header.payload_bytes)
            and self._key_fits(store_key, record)
        )

    def _age_fits(self, age_s: float) -> bool:
        old_enough = self.older_than_s is None or age_s >= self.older_than_s
        return old_enough and (self.newer_than_s is None or age_s <= self.newer_than_s)

    def _size_fits(self, payload_bytes: int) -> bool:
        large_enough = self.larger_than_bytes is None or payload_bytes >= self.larger_than_bytes
        return large_enough and (
            self.smaller_than_bytes is None or payload_bytes <= self.smaller_than_bytes
        )

    def _key_fits(self, store_key: bytes, record: Record) -> bool:
        if self.prefix is None or store_key.hex().startswith(self.prefix.lower()):
            return True
        text = describe_full_key(record.full_key)
        return text.startswith((self.prefix, f"'{self.prefix}", f'"{self.prefix}'))


EVERYTHING = Selection()


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
