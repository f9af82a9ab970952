"""The memory part of vLLM's ECCPUConnector: blocks in /dev/shm, and which entry has which.

Owns: the order in which its scheduler and worker call the two classes, and the copies between a
tensor and its blocks. On a GPU the worker makes those with a kernel; here they are plain copies of
runs of blocks. Does not own: the region and the bookkeeping, which are vLLM's.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
from collections.abc import Iterator
from typing import ClassVar

import torch

from mmcache_tools.peers.loading import load, stand_in
from mmcache_tools.peers.system import BYTES_A_ROW, Budgets, System

_CPU = "vllm.distributed.ec_transfer.ec_connector.cpu"
_INSTANCES = itertools.count()


class VllmSharedMemory(System):
    """Fixed blocks of one row each; the first entry in is the first out."""

    name = "vLLM ECCPUConnector, its memory"
    tiers = frozenset({"host"})
    cannot: ClassVar = {
        "device": "lives in host memory: measured behind a plain LRU of the hot budget",
        "disk": "has no disk tier",
        "restart": "its region is unlinked when the process ends",
        "recency": "evicts the oldest entry, not the least recently used one",
        "whole": "its scheduler and worker need vLLM and a GPU: the two classes are called here",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        stand_in("vllm.logger", init_logger=logging.getLogger)
        blocks = max(1, budgets.host_bytes // BYTES_A_ROW)
        region = load(f"{_CPU}.ec_shared_region").ECSharedRegion
        name = f"peers-{os.getpid()}-{next(_INSTANCES)}"
        self._region = region(engine_id=name, num_blocks=blocks, block_size_bytes=BYTES_A_ROW)
        self._blocks = blocks
        self._entries = load(f"{_CPU}.scheduler.embedding_cache").EmbeddingCache(blocks)
        get = self._entries.get
        self.look_up = lambda key: get(f"{key:016x}")

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("vllm")

    def get(self, key: int) -> torch.Tensor | None:
        name = f"{key:016x}"
        entry = self._entries.pin_if_ready(name)
        if entry is None or not entry.ready:
            return None
        try:
            found = torch.empty(len(entry.block_ids), BYTES_A_ROW, dtype=torch.int8)
            for at, first, number in _runs(entry.block_ids):
                found[at : at + number].copy_(self._region.blocks[first : first + number])
        finally:
            self._entries.unpin(name)
        return found.view(torch.bfloat16)

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        name = f"{key:016x}"
        rows = embedding.shape[0]
        if self._entries.get(name) is not None:
            return True
        entry = self._entries.alloc(name, rows) if rows <= self._blocks else None
        if entry is None:
            return False
        source = embedding.view(torch.int8).view(rows, BYTES_A_ROW)
        for at, first, number in _runs(entry.block_ids):
            self._region.blocks[first : first + number].copy_(source[at : at + number])
        self._entries.mark_ready(name)
        return True

    def close(self) -> None:
        self._region.cleanup()


def _runs(block_ids: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Offset, first block and number of blocks of each run of neighbours."""
    start = 0
    for at in range(1, len(block_ids) + 1):
        if at == len(block_ids) or block_ids[at] != block_ids[at - 1] + 1:
            yield start, block_ids[start], at - start
            start = at
