"""Tables of a run: for the terminal, and for the page.

Owns: which columns, in which order, and how figures are written. Does not own: the figures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from mmcache_tools.peers.bounds import OURS

_ANSWERS = {
    "right": "right",
    "missing": "missing",
    "wrong": "wrong",
    "get raised": "get_errors",
    "set refused": "refused",
    "set raised": "set_errors",
}


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
    found = [bounds(result), systems(result), *micro(result), *replay(result)]
    others = {"interference": interference, "growth": growth, "faults": faults}
    found += [table(result) for name, table in others.items() if name in result]
    return [*found, failures(result)]


def bounds(result: dict[str, Any]) -> Table:
    """The project's own bounds."""
    rows = [
        [
            bound["name"],
            f"{bound['ratio']:.2f}",
            _wanted(bound),
            ("yes" if bound["holds"] else "MISSED") if bound["is_asked"] else "not asked for",
        ]
        for bound in result["bounds"]
    ]
    return Table("Bounds", ["ours, as a multiple of the other", "ratio", "wanted", "met"], rows)


def _wanted(bound: dict[str, Any]) -> str:
    if not bound["is_asked"]:
        return f"a cache without bounds: {bound['wanted']:.2f}"
    return f"{'≤' if bound['better'] == 'lower' else '≥'} {bound['wanted']:g}"


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
        ideal = figures["unlimited_s"]
        rows.append(
            [
                "the limit: no bound on bytes",
                *("" for _ in range(2)),
                f"{ideal['first']:.1f} / {ideal['restarted']:.1f} s",
                *("" for _ in range(5)),
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


def interference(result: dict[str, Any]) -> Table:
    """The busy loop, the least disturbed at its 99th percentile first."""
    figures = result["interference"]["figures"]
    rows = []
    for name, of in sorted(figures.items(), key=lambda pair: pair[1]["turn beside"][1]):
        ratios = [b / a for a, b in zip(of["turn alone"], of["turn beside"], strict=True)]
        rows.append(
            [
                _name(result, name),
                " / ".join(f"{ratio:.1f}" for ratio in ratios),
                *(_three(of[what]) for what in ("turn alone", "turn beside", "get", "set")),
                f"{of['hits'][0] / of['hits'][1]:.0%}",
            ]
        )
    columns = ["system", "beside / alone", "turn alone", "turn beside", "get", "set", "gets served"]
    return Table("A busy loop beside each: p50 / p99 / p99.9", columns, rows)


def growth(result: dict[str, Any]) -> Table:
    """Look-ups among ever more entries."""
    rows = [
        [
            _name(result, name),
            f"{int(number):,}",
            f"{at['get_p50_s'] / next(iter(of['figures'].values()))['get_p50_s']:.2f}",
            _time(at["get_p50_s"]),
            f"{at['found']:.0%}",
            _time(at["set_s"]),
        ]
        for name, of in result["growth"]["figures"].items()
        for number, at in of["figures"].items()
    ]
    columns = ["system", "entries", "look-up / among 100", "look-up", "found", "set"]
    return Table("Growth: small entries, as far as each comes in its time", columns, rows)


def faults(result: dict[str, Any]) -> Table:
    """What each served after damage."""
    rows = [
        [fault, _name(result, name), *(str(of.get(kind, "")) for kind in _ANSWERS.values())]
        for fault, systems_of in result["faults"]["figures"].items()
        for name, of in systems_of.items()
    ]
    return Table("Served after damage", ["fault", "system", *_ANSWERS], rows)


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
    if name == "limits":
        return "the limit"
    return str(result["systems"][name]["name"])


def _share(half: dict[str, Any]) -> str:
    return f"{half['saved_s'] / half['possible_s']:.1%}"


def _spread(spread: dict[str, Any]) -> str:
    return f"{_time(spread['median'])} ({_time(spread['low'])} to {_time(spread['high'])})"


def _three(values: list[float]) -> str:
    return " / ".join(_time(value) for value in values)


def _time(seconds: float) -> str:
    if seconds < 1e-5:
        return f"{seconds * 1e9:.0f} ns"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms"
