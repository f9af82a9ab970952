"""Filling a store with small entries, many at a time and without a server.

Owns: the entries, and writing them by the store's own changes in large transactions.
Does not own: what is measured on them (:mod:`.scale`). Imports no torch.

Run as ``python -m mmcache_tools.bench.populate FOLDER ENTRIES BUDGET_BYTES``, in a process of
its own: one process may open a store once only, and its memory must not count as the server's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from tiered_mmcache.disk.changes import BeginGeneration, Change, PutEntry
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.keys import encode_full_key, generation_of_version, store_key
from tiered_mmcache.entries.record import EntryHeader

NAMESPACE = "bench/scale"
ENTRY_BYTES = 1024
_ENTRIES_A_COMMIT = 20_000
_HEADER = EntryHeader(
    class_tag="EmbeddingResult",
    dtype="uint8",
    item_bytes=1,
    shape=(ENTRY_BYTES,),
    extras=b"",
    device_type="cpu",
)


def payload(number: int) -> bytes:
    """The bytes of one entry, told by its number."""
    return number.to_bytes(8, "big") * (ENTRY_BYTES // 8)


def populate(folder: Path, entries: int, budget_bytes: int) -> None:
    """Make a store that holds the entries 0 to ``entries`` - 1 under :data:`NAMESPACE`."""
    settings = OpenSettings(
        path=folder, budget_bytes=budget_bytes, largest_entry_bytes=ENTRY_BYTES, synchronous=False
    )
    opened = open_for_writing(settings)
    try:
        store = Store(opened.environment, budget_bytes=budget_bytes)
        generation = generation_of_version(None)
        store.apply([BeginGeneration(namespace=NAMESPACE, generation=generation)])
        for start in range(0, entries, _ENTRIES_A_COMMIT):
            stop = min(start + _ENTRIES_A_COMMIT, entries)
            store.apply(sorted(_puts(range(start, stop), generation), key=_store_key))
    finally:
        opened.close()


def _puts(numbers: range, generation: bytes) -> Iterator[PutEntry]:
    for number in numbers:
        full_key = encode_full_key(number)
        assert full_key is not None
        yield PutEntry(
            store_key=store_key(namespace=NAMESPACE, generation=generation, full_key=full_key),
            full_key=full_key,
            namespace=NAMESPACE,
            generation=generation,
            header=dataclasses.replace(_HEADER, cost_s=10 + number / 1024),  # no two headers equal
            parts=[memoryview(payload(number))],
        )


def _store_key(change: Change) -> bytes:
    """Neighbours in the table one after the other: each page is looked for once."""
    assert isinstance(change, PutEntry)
    return change.store_key


if __name__ == "__main__":
    populate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
