"""Which systems there are, where each is written, and which environment it runs in.

Owns: the list. Does not own: the systems; each is imported in its own process only.
"""

from __future__ import annotations

import dataclasses
import importlib

from mmcache_tools.peers import environments
from mmcache_tools.peers.environments import Environment
from mmcache_tools.peers.system import System


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A system by the name that the command line uses.

    Attributes:
        module: Where it is written.
        kind: Its class there.
        environment: What it runs in.
        is_quick: Whether the quick form has it: it needs no large download.
    """

    module: str
    kind: str
    environment: Environment
    is_quick: bool = False


_VLLM, _LMCACHE = environments.VLLM, environments.LMCACHE
SYSTEMS = {
    "ours": Entry(module="ours", kind="Ours", environment=environments.OURS, is_quick=True),
    "ours-relaxed": Entry(module="ours", kind="OursRelaxed", environment=environments.OURS),
    "sglang": Entry(
        module="sglang",
        kind="SGLangStaticCache",
        environment=environments.SGLANG,
        is_quick=True,
    ),
    "diskcache": Entry(
        module="disk_cache", kind="DiskCache", environment=environments.DISKCACHE, is_quick=True
    ),
    "files": Entry(
        module="plain_files", kind="PlainFiles", environment=environments.OURS, is_quick=True
    ),
    "vllm-files": Entry(module="vllm_files", kind="VllmExampleConnector", environment=_VLLM),
    "vllm-memory": Entry(module="vllm_memory", kind="VllmSharedMemory", environment=_VLLM),
    "lmcache": Entry(module="lmcache", kind="LMCacheEncoderCache", environment=_LMCACHE),
    "dynamo": Entry(module="dynamo", kind="DynamoCacheManager", environment=environments.DYNAMO),
}


def system_class(name: str) -> type[System]:
    """The class of a system; to be called in its own process."""
    entry = SYSTEMS[name]
    found: type[System] = getattr(
        importlib.import_module(f"mmcache_tools.peers.systems.{entry.module}"), entry.kind
    )
    return found
