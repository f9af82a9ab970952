"""Playing a trace against a system: what it saves of the encoder, moves, and takes.

Owns: the play. Does not own: the trace (:mod:`mmcache_tools.workload`), the comparison.

Bytes and encoder seconds are divided by one number, so that there are as many bytes to each second
of the encoder as in the trace; a miss waits for as long as the encoder would have taken.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path

import psutil

from mmcache_tools.bench.pairing import p99
from mmcache_tools.peers.system import Budgets, InFront, System, embedding, is_of, rows_of


def measure(
    system: type[System],
    *,
    trace: str,
    start: int,
    stop: int,
    scale: int,
    folder: str,
    hot_bytes: int,
    host_bytes: int,
    disk_bytes: int,
) -> dict[str, float]:
    """Play the requests from ``start`` to ``stop`` of a trace.

    Args:
        system: What is measured; without a device tier it stands behind a plain LRU.
        trace: CSV of ``mmcache workload``.
        start: The first request.
        stop: The first one that is not played.
        scale: What bytes and encoder seconds are divided by.
        folder: Where the system keeps its files; what is there already is served.
        hot_bytes: Device budget.
        host_bytes: Host budget.
        disk_bytes: Disk budget.
    """
    with Path(trace).open(newline="", encoding="utf-8") as file:
        requests = [
            (int(row["key"]), rows_of(int(row["bytes"]) // scale), float(row["cost"]))
            for row in list(csv.DictReader(file))[start:stop]
        ]
    budgets = Budgets(
        folder=Path(folder), hot_bytes=hot_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes
    )
    began_s = time.perf_counter()
    cache = system(budgets)
    opened_s = time.perf_counter() - began_s
    asked: System | InFront = cache if "device" in system.tiers else InFront(cache)
    gets_s, sets_s = [], []
    saved_s = possible_s = 0.0
    hits = wrong = refused = served_bytes = 0
    for key, rows, cost_s in requests:
        possible_s += cost_s
        began_s = time.perf_counter()
        found = asked.get(key)
        gets_s.append(time.perf_counter() - began_s)
        if found is not None:
            hits += 1
            if is_of(key, found):
                saved_s += cost_s
            else:
                wrong += 1  # and saves nothing: somebody is told about another image
            served_bytes += found.nbytes
            continue
        made = embedding(key, rows)
        time.sleep(cost_s / scale)  # what the encoder takes
        began_s = time.perf_counter()
        refused += not asked.set(key, made)
        sets_s.append(time.perf_counter() - began_s)
    written_bytes = _written_bytes()
    began_s = time.perf_counter()
    cache.close()
    closed_s = time.perf_counter() - began_s
    return {
        "requests": len(requests),
        "hits": hits,
        "wrong": wrong,
        "refused": refused,
        "possible_s": possible_s,
        "saved_s": saved_s,
        "served_bytes": served_bytes,
        "written_bytes": written_bytes,
        "get_p50_s": sorted(gets_s)[len(gets_s) // 2],
        "get_p99_s": p99(gets_s),
        "set_p50_s": sorted(sets_s)[len(sets_s) // 2] if sets_s else 0.0,
        "set_p99_s": p99(sets_s) if sets_s else 0.0,
        "spent_s": sum(gets_s) + sum(sets_s),
        "opened_s": opened_s,
        "closed_s": closed_s,
    }


def _written_bytes() -> int:
    """What this process and its children have handed to the disk."""
    process = psutil.Process()
    together = [process, *process.children(recursive=True)]
    return sum(int(one.io_counters().write_bytes) for one in together)
