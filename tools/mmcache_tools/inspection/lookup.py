"""Which entry a KEY on the command line means.

Owns: reading a store key, its first digits, or a caller's key. Does not own: showing the entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterator
from typing import Any

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.inspection.rows import printable
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.entries.keys import (
    CombinedHash,
    describe_full_key,
    encode_full_key,
    store_key,
)
from tiered_mmcache.errors import RecordError

__all__ = ["MOST_MATCHES", "find_entries", "readings", "the_one"]

MOST_MATCHES = 16
_HEX = re.compile(r"[0-9a-f]{4,32}")


def find_entries(reader: StoreReader, key: str, namespace: str | None) -> list[StoredEntry]:
    """The entries that a KEY can mean, at most ``MOST_MATCHES``; generations in use come first.

    It is tried as a store key's first digits and as a caller's key, directly; only when neither
    is there, it is compared with the text of every key.
    """
    found = _by_digits(reader, key.lower().removeprefix("0x"))
    if len(found) == 1 and found[0].store_key.hex() == key.lower():
        return found
    found += [each for each in _by_key(reader, key) if each not in found]
    found = found or list(_by_text(reader, key))
    if namespace is None:
        return found
    return [entry for entry in found if _namespace_of(entry) == namespace]


def the_one(reader: StoreReader, key: str, namespace: str | None) -> StoredEntry | None:
    """The entry that a KEY means, or None.

    Raises:
        UsageError: It can mean several.
    """
    found = find_entries(reader, key, namespace)
    if len(found) <= 1:
        return found[0] if found else None
    most = "or more " if len(found) >= MOST_MATCHES else ""
    raise UsageError(
        f"{key!r} can be any of {len(found)} {most}entries. Give more of its store key, "
        f"or --namespace:\n" + "\n".join(_described(entry) for entry in found)
    )


def _described(entry: StoredEntry) -> str:
    try:
        record = entry.record()
    except RecordError as error:
        return f"  {entry.store_key.hex()}  damaged: {error}"
    key = printable(describe_full_key(record.full_key), 60)
    return f"  {entry.store_key.hex()}  {printable(record.namespace)}  {key}"


def _by_digits(reader: StoreReader, digits: str) -> list[StoredEntry]:
    if _HEX.fullmatch(digits) is None:
        return []
    return reader.with_prefix(digits, limit=MOST_MATCHES)


def _by_key(reader: StoreReader, text: str) -> list[StoredEntry]:
    """Under each key that the text can be, in each generation; stale ones only if need be."""
    full_keys = [packed for each in readings(text) if (packed := encode_full_key(each))]
    for stale in (False, True):
        store_keys = [
            store_key(namespace=bucket.namespace, generation=bucket.generation, full_key=full_key)
            for bucket in reader.buckets()
            if bucket.stale is stale
            for full_key in full_keys
        ]
        if found := list(reader.look_up(store_keys)):
            return found[:MOST_MATCHES]
    return []


def readings(text: str) -> Iterator[Hashable]:
    """The keys that a text can stand for: a literal as `mmcache ls` prints it, or a bare string."""
    yield text
    try:
        yield _hashable(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return


def _hashable(literal: Any) -> Hashable:
    """A list stands for a combined hash, which is what the brackets mean in a listing."""
    if isinstance(literal, list):
        return CombinedHash([_hashable(part) for part in literal])
    if isinstance(literal, tuple):
        return tuple(_hashable(part) for part in literal)
    if isinstance(literal, Hashable):
        return literal
    raise TypeError


def _by_text(reader: StoreReader, text: str) -> Iterator[StoredEntry]:
    """A last resort for what no literal can say, such as a tuple of one part."""
    if not text.startswith(("(", "[", "0x")):
        return
    for entry in reader.entries():
        try:
            record = entry.record()
        except RecordError:
            continue
        if describe_full_key(record.full_key) == text:
            yield entry
            return


def _namespace_of(entry: StoredEntry) -> str | None:
    try:
        return entry.record().namespace
    except RecordError:
        return None
