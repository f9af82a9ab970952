"""The bounds that the project sets itself beside the others.

Owns: which ratios, and how large. Does not own: the figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

OURS, RELAXED, STATIC = "ours", "ours-relaxed", "sglang"
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
        holds: Whether it is met, or not asked for.
        is_asked: False where not even a cache without bounds could meet it; ``wanted`` is then what
            that one would reach.
    """

    name: str
    ratio: float
    wanted: float
    better: str
    holds: bool
    is_asked: bool = True


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
    """Of the whole replay, with its restart in the middle, and of what came after that."""
    parts = {"": ("first", "restarted"), ", after the restart": ("restarted",)}
    for workload, figures in result["replay"]["figures"].items():
        for when, halves in parts.items():
            saved = {
                name: sum(gave[half]["saved_s"] for half in halves)
                for name, gave in figures["systems"].items()
            }
            possible_s = sum(figures["unlimited_s"][half] for half in halves)
            own = saved.pop(OURS, None)
            if own is None or not saved:
                continue
            what = f"encoder seconds saved, {workload}{when}"
            if STATIC in saved:
                ratio = _ratio(own, saved[STATIC])
                possible = _ratio(possible_s, saved[STATIC])
                is_asked = possible >= LEAST_SAVED
                yield Bound(
                    name=f"{what}, beside the static cache",
                    ratio=ratio,
                    wanted=LEAST_SAVED if is_asked else possible,
                    better="higher",
                    holds=ratio >= LEAST_SAVED or not is_asked,
                    is_asked=is_asked,
                )
            best = max(saved, key=saved.__getitem__)
            ratio = _ratio(own, saved[best])
            yield Bound(
                name=f"{what}, beside the best other ({best})",
                ratio=ratio,
                wanted=1.0,
                better="higher",
                holds=ratio > 1.0,
            )


def _ratio(own: float, other: float) -> float:
    return own / other if other else math.inf
