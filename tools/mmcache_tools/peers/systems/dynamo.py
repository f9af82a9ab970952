"""Dynamo's MultimodalEmbeddingCacheManager.

Owns: loading that one module of the wheel. Does not own: the class.
"""

from __future__ import annotations

import importlib.metadata
from typing import ClassVar

import torch

from mmcache_tools.peers.loading import load
from mmcache_tools.peers.system import Budgets, System


class DynamoCacheManager(System):
    """A byte-bounded LRU in pageable host memory; the copy to the device is the caller's."""

    name = "Dynamo MultimodalEmbeddingCacheManager"
    tiers = frozenset({"host"})
    cannot: ClassVar = {
        "device": "lives in host memory: measured behind a plain LRU of the hot budget",
        "disk": "has no disk tier",
        "restart": "lives in one process's memory",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        module = load("dynamo.common.memory.multimodal_embedding_cache_manager")
        self._entry = module.CachedEmbedding
        self._cache = module.MultimodalEmbeddingCacheManager(budgets.host_bytes)
        get = self._cache.get
        self.look_up = lambda key: get(f"{key:016x}")

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("ai-dynamo")

    def get(self, key: int) -> torch.Tensor | None:
        found = self._cache.get(f"{key:016x}")
        return None if found is None else found.tensor.clone()  # to the device

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        entry = self._entry(tensor=embedding.clone())  # from the device
        return bool(self._cache.set(f"{key:016x}", entry))

    def close(self) -> None:
        del self._cache
