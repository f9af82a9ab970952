"""Tables of a run: for the terminal, and for the page.

Owns: which columns, in which order, and how figures are written. Does not own: the figures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from mmcache_tools.peers.bounds import OURS


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A heading, the columns, and rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def show(result: dict[str, Any]) -> None:
    """Print all tables of a run."""
    console = Console()
    for table in all_tables(result):
        shown = RichTable(title=table.title)
        for column in table.columns:
            shown.add_column(column)
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


def all_tables(result: dict[str, Any]) -> list[Table]:
    """Every table of a run, ratios first."""
    return [bounds(result), systems(result), *micro(result), *replay(result), failures(result)]


def bounds(result: dict[str, Any]) -> Table:
    """The project's own bounds."""
    rows = [
        [
            bound["name"],
            f"{bound['ratio']:.2f}",
            f"{'≤' if bound['better'] == 'lower' else '≥'} {bound['wanted']:g}",
            "yes" if bound["holds"] else "MISSED",
        ]
        for bound in result["bounds"]
    ]
    return Table("Bounds", ["ours, as a multiple of the other", "ratio", "wanted", "met"], rows)


def systems(result: dict[str, Any]) -> Table:
    """What ran, and what it cannot do."""
    rows = []
    for described in result["systems"].values():
        cannot = "; ".join(f"{what}: {why}" for what, why in described["cannot"].items())
        tiers = ", ".join(t for t in ("device", "host", "disk") if t in described["tiers"])
        rows.append([described["name"], described["version"], tiers, cannot])
    for name, why in result["cannot_run"].items():
        rows.append([name, "not run", "", why])
    return Table("Systems", ["system", "version", "tiers", "cannot"], rows)


def micro(result: dict[str, Any]) -> list[Table]:
    """One table for each size: the ratio to ours, then medians and quartiles."""
    found = []
    for size, operations in result["micro"]["figures"].items():
        rows = []
        for operation, of_system in operations.items():
            own = of_system.get(OURS, {}).get("median")
            for name, spread in sorted(of_system.items(), key=lambda pair: pair[1]["median"]):
                ratio = f"{spread['median'] / own:.2f}" if own else ""
                rows.append(
                    [operation, _name(result, name), ratio, _spread(spread), str(spread["number"])]
                )
        title = f"Entries of {int(size) / 1e6:g} MB"
        columns = ["operation", "system", "time / ours", "median (quartiles)", "times"]
        found.append(Table(title, columns, rows))
    return found


def replay(result: dict[str, Any]) -> list[Table]:
    """One table for each workload, the most savings first."""
    found = []
    for workload, figures in result["replay"]["figures"].items():
        rows = []
        ranked = sorted(figures["systems"].items(), key=lambda pair: -pair[1]["first"]["saved_s"])
        for name, halves in ranked:
            first, after = halves["first"], halves["restarted"]
            rows.append(
                [
                    _name(result, name),
                    _share(first),
                    _share(after),
                    f"{first['saved_s']:.1f} / {after['saved_s']:.1f} s",
                    f"{first['served_bytes'] / 1e6:.0f} / {after['served_bytes'] / 1e6:.0f} MB",
                    f"{first['written_bytes'] / 1e6:.0f} / {after['written_bytes'] / 1e6:.0f} MB",
                    f"{_time(first['get_p50_s'])}, {_time(first['get_p99_s'])}",
                    f"{_time(after['get_p50_s'])}, {_time(after['get_p99_s'])}",
                    f"{first['wrong'] + after['wrong']}",
                ]
            )
        title = (
            f"{workload}: {figures['requests']} requests for {figures['keys']} images, "
            f"{figures['working_set_bytes'] / 1e6:.0f} MB; hot {figures['hot_bytes'] / 1e6:.0f}, "
            f"host {figures['host_bytes'] / 1e6:.0f}, disk {figures['disk_bytes'] / 1e6:.0f} MB"
        )
        columns = [
            "system",
            "saved",
            "after a restart",
            "encoder seconds saved",
            "served",
            "written",
            "get p50, p99",
            "after a restart",
            "wrong",
        ]
        found.append(Table(title, columns, rows))
    return found


def failures(result: dict[str, Any]) -> Table:
    """What a system failed at, in its own words."""
    rows = [
        [where, what]
        for part in result.values()
        if isinstance(part, dict) and "failures" in part
        for where, what in part["failures"].items()
    ]
    return Table("Failures", ["where", "what"], rows)


def _name(result: dict[str, Any], name: str) -> str:
    return str(result["systems"][name]["name"])


def _share(half: dict[str, Any]) -> str:
    return f"{half['saved_s'] / half['possible_s']:.1%}"


def _spread(spread: dict[str, Any]) -> str:
    return f"{_time(spread['median'])} ({_time(spread['low'])} to {_time(spread['high'])})"


def _time(seconds: float) -> str:
    if seconds < 1e-5:
        return f"{seconds * 1e9:.0f} ns"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms"
