"""Counters of what happened and why, and the one place where a fault becomes a log line.

Owns: the counters, their names, and snapshots of them.
Does not own: sizes and fills, which are read from the tiers when a snapshot is taken, or what the
counters are called elsewhere (:mod:`.families`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from tiered_mmcache.metrics.remedies import log_fields, remedy_of

log = logging.getLogger("tiered_mmcache")

_QUIET_S = 60.0


# Half a decade apart, from a small entry in host memory to a disk that hangs.
GET_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclasses.dataclass(slots=True)
class Histogram:
    """How often durations fell between fixed bounds.

    Attributes:
        bounds_s: The upper bounds, inclusive, in ascending order; beyond the last is one more.
        counts: How many fell up to each bound and above the one before, and beyond the last.
        sum_s: All durations together.
    """

    bounds_s: tuple[float, ...] = GET_BOUNDS_S
    counts: list[int] = dataclasses.field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, duration_s)] += 1
        self.sum_s += duration_s


def _no_look_ups() -> dict[str, Histogram]:
    return {"host": Histogram(), "disk": Histogram(), "miss": Histogram()}


@dataclasses.dataclass(slots=True)
class Counters:
    """Events since the cache was made.

    Attributes:
        hot_hits: Look-ups answered by the hot tier.
        host_hits: Look-ups answered from host memory, entries being written to disk included.
        disk_hits: Look-ups answered from the store.
        misses: Look-ups answered with None, by reason.
        absences: The misses ``absent``, by what became of the entry as far as is remembered.
        look_up: What the last look-up below the hot tier came to: ``host``, ``disk`` or the
            reason of a miss; empty before it is known.
        look_ups: How long look-ups below the hot tier took, by ``host``, ``disk`` and ``miss``.
        admissions: Entries that ``set`` took into a tier anew.
        refusals: Entries that it did not take, by reason.
        clean_ahead: ``copied`` is how many hot entries were copied down before they had to go;
            what came of it: ``used`` when they were evicted; ``wasted``, when they were freed
            before, or the copy was gone by then.
        moved_bytes: Bytes of embeddings moved, by way.
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
    absences: Counter[str] = dataclasses.field(default_factory=Counter)
    look_up: str = ""
    look_ups: dict[str, Histogram] = dataclasses.field(default_factory=_no_look_ups)
    admissions: int = 0
    refusals: Counter[str] = dataclasses.field(default_factory=Counter)
    clean_ahead: Counter[str] = dataclasses.field(default_factory=Counter)
    moved_bytes: Counter[str] = dataclasses.field(default_factory=Counter)
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

    def count_miss(self, reason: str) -> None:
        """Count a look-up that is answered with None."""
        self.misses[reason] += 1
        self.look_up = reason

    def count_host_hit(self) -> None:
        """Count a look-up that is answered from host memory."""
        self.host_hits += 1
        self.look_up = "host"

    def count_disk_hit(self) -> None:
        """Count a look-up that is answered from the store."""
        self.disk_hits += 1
        self.look_up = "disk"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot: one dictionary for each tier, and what concerns no single tier.

    ``group`` is empty but on a rank among several (:mod:`tiered_mmcache.ranks.agreement`).
    ``absences`` divides the misses ``absent`` by what became of the entries; ``look_ups`` has the
    histogram of how long look-ups below the hot tier took, by what they came to.
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
    absences: dict[str, int] = dataclasses.field(default_factory=dict)
    admissions: int = 0
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)
    clean_ahead: dict[str, int] = dataclasses.field(default_factory=dict)
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    look_ups: dict[str, Histogram] = dataclasses.field(default_factory=dict)
    namespace: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The snapshot as plain dictionaries, ready for JSON."""
        return dataclasses.asdict(self)


class HasStats(Protocol):
    """What is asked for numbers: a :class:`~tiered_mmcache.TieredMultimodalCache`."""

    def stats(self) -> CacheStats:
        """A snapshot."""


class FaultLog:
    """Counts every fault and logs one line for each cause and minute, with the remedy.

    The line's record carries ``mmcache_cause``, ``mmcache_total`` and ``mmcache_remedy``, for
    formatters that write fields.

    Args:
        counters: Where faults are counted.
        clock: Monotonic seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._quiet_until: dict[str, float] = {}

    def report(self, cause: str, problem: str, consequence: str = "served as a miss") -> None:
        """Count a fault; log it unless the same cause was logged within the last minute."""
        self._counters.faults[cause] += 1
        now = self._clock()
        if now >= self._quiet_until.get(cause, now):
            self._quiet_until[cause] = now + _QUIET_S
            total = self._counters.faults[cause]
            remedy = remedy_of(cause)
            fields = {**log_fields(cause), "mmcache_total": total}
            line = "fault %s (%d so far), %s: %s" + (". %s" if remedy else "%s")
            log.warning(line, cause, total, consequence, problem, remedy, extra=fields)


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
