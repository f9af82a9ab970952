"""What the kernel is asked about memory: to have it there, in huge pages, near a device.

Owns: the system calls, and telling whether they have an effect here.
Does not own: which memory, and when (:mod:`.preparation`, :mod:`.arena`). Imports no torch.

None of this changes what memory holds, and the cache works without all of it: what the kernel
refuses is told to the caller, never raised.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14; Python has no name for it
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_NODE_MASK_BITS = 1024  # more than MAX_NUMNODES of any kernel built for a server
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}  # the system call's number

_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")

# ctypes gives the interpreter's lock up during a call of CDLL.
_libc = ctypes.CDLL(None, use_errno=True)


def commit(fd: int, start: int, size_bytes: int) -> None:
    """Have part of a memfd backed by memory; what it holds stays.

    Quicker than page faults, and no lock of this process's address space is held.

    Raises:
        OSError: There is no memory for it.
    """
    os.posix_fallocate(fd, start, size_bytes)


def map_in(address: int, size_bytes: int) -> bool:
    """Have pages mapped writable, so that touching them costs no fault; False where unknown.

    What they hold stays. Pages that are not backed yet are backed.
    """
    where, length = ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
    return int(_libc.madvise(where, length, _MADV_POPULATE_WRITE)) == 0


def advise_huge_pages(memory: mmap.mmap) -> str | None:
    """Ask for huge pages in a mapping of a memfd; why it has no effect, or None when it has."""
    try:
        text = _SHMEM_HUGE_PAGES.read_text(encoding="ascii", errors="replace")
    except OSError:
        return "this kernel has no huge pages for shared memory"
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen not in ("always", "within_size", "advise", "force"):
        return f"{_SHMEM_HUGE_PAGES} says {chosen}: write advise to it, or host.huge_pages: false"
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"the kernel refuses them ({error.strerror})"
    return None


def node_of_pci_device(name: str) -> int | None:
    """The NUMA node of a PCI device such as ``0000:3b:00.0``.

    None when it is unknown, or when there is one node only and nothing to prefer.
    """
    try:
        node = int((_PCI_DEVICES / name / "numa_node").read_text(encoding="ascii"))
        nodes = sum(1 for folder in _NODES.iterdir() if folder.name[4:].isdecimal())
    except (OSError, ValueError):
        return None
    return node if nodes > 1 and 0 <= node < _NODE_MASK_BITS else None


def prefer_node(address: int, size_bytes: int, node: int) -> bool:
    """Prefer a NUMA node for memory that is not backed yet; False where the kernel refuses.

    For memory of a memfd this holds in every process that maps it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_uint64 * (_NODE_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(size_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_NODE_MASK_BITS + 1),  # the kernel takes one bit less than it is told
        ctypes.c_long(0),
    )
    return int(result) == 0
