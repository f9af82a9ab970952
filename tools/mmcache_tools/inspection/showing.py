"""`mmcache show`: one entry, field by field, its digests checked and its values summed up.

Owns: the text and the JSON of one entry. Does not own: finding it (:mod:`.lookup`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from datetime import datetime, timezone
from typing import Any

from mmcache_tools.inspection.lookup import the_one
from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import (
    EntryRow,
    entry_row,
    print_fields,
    print_json,
    printable,
    written_bytes,
    written_shape,
    written_span,
)
from mmcache_tools.inspection.selection import EVERYTHING, Selector
from mmcache_tools.inspection.target import Target
from mmcache_tools.inspection.values import ValueSummary, why_not_computed
from tiered_mmcache.disk.audit import ChunkCheck
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.entries.extras import decode_extras
from tiered_mmcache.entries.record import Record
from tiered_mmcache.errors import RecordError

__all__ = ["show_entry"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Payload:
    """What reading all chunks told.

    Attributes:
        state: ``matching``, ``damaged``, or ``changed`` when the entry was replaced meanwhile.
        matching: Chunks that match their digests.
        problems: What is wrong with the others.
        values: The summary, or None.
        not_computed: Why there is no summary; None when there is one.
    """

    state: str
    matching: int
    problems: list[str]
    values: ValueSummary | None
    not_computed: str | None


def show_entry(target: Target, key: str, *, namespace: str | None, as_json: bool) -> int:
    """Print one entry; the command's exit code."""
    with StoreReader.open(target.folder) as reader:
        entry = the_one(reader, key, namespace)
        if entry is None:
            complain(f"{target.folder} has no entry {key!r}. `mmcache ls` lists what is there.")
            return ExitCode.FOUND
        try:
            record = entry.record()
        except RecordError as error:
            complain(f"the record of {entry.store_key.hex()} is damaged: {error}.")
            return ExitCode.FOUND
        now_s = time.time()
        (selected,) = Selector(EVERYTHING, now_s=now_s).selected([entry])
        stale = {bucket.number for bucket in reader.buckets() if bucket.stale}
        row = entry_row(selected, stale, now_s=now_s)
        payload = _read_payload(reader, entry, record)
    print_answer = _print_json if as_json else _print_text
    print_answer(target, entry, row, record, payload)
    return ExitCode.FINE if payload.state == "matching" else ExitCode.FOUND


def _read_payload(reader: StoreReader, entry: StoredEntry, record: Record) -> _Payload:
    check = ChunkCheck(record)
    reason = why_not_computed(record.header.dtype)
    values = ValueSummary(record.header.dtype) if reason is None else None

    def visit(number: int, data: memoryview) -> None:
        if check.visit(number, data) and values is not None:
            values.add(data)

    unchanged = reader.visit_chunks(entry, visit)
    check.finish()
    problems = [detail for _, detail in check.problems]
    state = "damaged" if problems else "matching"
    if not unchanged:
        state = "changed"
        problems = ["the entry was replaced or removed while it was read"]
    if problems:
        values, reason = None, "its bytes cannot be trusted"
    return _Payload(
        state=state,
        matching=check.matching,
        problems=problems,
        values=values,
        not_computed=reason,
    )


# As JSON


def _print_json(
    target: Target, entry: StoredEntry, row: EntryRow, record: Record, payload: _Payload
) -> None:
    place = entry.place
    answer = {
        "command": "show",
        "store": str(target.folder),
        "entry": row.as_dict(),
        "place": {"bucket": place.bucket, "sequence": place.sequence},
        "item_bytes": record.header.item_bytes,
        "record_bytes": entry.record_bytes,
        "extras": _extras(record, plain=True),
        "digests": {
            "state": payload.state,
            "matching": payload.matching,
            "of": record.chunk_count,
            "problems": payload.problems,
        },
        "values": _values(payload),
    }
    print_json(answer)


def _values(payload: _Payload) -> dict[str, Any]:
    values = payload.values
    if values is None:
        return {"computed": False, "reason": payload.not_computed}
    return {
        "computed": True,
        "count": values.count,
        "min": values.least,
        "max": values.greatest,
        "mean": _plain(values.mean),
        "nan": values.nan,
        "inf": values.inf,
    }


def _extras(record: Record, *, plain: bool) -> Any:
    """The extra fields; damaged ones as a text that says so."""
    try:
        fields = decode_extras(record.header.extras)
    except RecordError as error:
        return f"damaged: {error}"
    return _plain(fields) if plain else fields


def _plain(value: Any) -> Any:
    """A value as JSON has it; what it lacks becomes an object with one field that names it."""
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {"map": [[_plain(key), _plain(item)] for key, item in value.items()]}
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [_plain(value.real), _plain(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


# As text


def _print_text(
    _: Target, entry: StoredEntry, row: EntryRow, record: Record, payload: _Payload
) -> None:
    print_fields(_lines(entry, row, record, payload))


def _lines(
    entry: StoredEntry, row: EntryRow, record: Record, payload: _Payload
) -> list[tuple[str, str]]:
    generation = f"{row.generation} ({'stale' if row.stale else 'current'})"
    lines = [
        ("store key", row.store_key),
        ("key", printable(row.key)),
        ("namespace", printable(row.namespace)),
        ("generation", generation),
        ("class", printable(row.class_tag)),
        ("dtype", f"{printable(row.dtype)}, {record.header.item_bytes} bytes each"),
        ("shape", written_shape(row.shape)),
        ("device", printable(row.device_type)),
        ("size", f"{written_bytes(row.payload_bytes)} ({row.payload_bytes} bytes)"),
        ("charged", f"{written_bytes(row.charged_bytes)} ({row.charged_bytes} bytes)"),
        ("record", f"{entry.record_bytes} bytes"),
        ("stored", _written_time(row)),
        ("cost", written_span(row.cost_s) if row.cost_s else "unknown"),
        ("place", f"{entry.place.sequence} in generation number {entry.place.bucket}"),
        ("extras", _written_extras(record)),
        ("digests", f"{payload.state}, {payload.matching} of {record.chunk_count} chunks match"),
    ]
    lines += [("", problem) for problem in payload.problems]
    return [*lines, ("values", _written_values(payload))]


def _written_time(row: EntryRow) -> str:
    try:
        moment = datetime.fromtimestamp(row.created_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{row.created_s} s since 1970"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC, {written_span(row.age_s)} ago"


def _written_extras(record: Record) -> str:
    fields = _extras(record, plain=False)
    if isinstance(fields, str):
        return printable(fields)
    return printable(", ".join(f"{name}={value!r}" for name, value in fields.items())) or "none"


def _written_values(payload: _Payload) -> str:
    values = payload.values
    if values is None:
        return f"not computed: {payload.not_computed}"
    numbers = [("min", values.least), ("max", values.greatest), ("mean", values.mean)]
    parts = [f"{name} {_written_number(number)}" for name, number in numbers]
    return ", ".join([*parts, f"{values.nan} NaN, {values.inf} Inf of {values.count}"])


def _written_number(number: complex | None) -> str:
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.6g}"
