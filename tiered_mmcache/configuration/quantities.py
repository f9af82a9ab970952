"""Sizes and durations as people write them: ``4GiB``, ``25%``, ``500ms``.

Owns: the units, and what to write instead when a quantity cannot be used.
Does not own: what a share is a share of (the caller says), nor which key is at fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

LARGEST_SIZE_BYTES = 2**63 - 1
LONGEST_DURATION_S = 3600.0

_SIZE_EXAMPLE = "Write bytes as a whole number, or a number with a unit, such as 500MB or 4GiB"
_DURATION_EXAMPLE = "Write a number with a unit, such as 500ms or 2s, or seconds as a number"
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z%]*)")
_UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    "kB": 1000,
}
_UNIT_S = {"ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60)}


class UnusableValueError(ValueError):
    """A value that cannot be used as written: do what ``remedy`` says.

    Attributes:
        problem: What is wrong with the value.
        remedy: What to write instead; a sentence without its full stop.
        key: The key at fault, when the value is not the one being read.
    """

    def __init__(self, problem: str, remedy: str, *, key: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        self.key = key
        super().__init__(f"{problem}. {remedy}")


def size_bytes(value: object, *, share_of_bytes: Callable[[], int] | None = None) -> int:
    """Read a size: whole bytes, ``"1.5GiB"``, or ``"25%"`` where a share means something.

    Args:
        value: An int or a string; fractions of a byte are dropped.
        share_of_bytes: What 100% is, asked for only when a share is written; None refuses shares.

    Raises:
        UnusableValueError: For anything else, and for what is negative or beyond 2^63-1.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return _within_range(Fraction(value))
    if not isinstance(value, str):
        raise UnusableValueError(f"a size cannot be a {_kind(value)}", f"{_SIZE_EXAMPLE}.")
    number, unit = _split(value, what="size", example=_SIZE_EXAMPLE)
    if unit == "%":
        return _share(number, share_of_bytes)
    if unit not in _UNIT_BYTES:
        raise UnusableValueError(f"{unit!r} is not a unit of size", _size_remedy(unit))
    return _within_range(number * _UNIT_BYTES[unit])


def duration_s(value: object) -> float:
    """Read a duration in seconds: ``"500ms"``, ``"2s"``, ``"1min"``, or seconds as a number.

    Raises:
        UnusableValueError: For anything else, and for what is negative or beyond an hour.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _within_an_hour(float(value) if abs(value) < 1e9 else math.inf)
    if not isinstance(value, str):
        raise UnusableValueError(f"a duration cannot be a {_kind(value)}", f"{_DURATION_EXAMPLE}.")
    number, unit = _split(value, what="duration", example=_DURATION_EXAMPLE)
    if unit not in _UNIT_S:
        problem = f"{unit!r} is not a unit of time" if unit else "a duration needs its unit"
        raise UnusableValueError(problem, f"{_DURATION_EXAMPLE}.")
    return _within_an_hour(float(number * _UNIT_S[unit]))


def written_size(count_bytes: int) -> str:
    """The size in the largest binary unit that keeps it at least 1, such as ``23.4GiB``."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if count_bytes >= _UNIT_BYTES[unit]:
            return f"{count_bytes / _UNIT_BYTES[unit]:.1f}{unit}"
    return f"{count_bytes}B"


def _split(text: str, *, what: str, example: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UnusableValueError(f"this is not a {what}", f"{example}.")
    return Fraction(match[1]), match[2]


def _share(percent: Fraction, share_of_bytes: Callable[[], int] | None) -> int:
    if share_of_bytes is None:
        raise UnusableValueError("a share means nothing here", f"{_SIZE_EXAMPLE}.")
    if not 0 < percent <= 100:
        raise UnusableValueError("a share must be above 0% and at most 100%", "Write 25%, say.")
    return math.floor(percent * share_of_bytes() / 100)


def _size_remedy(unit: str) -> str:
    """Suggest the unit that was probably meant: ``G`` and ``gib`` are near misses of ``GiB``."""
    meant = [known for known in _UNIT_BYTES if known.lower() == unit.lower() and known != "kB"]
    if not meant and len(unit) == 1 and unit.upper() in "KMGTP":
        meant = [f"{unit.upper()}iB", f"{unit.upper()}B"]
    if meant:
        return f"Write {' or '.join(meant)}."
    return "Write B, KiB, MiB, GiB, TiB or PiB (powers of 1024), or KB to PB (powers of 1000)."


def _within_range(count_bytes: Fraction) -> int:
    if count_bytes < 0:
        raise UnusableValueError("a size cannot be negative", f"{_SIZE_EXAMPLE}.")
    if count_bytes > LARGEST_SIZE_BYTES:
        raise UnusableValueError("the size is beyond what any machine has", f"{_SIZE_EXAMPLE}.")
    return math.floor(count_bytes)


def _within_an_hour(seconds: float) -> float:
    if not 0 <= seconds <= LONGEST_DURATION_S:  # false for NaN as well
        raise UnusableValueError(
            "a duration must be at least 0 and at most one hour", f"{_DURATION_EXAMPLE}."
        )
    return seconds


def _kind(value: object) -> str:
    names = {"bool": "truth value", "float": "fraction", "NoneType": "null"}
    return names.get(type(value).__name__, type(value).__name__)
