"""How long an encoder ran, and what each entry cost that it made.

Owns: measuring a run without waiting for the device, its division among the entries, and the
costs of the entries that are in the hot tier now.
Does not own: when an encoder runs (:mod:`.get_or_encode`), or the cost of an entry below the hot
tier, which stands in its header (:mod:`tiered_mmcache.entries.record`).

The time of a run whose results are on an accelerator is the time between two marks on the
caller's stream. It is known once the device has passed the second one, and is looked up then,
when somebody wants it: nobody waits for the device. Until then the cost is 0.0, as for an entry
whose cost nobody measured.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.encoding.stream_marks import device_in_use, has_passed, mark

_MOST_UNFINISHED = 1024


class RunTime(Protocol):
    """The duration of one run."""

    def seconds(self) -> float | None:
        """The duration; None while it is not known yet. Never waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostTime:
    """A duration that the clock of the host gave."""

    duration_s: float

    def seconds(self) -> float:
        """See :class:`RunTime`."""
        return self.duration_s


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownTime:
    """A run of the device that could not be measured: it captured a graph, or was the first."""

    def seconds(self) -> float:
        """See :class:`RunTime`; 0.0 stands for unknown."""
        return 0.0


class DeviceTime:
    """The duration between two marks of one device."""

    def __init__(self, start: torch.Event, end: torch.Event) -> None:
        self._marks: tuple[torch.Event, torch.Event] | None = (start, end)
        self._duration_s = 0.0

    def seconds(self) -> float | None:
        """See :class:`RunTime`."""
        if self._marks is not None:
            start, end = self._marks
            try:
                if not has_passed(end):
                    return None
                self._duration_s = max(0.0, start.elapsed_time(end) / 1000.0)
            except RuntimeError:  # the device is lost: nobody will know
                self._duration_s = 0.0
            self._marks = None
        return self._duration_s


class Stopwatch:
    """Measures one run, from its construction to :meth:`stop`.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._device = device_in_use()
        self._start_mark = mark(self._device, timed=True)
        self._start_s = clock()

    def stop(self, results: Sequence[EmbeddingResult]) -> RunTime:
        """The duration, as the device of the results counts it."""
        elsewhere = {result.embedding.device for result in results} - {torch.device("cpu")}
        if not elsewhere:
            return HostTime(max(0.0, self._clock() - self._start_s))
        if self._start_mark is None or elsewhere != {self._device}:
            return UnknownTime()
        end_mark = mark(self._device, timed=True)  # pragma: gpu
        return (
            UnknownTime() if end_mark is None else DeviceTime(self._start_mark, end_mark)
        )  # pragma: gpu


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """One entry's share of a run.

    Attributes:
        run: The whole run's duration.
        fraction: The entry's part of it.
    """

    run: RunTime
    fraction: float

    @property
    def seconds(self) -> float:
        """Seconds that encoding the entry took; 0.0 when unknown, or not known yet."""
        return (self.run.seconds() or 0.0) * self.fraction


UNKNOWN_COST = Cost(UnknownTime(), 0.0)


def divided(run: RunTime, results: Sequence[EmbeddingResult]) -> list[Cost]:
    """The cost of each result of a run: in proportion to its bytes, as to its tokens."""
    sizes = [result.embedding.element_size() * result.embedding.numel() for result in results]
    total = sum(sizes)
    if total == 0:
        return [Cost(run, 1.0 / len(sizes)) for _ in sizes]
    return [Cost(run, size / total) for size in sizes]


class HotCosts:
    """What the entries in the hot tier cost; those of unknown cost are left out.

    Its keys are keys of the hot tier, so it is as bounded as that. A hot hit does not touch it.
    """

    def __init__(self) -> None:
        self._costs: dict[Hashable, Cost] = {}

    def record(self, key: Hashable, cost: Cost) -> None:
        """Keep the cost of an entry that enters the hot tier."""
        if cost.fraction > 0.0:
            self._costs[key] = cost

    def seconds(self, key: Hashable) -> float:
        """The cost of an entry; 0.0 when unknown."""
        cost = self._costs.get(key)
        return 0.0 if cost is None else cost.seconds

    def forget(self, key: Hashable) -> None:
        """Drop the cost of an entry that leaves the hot tier."""
        self._costs.pop(key, None)

    def clear(self) -> None:
        """Drop all."""
        self._costs.clear()

    def __len__(self) -> int:
        return len(self._costs)


class EncodingTime:
    """The time of all runs together."""

    def __init__(self) -> None:
        self._known_s = 0.0
        self._unfinished: deque[RunTime] = deque()

    def add(self, run: RunTime) -> None:
        """Count a run, now or once its duration is known."""
        self._unfinished.append(run)
        self.seconds()
        if len(self._unfinished) > _MOST_UNFINISHED:
            self._unfinished.popleft()  # a device that stands still: its runs are not counted

    def seconds(self) -> float:
        """The sum of the durations that are known."""
        while self._unfinished:
            duration_s = self._unfinished[0].seconds()
            if duration_s is None:
                break
            self._known_s += duration_s
            self._unfinished.popleft()
        return self._known_s
