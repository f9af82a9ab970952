"""An engine in miniature: look up, encode on a miss, and check what came back.

Owns: what is known of each item (the digest of the encoder's output, its runs and their time, the
hits by tier). Does not own: the cache, the encoder, or the order of the requests; all are given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from mmcache_tools.demo.images import DemoImage
from mmcache_tools.demo.workload import Item
from tiered_mmcache import EmbeddingResult, MultimodalCache

__all__ = ["TIERS", "EmbeddingCache", "ItemAccount", "Served", "Session", "digest", "look_up"]

Encode = Callable[[Sequence[DemoImage]], torch.Tensor]


class Served(str, Enum):
    """What answered a request."""

    HOT = "hot"
    HOST = "host"
    DISK = "disk"
    ENCODER = "encoder"


TIERS = (Served.HOT, Served.HOST, Served.DISK)


class Statistics(Protocol):
    """What a cache counts."""

    def as_dict(self) -> Mapping[str, Any]:
        """Per tier, ``hits`` among others."""


class EmbeddingCache(Protocol):
    """The part of the cache's interface that is used here."""

    def get(self, mm_hashes: Sequence[Hashable], /) -> EmbeddingResult | None:
        """The entry of an ordered combination, or None."""

    def set(self, mm_hash: Hashable, embedding: EmbeddingResult, /) -> bool:
        """Admit an entry."""

    def stats(self) -> Statistics:
        """What has been counted so far."""


@dataclass(slots=True, kw_only=True)
class ItemAccount:
    """What is known of one item.

    Attributes:
        digest: SHA-256 over dtype, shape and bytes of what the encoder made of it.
        encode_s: The times of the encoder's runs.
        hits: Requests that each tier answered.
        identical: Requests answered by a tier with exactly the encoder's bits.
        refused: Runs whose embedding the cache did not admit.
        embedding_bytes: The size of the embedding.
    """

    digest: str = ""
    encode_s: list[float] = field(default_factory=list)
    hits: dict[Served, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    identical: int = 0
    refused: int = 0
    embedding_bytes: int = 0

    @property
    def saved_s(self) -> float:
        """The encoder time that the hits made unnecessary."""
        mean_s = sum(self.encode_s) / len(self.encode_s) if self.encode_s else 0.0
        return mean_s * sum(self.hits.values())


class Session:
    """Serves requests as an engine does, and keeps account of every item."""

    def __init__(
        self,
        *,
        cache: EmbeddingCache,
        encode: Encode,
        images: Mapping[str, DemoImage],
        clock: Callable[[], float],
    ) -> None:
        self.accounts: dict[Item, ItemAccount] = {}
        self.hits_s = 0.0
        self._cache = cache
        self._encode = encode
        self._images = images
        self._clock = clock

    def serve(self, item: Item) -> Served:
        """Answer one request about an item."""
        account = self.accounts.setdefault(item, ItemAccount())
        started_s = self._clock()
        served, result = look_up(self._cache, self.hashes(item))
        if result is None:
            self._run_encoder(item, account)
            return served
        self.hits_s += self._clock() - started_s
        account.hits[served] += 1
        account.identical += digest(result.embedding) == account.digest
        return served

    def hashes(self, item: Item) -> list[int]:
        """The content hashes of an item's pictures, in order."""
        return [self._images[name].content_hash for name in item.pictures]

    def _run_encoder(self, item: Item, account: ItemAccount) -> None:
        started_s = self._clock()
        embedding = self._encode([self._images[name] for name in item.pictures])
        account.encode_s.append(self._clock() - started_s)
        account.digest = digest(embedding)
        account.embedding_bytes = embedding.nbytes
        key = MultimodalCache.combine_hashes(self.hashes(item))
        admitted = self._cache.set(key, EmbeddingResult(embedding=embedding))
        account.refused += not admitted


def look_up(
    cache: EmbeddingCache, mm_hashes: Sequence[int]
) -> tuple[Served, EmbeddingResult | None]:
    """The entry of a combination and the tier whose hit it was; the encoder's turn on a miss."""
    before = _hits(cache)
    result = cache.get(mm_hashes)
    after = _hits(cache)
    if result is None:
        return Served.ENCODER, None
    answered = [tier for tier in TIERS if after[tier] > before[tier]]
    if len(answered) != 1:
        raise RuntimeError(f"one get was counted as a hit of {answered or 'no tier'}")
    return answered[0], result


def _hits(cache: EmbeddingCache) -> dict[Served, int]:
    counted = cache.stats().as_dict()
    return {tier: int(counted[tier.value]["hits"]) for tier in TIERS}


def digest(embedding: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes, wherever the tensor lives."""
    held = embedding.detach().contiguous().cpu()
    found = hashlib.sha256(f"{held.dtype} {tuple(held.shape)} ".encode())
    found.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
