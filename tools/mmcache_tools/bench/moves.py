"""Bringing entries back beside the copy that nothing can avoid.

Owns: promotion from host memory and from disk with a warm page cache, and what prefetching saves.
Does not own: a cold page cache (:mod:`.cold`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import torch

from mmcache_tools.bench.pairing import Row, speed_row, time_row, timed_in_turn
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

MIB = 1024 * 1024
ENTRY_BYTES = 8 * MIB
LARGE_BYTES = 64 * MIB
_ENTRIES = 6
_HOT_ENTRIES = 4  # so that, in turn, no entry is hot when it is asked for


def measure(rounds: int) -> list[Row]:
    """Promotion of entries of 8 and of 64 MB, in steady state on CPU."""
    rows = _promotions(ENTRY_BYTES, rounds, wanted={"host": None, "disk": 0.4})
    rows += _promotions(LARGE_BYTES, max(1, rounds // 4), wanted={"host": 0.95, "disk": 0.6})
    return rows + _prefetched(rounds)


def _promotions(entry_bytes: int, rounds: int, *, wanted: dict[str, float | None]) -> list[Row]:
    sources = _payloads(entry_bytes)
    # As many targets as the hot tier has entries: one alone would stay in the processor's cache.
    targets = [torch.zeros(entry_bytes, dtype=torch.uint8) for _ in range(_HOT_ENTRIES)]
    held: list[torch.Tensor | None] = [None] * _HOT_ENTRIES

    def into_memory_in_use(number: int) -> None:
        targets[number % _HOT_ENTRIES].copy_(sources[number % _ENTRIES])

    def into_new_memory(number: int) -> None:
        held[number % _HOT_ENTRIES] = sources[number % _ENTRIES].clone()

    size = f"{entry_bytes // MIB} MB"
    host, disk = f"host promotion, {size}", f"disk promotion, {size}"
    copy, new = f"memcpy, {size}", f"memcpy into new memory, {size}"
    in_host, on_disk = _cache(sources, host_bytes=16 * entry_bytes), _cache(sources)
    with in_host as from_host, on_disk as from_disk:
        medians_s = timed_in_turn(
            {
                copy: into_memory_in_use,
                host: _look_up(from_host),
                new: into_new_memory,
                disk: _look_up(from_disk),
            },
            rounds=rounds,
            warm_up=2 * _ENTRIES,
        )
        _check(from_host, "host")
        _check(from_disk, "disk")
    return [
        speed_row(host, copy, medians_s, wanted=wanted["host"]),
        speed_row(host, new, medians_s),
        speed_row(disk, copy, medians_s, wanted=wanted["disk"]),
        speed_row(disk, new, medians_s),
    ]


def _prefetched(rounds: int) -> list[Row]:
    """A look-up after a finished prefetch, beside one of an entry that host memory holds."""
    sources = _payloads(ENTRY_BYTES)
    # Larger than the hot tier: nothing is evicted there. With room for two in host memory each
    # prefetch finds its entry on disk alone.
    in_host = _cache(sources, host_bytes=16 * ENTRY_BYTES, hot_bytes=MIB)
    ahead = _cache(
        sources, host_bytes=2 * ENTRY_BYTES, hot_bytes=MIB, prefetch_bytes=2 * ENTRY_BYTES
    )
    with in_host as from_host, ahead as prefetching:
        look_up = _look_up(prefetching)

        def fetch(number: int) -> None:
            if prefetching.prefetch([number % _ENTRIES]) != 1 or not prefetching.drain():
                raise RuntimeError(f"nothing was prefetched: {prefetching.stats()}")

        medians_s = timed_in_turn(
            {
                "prefetch, and its end": fetch,
                "look-up after a prefetch, 8 MB": look_up,
                "waiting alike before the other": lambda number: from_host.drain(),
                "look-up of a host entry, 8 MB": _look_up(from_host),
            },
            rounds=rounds,
            warm_up=2 * _ENTRIES,
        )
        _check(from_host, "host")
        if prefetching.stats().prefetches["used"] != rounds + 2 * _ENTRIES:
            raise RuntimeError(f"what was prefetched was not used: {prefetching.stats()}")
    name, reference = "look-up after a prefetch, 8 MB", "look-up of a host entry, 8 MB"
    return [time_row(name, reference, medians_s, wanted=1.1)]


def _payloads(entry_bytes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (entry_bytes,), dtype=torch.uint8, generator=generator)
        for _ in range(_ENTRIES)
    ]


@contextlib.contextmanager
def _cache(
    sources: list[torch.Tensor],
    *,
    host_bytes: int = 0,
    hot_bytes: int | None = None,
    prefetch_bytes: int | None = None,
) -> Iterator[TieredMultimodalCache]:
    entry_bytes = sources[0].numel()
    with tempfile.TemporaryDirectory() as folder:
        sections: dict[str, object] = {
            "namespace": "bench",
            "hot": {"max_size": hot_bytes or _HOT_ENTRIES * entry_bytes, "oversize": "spill"},
            "disk": {
                "path": f"{folder}/store",
                "max_size": 32 * entry_bytes,
                "write_buffer": 8 * entry_bytes,
            },
        }
        if host_bytes:
            sections["host"] = {"max_size": host_bytes, "prefetch": prefetch_bytes}
        with TieredMultimodalCache(config=CacheConfig.from_mapping(sections)) as cache:
            for number, source in enumerate(sources):
                cache.set(number, EmbeddingResult(embedding=source.clone()))
                cache.drain()
            for number in range(2 * _ENTRIES):  # everything must be below, not only the evicted
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
