"""A plan as a picture, with matplotlib, which is an extra.

Owns: the picture. Does not own: what it says (:mod:`.planning`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.sizing.curves import Point
from mmcache_tools.sizing.planning import Plan

__all__ = ["plot", "refuse_unusable"]

_KINDS = (".png", ".svg")
_GIB = 1 << 30
_MIB = 1 << 20


def refuse_unusable(path: Path) -> None:
    """Refuse a picture that could not be made, before anything is read.

    Raises:
        UsageError: It is there already, is of another kind, or matplotlib is missing.
    """
    if path.suffix.lower() not in _KINDS:
        raise UsageError(f"--plot {path}: a chart is a .png or a .svg")
    if path.exists():
        raise UsageError(f"{path} is there already: name a new file")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install '.[plot]'")


def plot(plan: Plan, path: Path) -> None:
    """Draw hit ratio over size, one line a tier, and mark knee and recommendation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    largest = max(point.sizes.hot for point in plan.hot)
    unit, name = (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")
    lines = (("hot", plan.hot), ("hot + host", plan.host), ("hot + host + disk", plan.disk))
    for label, points in lines:
        drawn = [point for point in points if _total(point)]
        axes.errorbar(
            [_total(point) / unit for point in drawn],
            [100 * point.hit_ratio for point in drawn],
            yerr=[100 * point.error for point in drawn] if plan.sample.rate < 1 else None,
            marker="o",
            markersize=4,
            label=label,
        )
    axes.axhline(100 * plan.best, color="grey", linestyle=":", label="at best")
    if plan.knee is not None:
        axes.axvline(plan.knee.sizes.hot / unit, color="grey", linestyle="--", label="knee")
    chosen = plan.recommended
    axes.plot(
        [_total(chosen) / unit],
        [100 * chosen.hit_ratio],
        marker="*",
        markersize=16,
        linestyle="",
        color="black",
        label="recommended",
    )
    axes.set(xscale="log", ylim=(0, 100), xlabel=f"{name} of all tiers together")
    axes.set(ylabel="requests answered by the cache, %", title=plan.trace.name)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def _total(point: Point) -> int:
    return point.sizes.hot + point.sizes.host + point.sizes.disk
