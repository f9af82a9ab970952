"""The metrics as text in the OpenMetrics format, quickly and without the extra ``prometheus``.

Owns: that text. Does not own: names and values (:mod:`.families`). Imports no torch.

A cache's caller waits while its file of metrics is made (:mod:`.file`), and
``prometheus_client`` takes several times as long; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from tiered_mmcache.metrics.counters import CacheStats, HasStats, Histogram
from tiered_mmcache.metrics.families import FAMILIES, Family


def openmetrics_text(*caches: HasStats) -> bytes:
    """The metrics of some caches, with the labels of :mod:`tiered_mmcache.prometheus`."""
    snapshots = [cache.stats() for cache in caches]
    lines: list[str] = []
    for family in FAMILIES:
        lines.append(f"# HELP {family.name} {family.meaning}")
        lines.append(f"# TYPE {family.name} {family.kind.value}")
        for number, stats in enumerate(snapshots):
            lines += _samples(family, number, stats)
    lines.append("# EOF\n")
    return "\n".join(lines).encode()


def _samples(family: Family, number: int, stats: CacheStats) -> Iterator[str]:
    common = f'namespace="{_escaped(stats.namespace)}",cache="{number}"'
    for label, value in family.values(stats).items():
        labels = f'{common},{family.label}="{_escaped(label)}"' if family.label else common
        if isinstance(value, Histogram):
            yield from _histogram(family.name, labels, value)
        else:
            yield f"{family.exported_name}{{{labels}}} {float(value)}"


def _histogram(name: str, labels: str, value: Histogram) -> Iterator[str]:
    bounds = [*map(str, value.bounds_s), "+Inf"]
    total = 0
    for bound, total in zip(bounds, accumulate(value.counts), strict=True):
        yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
    yield f"{name}_count{{{labels}}} {float(total)}"
    yield f"{name}_sum{{{labels}}} {value.sum_s}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
