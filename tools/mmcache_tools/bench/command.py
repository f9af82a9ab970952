"""``mmcache bench``: run the measurements and print their ratios.

Owns: what is run, and how it is shown. Does not own: the measurements.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys

import torch
from rich.console import Console
from rich.table import Table

from mmcache_tools.bench import (
    busy_loop,
    cold,
    device_moves,
    eviction,
    hot_hits,
    inspecting,
    moves,
    scale,
    spilling,
)
from mmcache_tools.bench.pairing import Row

_QUANTITIES = {"s": "time", "bytes": "bytes"}
_ENTRIES = 1_000_000
_QUICK_ENTRIES = 20_000


def run(*, quick: bool, as_json: bool, entries: int | None = None) -> int:
    """Measure and print; 1 when a bound that the project sets itself is missed, else 0.

    Args:
        quick: Fewer rounds, and fewer entries in the large store.
        as_json: Print JSON.
        entries: How many entries the large store has, if not as many as usual.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one copying thread, as memcpy has
    try:
        rows = hot_hits.measure(rounds=5 if quick else 25)
        rows += moves.measure(rounds=18 if quick else 120)
        rows += cold.measure(rounds=1 if quick else 5)
        rows += spilling.measure(rounds=3 if quick else 12)
        rows += eviction.measure(rounds=100 if quick else 1000)
        rows += busy_loop.measure(rounds=1 if quick else 3, phase_s=0.3 if quick else 1.0)
        rows += inspecting.measure(rounds=5 if quick else 25)
        entries = entries or (_QUICK_ENTRIES if quick else _ENTRIES)
        rows += scale.measure(entries, rounds=2 if quick else 7)
    finally:
        torch.set_num_threads(threads)
    about = "CPU, one copying thread, 8 MB where no size is named"
    return _report(rows, as_json=as_json, about=about)


def _report(rows: list[Row], *, as_json: bool, about: str) -> int:
    if as_json:
        machine = {**_machine(), "about": about}
        print(json.dumps({"machine": machine, "rows": [_plain(row) for row in rows]}, indent=2))
    else:
        _show(rows, about)
    return 0 if all(row.holds for row in rows) else 1


def run_on_device(*, quick: bool, as_json: bool) -> int:
    """As :func:`run`, for an accelerator; 2, and one line on stderr, where there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        print("mmcache: bench --gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    device = torch.device(kind.type, torch.accelerator.current_device_index())  # pragma: gpu
    return _measure_on(device, quick=quick, as_json=as_json)  # pragma: gpu


def _measure_on(device: torch.device, *, quick: bool, as_json: bool) -> int:
    rounds = 20 if quick else 100
    rows = [
        *device_moves.measure(rounds, device, entry_bytes=8 << 20),
        *device_moves.measure(rounds, device, entry_bytes=64 << 20),
        *device_moves.measure_beside(rounds, device),
        *device_moves.measure_locking(3, device),
    ]
    return _report(rows, as_json=as_json, about=_name_of(device))


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _machine() -> dict[str, str | int | None]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _plain(row: Row) -> dict[str, object]:
    return {**dataclasses.asdict(row), "holds": row.holds}


def _show(rows: list[Row], about: str) -> None:
    table = Table(title="Ratios of medians, or of what is named, measured in turn in one run")
    for heading in ("what", "beside", "ratio", "wanted", "median", "beside"):
        table.add_column(heading, justify="left" if len(table.columns) < 2 else "right")
    for row in rows:
        sign = "≥" if row.better == "higher" else "≤"
        unit = "of its speed" if row.better == "higher" else f"of its {_QUANTITIES[row.unit]}"
        wanted = "" if row.wanted is None else f"{sign} {row.wanted:g}"
        mark = "" if row.holds else " MISSED"
        table.add_row(
            row.name,
            row.reference,
            f"{row.ratio:.2f} {unit}",
            wanted + mark,
            _amount(row.median_s, row.unit),
            _amount(row.reference_s, row.unit),
        )
    console = Console()
    console.print(table)
    console.print(f"{about}. {_machine()}", style="dim")


def _amount(amount: float, unit: str) -> str:
    if unit == "bytes":
        return f"{amount:.0f} B"
    if amount < 1e-5:
        return f"{amount * 1e9:.0f} ns"
    return f"{amount * 1e3:.2f} ms"
