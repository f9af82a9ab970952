"""`mmcache export`: entries written to files, each checked against its digests first.

Owns: which entries, where to, and what is said of them. Does not own: the files' contents
(:mod:`.tensor_files`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmcache_tools.inspection.lookup import the_one
from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json
from mmcache_tools.inspection.target import Target
from mmcache_tools.upkeep.tensor_files import Format, write_file
from tiered_mmcache.disk.audit import ChunkCheck
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.errors import RecordError

__all__ = ["Export", "export_entries"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What to write.

    Attributes:
        keys: KEYs; none is every entry.
        namespace: In this namespace only.
        to: The format.
        out: The folder; made when it is not there.
        as_json: JSON instead of text.
    """

    keys: Sequence[str]
    namespace: str | None
    to: Format
    out: Path
    as_json: bool


def export_entries(target: Target, export: Export) -> int:
    """Write the entries, one at a time; the exit code."""
    files: list[str] = []
    skipped: list[str] = []
    with StoreReader.open(target.folder) as reader:
        entries = list(_named(reader, export)) if export.keys else _all(reader, export)
        export.out.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            name = entry.store_key.hex()
            data = _payload(reader, entry)
            if data is None:
                skipped.append(name)
                continue
            file = write_file(export.out / name, export.to, entry.record(), data)
            files.append(str(file))
            if not export.as_json:
                print(file)
    if export.as_json:
        answer = {"command": "export", "store": str(target.folder), "to": export.to.value}
        print_json({**answer, "files": files, "skipped": skipped})
    for name in skipped:
        complain(f"{name} is damaged or was replaced meanwhile, and is left out.")
    return ExitCode.FOUND if skipped else ExitCode.FINE


def _named(reader: StoreReader, export: Export) -> Iterator[StoredEntry]:
    for key in export.keys:
        entry = the_one(reader, key, export.namespace)
        if entry is None:
            raise UsageError(f"there is no entry {key!r}. `mmcache ls` lists what is there.")
        yield entry


def _all(reader: StoreReader, export: Export) -> Iterator[StoredEntry]:
    """Every entry of the current generations."""
    stale = {bucket.number for bucket in reader.buckets() if bucket.stale}
    for entry in reader.entries():
        try:
            record = entry.record()
        except RecordError:
            yield entry  # told as damaged
            continue
        if export.namespace in (None, record.namespace) and entry.place.bucket not in stale:
            yield entry


def _payload(reader: StoreReader, entry: StoredEntry) -> bytes | None:
    """The embedding's bytes, or None when they are not what was stored."""
    try:
        record = entry.record()
    except RecordError:
        return None
    check = ChunkCheck(record)
    chunks: list[bytes] = []

    def visit(number: int, data: memoryview) -> None:
        copied = bytes(data)
        if check.visit(number, memoryview(copied)):
            chunks.append(copied)

    unchanged = reader.visit_chunks(entry, visit)
    check.finish()
    return b"".join(chunks) if unchanged and not check.problems else None
