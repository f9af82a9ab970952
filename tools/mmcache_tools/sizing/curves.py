"""What tiers of many sizes make of a sampled trace.

Owns: which sizes are tried, and the hit ratio, the saved seconds and the error of each.
Does not own: the distances, the rules of tiers, the sample, or what is recommended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mmcache_tools.sizing.distances import COLD, StackDistances
from mmcache_tools.sizing.replay import Entries, Found, HotTier, LowerTiers
from mmcache_tools.sizing.sampling import GROUPS, Sample

__all__ = [
    "Point",
    "Sizes",
    "footprint_bytes",
    "hot_curve",
    "knee_of",
    "lower_curve",
    "mean_cost_s",
    "round_sizes",
    "sizes_to_try",
]

_SMALLEST_PART = 1024  # of the footprint: smaller tiers are not looked at
_LEAST_BYTES = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of each tier; 0 is none."""

    hot: int
    host: int = 0
    disk: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What tiers of some sizes make of the trace.

    Attributes:
        sizes: Those sizes.
        hot, host, disk: The share of requests that each tier answers.
        saved_s: Seconds of encoding that all hits save; None when no cost is known.
        error: How far off the hit ratio may be, as one standard deviation; 0.0 unless sampled.
    """

    sizes: Sizes
    hot: float
    host: float = 0.0
    disk: float = 0.0
    saved_s: float | None = None
    error: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """The share of requests that any tier answers."""
        return self.hot + self.host + self.disk


class _Tally:
    """Hits by tier and group, and what they save."""

    def __init__(self, sample: Sample, mean_cost_s: float) -> None:
        self._sample = sample
        self._mean_cost_s = mean_cost_s
        self.hits = [[0] * GROUPS for _ in (Found.HOT, Found.HOST, Found.DISK)]
        self.saved_s = 0.0

    def point(self, sizes: Sizes, requests: Sequence[int]) -> Point:
        """What the hits come to, among so many requests of each group.

        The sample has more or fewer requests than its share, most of all by keys that are asked
        for very often; these are hits in any tier, so the difference is counted as such.
        """
        rate = self._sample.rate
        expected = max(1.0, self._sample.sized_requests * rate)
        more = expected - sum(requests)
        saved_s = max(0.0, self.saved_s + more * self._mean_cost_s) / rate
        ratios = [sum(hits) / expected for hits in self.hits]
        ratios[0] += more / expected
        every = [sum(hits[group] for hits in self.hits) for group in range(GROUPS)]
        of_groups = 1.0 - (np.array(requests) - np.array(every)) * GROUPS / expected
        error = float(np.std(of_groups, ddof=1)) * math.sqrt((1.0 - rate) / GROUPS)
        return Point(
            sizes=sizes,
            hot=min(1.0, max(0.0, ratios[0])),
            host=ratios[1],
            disk=ratios[2],
            saved_s=saved_s if self._mean_cost_s else None,
            error=error,
        )


def mean_cost_s(sample: Sample, costs_s: NDArray[np.float64]) -> float:
    """Seconds that encoding takes for a request without a cache; 0.0 when no cost is known."""
    return sum(float(costs_s[keys].sum()) for keys in sample.blocks()) / max(1, sample.taken)


def round_sizes(least_bytes: float, most_bytes: float) -> list[int]:
    """Powers of two and what lies between them, up to the first that is no less than the most."""
    sizes: list[int] = []
    size = _LEAST_BYTES
    while not sizes or sizes[-1] < most_bytes:
        for part in (size, size + size // 2):
            if part >= least_bytes and (not sizes or sizes[-1] < most_bytes):
                sizes.append(part)
        size *= 2
    return sizes


def sizes_to_try(sample: Sample) -> list[int]:
    """From a thousandth of the trace's footprint to all of it."""
    footprint = footprint_bytes(sample)
    smallest = int(sample.sizes[sample.sizes > 0].min(initial=_LEAST_BYTES))
    return round_sizes(max(footprint / _SMALLEST_PART, smallest), footprint)


