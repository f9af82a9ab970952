"""The parent's side: which system is asked for what, in which turn, and what came of it.

Owns: turns, and failures that become findings. Does not own: processes (:mod:`.process`), what is
shown (:mod:`.tables`).

A system that fails at a measurement is listed there with the reason, and goes on with the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmcache_tools.peers.bounds import OURS, RELAXED
from mmcache_tools.peers.environments import CannotRunError
from mmcache_tools.peers.process import Child
from mmcache_tools.peers.registry import SYSTEMS
from mmcache_tools.workload.requests import Request, write

Say = Callable[[str], None]
_REPLAY_S = 90.0  # beyond that a system hangs: most take a few seconds
_HOT, _HOST, _DISK = 0.05, 0.10, 0.50  # of the working set's bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What repeated measurements of one thing gave, in seconds."""

    median: float
    low: float
    high: float
    number: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The median, and the quartiles around it."""
        if len(values) < 2:
            return cls(median=values[0], low=values[0], high=values[0], number=len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high, number=len(values))


class Systems:
    """The systems that run here, each with a child process that is started when it is needed."""

    def __init__(self, names: Iterable[str], environments: Path, say: Say) -> None:
        environments.mkdir(parents=True, exist_ok=True)
        self._environments = environments
        self._children: dict[str, Child] = {}
        self.say = say
        self.described: dict[str, dict[str, Any]] = {}
        self.cannot_run: dict[str, str] = {}
        for name in names:
            say(f"{name}: environment and start")
            try:
                self.described[name] = self._child(name).ask("describe")
            except CannotRunError as error:
                self.cannot_run[name] = f"{error} (tried: {SYSTEMS[name].environment.tried})"
                self._drop(name)

    @property
    def names(self) -> list[str]:
        """Those that run here."""
        return list(self.described)

    @property
    def different(self) -> list[str]:
        """The same, without what differs in its flushes to the disk alone."""
        return [name for name in self.names if name != RELAXED]

    def ask(self, name: str, what: str, *, limit_s: float = 300.0, **options: object) -> Any:
        """As :meth:`Child.ask`, of a child that is started anew when the last one is gone."""
        try:
            return self._child(name).ask(what, limit_s, **options)
        except CannotRunError:
            self._drop(name)
            raise

    def restart(self, name: str) -> None:
        """The next question goes to a new process."""
        self._drop(name)

    def new_child(self, name: str, *, before: tuple[str, ...] = ()) -> Child:
        """A process of its own, for what ends badly."""
        return Child(name, self._environments, before=before)

    def close(self) -> None:
        """End all processes."""
        for name in list(self._children):
            self._drop(name)

    def _child(self, name: str) -> Child:
        if name not in self._children:
            self._children[name] = Child(name, self._environments)
        return self._children[name]

    def _drop(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.close()


def micro(
    systems: Systems, *, sizes_bytes: Iterable[int], turns: int, rounds: int
) -> dict[str, Any]:
    """Size to operation to system to :class:`Spread`; and the failures."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for size_bytes in sizes_bytes:
        times: dict[str, dict[str, list[float]]] = {}
        for turn, name in itertools.product(range(turns), systems.names):
            where = f"{name}, {size_bytes / 1e6:g} MB"
            if where in failures:
                continue
            systems.say(f"micro: {where}, turn {turn + 1} of {turns}")
            try:
                gave = systems.ask(name, "micro", size_bytes=size_bytes, rounds=rounds)
            except CannotRunError as error:
                failures[where] = str(error)
                continue
            for part, why in gave["failures"].items():
                failures[f"{where}, {part}"] = why
            for operation, values in gave["times"].items():
                times.setdefault(operation, {}).setdefault(name, []).extend(values)
            if name == OURS:
                limits = systems.ask(name, "limits", size_bytes=size_bytes, rounds=rounds)
                for operation, values in limits.items():
                    times.setdefault(operation, {}).setdefault("limits", []).extend(values)
        found[str(size_bytes)] = {
            operation: {
                name: dataclasses.asdict(Spread.of(values)) for name, values in each.items()
            }
            for operation, each in times.items()
        }
    return {"figures": found, "failures": failures}


def replay(systems: Systems, workloads: dict[str, list[Request]], *, scale: int) -> dict[str, Any]:
    """Workload to system to what its two halves gave, the second after a restart."""
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for workload, played in workloads.items():
        sizes = {request.key: request.size_bytes // scale for request in played}
        working_set = sum(sizes.values())
        budgets = {
            "hot_bytes": int(_HOT * working_set),
            "host_bytes": int(_HOST * working_set),
            "disk_bytes": int(_DISK * working_set),
        }
        found[workload] = {
            "requests": len(played),
            "keys": len(sizes),
            "working_set_bytes": working_set,
            "scale": scale,
            "unlimited_s": _unlimited_s(played),
            **budgets,
            "systems": {},
        }
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.csv"
            with trace.open("w", newline="", encoding="utf-8") as file:
                write(played, file)
            for name in systems.different:
                systems.say(f"replay: {workload}, {name}")
                options = {"trace": str(trace), "scale": scale, **budgets}
                try:
                    found[workload]["systems"][name] = _two_halves(
                        systems, name, len(played), options
                    )
                except CannotRunError as error:
                    failures[f"{name}, {workload}"] = str(error)
    return {"figures": found, "failures": failures}


def _unlimited_s(played: list[Request]) -> dict[str, float]:
    """What a cache without bounds that survives the restart would save, by halves."""
    seen: set[int] = set()
    saved = [0.0, 0.0]
    for number, request in enumerate(played):
        if request.key in seen:
            saved[number >= len(played) // 2] += request.cost_s
        seen.add(request.key)
    return {"first": saved[0], "restarted": saved[1]}


def _two_halves(
    systems: Systems, name: str, requests: int, options: dict[str, Any]
) -> dict[str, Any]:
    middle = requests // 2
    with tempfile.TemporaryDirectory() as folder:
        systems.restart(name)
        halves = {}
        for half, start, stop in (("first", 0, middle), ("restarted", middle, requests)):
            gave = systems.ask(
                name, "replay", limit_s=_REPLAY_S, start=start, stop=stop, folder=folder, **options
            )
            halves[half] = gave
            systems.restart(name)
    return halves
