"""Bringing an entry back from a disk whose page cache is cold, beside reading a file directly.

Owns: making both cold, and reading the file. Does not own: a warm page cache (:mod:`.moves`).

The file is read with O_DIRECT into memory that is in use, in blocks of 1 MB, and in one block:
that lets the disk work on all of it at once, which one cannot do that wants to check and copy the
first part while the rest is read.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from mmcache_tools.bench.moves import LARGE_BYTES, MIB
from mmcache_tools.bench.pairing import Row, speed_row
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

_ENTRIES = 4


def measure(rounds: int) -> list[Row]:
    """Promotion of 64 MB entries; no rows where the file system has no O_DIRECT."""
    blocks = {"O_DIRECT, blocks of 1 MB": MIB, "O_DIRECT, one block": LARGE_BYTES}
    promotion = f"disk promotion, {LARGE_BYTES // MIB} MB, cold"
    times_s: dict[str, list[float]] = {name: [] for name in (promotion, *blocks)}
    with tempfile.TemporaryDirectory() as folder:
        config = _config(folder)
        _fill(config)
        plain = Path(folder) / "plain"
        plain.write_bytes(os.urandom(LARGE_BYTES))
        _make_cold(plain)
        try:
            os.close(os.open(plain, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return []
        target = mmap.mmap(-1, LARGE_BYTES)  # aligned as O_DIRECT wants it
        target.write(bytes(LARGE_BYTES))
        for _ in range(rounds):
            _make_cold(Path(folder) / "store" / "data.mdb")
            with TieredMultimodalCache(config=config) as cache:  # a worker without mapped pages
                for number in range(_ENTRIES):
                    began_s = time.perf_counter()
                    if cache.get_single(number) is None:
                        raise RuntimeError(f"entry {number} was not found: {cache.stats()}")
                    times_s[promotion].append(time.perf_counter() - began_s)
                    for name, block_bytes in blocks.items():
                        times_s[name].append(_read_directly(plain, target, block_bytes))
    medians_s = {name: median(times) for name, times in times_s.items()}
    return [speed_row(promotion, name, medians_s) for name in blocks]


def _config(folder: str) -> CacheConfig:
    return CacheConfig.from_mapping(
        {
            "namespace": "bench",
            "hot": {"max_size": LARGE_BYTES},
            "disk": {
                "path": f"{folder}/store",
                "max_size": 8 * LARGE_BYTES,
                "write_buffer": 4 * LARGE_BYTES,
                "read_timeout": "60s",
            },
        }
    )


def _fill(config: CacheConfig) -> None:
    with TieredMultimodalCache(config=config) as cache:
        for number in range(_ENTRIES):
            payload = torch.randint(0, 256, (LARGE_BYTES,), dtype=torch.uint8)
            cache.set(number, EmbeddingResult(embedding=payload))
            cache.drain()


def _make_cold(file: Path) -> None:
    """Drop a file's pages; only those go that no process maps and the disk has."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _read_directly(file: Path, target: mmap.mmap, block_bytes: int) -> float:
    """Seconds that it takes."""
    view = memoryview(target)
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    began_s = time.perf_counter()
    done = 0
    while done < LARGE_BYTES:
        done += os.preadv(descriptor, [view[done : done + block_bytes]], done)
    took_s = time.perf_counter() - began_s
    os.close(descriptor)
    return took_s
