"""What ranks say of keys, results and entries, in bytes that every process understands alike.

Owns: the digests by which ranks compare what they are about, and the leader's description of an
entry that it found.
Does not own: how they are sent (:mod:`.exchange`) or what follows (:mod:`.agreement`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgpack
import xxhash

from tiered_mmcache.contract import EmbeddingResult, Tier
from tiered_mmcache.entries.bounded import unpack_bounded
from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.entries.record import (
    MAX_DIMENSIONS,
    MAX_EXTRAS_BYTES,
    EntryHeader,
    decode_header,
    encode_header,
)
from tiered_mmcache.static_cache import admitted_size

_MOST_ITEMS = MAX_DIMENSIONS + 32


def digest_of(*keys: Hashable) -> bytes:
    """16 bytes that stand for keys; of those that cannot be written down, for their types only."""
    texts = [encode_full_key(key) or f"?{type(key).__qualname__}".encode() for key in keys]
    return xxhash.xxh3_128_digest(b"".join(len(t).to_bytes(4, "little") + t for t in texts))


def layout_of(result: EmbeddingResult) -> int:
    """64 bits that stand for a result but for its values and further fields."""
    embedding = result.embedding
    kind = type(result).__qualname__, str(embedding.dtype), embedding.requires_grad
    sizes = tuple(embedding.shape), admitted_size(embedding)
    return xxhash.xxh3_64_intdigest(repr((kind, sizes)).encode())


def changed(state: int, change: bytes, key: Hashable) -> int:
    """64 bits that stand for all changes that ``state`` stands for, and one more."""
    return xxhash.xxh3_64_intdigest(state.to_bytes(8, "little") + change + digest_of(key))


def announce(header: EntryHeader, tier: Tier) -> bytes:
    """What the leader says of an entry that it found in a tier; never empty."""
    packed: bytes = msgpack.packb([tier.value, encode_header(header)])
    return packed


def announced(answer: bytes) -> tuple[EntryHeader, Tier]:
    """The same, as the others understand it.

    Raises:
        RecordError: It is no such description.
    """
    said: Any = unpack_bounded(answer, most_items=_MOST_ITEMS, most_text_bytes=MAX_EXTRAS_BYTES)
    tier, header = said
    return decode_header(header), Tier(tier)
