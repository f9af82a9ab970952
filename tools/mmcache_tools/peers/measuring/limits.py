"""What no cache can be faster than: a look-up in a dictionary, memcpy, and the disk itself.

Owns: those. Does not own: any cache; it is measured in the process of this project's own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import torch

from mmcache_tools.peers.system import System

_MIB = 1024 * 1024
_CALLS = 5_000
_TARGETS = 4  # one alone would stay in the processor's cache


def measure(_: type[System], *, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds, by the operation of a cache that each is the limit of."""
    rounded = -(-size_bytes // _MIB) * _MIB if size_bytes >= _MIB else -(-size_bytes // 4096) * 4096
    table = dict.fromkeys(range(6))
    asked = [number % 6 for number in range(_CALLS)]
    sources = [torch.randint(0, 256, (rounded,), dtype=torch.uint8) for _ in range(2)]
    targets = [torch.zeros(rounded, dtype=torch.uint8) for _ in range(_TARGETS)]
    times_s: dict[str, list[float]] = {"hot hit": [], "host promotion": []}
    for number in range(5 * rounds):
        began_s = time.perf_counter()
        for key in asked:
            table.get(key)
        times_s["hot hit"].append((time.perf_counter() - began_s) / _CALLS)
        began_s = time.perf_counter()
        targets[number % _TARGETS].copy_(sources[number % 2])
        times_s["host promotion"].append(time.perf_counter() - began_s)
    with tempfile.TemporaryDirectory() as folder:
        return times_s | _disk(Path(folder) / "plain", rounded, rounds)


def _disk(file: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Direct writes and reads in blocks of 1 MB at most; nothing where there are none."""
    buffer = mmap.mmap(-1, size_bytes)
    buffer.write(os.urandom(4096) * (size_bytes // 4096))
    view = memoryview(buffer)
    blocks = range(0, size_bytes, min(_MIB, size_bytes))
    times_s: dict[str, list[float]] = {"spill": [], "disk promotion, cold": []}
    try:
        for _ in range(3 * rounds):
            for name, flags, move in (
                ("spill", os.O_WRONLY | os.O_CREAT, os.pwritev),
                ("disk promotion, cold", os.O_RDONLY, os.preadv),
            ):
                descriptor = os.open(file, flags | os.O_DIRECT, 0o600)
                began_s = time.perf_counter()
                for start in blocks:
                    move(descriptor, [view[start : start + blocks.step]], start)
                times_s[name].append(time.perf_counter() - began_s)
                os.close(descriptor)
    except OSError:
        return {}
    return times_s