def footprint_bytes(sample: Sample) -> float:
    """The bytes of all keys together."""
    return float(sample.sizes.sum()) / sample.rate


def hot_curve(sample: Sample, sizes: Sequence[int], costs_s: NDArray[np.float64]) -> list[Point]:
    """What a hot tier alone makes of the trace, for each size, by stack distances."""
    mean_s = mean_cost_s(sample, costs_s)
    largest = int(sample.sizes.max(initial=0))
    small = {size: StackDistances(sample.sizes) for size in sizes if size < largest}
    every = StackDistances(sample.sizes)
    tallies = {size: _Tally(sample, mean_s) for size in sizes}
    requests = np.zeros(GROUPS, np.int64)
    for keys in sample.blocks():
        requests += np.bincount(sample.groups[keys], minlength=GROUPS)
        distances = _scaled(every.of(keys), sample.sizes[keys], sample.rate)
        for size, tally in tallies.items():
            if size in small:
                fitting = keys[sample.sizes[keys] <= size]
                found = _scaled(small[size].of(fitting), sample.sizes[fitting], sample.rate)
                hits = fitting[(found >= 0) & (found <= size)]
            else:
                hits = keys[(distances >= 0) & (distances <= size)]
            for group, count in enumerate(np.bincount(sample.groups[hits], minlength=GROUPS)):
                tally.hits[Found.HOT][group] += int(count)
            tally.saved_s += float(costs_s[hits].sum())
    counts = requests.tolist()
    return [tally.point(Sizes(hot=size), counts) for size, tally in tallies.items()]


def _scaled(
    distances: NDArray[np.int64], own: NDArray[np.int64], rate: float
) -> NDArray[np.float64]:
    """Distances in the whole trace: the others between two uses stand for more than themselves."""
    return np.where(distances == COLD, -1.0, (distances - own) / rate + own)


def lower_curve(
    sample: Sample, hot_bytes: int, below: Iterable[Sizes], costs_s: NDArray[np.float64]
) -> list[Point]:
    """What tiers below a hot tier of one size make of the trace, for each pair of their sizes."""
    mean_s = mean_cost_s(sample, costs_s)
    entries = Entries.of(sample.sizes.tolist())
    hot = HotTier(entries, int(hot_bytes * sample.rate), hot_bytes)
    groups = sample.groups.tolist()
    costs = costs_s.tolist()
    played = []
    for sizes in below:
        tiers = LowerTiers(entries, sizes.host, sizes.disk, scale=sample.rate)
        played.append((sizes, tiers, _Tally(sample, mean_s)))
    requests = np.zeros(GROUPS, np.int64)
    missed = [0] * GROUPS
    all_s = missed_s = 0.0
    for keys in sample.blocks():
        requests += np.bincount(sample.groups[keys], minlength=GROUPS)
        all_s += float(costs_s[keys].sum())
        for key, admitted, victims in hot.misses(keys.tolist()):
            missed[groups[key]] += 1
            missed_s += costs[key]
            for _, tiers, tally in played:
                found = tiers.request(key, admitted=admitted, victims=victims)
                if found is not Found.MISS:
                    tally.hits[found][groups[key]] += 1
                    tally.saved_s += costs[key]
    counts = requests.tolist()
    points = []
    for sizes, _, tally in played:
        tally.hits[Found.HOT] = [count - miss for count, miss in zip(counts, missed, strict=True)]
        tally.saved_s += all_s - missed_s
        points.append(tally.point(sizes, counts))
    return points


def knee_of(points: Sequence[Point]) -> Point | None:
    """Where more bytes begin to gain less: farthest above the line from nothing to all.

    None when no size gains anything.
    """
    most_bytes = max(point.sizes.hot for point in points)
    most = max(point.hit_ratio for point in points)
    if most <= 0:
        return None
    return max(points, key=lambda each: each.hit_ratio / most - each.sizes.hot / most_bytes)
