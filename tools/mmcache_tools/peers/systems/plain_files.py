"""One file for each embedding, written and read with O_DIRECT: what one writes in an afternoon.

Owns: the files, their aligned buffers, and a bound with least recent use. Does not own: checks of
what is read, which such code does not make.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import torch

from mmcache_tools.peers.system import BYTES_A_ROW, Budgets, System

_BLOCK_BYTES = 4096


class PlainFiles(System):
    """The name of the file is the key; its first block tells the size."""

    name = "plain files, O_DIRECT"
    tiers = frozenset({"disk"})
    cannot: ClassVar = {
        "device": "stores files: measured behind a plain LRU of the hot budget",
        "host": "has no host tier: O_DIRECT goes around the page cache",
        "digest": "checks nothing that it reads",
    }

    def __init__(self, budgets: Budgets) -> None:
        super().__init__(budgets)
        self._folder = budgets.folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True)
        there = sorted(os.scandir(self._folder), key=lambda entry: entry.stat().st_mtime)
        self._sizes = OrderedDict((entry.name, entry.stat().st_size) for entry in there)
        self._held_bytes = sum(self._sizes.values())
        self._direct = os.O_DIRECT if _has_direct(self._folder) else 0
        self.look_up = self.get

    @classmethod
    def version(cls) -> str:
        return f"Linux {platform.release()}"

    def get(self, key: int) -> torch.Tensor | None:
        name = f"{key:016x}"
        size_bytes = self._sizes.get(name)
        if size_bytes is None:
            return None
        self._sizes.move_to_end(name)
        buffer = mmap.mmap(-1, size_bytes)
        descriptor = os.open(self._folder / name, os.O_RDONLY | self._direct)
        try:
            if os.preadv(descriptor, [buffer], 0) != size_bytes:
                raise OSError(f"{name} is shorter than it was")
        finally:
            os.close(descriptor)
        rows = int.from_bytes(buffer[:8], "little")
        values = torch.frombuffer(
            buffer, dtype=torch.bfloat16, offset=_BLOCK_BYTES, count=rows * BYTES_A_ROW // 2
        )
        return values.view(rows, -1)

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        name = f"{key:016x}"
        if name in self._sizes:
            return True
        size_bytes = _BLOCK_BYTES + -(-embedding.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if size_bytes > self.budgets.disk_bytes:
            return False
        while self._held_bytes + size_bytes > self.budgets.disk_bytes:
            oldest, its_bytes = self._sizes.popitem(last=False)
            (self._folder / oldest).unlink()
            self._held_bytes -= its_bytes
        with mmap.mmap(-1, size_bytes) as buffer:
            buffer[:8] = embedding.shape[0].to_bytes(8, "little")
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            source = embedding.contiguous().view(torch.uint8).view(-1)
            whole[_BLOCK_BYTES : _BLOCK_BYTES + source.numel()].copy_(source)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._direct
            descriptor = os.open(self._folder / name, flags, 0o600)
            try:
                if os.pwritev(descriptor, [buffer], 0) != size_bytes:
                    raise OSError(f"{name} was not written whole")
            finally:
                os.close(descriptor)
                del whole
        self._sizes[name] = size_bytes
        self._held_bytes += size_bytes
        return True

    def close(self) -> None:
        self._sizes.clear()


def _has_direct(folder: Path) -> bool:
    """Whether the file system takes O_DIRECT; some in memory do not."""
    probe = folder / ".probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
