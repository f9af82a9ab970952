"""`mmcache plan`: sizes for the tiers, from what a trace would have gained by them.

Owns: the order of questions, the recommendation and the JSON. Does not own: the answers
(:mod:`.curves`), or how they look (:mod:`.drawing`, :mod:`.plotting`).

A hot tier is looked at alone first: its knee, or what device memory is given, is the size that is
recommended. Host memory is then looked at below that, and the disk below both. Of these the
smallest is recommended that gains nearly as much as the largest.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.sizing.curves import (
    Point,
    Sizes,
    footprint_bytes,
    hot_curve,
    knee_of,
    lower_curve,
    mean_cost_s,
    round_sizes,
    sizes_to_try,
)
from mmcache_tools.sizing.sampling import Sample
from mmcache_tools.sizing.traces import Trace
from tiered_mmcache.configuration.machine import disk_room_bytes, memory
from tiered_mmcache.configuration.quantities import UnusableValueError, size_bytes

__all__ = ["Plan", "PlanOptions", "make_plan", "plan_trace"]

_NEARLY_AS_MUCH = 0.005
_SIZES_BELOW = 8
_ROUNDING = 1.1  # pages of the arena and of the store take more than the embeddings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line asked for."""

    trace: Path
    hot: str
    memory: str
    disk: str
    store: Path
    sample: int
    tokens_per_s: float | None = None
    plot: Path | None = None
    as_json: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a trace says about sizes.

    Attributes:
        trace: The file.
        sample: What was looked at.
        limits: The most that each tier may take.
        best: The hit ratio when nothing ever had to go.
        all_s: Seconds of encoding without any cache; None when no cost is known.
        hot: A hot tier alone.
        host: Host memory below the recommended hot tier, the first without any.
        disk: A disk below both, the first without any.
        knee: Where more hot bytes begin to gain less; None when nothing is gained.
        recommended: One of the points, the last of the above that is worth its bytes.
    """

    trace: Path
    sample: Sample
    limits: Sizes
    best: float
    all_s: float | None
    hot: list[Point]
    host: list[Point]
    disk: list[Point]
    knee: Point | None
    recommended: Point

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        sample = self.sample
        return {
            "command": "plan",
            "trace": str(self.trace),
            "requests": sample.requests,
            "unsized": sample.unsized,
            "resized": sample.resized,
            "keys": round(sample.keys / sample.rate),
            "footprint_bytes": round(footprint_bytes(sample)),
            "largest_bytes": int(sample.sizes.max(initial=0)),
            "span_s": sample.span_s,
            "sampled": {"rate": sample.rate, "keys": sample.keys},
            "limits": dataclasses.asdict(self.limits),
            "best_hit_ratio": self.best,
            "encoder_s": self.all_s,
            "hot": [_point(each) for each in self.hot],
            "host": [_point(each) for each in self.host],
            "disk": [_point(each) for each in self.disk],
            "knee_bytes": None if self.knee is None else self.knee.sizes.hot,
            "recommended": {**_point(self.recommended), "yaml": recommended_yaml(self)},
        }


def _point(point: Point) -> dict[str, Any]:
    return {
        "hot_bytes": point.sizes.hot,
        "host_bytes": point.sizes.host,
        "disk_bytes": point.sizes.disk,
        "hit_ratio": point.hit_ratio,
        "hot_ratio": point.hot,
        "host_ratio": point.host,
        "disk_ratio": point.disk,
        "saved_s": point.saved_s,
        "error": point.error,
    }


def plan_trace(options: PlanOptions) -> int:
    """Make the plan and print it; the exit code.

    Raises:
        UsageError: The trace or an option cannot be used.
    """
    if options.plot is not None:
        from mmcache_tools.sizing.plotting import refuse_unusable

        refuse_unusable(options.plot)
    trace = Trace(options.trace)
    plan = make_plan(trace, options)
    if options.as_json:
        print_json(plan.as_dict())
    else:
        from mmcache_tools.sizing.drawing import print_plan

        print_plan(plan)
    if options.plot is not None:
        from mmcache_tools.sizing.plotting import plot

        plot(plan, options.plot)
    for problem in trace.damage:
        complain(f"{options.trace}, {problem}; the rest was used.")
    return ExitCode.FOUND if trace.damage else ExitCode.FINE


def make_plan(trace: Trace, options: PlanOptions) -> Plan:
    """Look at a trace.

    Raises:
        UsageError: The trace or an option cannot be used.
    """
    limits = _limits(options)
    with contextlib.closing(Sample(trace, most_keys=options.sample)) as sample:
        if not sample.taken:
            raise UsageError(f"{trace.path} has no request with a size in bytes")
        return _plan(trace.path, sample, limits, options)


def _plan(path: Path, sample: Sample, limits: Sizes, options: PlanOptions) -> Plan:
    costs_s = sample.costs_s
    if options.tokens_per_s is not None:
        costs_s = sample.tokens / options.tokens_per_s
    sizes = sizes_to_try(sample)
    if limits.hot < sizes[-1]:  # what may be recommended is looked at, too
        sizes = sorted({*sizes, limits.hot})
    hot = hot_curve(sample, sizes, costs_s)
    knee = knee_of(hot)
    hot_bytes = min(hot[-1].sizes.hot if knee is None else knee.sizes.hot, limits.hot)
    footprint = footprint_bytes(sample)
    tried = [Sizes(hot=hot_bytes, host=size) for size in _below(hot_bytes, footprint, limits.host)]
    host = lower_curve(sample, hot_bytes, tried, costs_s)
    chosen = _worth_it(host)
    sizes = _below(max(hot_bytes, chosen.sizes.host), footprint, limits.disk)
    tried = [dataclasses.replace(chosen.sizes, disk=size) for size in sizes]
    disk = lower_curve(sample, hot_bytes, tried, costs_s)
    total_s = mean_cost_s(sample, costs_s) * sample.sized_requests
    return Plan(
        trace=path,
        sample=sample,
        limits=limits,
        best=max(0.0, 1.0 - sample.keys / sample.rate / sample.sized_requests),
        all_s=total_s or None,
        hot=hot,
        host=host,
        disk=disk,
        knee=knee,
        recommended=_worth_it(disk),
    )


def _limits(options: PlanOptions) -> Sizes:
    folder = options.store.expanduser().absolute()
    shares = {
        "hot": None,
        "memory": lambda: memory().available_bytes,
        "disk": lambda: disk_room_bytes(folder),
    }
    limits = []
    for name, share in shares.items():
        try:
            limits.append(size_bytes(getattr(options, name), share_of_bytes=share))
        except UnusableValueError as error:
            value = getattr(options, name)
            raise UsageError(f"--{name} {value}: {error.problem}. {error.remedy}") from None
    if not limits[0]:
        raise UsageError("--hot 0: there is no cache without a hot tier. Write 4GiB, say.")
    return Sizes(hot=limits[0], host=limits[1], disk=limits[2])


def _below(above_bytes: int, footprint: float, limit_bytes: int) -> list[int]:
    """Sizes to try below tiers of some size: none at all, and up to all that could be of use."""
    sizes = [
        size for size in round_sizes(above_bytes / 2, footprint * _ROUNDING) if size <= limit_bytes
    ]
    if limit_bytes and (not sizes or sizes[-1] < min(limit_bytes, footprint * _ROUNDING)):
        sizes.append(limit_bytes)
    step = max(1, -(-len(sizes) // _SIZES_BELOW))
    return [0, *sizes[::-1][::step][::-1]]


def _worth_it(points: list[Point]) -> Point:
    """The smallest that gains nearly as much as the best."""
    enough = max(point.hit_ratio for point in points) - _NEARLY_AS_MUCH
    return next(point for point in points if point.hit_ratio >= enough)


def recommended_yaml(plan: Plan) -> str:
    """The recommendation as sections of a configuration."""
    sizes = plan.recommended.sizes
    at_disk, at_host = plan.recommended, _with(plan.host, sizes.host)
    lines = [
        "namespace: organisation/model@revision/dtype  # whatever changes embeddings",
        "hot:",
        f"  max_size: {_written(sizes.hot)}  # answers {at_host.hot:.1%} of the requests",
    ]
    if sizes.host:
        lines += ["host:", f"  max_size: {_written(sizes.host)}  # {at_host.host:.1%} more"]
    if sizes.disk:
        more = at_disk.hit_ratio - at_host.hit_ratio
        lines += [
            "disk:",
            "  path: /var/cache/tiered-mmcache",
            f"  max_size: {_written(sizes.disk)}  # {more:.1%} more",
        ]
    return "\n".join(lines) + "\n"


def _with(points: list[Point], host_bytes: int) -> Point:
    return next(point for point in points if point.sizes.host == host_bytes)


def _written(size: int) -> str:
    """A size that the configuration reads as the same number."""
    text = written_bytes(size)
    return text if size_bytes(text) == size else str(size)
