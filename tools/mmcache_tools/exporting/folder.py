"""The files of metrics in a folder, merged into what one process would export.

Owns: which files count, and the labels that tell processes apart.
Does not own: who writes them (:mod:`tiered_mmcache.metrics.file`), or how they are served
(:mod:`.command`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_NAME = re.compile(r"mmcache-(?P<process>\d+)-(?P<cache>\d+)\.prom")
_CLOCK_SLACK_S = 2.0  # between the time of a file and that of a process's start


@dataclasses.dataclass(frozen=True, slots=True)
class MetricsFolder(Collector):
    """The metrics of the processes that keep files in a folder and are alive.

    Samples carry the label ``process``, its number, beside those that each process gives them;
    ``cache`` is the number of the cache in its process. ``mmcache_metrics_files`` counts the files
    by what became of them: ``read``, ``left`` by a process that is gone, ``unreadable``.

    Args:
        path: The folder, as ``metrics.folder`` names it.
    """

    path: Path

    def collect(self) -> Iterator[Metric]:
        """Read every file anew.

        Raises:
            OSError: There is no such folder, or it cannot be read.
        """
        merged: dict[str, Metric] = {}
        states = {"read": 0, "left": 0, "unreadable": 0}
        for file in sorted(self.path.iterdir()):
            name = _NAME.fullmatch(file.name)
            if name is None:
                continue
            try:
                families = _families(file, name)
            except Exception:  # noqa: BLE001 - the parser raises whatever the text makes it
                states["unreadable"] += 1
                continue
            states["left" if families is None else "read"] += 1
            for family in families or ():
                merged.setdefault(family.name, _empty(family)).samples += family.samples
        yield from merged.values()
        files = GaugeMetricFamily(
            "mmcache_metrics_files", "Files of metrics, by what became of them.", labels=["state"]
        )
        for state, count in states.items():
            files.add_metric([state], count)
        yield files

    def describe(self) -> list[Metric]:
        """Nothing: what there is follows from the files."""
        return []


def _families(file: Path, name: re.Match[str]) -> list[Metric] | None:
    """The metrics of one file, relabelled; None when its process is gone."""
    try:
        written_s = file.stat().st_mtime
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:  # closed just now
        return None
    if not _is_alive(int(name["process"]), written_s):
        return None
    families = list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    labels = {"process": name["process"], "cache": name["cache"]}
    for family in families:
        family.samples = [
            sample._replace(labels={**sample.labels, **labels}) for sample in family.samples
        ]
    return families


def _is_alive(process: int, written_s: float) -> bool:
    """Whether the process that wrote a file then still runs; its number may have a new owner."""
    try:
        return psutil.Process(process).create_time() <= written_s + _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it is there
        return True


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)
