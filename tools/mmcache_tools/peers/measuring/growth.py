"""Look-ups among ever more small entries, as far as a system comes within a limit of time.

Owns: filling, and the look-ups at each power of ten. Does not own: which systems are asked.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from mmcache_tools.peers.system import BYTES_A_ROW, Budgets, System, embedding, is_of

_LOOK_UPS = 300
_BYTES_AN_ENTRY = 3 * 4096  # one row, and a system's own overhead


def measure(system: type[System], *, most: int, fill_s: float) -> dict[str, Any]:
    """At 100, 1,000 and so on: seconds of a look-up and of a set, and the share that was found.

    Args:
        system: What is measured; one with a disk tier keeps nearly all of it there.
        most: The largest number of entries.
        fill_s: How long filling may take in all; the number reached is given, too.
    """
    on_disk = "disk" in system.tiers
    memory_bytes = 64 * _BYTES_AN_ENTRY if on_disk else most * BYTES_A_ROW
    found: dict[str, Any] = {"figures": {}, "reached": 0}
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        cache = system(
            Budgets(
                folder=Path(folder),
                hot_bytes=memory_bytes,
                host_bytes=memory_bytes,
                disk_bytes=most * _BYTES_AN_ENTRY,
            )
        )
        spent_s, number, goal = 0.0, 0, 100
        while goal <= most and spent_s < fill_s:
            before, before_s = number, spent_s
            while number < goal and spent_s < fill_s:
                began_s = time.perf_counter()
                for key in range(number, min(number + 100, goal)):
                    cache.set(key, embedding(key, 1))
                cache.settle()
                spent_s += time.perf_counter() - began_s
                number = min(number + 100, goal)
            figures = _look_ups(cache, chance.choices(range(number), k=_LOOK_UPS))
            figures["set_s"] = (spent_s - before_s) / (number - before)
            found["figures"][str(number)] = figures
            found["reached"] = number
            goal *= 10
        cache.close()
    return found


def _look_ups(cache: System, keys: list[int]) -> dict[str, float]:
    right, times_s = 0, []
    for key in keys:
        began_s = time.perf_counter()
        got = cache.get(key)
        times_s.append(time.perf_counter() - began_s)
        right += got is not None and is_of(key, got)
    return {"get_p50_s": sorted(times_s)[len(times_s) // 2], "found": right / len(keys)}
