"""Makes the golden store: what this version writes, kept so that later versions must read it.

Run from the repository's root, once for each format version, and never again for the same one:

    .venv/bin/python tests/format/make_golden.py tests/format/golden/store-1.mdb.gz

Owns: the entries of the golden store, by which tests/format/test_golden_store.py also knows what
to expect. Does not own: the checks. Imports no torch.
"""

import dataclasses
import gzip
import struct
import sys
import tempfile
from pathlib import Path
from unittest import mock

import lmdb

from tiered_mmcache.disk import changes, layout
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries import keys
from tiered_mmcache.entries.extras import encode_extras
from tiered_mmcache.entries.record import CHUNK_BYTES, EntryHeader

BUDGET_BYTES = 8 << 20
CREATED_S = 1_800_000_000.25
NAMESPACE = "golden/model@main/bf16"
OTHER_NAMESPACE = "golden/ümlaut"
FIRST = keys.generation_of_version(None)
SECOND = keys.generation_of_version("weights-2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenEntry:
    """One entry as a caller would give it, its payload as bytes."""

    key: object
    payload: bytes
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    namespace: str = NAMESPACE
    generation: bytes = SECOND
    class_tag: str = "EmbeddingResult"
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    device_type: str = "cpu"
    cost_s: float = 0.0

    @property
    def full_key(self) -> bytes:
        """The key as records hold it."""
        encoded = keys.encode_full_key(self.key)
        assert encoded is not None
        return encoded

    @property
    def store_key(self) -> bytes:
        """The key of its row."""
        return keys.store_key(
            namespace=self.namespace, generation=self.generation, full_key=self.full_key
        )

    @property
    def header(self) -> EntryHeader:
        """Everything about it but its bytes and its key."""
        return EntryHeader(
            class_tag=self.class_tag,
            dtype=self.dtype,
            item_bytes=self.item_bytes,
            shape=self.shape,
            extras=encode_extras(self.fields),
            device_type=self.device_type,
            cost_s=self.cost_s,
        )


def pattern(size_bytes: int, start: int = 0) -> bytes:
    """Bytes that differ from chunk to chunk and still compress well."""
    return bytes((start + number) % 251 for number in range(size_bytes))


EVERY_PLAIN_VALUE: dict[str, object] = {
    "none": None,
    "flags": [True, False],
    "grid": (16, (2, -1)),
    "name": "tile \N{SNOWMAN}",
    "raw": b"\x00\xff",
    "scale": 0.1,
    "big": 2**70,
    "small": -(2**70),
    "map": {1: "one", "two": [2.0]},
}

#: In the order in which they are stored; the first two belong to a generation that is left.
ENTRIES = [
    GoldenEntry(
        key=1, payload=pattern(24), dtype="float32", item_bytes=4, shape=(2, 3), generation=FIRST
    ),
    GoldenEntry(
        key="left", payload=pattern(8), dtype="uint8", item_bytes=1, shape=(8,), generation=FIRST
    ),
    GoldenEntry(
        key=2**64 - 1,
        payload=struct.pack("<6H", 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC1, 0x0001),
        dtype="bfloat16",
        item_bytes=2,
        shape=(3, 2),
        device_type="cuda",
        cost_s=0.125,
    ),
    GoldenEntry(
        key=keys.CombinedHash([11, -(2**61), "sha256:00"]),
        payload=pattern(2 * CHUNK_BYTES + 1000),
        dtype="uint8",
        item_bytes=1,
        shape=(2 * CHUNK_BYTES + 1000,),
    ),
    GoldenEntry(
        key=("tuple", b"\x00bytes", (1,)),
        payload=struct.pack("<2f", 1.5, -0.0),
        dtype="complex64",
        item_bytes=8,
        shape=(1, 1, 1),
    ),
    GoldenEntry(
        key="with fields",
        payload=b"\x01\x00\x01",
        dtype="bool",
        item_bytes=1,
        shape=(3,),
        class_tag="golden",
        fields=EVERY_PLAIN_VALUE,
    ),
    GoldenEntry(
        key=b"scalar", payload=struct.pack("<q", -(2**63)), dtype="int64", item_bytes=8, shape=()
    ),
    GoldenEntry(key="empty", payload=b"", dtype="float16", item_bytes=2, shape=(0, 1280)),
    GoldenEntry(
        key="one chunk exactly",
        payload=pattern(CHUNK_BYTES, start=7),
        dtype="float8_e4m3fn",
        item_bytes=1,
        shape=(4095, 64),
    ),
    GoldenEntry(
        key=1,
        payload=pattern(24, start=100),
        dtype="float64",
        item_bytes=8,
        shape=(3,),
        namespace=OTHER_NAMESPACE,
        generation=FIRST,
    ),
]
#: Used once more after all were stored: the most recently used entry.
USED_LAST = ENTRIES[2]


def write_store(folder: Path) -> None:
    """Write the golden entries into a new store, the way a spill worker does."""
    settings = OpenSettings(
        path=folder, budget_bytes=BUDGET_BYTES, largest_entry_bytes=1 << 20, synchronous=True
    )
    opened = open_for_writing(settings)
    store = Store(opened.environment, budget_bytes=BUDGET_BYTES)
    begin_second = changes.BeginGeneration(namespace=NAMESPACE, generation=SECOND)
    steps: list[changes.Change] = [
        changes.BeginGeneration(namespace=NAMESPACE, generation=FIRST),
        changes.BeginGeneration(namespace=OTHER_NAMESPACE, generation=FIRST),
        *map(_put, ENTRIES[:2]),
        begin_second,
        *map(_put, ENTRIES[2:]),
        changes.TouchEntry(store_key=USED_LAST.store_key),
    ]
    with mock.patch("time.time", return_value=CREATED_S):
        outcomes = store.apply(steps)
    assert set(outcomes) == {changes.Outcome.DONE}
    opened.close()


def _put(entry: GoldenEntry) -> changes.PutEntry:
    return changes.PutEntry(
        store_key=entry.store_key,
        full_key=entry.full_key,
        namespace=entry.namespace,
        generation=entry.generation,
        header=entry.header,
        parts=[memoryview(entry.payload)] if entry.payload else [],
    )


def main(target: Path) -> None:
    """Write the compact, compressed data file of such a store."""
    with tempfile.TemporaryDirectory() as folder:
        store, copy = Path(folder) / "store", Path(folder) / "copy"
        write_store(store)
        copy.mkdir()
        environment = lmdb.open(str(store), readonly=True, max_dbs=len(layout.DATABASES))
        environment.copy(str(copy), compact=True)
        environment.close()
        data = (copy / layout.DATA_FILE).read_bytes()
    target.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{target}: {len(data)} bytes, {target.stat().st_size} compressed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
