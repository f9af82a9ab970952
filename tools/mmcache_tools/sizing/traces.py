"""Reading a trace of any origin: one of a cache, one of `mmcache workload`, or a CSV of others.

Owns: telling them apart, the columns of a CSV, and what is said of a line that is not as it should
be. Does not own: the format of a cache's own traces (:mod:`tiered_mmcache.tracing.format`).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from mmcache_tools.inspection.outcome import UsageError
from tiered_mmcache.tracing.format import MAGIC, RECORD, Outcome, TraceFormatError, TraceReader

__all__ = ["Records", "Trace"]

Records = NDArray[Any]

_XZ = b"\xfd7zXZ\x00"
_GZIP = b"\x1f\x8b"
_BLOCK_LINES = 1 << 16
_COLUMNS = ("time", "key", "bytes", "tokens", "cost")
_NEEDED = ("key", "bytes")
LARGEST_ENTRY_BYTES = 1 << 40  # what many keys have together stays within 64 bits
_LARGEST_LINE = 1 << 16


class Trace:
    """One trace; it is read as often as :meth:`blocks` is asked for.

    Args:
        path: The file: of a cache, or CSV, plain, gzip or xz.

    Attributes:
        damage: What the last reading could not use, in words.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: list[str] = []
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        self.is_own = start == MAGIC
        self._open = open
        if start.startswith(_XZ):
            self._open = lzma.open  # type: ignore[assignment]
        elif start.startswith(_GZIP):
            self._open = gzip.open  # type: ignore[assignment]

    def blocks(self) -> Iterator[Records]:
        """The requests in order, as arrays of the dtype ``RECORD``; times are in seconds.

        Raises:
            UsageError: The file is no trace, or a line of it is not as it should be.
        """
        self.damage = []
        if self.is_own:
            with self.path.open("rb") as file:
                yield from self._own_blocks(file)
            return
        try:
            with self._open(self.path, "rt", encoding="utf-8", newline="") as file:
                yield from self._csv_blocks(file)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise UsageError(f"{self.path} cannot be unpacked: {error}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{self.path} is neither a trace nor a CSV in UTF-8") from None

    def _own_blocks(self, file: BinaryIO) -> Iterator[Records]:
        try:
            reader = TraceReader(file)
        except TraceFormatError as error:
            raise UsageError(f"{self.path}: {error}") from None
        impossible = 0
        for records in reader.blocks():
            possible = _are_possible(records)
            impossible += len(records) - int(possible.sum())
            yield records[possible]
        self.damage = [f"byte {each.offset}: {each.problem}" for each in reader.damage]
        if impossible:
            self.damage.append(f"{impossible:,} records that cannot be: of no time, size or cost")

    def _csv_blocks(self, file: TextIO) -> Iterator[Records]:
        first = file.readline(_LARGEST_LINE)
        columns = _Columns(first, self.path)
        rest = _short_lines(file, self.path)
        lines = rest if columns.has_heading else itertools.chain([first], rest)
        number = 2 if columns.has_heading else 1
        while chunk := list(itertools.islice(lines, _BLOCK_LINES)):
            yield columns.records(chunk, number)
            number += len(chunk)


def _are_possible(records: Records) -> NDArray[np.bool_]:
    """Which of the records of a block say something that can be; their digest may be anyone's."""
    possible: NDArray[np.bool_] = np.isfinite(records["time"])
    possible &= records["bytes"] <= LARGEST_ENTRY_BYTES
    possible &= np.isfinite(records["cost"]) & (records["cost"] >= 0)
    possible &= records["outcome"] <= max(Outcome)
    return possible


def _short_lines(file: TextIO, path: Path) -> Iterator[str]:
    while line := file.readline(_LARGEST_LINE):
        if len(line) == _LARGEST_LINE:
            raise UsageError(f"{path} has a line of more than {_LARGEST_LINE} characters")
        yield line


class _Columns:
    """Where in a line the fields of a request are.

    A heading names the columns, in any order and among others. Without one they are time, key,
    bytes and perhaps tokens and cost. They are parted by commas, semicolons, tabs or spaces.
    """

    def __init__(self, first: str, path: Path) -> None:
        self._path = path
        self._mark = next((mark for mark in (",", ";", "\t") if mark in first), None)
        fields = [field.strip().strip('"').lower() for field in first.split(self._mark)]
        self.has_heading = "key" in fields
        if self.has_heading:
            missing = [name for name in _NEEDED if name not in fields]
            if missing:
                raise UsageError(f"{path} has no column {missing[0]}: its heading is {first!r}")
            self._places = {name: fields.index(name) for name in _COLUMNS if name in fields}
        elif 3 <= len(fields) <= len(_COLUMNS):
            self._places = dict(zip(_COLUMNS, range(len(fields)), strict=False))
        else:
            what = "an empty file" if not first else f"a line {first.strip()[:60]!r}"
            raise UsageError(f"{path} begins with {what}: write a heading time,key,bytes")
        self._width = max(self._places.values()) + 1

    def records(self, lines: Sequence[str], number: int) -> Records:
        """The requests in some lines, of which the first has this number.

        Raises:
            UsageError: A line is not as it should be.
        """
        with contextlib.suppress(ValueError, OverflowError, IndexError):
            return self._converted([line.rstrip("\r\n").split(self._mark) for line in lines])
        for at, line in enumerate(lines, start=number):  # slowly, to name the line
            try:
                self._converted([line.rstrip("\r\n").split(self._mark)])
            except (ValueError, OverflowError, IndexError) as error:
                names = ",".join(self._places)
                problem = f"{self._path}, line {at}: {line.strip()[:60]!r} is not {names}"
                raise UsageError(f"{problem} ({error})") from None
        raise AssertionError("each line can be read, but not all")

    def _converted(self, rows: list[list[str]]) -> Records:
        rows = [row for row in rows if row and row != [""]]
        found: Records = np.zeros(len(rows), RECORD)
        for name, place in self._places.items():
            texts = [row[place] for row in rows]
            if name == "key":
                found["key"] = [xxhash.xxh3_64_intdigest(text.strip().encode()) for text in texts]
            else:
                found[name] = _numbers(texts, whole=name in ("bytes", "tokens"))
        return found


def _numbers(texts: list[str], *, whole: bool) -> NDArray[np.float64]:
    values = np.array([float(text) if text else 0.0 for text in texts], np.float64)
    if len(values) and not (np.isfinite(values).all() and values.min() >= 0):
        wrong = next(text for text in texts if not (text and 0 <= float(text) < math.inf))
        raise ValueError(f"{wrong} is no amount")
    if whole and len(values) and values.max() > LARGEST_ENTRY_BYTES:
        raise ValueError(f"{values.max():.0f} is too much")
    return values
