"""Entries as lines of text or JSON, quickly enough for a million of them.

Owns: the columns of the plain listing, and each row as one line.
Does not own: what the fields mean (:mod:`.rows`), whose words are used, or the table.

What many entries share, such as their dtype, shape and namespace, is put into words once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quoted

from mmcache_tools.inspection.rows import (
    EntryRow,
    printable,
    written_bytes,
    written_shape,
    written_span,
)
from mmcache_tools.inspection.selection import SelectedEntry
from tiered_mmcache.disk import layout
from tiered_mmcache.entries.keys import describe_full_key
from tiered_mmcache.entries.record import chunk_count

__all__ = ["HEADINGS", "RIGHT_SIDE", "JsonLines", "TextLines", "cells"]

HEADINGS = ("STORE KEY", "SIZE", "AGE", "COST", "DTYPE", "SHAPE", "CLASS", "NAMESPACE", "KEY")
RIGHT_SIDE = frozenset({"SIZE", "AGE", "COST"})
_KEY_CHARACTERS = 60
_KEPT = 4096  # phrases


def cells(row: EntryRow) -> tuple[str, ...]:
    """A row as text, under :data:`HEADINGS`."""
    return (
        row.store_key,
        written_bytes(row.payload_bytes),
        written_span(row.age_s),
        written_span(row.cost_s),
        printable(row.dtype),
        written_shape(row.shape),
        printable(row.class_tag),
        _named(row.namespace, stale=row.stale),
        printable(row.key, _KEY_CHARACTERS),
    )


def _named(namespace: str, *, stale: bool) -> str:
    return printable(namespace) + (" (stale)" if stale else "")


class TextLines:
    """Columns of fixed width: an over-long cell moves the rest of its line, and nothing is lost.

    Args:
        stale: The generations that are stale.
        now_s: Until when ages are counted.
    """

    def __init__(self, stale: Iterable[int], *, now_s: float) -> None:
        self._stale = frozenset(map(layout.bucket_prefix, stale))
        self._now_s = now_s

    def heading(self) -> str:
        """The headings above the columns."""
        store_key, size, age, cost, dtype, shape, class_tag, namespace, key = HEADINGS
        left = f"{store_key:<32}  {size:>9}  {age:>8}  {cost:>8}"
        return f"{left}  {dtype:<14}  {shape:<12}  {class_tag:<16}  {namespace:<24}  {key}"

    def line(self, entry: SelectedEntry) -> str:
        """One entry."""
        store_key, row, full_key, namespace, _, created_s, header, payload_bytes = entry
        class_tag, dtype, _, shape, _, _, cost_s = header
        stale = row[: layout.BUCKET_BYTES] in self._stale
        key = describe_full_key(full_key)
        if len(key) > _KEY_CHARACTERS or not key.isprintable():
            key = printable(key, _KEY_CHARACTERS)
        age = written_span(self._now_s - created_s)
        about = _columns(dtype, tuple(shape), class_tag, namespace, stale)
        return (
            f"{store_key.hex()}  {_size(payload_bytes)}  {age:>8}  {written_span(cost_s):>8}"
            f"  {about}  {key}"
        )


@functools.lru_cache(maxsize=_KEPT)
def _size(payload_bytes: int) -> str:
    return f"{written_bytes(payload_bytes):>9}"


@functools.lru_cache(maxsize=_KEPT)
def _columns(
    dtype: str, shape: tuple[int, ...], class_tag: str, namespace: str, stale: bool
) -> str:
    name = _named(namespace, stale=stale)
    left = f"{printable(dtype):<14}  {written_shape(shape):<12}"
    return f"{left}  {printable(class_tag):<16}  {name:<24}"


class JsonLines:
    """The same text as ``json.dumps(row.as_dict())`` of each entry's row.

    Args:
        stale: The generations that are stale.
        now_s: Until when ages are counted.
    """

    def __init__(self, stale: Iterable[int], *, now_s: float) -> None:
        self._stale = frozenset(map(layout.bucket_prefix, stale))
        self._now_s = now_s

    def line(self, entry: SelectedEntry) -> str:
        """One entry."""
        store_key, row, full_key, namespace, generation, created_s, header, payload_bytes = entry
        class_tag, dtype, _, shape, _, device_type, cost_s = header
        stale = row[: layout.BUCKET_BYTES] in self._stale
        about = _members(namespace, generation, stale, class_tag, dtype, tuple(shape))
        return (
            f'{{"store_key": "{store_key.hex()}", "key": {quoted(describe_full_key(full_key))}, '
            f'{about}, {_sizes(len(row), payload_bytes)}, "created_s": {created_s!r}, "age_s": '
            f'{max(0.0, self._now_s - created_s)!r}, "cost_s": {cost_s!r}, '
            f'"device_type": {_quoted(device_type)}}}'
        )


@functools.lru_cache(maxsize=_KEPT)
def _members(
    namespace: str,
    generation: bytes,
    stale: bool,
    class_tag: str,
    dtype: str,
    shape: tuple[int, ...],
) -> str:
    members = {
        "namespace": namespace,
        "generation": generation.hex(),
        "stale": stale,
        "class_tag": class_tag,
        "dtype": dtype,
        "shape": shape,
    }
    return json.dumps(members)[1:-1]


@functools.lru_cache(maxsize=_KEPT)
def _sizes(row_bytes: int, payload_bytes: int) -> str:
    charged_bytes = layout.charged_entry_bytes(row_bytes - layout.PLACE_BYTES, payload_bytes)
    sizes = f'"payload_bytes": {payload_bytes}, "charged_bytes": {charged_bytes}'
    return f'{sizes}, "chunks": {chunk_count(payload_bytes)}'


_quoted = functools.lru_cache(maxsize=_KEPT)(quoted)  # of what few words there are
