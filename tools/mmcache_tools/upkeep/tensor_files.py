"""Entries as files that other programs read: safetensors, npy and pt, one file for each entry.

Owns: what stands in such a file, and reading it back. Does not own: the store. Torch is loaded for
pt alone. The safetensors format (github.com/huggingface/safetensors#format) is written here: its
library takes bfloat16 and float8 without torch only through calls that change between releases.

Beside the tensor a file carries what makes it the same entry again: key, namespace, class, extra
fields, digests. In safetensors that is the metadata, in pt a part of the dictionary, for an npy a
JSON file beside it. A tensor without it has the caller's key for its name; an npy, for the file's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from mmcache_tools.inspection.outcome import UsageError
from tiered_mmcache.entries.record import CHUNK_BYTES, EntryHeader, Record, digest

__all__ = ["FileTensor", "Format", "digests_of", "read_file", "write_file"]

_MARK = "tiered_mmcache"
_SAFETENSORS = dict(
    [
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
        *(("bool", "BOOL"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")),
        ("complex64", "C64"),
    ]
)
_LONGEST_HEAD_BYTES = 100_000_000  # the library's own bound
_FROM_SAFETENSORS = {code: name for name, code in _SAFETENSORS.items()}
_NUMPY = {
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


class Format(str, Enum):
    """How a file is written."""

    SAFETENSORS = "safetensors"
    NPY = "npy"
    PT = "pt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor of a file.

    Attributes:
        name: The caller's key as text, where ``about`` does not have it.
        dtype: The torch name without its prefix.
        shape: The tensor's.
        data: Its bytes, row-major and little-endian.
        about: What :func:`write_file` wrote beside it; None for a file of another program.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    about: dict[str, Any] | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        if self.dtype.startswith("float8"):
            return 1
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize


def write_file(base: Path, kind: Format, record: Record, data: bytes) -> Path:
    """Write an entry to ``base`` with the format's ending, and whatever belongs beside it.

    Raises:
        UsageError: The format has no such dtype.
    """
    write = {Format.SAFETENSORS: _write_safetensors, Format.NPY: _write_npy, Format.PT: _write_pt}
    file = base.with_name(f"{base.name}.{kind.value}")
    write[kind](file, record.header, data, _about(record))
    return file


def read_file(file: Path) -> Iterator[FileTensor]:
    """The tensors of a file, by its ending.

    Raises:
        UsageError: It is not such a file.
    """
    readers: dict[str, Callable[[Path], Iterator[FileTensor]]] = {
        ".safetensors": _read_safetensors,
        ".npy": _read_npy,
        ".pt": _read_pt,
    }
    if file.suffix not in readers:
        raise UsageError(f"{file} is none of .safetensors, .npy and .pt.")
    try:
        yield from readers[file.suffix](file)
    except (UsageError, OSError):
        raise
    except Exception:  # noqa: BLE001 - files of anybody: numpy and torch raise what they like
        problem = f"{file} cannot be read: it is no {file.suffix} file, or a damaged one."
        raise UsageError(problem) from None


def digests_of(data: bytes) -> str:
    """The digests of an entry's chunks, in hex."""
    view = memoryview(data)
    steps = range(0, len(data), CHUNK_BYTES)
    return b"".join(digest(view[start : start + CHUNK_BYTES]) for start in steps).hex()


def _about(record: Record) -> dict[str, Any]:
    header = record.header
    return {
        "full_key": record.full_key.hex(),
        "namespace": record.namespace,
        "class_tag": header.class_tag,
        "extras": header.extras.hex(),
        "device_type": header.device_type,
        "cost_s": header.cost_s,
        "digests": record.digests.hex(),
    }


def _write_safetensors(file: Path, header: EntryHeader, data: bytes, about: dict[str, Any]) -> None:
    if header.dtype not in _SAFETENSORS:
        raise UsageError(f"safetensors has no {header.dtype}. Write --to pt.")
    head = {
        "__metadata__": {_MARK: json.dumps(about)},
        "embedding": {
            "dtype": _SAFETENSORS[header.dtype],
            "shape": list(header.shape),
            "data_offsets": [0, len(data)],
        },
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.write(data)


def _read_safetensors(file: Path) -> Iterator[FileTensor]:
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        try:
            head = json.loads(content.read(length) if length <= _LONGEST_HEAD_BYTES else b"")
            about = _read_about((head.pop("__metadata__", None) or {}).get(_MARK))
            places = [(name, _place(tensor)) for name, tensor in head.items()]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UsageError(f"{file} cannot be read: it is no safetensors file.") from None
        for name, (code, shape, start, end) in places:
            if code not in _FROM_SAFETENSORS:
                raise UsageError(f"{file}: {code} of {name} cannot be stored.")
            content.seek(8 + length + start)
            data = content.read(end - start)
            dtype = _FROM_SAFETENSORS[code]
            yield FileTensor(name=name, dtype=dtype, shape=shape, data=data, about=about)


def _place(tensor: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, start and end of a tensor in a safetensors head."""
    start, end = map(int, tensor["data_offsets"])
    if not 0 <= start <= end:
        raise ValueError("offsets")
    return str(tensor["dtype"]), tuple(map(int, tensor["shape"])), start, end


def _write_npy(file: Path, header: EntryHeader, data: bytes, about: dict[str, Any]) -> None:
    if header.dtype not in _NUMPY:
        raise UsageError(f"npy has no {header.dtype}. Write --to safetensors.")
    values = np.frombuffer(data, dtype=np.dtype(header.dtype).newbyteorder("<"))
    np.save(file, values.reshape(header.shape), allow_pickle=False)
    file.with_suffix(".json").write_text(json.dumps(about), encoding="utf-8")


def _read_npy(file: Path) -> Iterator[FileTensor]:
    values = np.load(file, allow_pickle=False)
    if values.dtype.name not in _NUMPY:
        raise UsageError(f"{file}: {values.dtype.name} cannot be stored.")
    beside = file.with_suffix(".json")
    about = _read_about(beside.read_text(encoding="utf-8")) if beside.exists() else None
    yield FileTensor(
        name=file.stem,
        dtype=values.dtype.name,
        shape=values.shape,
        data=values.astype(values.dtype.newbyteorder("<")).tobytes(),
        about=about,
    )


def _write_pt(file: Path, header: EntryHeader, data: bytes, about: dict[str, Any]) -> None:
    import importlib

    torch = importlib.import_module("torch")
    dtype = getattr(torch, header.dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    torch.save({"embedding": tensor.reshape(header.shape), _MARK: json.dumps(about)}, file)


def _read_pt(file: Path) -> Iterator[FileTensor]:
    import importlib

    torch = importlib.import_module("torch")
    content = torch.load(file, weights_only=True, map_location="cpu")
    if isinstance(content, torch.Tensor):
        content = {file.stem: content}
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds neither a tensor nor a dictionary of tensors.")
    about = _read_about(content.pop(_MARK, None))
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{file}: {name} is no tensor.")
        plain = tensor.detach().contiguous()
        yield FileTensor(
            name=str(name),
            dtype=str(plain.dtype).removeprefix("torch."),
            shape=tuple(plain.shape),
            data=plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
            about=about,
        )


def _read_about(text: object) -> dict[str, Any] | None:
    if not isinstance(text, str):
        return None
    try:
        about = json.loads(text)
    except ValueError:
        return None
    return about if isinstance(about, dict) and "full_key" in about else None
