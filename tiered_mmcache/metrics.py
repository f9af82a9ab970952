"""Counters of what happened and why, and the one place where a fault becomes a log line.

Owns: the counters, their names, and snapshots of them.
Does not own: sizes and fills, which are read from the tiers when a snapshot is taken. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tiered_mmcache")

_QUIET_S = 60.0


@dataclasses.dataclass(slots=True)
class Counters:
    """Events since the cache was made.

    Attributes:
        hot_hits: Look-ups answered by the hot tier.
        host_hits: Look-ups answered from host memory, entries being written to disk included.
        disk_hits: Look-ups answered from the store.
        misses: Look-ups answered with None, by reason.
        demotions: Entries copied from the device to host memory.
        clean_evictions: Entries that left the hot tier with a copy below: no bytes moved.
        demote_waits: Answers of the worker that a call waited for, to have room for a victim.
        promotions: Entries copied back to the device.
        spills: Entries committed to the store.
        drops: Entries that left every tier of this process for want of something, by reason.
        memory_only: Entries that may not be written to disk, by reason.
        faults: Failures that were served as a miss or a drop, by cause.
        encoder_runs: Calls of an encoder by ``get_or_encode``.
        encoder_failures: Those among them that raised, or did not return what they should.
        encoded_items: Results that encoders returned.
        saved_below_s: Seconds that encoding took what the tiers below the hot one served instead.
        saved_hot_s: The same of what the hot tier served through ``get_or_encode``.
        single_flight_waits: Entries for which a caller waited while another encoded them.
        single_flight_timeouts: Those among them for which it waited in vain.
        prefetches: ``asked`` is how many entries ``prefetch`` had to fetch; what became of them:
            ``used`` by a look-up; ``wasted``, when they were evicted, freed or superseded or
            stayed unused for long; ``absent``; ``failed``; ``refused`` for want of room.
    """

    hot_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: Counter[str] = dataclasses.field(default_factory=Counter)
    demotions: int = 0
    clean_evictions: int = 0
    demote_waits: int = 0
    promotions: int = 0
    spills: int = 0
    drops: Counter[str] = dataclasses.field(default_factory=Counter)
    memory_only: Counter[str] = dataclasses.field(default_factory=Counter)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    encoder_runs: int = 0
    encoder_failures: int = 0
    encoded_items: int = 0
    saved_below_s: float = 0.0
    saved_hot_s: float = 0.0
    single_flight_waits: int = 0
    single_flight_timeouts: int = 0
    prefetches: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot: one dictionary for each tier, and what concerns no single tier.

    ``group`` is empty but on a rank among several (:mod:`tiered_mmcache.agreement`).
    """

    hot: dict[str, Any]
    host: dict[str, Any]
    disk: dict[str, Any]
    misses: int
    misses_by_reason: dict[str, int]
    drops: dict[str, int]
    memory_only: dict[str, int]
    faults: dict[str, int]
    encoding: dict[str, Any]
    prefetches: dict[str, int]
    group: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as plain dictionaries, ready for JSON."""
        return dataclasses.asdict(self)


class FaultLog:
    """Counts every fault and logs one line for each cause and minute.

    Args:
        counters: Where faults are counted.
        clock: Monotonic seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._quiet_until: dict[str, float] = {}

    def report(self, cause: str, problem: str) -> None:
        """Count a fault; log it unless the same cause was logged within the last minute."""
        self._counters.faults[cause] += 1
        now = self._clock()
        if now >= self._quiet_until.get(cause, now):
            self._quiet_until[cause] = now + _QUIET_S
            total = self._counters.faults[cause]
            log.warning("fault %s (%d so far), served as a miss: %s", cause, total, problem)


class OncePerMinute(logging.Filter):
    """Lets a line pass unless one of the same kind passed within the last minute.

    For a process that has no counters to report to. Lines are of one kind when they are made from
    the same text with other arguments.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._quiet_until: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        now = self._clock()
        if now < self._quiet_until.get(str(record.msg), now):
            return False
        self._quiet_until[str(record.msg)] = now + _QUIET_S
        return True
