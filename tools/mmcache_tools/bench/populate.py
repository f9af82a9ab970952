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
_BYTES_A_COMMIT = 64 * 2**20
_HEADER = EntryHeader(
    class_tag="EmbeddingResult",
    dtype="uint8",
    item_bytes=1,
    shape=(ENTRY_BYTES,),
    extras=b"",
    device_type="cpu",
)


def payload(number: int, entry_bytes: int = ENTRY_BYTES) -> bytes:
    """The bytes of one entry, told by its number."""
    return number.to_bytes(8, "big") * (entry_bytes // 8)


def populate(
    folder: Path, entries: int, budget_bytes: int, *, entry_bytes: int = ENTRY_BYTES
) -> None:
    """Make a store that holds the entries 0 to ``entries`` - 1 under :data:`NAMESPACE`."""
    settings = OpenSettings(
        path=folder, budget_bytes=budget_bytes, largest_entry_bytes=entry_bytes, synchronous=False
    )
    together = max(1, min(_ENTRIES_A_COMMIT, _BYTES_A_COMMIT // entry_bytes))
    opened = open_for_writing(settings)
    try:
        store = Store(opened.environment, budget_bytes=budget_bytes)
        generation = generation_of_version(None)
        store.apply([BeginGeneration(namespace=NAMESPACE, generation=generation)])
        for start in range(0, entries, together):
            numbers = range(start, min(start + together, entries))
            store.apply(sorted(_puts(numbers, generation, entry_bytes), key=_store_key))
    finally:
        opened.close()


def _puts(numbers: range, generation: bytes, entry_bytes: int) -> Iterator[PutEntry]:
    for number in numbers:
        full_key = encode_full_key(number)
        assert full_key is not None
        yield PutEntry(
            store_key=store_key(namespace=NAMESPACE, generation=generation, full_key=full_key),
            full_key=full_key,
            namespace=NAMESPACE,
            generation=generation,
            header=dataclasses.replace(
                _HEADER,
                shape=(entry_bytes,),
                cost_s=10 + number / 1024,  # no two headers equal
            ),
            parts=[memoryview(payload(number, entry_bytes))],
        )


def _store_key(change: Change) -> bytes:
    """Neighbours in the table one after the other: each page is looked for once."""
    assert isinstance(change, PutEntry)
    return change.store_key


if __name__ == "__main__":
    populate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
