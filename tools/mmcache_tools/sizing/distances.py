"""Exact stack distances in bytes, in blocks, for a hot tier of any size at once.

Owns: the distances. Does not own: sampling, or what tiers below do (:mod:`.replay`).

The hot tier evicts least recently used entries until the new one fits. What it holds is therefore
always the top of the stack of keys in the order of their last use, and a request is a hit exactly
when the bytes of the different keys used since the last request of its key, its own included, fit.
That holds as long as no entry is larger than the tier: those must be left out for such a tier.

A block of requests is done at once. Of the different keys used between two requests of a key, each
is counted where it first occurs: at a request whose own predecessor is not after the first of the
two. So a distance is a sum over earlier requests with an earlier predecessor, and all sums of a
block are made by merging halves, as in a merge sort, in numpy. Between blocks only the stack is
kept: memory grows with the keys, not with the requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_REQUESTS", "COLD", "StackDistances"]

Numbers = NDArray[np.int64]

BLOCK_REQUESTS = (
    1 << 16
)  # no more: times within a block are sorted as 16-bit numbers, which is fast
COLD = -1  # the distance of a key's first request


class StackDistances:
    """The stack of one trace.

    Args:
        sizes: The bytes of each key; a key is an index into it.
    """

    def __init__(self, sizes: Numbers) -> None:
        self._sizes = sizes
        self._stack: Numbers = np.empty(0, np.int64)  # least recently used first
        self._place: Numbers = np.full(len(sizes), -1, np.int64)

    def of(self, keys: Numbers) -> Numbers:
        """The distances of the next requests, at most ``BLOCK_REQUESTS``; ``COLD`` for new keys."""
        depth = len(self._stack)
        sizes = self._sizes[keys]
        before = self._predecessors(keys, depth)
        totals = np.concatenate(([0], np.cumsum(self._sizes[self._stack]), np.cumsum(sizes)))
        totals[depth + 1 :] += totals[depth]
        up_to_predecessor = totals[before + 1]
        found = totals[depth] + _earlier_with_earlier_predecessor(before, sizes)
        distances = np.where(before < 0, COLD, found - up_to_predecessor + sizes)
        self._use(keys)
        return distances

    def _predecessors(self, keys: Numbers, depth: int) -> Numbers:
        """Where each request's key was last used: in the stack, then in the block; -1 for new."""
        order = np.argsort(keys, kind="stable")
        before = self._place[keys]
        again = keys[order][1:] == keys[order][:-1]
        before[order[1:][again]] = order[:-1][again] + depth
        return before

    def _use(self, keys: Numbers) -> None:
        newest_first, where = np.unique(keys[::-1], return_index=True)
        used = newest_first[np.argsort(-where)]
        self._place[used] = -1
        kept = self._stack[self._place[self._stack] >= 0]
        self._stack = np.concatenate((kept, used))
        self._place[self._stack] = np.arange(len(self._stack))


def _earlier_with_earlier_predecessor(before: Numbers, weights: Numbers) -> Numbers:
    """For each request the weights of those before it with a predecessor no later than its own."""
    count = len(before)
    levels = max(1, (count - 1).bit_length())
    width = 1 << levels
    padded = np.zeros(width, np.int64)
    padded[:count] = weights
    # By predecessor; what pads the block comes last and weighs nothing.
    ranked = np.concatenate((np.argsort(before, kind="stable"), np.arange(count, width)))
    ranked = ranked.astype(np.uint16)
    sums = np.zeros(width, np.int64)
    for level in range(levels):
        halves = ranked
        if level < levels - 1:
            halves = ranked[np.argsort(ranked >> np.uint16(level + 1), kind="stable")]
        early = (halves >> np.uint16(level)) & np.uint16(1) == 0
        running = np.where(early, padded[halves], 0).reshape(-1, 2 << level).cumsum(axis=1)
        late = ~early
        sums[halves[late]] += running.reshape(-1)[late]
    return sums[:count]
