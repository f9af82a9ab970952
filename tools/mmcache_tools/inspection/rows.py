"""One entry as people and programs read it.

Owns: the fields of an entry in every table and JSON answer, and how each looks as text.
Does not own: where entries come from.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable
from typing import Any

from mmcache_tools.inspection.selection import SelectedEntry
from tiered_mmcache.configuration.quantities import written_size
from tiered_mmcache.entries.keys import describe_full_key
from tiered_mmcache.entries.record import chunk_count

__all__ = [
    "EntryRow",
    "entry_row",
    "print_fields",
    "print_json",
    "printable",
    "written_bytes",
    "written_shape",
    "written_span",
]


_NAME_CHARACTERS = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntryRow:
    """The fields of an entry, in the order of docs/cli.md; ages are as of the listing."""

    store_key: str
    key: str
    namespace: str
    generation: str
    stale: bool
    class_tag: str
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    charged_bytes: int
    chunks: int
    created_s: float
    age_s: float
    cost_s: float
    device_type: str

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {field: getattr(self, field) for field in self.__slots__}


def entry_row(entry: SelectedEntry, stale: Container[int], *, now_s: float) -> EntryRow:
    """The row of an entry, where these generations are stale."""
    class_tag, dtype, _, shape, _, device_type, cost_s = entry.header
    return EntryRow(
        store_key=entry.store_key.hex(),
        key=describe_full_key(entry.full_key),
        namespace=entry.namespace,
        generation=entry.generation.hex(),
        stale=entry.bucket in stale,
        class_tag=class_tag,
        dtype=dtype,
        shape=tuple(shape),
        payload_bytes=entry.payload_bytes,
        charged_bytes=entry.charged_bytes,
        chunks=chunk_count(entry.payload_bytes),
        created_s=entry.created_s,
        age_s=max(0.0, now_s - entry.created_s),
        cost_s=cost_s,
        device_type=device_type,
    )


def written_span(seconds: float) -> str:
    """A span of time in its largest unit: ``3.2 d``, ``12 ms``; ``-`` for nothing."""
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} d"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.3g} ms" if seconds > 0 else "-"


def written_shape(shape: tuple[int, ...]) -> str:
    """A shape as ``(tokens, hidden)`` tensors are spoken of: ``256x3584``; ``()`` is a scalar."""
    return "x".join(map(str, shape)) if shape else "()"


def written_bytes(count_bytes: int) -> str:
    """A size in a binary unit."""
    return written_size(count_bytes)


def printable(text: str, most: int | None = None) -> str:
    """Text from a store, safe for a terminal, cut to so many characters.

    Names and keys are whatever a caller chose, escape sequences included.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if most is not None and len(text) > most:
        return text[: most - 1] + "…"
    return text


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Names and what they have, one below the other; long ones are wrapped on a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, text in fields:
        first = f"{name:<{_NAME_CHARACTERS}} "
        if len(first) + len(text) <= width or not width:
            print(f"{first}{text}")
            continue
        lines = textwrap.wrap(text, max(20, width - len(first)), break_on_hyphens=False)
        print(first + f"\n{' ' * len(first)}".join(lines))


def print_json(answer: dict[str, Any]) -> None:
    """A whole answer as JSON, followed by a line's end."""
    print(json.dumps(answer, indent=2))
