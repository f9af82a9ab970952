"""The price of a hot hit beside the specified static cache's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch

from mmcache_tools.bench.pairing import Row, time_row, timed_in_turn
from tiered_mmcache import (
    CacheConfig,
    EmbeddingResult,
    MultiModalStaticCache,
    TieredMultimodalCache,
)

_CALLS = 20_000
_ENTRIES = 64


def measure(rounds: int) -> list[Row]:
    """``get_single`` and ``get`` on entries that the hot tier holds, all tiers configured."""
    entries = [EmbeddingResult(embedding=torch.zeros(256)) for _ in range(_ENTRIES)]
    static = MultiModalStaticCache(1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        config = CacheConfig.from_mapping(
            {
                "namespace": "bench",
                "hot": {"max_size": "1MiB"},
                "host": {"max_size": "1MiB"},
                "disk": {"path": f"{folder}/store", "max_size": "16MiB"},
            }
        )
        traced_config = CacheConfig.from_mapping(
            {"hot": {"max_size": "1MiB"}, "trace": {"folder": f"{folder}/traces"}}
        )
        with (
            TieredMultimodalCache(config=config) as tiered,
            TieredMultimodalCache(config=traced_config) as traced,
        ):
            for cache in (static, tiered, traced):
                for number, entry in enumerate(entries):
                    cache.set(number, entry)
                    cache.set(cache.combine_hashes([number]), entry)
            medians_s = timed_in_turn(
                {
                    "static get_single": _singles(static.get_single),
                    "hot get_single": _singles(tiered.get_single),
                    "traced get_single": _singles(traced.get_single),
                    "static get": _combinations(static.get),
                    "hot get": _combinations(tiered.get),
                },
                rounds=rounds,
                warm_up=2,
            )
    per_call_s = {name: seconds / _CALLS for name, seconds in medians_s.items()}
    return [
        time_row("hot get_single", "static get_single", per_call_s, wanted=1.3),
        time_row("hot get", "static get", per_call_s),
        time_row("traced get_single", "hot get_single", per_call_s),
    ]


def _singles(get_single: Callable[[int], object]) -> Callable[[int], None]:
    def run(_: int) -> None:
        for number in range(_CALLS):
            get_single(number % _ENTRIES)

    return run


def _combinations(get: Callable[[list[int]], object]) -> Callable[[int], None]:
    requests = [[number] for number in range(_ENTRIES)]

    def run(_: int) -> None:
        for number in range(_CALLS):
            get(requests[number % _ENTRIES])

    return run
