"""What a million entries in the store and a hundred thousand in host memory cost.

Owns: look-ups, memory and opening at two sizes, side by side in one server process.
Does not own: filling a store (:mod:`.populate`).

Run as ``python -m mmcache_tools.bench.scale host|disk FOLDER ENTRIES ROUNDS`` it is such a server
process, apart from the bench's own, whose freed memory would hide the growth. It prints its
figures as JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from mmcache_tools.bench import populate
from mmcache_tools.bench.inspecting import measure_commands
from mmcache_tools.bench.pairing import Row, limit_row, time_row
from mmcache_tools.bench.populate import ENTRY_BYTES, NAMESPACE
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

FEW = 1000
_HOT_ENTRIES = 4
_LOOK_UPS = 1000  # of each kind in a round
_LOOK_UPS_TOGETHER = 100
_HOST_ROUNDS = 10  # for one of the disk, which takes ten times as long
_MOST_HEARD_OF = 50_000  # enough to weigh what the server remembers of one
_BYTES_ON_DISK = 4096  # of one entry, with its share of the tables and room to spare


def measure(entries: int, rounds: int) -> list[Row]:
    """Rows for ``entries`` in the store, a tenth of that in host memory, beside 1,000 in each.

    Raises:
        RuntimeError: The folder for temporary files has no room for the store.
    """
    budget_bytes = max(64 * 2**20, entries * _BYTES_ON_DISK * 2)
    with tempfile.TemporaryDirectory() as folder:
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < entries * _BYTES_ON_DISK:
            problem = f"{entries} entries need {entries * _BYTES_ON_DISK} bytes in {folder}"
            raise RuntimeError(f"{problem}, {free_bytes} are free: set TMPDIR, or --entries")
        for number in (FEW, entries):
            _run("populate", [f"{folder}/{number}", str(number), str(budget_bytes)])
        figures: dict[str, float] = {}
        for tier in ("host", "disk"):
            printed = _run("scale", [tier, folder, str(entries), str(rounds)])
            figures |= json.loads(printed)
        commands = measure_commands(Path(folder) / str(entries), entries)
    return [*_rows(figures, entries), *commands]


def _host_entries(entries: int) -> int:
    return max(2 * FEW, entries // 10)


def _run(module: str, arguments: list[str]) -> str:
    command = [sys.executable, "-m", f"mmcache_tools.bench.{module}", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _rows(figures: dict[str, float], entries: int) -> list[Row]:
    few, many, host = f"{FEW:,}", f"{entries:,}", f"{_host_entries(entries):,}"
    times_s = {
        f"host hit among {host}": figures["host, many"],
        f"host hit among {few}": figures["host, few"],
        f"disk hit among {many}": figures["known, many"],
        f"disk hit among {few}": figures["known, few"],
        f"first disk hit among {many}": figures["first, many"],
        f"first disk hit among {few}": figures["first, few"],
    }
    names = list(times_s)
    return [
        *(time_row(names[i], names[i + 1], times_s, wanted=1.3) for i in (0, 2, 4)),
        limit_row("server memory per entry on disk", figures["disk bytes"], 300, unit="bytes"),
        limit_row("server memory per host entry", figures["host bytes"], 1536, unit="bytes"),
        limit_row(f"opening {many} entries", figures["open"], 1.0),
        limit_row(f"opening {many} after a kill", figures["open after a kill"], 1.0),
    ]


# The server process


def serve(tier: str, folder: Path, entries: int, rounds: int) -> dict[str, float]:
    """Take the figures of one tier: seconds of one look-up or of opening, bytes of one entry."""
    torch.set_num_threads(1)
    if tier == "host":
        return _host_figures(_host_entries(entries), rounds)
    store = folder / str(entries)
    weight = {"disk bytes": _bytes_of_an_entry_on_disk(store, entries)}
    return {**weight, **_disk_times(folder, entries, rounds), **_time_after_a_kill(store)}


def _host_figures(entries: int, rounds: int) -> dict[str, float]:
    few, many = _host_cache(FEW), _host_cache(entries)
    with few, many:
        _fill(few, range(FEW + _HOT_ENTRIES))
        _fill(many, range(FEW))
        before_bytes = _own_memory_bytes()
        _fill(many, range(FEW, entries + _HOT_ENTRIES))
        grown_bytes = _own_memory_bytes() - before_bytes
        seconds: dict[str, list[float]] = {"host, few": [], "host, many": []}
        chance = random.Random(0)
        for _ in range(_HOST_ROUNDS * rounds):
            seconds["host, few"].extend(_look_ups(few, FEW, chance))
            seconds["host, many"].extend(_look_ups(many, entries, chance))
    return {**_medians(seconds), "host bytes": grown_bytes / (entries - FEW + _HOT_ENTRIES)}


def _bytes_of_an_entry_on_disk(store: Path, entries: int) -> float:
    heard_of = min(entries, _MOST_HEARD_OF)
    with _disk_cache(store) as cache:
        _timed(cache, range(FEW))
        before_bytes = _own_memory_bytes()
        _timed(cache, range(FEW, heard_of))
        return (_own_memory_bytes() - before_bytes) / (heard_of - FEW)


def _disk_times(folder: Path, entries: int, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"open": []}
    chance = random.Random(1)
    for _ in range(rounds):
        for name, number in (("few", FEW), ("many", entries)):
            began_s = time.perf_counter()
            with _disk_cache(folder / str(number)) as cache:
                if number == entries:
                    seconds["open"].append(time.perf_counter() - began_s)
                keys = chance.sample(range(number), _LOOK_UPS)
                seconds.setdefault(f"first, {name}", []).extend(_timed(cache, keys))
                seconds.setdefault(f"known, {name}", []).extend(_timed(cache, keys))
    return _medians(seconds)


def _time_after_a_kill(store: Path) -> dict[str, float]:
    """How long opening takes when the last worker was killed, and the tables are walked."""
    logging.getLogger("tiered_mmcache").setLevel(logging.CRITICAL)
    with _disk_cache(store):
        (worker,) = psutil.Process().children()
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        began_s = time.perf_counter()
        with _disk_cache(store):
            return {"open after a kill": time.perf_counter() - began_s}


def _host_cache(entries: int) -> TieredMultimodalCache:
    host = {"max_size": (entries + _HOT_ENTRIES) * _BYTES_ON_DISK}
    hot = {"max_size": _HOT_ENTRIES * ENTRY_BYTES}
    return TieredMultimodalCache(config=CacheConfig.from_mapping({"hot": hot, "host": host}))


def _disk_cache(store: Path) -> TieredMultimodalCache:
    sections = {
        "namespace": NAMESPACE,
        "hot": {"max_size": _HOT_ENTRIES * ENTRY_BYTES},
        "disk": {"path": str(store), "max_size": "1TiB", "write_buffer": "16MiB"},
    }
    return TieredMultimodalCache(config=CacheConfig.from_mapping(sections, check_machine=False))


def _fill(cache: TieredMultimodalCache, numbers: range) -> None:
    for number in numbers:
        embedding = torch.frombuffer(bytearray(populate.payload(number)), dtype=torch.uint8)
        cache.set(number, EmbeddingResult(embedding=embedding))


def _look_ups(cache: TieredMultimodalCache, among: int, chance: random.Random) -> list[float]:
    return _timed(cache, chance.sample(range(among), _LOOK_UPS))


def _timed(cache: TieredMultimodalCache, keys: list[int] | range) -> list[float]:
    """Seconds of one look-up, on the average of each hundred; all must be answered, and rightly."""
    gc.collect()
    times_s = []
    for start in range(0, len(keys), _LOOK_UPS_TOGETHER):
        together = keys[start : start + _LOOK_UPS_TOGETHER]
        began_s = time.perf_counter()
        for key in together:
            found = cache.get_single(key)
            if found is None:
                raise RuntimeError(f"entry {key} was not found: {cache.stats()}")
        times_s.append((time.perf_counter() - began_s) / len(together))
        assert found is not None
        if bytes(found.embedding.tolist()) != populate.payload(together[-1]):
            raise RuntimeError(f"entry {together[-1]} is not what was stored")
    return times_s


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times_s) for name, times_s in seconds.items()}


def _own_memory_bytes() -> int:
    """Memory of this process alone: neither the arena, which is shared, nor files."""
    gc.collect()
    for line in Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


if __name__ == "__main__":
    print(json.dumps(serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
