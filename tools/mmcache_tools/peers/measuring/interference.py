"""A busy main loop that calls the system now and then, as a scheduler does between batches.

Owns: the loop, and how its turns are counted. Does not own: percentiles of several systems.

Each sixteenth turn stores a new entry and reads an old one, whose time is that turn's too: a system
that works in the caller's own thread shows there, one with threads or processes in all turns.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from mmcache_tools.peers.system import Budgets, System, embedding, is_of, rows_of

_STEP_TURNS = 8_000  # about half a millisecond
_TURNS_A_CALL = 16
_OLD_ENTRIES = 32


def measure(system: type[System], *, size_bytes: int, seconds: float) -> dict[str, list[float]]:
    """Percentiles 50, 99 and 99.9 of a turn alone, beside the system, and of its calls, in s."""
    rows = rows_of(size_bytes)
    size = rows * 7168 + 4096
    with tempfile.TemporaryDirectory() as folder:
        cache = system(
            Budgets(
                folder=Path(folder),
                hot_bytes=4 * size,
                host_bytes=16 * size,
                disk_bytes=3 * _OLD_ENTRIES * size,
            )
        )
        for key in range(_OLD_ENTRIES):
            cache.set(key, embedding(key, rows))
            cache.settle()
        alone = _turns(seconds, None, rows)
        beside = _turns(seconds, cache, rows)
        cache.close()
    found = {
        "turn alone": percentiles(alone["turns"]),
        "turn beside": percentiles(beside["turns"]),
        "turn without a call beside": percentiles(beside["quiet"]),
        "set": percentiles(beside["sets"]),
        "get": percentiles(beside["gets"]),
    }
    return {**found, "hits": [sum(beside["hits"]), float(len(beside["hits"]))]}


def percentiles(times_s: list[float]) -> list[float]:
    """What 50, 99 and 99.9 of a hundred stay within."""
    ranked = sorted(times_s)
    return [ranked[min(len(ranked) - 1, int(len(ranked) * share))] for share in (0.5, 0.99, 0.999)]


def _turns(seconds: float, cache: System | None, rows: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {
        name: [] for name in ("turns", "quiet", "sets", "gets", "hits")
    }
    chance = random.Random(0)
    stored = _OLD_ENTRIES
    payload = embedding(stored, rows)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for _ in range(_TURNS_A_CALL - 1):
            began_s = time.perf_counter()
            _step()
            found["quiet"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        _step()
        if cache is not None:
            old = chance.randrange(stored - _OLD_ENTRIES, stored)
            before_get_s = time.perf_counter()
            got = cache.get(old)
            before_set_s = time.perf_counter()
            cache.set(stored, payload)
            ended_s = time.perf_counter()
            found["gets"].append(before_set_s - before_get_s)
            found["sets"].append(ended_s - before_set_s)
            found["hits"].append(got is not None and is_of(old, got))
        found["turns"].append(time.perf_counter() - began_s)
        if cache is not None:
            stored += 1
            payload = embedding(stored, rows)  # the encoder's work, not the loop's
    found["turns"] += found["quiet"]
    return {name: values or [0.0] for name, values in found.items()}


def _step() -> int:
    value = 0
    for turn in range(_STEP_TURNS):
        value = (value * 31 + turn) & 0xFFFF
    return value
