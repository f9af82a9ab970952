"""A plan as text: tables with bars, in colours on a terminal.

Owns: how it looks. Does not own: what it says (:mod:`.planning`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmcache_tools.inspection.rows import printable, written_bytes, written_span
from mmcache_tools.sizing.curves import Point, footprint_bytes
from mmcache_tools.sizing.planning import Plan, recommended_yaml

__all__ = ["print_plan"]

_COLOURS = {"hot": "magenta", "host": "yellow", "disk": "blue"}
_MARKS = {"hot": "█", "host": "▓", "disk": "░"}
_PLAIN_MARKS = {"hot": "#", "host": "+", "disk": "."}
_OTHER_COLUMNS = 44
_LONGEST_BAR = 78
_ERROR_CHARACTERS = 6
_MOST_ROWS = 12


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what the trace says, one table a tier, and the recommendation."""
    console = Console(highlight=False) if console is None else console
    with console.capture() as captured:
        _print(plan, console)
    print(captured.get(), end="")


def _print(plan: Plan, console: Console) -> None:
    for name, text in _facts(plan):
        console.print(f"[bold]{name:<14}[/]", Text(text), soft_wrap=True)
    sizes = plan.recommended.sizes
    knee = None if plan.knee is None else plan.knee.sizes.hot
    _print_tier(console, "hot tier alone", "hot", _thinned(plan.hot, sizes.hot, knee), plan)
    below = f"host memory below {written_bytes(sizes.hot)} of hot tier"
    _print_tier(console, below, "host", plan.host, plan)
    above = " and ".join(
        f"{written_bytes(size)} of {what}"
        for size, what in ((sizes.hot, "hot tier"), (sizes.host, "host memory"))
        if size
    )
    _print_tier(console, f"a disk below {above}", "disk", plan.disk, plan)
    legend = Text("\n")
    for tier, colour in _COLOURS.items():
        legend.append(_mark(console, tier), style=colour)
        legend.append(f" {tier}   ")
    console.print(legend, "\n")
    console.print("[bold]recommended[/]", Text(_in_words(plan)), soft_wrap=True)
    console.print(Text(recommended_yaml(plan)), end="", soft_wrap=True)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    sample = plan.sample
    requests = f"{sample.requests:,} for {round(sample.keys / sample.rate):,} different keys"
    if sample.span_s:
        requests += f" in {written_span(sample.span_s)}"
    yield "trace", printable(str(plan.trace))
    yield "requests", requests
    largest = written_bytes(int(sample.sizes.max()))
    footprint = written_bytes(round(footprint_bytes(sample)))
    yield "embeddings", f"{footprint} in all, the largest {largest}"
    if sample.rate < 1:
        share = f"{sample.rate:.3%} of the keys ({sample.keys:,})"
        yield "sampled", f"{share}; hits have their standard error in percent"
    if plan.all_s is None:
        yield "encoder", "unknown: the trace has no costs; --tokens-per-s gives the speed"
    else:
        yield "encoder", f"{written_span(plan.all_s)} without a cache"
    yield "at best", f"{plan.best:.1%} of the requests are hits"
    if plan.knee is not None:
        gained = f"{plan.knee.hit_ratio:.1%} hits in {written_bytes(plan.knee.sizes.hot)}"
        yield "knee", f"{gained}, where more bytes begin to gain less"
    if sample.unsized:
        yield "left out", f"{sample.unsized:,} requests that have no size"
    if sample.resized:
        yield "sizes", f"{sample.resized:,} requests say another size than their key's first did"


def _in_words(plan: Plan) -> str:
    point = plan.recommended
    words = f"{point.hit_ratio:.1%} hits"
    if point.saved_s is not None and plan.all_s:
        words += f", {written_span(point.saved_s)} of {written_span(plan.all_s)} encoding saved"
    if not point.sizes.disk:
        words += "; a disk would gain next to nothing, but what it holds survives a restart"
    return words


def _print_tier(
    console: Console, title: str, tier: str, points: Sequence[Point], plan: Plan
) -> None:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    longest = max(10, min(_LONGEST_BAR, console.width - _OTHER_COLUMNS))
    sampled = plan.sample.rate < 1
    longest -= _ERROR_CHARACTERS if sampled else 0
    for name, width in (("size", 8), ("hits", 6), ("saved", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("", no_wrap=True, overflow="crop", min_width=longest)
    table.add_column("", no_wrap=True)
    chosen = getattr(plan.recommended.sizes, tier)
    for point in points:
        size = getattr(point.sizes, tier)
        knee = tier == "hot" and plan.knee is not None and size == plan.knee.sizes.hot
        notes = ["knee"] if knee else []
        if size == chosen:
            notes.append("chosen")
        saved = "-" if point.saved_s is None else written_span(point.saved_s)
        table.add_row(
            written_bytes(size) if size else "none",
            f"{point.hit_ratio:.1%}"
            + (f" {_or(console)}{100 * point.error:.1f}" if sampled else ""),
            saved,
            _bar(console, point, longest),
            ", ".join(notes),
            style="bold" if size == chosen else "",
        )
    console.print(f"\n[bold]{title}[/]")
    console.print(table)


def _bar(console: Console, point: Point, longest: int) -> Text:
    bar = Text()
    drawn, reached = 0, 0.0
    for tier, colour in _COLOURS.items():
        reached += getattr(point, tier)
        length = round(reached * longest) - drawn
        bar.append(_mark(console, tier) * length, style=colour)
        drawn += max(0, length)
    return bar


def _mark(console: Console, tier: str) -> str:
    return (_MARKS if _is_unicode(console) else _PLAIN_MARKS)[tier]


def _or(console: Console) -> str:
    """Plus or minus."""
    return "±" if _is_unicode(console) else "+-"


def _is_unicode(console: Console) -> bool:
    return (console.encoding or sys.stdout.encoding or "").lower().startswith("utf")


def _thinned(points: list[Point], *kept: int | None) -> list[Point]:
    """Every so many of the points, and those of some sizes."""
    step = -(-len(points) // _MOST_ROWS)
    return [
        point
        for number, point in enumerate(reversed(points))
        if number % step == 0 or point.sizes.hot in kept
    ][::-1]
