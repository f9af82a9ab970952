"""Reading ServeGen's description of a multimodal service: clients, rates, sizes.

Owns: its two kinds of files. Does not own: which image a request shows, of which it says nothing.

``chunk-N-trace.csv`` has, for each window of a client: start (s), requests a second, coefficient of
variation, and a fitted distribution that is not used here. ``chunk-N-dataset.json`` has, for each
longer window, the shares of image tokens and of images in a request.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmcache_tools.workload.requests import TraceError
from mmcache_tools.workload.sizes import draw

_MOST_RATE = 1e6  # requests a second of one client
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    KeyError,
    MemoryError,  # from nesting too deep for Python's own parser
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of some client: when, and the tokens of each of its images."""

    time_s: float
    image_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    rate: float
    variation: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    start_s: float
    tokens: Mapping[int, float]
    images: Mapping[int, float]


def arrivals(folder: Path, *, start_s: float, seed: int) -> Iterator[Arrival]:
    """Requests of all clients together, in order, from ``start_s`` of the day to its end.

    Raises:
        TraceError: The folder has no such files, or one that is not as described.
    """
    traces = sorted(folder.glob("chunk-*-trace.csv"))
    if not traces:
        raise TraceError(f"{folder}: there is no chunk-*-trace.csv")
    length_s = 0.0
    for begin_s, end_s, windows in _steps(traces, start_s):
        together = [
            arrival
            for trace, window in windows
            for arrival in _of_client(trace, window, begin_s, end_s, seed)
        ]
        for each in sorted(together, key=lambda arrival: arrival.time_s):
            yield dataclasses.replace(each, time_s=length_s + each.time_s - begin_s)
        length_s += end_s - begin_s


def _steps(
    traces: list[Path], start_s: float
) -> Iterator[tuple[float, float, list[tuple[Path, _Window]]]]:
    """Spans of the day in which no client changes its rate."""
    of_client = {trace: _windows(trace) for trace in traces}
    starts = sorted({window.start_s for windows in of_client.values() for window in windows})
    ends = [*starts[1:], starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 600.0)]
    for begin_s, end_s in zip(starts, ends, strict=True):
        if end_s <= start_s:
            continue
        current = [
            (trace, max(before, key=lambda window: window.start_s))
            for trace, windows in of_client.items()
            if (before := [window for window in windows if window.start_s <= begin_s])
        ]
        yield begin_s, end_s, [(trace, window) for trace, window in current if window.rate > 0]


def _of_client(
    trace: Path, window: _Window, begin_s: float, end_s: float, seed: int
) -> Iterator[Arrival]:
    chance = random.Random(f"{seed} {trace.name} {begin_s}")
    content = _content_at(trace, begin_s)
    # Gamma distributed gaps have the recorded rate and coefficient of variation.
    shape = 1 / max(window.variation, 0.05) ** 2
    time_s = begin_s
    while True:
        time_s += chance.gammavariate(shape, 1 / (window.rate * shape))
        if time_s >= end_s:
            return
        images = max(1, draw(content.images, chance))
        tokens = tuple(max(1, draw(content.tokens, chance)) for _ in range(images))
        yield Arrival(time_s=time_s, image_tokens=tokens)


def _windows(trace: Path) -> list[_Window]:
    try:
        with trace.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        windows = [_Window(float(row[0]), float(row[1]), float(row[2])) for row in rows]
    except (ValueError, IndexError, csv.Error) as error:
        raise TraceError(f"{trace}: {error}") from None
    if not windows:
        raise TraceError(f"{trace}: there is no window")
    for window in windows:
        sound = math.isfinite(window.start_s) and 0 <= window.rate <= _MOST_RATE
        if not sound or not 0 <= window.variation < math.inf:
            raise TraceError(f"{trace}: {window} is no window of a service")
    return windows


def _content_at(trace: Path, time_s: float) -> _Content:
    dataset = trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))
    try:
        described = json.loads(dataset.read_text(encoding="utf-8"))
        contents = [
            _Content(float(start), _shares(window["image_tokens"]), _shares(window["image_count"]))
            for start, window in described.items()
        ]
    except (OSError, *_UNREADABLE) as error:
        raise TraceError(f"{dataset}: {error}") from None
    known = [each for each in contents if each.tokens and each.images]
    if not known:
        raise TraceError(f"{dataset}: no window has image tokens")
    before = [each for each in known if each.start_s <= time_s]
    return max(before, key=lambda each: each.start_s) if before else known[0]


def _shares(written: str) -> dict[int, float]:
    """A distribution, written as a Python dictionary in a string; without the value 0."""
    shares = ast.literal_eval(written)
    return {int(value): float(share) for value, share in shares.items() if value and share > 0}
