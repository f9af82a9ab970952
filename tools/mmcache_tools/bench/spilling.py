"""The rate at which entries reach the disk beside what a user would write in its place."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import diskcache
import torch
from safetensors.torch import save_file

from mmcache_tools.bench.moves import ENTRY_BYTES
from mmcache_tools.bench.pairing import Row, speed_row, timed_in_turn
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

_ENTRIES_A_ROUND = 8
_ENTRIES_KEPT = 48  # each contestant overwrites or evicts beyond these: none grows for ever


def measure(rounds: int) -> list[Row]:
    """Writing new 8 MB entries, eight at a time, each contestant bounded to 48 of them.

    safetensors and diskcache leave the flush to the operating system; so does
    ``durability: relaxed``, which is therefore the like-for-like row. ``ordered``, the default,
    has the data on the device before an entry counts as written.
    """
    payloads = [
        torch.randint(0, 256, (ENTRY_BYTES,), dtype=torch.uint8) for _ in range(_ENTRIES_A_ROUND)
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        relaxed, ordered = _cache(root, "relaxed"), _cache(root, "ordered")
        size_limit = _ENTRIES_KEPT * ENTRY_BYTES
        with relaxed, ordered, diskcache.Cache(str(root / "disk"), size_limit=size_limit) as files:
            medians_s = timed_in_turn(
                {
                    "safetensors.save_file": _safetensors(root, payloads),
                    "diskcache": _diskcache(files, payloads),
                    "spill, relaxed": _spill(relaxed, payloads),
                    "spill, ordered": _spill(ordered, payloads),
                },
                rounds=rounds,
                warm_up=2 * _ENTRIES_KEPT // _ENTRIES_A_ROUND,
            )
    each_s = {name: seconds / _ENTRIES_A_ROUND for name, seconds in medians_s.items()}
    return [
        speed_row("spill, relaxed", "safetensors.save_file", each_s, wanted=2.0),
        speed_row("spill, relaxed", "diskcache", each_s),
        speed_row("spill, ordered", "safetensors.save_file", each_s),
        speed_row("spill, ordered", "diskcache", each_s),
    ]


def _cache(root: Path, durability: str) -> TieredMultimodalCache:
    sections = {
        "namespace": "bench",
        "hot": {"max_size": ENTRY_BYTES},
        "disk": {
            "path": str(root / durability),
            "max_size": (_ENTRIES_KEPT + 1) * ENTRY_BYTES,
            "write": "through",
            "durability": durability,
        },
    }
    return TieredMultimodalCache(config=CacheConfig.from_mapping(sections))


def _spill(cache: TieredMultimodalCache, payloads: list[torch.Tensor]) -> Callable[[int], None]:
    def run(number: int) -> None:
        for index, payload in enumerate(payloads):
            payload[:8] = torch.tensor(list(number.to_bytes(8, "big")), dtype=torch.uint8)
            cache.set((number, index), EmbeddingResult(embedding=payload))
        if not cache.drain():
            raise RuntimeError(f"the disk did not follow: {cache.stats()}")
        drops = cache.stats().drops
        if drops:
            raise RuntimeError(f"entries were dropped: {drops}")

    return run


def _safetensors(root: Path, payloads: list[torch.Tensor]) -> Callable[[int], None]:
    folder = root / "safetensors"
    folder.mkdir()

    def run(number: int) -> None:
        for index, payload in enumerate(payloads):
            slot = (number * _ENTRIES_A_ROUND + index) % _ENTRIES_KEPT
            save_file({"embedding": payload}, folder / f"{slot}.safetensors")

    return run


def _diskcache(files: diskcache.Cache, payloads: list[torch.Tensor]) -> Callable[[int], None]:
    def run(number: int) -> None:
        for index, payload in enumerate(payloads):
            files.set((number, index), payload.numpy().tobytes())

    return run
