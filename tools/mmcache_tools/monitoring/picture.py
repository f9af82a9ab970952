"""``python -m mmcache_tools.monitoring.picture FILE``: the dashboard's panels over a played server.

Owns: drawing what the queries of docs/monitoring/dashboard.json return, panel by panel.
Does not own: the scene (:mod:`.scene`). Grafana itself draws them with its own hand.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter, ScalarFormatter

from mmcache_tools.monitoring.prometheus_server import Prometheus
from mmcache_tools.monitoring.scene import dashboard, filled_in, playing

_SECONDS = 90.0
_COLUMNS = 24  # of Grafana's grid
_MOST_IN_LEGEND = 8
_UNITS: dict[str, Formatter] = {
    "ops": EngFormatter(unit="/s", sep=""),
    "s": EngFormatter(unit="s", sep=""),
    "Bps": EngFormatter(unit="B/s", sep=""),
    "percentunit": PercentFormatter(xmax=1.0),
    "short": ScalarFormatter(),
}


def draw(file: Path, seconds: float = _SECONDS) -> None:
    """Play a server for some seconds, and draw every panel over that time."""
    with playing(seconds) as prometheus:
        prometheus.wait_for(lambda: bool(prometheus.query("mmcache_entries")), "the first scrape")
        began_s = time.time()
        time.sleep(seconds)  # this is the film
        ended_s = time.time()
        found = _series(prometheus, began_s, ended_s)
    _draw(file, found, began_s)


def _series(
    prometheus: Prometheus, began_s: float, ended_s: float
) -> list[tuple[dict[str, Any], list[tuple[str, list[list[Any]]]]]]:
    """Each panel with its lines: a legend and pairs of time and value."""
    found = []
    for panel in dashboard()["panels"]:
        lines = []
        for target in panel.get("targets", []):
            for one in prometheus.query_range(filled_in(target["expr"]), began_s, ended_s, 1):
                legend = target["legendFormat"]
                for label, value in one["metric"].items():
                    legend = legend.replace("{{" + label + "}}", value)
                lines.append((legend, one["values"]))
        found.append((panel, lines))
    return found


def _draw(
    file: Path,
    found: list[tuple[dict[str, Any], list[tuple[str, list[list[Any]]]]]],
    began_s: float,
) -> None:
    mpl.use("Agg")
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in found)
    figure = pyplot.figure(figsize=(16, rows * 0.42), dpi=90)
    for panel, lines in found:
        place = panel["gridPos"]
        left, width = place["x"] / _COLUMNS, place["w"] / _COLUMNS
        top = 1 - place["y"] / rows
        if panel["type"] == "row":
            figure.text(0.01, top - 1.2 / rows, panel["title"], fontsize=14, weight="bold")
            continue
        height = place["h"] / rows
        axes = figure.add_axes(
            (left + 0.035, top - height + 0.017, width - 0.045, height - 0.017 - 1.3 / rows)
        )
        _draw_panel(axes, panel, lines, began_s)
    figure.savefig(file)


def _draw_panel(
    axes: Axes, panel: dict[str, Any], lines: list[tuple[str, list[list[Any]]]], began_s: float
) -> None:
    axes.set_title(panel["title"], fontsize=10, loc="left")
    # What stays 0 is left out of the picture where there is much else, as a legend would hide it.
    moving = [line for line in lines if any(float(value) > 0 for _, value in line[1])]
    for legend, values in (moving or lines)[:_MOST_IN_LEGEND]:
        times = [moment - began_s for moment, _ in values]
        axes.plot(times, [float(value) for _, value in values], label=legend, linewidth=1.2)
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    axes.yaxis.set_major_formatter(_UNITS[unit])
    axes.xaxis.set_major_formatter(EngFormatter(unit="s", sep=""))
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    if lines:
        axes.legend(fontsize=7, loc="upper left", framealpha=0.6)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), *map(float, sys.argv[2:3]))
