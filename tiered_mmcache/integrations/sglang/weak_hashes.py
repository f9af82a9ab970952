"""Which item hashes may not outlive a process.

Owns: the rule. Does not own: where it is applied (:mod:`.cache`).

SGLang's own item hashes are 64 bits of a digest of the processed features. Callers may hand in
hashes of their own, in hex, and SGLang keeps the last 64 bits: of a short one padded with zeros on
the right nothing is left but 0, for every image alike. A wrong answer from memory is gone with the
process; one from disk would be permanent.
"""

from __future__ import annotations

import numbers
from collections.abc import Hashable

from tiered_mmcache.entries.keys import CombinedHash

_HALF = 1 << 32


def is_weak(mm_hash: Hashable) -> bool:
    """Whether a hash has so few significant bits that it is hardly a digest of anything.

    That is 0, what fits into 32 bits, what has its low 32 bits empty, and any combination with
    such a part. Of true 64-bit hashes this concerns one in two thousand million, which are then
    kept in memory only.
    """
    if isinstance(mm_hash, CombinedHash):
        return any(is_weak(part) for part in mm_hash.parts)
    if isinstance(mm_hash, tuple):
        return any(is_weak(part) for part in mm_hash)
    value: object = mm_hash
    if isinstance(value, numbers.Integral):
        number = abs(int(value))
        return number < _HALF or number % _HALF == 0
    return value in ("", b"")
