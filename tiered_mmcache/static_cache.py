"""The hot tier: a byte-bounded least-recently-used dictionary of embeddings.

Owns: admission, recency and the exact byte bound, as the specification of SGLang's
``MultiModalStaticCache`` gives them (0.5.23: storage accounting, clones of views, refusal of an
oversized entry before anything is evicted). Every operation is O(1).
Does not own: what becomes of an evicted entry. :meth:`MultiModalStaticCache._on_evict` is where a
subclass takes it over; here it is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch

from tiered_mmcache.contract import EmbeddingResult, MultimodalCache, with_embedding
from tiered_mmcache.entries.keys import combine_hashes


def _get_tensor_size(embedding: torch.Tensor) -> int:
    """Bytes that a tensor keeps alive: its storage, or its payload where it has no storage."""
    try:
        return embedding.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse and other storage-less layouts
        return embedding.element_size() * embedding.numel()


def admitted_size(embedding: torch.Tensor) -> int:
    """Bytes that the tensor will hold once admitted: a view of a larger storage is cloned first."""
    return min(_get_tensor_size(embedding), embedding.element_size() * embedding.numel())


def compact(result: EmbeddingResult) -> EmbeddingResult:
    """The result itself, or a copy of it whose embedding owns no more storage than its payload.

    A view of a larger storage is cloned, so that one slice cannot keep a whole batch alive and
    the bytes charged are the bytes held.
    """
    embedding = result.embedding
    if _get_tensor_size(embedding) <= embedding.element_size() * embedding.numel():
        return result
    return with_embedding(result, embedding.clone())


class MultiModalStaticCache(MultimodalCache):
    """Byte-bounded LRU cache of :class:`EmbeddingResult` on the device where they were made.

    Attributes:
        max_size: The bound in bytes.
        current_size: Bytes of the entries held now; never more than ``max_size``.
        mm_cache: The entries, least recently used first.
        result_class: What may be set; an engine's plug-in puts the engine's own class here.
    """

    result_class: ClassVar[type] = EmbeddingResult

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size = max_size
        self.current_size = 0
        self.mm_cache: OrderedDict[Hashable, EmbeddingResult] = OrderedDict()

    def get(
        self, mm_hashes: Sequence[Hashable], combined_hash: int | None = None
    ) -> EmbeddingResult | None:
        """The stored result of the whole ordered combination (now most recently used), or None."""
        combined_hash = combine_hashes(mm_hashes)
        if combined_hash is None:
            return None
        return self.get_single(combined_hash)

    def get_single(self, mm_hash: Hashable) -> EmbeddingResult | None:
        """The stored result of one hash (now most recently used), or None."""
        result = self.mm_cache.get(mm_hash)
        if result is not None:
            self.mm_cache.move_to_end(mm_hash)
        return result

    def set(  # type: ignore[override]  # engines name the third argument in two ways
        self,
        mm_hash: Hashable,
        embedding: EmbeddingResult,
        loc: object = None,
        *,
        mm_embedding_allocator: object = None,
    ) -> bool:
        """Admit an entry, evicting the least recently used ones until it fits.

        Args:
            mm_hash: The key. A known one is only made most recently used; its value stays.
            embedding: The encoder's output. A view of a larger storage is cloned.
            loc: Not needed; an engine's allocator may pass it.
            mm_embedding_allocator: The same argument under its name in the interface.

        Returns:
            False when the entry is larger than ``max_size``; then nothing is evicted.

        Raises:
            AssertionError: ``embedding`` is not an :class:`EmbeddingResult`.
        """
        assert isinstance(embedding, self.result_class), type(embedding)
        if mm_hash in self.mm_cache:
            self.mm_cache.move_to_end(mm_hash)
            return True
        return self._admit(mm_hash, embedding)

    def has(self, mm_hash: Hashable) -> bool:
        """Whether the hash is held; does not change recency."""
        return mm_hash in self.mm_cache

    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """Drop an entry and give its bytes back; False when it is unknown."""
        result = self.mm_cache.pop(mm_hash, None)
        if result is None:
            return False
        self.current_size -= _get_tensor_size(result.embedding)
        return True

    def clear(self) -> None:
        """Drop every entry and give all bytes back."""
        self.mm_cache.clear()
        self.current_size = 0

    def available_size(self) -> int:
        """The number of entries."""
        return len(self)

    def __len__(self) -> int:
        return len(self.mm_cache)

    def _admit(self, mm_hash: Hashable, result: EmbeddingResult) -> bool:
        size_bytes = admitted_size(result.embedding)
        if size_bytes > self.max_size:
            return False
        result = compact(result)
        self._evict_until_fits(size_bytes)
        self._insert(mm_hash, result)
        return True

    def _insert(self, mm_hash: Hashable, result: EmbeddingResult) -> None:
        self.mm_cache[mm_hash] = result
        self.current_size += _get_tensor_size(result.embedding)

    def _evict_until_fits(self, size_bytes: int) -> None:
        while self.current_size + size_bytes > self.max_size and self.mm_cache:
            mm_hash, result = self.mm_cache.popitem(last=False)
            self.current_size -= _get_tensor_size(result.embedding)
            self._on_evict(mm_hash, result)

    def _on_evict(self, mm_hash: Hashable, result: EmbeddingResult) -> None:
        """Called once for each evicted entry, after its bytes were given back."""
