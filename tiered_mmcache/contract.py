"""The interface that engines program against, and the values that go through it.

Owns: :class:`MultimodalCache`, :class:`EmbeddingResult` and the registry of result classes.
Does not own: any policy. The interface is the one that SGLang's multimodal caches share
(``sglang/srt/mem_cache/multimodal_cache.py``, releases 0.5.8 to 0.5.23).
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch

from tiered_mmcache.entries.keys import CombinedHash, combine_hashes

__all__ = [
    "EmbeddingResult",
    "MultimodalCache",
    "Tier",
    "class_of_tag",
    "register_result_class",
    "tag_of",
    "with_embedding",
]


@dataclasses.dataclass(kw_only=True)
class EmbeddingResult:
    """One encoder output.

    Attributes:
        embedding: Usually ``(tokens, hidden)``, but any dtype, shape and device is allowed.
            Embeddings are immutable: whoever sets or gets one must not write to it.
    """

    embedding: torch.Tensor


class Tier(enum.Enum):
    """Where an entry is."""

    HOT = "hot"
    HOST = "host"
    DISK = "disk"


class MultimodalCache(ABC):
    """A cache of encoder outputs, keyed by the hash of the content or of an ordered combination."""

    @staticmethod
    def combine_hashes(mm_hashes: Sequence[Hashable]) -> CombinedHash | None:
        """The key of an ordered combination: equal to ``hash(tuple(mm_hashes))``, None if empty.

        The returned integer also carries its parts, so that combinations whose hashes collide
        stay different entries.
        """
        return combine_hashes(mm_hashes)

    @abstractmethod
    def get(
        self, mm_hashes: Sequence[Hashable], combined_hash: int | None = None
    ) -> EmbeddingResult | None:
        """The entry of the whole ordered combination, or None.

        Args:
            mm_hashes: The hashes of the items, in order. Nothing is matched by prefix or subset.
            combined_hash: Accepted for compatibility and computed anew.
        """

    @abstractmethod
    def set(
        self,
        mm_hash: Hashable,
        embedding: EmbeddingResult,
        mm_embedding_allocator: object = None,
    ) -> bool:
        """Admit an entry; True when the very next look-up finds it, False when it was refused."""

    @abstractmethod
    def has(self, mm_hash: Hashable) -> bool:
        """Whether a look-up would find the hash; does not change recency."""

    @abstractmethod
    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """Drop every copy of an entry; False when it is unknown."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything."""

    @abstractmethod
    def available_size(self) -> int:
        """The number of entries."""


def with_embedding(result: EmbeddingResult, embedding: torch.Tensor) -> EmbeddingResult:
    """A shallow copy of a result, of the same class and fields, with another embedding.

    Unlike ``dataclasses.replace`` it neither runs the class's initialiser nor resets fields that
    the initialiser does not take.
    """
    changed = copy.copy(result)
    object.__setattr__(changed, "embedding", embedding)
    return changed


_ResultClass = TypeVar("_ResultClass", bound=type[EmbeddingResult])
_CLASS_OF_TAG: dict[str, type[EmbeddingResult]] = {}
_TAG_OF_CLASS: dict[type[EmbeddingResult], str] = {}


def register_result_class(tag: str, result_class: _ResultClass) -> _ResultClass:
    """Allow a dataclass to be stored on disk and to be restored exactly.

    Args:
        tag: The name written into records. It must stay the same for as long as stores live.
        result_class: A dataclass with a field ``embedding``. Its other fields must hold None,
            booleans, integers, floats, strings, bytes, lists, tuples or dictionaries of these.

    Returns:
        The class, unchanged.

    Raises:
        TypeError: ``result_class`` is not a dataclass with an ``embedding``.
        ValueError: The tag is empty, too long, or taken by another class.
    """
    candidate: object = result_class
    if not (isinstance(candidate, type) and dataclasses.is_dataclass(candidate)):
        raise TypeError(f"{result_class!r} is not a dataclass")
    if "embedding" not in {field.name for field in dataclasses.fields(result_class)}:
        raise TypeError(f"{result_class.__name__} has no field 'embedding'")
    if not tag or len(tag.encode()) > 255:
        raise ValueError("a tag has 1 to 255 bytes")
    if _CLASS_OF_TAG.get(tag, result_class) is not result_class:
        raise ValueError(f"tag {tag!r} already stands for {_CLASS_OF_TAG[tag].__qualname__}")
    if _TAG_OF_CLASS.get(result_class, tag) != tag:
        raise ValueError(
            f"{result_class.__name__} is registered as {_TAG_OF_CLASS[result_class]!r}"
        )
    _CLASS_OF_TAG[tag] = result_class
    _TAG_OF_CLASS[result_class] = tag
    return result_class


def tag_of(result_class: type[EmbeddingResult]) -> str | None:
    """The tag of exactly this class, or None when it may only be kept in memory."""
    return _TAG_OF_CLASS.get(result_class)


def class_of_tag(tag: str) -> type[EmbeddingResult] | None:
    """The class that a record's tag stands for in this process, or None."""
    return _CLASS_OF_TAG.get(tag)


register_result_class("EmbeddingResult", EmbeddingResult)
