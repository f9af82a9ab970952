"""Memory that the server, the device and the spill worker share.

Owns: one anonymous file (memfd) mapped into this process, and the runs of it that are in use.
Does not own: what is in the runs, or when they may be given back (:mod:`.tier`); how memory is
made ready ahead of need (:mod:`.preparation`).

Construction reserves addresses, not memory: a page of the arena costs nothing until it is first
written, or made ready because that is near. The file is sealed against shrinking, so that no
process can make a mapped page vanish.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator

import torch

from tiered_mmcache.host import memory_policy
from tiered_mmcache.host.extents import PAGE_BYTES, Extent, ExtentAllocator
from tiered_mmcache.host.page_locking import (
    NoPageLocking,
    PageLocker,
    PageLockingError,
    numa_node_of,
)
from tiered_mmcache.host.preparation import SEGMENT_BYTES, Preparation, StartThread, start_daemon
from tiered_mmcache.metrics.remedies import log_fields

# linux/fcntl.h: seals of a memfd; Python names them only from 3.13 on.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL = 0x1
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4


_CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger("tiered_mmcache")


def _no_page_locking(device: torch.device) -> PageLocker:
    return NoPageLocking()


class Arena:
    """``capacity_bytes`` of shared memory, handed out in extents.

    Args:
        capacity_bytes: Rounded down to whole pages, at least one.
        make_locker: What locks memory for a device; may raise PageLockingError.
        huge_pages: Ask the kernel for huge pages.
        segment_bytes: How much is made ready in one step. No slice crosses the end of a segment:
            CUDA refuses copies of memory that is page-locked in part.
        start: Starts the thread that makes memory ready.

    Attributes:
        fd: The memfd, inherited by the spill worker.
        capacity_bytes: A whole number of pages.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        make_locker: Callable[[torch.device], PageLocker] = _no_page_locking,
        huge_pages: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        start: StartThread = start_daemon,
    ) -> None:
        self._allocator = ExtentAllocator(max(capacity_bytes, PAGE_BYTES))
        self.capacity_bytes = self._allocator.capacity_bytes
        self.fd = os.memfd_create("tiered_mmcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.capacity_bytes)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
        memory = mmap.mmap(self.fd, self.capacity_bytes)
        problem = memory_policy.advise_huge_pages(memory) if huge_pages else None
        if problem is not None:
            fields = log_fields("huge_pages", "Do as the line says, or leave host.huge_pages out.")
            log.warning("host.huge_pages has no effect: %s", problem, extra=fields)
        with torch.inference_mode(False):  # an inference tensor could not be written later
            self._bytes: torch.Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._make_locker = make_locker
        self._huge_pages = huge_pages and problem is None
        self._segment_bytes = segment_bytes
        self._start = start
        self._preparation: Preparation | None = None
        self._when_dropped: weakref.finalize[[float], Arena] | None = None
        self._prepared_for: set[str] = set()
        self._failure: str | None = None

    def prepare_for(self, device: torch.device) -> None:
        """Make memory ready ahead of need from now on, for copies to and from a device.

        Cheap when it was called for such a device before; else it starts a thread, or asks the
        one there is.
        """
        if device.type in self._prepared_for or self._bytes is None:
            return
        self._prepared_for.add(device.type)
        try:
            locker = self._make_locker(device)
        except PageLockingError as error:
            self._failure = str(error)
            locker = NoPageLocking()
        node = numa_node_of(device)
        if node is not None:
            memory_policy.prefer_node(self._bytes.data_ptr(), self.capacity_bytes, node)
        if self._preparation is None:
            self._preparation = self._new_preparation(self._bytes)
        elif isinstance(locker, NoPageLocking):
            return  # as it is being made ready already
        self._preparation.begin(locker)
        self._preparation.need(self._allocator.high_water_bytes)

    def take_failure(self) -> str | None:
        """Why memory is not page-locked though it should be, and what to change; told once."""
        failure, self._failure = self._failure, None
        if failure is None and self._preparation is not None:
            failure = self._preparation.take_failure()
        return failure

    @property
    def page_locked_bytes(self) -> int:
        """How much, from the start on, a device reaches by itself."""
        return 0 if self._preparation is None else self._preparation.locked_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the runs handed out."""
        return self.capacity_bytes - self._allocator.free_bytes

    def reserve(self, size_bytes: int) -> list[Extent] | None:
        """Runs for a payload, or None when too little is free; memory that is ready first."""
        preparation = self._preparation
        if preparation is None:
            return self._allocator.reserve(size_bytes)
        preferred_bytes = preparation.preferred_bytes
        runs = self._allocator.reserve(size_bytes, preferred_bytes=preferred_bytes)
        preparation.need(self._allocator.high_water_bytes)
        return runs

    def release(self, runs: list[Extent]) -> None:
        """Give runs back. Nothing may be reading or writing them any more."""
        self._allocator.release(runs)

    def slices(self, runs: list[Extent], start: int, stop: int) -> Iterator[torch.Tensor]:
        """Bytes ``start`` to ``stop`` of the payload in some runs, in order.

        Yields:
            One ``uint8`` tensor for each run and segment that holds some of them, valid until
            release.
        """
        assert self._bytes is not None, "the arena is closed"
        before = 0
        for offset, length in runs:
            first = offset + max(start - before, 0)
            last = offset + min(stop - before, length)
            while first < last:
                segment_end = (first // self._segment_bytes + 1) * self._segment_bytes
                yield self._bytes[first : min(last, segment_end)]
                first = segment_end
            before += length

    def close(self) -> None:
        """Give the memory up; no copy may touch it any more. Tensors over it keep it mapped.

        Waits some seconds at most for memory to be unlocked; what takes longer stays mapped until
        it is. In a forked child, what the parent locked is left alone.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._bytes = None
        if self._preparation is not None and self._when_dropped is not None:
            self._when_dropped.detach()
            self._preparation.close(_CLOSE_TIMEOUT_S)
            self._preparation = None

    def _new_preparation(self, memory: torch.Tensor) -> Preparation:
        # A descriptor of its own: the thread may still use it when the arena has closed its own.
        fd = os.dup(self.fd)
        made = Preparation(
            address=memory.data_ptr(),
            capacity_bytes=self.capacity_bytes,
            back=functools.partial(_back, memory, None if self._huge_pages else fd),
            segment_bytes=self._segment_bytes,
            start=self._start,
        )
        weakref.finalize(made, os.close, fd).atexit = False
        # Locked memory must not be unmapped, also when an arena is dropped without being closed.
        self._when_dropped = weakref.finalize(self, made.close, 0.0)
        self._when_dropped.atexit = False
        return made


def _back(memory: torch.Tensor, fd: int | None, start: int, size_bytes: int) -> None:
    if fd is not None:  # in huge pages only where the mapping is asked for them
        memory_policy.commit(fd, start, size_bytes)
    memory_policy.map_in(memory.data_ptr() + start, size_bytes)
