"""Export of a cache's metrics to Prometheus; needs the extra ``prometheus``.

Owns: the collector, which reads snapshots when it is asked and keeps no numbers of its own.
Does not own: names and values (:mod:`.metrics.families`), text
(:mod:`.metrics.openmetrics`), or a port: whoever serves the registry has one.

In a server, with its registry::

    from prometheus_client import REGISTRY
    from tiered_mmcache.prometheus import CacheCollector

    REGISTRY.register(CacheCollector(cache))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tiered_mmcache.metrics.counters import CacheStats, HasStats, Histogram
from tiered_mmcache.metrics.families import FAMILIES, Family, Kind


class CacheCollector(Collector):
    """The metrics of the caches of one process.

    Samples carry the label ``namespace``, and ``cache``: the position of the cache in the
    arguments, from 0. A scrape may wait for a call that holds a cache's lock, and never makes one
    wait for more than the reading of some counters.

    Args:
        caches: The caches; each is kept alive.
    """

    def __init__(self, *caches: HasStats) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        """Read every metric of every cache."""
        snapshots = [cache.stats() for cache in self._caches]
        for family in FAMILIES:
            yield _filled(family, snapshots)

    def describe(self) -> Iterator[Metric]:
        """The metrics without values, so that registering reads nothing."""
        for family in FAMILIES:
            yield _filled(family, [])


_METRIC_OF: dict[Kind, Callable[..., Metric]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _filled(family: Family, snapshots: Iterable[CacheStats]) -> Metric:
    labels = ["namespace", "cache", *([family.label] if family.label else [])]
    metric = _METRIC_OF[family.kind](family.name, family.meaning, labels=labels)
    for number, stats in enumerate(snapshots):
        for label, value in family.values(stats).items():
            own = [label] if family.label else []
            _add(metric, [stats.namespace, str(number), *own], value)
    return metric


def _add(metric: Metric, labels: list[str], value: float | Histogram) -> None:
    if isinstance(metric, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        bounds = [*map(str, value.bounds_s), "+Inf"]
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        metric.add_metric(labels, buckets, value.sum_s)
    elif isinstance(metric, (CounterMetricFamily, GaugeMetricFamily)):
        assert not isinstance(value, Histogram)
        metric.add_metric(labels, value)
