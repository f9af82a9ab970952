"""Taking a result apart for the lower tiers, and putting it together again.

Owns: which results can leave the device, and the exactness of what comes back.
Does not own: copies (:mod:`tiered_mmcache.host.transfer`) or the registry of classes
(:mod:`tiered_mmcache.contract`).
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from types import MemberDescriptorType
from typing import Any, NamedTuple

import torch

from tiered_mmcache.contract import EmbeddingResult, tag_of, with_embedding
from tiered_mmcache.entries.extras import NotPlainError, decode_extras, encode_extras
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.errors import RecordError
from tiered_mmcache.host.recycled import RecycledBuffers
from tiered_mmcache.host.transfer import dtype_of, header_of, is_storable


class CannotLeaveError(Exception):
    """A result that can only live in the hot tier; ``reason`` is a label that is counted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def describe(result: EmbeddingResult, *, cost_s: float = 0.0) -> EntryHeader:
    """Everything about a result but its bytes.

    The class tag is empty when the class is not registered: the entry then stays in memory.

    Args:
        result: The result.
        cost_s: Seconds that encoding it took; 0.0 when unknown.

    Raises:
        CannotLeaveError: It could not be restored exactly: the embedding is no plain strided
            tensor, or another field holds something that is not a plain value.
    """
    if not is_storable(result.embedding):
        raise CannotLeaveError("tensor_kind")
    fields = _extra_fields(result)
    try:
        extras = encode_extras(fields)
    except NotPlainError:
        raise CannotLeaveError("extra_fields") from None
    tag = tag_of(type(result)) or ""
    return header_of(result.embedding, class_tag=tag, extras=extras, cost_s=cost_s)


def detached(result: EmbeddingResult) -> EmbeddingResult:
    """The result itself, or one without its autograd graph, which would keep the encoder alive."""
    if not result.embedding.requires_grad:
        return result
    return with_embedding(result, result.embedding.detach())


def empty_target(
    header: EntryHeader, device: torch.device, buffers: RecycledBuffers
) -> torch.Tensor:
    """A contiguous tensor for an entry's bytes, on the caller's current stream.

    Raises:
        RecordError: This torch does not know the dtype.
        RuntimeError: There is no memory for it.
    """
    dtype = dtype_of(header)
    if dtype is None:
        raise RecordError("unknown_dtype", f"this torch has no dtype {header.dtype}")
    if device.type == "cpu":
        if dtype is not torch.complex32:
            return buffers.empty(header.shape, dtype)
        with warnings.catch_warnings():  # torch warns of it; its bytes are all we touch
            warnings.simplefilter("ignore", UserWarning)
            return buffers.empty(header.shape, dtype)
    return torch.empty(header.shape, dtype=dtype, device=device)


def rebuild(
    result_class: type[EmbeddingResult], embedding: torch.Tensor, extras: bytes
) -> EmbeddingResult:
    """A result of exactly that class, with the fields that were stored.

    Raises:
        RecordError: The stored fields are not the fields of the class as it is now.
    """
    fields = decode_extras(extras)
    if fields.keys() != set(_fields_of(result_class).extra):
        name = result_class.__qualname__
        raise RecordError("changed_class", f"{name} no longer has the fields {sorted(fields)}")
    result = object.__new__(result_class)
    object.__setattr__(result, "embedding", embedding)
    for name, value in fields.items():
        object.__setattr__(result, name, value)
    return result


def target_device(header: EntryHeader, setting: str) -> torch.device | None:
    """Where an entry is promoted to, or None when there is no such device here.

    Args:
        header: The entry.
        setting: ``auto`` for the kind of device that the entry came from (the current one), or
            the name of a device.
    """
    if setting != "auto":
        return torch.device(setting)
    if header.device_type == "cpu":
        return torch.device("cpu")
    return _current_accelerator(header.device_type)


def _current_accelerator(device_type: str) -> torch.device | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        return None
    index = torch.accelerator.current_device_index()  # pragma: gpu
    return torch.device(device_type, index)  # pragma: gpu


class _Fields(NamedTuple):
    """What an eviction has to know of a class, kept at hand.

    Attributes:
        extra: The fields beside the embedding, in the order of the class, so that equal results
            have equal bytes in every process.
        slots: The names that a result may hold outside of its dictionary.
    """

    extra: tuple[str, ...]
    slots: tuple[str, ...]


_known_fields: weakref.WeakKeyDictionary[type[Any], _Fields] = weakref.WeakKeyDictionary()


def _fields_of(result_class: type[EmbeddingResult]) -> _Fields:
    known = _known_fields.get(result_class)
    if known is None:
        names = [field.name for field in dataclasses.fields(result_class)]
        members = [item for base in result_class.__mro__ for item in vars(base).items()]
        known = _known_fields[result_class] = _Fields(
            extra=tuple(name for name in names if name != "embedding"),
            slots=tuple(name for name, kind in members if isinstance(kind, MemberDescriptorType)),
        )
    return known


def _extra_fields(result: EmbeddingResult) -> dict[str, object]:
    names = _fields_of(type(result)).extra
    if _attributes(result) - {"embedding", *names}:
        raise CannotLeaveError("extra_fields")  # attributes that are no fields would be lost
    try:
        return {name: getattr(result, name) for name in names}
    except AttributeError:
        raise CannotLeaveError("extra_fields") from None


def _attributes(result: EmbeddingResult) -> set[str]:
    """The names of all that is set on a result, in its dictionary or in slots."""
    slots = {name for name in _fields_of(type(result)).slots if hasattr(result, name)}
    return slots | set(getattr(result, "__dict__", ()))
