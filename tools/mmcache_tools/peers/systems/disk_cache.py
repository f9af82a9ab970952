"""diskcache: SQLite, and a file for each large value.

Owns: how tensors become its values. Does not own: the package.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mmcache_tools.peers.loading import load
from mmcache_tools.peers.system import BYTES_A_ROW, Budgets, System


class DiskCache(System):
    """A bounded cache on disk, evicting by least recent use."""

    name = "diskcache"
    tiers = frozenset({"disk"})
    cannot: ClassVar = {
        "device": "stores files: measured behind a plain LRU of the hot budget",
        "host": "has no host tier beyond the page cache",
        "digest": "checks nothing that it reads",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        self._cache = load("diskcache").Cache(
            str(budgets.folder / "diskcache"),
            size_limit=max(1, budgets.disk_bytes),
            eviction_policy="least-recently-used",
        )
        self.look_up = self.get

    @classmethod
    def version(cls) -> str:
        return str(load("diskcache").__version__)

    def get(self, key: int) -> torch.Tensor | None:
        found = self._cache.get(key)
        if found is None:
            return None
        values = torch.frombuffer(bytearray(found), dtype=torch.bfloat16)
        return values.view(-1, BYTES_A_ROW // 2)

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        return bool(self._cache.set(key, embedding.view(torch.int16).numpy().tobytes()))

    def close(self) -> None:
        self._cache.close()
