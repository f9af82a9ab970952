"""`mmcache copy`: a store copied to another place while a server may go on using it.

Owns: what is said of it. Does not own: the copying (:mod:`tiered_mmcache.disk.copying`).
"""

from __future__ import annotations

from pathlib import Path

from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk.copying import copy_store

__all__ = ["copy_to"]


def copy_to(target: Target, destination: Path, *, as_json: bool) -> int:
    """Copy the store and say what came along; the exit code.

    Raises:
        UsageError: The destination lies in the store's folder.
    """
    if destination.absolute().is_relative_to(target.folder.absolute()):
        raise UsageError(f"{destination} lies in the store itself: name another place.")
    copied = copy_store(target.folder, destination)
    if as_json:
        print_json(
            {
                "command": "copy",
                "store": str(target.folder),
                "destination": str(destination),
                "entries": copied.entries,
                "payload_bytes": copied.payload_bytes,
                "damaged": copied.damaged,
                "changed": copied.changed,
            }
        )
    else:
        print(f"{copied.entries} entries copied, {written_bytes(copied.payload_bytes)}")
        if copied.changed:
            print(f"{copied.changed} left out that were replaced or removed meanwhile")
    if copied.damaged:
        complain(f"left out because damaged: {copied.damaged}. `mmcache verify` names them.")
    return ExitCode.FOUND if copied.damaged else ExitCode.FINE
