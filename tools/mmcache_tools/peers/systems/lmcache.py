"""LMCache's encoder-cache engine with its CPU and disk backends.

Owns: its configuration from the budgets. Does not own: the engine.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import ClassVar

import torch

from mmcache_tools.peers.loading import load
from mmcache_tools.peers.system import Budgets, System

_GIB = 2**30


class LMCacheEncoderCache(System):
    """Host memory and files, written through; a thread of the same process writes."""

    name = "LMCache ECCacheEngine"
    tiers = frozenset({"host", "disk"})
    cannot: ClassVar = {
        "device": "lives below the device: measured behind a plain LRU of the hot budget",
        "read back": "takes the CPU backend's miss for the answer: what only the disk has is lost",
        "restart": "keeps its index in memory only: files of an earlier process are not found",
        "digest": "checks nothing that it reads",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"  # it would log each put
        staging = budgets.host_bytes or 4 * budgets.hot_bytes  # disk entries pass through it
        values: dict[str, object] = {
            "local_cpu": bool(budgets.host_bytes),
            "max_local_cpu_size": staging / _GIB,
            "chunk_size": 256,
        }
        if budgets.disk_bytes:
            folder = budgets.folder / "lmcache"
            folder.mkdir(parents=True, exist_ok=True)
            values["local_disk"] = str(folder)
            values["max_local_disk_size"] = budgets.disk_bytes / _GIB
        config = load("lmcache.v1.config").LMCacheEngineConfig.from_defaults(**values)
        metadata = load("lmcache.v1.metadata").LMCacheMetadata(
            model_name="peers",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, 256, 1, 64),
            role="worker",
        )
        self._engine = load("lmcache.v1.ec_engine").ECCacheEngine(config, metadata, torch.bfloat16)
        self.look_up = self.get

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("lmcache")

    def get(self, key: int) -> torch.Tensor | None:
        found = self._engine.get(f"{key:016x}", "cpu")
        assert found is None or isinstance(found, torch.Tensor)
        return found

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        return bool(self._engine.put(f"{key:016x}", embedding))

    def settle(self, limit_s: float = 60.0) -> None:
        backends = self._engine._storage_manager.storage_backends
        disk = backends.get("LocalDiskBackend")
        end_s = time.monotonic() + limit_s
        while disk is not None and disk.disk_worker.put_tasks and time.monotonic() < end_s:
            time.sleep(0.0005)

    def close(self) -> None:
        self.settle(5.0)
        self._engine.close()
