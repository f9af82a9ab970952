"""What is on its way to the disk, and what must vanish from it.

Owns: the queue of entries to write, the writes that the worker has not acknowledged, pending
deletions and the pending change of generation; all survive the death of a worker.
Does not own: budgets and residency (:mod:`tiered_mmcache.tiers.lower_tiers`), or the worker itself
(:mod:`tiered_mmcache.disk.client`).

The worker makes changes in the order in which they were sent, so a deletion that is sent after a
write undoes it, and a write that is sent after a deletion stays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.client import Reply, SpillClient
from tiered_mmcache.entries.keys import encode_full_key, store_key
from tiered_mmcache.host.tier import DiskCopy, HostEntry

_MOST_ATTEMPTS = 3
_MOST_DELETIONS = 65_536
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLINGS = 10
NOTHING_TO_WAIT_FOR = ("worker_died", "too_large", "too_many_pieces")


class SpillQueue:
    """Feeds one worker with changes.

    Args:
        client: The handle on the worker.
        namespace: Part of every store key.
        on_written: Called with an entry that was committed.
        on_lost: Called with an entry that could not be written, and the cause.
        new_generation: Makes a fresh generation, should too many deletions pile up.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: SpillClient,
        *,
        namespace: str,
        on_written: Callable[[HostEntry], None],
        on_lost: Callable[[HostEntry, str], None],
        new_generation: Callable[[], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._failures = 0
        self._resume_at_s = 0.0
        self._client = client
        self._namespace = namespace
        self._on_written = on_written
        self._on_lost = on_lost
        self._new_generation = new_generation
        self._queued: deque[HostEntry] = deque()
        self._writing: dict[int, HostEntry] = {}
        self._deletions: dict[bytes, int | None] = {}  # store key -> request, None until sent
        self._deleting: dict[int, bytes] = {}
        self._undeleted: dict[bytes, None] = {}  # the store keys to send, oldest first
        self._unkeyed: dict[bytes, None] = {}  # full keys freed before the generation was known
        self._generation: bytes | None = None  # to be made current, None when it is
        self._clearing: int | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, being written, or to be deleted."""
        deletions = self._deletions or self._unkeyed
        return not (self._queued or self._writing or deletions or self._generation)

    @property
    def clear_pending(self) -> bool:
        """Whether the change of generation is not committed yet."""
        return self._generation is not None

    def is_deleted(self, full_key: bytes) -> bool:
        """Whether the store may still hold an entry that was freed."""
        if self._client.generation is None:
            return full_key in self._unkeyed
        return bool(self._deletions) and self.store_key(full_key) in self._deletions

    def store_key(self, full_key: bytes) -> bytes:
        """The store's key of a full key, under the current generation."""
        assert self._client.generation is not None
        generation = self._client.generation
        return store_key(namespace=self._namespace, generation=generation, full_key=full_key)

    def write(self, entry: HostEntry) -> None:
        """Queue an entry; its extents stay as they are until it is written or lost."""
        entry.disk_copy = DiskCopy.QUEUED
        self._queued.append(entry)

    def delete(self, full_key: bytes) -> None:
        """Queue a deletion of whatever the store holds under a key, writes sent before included."""
        if self._client.generation is None:
            self._unkeyed[full_key] = None
        else:
            self._delete_store_key(self.store_key(full_key))
        if len(self._deletions) + len(self._unkeyed) > _MOST_DELETIONS:
            self._deletions.clear()
            self._deleting.clear()
            self._undeleted.clear()
            self.begin_generation(self._new_generation())

    def begin_generation(self, generation: bytes) -> None:
        """Queue a change of generation: nothing stored under the old one is found any more."""
        self._queued.clear()
        self._client.generation = generation
        self._generation = generation
        self._clearing = None
        self._key_deletions()  # the store may be at this very generation already

    def advance(self) -> None:
        """Hand to the worker whatever it can take now."""
        if not self._client.is_ready or self._clock() < self._resume_at_s:
            return
        self._key_deletions()
        self._send_clear()
        self._send_deletions()
        self._send_writes()

    def take(self, reply: Reply) -> None:
        """Handle an answer to a request that was sent from here; ignore any other."""
        number = reply.request
        succeeded = isinstance(reply, protocol.Done)
        if number in self._writing or number in self._deleting or number == self._clearing:
            self._pace(reply)
        if number in self._writing:
            self._written(self._writing.pop(number), reply)
        elif number in self._deleting:
            key = self._deleting.pop(number)
            if succeeded:
                del self._deletions[key]
            else:
                self._deletions[key] = None
                self._undeleted[key] = None
        elif number == self._clearing:
            self._clearing = None
            if succeeded:
                self._generation = None

    def _pace(self, reply: Reply) -> None:
        """After a failed change, wait a growing while before the next: the cause may pass."""
        if isinstance(reply, protocol.Done):
            self._failures = 0
        elif self._clock() < self._resume_at_s:
            return  # of the same batch as the failure before
        elif isinstance(reply, protocol.Failed) and reply.cause not in NOTHING_TO_WAIT_FOR:
            pause_s = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
            self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
            self._resume_at_s = self._clock() + pause_s

    @property
    def resumes_in_s(self) -> float:
        """How long changes are held back because the last one failed."""
        return max(0.0, self._resume_at_s - self._clock())

    def _send_clear(self) -> None:
        if self._generation is not None and self._clearing is None:
            self._clearing = self._client.clear(self._generation)

    def _send_deletions(self) -> None:
        for key in self._undeleted:
            number = self._client.delete(key)
            self._deletions[key] = number
            self._deleting[number] = key
        self._undeleted.clear()

    def _key_deletions(self) -> None:
        for full_key in self._unkeyed:
            self._delete_store_key(self.store_key(full_key))
        self._unkeyed.clear()

    def _delete_store_key(self, key: bytes) -> None:
        request = self._deletions.pop(key, None)
        if request is not None:
            del self._deleting[request]  # a write may lie between: delete once more
        self._deletions[key] = None
        self._undeleted[key] = None

    def _send_writes(self) -> None:
        while self._queued:
            entry = self._queued[0]
            if entry.wanted and not entry.arrived():
                return  # copies of a stream end in order: the later ones have not ended either
            self._queued.popleft()
            if entry.wanted and entry.disk_copy is DiskCopy.QUEUED:
                self._send_write(entry)

    def _send_write(self, entry: HostEntry) -> None:
        full_key = encode_full_key(entry.key)
        assert full_key is not None
        entry.disk_copy = DiskCopy.WRITING
        entry.write_attempts += 1
        number = self._client.put(
            store_key=self.store_key(full_key),
            full_key=full_key,
            header=entry.header,
            extents=list(entry.extents),
        )
        self._writing[number] = entry

    def _written(self, entry: HostEntry, reply: Reply) -> None:
        if isinstance(reply, protocol.Done):
            entry.disk_copy = DiskCopy.PRESENT
            self._on_written(entry)
            return
        cause = reply.cause if isinstance(reply, protocol.Failed) else "protocol"
        entry.disk_copy = DiskCopy.NONE
        final = cause in ("too_large", "too_many_pieces")
        if entry.wanted and not final and entry.write_attempts < _MOST_ATTEMPTS:
            self.write(entry)
        else:
            self._on_lost(entry, cause)
