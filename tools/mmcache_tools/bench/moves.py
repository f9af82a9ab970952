"""Bringing entries back beside the copy that nothing can avoid."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import torch

from mmcache_tools.bench.pairing import Row, speed_row, timed_in_turn
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

ENTRY_BYTES = 8 * 1024 * 1024
_ENTRIES = 6
_HOT_ENTRIES = 4  # so that, in turn, no entry is hot when it is asked for


def measure(rounds: int) -> list[Row]:
    """Promotion of 8 MB entries from host memory and from disk, in steady state on CPU."""
    generator = torch.Generator().manual_seed(0)
    sources = [
        torch.randint(0, 256, (ENTRY_BYTES,), dtype=torch.uint8, generator=generator)
        for _ in range(_ENTRIES)
    ]
    target = torch.zeros(ENTRY_BYTES, dtype=torch.uint8)
    held: list[torch.Tensor | None] = [None] * _HOT_ENTRIES

    def into_new_memory(number: int) -> None:
        held[number % _HOT_ENTRIES] = sources[number % _ENTRIES].clone()

    with _cache(sources, host_bytes=16 * ENTRY_BYTES) as from_host, _cache(sources) as from_disk:
        medians_s = timed_in_turn(
            {
                "memcpy": lambda number: target.copy_(sources[number % _ENTRIES]),
                "memcpy into new memory": into_new_memory,
                "host promotion": _look_up(from_host),
                "disk promotion": _look_up(from_disk),
            },
            rounds=rounds,
            warm_up=2 * _ENTRIES,
        )
        _check(from_host, "host")
        _check(from_disk, "disk")
    return [
        speed_row("host promotion", "memcpy", medians_s),
        speed_row("host promotion", "memcpy into new memory", medians_s),
        speed_row("disk promotion", "memcpy", medians_s, wanted=0.4),
        speed_row("disk promotion", "memcpy into new memory", medians_s, wanted=0.4),
    ]


@contextlib.contextmanager
def _cache(sources: list[torch.Tensor], host_bytes: int = 0) -> Iterator[TieredMultimodalCache]:
    with tempfile.TemporaryDirectory() as folder:
        sections: dict[str, object] = {
            "namespace": "bench",
            "hot": {"max_size": _HOT_ENTRIES * ENTRY_BYTES},
            "disk": {"path": f"{folder}/store", "max_size": "256MiB"},
        }
        if host_bytes:
            sections["host"] = {"max_size": host_bytes}
        with TieredMultimodalCache(config=CacheConfig.from_mapping(sections)) as cache:
            for number, source in enumerate(sources):
                cache.set(number, EmbeddingResult(embedding=source.clone()))
            if not host_bytes:  # everything must be on disk, not only what was evicted so far
                for number in range(2 * _ENTRIES):
                    cache.drain()
                    cache.get_single(number % _ENTRIES)
            cache.drain()
            yield cache


def _look_up(cache: TieredMultimodalCache) -> Callable[[int], None]:
    def run(number: int) -> None:
        if cache.get_single(number % _ENTRIES) is None:
            raise RuntimeError(f"entry {number % _ENTRIES} was not found: {cache.stats()}")

    return run


def _check(cache: TieredMultimodalCache, tier: str) -> None:
    stats = cache.stats().as_dict()
    other = {"host": "disk", "disk": "host"}[tier]
    if stats["hot"]["hits"] or stats[tier]["hits"] < 10 * max(1, stats[other]["hits"]) / 2:
        raise RuntimeError(f"the look-ups did not come from {tier}: {stats}")
