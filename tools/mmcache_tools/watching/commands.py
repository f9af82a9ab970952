"""`mmcache top`, as the command line knows it.

Owns: its signature. Does not own: what it does, which is imported when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache_tools.inspection.commands import JsonOption
from mmcache_tools.inspection.outcome import ended

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Size and watch")(top)


def top(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="The server's YAML file, its `metrics.folder`, or one file in that.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the files.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch running caches: how full tiers are, hits, moves and faults, from published metrics.

    Needs a section `metrics` in the server's YAML. `q` or Ctrl-C ends it. With `--once`, with
    `--json` and in a pipe it prints once, and ends with 1 when a server is gone or its metrics are
    stale.

    Example: mmcache top mmcache.yaml --once
    """

    def work() -> int:
        from mmcache_tools.watching.top import watch

        return watch(source, interval_s=interval, once=once, as_json=as_json)

    ended(work)
