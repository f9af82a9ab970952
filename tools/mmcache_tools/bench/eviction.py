"""What a ``set`` that evicts costs the caller, beside the copy that it cannot avoid."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable

import torch

from mmcache_tools.bench.moves import ENTRY_BYTES
from mmcache_tools.bench.pairing import Row, limit_row, time_row, times_in_turn, usual_p99
from tiered_mmcache import (
    CacheConfig,
    EmbeddingResult,
    MultiModalStaticCache,
    TieredMultimodalCache,
)

_HOT_ENTRIES = 4
_HOST_ENTRIES = 12
_SOURCES = 16
_CLEAN_LIMIT_S = 30e-6


def measure(rounds: int) -> list[Row]:
    """The usual p99 of ``set`` with 8 MB entries on CPU in steady state, beyond the static cache's.

    With a victim that is not below yet, beside the p99 of ``memcpy`` into shared memory in use;
    with one that is, in microseconds. What the static cache takes is its median. Each new entry
    is looked for first, as an engine does.
    """
    sources = [torch.randint(0, 256, (ENTRY_BYTES,), dtype=torch.uint8) for _ in range(_SOURCES)]
    return [
        _dirty_row("set that evicts, p99", sources, rounds, spilling=False, wanted=1.2),
        _dirty_row("set that evicts while spilling, p99", sources, rounds, spilling=True),
        _clean_row(sources, rounds),
    ]


def _dirty_row(
    name: str,
    sources: list[torch.Tensor],
    rounds: int,
    *,
    spilling: bool,
    wanted: float | None = None,
) -> Row:
    static = MultiModalStaticCache(_HOT_ENTRIES * ENTRY_BYTES)
    memory = _shared_memory(_HOST_ENTRIES * ENTRY_BYTES)

    def copy(number: int) -> None:
        place = number % _HOST_ENTRIES * ENTRY_BYTES
        # As long unused as the victim of this round is: neither is in the processor's caches.
        source = sources[(number + _SOURCES // 2 - _HOT_ENTRIES) % _SOURCES]
        memory[place : place + ENTRY_BYTES].copy_(source)

    with tempfile.TemporaryDirectory() as folder, _cache(folder, spilling=spilling) as cache:
        times_s = times_in_turn(
            {
                "look-up": cache.get_single,
                "set": _setter(cache, sources),
                "static set": _setter(static, sources),
                "memcpy": copy,
            },
            rounds=rounds,
            warm_up=3 * (_HOST_ENTRIES + _HOT_ENTRIES),
        )
        stats = cache.stats()
    if stats.host["demotions"] < rounds:
        raise RuntimeError(f"entries were not demoted: {stats}")
    extra_s = usual_p99(times_s["set"]) - statistics.median(times_s["static set"])
    return time_row(
        name, "memcpy, p99", {name: extra_s, "memcpy, p99": usual_p99(times_s["memcpy"])}, wanted
    )


def _clean_row(sources: list[torch.Tensor], rounds: int) -> Row:
    static = MultiModalStaticCache(_HOT_ENTRIES * ENTRY_BYTES)
    with tempfile.TemporaryDirectory() as folder, _cache(folder, spilling=True) as cache:
        old = range(_HOT_ENTRIES)
        for number in range(2 * _HOT_ENTRIES):  # so that the old ones are in host memory
            _setter(cache, sources)(number)

        def make_clean_ones_hot(number: int) -> None:
            cache.free(number + 99)
            static.free(number + 99)
            cache.drain()
            for key in old:
                if cache.get_single(key) is None:
                    raise RuntimeError(f"entry {key} is gone: {cache.stats()}")
                static.set(key, EmbeddingResult(embedding=sources[key]))
            cache.get_single(number + 100)

        times_s = times_in_turn(
            {
                "make clean ones hot": make_clean_ones_hot,
                "set": lambda number: _setter(cache, sources)(number + 100),
                "static set": lambda number: _setter(static, sources)(number + 100),
            },
            rounds=rounds,
            warm_up=_SOURCES,
        )
        stats = cache.stats()
    if stats.host["clean_evictions"] < rounds or stats.host["demotions"] > 2 * _HOT_ENTRIES:
        raise RuntimeError(f"the victims were not clean: {stats}")
    extra_s = usual_p99(times_s["set"]) - statistics.median(times_s["static set"])
    return limit_row("set that evicts a clean one, p99", extra_s, _CLEAN_LIMIT_S)


def _cache(folder: str, *, spilling: bool) -> TieredMultimodalCache:
    sections: dict[str, object] = {
        "namespace": "bench",
        "hot": {"max_size": _HOT_ENTRIES * ENTRY_BYTES},
        "host": {"max_size": _HOST_ENTRIES * ENTRY_BYTES},
    }
    if spilling:
        sections["disk"] = {
            "path": f"{folder}/store",
            "max_size": 32 * ENTRY_BYTES,
            "write_buffer": 8 * ENTRY_BYTES,
            "durability": "relaxed",
        }
    return TieredMultimodalCache(config=CacheConfig.from_mapping(sections))


def _setter(cache: MultiModalStaticCache, sources: list[torch.Tensor]) -> Callable[[int], None]:
    def run(number: int) -> None:
        cache.set(number, EmbeddingResult(embedding=sources[number % _SOURCES]))

    return run


def _shared_memory(size_bytes: int) -> torch.Tensor:
    """Memory of the arena's kind, all of it in use already."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size_bytes)
    memory = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
    os.close(fd)
    return memory.zero_()
