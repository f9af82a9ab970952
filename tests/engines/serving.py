"""A server of SGLang, played around a release's own code and our cache.

Owns: putting a release, a server's arguments and the cache together, requests, and an encoder that
counts.
Does not own: loading the releases (released.py).
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import types
from unittest import mock

import released
import torch

from tiered_mmcache.integrations import sglang
from tiered_mmcache.testing import audit_idle

KIB, MIB = 1024, 1024 * 1024
WIDTH = 256
PLACEHOLDER = 7
TOTALS = collections.defaultdict(collections.Counter)
RANKS = collections.defaultdict(collections.Counter)  # what runs of several ranks came to


class Encoder:
    """Makes of an item what only its hash and its rows decide, and counts."""

    def __init__(self, version):
        self.runs = 0
        self.items = []
        self.version = version

    def __call__(self, items):
        self.runs += 1
        self.items += [item.hash for item in items]
        TOTALS[self.version]["encoder runs"] += 1
        TOTALS[self.version]["items encoded"] += len(items)
        return torch.cat([embedding_of(item.hash, rows_of(item)) for item in items])


def hash_of(content):
    """As SGLang makes them on a CPU: the first 64 bits of a SHA-256."""
    return int.from_bytes(hashlib.sha256(str(content).encode()).digest()[:8], "big")


def rows_of(item):
    return sum(end - start + 1 for start, end in item.offsets)


def embedding_of(mm_hash, rows):
    generator = torch.Generator().manual_seed(hash(mm_hash) % 2**63)
    return torch.rand(rows, WIDTH, generator=generator)


@dataclasses.dataclass
class Request:
    """A prompt with images: text, image, text, image, …, and how much of it is prefilled now."""

    images: list  # (hash, rows)
    gap: int = 3
    prefix: int = 0
    extend: int | None = None
    one_item: bool = False  # all images are runs of one item, as the frames of a video are

    def __post_init__(self):
        self.offsets, at = [], self.gap
        for _, rows in self.images:
            self.offsets.append((at, at + rows - 1))
            at += rows + self.gap
        self.length = at
        self.extend = at - self.prefix if self.extend is None else self.extend
        if self.one_item:
            self.items = [released.Item(self.images[0][0], self.offsets, modality="video")]
        else:
            pairs = zip(self.images, self.offsets, strict=True)
            self.items = [released.Item(mm_hash, [offset]) for (mm_hash, _), offset in pairs]

    def ids(self):
        ids = torch.ones(self.length, dtype=torch.long)
        for start, end in self.offsets:
            ids[start : end + 1] = PLACEHOLDER
        return ids[self.prefix : self.prefix + self.extend]

    def expected(self):
        """The rows of the images that lie within the part prefilled now."""
        if self.one_item:
            whole = embedding_of(self.images[0][0], sum(rows for _, rows in self.images))
            parts = whole.split([rows for _, rows in self.images])
        else:
            parts = [embedding_of(mm_hash, rows) for mm_hash, rows in self.images]
        chosen = []
        for (start, end), rows in zip(self.offsets, parts, strict=True):
            first = max(start, self.prefix)
            last = min(end, self.prefix + self.extend - 1)
            if first <= last:
                chosen.append(rows[first - start : last - start + 1])
        return torch.cat(chosen) if chosen else None


class Server:
    """A process of one release, with its own code around our cache."""

    def __init__(self, release, folder, set_variable):
        self.release = release
        self.folder = folder
        self.encoder = Encoder(release.version)
        self._set_variable = set_variable
        self._caches = []
        self.model = folder / "model"
        if not self.model.exists():
            self.model.mkdir()
            (self.model / "config.json").write_text('{"architectures": ["Tiny"], "vision": {}}')
            (self.model / "model.safetensors").write_bytes(bytes(range(256)) * 64)
        release.arguments = types.SimpleNamespace(
            model_path=str(self.model), tp_size=1, dtype="auto", weight_version="default"
        )
        self.configure()

    def disk(self, **keys):
        """The section of the disk tier."""
        small = {"max_size": "64MiB", "write_buffer": "8MiB", "close_timeout": "20s"}
        return {"path": str(self.folder / "store"), **small, **keys}

    def configure(self, **sections):
        """Write the YAML; a section that is None is left out."""
        whole = {
            "namespace": "auto",
            "host": {"max_size": "512KiB"},
            "disk": self.disk(),
            **sections,
        }
        file = self.folder / "mmcache.yaml"
        file.write_text(json.dumps({key: value for key, value in whole.items() if value}))
        self._set_variable("TIERED_MMCACHE_CONFIG", str(file))

    # Activation

    def activate(self):
        """As the release would: by its registry of hooks, where it has one."""
        _ = self.release.path_module  # imported before, as in a scheduler
        __import__(released.SCHEDULER)
        if self.release.file("sglang.srt.plugins"):
            sglang.register()
            self.registry.apply_hooks()
        else:
            sglang.install()
        return self

    @property
    def registry(self):
        from sglang.srt.plugins.hook_registry import HookRegistry

        return HookRegistry

    def start(self, max_size=128 * KIB):
        """Make the cache as the release makes it."""
        self.release.path_module.init_mm_embedding_cache(max_size)
        self._caches.append(self.cache)
        return self.cache

    @property
    def cache(self):
        return self.release.path_module.embedding_cache

    def restart(self, max_size=128 * KIB):
        """The server ends, and another one begins."""
        self.stop()
        return self.start(max_size)

    def stop(self):
        for cache in self._caches:
            if hasattr(cache, "drain"):
                assert cache.drain(60)
                if cache._below is not None and not cache._closed:
                    audit_idle(cache)
                stats = cache.stats()
                for tier in ("hot", "host", "disk"):
                    TOTALS[self.release.version][f"{tier} hits"] += getattr(stats, tier)["hits"]
                TOTALS[self.release.version]["misses"] += stats.misses
                cache.close()
        self._caches.clear()

    # Use

    def prefill(self, *requests):
        """The embeddings of these requests in one batch, by the release's own code."""
        items = [item for request in requests for item in request.items]
        sizes = [0, *itertools.accumulate(len(request.items) for request in requests)]
        with torch.inference_mode():
            self.answer = self.release.path_module.get_embedding_and_mask(
                self.encoder,
                items,
                torch.tensor([PLACEHOLDER]),
                torch.cat([request.ids() for request in requests]),
                sizes,
                [request.prefix for request in requests],
                [request.extend for request in requests],
                [request.offsets for request in requests],
            )
        return self.answer[0]

    def check(self, *requests):
        """Prefill, and compare with what the encoder makes."""
        expected = [part for part in (r.expected() for r in requests) if part is not None]
        found = self.prefill(*requests)
        if not expected:
            assert found is None
            return
        assert torch.equal(found, torch.cat(expected))

    def key(self, mm_hash):
        """The key under which this release keeps a single image."""
        per_item = self.release.number >= (0, 5, 10)
        return mm_hash if per_item else type(self.cache).combine_hashes([mm_hash])


def idle_scheduler(**members):
    """The release's scheduler, whose published functions run; everything else pretends."""
    from sglang.srt.managers.scheduler import Scheduler

    class Idle(Scheduler):
        def __getattr__(self, name):
            return mock.MagicMock(name=name)

    scheduler = Idle()
    for name, member in members.items():
        setattr(scheduler, name, member)
    return scheduler
