"""What `mmcache top` shows of each cache.

Owns: its lines and bars. Does not own: the numbers (:mod:`.readings`), or when it is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmcache_tools.inspection.rows import printable, written_bytes, written_span
from mmcache_tools.watching.readings import Reading, Source, State
from tiered_mmcache.metrics.families import WAYS

__all__ = ["Pair", "view"]

_COLOURS = {State.LIVE: "green", State.STALE: "yellow", State.GONE: "red"}
_SAID = {
    State.LIVE: "live",
    State.STALE: "stale: the server is idle, serves all from the hot tier, or hangs",
    State.GONE: "gone: the process ended without closing its cache, or is in another container",
}
_NAMES = {"hot": "hot", "host": "host", "write_buffer": "write buffer", "disk": "disk"}
_OTHER_COLUMNS = 56
_LONGEST_BAR = 40
_FULL = 0.999
_MOST_NAMED = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reading, and an earlier one of the same cache to tell rates by.

    Attributes:
        now: The reading.
        before: The last one with another time of writing, or None.
    """

    now: Reading
    before: Reading | None = None

    def rate(self, name: str, label: str | None = None) -> float | None:
        """How much a counter grew in a second; None without an earlier reading."""
        if self.before is None:
            return None
        passed_s = self.now.written_s - self.before.written_s
        grown = _total(self.now, name, label) - _total(self.before, name, label)
        return max(0.0, grown) / passed_s if passed_s > 0 else None


def _total(reading: Reading, name: str, label: str | None) -> float:
    if label is None:
        return sum(reading.of(name).values())
    return reading.one(name, label) or 0.0


def view(pairs: Sequence[Pair], source: Source, console: Console) -> RenderableType:
    """All caches, one below the other."""
    parts: list[RenderableType] = []
    for pair in pairs:
        parts += [*_heading(pair.now), _rooms(pair, console), _sums(pair), Text("")]
    if not pairs:
        parts.append(Text(f"no cache publishes its metrics in {source.folder} any more"))
    return Group(*parts[:-1] if pairs else parts)


def _heading(reading: Reading) -> Iterator[Text]:
    colour = _COLOURS[reading.state]
    heading = Text("process ", style="bold")
    heading.append(f"{reading.process}", style="bold")
    heading.append(f"  {_SAID[reading.state]}", style=colour)
    yield heading
    when = "just now" if reading.age_s < 1 else f"{written_span(reading.age_s)} ago"
    namespace = printable(reading.namespace, 200) or "no namespace"
    yield Text(f"{namespace}, as of {when}", overflow="ellipsis", no_wrap=True)


def _rooms(pair: Pair, console: Console) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("tier", no_wrap=True)
    longest = max(8, min(_LONGEST_BAR, console.width - _OTHER_COLUMNS))
    table.add_column("fill", no_wrap=True, width=longest + 5)
    for name in ("used", "budget", "entries", "hits/s"):
        table.add_column(name, justify="right", no_wrap=True)
    rooms = pair.now.as_dict()["tiers"]
    for room, shown in _NAMES.items():
        if room not in rooms:
            continue
        held = rooms[room]
        rate = pair.rate("mmcache_hits_total", room)
        table.add_row(
            shown,
            _bar(held["used_bytes"], held["budget_bytes"], longest, console),
            written_bytes(int(held["used_bytes"])),
            written_bytes(int(held["budget_bytes"])),
            f"{held['entries']:,.0f}",
            "" if room == "write_buffer" else _per_second(rate),
        )
    return table


def _bar(used: float, budget: float, longest: int, console: Console) -> Text:
    share = min(1.0, used / budget) if budget else 0.0
    unicode = (console.encoding or "").lower().startswith("utf")
    full, empty = ("█", "░") if unicode else ("#", ".")
    length = round(share * longest)
    # A full tier is as it should be; only a full write buffer is not, and that is counted below.
    bar = Text(full * length, style="cyan")
    bar.append(empty * (longest - length), style="dim")
    bar.append(f"{share:>5.0%}" if share < _FULL else " full")
    return bar


def _sums(pair: Pair) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text, colour in _lines(pair):
        grid.add_row(name, Text(text, style=colour))
    return grid


def _lines(pair: Pair) -> Iterator[tuple[str, str, str]]:
    reading = pair.now
    asked = reading.hits + reading.misses
    since = f"{reading.hits / asked:.1%} since the start" if asked else "none yet"
    hits_s, misses_s = pair.rate("mmcache_hits_total"), pair.rate("mmcache_misses_total")
    now = ""
    if hits_s is not None and misses_s is not None and hits_s + misses_s > 0:
        now = f"{hits_s / (hits_s + misses_s):.1%} of {hits_s + misses_s:,.1f}/s now, "
    yield "hits", f"{now}{since}, of {asked:,.0f} look-ups", ""
    yield "misses", _named(reading.of("mmcache_misses_total")), ""
    moves = [
        f"{way.replace('_to_', ' to ')} {_moved(pair, way)}"
        for way in WAYS
        if reading.one("mmcache_moved_bytes_total", way)
    ]
    yield "moves", ", ".join(moves) or "none", ""
    saved_s = reading.one("mmcache_saved_seconds_total")
    if saved_s:
        yield "saved", f"{written_span(saved_s)} of encoding, as far as is known", ""
    drops = {each: count for each, count in reading.of("mmcache_drops_total").items() if count}
    if drops:
        yield "drops", _named(drops), ""
    if reading.one("mmcache_worker_is_up") == 0:
        yield "worker", "down: misses are served in place of the disk", "red"
    faults = {each: count for each, count in reading.of("mmcache_faults_total").items() if count}
    yield "faults", _named(faults), "red" if faults else ""


def _moved(pair: Pair, way: str) -> str:
    rate = pair.rate("mmcache_moved_bytes_total", way)
    if rate is None:
        return written_bytes(int(pair.now.one("mmcache_moved_bytes_total", way) or 0))
    return f"{written_bytes(int(rate))}/s"


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}"


def _named(counts: dict[str, float]) -> str:
    """The largest counts with their labels."""
    found = sorted(((count, label) for label, count in counts.items() if count), reverse=True)
    named = [f"{printable(label)} {count:,.0f}" for count, label in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        named.append(f"{len(found) - _MOST_NAMED} other kinds")
    return ", ".join(named) or "none"
