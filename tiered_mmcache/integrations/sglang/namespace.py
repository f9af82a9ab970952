"""What makes the embeddings of two SGLang servers interchangeable.

Owns: the namespace that ``namespace: auto`` stands for.
Does not own: what identifies the weights (:mod:`.weights`), or updates of them while the server
runs (:mod:`.cache`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Set
from pathlib import Path

from tiered_mmcache.integrations.sglang.weights import identity_of

_LONGEST_MODEL_NAME = 200

# Arguments of the server that change what its encoder makes of an image, or what an image's hash
# is. Those that a release does not have count as absent. Anything that does not belong here costs
# a cold start when it changes; anything that is missing could cost a wrong embedding.
_ARGUMENTS = (
    "attention_backend",
    "chat_template",
    "device",
    "disable_fast_image_processor",
    "dtype",
    "enable_deterministic_inference",
    "enable_torch_compile",
    "json_model_override_args",
    "keep_mm_feature_on_device",
    "load_format",
    "lora_target_modules",
    "mm_attention_backend",
    "mm_enable_dp_encoder",
    "mm_feature_transport",
    "mm_process_config",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "pp_size",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_on_policy_target",
    "rl_quant_profile",
    "torchao_config",
    "tp_size",
    "weight_version",
)
# Variables by which processors and hashes are changed past the arguments.
_VARIABLE_PREFIXES = (
    "SGLANG_ENCODER_IMAGE_",
    "SGLANG_EXTERNAL_MM_",
    "SGLANG_FORCE_CPU_IMAGE_",
    "SGLANG_IMAGE_",
    "SGLANG_MM_",
    "SGLANG_RESIZE_",
    "SGLANG_VIT_",
    "VIDEO_",
)
_VARIABLES = ("MAX_PIXELS", "MIN_PIXELS", "SGLANG_USE_CUDA_IPC_TRANSPORT")
_VARIABLES_WITHOUT_EFFECT = ("SGLANG_MM_FEATURE_CACHE_MB", "SGLANG_MM_PRECOMPUTE_HASH")


def derived_namespace(arguments: object, release: str) -> str | None:
    """The namespace of a server, or None when its weights cannot be identified.

    It names the model, then the state of its weights, and ends in a digest over that and all that
    is listed above: processor settings, quantization, dtype, where features are hashed (CPU and GPU
    use different functions), the weight version, the release of SGLang. The vision configuration,
    and with it the pruning rate of efficient video sampling, is part of the weights' identity.

    Args:
        arguments: The server's arguments.
        release: SGLang's version.
    """
    model_path = str(getattr(arguments, "model_path", None) or "")
    processor_path = str(getattr(arguments, "tokenizer_path", None) or model_path)
    weights = _identity(arguments, model_path)
    processor = weights if processor_path == model_path else _identity(arguments, processor_path)
    if weights is None or processor is None:
        return None
    parts = {
        "release": release,
        "weights": weights,
        "processor": processor,
        "arguments": {name: getattr(arguments, name, None) for name in _ARGUMENTS},
        "environment": _environment(),
    }
    text = json.dumps(_plain(parts), sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"sglang/{_readable(model_path)}@{weights[:12]}/{digest}"


def _identity(arguments: object, path: str) -> str | None:
    """The state of a model or processor; where the same state lies does not matter."""
    return identity_of(path, getattr(arguments, "revision", None)) if path else None


def _readable(model_path: str) -> str:
    name = Path(model_path).name if Path(model_path).is_absolute() else model_path
    printable = "".join(c if c.isascii() and c.isprintable() and c != " " else "_" for c in name)
    return printable[-_LONGEST_MODEL_NAME:]


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES))
        and name not in _VARIABLES_WITHOUT_EFFECT
    }


def _plain(value: object) -> object:
    """Values in an order that does not depend on the process, as far as they have one."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    fields = getattr(value, "__dict__", None)
    return _plain(fields) if fields else type(value).__qualname__
