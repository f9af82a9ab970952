"""Single operations, by the size of an entry.

Owns: hot hit, miss, set, promotions, the rate of spilling, and opening. Does not own: medians.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmcache_tools.peers.system import Budgets, System, embedding, is_of, rows_of

_ENTRIES = 6
_HOT_ENTRIES = 4  # so that, asked for in turn, no entry is hot
_LOOK_UPS = 5_000
_MISSES = 200
_Times = dict[str, list[float]]


def measure(system: type[System], *, size_bytes: int, rounds: int) -> dict[str, Any]:
    """``times``: seconds of each operation that this system has; ``failures``: at what it failed.

    Args:
        system: What is measured.
        size_bytes: Of one entry.
        rounds: How often each entry is promoted or written; hits are taken more often.
    """
    rows = rows_of(size_bytes)
    payloads = [embedding(key, rows) for key in range(_ENTRIES)]
    times_s: _Times = {}
    failures: dict[str, str] = {}
    parts = {
        "in room": _in_room,
        "evicting": _evicting,
        "from host memory": _from_host,
        "from disk": _from_disk,
    }
    for name, part in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                times_s |= part(system, Path(folder), payloads, rounds)
            except Exception as error:  # noqa: BLE001 - what a peer fails at is a finding
                failures[name] = f"{type(error).__name__}: {error}"
    return {"times": times_s, "failures": failures}


def _in_room(
    system: type[System], folder: Path, payloads: list[torch.Tensor], rounds: int
) -> _Times:
    """Everything fits the first tier."""
    size = payloads[0].nbytes + 4096
    budgets = Budgets(folder=folder, hot_bytes=8 * size, host_bytes=16 * size, disk_bytes=32 * size)
    cache = system(budgets)
    times_s: _Times = {"set": []}
    for key, payload in enumerate(payloads):
        times_s["set"].append(_set_s(cache, key, payload.clone()))
        cache.settle()
    if "device" in system.tiers:
        _per_call(cache.look_up, range(_ENTRIES), _LOOK_UPS)  # warms up
        hits = range(_ENTRIES)
        times_s["hot hit"] = [_per_call(cache.look_up, hits, _LOOK_UPS) for _ in range(5 * rounds)]
    unknown = range(1_000_000, 1_000_000 + _MISSES)
    times_s["miss"] = [_per_call(cache.look_up, unknown, _MISSES) for _ in range(rounds)]
    cache.close()
    return times_s


def _evicting(
    system: type[System], folder: Path, payloads: list[torch.Tensor], rounds: int
) -> _Times:
    """Each set pushes something out, through every tier there is."""
    size = payloads[0].nbytes + 4096
    is_bounded = "bound" not in system.cannot
    disk_bytes = 12 * size if is_bounded else 2**50
    budgets = Budgets(folder=folder, hot_bytes=2 * size, host_bytes=4 * size, disk_bytes=disk_bytes)
    cache = system(budgets)
    rows = payloads[0].shape[0]
    for key in range(16):
        cache.set(key, embedding(key, rows))
        cache.settle()
    times_s: _Times = {"set, evicting": []}
    for key in range(100, 100 + 3 * rounds):
        payload = embedding(key, rows)
        times_s["set, evicting"].append(_set_s(cache, key, payload))
        cache.settle()
    if "disk" in system.tiers:
        times_s["spill"] = [_spill_s(cache, rows, 1000 * (n + 1)) for n in range(rounds)]
    cache.close()
    return times_s if is_bounded else {"spill": times_s["spill"]}


def _spill_s(cache: System, rows: int, first: int) -> float:
    """Seconds that each of several new entries takes, until all are written."""
    entries = [(key, embedding(key, rows)) for key in range(first, first + 4)]
    began_s = time.perf_counter()
    for key, payload in entries:
        cache.set(key, payload)
    cache.settle()
    return (time.perf_counter() - began_s) / len(entries)


def _from_host(
    system: type[System], folder: Path, payloads: list[torch.Tensor], rounds: int
) -> _Times:
    if "host" not in system.tiers:
        return {}
    size = payloads[0].nbytes + 4096
    cache = system(Budgets(folder=folder, hot_bytes=_HOT_ENTRIES * size, host_bytes=16 * size))
    _fill(cache, payloads)
    times_s = [_promotion_s(cache, n % _ENTRIES) for n in range(_ENTRIES * (rounds + 1))]
    cache.close()
    return {"host promotion": times_s[_ENTRIES:]}


def _from_disk(
    system: type[System], folder: Path, payloads: list[torch.Tensor], rounds: int
) -> _Times:
    if "disk" not in system.tiers:
        return {}
    size = payloads[0].nbytes + 4096
    budgets = Budgets(folder=folder, hot_bytes=_HOT_ENTRIES * size, disk_bytes=32 * size)
    cache = system(budgets)
    _fill(cache, payloads)
    if all(cache.get(key) is None for key in range(_ENTRIES)):
        raise RuntimeError("nothing that was written is found again")
    warm_s = [_promotion_s(cache, n % _ENTRIES) for n in range(_ENTRIES * (rounds + 1))]
    times_s: _Times = {"disk promotion, warm": warm_s[_ENTRIES:]}
    cache.close()
    if "restart" in system.cannot:
        return times_s
    times_s |= {"disk promotion, cold": [], "restart to first hit": []}
    for _ in range(rounds):
        began_s = time.perf_counter()
        cache = system(budgets)
        _promotion_s(cache, 0)
        times_s["restart to first hit"].append(time.perf_counter() - began_s)
        cache.close()
        make_cold(folder)
        cache = system(budgets)
        _promotion_s(cache, 0)  # opens what is opened once
        times_s["disk promotion, cold"] += [_promotion_s(cache, key) for key in range(1, _ENTRIES)]
        cache.close()
    return times_s


def _fill(cache: System, payloads: list[torch.Tensor]) -> None:
    for key, payload in enumerate(payloads):
        cache.set(key, payload.clone())
        cache.settle()
    for key in 2 * [*range(len(payloads))]:  # everything is below, not only what was evicted
        cache.get(key)
        cache.settle()


def _promotion_s(cache: System, key: int) -> float:
    began_s = time.perf_counter()
    found = cache.get(key)
    took_s = time.perf_counter() - began_s
    if found is None or not is_of(key, found):
        raise RuntimeError(f"entry {key} was {'not found' if found is None else 'wrong'}")
    cache.settle()
    return took_s


def _per_call(look_up: Callable[[int], object], keys: range, calls: int) -> float:
    asked = [keys[number % len(keys)] for number in range(calls)]
    began_s = time.perf_counter()
    for key in asked:
        look_up(key)
    return (time.perf_counter() - began_s) / calls


def _set_s(cache: System, key: int, payload: torch.Tensor) -> float:
    began_s = time.perf_counter()
    cache.set(key, payload)
    return time.perf_counter() - began_s


def make_cold(folder: Path) -> None:
    """Drop the pages of all files of a folder; only those go that no process maps."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
