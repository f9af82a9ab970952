"""One request for one embedding, and the CSV that holds many.

Owns: the columns ``time,key,bytes,tokens,cost``.
Does not own: where requests come from.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from typing import TextIO

COLUMNS = ("time", "key", "bytes", "tokens", "cost")


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
