"""Moves between a device and host memory beside the copy that nothing can avoid.

Owns: promotion, demotion, work that runs beside them, and the time that page-locking takes.
Does not own: moves of CPU tensors (:mod:`.moves`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from mmcache_tools.bench.pairing import Row, speed_row, time_row, timed_in_turn
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.config import PageLocked
from tiered_mmcache.host.arena import Arena
from tiered_mmcache.host.page_locking import page_locker_for
from tiered_mmcache.host.preparation import SEGMENT_BYTES
from tiered_mmcache.host.transfer import on_stream

MIB = 1024 * 1024
_HOT_ENTRIES = 4
_ENTRIES = 6  # so that, in turn, no entry is hot when it is asked for
_HOST_ENTRIES = 16
_READY_TIMEOUT_S = 120.0
_MATRIX = 4096


def measure(rounds: int, device: torch.device, *, entry_bytes: int) -> list[Row]:
    """Promotion and demotion of entries of one size, in steady state."""
    size = f"{entry_bytes // MIB} MiB"
    page_locked = device.type != "cpu"
    sources = _random_tensors(_ENTRIES, entry_bytes, device)
    pinned = torch.empty(entry_bytes, dtype=torch.uint8, pin_memory=page_locked)
    target = torch.empty(entry_bytes, dtype=torch.uint8, device=device)

    def copy_up(_: int) -> None:
        target.copy_(pinned, non_blocking=True)
        _synchronize(device)

    def copy_down(number: int) -> None:
        pinned.copy_(sources[number % _ENTRIES], non_blocking=True)
        _synchronize(device)

    with (
        _cache(sources, PageLocked.AUTO) as locked,
        _cache(sources, PageLocked.OFF) as plain,
        _cache(sources, PageLocked.AUTO) as evicting,
    ):
        medians_s = timed_in_turn(
            {
                "page-locked copy up": copy_up,
                f"promotion, {size}": _look_up(locked, device),
                f"promotion, {size}, page_locked: off": _look_up(plain, device),
                "page-locked copy down": copy_down,
                f"demotion, {size}": _evict(evicting, sources),
            },
            rounds=rounds,
            warm_up=2 * _HOST_ENTRIES,
        )
        for cache in (locked, plain, evicting):
            _check(cache)
    return [
        speed_row(f"promotion, {size}", "page-locked copy up", medians_s, wanted=0.9),
        speed_row(f"promotion, {size}, page_locked: off", "page-locked copy up", medians_s),
        speed_row(f"demotion, {size}", "page-locked copy down", medians_s, wanted=0.9),
    ]


def measure_beside(rounds: int, device: torch.device, *, matrix: int = _MATRIX) -> list[Row]:
    """A matrix product alone, and beside promotions and demotions on another stream."""
    left = torch.randn(matrix, matrix, device=device, dtype=torch.float32)
    sources = _random_tensors(_ENTRIES, 8 * MIB, device)

    def multiply(_: int) -> None:
        for _ in range(8):
            torch.mm(left, left)

    with _cache(sources, PageLocked.AUTO) as cache:
        look_up, evict = _look_up(cache, None), _evict(cache, sources)

        def alone(number: int) -> None:
            multiply(number)
            _synchronize(device)

        def beside(number: int) -> None:
            multiply(number)
            with _other_stream(device):
                for step in range(4):
                    look_up(4 * number + step)
                evict(number)
            _synchronize(device)

        name = "8 matrix products beside 4 promotions and a demotion"
        medians_s = timed_in_turn({"alone": alone, name: beside}, rounds=rounds, warm_up=4)
    return [time_row(name, "alone", medians_s, wanted=1.2)]


def measure_locking(rounds: int, device: torch.device, *, segments: int = 16) -> list[Row]:
    """Page-locking memory beside the first write to it; times are for a GiB."""
    times_s = [_lock_once(device, segments) for _ in range(rounds)]
    per_gib = (1 << 30) / (segments * SEGMENT_BYTES)
    medians_s = {
        "page-locking 1 GiB": statistics.median(lock_s for lock_s, _ in times_s) * per_gib,
        "first writing to it": statistics.median(write_s for _, write_s in times_s) * per_gib,
    }
    return [time_row("page-locking 1 GiB", "first writing to it", medians_s)]


def _lock_once(device: torch.device, segments: int) -> tuple[float, float]:
    locker = page_locker_for(PageLocked.AUTO, device)
    arena = Arena(segments * SEGMENT_BYTES)
    runs = arena.reserve(arena.capacity_bytes)
    assert runs is not None
    parts = list(arena.slices(runs, 0, arena.capacity_bytes))
    began_s = time.perf_counter()
    for part in parts:
        part.zero_()
    written_s = time.perf_counter()
    for part in parts:
        locker.lock(part.data_ptr(), part.numel())
    locked_s = time.perf_counter()
    for part in parts:
        locker.unlock(part.data_ptr())
    arena.close()
    return locked_s - written_s, written_s - began_s


def _random_tensors(count: int, size_bytes: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator).to(device)
        for _ in range(count)
    ]


@contextlib.contextmanager
def _cache(sources: list[torch.Tensor], setting: PageLocked) -> Iterator[TieredMultimodalCache]:
    """A cache with all sources below the hot tier, whose host memory is ready."""
    entry_bytes = sources[0].numel()
    config = CacheConfig.from_mapping(
        {
            "hot": {"max_size": _HOT_ENTRIES * entry_bytes},
            "host": {"max_size": _HOST_ENTRIES * entry_bytes, "page_locked": setting.value},
        }
    )
    with TieredMultimodalCache(config=config) as cache:
        for number in range(_HOST_ENTRIES + _HOT_ENTRIES):  # every page is used once
            cache.set(("warm-up", number), EmbeddingResult(embedding=sources[0].clone()))
        for number in range(_HOST_ENTRIES + _HOT_ENTRIES):
            cache.free(("warm-up", number))
        for number, source in enumerate(sources):
            cache.set(number, EmbeddingResult(embedding=source.clone()))
        cache.drain()
        if setting is not PageLocked.OFF and sources[0].device.type == "cuda":
            _wait_until_locked(cache, _HOST_ENTRIES * entry_bytes)
        yield cache


def _wait_until_locked(cache: TieredMultimodalCache, size_bytes: int) -> None:  # pragma: gpu
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while cache.stats().host["page_locked_bytes"] < size_bytes:
        cache.drain()
        if cache.stats().faults or time.monotonic() > deadline_s:
            raise RuntimeError(f"host memory was not page-locked: {cache.stats()}")
        time.sleep(0.01)


def _look_up(cache: TieredMultimodalCache, device: torch.device | None) -> Callable[[int], None]:
    def run(number: int) -> None:
        if cache.get_single(number % _ENTRIES) is None:
            raise RuntimeError(f"entry {number % _ENTRIES} was not found: {cache.stats()}")
        if device is not None:
            _synchronize(device)

    return run


def _evict(cache: TieredMultimodalCache, sources: list[torch.Tensor]) -> Callable[[int], None]:
    """Set something new; what is evicted for it has to be copied down."""

    def run(number: int) -> None:
        key = ("new", number)
        if not cache.set(key, EmbeddingResult(embedding=sources[number % _ENTRIES])):
            raise RuntimeError(f"{key} was refused: {cache.stats()}")

    return run


def _check(cache: TieredMultimodalCache) -> None:
    stats = cache.stats()
    if stats.faults or stats.hot["hits"]:
        raise RuntimeError(f"not what was to be measured: {stats}")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # pragma: gpu


def _other_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type == "cpu":
        return contextlib.nullcontext()
    return on_stream(torch.Stream(device))  # pragma: gpu
