"""One request for one embedding, and the CSV that holds many.

Owns: the columns ``time,key,bytes,tokens,cost`` and the checks on reading them.
Does not own: where requests come from.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

COLUMNS = ("time", "key", "bytes", "tokens", "cost")
_REQUIRED = COLUMNS[:3]


class TraceError(Exception):
    """A file is not what it should be; the message names it, and the line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Somebody asks for one item's embedding.

    Attributes:
        time_s: When, in seconds from the beginning.
        key: Which item, 0 to 2**64 - 1.
        size_bytes: The embedding's bytes; the same for each request of a key.
        tokens: Its rows; 0 when unknown.
        cost_s: Seconds that the encoder takes to make it; 0.0 when unknown.
    """

    time_s: float
    key: int
    size_bytes: int
    tokens: int = 0
    cost_s: float = 0.0


def write(requests: Iterable[Request], file: TextIO) -> int:
    """Write a trace with its heading; how many requests it has."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    number = 0
    for request in requests:
        writer.writerow(
            (
                f"{request.time_s:.6f}",
                request.key,
                request.size_bytes,
                request.tokens,
                f"{request.cost_s:.6f}",
            )
        )
        number += 1
    return number


def read(path: Path) -> list[Request]:
    """Read a trace; the columns tokens and cost may be missing.

    Raises:
        TraceError: A column is missing, or a line has something that is no number.
        OSError: The file cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _REQUIRED if name not in (rows.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: there is no column {missing[0]}")
        return [_request(row, path, rows.line_num) for row in rows]


def _request(row: dict[str, str], path: Path, line: int) -> Request:
    try:
        return Request(
            time_s=float(row["time"]),
            key=int(row["key"]),
            size_bytes=int(row["bytes"]),
            tokens=int(row.get("tokens") or 0),
            cost_s=float(row.get("cost") or 0.0),
        )
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}, line {line}: {error}") from None
