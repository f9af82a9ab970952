"""Tiers in one line, as logs and the check print them.

Owns: the words. Imports neither SGLang nor torch.
"""

from __future__ import annotations

from tiered_mmcache.config import CacheConfig
from tiered_mmcache.configuration.quantities import written_size


def described_tiers(config: CacheConfig, hot_bytes: int | None = None) -> str:
    """The tiers of a configuration, and the namespace where it matters.

    Args:
        config: The configuration.
        hot_bytes: The size of the hot tier, where it is known.
    """
    parts = [] if hot_bytes is None else [f"hot {written_size(hot_bytes)}"]
    if config.host is not None:
        parts.append(f"host {written_size(config.host.max_size)}")
    if config.disk is not None:
        parts.append(f"disk {written_size(config.disk.max_size)} in {config.disk.path}")
        parts.append(f"namespace {config.namespace}")
    return ", ".join(parts) or "the hot tier alone"
