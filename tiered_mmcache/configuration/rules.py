"""The rules that single values of the configuration must keep.

Owns: each rule and what to write instead.
Does not own: which key a value belongs to (:mod:`tiered_mmcache.config`), units
(:mod:`.quantities`) or what the machine has (:mod:`.machine`).
"""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

from tiered_mmcache.configuration import machine
from tiered_mmcache.configuration.quantities import UnusableValueError, size_bytes, written_size

LARGEST_NAMESPACE_BYTES = 1024
LARGEST_DEFAULT_WRITE_BUFFER_BYTES = 1 << 30

NAMESPACE_REMEDY = (
    "Write what makes embeddings interchangeable, such as the model, its revision and the dtype: "
    "`namespace: Qwen/Qwen2.5-VL-7B-Instruct@main/bf16`."
)

_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?")
# Control characters, lone surrogates (which UTF-8 cannot hold), line and paragraph separators.
_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}


def usable_namespace(value: object) -> object:
    """Refuse a namespace that could be mistaken for another; what is no text is left alone."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise UnusableValueError("a namespace cannot be empty", NAMESPACE_REMEDY)
    if value != value.strip():
        raise UnusableValueError("there is white space at its ends", "Write it without.")
    if any(unicodedata.category(character) in _UNPRINTABLE for character in value):
        raise UnusableValueError("it holds a control character", "Write printable text.")
    if len(value.encode("utf-8")) > LARGEST_NAMESPACE_BYTES:
        problem = f"it is longer than {LARGEST_NAMESPACE_BYTES} bytes"
        raise UnusableValueError(problem, "Shorten it, to a digest of the long part, say.")
    return value


def usable_device(value: str) -> str:
    """Refuse what cannot be torch's name of a device; whether it is there, torch knows."""
    if _DEVICE.fullmatch(value) is None:
        raise UnusableValueError("this is not a device", "Write auto, cpu, cuda or cuda:0.")
    return value


def store_folder(value: object, base: Path | None) -> Path:
    """Make the store's folder absolute, from ``base`` or from the working directory."""
    if not isinstance(value, (str, Path)) or not value:
        raise UnusableValueError("this is not a folder's path", "Write /var/cache/mmcache, say.")
    text = str(value)
    if "\0" in text:
        raise UnusableValueError("a path holds no NUL", "Write it without.")
    if "$" in text:
        raise UnusableValueError("variables are not expanded", "Write the path itself; ~ is home.")
    try:
        folder = (base or Path.cwd()) / Path(text).expanduser()
        is_other = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UnusableValueError(f"this path cannot be used ({reason})", "Name another.") from error
    if is_other:
        raise UnusableValueError("this is not a folder", "Name a folder, which need not exist.")
    return folder


def folder_in_memory(value: object, base: Path | None) -> Path:
    """Refuse a folder that may lie on a disk: whoever calls the cache writes there."""
    folder = Path(os.path.normpath(store_folder(value, base)))
    if not any(folder.is_relative_to(place) for place in ("/dev/shm", "/run")):  # noqa: S108 - named
        problem = "a call of the cache writes there, and must not wait for a disk"
        raise UnusableValueError(problem, "Write a folder in /dev/shm or /run.")
    return folder


def host_size_bytes(value: object, *, check_machine: bool) -> int:
    """Read a size of host memory, a share being of what is available now."""
    size = size_bytes(value, share_of_bytes=lambda: machine.memory().available_bytes)
    if check_machine and size > (memory := machine.memory()).total_bytes:
        total = written_size(memory.total_bytes)
        remedy = "Write less, or a share of what is available: 25%."
        if memory.total_bound != machine.THIS_MACHINE:
            remedy += f" Or raise {memory.total_bound}."
        raise UnusableValueError(f"this is more than the {total} of memory that there is", remedy)
    return size


def disk_size_bytes(value: object, *, folder: Path, check_machine: bool) -> int:
    """Read a size on the disk of ``folder``, a share being of the room there."""
    size = size_bytes(value, share_of_bytes=lambda: _disk_room_bytes(folder))
    if check_machine and size > (room := _disk_room_bytes(folder)):
        problem = f"this is more than the {written_size(room)} that the disk has room for"
        raise UnusableValueError(problem, "Write less, or a share of the room: 50%.")
    return size


def tier_size_bytes(size: int, *, example: str) -> int:
    """Refuse a tier of no size: a tier that is off is one that is not written at all."""
    if size == 0:
        raise UnusableValueError(
            "a tier cannot be of no size",
            f"Write {example}, say, or leave the section out to turn the tier off.",
        )
    return size


def default_write_buffer_bytes() -> int:
    """1 GiB, or a sixteenth of the memory where that is less."""
    return min(LARGEST_DEFAULT_WRITE_BUFFER_BYTES, machine.memory().total_bytes // 16)


def _disk_room_bytes(folder: Path) -> int:
    try:
        return machine.disk_room_bytes(folder)
    except OSError as error:
        problem = f"the disk of {folder} cannot be asked for its room ({error.strerror})"
        raise UnusableValueError(problem, "Name a folder that can be reached.") from error
