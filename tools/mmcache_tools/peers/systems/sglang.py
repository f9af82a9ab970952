"""SGLang's MultiModalStaticCache.

Owns: loading that one module of the wheel. Does not own: the class.
"""

from __future__ import annotations

import importlib.metadata
from typing import ClassVar

import torch

from mmcache_tools.peers.loading import load, stand_in
from mmcache_tools.peers.system import Budgets, System


class SGLangStaticCache(System):
    """A byte-bounded LRU of device tensors; evicted means encoded again."""

    name = "SGLang MultiModalStaticCache"
    tiers = frozenset({"device"})
    cannot: ClassVar = {
        "host": "has no host tier",
        "disk": "has no disk tier",
        "restart": "lives in one process's memory",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        stand_in("sglang.srt.mem_cache.allocator")
        module = load("sglang.srt.mem_cache.multimodal_cache")
        self._result = module.EmbeddingResult
        self._cache = module.MultiModalStaticCache(budgets.hot_bytes)
        self.look_up = self._cache.get_single

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("sglang")

    def get(self, key: int) -> torch.Tensor | None:
        found = self._cache.get_single(key)
        return None if found is None else found.embedding

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        return bool(self._cache.set(key, self._result(embedding=embedding)))

    def close(self) -> None:
        self._cache.clear()
