"""``mmcache bench``: run the measurements and print their ratios.

Owns: what is run, and how it is shown. Does not own: the measurements.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform

import torch
from rich.console import Console
from rich.table import Table

from mmcache_tools.bench import hot_hits, moves, spilling
from mmcache_tools.bench.pairing import Row


def run(*, quick: bool, as_json: bool) -> int:
    """Measure and print; 1 when a bound that the project sets itself is missed, else 0."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one copying thread, as memcpy has
    try:
        rows = hot_hits.measure(rounds=5 if quick else 25)
        rows += moves.measure(rounds=18 if quick else 120)
        rows += spilling.measure(rounds=3 if quick else 12)
    finally:
        torch.set_num_threads(threads)
    if as_json:
        print(json.dumps({"machine": _machine(), "rows": [_plain(row) for row in rows]}, indent=2))
    else:
        _show(rows)
    return 0 if all(row.holds for row in rows) else 1


def _machine() -> dict[str, str | int | None]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _plain(row: Row) -> dict[str, object]:
    return {**dataclasses.asdict(row), "holds": row.holds}


def _show(rows: list[Row]) -> None:
    table = Table(title="Ratios of medians, measured in turn in one run")
    for heading in ("what", "beside", "ratio", "wanted", "median", "beside"):
        table.add_column(heading, justify="left" if len(table.columns) < 2 else "right")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        unit = "of its speed" if row.better == "higher" else "of its time"
        wanted = "" if row.wanted is None else f"{sign} {row.wanted:g}"
        mark = "" if row.holds else " MISSED"
        table.add_row(
            row.name,
            row.reference,
            f"{row.ratio:.2f} {unit}",
            wanted + mark,
            _duration(row.median_s),
            _duration(row.reference_s),
        )
    console = Console()
    console.print(table)
    console.print("8 MB entries, CPU, one copying thread. " + str(_machine()), style="dim")


def _duration(seconds: float) -> str:
    if seconds < 1e-5:
        return f"{seconds * 1e9:.0f} ns"
    return f"{seconds * 1e3:.2f} ms"
