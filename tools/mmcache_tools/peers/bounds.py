"""The bounds that the project sets itself beside the others.

Owns: which ratios, and how large. Does not own: the figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

OURS, STATIC = "ours", "sglang"
MOST_HOT_HIT = 1.2
LEAST_SAVED = 3.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One ratio and what is wanted of it.

    Attributes:
        name: What is compared.
        ratio: Ours as a multiple of the other's; infinite when the other has nothing.
        wanted: The bound.
        better: ``lower`` or ``higher``.
        holds: Whether it is met.
    """

    name: str
    ratio: float
    wanted: float
    better: str
    holds: bool


def of(result: dict[str, Any]) -> list[Bound]:
    """The bounds that this run's figures speak of."""
    return [*_hot_hits(result), *_savings(result)]


def _hot_hits(result: dict[str, Any]) -> Iterator[Bound]:
    for size, operations in result["micro"]["figures"].items():
        hits = operations.get("hot hit", {})
        if OURS in hits and STATIC in hits:
            ratio = hits[OURS]["median"] / hits[STATIC]["median"]
            yield Bound(
                name=f"hot hit, {int(size) / 1e6:g} MB, beside the static cache",
                ratio=ratio,
                wanted=MOST_HOT_HIT,
                better="lower",
                holds=ratio <= MOST_HOT_HIT,
            )


def _savings(result: dict[str, Any]) -> Iterator[Bound]:
    for workload, figures in result["replay"]["figures"].items():
        systems = figures["systems"]
        for half in ("first", "restarted"):
            if OURS not in systems:
                continue
            saved = {name: halves[half]["saved_s"] for name, halves in systems.items()}
            own = saved[OURS]
            when = " after a restart" if half == "restarted" else ""
            if STATIC in saved:
                ratio = _ratio(own, saved[STATIC])
                yield Bound(
                    name=f"encoder seconds saved, {workload}{when}, beside the static cache",
                    ratio=ratio,
                    wanted=LEAST_SAVED,
                    better="higher",
                    holds=ratio >= LEAST_SAVED,
                )
            others = [each for name, each in saved.items() if not name.startswith(OURS)]
            if others:
                ratio = _ratio(own, max(others))
                yield Bound(
                    name=f"encoder seconds saved, {workload}{when}, beside the best other",
                    ratio=ratio,
                    wanted=1.0,
                    better="higher",
                    holds=ratio > 1.0,
                )


def _ratio(own: float, other: float) -> float:
    return own / other if other else math.inf
