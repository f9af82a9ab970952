"""vLLM's ECExampleConnector: a safetensors file for each embedding.

Owns: loading the connector without the rest of vLLM, and what its scheduler would tell it.
Does not own: the connector, whose own methods write, look and read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import types
from pathlib import Path
from typing import Any, ClassVar

import torch

from mmcache_tools.peers.loading import load, stand_in
from mmcache_tools.peers.system import Budgets, System

_CONNECTORS = "vllm.distributed.ec_transfer.ec_connector"


class VllmExampleConnector(System):
    """Looks for a file, loads it, and writes one for what the encoder made; it deletes none."""

    name = "vLLM ECExampleConnector"
    tiers = frozenset({"disk"})
    cannot: ClassVar = {
        "device": "stores files: measured behind a plain LRU of the hot budget",
        "host": "has no host tier beyond the page cache",
        "bound": "grows for ever: here a write beyond the disk budget is refused, as a quota would",
        "digest": "checks nothing that it reads beyond the file's header",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        folder = budgets.folder / "vllm"
        folder.mkdir(parents=True, exist_ok=True)
        module, role = _loaded()
        transfer = types.SimpleNamespace(
            is_ec_producer=True,
            is_ec_consumer=True,
            get_from_extra_config=lambda _name, _default: str(folder),
        )
        config = types.SimpleNamespace(ec_transfer_config=transfer, model_config=None)
        self._connector = module.ECExampleConnector(config, role)
        self._metadata = module.ECExampleConnectorMetadata
        self._meta = module.MMMeta
        self._left_bytes = budgets.disk_bytes - _used_bytes(folder)
        self.look_up = self.get

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("vllm")

    def get(self, key: int) -> torch.Tensor | None:
        name = f"{key:016x}"
        if not self._connector.has_cache_item(name):
            return None
        wanted = self._metadata()
        wanted.add_mm_data(self._meta.make_meta(name, 1))
        self._connector.bind_connector_metadata(wanted)
        found: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(found)
        return found[name].clone()  # to the device; it is a mapping of the file

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        if embedding.nbytes > self._left_bytes:
            return False
        name = f"{key:016x}"
        if not self._connector.has_cache_item(name):
            self._left_bytes -= embedding.nbytes
        self._connector.save_caches({name: embedding}, name)
        return True

    def close(self) -> None:
        del self._connector


def _used_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def _loaded() -> tuple[Any, Any]:
    """The connector's module, and the role of one that writes and reads."""
    load("safetensors.torch")
    for name in (
        "vllm.config",
        "vllm.v1.core.sched.output",
        "vllm.v1.outputs",
        f"{_CONNECTORS}.utils",
        f"{_CONNECTORS}.metrics",
    ):
        stand_in(name)
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    platform = types.SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: False)
    stand_in("vllm.platforms", current_platform=platform)
    role = load(f"{_CONNECTORS}.base").ECConnectorRole.WORKER
    return load(f"{_CONNECTORS}.example_connector"), role
