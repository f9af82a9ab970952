"""`mmcache compact`: a store's file without its free pages.

Owns: what is said of it. Does not own: how the file is replaced
(:mod:`tiered_mmcache.disk.maintenance`).
"""

from __future__ import annotations

from mmcache_tools.inspection.outcome import ExitCode
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk.maintenance import compact

__all__ = ["compact_store"]


def compact_store(target: Target, *, as_json: bool) -> int:
    """Compact the store and say what that gave back; the exit code."""
    before_bytes, after_bytes = compact(target.folder)
    if as_json:
        answer = {"command": "compact", "store": str(target.folder)}
        print_json({**answer, "before_bytes": before_bytes, "after_bytes": after_bytes})
    else:
        print(f"from {written_bytes(before_bytes)} to {written_bytes(after_bytes)}")
    return ExitCode.FINE
