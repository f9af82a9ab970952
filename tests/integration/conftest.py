"""Stores to look into.

Owns: filling a store as the spill worker does, and damaging one.
Does not own: what anybody finds in it.
"""

import contextlib
import dataclasses
import random
from pathlib import Path

import lmdb
import pytest

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.changes import BeginGeneration, PutEntry, TouchEntry
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries import keys
from tiered_mmcache.entries.record import EntryHeader

NAMESPACE = "model@main/bf16"


@dataclasses.dataclass
class Maker:
    """Writes to a store in a folder; each call is a short-lived opening of its own."""

    folder: Path
    budget_bytes: int = 256 * 1024 * 1024
    namespace: str = NAMESPACE
    generation: bytes = dataclasses.field(default_factory=lambda: keys.generation_of_version(None))

    @contextlib.contextmanager
    def open(self):
        settings = OpenSettings(
            path=self.folder,
            budget_bytes=self.budget_bytes,
            largest_entry_bytes=8 * 1024 * 1024,
            synchronous=False,
        )
        opened = open_for_writing(settings)
        try:
            yield Store(opened.environment, budget_bytes=self.budget_bytes)
        finally:
            opened.close()

    def store_key(self, key):
        full_key = keys.encode_full_key(key)
        return keys.store_key(
            namespace=self.namespace, generation=self.generation, full_key=full_key
        )

    def entry(self, key, payload=b"", *, shape=None, **fields):
        """A change that puts an entry; a flat uint8 one unless told otherwise."""
        header = EntryHeader(
            **{
                "class_tag": "embedding",
                "dtype": "uint8",
                "item_bytes": 1,
                "shape": (len(payload),) if shape is None else shape,
                "extras": b"",
                "device_type": "cpu",
                **fields,
            }
        )
        assert header.payload_bytes == len(payload)
        return PutEntry(
            store_key=self.store_key(key),
            full_key=keys.encode_full_key(key),
            namespace=self.namespace,
            generation=self.generation,
            header=header,
            parts=[memoryview(payload)] if payload else [],
        )

    def apply(self, *changes):
        with self.open() as store:
            store.apply(changes)

    def put(self, key, payload=b"", **fields):
        self.apply(self.entry(key, payload, **fields))
        return self.store_key(key).hex()

    def put_many(self, count, *, seed=0):
        rng = random.Random(seed)
        payloads = [rng.randbytes(rng.randrange(1, 64)) for _ in range(count)]
        self.apply(*[self.entry(key, payload) for key, payload in enumerate(payloads)])

    def touch(self, key):
        self.apply(TouchEntry(store_key=self.store_key(key)))

    def begin(self, version=None):
        """Move the namespace to a generation, and write there from now on."""
        self.generation = keys.generation_of_version(version)
        self.apply(BeginGeneration(namespace=self.namespace, generation=self.generation))

    @contextlib.contextmanager
    def raw(self):
        """The tables themselves, to break them: (transaction, databases)."""
        with lmdb.open(str(self.folder), max_dbs=8, map_size=2**28) as environment:
            databases = {name: environment.open_db(name) for name in layout.DATABASES}
            with environment.begin(write=True) as transaction:
                yield transaction, databases

    def flip(self, pattern):
        """Change the one place in the file where these bytes lie."""
        file = self.folder / layout.DATA_FILE
        data = bytearray(file.read_bytes())
        at = data.index(pattern)
        assert data.find(pattern, at + 1) < 0, "the pattern must be unique"
        data[at] ^= 0xFF
        file.write_bytes(data)


@pytest.fixture
def maker(tmp_path):
    """A store without entries, ready to be filled."""
    made = Maker(tmp_path / "store")
    made.begin()
    return made
