"""Spilling beside a busy Python loop, as a server's scheduler is, and a thread in its place.

Owns: the loop, the rates with and without it, and the reference: the same writes made by a thread.
Does not own: the store's own speed (:mod:`.spilling`).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mmcache_tools.bench.moves import ENTRY_BYTES
from mmcache_tools.bench.pairing import Row, p99, speed_row, time_row
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.disk.changes import PutEntry
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.record import CHUNK_BYTES
from tiered_mmcache.host.transfer import header_of

_ENTRIES_KEPT = 48
_BUFFERED_ENTRIES = 32
_STEP_TURNS = 8_000  # about half a millisecond
_STEPS_BETWEEN_CALLS = 16  # the cache is called every 8 ms or so, as between a scheduler's batches


@dataclasses.dataclass(slots=True)
class _Phase:
    """What one situation gave, all its turns together."""

    steps_s: list[float] = dataclasses.field(default_factory=list)
    seconds_an_entry: list[float] = dataclasses.field(default_factory=list)


def measure(rounds: int, phase_s: float) -> list[Row]:
    """The loop alone, spilling alone, both together; then threads that write in its place.

    One thread commits entry by entry, another chunk by chunk. Both are handed the interpreter's
    lock only when the loop has held it for its whole interval.

    Args:
        rounds: How often each has its turn.
        phase_s: How long a turn takes.
    """
    payload = torch.randint(0, 256, (ENTRY_BYTES,), dtype=torch.uint8)
    loop, alone, beside = _Phase(), _Phase(), _Phase()
    with tempfile.TemporaryDirectory() as folder, _cache(Path(folder)) as cache:
        feeder = _Feeder(cache, payload)
        threads = {
            "entry": _WritingThread(Path(folder, "entry"), payload, a_commit_bytes=ENTRY_BYTES),
            "chunk": _WritingThread(Path(folder, "chunk"), payload, a_commit_bytes=CHUNK_BYTES),
        }
        for _ in range(rounds):
            _run_loop(loop, phase_s)
            with feeder.counted(alone):
                _wait(phase_s, feeder.feed)
            with feeder.counted(beside):
                _run_loop(beside, phase_s, feeder.feed)
            cache.drain()
            for thread in threads.values():
                with thread.counted(thread.alone):
                    _wait(phase_s)
                with thread.counted(thread.beside):
                    _run_loop(thread.beside, phase_s)
        for thread in threads.values():
            thread.close()
    rows = _rows("spilling", loop, alone, beside, most_step=1.5, least_rate=0.8)
    for unit, thread in threads.items():
        rows += _rows(f"a thread committing each {unit}", loop, thread.alone, thread.beside)
    return rows


def _rows(
    what: str,
    loop: _Phase,
    alone: _Phase,
    beside: _Phase,
    *,
    most_step: float | None = None,
    least_rate: float | None = None,
) -> list[Row]:
    step, step_alone = f"step of a busy loop beside {what}, p99", "its step alone, p99"
    steps_s = {step: p99(beside.steps_s), step_alone: p99(loop.steps_s)}
    rate, rate_alone = f"{what} beside a busy loop", "the same without the loop"
    entries_s = {
        rate: statistics.median(beside.seconds_an_entry),
        rate_alone: statistics.median(alone.seconds_an_entry),
    }
    return [
        time_row(step, step_alone, steps_s, wanted=most_step),
        speed_row(rate, rate_alone, entries_s, wanted=least_rate),
    ]


def _step() -> int:
    value = 0
    for turn in range(_STEP_TURNS):
        value = (value * 31 + turn) & 0xFFFF
    return value


def _run_loop(phase: _Phase, seconds: float, between: Callable[[], object] | None = None) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for _ in range(_STEPS_BETWEEN_CALLS):
            began_s = time.perf_counter()
            _step()
            phase.steps_s.append(time.perf_counter() - began_s)
        if between is not None:
            between()


def _wait(seconds: float, between: Callable[[], object] = lambda: None) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        between()
        time.sleep(0.001)


class _Counted:
    """Counts what is written inside ``with``, once it runs at its full rate."""

    def __init__(self, phase: _Phase, written: Callable[[], float]) -> None:
        self._phase = phase
        self._written = written

    def __enter__(self) -> None:
        self._before = self._written()
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        passed_s = time.perf_counter() - self._began_s
        entries = self._written() - self._before
        self._phase.seconds_an_entry.append(passed_s / max(entries, 1e-3))


class _Feeder:
    """Keeps the write buffer of a cache full."""

    def __init__(self, cache: TieredMultimodalCache, payload: torch.Tensor) -> None:
        self._cache = cache
        self._result = EmbeddingResult(embedding=payload)
        self._number = 0

    def feed(self) -> None:
        host = self._cache.stats().host
        room = host["write_buffer_budget_bytes"] - host["write_buffer_bytes"]
        for _ in range(max(1, room // ENTRY_BYTES)):  # one at least: a call is what makes progress
            if room < ENTRY_BYTES:
                self._cache.has("nothing")
                return
            self._number += 1
            self._cache.set(self._number, self._result)

    def counted(self, phase: _Phase) -> _Counted:
        self.feed()
        return _Counted(phase, lambda: int(self._cache.stats().disk["spills"]))


class _WritingThread:
    """Writes the same bytes by the same code, the store's own, on a thread of this process."""

    def __init__(self, folder: Path, payload: torch.Tensor, *, a_commit_bytes: int) -> None:
        budget_bytes = (_ENTRIES_KEPT + 1) * ENTRY_BYTES
        settings = OpenSettings(
            path=folder,
            budget_bytes=budget_bytes,
            largest_entry_bytes=ENTRY_BYTES,
            synchronous=False,
        )
        self._opened = open_for_writing(settings)
        self._store = Store(self._opened.environment, budget_bytes=budget_bytes)
        part = payload[:a_commit_bytes]
        self._share_of_entry = a_commit_bytes / ENTRY_BYTES
        self._payload = memoryview(part.numpy().tobytes())
        self._header = header_of(part, class_tag="EmbeddingResult", extras=b"", cost_s=0.0)
        self.alone = _Phase()
        self.beside = _Phase()
        self._writes = threading.Event()
        self._ends = False
        self._number = 0
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def counted(self, phase: _Phase) -> _ThreadCounted:
        return _ThreadCounted(phase, lambda: self._number * self._share_of_entry, self._writes)

    def close(self) -> None:
        self._ends = True
        self._writes.set()
        self._thread.join()
        self._opened.close()

    def _write(self) -> None:
        while self._writes.wait() and not self._ends:
            key = self._number.to_bytes(16, "big")
            change = PutEntry(
                store_key=key,
                full_key=key,
                namespace="bench",
                generation=bytes(16),
                header=self._header,
                parts=[self._payload],
            )
            self._store.apply([change])
            self._number += 1


class _ThreadCounted(_Counted):
    def __init__(
        self, phase: _Phase, written: Callable[[], float], writes: threading.Event
    ) -> None:
        super().__init__(phase, written)
        self._writes = writes

    def __enter__(self) -> None:
        self._writes.set()
        super().__enter__()

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self._writes.clear()


def _cache(folder: Path) -> TieredMultimodalCache:
    sections = {
        "namespace": "bench",
        "hot": {"max_size": ENTRY_BYTES},
        "disk": {
            "path": str(folder / "store"),
            "max_size": (_ENTRIES_KEPT + 1) * ENTRY_BYTES,
            "write_buffer": _BUFFERED_ENTRIES * ENTRY_BYTES,
            "write": "through",
            "durability": "relaxed",
        },
    }
    return TieredMultimodalCache(config=CacheConfig.from_mapping(sections))
