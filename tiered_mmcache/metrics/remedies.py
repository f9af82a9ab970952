"""What an operator can do about a fault, by its cause.

Owns: the remedies of faults that are noticed in the server. What a store is refused for carries
its remedy in its own text (:mod:`tiered_mmcache.disk.causes`).
Does not own: the causes, or the log (:mod:`.counters`). Imports no torch.
"""

from __future__ import annotations

_DAMAGE = "Run `mmcache verify`; if it comes again, look at the disk's health."
_ANOTHER_VERSION = "Use another namespace for each version that stores differently."
_BUG = "Please report this line: it is a bug."

REMEDIES = {
    "admission": "Lower hot.max_size: the device has no memory left.",
    "changed_class": _ANOTHER_VERSION,
    "demotion": "Lower hot.max_size: the device has no memory left for a copy.",
    "died": "Look for the worker's own lines above, and for the kernel's OOM killer.",
    "digest": _DAMAGE,
    "disk_hangs": "Look at the disk: a process that waits for it cannot be ended.",
    "disk_not_ready": "See the other faults; the cache goes on without its disk meanwhile.",
    "future_format": _ANOTHER_VERSION,
    "future_version": _ANOTHER_VERSION,
    "inconsistent_rows": "Report this line with the model: its rows do not fit the pruned video.",
    "internal": _BUG,
    "malformed": _DAMAGE,
    "metrics_file": "Set metrics.folder to one that the server's user may write to.",
    "misplaced": _DAMAGE,
    "no_device": "Set hot.device to a device that is here.",
    "no_group": "Make the group with a backend that carries tensors of this device.",
    "not_a_store": "Set disk.path to another folder, or move the file away.",
    "not_ours": _DAMAGE,
    "other_rank": "Look at the log of that rank; most often its device has no memory left.",
    "page_locking": "Raise the limit that the line names, or set host.page_locked: off.",
    "promotion": "Lower hot.max_size: the device has no memory left.",
    "protocol": _BUG,
    "ranks_apart": "Give every rank the plug-in, of one version, and TIERED_MMCACHE_CONFIG.",
    "read_timeout": "Use a faster disk, or raise disk.read_timeout.",
    "silent": "Look at the disk's load: the worker was ended, and is started again.",
    "trace_file": "Set trace.folder to one that the server's user may write to, with room.",
    "too_large": "Raise disk.max_size, or do nothing: the entry stays in memory.",
    "too_many_pieces": "Raise host.max_size: its memory is in too many pieces.",
    "truncated": _DAMAGE,
    "unknown_class": "Call register_result_class for it before the cache is used.",
    "unknown_dtype": "Use a torch that has this dtype, or another namespace.",
    "worker_died": "Look for the worker's own lines above, and for the kernel's OOM killer.",
}


def remedy_of(cause: str) -> str:
    """What to do about a fault; empty where its own text says it, or nothing is known."""
    return REMEDIES.get(cause, "")


def log_fields(cause: str, remedy: str = "") -> dict[str, str]:
    """What a log line carries as ``extra`` beside its text.

    Args:
        cause: A short, stable label; that of the fault, where one is counted.
        remedy: What to do about it; by default that of the fault.
    """
    return {"mmcache_cause": cause, "mmcache_remedy": remedy or remedy_of(cause)}
