"""Timing several things in turn, so that a change of the machine's speed meets all of them.

Owns: the rounds, medians, percentiles, and their ratios.
Does not own: what is timed.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result.

    Attributes:
        name: What was measured.
        reference: What it is compared with.
        ratio: How it compares; see ``better``.
        wanted: The bound that the project sets itself, or None.
        better: ``higher`` when the ratio is a speed, ``lower`` when it is a time.
        median_s: Median seconds of the thing itself; where ``unit`` says so, bytes.
        reference_s: The same of the reference.
        unit: ``s`` or ``bytes``.
    """

    name: str
    reference: str
    ratio: float
    wanted: float | None
    better: str
    median_s: float
    reference_s: float
    unit: str = "s"

    @property
    def holds(self) -> bool:
        """Whether the bound, if there is one, is met."""
        if self.wanted is None:
            return True
        return self.ratio >= self.wanted if self.better == "higher" else self.ratio <= self.wanted


def times_in_turn(
    contestants: Mapping[str, Callable[[int], object]], *, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Call each contestant once a round and return its seconds, one for each round that counts.

    Args:
        contestants: Each takes the number of the round.
        rounds: How many rounds count.
        warm_up: How many rounds go before them.
    """
    times_s: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            for name, contestant in contestants.items():
                began_s = time.perf_counter()
                contestant(number)
                times_s[name].append(time.perf_counter() - began_s)
    finally:
        gc.enable()
    return {name: times[warm_up:] for name, times in times_s.items()}


def timed_in_turn(
    contestants: Mapping[str, Callable[[int], object]], *, rounds: int, warm_up: int
) -> dict[str, float]:
    """As :func:`times_in_turn`, but the median of each contestant's seconds."""
    times_s = times_in_turn(contestants, rounds=rounds, warm_up=warm_up)
    return {name: statistics.median(times) for name, times in times_s.items()}


def p99(times_s: Sequence[float]) -> float:
    """What 99 of 100 stay within."""
    return sorted(times_s)[(len(times_s) * 99 - 1) // 100]


def usual_p99(times_s: Sequence[float]) -> float:
    """The median of :func:`p99` over spells of 100 in a row.

    A spell in which another program took the processor counts as one of many.
    """
    spells = [times_s[start : start + 100] for start in range(0, len(times_s), 100)]
    return statistics.median(
        map(p99, [spell for spell in spells if len(spell) == 100] or [times_s])
    )


def speed_row(
    name: str, reference: str, medians_s: Mapping[str, float], wanted: float | None = None
) -> Row:
    """How fast ``name`` is as a share of the reference's speed."""
    own_s, reference_s = medians_s[name], medians_s[reference]
    return Row(
        name=name,
        reference=reference,
        ratio=reference_s / own_s,
        wanted=wanted,
        better="higher",
        median_s=own_s,
        reference_s=reference_s,
    )


def time_row(
    name: str, reference: str, medians_s: Mapping[str, float], wanted: float | None = None
) -> Row:
    """How long ``name`` takes as a multiple of the reference's time."""
    own_s, reference_s = medians_s[name], medians_s[reference]
    return Row(
        name=name,
        reference=reference,
        ratio=own_s / reference_s,
        wanted=wanted,
        better="lower",
        median_s=own_s,
        reference_s=reference_s,
    )


def limit_row(name: str, value: float, limit: float, *, unit: str = "s") -> Row:
    """How much of a limit something takes that is no multiple of anything else."""
    return Row(
        name=name,
        reference="its limit",
        ratio=value / limit,
        wanted=1.0,
        better="lower",
        median_s=value,
        reference_s=limit,
        unit=unit,
    )
