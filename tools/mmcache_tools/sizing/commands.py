"""`mmcache plan` and `mmcache trace`, as the command line knows them.

Owns: their signatures. Does not own: what they do; each imports its module when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache_tools.inspection.commands import JsonOption
from mmcache_tools.inspection.outcome import ended

__all__ = ["register"]


_PANEL = "Size and watch"
_TRACE_HELP = """Make and describe traces of requests.

Example: mmcache trace info recorded.trace
"""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(name="trace", help=_TRACE_HELP, no_args_is_help=True)
    group.command(name="record")(record)
    group.command(name="info")(info)
    app.add_typer(group, rich_help_panel=_PANEL)
    app.command(rich_help_panel=_PANEL)(plan)


def record(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A CSV of time, key, bytes, or a trace.")
    ],
    out: Annotated[Path, typer.Option(help="The trace to write; a new file.")],
    salt: Annotated[
        str | None,
        typer.Option(
            help="Makes the digests of keys; traces of one salt can be compared.",
            show_default="random",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a trace of another cache's log: keys become salted digests, so it can be shared.

    A running cache records its own trace when its YAML has a section `trace`.

    Example: mmcache trace record requests.csv --out requests.trace
    """

    def work() -> int:
        from mmcache_tools.sizing.recording import record as record_trace

        return record_trace(source, out, salt=salt, as_json=as_json)

    ended(work)


def info(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, or a CSV.")],
    as_json: JsonOption = False,
) -> None:
    """Say what is in a trace: requests, keys, bytes, time, outcomes, and damage.

    Ends with 1 when a part of it is damaged.

    Example: mmcache trace info recorded.trace
    """

    def work() -> int:
        from mmcache_tools.sizing.describing import describe

        return describe(trace, as_json=as_json)

    ended(work)


def plan(  # noqa: PLR0917 - each is an option
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Recorded by a cache, or a CSV of time, key, bytes.",
        ),
    ],
    hot: Annotated[str, typer.Option(help="Device memory to spare at most.")] = "4GiB",
    memory: Annotated[
        str, typer.Option(help="Host memory at most; a share is of what is available here.")
    ] = "25%",
    disk: Annotated[
        str, typer.Option(help="Disk at most; a share is of the room where --store is.")
    ] = "50%",
    store: Annotated[Path, typer.Option(help="Where the disk tier would be.")] = Path(
        "/var/cache/tiered-mmcache"
    ),
    tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1e-9, help="The encoder's speed, in place of the costs in the trace."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a chart in a new file, .png or .svg.")
    ] = None,
    sample: Annotated[
        int,
        typer.Option(
            min=1000, max=1 << 20, help="Look at so many keys at most; more is more exact."
        ),
    ] = 32_768,
    as_json: JsonOption = False,
) -> None:
    """Say how large the tiers should be, from a trace of requests.

    Tells the hit ratio and the encoder seconds saved of a hot tier, of host memory below it and of
    a disk below both, for many sizes, and recommends sizes as YAML. Ends with 1 when a part of the
    trace is damaged.

    Example: mmcache plan requests.csv --hot 4GiB --memory 64GiB --disk 500GiB
    """

    def work() -> int:
        from mmcache_tools.sizing.planning import PlanOptions, plan_trace

        options = PlanOptions(
            trace=trace,
            hot=hot,
            memory=memory,
            disk=disk,
            store=store,
            sample=sample,
            tokens_per_s=tokens_per_s,
            plot=plot,
            as_json=as_json,
        )
        return plan_trace(options)

    ended(work)
