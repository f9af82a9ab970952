"""The page of a run, in Markdown, and the charts beside it.

Owns: what the page says around the tables. Does not own: the tables (:mod:`.tables`), the charts
(:mod:`.charts`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.peers import tables
from mmcache_tools.peers.endings import FAULTS

_ABOUT = """\
# Beside the peers

*This page is made by `make bench-peers`: do not edit it.*

What a user would pick in place of this cache, from its released packages, each in a process and \
an environment of its own, with the same bytes, keys and budgets, in one run. Ratios come first; \
times are this machine's. Where another is better, its ratio is on the other side of 1, and the \
tables are sorted so that the best stands first.
"""
_HOW = """\
## How to read it

- **On a CPU the device is host memory.** A promotion is then one copy within it. Moves to and \
from a GPU {gpu}; `make bench-gpu` measures them beside the page-locked limit \
([gpu.md](gpu.md)).
- **A system without a device tier** stands behind a plain LRU of the hot budget in the replays, \
as the engine that it is made for has one; single operations are its own alone.
- **A miss waits** for as long as the encoder would take: one recorded figure, 167 ms for a \
1080p image (2,691 tokens; Qwen2.5-VL-7B on an H100, with preprocessing), in proportion to the \
tokens. Bytes and waits are divided by {scale}, so that there are as many bytes to each second \
of the encoder as in the trace. What is saved is told in undivided seconds.
- **A replay** has a restart in its middle: a new process on the same files. Budgets are \
{budgets}.
- **Medians** have the quartiles beside them, over all turns; the systems take turns size by \
size. `settle` waits for what a system does later, outside the times, except in *spill*, whose \
time ends when all is written. `tiered_mmcache` flushes (`durability: ordered`); *relaxed* \
leaves that to the operating system, as all others but O_DIRECT do.
- **What is written** is what the process and its children hand to the disk.
- **The limit** is a look-up in a dictionary (hot hit), `memcpy` into memory in use (host \
promotion), and O_DIRECT in blocks of 1 MB (spill, disk promotion, cold).
"""


def check(path: Path) -> None:
    """See beforehand that the page can be made: measuring takes long.

    Raises:
        UsageError: matplotlib is not there, or the page's folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--page draws charts with matplotlib: pip install '.[plot]'")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder: make it, or name another page")


def write(result: dict[str, Any], path: Path) -> None:
    """Write the page, and its charts into the folder ``pictures`` beside it."""
    from mmcache_tools.peers import charts

    folder = path.parent / "pictures"
    folder.mkdir(exist_ok=True)
    drawn = charts.draw(result, folder, f"{path.stem}-")
    path.write_text(_page(result, drawn, folder.name), encoding="utf-8")


def _page(result: dict[str, Any], drawn: dict[str, str], folder: str) -> str:
    machine = result["machine"]
    parts = [_ABOUT, _machine(result), _table(tables.bounds(result), level=2)]
    parts += [f"![{title}]({folder}/{file})\n" for file, title in drawn.items()]
    parts.append(_how(result, has_gpu=machine["gpu"] is not None))
    if "faults" in result:
        listed = "\n".join(f"- *{fault}*: {what}" for fault, what in FAULTS.items())
        parts.append(f"The faults:\n\n{listed}\n")
    shown = tables.all_tables(result)[1:]
    parts += [_table(table, level=2) for table in shown if table.rows]
    return "\n".join(parts)


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    form = "The quick form" if result["quick"] else "The full form"
    return (
        f"{form}, {result['took_s'] / 60:.1f} minutes on {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}; "
        f"{machine['gpu'] or 'no GPU'}.\n"
    )


def _how(result: dict[str, Any], *, has_gpu: bool) -> str:
    gpu = "are not part of this run" if has_gpu else "were **not run**: there is no GPU here"
    scale = next((of["scale"] for of in result["replay"]["figures"].values()), 1)
    budgets = "5% of the working set's bytes for hot, 10% for host, 50% for disk"
    return _HOW.format(gpu=gpu, scale=scale, budgets=budgets)


def _table(table: tables.Table, *, level: int) -> str:
    lines = [f"{'#' * level} {table.title}", "", _line(table.columns)]
    lines.append("|" + " --- |" * len(table.columns))
    return "\n".join([*lines, *(_line(row) for row in table.rows), ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
