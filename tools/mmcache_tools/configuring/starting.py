"""`mmcache config init`: a first configuration, with sizes that fit this machine.

Owns: its text, and how much of the machine it takes. Does not own: what the machine has
(:mod:`tiered_mmcache.configuration.machine`).
"""

from __future__ import annotations

import json
from pathlib import Path

from mmcache_tools.inspection.outcome import ExitCode, UsageError
from tiered_mmcache.config import CacheConfig
from tiered_mmcache.configuration.machine import disk_room_bytes, memory

__all__ = ["write_configuration"]

_GIB = 1 << 30
_MIB = 1 << 20
_TEXT = """\
# Configuration of tiered_mmcache: `mmcache config check` tells what it comes to.
# What makes embeddings interchangeable: the model, its revision, the dtype, and whatever else
# changes what the encoder makes. Caches share entries on disk when they have the same namespace.
namespace: {namespace}

hot:                      # device memory
  max_size: {hot}         # how much the server can spare for embeddings

host:                     # host memory; leave the section out to do without
  max_size: {host}        # a quarter of the {available} that are available now

disk:                     # a store that survives restarts; leave the section out to do without
  path: {path}
  max_size: {disk}        # half of the {room} that this disk has for it
  durability: ordered     # relaxed is faster; a power failure may then cost the store
  read_timeout: 2s        # a look-up that takes longer is a miss
"""


def write_configuration(out: Path | None, *, namespace: str, store: Path) -> int:
    """Print the configuration, or write it to a new file; the exit code.

    Raises:
        UsageError: The file is there already.
        ConfigError: The namespace or the folder cannot be used.
    """
    available_bytes = memory().available_bytes
    folder = store.expanduser().absolute()
    room_bytes = disk_room_bytes(folder)
    text = _TEXT.format(
        namespace=json.dumps(namespace),
        hot="4GiB",
        host=_rounded(available_bytes // 4),
        available=_rounded(available_bytes),
        path=json.dumps(str(folder)),
        disk=_rounded(room_bytes // 2),
        room=_rounded(room_bytes),
    )
    _refuse_unusable(namespace, folder)
    if out is None:
        print(text, end="")
        return ExitCode.FINE
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{out} is there already: name another file, or move it.") from None
    print(f"wrote {out}")
    return ExitCode.FINE


def _refuse_unusable(namespace: str, folder: Path) -> None:
    disk = {"path": str(folder), "max_size": "1GiB"}
    CacheConfig.from_mapping({"namespace": namespace, "disk": disk}, check_machine=False)


def _rounded(count_bytes: int) -> str:
    """Whole GiB, or MiB where that is less than one."""
    if count_bytes >= _GIB:
        return f"{count_bytes // _GIB}GiB"
    return f"{max(1, count_bytes // _MIB)}MiB"
