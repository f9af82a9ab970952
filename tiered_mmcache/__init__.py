"""Tiered cache of multimodal encoder outputs: device memory, host memory, LMDB on disk.

Owns: the list of public names. They are imported on first use, so that the spill worker and the
inspection commands can use their own modules of this package without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered_mmcache.config import CacheConfig as CacheConfig
    from tiered_mmcache.config import load_config as load_config
    from tiered_mmcache.contract import EmbeddingResult as EmbeddingResult
    from tiered_mmcache.contract import MultimodalCache as MultimodalCache
    from tiered_mmcache.contract import Tier as Tier
    from tiered_mmcache.contract import register_result_class as register_result_class
    from tiered_mmcache.ranks.tensor_parallel import (
        TensorParallelMultimodalCache as TensorParallelMultimodalCache,
    )
    from tiered_mmcache.static_cache import MultiModalStaticCache as MultiModalStaticCache
    from tiered_mmcache.tiered_cache import TieredMultimodalCache as TieredMultimodalCache

_MODULE_OF = {
    "CacheConfig": "config",
    "EmbeddingResult": "contract",
    "MultiModalStaticCache": "static_cache",
    "MultimodalCache": "contract",
    "TensorParallelMultimodalCache": "ranks.tensor_parallel",
    "Tier": "contract",
    "TieredMultimodalCache": "tiered_cache",
    "load_config": "config",
    "register_result_class": "contract",
}

__all__ = [
    "CacheConfig",
    "EmbeddingResult",
    "MultiModalStaticCache",
    "MultimodalCache",
    "TensorParallelMultimodalCache",
    "Tier",
    "TieredMultimodalCache",
    "load_config",
    "register_result_class",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
