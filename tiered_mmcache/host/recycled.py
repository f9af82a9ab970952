"""Memory for promoted CPU tensors, used again once nobody holds the tensor.

Owns: buffers that are idle, up to a bound.
Does not own: tensors that are alive: each keeps its buffer until its storage is freed, whoever
holds it, so memory is never reused under anybody.

Fresh memory costs a page fault for every 4 KiB, which for an embedding of some megabytes takes
longer than copying it (measured: 8 MB into new pages 3.2 ms, into used ones 0.5 ms). So huge pages
are asked for, too: they need one fault for 2 MiB, and copies of tens of MB are some percent faster.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import OrderedDict, deque

import numpy as np
import torch

_LEAST_BYTES = 1024 * 1024  # below, the allocator's own free lists do as well
_GRAIN_BYTES = 64 * 1024
_MOST_WASTE = 1.25


_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class RecycledBuffers:
    """A bounded stock of idle buffers; calls must not overlap.

    Args:
        most_idle_bytes: What idle buffers may hold together; more is given back to the system.

    Attributes:
        idle_bytes: What they hold now.
    """

    def __init__(self, most_idle_bytes: int) -> None:
        self.idle_bytes = 0
        self._most_idle_bytes = most_idle_bytes
        self._idle: OrderedDict[int, mmap.mmap] = OrderedDict()  # by identity, oldest first
        self._lent: dict[
            int, tuple[weakref.ref[_Bytes], mmap.mmap]
        ] = {}  # by the former's identity
        # A tensor may be freed on any thread, at any moment: its end is only noted then.
        self._ended: deque[weakref.ref[_Bytes]] = deque()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous CPU tensor whose contents are undefined.

        Raises:
            OSError: There is no memory for it.
            RuntimeError: There is no memory for it.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        if not _LEAST_BYTES <= size_bytes <= self._most_idle_bytes:
            return torch.empty(shape, dtype=dtype)
        buffer = self._take(size_bytes)
        if buffer is None:
            # Private: a forked child must not see this process write to its copy of a tensor.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            buffer = mmap.mmap(-1, -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES, flags=flags)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(buffer, dtype=np.uint8, count=size_bytes)
        end = weakref.ref(array, self._ended.append)
        self._lent[id(end)] = end, buffer
        return torch.from_numpy(array).view(dtype).view(shape)

    def _take(self, size_bytes: int) -> mmap.mmap | None:
        self._keep_returned()
        for number, buffer in reversed(self._idle.items()):
            if size_bytes <= len(buffer) <= size_bytes * _MOST_WASTE:
                del self._idle[number]
                self.idle_bytes -= len(buffer)
                return buffer
        return None

    def _keep_returned(self) -> None:
        while self._ended:
            _, buffer = self._lent.pop(id(self._ended.popleft()))
            self._idle[id(buffer)] = buffer
            self.idle_bytes += len(buffer)
        while self.idle_bytes > self._most_idle_bytes:
            _, oldest = self._idle.popitem(last=False)
            self.idle_bytes -= len(oldest)
