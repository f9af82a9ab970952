"""How long a read from disk takes, judged by those that were made, and when one is not worth it.

Owns: the estimate, and the choice between reading an entry and encoding it again.
Does not own: reads (:mod:`.disk_tier`) or what an entry cost
(:mod:`tiered_mmcache.encoding.encoder_time`). Imports no torch.

A read takes a latency, and a time in proportion to its bytes. Both come from exponentially
weighted moments of size and duration. Faster reads than expected weigh more than slower ones, and
a slow one counts for a few times the expected duration at most: one outlier changes little, a disk
that stays slow is recognised after some ten reads.

While reads are declined, there is nothing to learn from. So every sixteenth is made all the same,
and so is any when the last one was long ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_FEWEST_READS = 8  # before that nothing is declined
_WEIGHT_OF_SLOWER = 0.2
_WEIGHT_OF_FASTER = 0.5
_MOST_TIMES_EXPECTED = 4.0
_NEVER_SLOW_S = 0.001  # no outlier, whatever was expected
_ALIKE = 0.25  # sizes that vary less, in relation to their mean, do not tell latency from speed
_DECLINED_FOR_EACH_TRIED = 15
_EVIDENCE_LASTS_S = 30.0


class ReadSpeed:
    """What is known of one disk tier's reads.

    Args:
        clock: Monotonic seconds.

    Attributes:
        mean_bytes: The size of recent reads.
        mean_s: Their duration.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads = 0
        self._last_at_s = 0.0
        self._declined = 0
        self._variance = 0.0  # of the size
        self._covariance = 0.0  # of size and duration
        self.mean_bytes = 0.0
        self.mean_s = 0.0

    def note(self, size_bytes: int, duration_s: float) -> None:
        """Learn from a read that was made, or given up after so long."""
        expected_s = self.expected_s(size_bytes)
        if self._reads:
            duration_s = min(duration_s, max(_MOST_TIMES_EXPECTED * expected_s, _NEVER_SLOW_S))
        weight = _WEIGHT_OF_FASTER if duration_s < expected_s else _WEIGHT_OF_SLOWER
        weight = max(weight, 1.0 / (self._reads + 1))
        off_bytes = size_bytes - self.mean_bytes
        off_s = duration_s - self.mean_s
        self.mean_bytes += weight * off_bytes
        self.mean_s += weight * off_s
        self._variance = (1.0 - weight) * (self._variance + weight * off_bytes**2)
        self._covariance = (1.0 - weight) * (self._covariance + weight * off_bytes * off_s)
        self._reads += 1
        self._last_at_s = self._clock()

    def expected_s(self, size_bytes: int) -> float:
        """How long reading so many bytes should take; 0.0 before the first read.

        Where recent sizes were too much alike, the lower of two answers: all latency, or all
        speed. It leads to a read, which tells more.
        """
        if self.mean_bytes == 0.0:
            return self.mean_s
        most_s_per_byte = self.mean_s / self.mean_bytes
        if self._variance < (_ALIKE * self.mean_bytes) ** 2:
            return min(self.mean_s, most_s_per_byte * size_bytes)
        s_per_byte = min(max(self._covariance / self._variance, 0.0), most_s_per_byte)
        return self.mean_s + s_per_byte * (size_bytes - self.mean_bytes)

    def would_decline(self, size_bytes: int, cost_s: float) -> bool:
        """Whether encoding an entry again is faster than reading it, and no trial is due.

        An entry of unknown cost, 0.0, is always read.
        """
        if cost_s <= 0.0 or self._reads < _FEWEST_READS:
            return False
        if self.expected_s(size_bytes) <= cost_s:
            return False
        if self._clock() - self._last_at_s > _EVIDENCE_LASTS_S:
            return False
        return self._declined < _DECLINED_FOR_EACH_TRIED

    def decline(self, size_bytes: int, cost_s: float) -> bool:
        """As :meth:`would_decline`, and counts towards the next trial."""
        if self.would_decline(size_bytes, cost_s):
            self._declined += 1
            return True
        self._declined = 0
        return False
