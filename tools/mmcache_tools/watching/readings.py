"""What the caches that publish in a folder said last.

Owns: finding the files of metrics, reading them, and whether their servers are alive.
Does not own: what is in them (:mod:`tiered_mmcache.metrics.families`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE, UsageError
from tiered_mmcache.config import MetricsConfig, load_config
from tiered_mmcache.metrics.families import TIERS, WAYS

__all__ = ["Reading", "Source", "State", "find_source", "read_all"]

_NAME = re.compile(r"mmcache-(\d+)-(\d+)\.prom")
_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_COMMON = ("namespace", "cache")
_ROOMS = (*TIERS, "write_buffer")
_LARGEST_FILE_BYTES = 1 << 22
_LATE_INTERVALS = 3


class State(str, Enum):
    """How much a reading says about now."""

    LIVE = "live"
    STALE = "stale"
    GONE = "gone"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where metrics are published.

    Attributes:
        folder: The folder.
        interval_s: How often a busy server writes there.
        file: The one file to look at; None is all.
    """

    folder: Path
    interval_s: float
    file: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One cache's metrics.

    Attributes:
        file: The file they are from.
        process: The number of the server's process.
        state: ``STALE`` when the server is there and has not written for three intervals: it has
            nothing to do, serves all from the hot tier, or hangs. ``GONE`` when it is not there.
        written_s: When the file was written, in seconds since 1970.
        age_s: How long ago that was.
        namespace: What makes its embeddings interchangeable.
        values: Samples by name and value of the label; an empty one without a label.
    """

    file: Path
    process: int
    state: State
    written_s: float
    age_s: float
    namespace: str
    values: Mapping[tuple[str, str], float]

    def of(self, name: str) -> dict[str, float]:
        """The values of one metric, by label."""
        return {label: value for (each, label), value in self.values.items() if each == name}

    def one(self, name: str, label: str = "") -> float | None:
        """One value, or None when the cache has no such thing."""
        return self.values.get((name, label))

    @property
    def hits(self) -> float:
        """Requests that any tier has answered."""
        return sum(self.of("mmcache_hits_total").values())

    @property
    def misses(self) -> float:
        """Requests that none has."""
        return sum(self.of("mmcache_misses_total").values())

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        asked = self.hits + self.misses
        return {
            "file": str(self.file),
            "process": self.process,
            "state": self.state.value,
            "written_s": self.written_s,
            "age_s": self.age_s,
            "namespace": self.namespace,
            "tiers": {room: self._room(room) for room in _ROOMS if self._room(room)},
            "hits": self.hits,
            "misses": self.misses,
            "hit_ratio": self.hits / asked if asked else None,
            "misses_by_reason": _counted(self.of("mmcache_misses_total")),
            "moved_bytes": {way: self.one("mmcache_moved_bytes_total", way) for way in WAYS},
            "drops": _counted(self.of("mmcache_drops_total")),
            "faults": _counted(self.of("mmcache_faults_total")),
            "worker_is_up": _truth(self.one("mmcache_worker_is_up")),
            "saved_s": self.one("mmcache_saved_seconds_total"),
        }

    def _room(self, room: str) -> dict[str, float]:
        names = {
            "used_bytes": "mmcache_used_bytes",
            "budget_bytes": "mmcache_budget_bytes",
            "entries": "mmcache_entries",
            "hits": "mmcache_hits_total",
            "coldest_age_s": "mmcache_coldest_age_seconds",
        }
        found = {field: self.one(name, room) for field, name in names.items()}
        if found["budget_bytes"] is None:
            return {}
        return {field: value for field, value in found.items() if value is not None}


def _counted(values: Mapping[str, float]) -> dict[str, float]:
    return {label: value for label, value in values.items() if value}


def _truth(value: float | None) -> bool | None:
    return None if value is None else bool(value)


def find_source(source: Path | None) -> Source:
    """The folder of metrics that a YAML file, a folder, one file of it or the environment names.

    Raises:
        UsageError: Nothing is named, or the YAML has no section ``metrics``.
        ConfigError: The YAML file cannot be used.
    """
    if source is None:
        named = os.environ.get(ENVIRONMENT_VARIABLE)
        if not named:
            raise UsageError(
                f"name the server's YAML file or its metrics.folder, or set {ENVIRONMENT_VARIABLE}"
            )
        source = Path(named)
    usual_s: float = MetricsConfig.model_fields["interval_s"].default
    if source.suffix == ".prom":
        return Source(folder=source.parent, interval_s=usual_s, file=source)
    if source.is_dir() or not (source.exists() or source.suffix in (".yaml", ".yml")):
        return Source(folder=source, interval_s=usual_s)
    metrics = load_config(source, check_machine=False).metrics
    if metrics is None:
        raise UsageError(
            f"{source} has no section `metrics`, so its servers publish nothing: write "
            "`metrics:` and below it `folder: /dev/shm/mmcache`, and start them anew"
        )
    return Source(folder=metrics.folder, interval_s=metrics.interval_s)


def read_all(source: Source) -> list[Reading]:
    """What each cache said last, by process.

    Raises:
        OSError: The folder, or the one file, cannot be read.
    """
    if source.file is not None:
        return [_read(source.file, source.interval_s)]
    readings = []
    for file in sorted(source.folder.iterdir()):
        if _NAME.fullmatch(file.name):
            try:
                readings.append(_read(file, source.interval_s))
            except FileNotFoundError:  # its cache was just closed
                continue
    return sorted(readings, key=lambda reading: (reading.process, reading.file))


def _read(file: Path, interval_s: float) -> Reading:
    with file.open("rb") as opened:
        written_s = os.fstat(opened.fileno()).st_mtime
        text = opened.read(_LARGEST_FILE_BYTES).decode("utf-8", errors="replace")
    named = _NAME.fullmatch(file.name)
    process = int(named[1]) if named else 0
    age_s = max(0.0, time.time() - written_s)
    state = State.STALE if age_s > _LATE_INTERVALS * interval_s else State.LIVE
    if named and not _is_there(process):
        state = State.GONE
    values: dict[tuple[str, str], float] = {}
    namespace = ""
    for name, labels, value in _samples(text):
        namespace = labels.get("namespace", namespace)
        others = [text for label, text in labels.items() if label not in _COMMON]
        if len(others) <= 1:  # histograms have two
            values[name, others[0] if others else ""] = value
    return Reading(
        file=file,
        process=process,
        state=state,
        written_s=written_s,
        age_s=age_s,
        namespace=namespace,
        values=values,
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None:
            continue
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2])}
        try:
            yield found[1], labels, float(found[3])
        except ValueError:
            continue


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


def _is_there(process: int) -> bool:
    """Whether a process of that number is there; one of another container may not be seen."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
