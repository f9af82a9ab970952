"""Charts of a run, as PNG.

Owns: what is drawn. Does not own: the figures, the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mmcache_tools.peers.bounds import OURS

_OWN, _OTHER = "#1f6f8b", "#b8b8b8"


def draw(result: dict[str, Any], folder: Path, prefix: str) -> dict[str, str]:
    """Draw what the run has figures for; each file's name to its title."""
    titles = _drawn(result, lambda file: folder / f"{prefix}{file}")
    return {f"{prefix}{file}": title for file, title in titles.items()}


def _drawn(result: dict[str, Any], place: Callable[[str], Path]) -> dict[str, str]:
    titles = {
        "saved.png": "Share of the encoder's time that is saved, over a whole replay",
        "restarted.png": "Share of the encoder's time that is saved, after the restart",
    }
    _saved(result, place("saved.png"), ("first", "restarted"))
    _saved(result, place("restarted.png"), ("restarted",))
    for operation, file in (
        ("host promotion", "host.png"),
        ("disk promotion, warm", "disk-warm.png"),
        ("disk promotion, cold", "disk-cold.png"),
        ("spill", "spill.png"),
    ):
        titles[file] = f"{operation}: bytes a second by the size of an entry"
        _speeds(result, place(file), operation)
    if "interference" in result:
        titles["loop.png"] = "A busy loop's 99th percentile beside each system"
        _loop(result, place("loop.png"))
    if "growth" in result:
        titles["growth.png"] = "Look-ups among ever more entries"
        _growth(result, place("growth.png"))
    return titles


def _name(result: dict[str, Any], name: str) -> str:
    return str(result["systems"].get(name, {"name": "the limit"})["name"])


def _saved(result: dict[str, Any], file: Path, halves: tuple[str, ...]) -> None:
    workloads = result["replay"]["figures"]
    figure = Figure(figsize=(3.2 * len(workloads) + 2, 3.2))
    axes = figure.subplots(1, len(workloads), sharey=True, squeeze=False)
    names = list(result["systems"])
    for axis, (workload, of) in zip(axes[0], workloads.items(), strict=True):
        played = [name for name in names if name in of["systems"]]
        shares = []
        for name in played:
            gave = [of["systems"][name][half] for half in halves]
            shares.append(sum(g["saved_s"] for g in gave) / sum(g["possible_s"] for g in gave))
        colours = [_OWN if name == OURS else _OTHER for name in played]
        axis.barh([_name(result, name) for name in played], shares, color=colours)
        axis.invert_yaxis()
        axis.set_title(workload, fontsize=9)
        axis.set_xlim(0, 1)
    _finish(figure, file)


def _speeds(result: dict[str, Any], file: Path, operation: str) -> None:
    figure = Figure(figsize=(6, 3.6))
    axis = figure.subplots()
    lines: dict[str, list[tuple[float, float]]] = {}
    for size, operations in result["micro"]["figures"].items():
        for name, spread in operations.get(operation, {}).items():
            point = (int(size) / 1e6, int(size) / spread["median"] / 1e9)
            lines.setdefault(name, []).append(point)
    for name, points in lines.items():
        style = "k--" if name == "limits" else "o-"
        width = 2.5 if name == OURS else 1.0
        axis.plot(*zip(*points, strict=True), style, linewidth=width, label=_name(result, name))
    axis.set_xscale("log")
    axis.set_xlabel("MB")
    axis.set_ylabel("GB/s")
    if lines:
        axis.legend(fontsize=7)
    _finish(figure, file)


def _loop(result: dict[str, Any], file: Path) -> None:
    figures = result["interference"]["figures"]
    figure = Figure(figsize=(6, 3.6))
    axis = figure.subplots()
    ratios = [of["turn beside"][1] / of["turn alone"][1] for of in figures.values()]
    colours = [_OWN if name == OURS else _OTHER for name in figures]
    axis.barh([_name(result, name) for name in figures], ratios, color=colours)
    axis.invert_yaxis()
    axis.set_xlabel("p99 of a turn beside it, as a multiple of the loop alone")
    _finish(figure, file)


def _growth(result: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(6, 3.6))
    axis = figure.subplots()
    for name, of in result["growth"]["figures"].items():
        points = [(int(n), at["get_p50_s"] * 1e6) for n, at in of["figures"].items()]
        width = 2.5 if name == OURS else 1.0
        axis.plot(*zip(*points, strict=True), "o-", linewidth=width, label=_name(result, name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("entries")
    axis.set_ylabel("µs a look-up, median")
    axis.legend(fontsize=7)
    _finish(figure, file)


def _finish(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=110)
