"""What became of keys, as far as is remembered: the difference between two kinds of absence.

Owns: which keys were set, refused, freed or cleared away, and when the hot ones were admitted.
Does not own: where entries are, or why they had to leave (drops, in :mod:`.counters`). Imports no
torch.

Only keys that can be stored on disk are remembered; an absent entry under another counts as never
seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, KeysView

from tiered_mmcache.tiers.remembered import RememberedKeys

_REMEMBERED_KEYS = 2**17  # about 13 MB at most

NEVER_SEEN, EVICTED, FREED, CLEARED, REFUSED = ABSENCES = (
    "never_seen",
    "evicted",
    "freed",
    "cleared",
    "refused",
)


class KeyHistory:
    """The past of the keys of one cache; its methods are called with the cache's lock held.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # What ended it, or the number of times that everything had been cleared when it was set.
        self._past: RememberedKeys[str | int] = RememberedKeys(_REMEMBERED_KEYS)
        self._clears = 0
        self._admitted_at_s: dict[Hashable, float] = {}

    def admitted(self, key: Hashable, *, hot: bool) -> None:
        """A tier took the entry, or it was found in one; ``hot``: it is in the hot tier now."""
        self._past.note(key, self._clears)
        if hot:
            self._admitted_at_s[key] = self._clock()

    def refused(self, key: Hashable) -> None:
        """No tier took the entry."""
        self._past.note(key, REFUSED)

    def left_hot(self, key: Hashable) -> None:
        """The hot tier does not hold the entry any more."""
        self._admitted_at_s.pop(key, None)

    def freed(self, key: Hashable) -> None:
        """The entry was there, and was dropped on request."""
        self._past.note(key, FREED)
        self.left_hot(key)

    def cleared(self) -> None:
        """Everything was dropped on request."""
        self._clears += 1
        self._admitted_at_s.clear()

    def why_absent(self, key: Hashable) -> str:
        """Why no tier has an entry: one of ``ABSENCES``."""
        past = self._past.get(key)
        if past is None:
            return NEVER_SEEN
        if isinstance(past, str):
            return past
        return EVICTED if past == self._clears else CLEARED

    def hot_age_s(self, key: Hashable) -> float:
        """Seconds since the hot tier took an entry that it holds; 0.0 when that is not known."""
        admitted_at_s = self._admitted_at_s.get(key)
        return 0.0 if admitted_at_s is None else self._clock() - admitted_at_s

    @property
    def hot_keys(self) -> KeysView[Hashable]:
        """The keys of which it is known when the hot tier took them."""
        return self._admitted_at_s.keys()
