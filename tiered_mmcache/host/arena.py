"""Memory that the server, the device and the spill worker share.

Owns: one anonymous file (memfd) mapped into this process, and the runs of it that are in use.
Does not own: what is in the runs, or when they may be given back (:mod:`.tier`).

Construction reserves addresses, not memory: a page of the arena costs nothing until it is first
written. The file is sealed against shrinking, so that no process can make a mapped page vanish.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import torch

from tiered_mmcache.host.extents import PAGE_BYTES, Extent, ExtentAllocator

# linux/fcntl.h: seals of a memfd; Python names them only from 3.13 on.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL = 0x1
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4


class Arena:
    """``capacity_bytes`` of shared memory, handed out in extents.

    Attributes:
        fd: The memfd, inherited by the spill worker.
        capacity_bytes: A whole number of pages.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._allocator = ExtentAllocator(max(capacity_bytes, PAGE_BYTES))
        self.capacity_bytes = self._allocator.capacity_bytes
        self.fd = os.memfd_create("tiered_mmcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.capacity_bytes)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        memory = mmap.mmap(self.fd, self.capacity_bytes)
        with torch.inference_mode(False):  # an inference tensor could not be written later
            self._bytes: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def used_bytes(self) -> int:
        """Bytes of the runs handed out."""
        return self.capacity_bytes - self._allocator.free_bytes

    def reserve(self, size_bytes: int) -> list[Extent] | None:
        """Runs for a payload, or None when too little is free."""
        return self._allocator.reserve(size_bytes)

    def release(self, runs: list[Extent]) -> None:
        """Give runs back. Nothing may be reading or writing them any more."""
        self._allocator.release(runs)

    def slices(self, runs: list[Extent], start: int, stop: int) -> Iterator[torch.Tensor]:
        """Bytes ``start`` to ``stop`` of the payload in some runs, in order.

        Yields:
            One ``uint8`` tensor for each run that holds some of them, valid until release.
        """
        assert self._bytes is not None, "the arena is closed"
        before = 0
        for offset, length in runs:
            first, last = max(start - before, 0), min(stop - before, length)
            if first < last:
                yield self._bytes[offset + first : offset + last]
            before += length

    def close(self) -> None:
        """Give the memory up. Tensors over it that still exist keep the mapping alive."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._bytes = None
