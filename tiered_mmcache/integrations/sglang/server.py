"""What the running SGLang server says about itself.

Owns: reading its arguments, under the names that they have in every supported release.
Does not own: what follows from them (:mod:`.plan`, :mod:`.namespace`). Imports SGLang only when
called.
"""

from __future__ import annotations

import importlib
import os

# Where the arguments of the process are to be had; the first is of 0.5.19 and newer.
_SOURCES = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)


def server_arguments() -> object | None:
    """SGLang's ``ServerArgs`` of this process, or None where none were set."""
    for module, function in _SOURCES:
        try:
            arguments: object = getattr(importlib.import_module(module), function)()
        except Exception:  # noqa: BLE001, S112 - other releases; raises various things when unset
            continue
        if arguments is not None:
            return arguments
    return None


def tensor_parallel_size(arguments: object | None) -> int:
    """How many ranks run one encoder together."""
    size = getattr(arguments, "tp_size", None)
    if isinstance(size, int):
        return size
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_encoder_server(arguments: object | None) -> bool:
    """Whether the process encodes for others and generates nothing."""
    return bool(getattr(arguments, "encoder_only", False))


def hashes_are_random() -> bool:
    """Whether SGLang was told not to hash contents, so that no entry is ever found again."""
    value = os.environ.get("SGLANG_MM_SKIP_COMPUTE_HASH", "")
    return value.lower() in ("true", "1", "yes", "y")
