"""Whether LoRA adapters change what the encoder makes.

Owns: reading which modules an adapter has weights for.
Does not own: what follows from it (:mod:`.plan`).

A request's adapter is no part of its images' hashes. So an adapter that reaches the vision tower
makes embeddings that must not be served to another request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_LARGEST_HEADER_BYTES = 64 * 1024 * 1024
_LANGUAGE = re.compile(r"(^|\.)(language_model|lm_head|embed_tokens|(model\.)?layers\.\d+)(\.|$)")
_ENCODER = re.compile(
    r"visual|vision|vit\b|image|video|audio|speech|sound|tower|projector|merger|connector|resampler"
    r"|perceiver|encoder|aligner|patch"
)


def adapter_paths(arguments: object | None) -> list[str]:
    """The adapters that the server was started with."""
    given = getattr(arguments, "lora_paths", None) or []
    if isinstance(given, Mapping):
        given = list(given.values())
    return [_path_of(adapter) for adapter in given]


def reach_the_encoder(paths: Iterable[str]) -> str | None:
    """The first adapter that changes the encoder, or of which that cannot be told; else None."""
    return next((path for path in paths if not _is_for_language_only(Path(path))), None)


def _path_of(adapter: object) -> str:
    if isinstance(adapter, str):
        return adapter.split("=", 1)[-1]  # "name=path" on the command line
    if isinstance(adapter, Mapping):
        return str(adapter.get("lora_path", adapter.get("path", "")))
    return str(getattr(adapter, "lora_path", ""))


def _is_for_language_only(folder: Path) -> bool:
    try:
        names = [name for file in folder.glob("*.safetensors") for name in _tensor_names(file)]
    except (OSError, ValueError):
        return False
    return bool(names) and all(
        _LANGUAGE.search(name) and not _ENCODER.search(name.lower()) for name in names
    )


def _tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LARGEST_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    return [name for name in header if name != "__metadata__"]
