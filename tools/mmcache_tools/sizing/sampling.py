"""A sample of a trace that fits into memory however long the trace is.

Owns: which keys are in it, what stands for how much, and how far off an answer may be.
Does not own: the answers.

Keys are taken whose digest is below a threshold: all requests of a key or none, so that a cache of
a part of the size sees the same order of uses (spatial sampling, as SHARDS does it). The threshold
is lowered when there are too many keys. The requests taken lie in a file without a name: memory
grows with the keys in the sample, never with the requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcache_tools.sizing.traces import Records, Trace

__all__ = ["GROUPS", "MOST_KEYS", "Sample"]

MOST_KEYS = 32_768
GROUPS = 8  # parts of the sample that are compared, to tell the error
_ALL = 1 << 64
_BLOCK_REQUESTS = 1 << 16
_SPOOLED = np.dtype(
    [("key", "<u8"), ("bytes", "<u8"), ("cost", "<f4"), ("tokens", "<u4"), ("outcome", "u1")]
)


class Sample:
    """The requests of some of a trace's keys, and what all requests come to.

    Args:
        trace: Read once, here.
        most_keys: How many keys the sample may have.

    Attributes:
        requests: All requests of the trace.
        taken: Those of the sample's keys that are looked at.
        sized_requests: Those of all keys that would be.
        unsized: The others, of which nothing says how large the entry is.
        span_s: From the first to the last.
        rate: The share of all keys that is in the sample; 1.0 when all are.
        sizes: The bytes of each key in the sample, as its first request says; 0 when none does.
        tokens: The rows of each; 0 when unknown.
        costs_s: Seconds of encoding of each; 0.0 when unknown.
        resized: Requests in the sample that say another size than the first one of their key.
        groups: The part of the sample that each key belongs to.

    Raises:
        UsageError: The trace cannot be read, or has no request with a size.
    """

    def __init__(self, trace: Trace, *, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._threshold = _ALL
        self._known: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._file = tempfile.TemporaryFile(prefix="mmcache-plan-")  # noqa: SIM115 - kept open
        self.requests = 0
        self._earliest_s, self._latest_s = np.inf, -np.inf
        try:
            for records in trace.blocks():
                self._add(records)
        except BaseException:
            self.close()
            raise
        self.rate = self._threshold / _ALL
        self.span_s = max(0.0, float(self._latest_s - self._earliest_s)) if self.requests else 0.0
        self._describe_keys()

    def close(self) -> None:
        """Give the requests up; what was counted stays."""
        self._file.close()

    @property
    def keys(self) -> int:
        """How many keys there are in the sample."""
        return len(self._known)

    def _add(self, records: Records) -> None:
        self.requests += len(records)
        if len(records):
            self._earliest_s = min(self._earliest_s, records["time"].min())
            self._latest_s = max(self._latest_s, records["time"].max())
        taken = self._taken(records)
        self._known = np.union1d(self._known, taken["key"])
        if len(self._known) > self._most_keys:
            self._threshold = int(self._known[self._most_keys])
            self._known = self._known[: self._most_keys].copy()
            taken = self._taken(taken)
        spooled: NDArray[Any] = np.empty(len(taken), _SPOOLED)
        for name in _SPOOLED.names or ():
            spooled[name] = taken[name]
        self._file.write(spooled.tobytes())

    def _taken(self, records: Records) -> Records:
        if self._threshold == _ALL:
            return records
        taken: Records = records[records["key"] < np.uint64(self._threshold)]
        return taken

    def _spooled(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        self._file.seek(0)
        while data := self._file.read(_BLOCK_REQUESTS * _SPOOLED.itemsize):
            records = self._taken(np.frombuffer(data, _SPOOLED))
            yield np.searchsorted(self._known, records["key"]), records

    def _describe_keys(self) -> None:
        self.sizes: NDArray[np.int64] = np.zeros(len(self._known), np.int64)
        self.costs_s: NDArray[np.float64] = np.zeros(len(self._known))
        self.tokens: NDArray[np.int64] = np.zeros(len(self._known), np.int64)
        self.groups: NDArray[np.int64] = (self._known % np.uint64(GROUPS)).astype(np.int64)
        self.resized = 0
        in_file = 0
        for keys, records in self._spooled():
            in_file += len(keys)
            sized = records["bytes"] > 0
            for held, name in ((self.sizes, "bytes"), (self.tokens, "tokens")):
                first, where = np.unique(keys[sized], return_index=True)
                fresh = held[first] == 0
                held[first[fresh]] = records[name][sized][where[fresh]]
            priced = records["cost"] > 0
            self.costs_s[keys[priced]] = records["cost"][priced]
            said = records["bytes"][sized].astype(np.int64)
            self.resized += int((said != self.sizes[keys[sized]]).sum())
        self.taken = sum(len(keys) for keys in self.blocks())
        self.sized_requests = self.requests * self.taken / max(1, in_file)
        self.unsized = round(self.requests - self.sized_requests)

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """The keys of the requests in the sample, in order, as indices into ``sizes``."""
        for keys, _ in self._spooled():
            yield keys[self.sizes[keys] > 0]
