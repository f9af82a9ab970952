"""What this machine has: memory within the control group's limits, and room on a disk.

Owns: reading the limits that the kernel imposes on this process.
Does not own: what to do with them (:mod:`tiered_mmcache.config`), nor device memory.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

THIS_MACHINE = "the memory of this machine"
DATA_FILE_NAME = "data.mdb"

_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own block (stat(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory as this process may use it.

    Attributes:
        total_bytes: What it could ever have.
        available_bytes: What it could have now without swapping or being killed.
        bound: What sets ``available_bytes``, and so has to be raised for more.
        total_bound: The same of ``total_bytes``.
    """

    total_bytes: int
    available_bytes: int
    bound: str = THIS_MACHINE
    total_bound: str = THIS_MACHINE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The names that one version of control groups gives to the same three figures."""

    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat that counts page cache the kernel would give back


_V1 = _Files(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_V2 = _Files(limit="memory.max", usage="memory.current", reclaimable="inactive_file")


def memory() -> Memory:
    """Read the memory of the machine, or of the control group where that has less."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    bound = total_bound = THIS_MACHINE
    for folder, files in _memory_groups():
        limit = _number(folder / files.limit)
        if limit is None:
            continue
        usage = _number(folder / files.usage) or 0
        used = max(0, usage - _stat_line(folder / "memory.stat", files.reclaimable))
        here = f"the control group's {folder / files.limit}"
        if max(0, limit - used) < available:
            available, bound = max(0, limit - used), here
        if limit < total:
            total, total_bound = limit, here
    return Memory(
        total_bytes=total, available_bytes=available, bound=bound, total_bound=total_bound
    )


def locked_memory_limit_bytes() -> int | None:
    """What RLIMIT_MEMLOCK lets this process lock; None when it sets no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def disk_room_bytes(folder: Path) -> int:
    """The bytes a store in ``folder`` may come to use: what is free and what it has already.

    ``folder`` need not exist yet: its nearest existing parent names the file system.

    Raises:
        OSError: When that file system cannot be asked.
    """
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(nearest).free + _used_bytes(folder / DATA_FILE_NAME)


def _used_bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def _memory_groups() -> Iterator[tuple[Path, _Files]]:
    """Each folder that may limit this process: its own group and all groups around that.

    Inside a container the path that the kernel states may be the host's; then only the root of the
    mount exists, and that is the container's own group.
    """
    for line in _lines(_PROC_CGROUP):
        number, controllers, path = line.split(":", 2)
        relative = Path(path.lstrip("/"))
        if number == "0" and not controllers:
            mount, files = _CGROUP_MOUNT, _V2
        elif "memory" in controllers.split(","):
            mount, files = _CGROUP_MOUNT / "memory", _V1
        else:
            continue
        for group in (relative, *relative.parents):
            yield mount / group, files


def _number(file: Path) -> int | None:
    """The figure in ``file``; None when there is no file, or it says that there is no limit."""
    text = next(iter(_lines(file)), "")
    return int(text) if text.isdecimal() else None


def _stat_line(file: Path, name: str) -> int:
    for line in _lines(file):
        label, _, figure = line.partition(" ")
        if label == name and figure.isdecimal():
            return int(figure)
    return 0


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []  # not there, or not for us to read: then it limits nothing that we can know
