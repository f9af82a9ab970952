"""Looking into a store: checking every byte of it, listing all entries, starting the command.

Owns: what these are compared with. Does not own: what the commands do.

Checking computes a digest of every byte and reads each through LMDB's map. It can be no faster
than the digest of the same bytes in memory, nor than reading the file, the page cache warm; the
slower of the two is the reference.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash

from mmcache_tools.bench.pairing import Row, limit_row, speed_row, timed_in_turn
from mmcache_tools.bench.populate import populate
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.audit import Audit
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.record import CHUNK_BYTES

_ENTRY_BYTES = 8 * 2**20
_BLOCK_BYTES = 2**20
_LEAST_LISTING_S = 1.0
_LISTING_S_AN_ENTRY = 10e-6  # a million in ten seconds
_START_S = 0.3


def measure(rounds: int, entries: int = 64) -> list[Row]:
    """Checking a store of 8 MB entries, beside the digest and the file."""
    check = "verify, 8 MB entries, warm"
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        populate(store, entries, 2 * entries * _ENTRY_BYTES + 2**26, entry_bytes=_ENTRY_BYTES)
        payload = memoryview(os.urandom(_ENTRY_BYTES))
        block = memoryview(bytearray(_BLOCK_BYTES))
        medians_s = timed_in_turn(
            {
                check: lambda _: _check(store),
                "its digests alone": lambda _: _digest(payload, times=entries),
                "reading its file": lambda _: _read(store / layout.DATA_FILE, block),
            },
            rounds=rounds,
            warm_up=1,
        )
    slower = max((name for name in medians_s if name != check), key=medians_s.__getitem__)
    return [speed_row(check, slower, medians_s, wanted=0.8)]


def measure_commands(store: Path, entries: int) -> list[Row]:
    """Rows of the command as a person starts it, on a store of so many entries."""
    limit_s = max(_LEAST_LISTING_S, entries * _LISTING_S_AN_ENTRY)
    return [
        limit_row(f"mmcache ls of {entries:,}", _run_s("ls", str(store)), limit_s),
        limit_row("mmcache --help", _run_s("--help"), _START_S),
        limit_row("mmcache ls --limit 20", _run_s("ls", str(store), "--limit", "20"), _START_S),
    ]


def _check(store: Path) -> None:
    with StoreReader.open(store, readahead=True) as reader:
        if next(Audit(reader).findings(), None) is not None:
            raise RuntimeError("the store that was just made is damaged")


def _digest(payload: memoryview, *, times: int) -> None:
    for start in times * [*range(0, len(payload), CHUNK_BYTES)]:
        xxhash.xxh3_64_digest(payload[start : start + CHUNK_BYTES])


def _read(file: Path, block: memoryview) -> None:
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(block):
            pass


def _run_s(*arguments: str) -> float:
    """Seconds until the command has ended; the median of three."""
    command = [sys.executable, "-m", "mmcache_tools", *arguments]
    times_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)
