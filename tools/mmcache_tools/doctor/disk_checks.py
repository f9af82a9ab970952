"""The doctor's checks of the disk: file system, room, speed, and the store that is there.

Owns: the short measurement, in a file without a name that is gone when it ends.
Does not own: the machine (:mod:`.machine_checks`), or a whole check of a store (`mmcache verify`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from mmcache_tools.doctor.findings import Finding, State
from mmcache_tools.inspection.rows import written_bytes
from tiered_mmcache.configuration.machine import disk_room_bytes
from tiered_mmcache.disk.folder import (
    file_system_of,
    last_use_was_clean,
    refuse_network_file_system,
)
from tiered_mmcache.disk.layout import DATA_FILE
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.errors import StoreUnavailableError

__all__ = ["disk_findings"]

_MEASURED_BYTES = 64 * 1024 * 1024
_STEP_BYTES = 4 * 1024 * 1024
_LONGEST_S = 2.0
_LEAST_ROOM_BYTES = 4 * _MEASURED_BYTES


def disk_findings(folder: Path, *, wanted_bytes: int | None, measure: bool) -> Iterator[Finding]:
    """What the disk of a store's folder is fit for; the folder need not be there yet."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    yield _file_system(nearest)
    yield _room(folder, wanted_bytes)
    if measure:
        yield _speed(nearest)
    if (folder / DATA_FILE).exists():
        yield _store(folder)


def _file_system(place: Path) -> Finding:
    kind = file_system_of(place) or "an unknown file system"
    try:
        refuse_network_file_system(place)
    except StoreUnavailableError as error:
        return Finding(check="file_system", state=State.BAD, found=kind, remedy=error.remedy)
    if kind in ("overlay", "tmpfs"):
        remedy = "Put the store on a volume: overlay is slow, and tmpfs is host memory."
        return Finding(check="file_system", state=State.NOTE, found=kind, remedy=remedy)
    return Finding(check="file_system", state=State.OK, found=kind)


def _room(folder: Path, wanted_bytes: int | None) -> Finding:
    room_bytes = disk_room_bytes(folder.absolute())
    found = f"{written_bytes(room_bytes)} for the store"
    if wanted_bytes is not None and wanted_bytes > room_bytes:
        found += f"; disk.max_size is {written_bytes(wanted_bytes)}"
        remedy = "Lower disk.max_size, or free space there."
        return Finding(check="disk_room", state=State.BAD, found=found, remedy=remedy)
    return Finding(check="disk_room", state=State.OK, found=found)


def _speed(place: Path) -> Finding:
    try:
        write_rate, read_rate = _measured(place)
    except OSError as error:
        return Finding(
            check="disk_speed",
            state=State.NOTE,
            found=f"not measured: {error.strerror}",
            remedy="Run this as the server's user, on a disk with 256 MiB to spare.",
        )
    rates = f"{written_bytes(write_rate)}/s written, {written_bytes(read_rate)}/s read"
    return Finding(check="disk_speed", state=State.OK, found=rates)


def _measured(place: Path) -> tuple[int, int]:
    """Bytes in a second, written and flushed, and read with nothing in the page cache.

    Raises:
        OSError: There is no room, or no right, for the file.
    """
    status = os.statvfs(place)
    if status.f_bavail * status.f_frsize < _LEAST_ROOM_BYTES:
        raise OSError(28, os.strerror(28))
    fd = os.open(place, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        step = os.urandom(_STEP_BYTES)
        started_s = time.monotonic()
        written = 0
        while written < _MEASURED_BYTES and time.monotonic() - started_s < _LONGEST_S:
            written += os.write(fd, step)
        os.fsync(fd)
        write_s = time.monotonic() - started_s
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.monotonic()
        read = 0
        while time.monotonic() - started_s < _LONGEST_S and (
            data := os.pread(fd, _STEP_BYTES, read)
        ):
            read += len(data)
        read_s = time.monotonic() - started_s
    finally:
        os.close(fd)
    return int(written / max(write_s, 1e-6)), int(read / max(read_s, 1e-6))


def _store(folder: Path) -> Finding:
    try:
        with StoreReader.open(folder) as reader:
            entries = reader.totals().entries
    except StoreUnavailableError as error:
        return Finding(check="store", state=State.BAD, found=str(error), remedy=error.remedy)
    ended = "" if last_use_was_clean(folder) else "; in use, or not closed by its last user"
    return Finding(check="store", state=State.OK, found=f"{entries} entries{ended}")
