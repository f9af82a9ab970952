"""A server that has a cache, played: requests for images come, and now and then something fails.

Owns: the requests, and what goes wrong when. Does not own: who looks (:mod:`.picture`, the tests).

``python -m mmcache_tools.monitoring.played_server FOLDER SECONDS`` keeps its store and a file of
metrics in the folder, which has to be in memory, and ends when its standard input is closed. What
fails is divided over the seconds: other images for a while, a disk that hangs, a worker that is
killed, damage to the store.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import sys
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

_KIB = 1024
_IMAGES = 400
_REQUEST_EVERY_S = 0.004
_ENCODER_S = 0.01


def _configuration(folder: Path) -> CacheConfig:
    return CacheConfig.from_mapping(
        {
            "namespace": "Qwen/Qwen2.5-VL-7B-Instruct@main/bf16",
            "hot": {"max_size": "2MiB", "clean_ahead": "256KiB"},
            "host": {"max_size": "6MiB", "prefetch": "1MiB"},
            "disk": {
                "path": str(folder / "store"),
                "max_size": "24MiB",
                "write_buffer": "4MiB",
                "read_timeout": "50ms",
            },
            "metrics": {"folder": str(folder / "metrics"), "interval": "1s"},
        }
    )


def _size_of(image: int) -> int:
    return random.Random(image).randrange(16 * _KIB, 128 * _KIB)


def _encode(images: Sequence[Hashable]) -> list[EmbeddingResult]:
    time.sleep(_ENCODER_S * len(images))
    return [EmbeddingResult(embedding=torch.ones(_size_of(hash(i)) // 4)) for i in images]


class _Misfortunes:
    """What goes wrong, in this order, once in a run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._due = [
            (0.50 * seconds, self._hang),
            (0.60 * seconds, self._go_on),
            (0.70 * seconds, self._kill),
            (0.85 * seconds, self._damage),
        ]

    def take_place(self, cache: TieredMultimodalCache, elapsed_s: float) -> None:
        while self._due and elapsed_s >= self._due[0][0]:
            disk = None if cache._below is None else cache._below.disk
            if disk is None or disk.client.pid is None:
                return
            self._due.pop(0)[1](disk.client.pid)

    def _hang(self, worker: int) -> None:
        _send(worker, signal.SIGSTOP)

    def _go_on(self, worker: int) -> None:
        _send(worker, signal.SIGCONT)

    def _kill(self, worker: int) -> None:
        _send(worker, signal.SIGKILL)

    def _damage(self, worker: int) -> None:
        """A byte in each page beyond the first ones, which say where all is."""
        file = self._folder / "store" / "data.mdb"
        with file.open("r+b") as store:
            for place in range(256 * _KIB, file.stat().st_size, 48 * _KIB):
                store.seek(place + 2000)
                store.write(b"\xff")


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def play(folder: Path, seconds: float) -> None:
    """Answer requests until standard input is closed."""
    dice = random.Random(7)
    misfortunes = _Misfortunes(folder, seconds)
    began_s = time.monotonic()
    with TieredMultimodalCache(config=_configuration(folder)) as cache:
        while not select.select([sys.stdin], [], [], _REQUEST_EVERY_S)[0]:
            elapsed_s = time.monotonic() - began_s
            misfortunes.take_place(cache, elapsed_s)
            others = _IMAGES if 0.25 < elapsed_s / seconds < 0.4 else 0
            images = [others + int(_IMAGES * dice.random() ** 3) for _ in range(2)]
            coming = int(_IMAGES * dice.random() ** 3)
            cache.prefetch([coming])
            cache.get_or_encode(images, _encode)
            if dice.random() < 0.01:
                cache.free(images[0])
            if dice.random() < 0.01:
                cache.set(("too large", elapsed_s), _oversized())


def _oversized() -> EmbeddingResult:
    return EmbeddingResult(embedding=torch.ones(4096 * _KIB, dtype=torch.uint8))


if __name__ == "__main__":
    play(Path(sys.argv[1]), float(sys.argv[2]))
