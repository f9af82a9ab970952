"""Which tiers a process of SGLang gets, and which it is refused, with the reason.

Owns: the size of the hot tier, the refusals, the namespace, and the line that is logged.
Does not own: building the tiers (:mod:`.cache`).
"""

from __future__ import annotations

import dataclasses

from tiered_mmcache.config import AUTO_NAMESPACE, CacheConfig, DiskConfig
from tiered_mmcache.configuration.quantities import written_size
from tiered_mmcache.integrations.sglang.adapters import adapter_paths, reach_the_encoder
from tiered_mmcache.integrations.sglang.namespace import derived_namespace
from tiered_mmcache.integrations.sglang.release import Release
from tiered_mmcache.integrations.sglang.server import (
    hashes_are_random,
    is_encoder_server,
    server_arguments,
    tensor_parallel_size,
)
from tiered_mmcache.integrations.sglang.sharing import reasons_against_sharing
from tiered_mmcache.integrations.sglang.summary import described_tiers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one cache of SGLang gets.

    Attributes:
        hot_bytes: The hot tier's size.
        config: The configuration without what was refused; its namespace is derived.
        refused: Why tiers that the YAML asks for are left out; each names its remedy.
        among_ranks: Whether this process is one of several that have to agree, at the first use.
        notes: What else the operator should know.
    """

    hot_bytes: int
    config: CacheConfig
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()
    among_ranks: bool = False

    @property
    def has_lower_tiers(self) -> bool:
        """Whether anything is left of what was asked for below the hot tier."""
        return self.config.host is not None or self.config.disk is not None

    def summary(self) -> str:
        """The tiers and the namespace, for the log."""
        return described_tiers(self.config, self.hot_bytes)


def plan_for(max_size: int, config: CacheConfig, release: Release, broken: list[str]) -> Plan:
    """What a cache gets that SGLang makes with ``max_size`` bytes.

    Args:
        max_size: What SGLang reserved for it; 0 when SGLang does not want one.
        config: The user's.
        release: SGLang's.
        broken: Reasons of the process's own to refuse lower tiers.
    """
    arguments = server_arguments()
    hot_bytes, notes = _hot_bytes(max_size, config)
    against_sharing = _reasons_against_sharing(arguments, release)
    refused = [
        *broken,
        *against_sharing,
        *_reasons_against_lower_tiers(arguments),
        *_off(hot_bytes),
    ]
    asked = config.host is not None or config.disk is not None
    if refused or not asked:
        alone = config.model_copy(update={"host": None, "disk": None})
        plan = Plan(
            hot_bytes=hot_bytes,
            config=alone,
            refused=tuple(refused if asked else _off(hot_bytes)),
            notes=notes,
        )
    else:
        plan = _with_namespace(hot_bytes, config, arguments, release, notes)
    several = tensor_parallel_size(arguments) > 1 and not against_sharing
    return dataclasses.replace(plan, among_ranks=several)


def _hot_bytes(max_size: int, config: CacheConfig) -> tuple[int, tuple[str, ...]]:
    """SGLang's size is a limit, since the rest of the device is handed out; 0 leaves it to us."""
    wanted = config.hot.max_size
    if wanted is None:
        return max_size, ()
    if max_size == 0:
        note = "hot.max_size is not reserved from the device memory that SGLang hands out"
        return wanted, (note,)
    if wanted > max_size:
        limit = written_size(max_size)
        note = f"hot.max_size is limited to the {limit} that SGLANG_VLM_CACHE_SIZE_MB reserves"
        return max_size, (note,)
    return wanted, ()


def _off(hot_bytes: int) -> list[str]:
    if hot_bytes > 0:
        return []
    reason = (
        "SGLang gives its multimodal cache 0 bytes for this model; set SGLANG_VLM_CACHE_SIZE_MB, "
        "or hot.max_size in the YAML, to turn it on"
    )
    return [reason]


def _reasons_against_sharing(arguments: object | None, release: Release) -> list[str]:
    size = tensor_parallel_size(arguments)
    if size == 1:
        return []
    if is_encoder_server(arguments):
        reason = (
            f"this encoder server has tp_size={size}, and SGLang loads plug-ins in one of its "
            "ranks only: they would disagree and hang; use tp_size=1 and several servers"
        )
        return [reason]
    return reasons_against_sharing(arguments, release)


def _reasons_against_lower_tiers(arguments: object | None) -> list[str]:
    reasons = []
    if hashes_are_random():
        reasons.append(
            "SGLANG_MM_SKIP_COMPUTE_HASH makes every image's hash random, so that nothing would "
            "ever be found; unset it"
        )
    adapter = reach_the_encoder(adapter_paths(arguments))
    if adapter is not None:
        reasons.append(
            f"the LoRA adapter {adapter!r} changes the encoder, or cannot be read to rule that "
            "out; merge it into the model, or give a folder with a .safetensors file"
        )
    return reasons


def _with_namespace(
    hot_bytes: int,
    config: CacheConfig,
    arguments: object | None,
    release: Release,
    notes: tuple[str, ...],
) -> Plan:
    if config.disk is None or config.namespace != AUTO_NAMESPACE:
        return Plan(hot_bytes=hot_bytes, config=config, refused=(), notes=notes)
    name = None if arguments is None else derived_namespace(arguments, release.text)
    if name is not None:
        config = config.model_copy(update={"namespace": name})
        return Plan(hot_bytes=hot_bytes, config=config, refused=(), notes=notes)
    reason = (
        "namespace: auto cannot tell which weights this server has; write a namespace that names "
        "model, revision and dtype into the YAML"
    )
    without = config.model_copy(update={"disk": None})
    return Plan(hot_bytes=hot_bytes, config=without, refused=(reason,), notes=notes)


def read_timeout_s(disk: DiskConfig | None) -> float:
    """How long opening the store may hold a call up: as long as reading from it may."""
    return 0.0 if disk is None else disk.read_timeout_s
