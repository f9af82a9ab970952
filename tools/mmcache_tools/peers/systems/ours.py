"""This project's cache.

Owns: its configuration from the budgets. Does not own: the cache.
"""

from __future__ import annotations

import importlib.metadata

import torch

from mmcache_tools.peers.system import Budgets, System
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache


class Ours(System):
    """Hot tier, host memory and store, as configured by default."""

    name = "tiered_mmcache"
    tiers = frozenset({"device", "host", "disk"})
    durability = "ordered"

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        sections: dict[str, object] = {
            "namespace": "peers",
            "hot": {"max_size": budgets.hot_bytes, "oversize": "spill"},
        }
        if budgets.host_bytes:
            sections["host"] = {"max_size": budgets.host_bytes}
        if budgets.disk_bytes:
            sections["disk"] = {
                "path": str(budgets.folder / "store"),
                "max_size": budgets.disk_bytes,
                "durability": self.durability,
                "read_timeout": "60s",
            }
        config = CacheConfig.from_mapping(sections, check_machine=False)
        self._cache = TieredMultimodalCache(config=config)
        self.look_up = self._cache.get_single

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("tiered-mmcache")

    def get(self, key: int) -> torch.Tensor | None:
        found = self._cache.get_single(key)
        return None if found is None else found.embedding

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        return self._cache.set(key, EmbeddingResult(embedding=embedding))

    def settle(self, limit_s: float = 60.0) -> None:
        self._cache.drain(timeout_s=limit_s)

    def close(self) -> None:
        self._cache.close()


class OursRelaxed(Ours):
    """The same with ``durability: relaxed``, which flushes no more than the other systems do."""

    name = "tiered_mmcache, relaxed"
    durability = "relaxed"
