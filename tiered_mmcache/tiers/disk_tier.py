"""The disk tier as the cache sees it: what may be written, what is there, and reading it back.

Owns: the write policy, look-ups with their deadline, reads that were not answered in time, and
which entries are not worth reading.
Does not own: the order of changes (:mod:`.spill`), the worker (:mod:`tiered_mmcache.disk.client`)
or host memory (:mod:`.host_room`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Hashable

from tiered_mmcache.config import DiskConfig, WritePolicy
from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.client import Reply, SpillClient
from tiered_mmcache.entries.keys import encode_full_key, generation_of_version
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.tier import HostEntry
from tiered_mmcache.metrics.counters import Counters, FaultLog
from tiered_mmcache.tiers.read_speed import ReadSpeed
from tiered_mmcache.tiers.remembered import RememberedKeys, is_small, shared
from tiered_mmcache.tiers.spill import NOTHING_TO_WAIT_FOR, SpillQueue

# Of those that the store is known to hold, as many as a store of small entries has: reading an
# unknown one takes a question more (measured: 155 us instead of 109).
_REMEMBERED_ENTRIES = 2**20
_REMEMBERED_KEYS = 65_536


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Why a look-up found nothing; ``reason`` is a label that misses are counted under."""

    reason: str

    @property
    def is_certain(self) -> bool:
        """Whether the store does not have the entry, rather than not being able to say."""
        return self.reason == "absent"


@dataclasses.dataclass(slots=True, eq=False)
class Read:
    """A read that the worker was asked for.

    Attributes:
        entry: Where it goes.
        request: The number of the request.
        reply: The answer, when a :meth:`DiskTier.poll` has taken it.
    """

    entry: HostEntry
    request: int
    reply: Reply | None = None


class DiskTier:
    """The store behind one spill worker.

    Args:
        client: The handle on the worker.
        config: The tier's settings.
        namespace: What makes embeddings interchangeable.
        counters: Where events are counted.
        faults: Where failures are reported.
        on_written: Called with an entry that was committed.
        on_lost: Called with an entry that could not be written, and the cause.
        may_store: Whether a key may be used here at all.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: SpillClient,
        *,
        config: DiskConfig,
        namespace: str,
        counters: Counters,
        faults: FaultLog,
        on_written: Callable[[HostEntry], None],
        on_lost: Callable[[HostEntry, str], None],
        may_store: Callable[[Hashable], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.spill = SpillQueue(
            client,
            namespace=namespace,
            on_written=on_written,
            on_lost=on_lost,
            new_generation=_fresh_generation,
            clock=clock,
        )
        self.policy = config.write
        self.read_timeout_s = config.read_timeout_s
        self.read_speed = ReadSpeed(clock)
        self._adaptive = config.adaptive_read
        self._counters = counters
        self._faults = faults
        self._may_store = may_store
        self._clock = clock
        self._on_answer: dict[int, Callable[[Reply], None]] = {}  # reads and look-ups under way
        # Reads that did not queue behind others: only these tell how long a read takes.
        self._alone_since_s: dict[int, float] = {}
        self._absent: RememberedKeys[bool] = RememberedKeys(_REMEMBERED_KEYS)  # when last asked
        # When last heard of, with the header where that is small.
        self._present: RememberedKeys[EntryHeader | None] = RememberedKeys(_REMEMBERED_ENTRIES)
        self._dropped_once: RememberedKeys[bool] = RememberedKeys(_REMEMBERED_KEYS)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, unanswered or to be deleted."""
        return self.spill.idle and not self._on_answer

    @property
    def is_catching_up(self) -> bool:
        """Whether an answer can be expected that gives room in the write buffer back."""
        return self.client.answers and bool(self.client.unanswered)

    # Progress

    def poll(self) -> None:
        """Take the worker's answers, then hand it what it can take; never waits."""
        for reply in self.client.poll():
            self._take(reply)
        for cause, problem in self.client.take_ends():
            self._faults.report(cause, problem)
        if not self.spill.idle:
            self.spill.advance()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the first worker to open the store, or to say that it cannot."""
        deadline_s = self._clock() + timeout_s
        self.poll()
        while not self.client.is_ready:
            left_s = deadline_s - self._clock()
            if left_s <= 0 or self.client.pid is None:
                why = self.client.down_cause or "still starting"
                self._faults.report("disk_not_ready", f"the spill worker is not ready: {why}")
                return
            self.client.wait(left_s)
            self.poll()

    def flush(self, deadline_s: float) -> None:
        """Ask a live worker for an answer and await it, so that a dead one is noticed."""
        if not self.client.answers:
            return
        number = self.client.flush()
        while number in self.client.unanswered and self._clock() < deadline_s:
            self.client.wait(deadline_s - self._clock())
            self.poll()

    def wait(self, timeout_s: float) -> None:
        """Wait until something may have changed: an answer, a worker, the end of a pause."""
        if self.client.unanswered or not self.client.is_ready:
            self.client.wait(timeout_s)
        elif not self.idle:
            self.client.wait(min(timeout_s, self.spill.resumes_in_s))

    # Writing

    def may_hold(self, key: Hashable, header: EntryHeader) -> bool:
        """Whether an entry may be written at all: a registered class under a storable key."""
        return bool(header.class_tag) and self._full_key(key) is not None

    def wants(self, entry: HostEntry) -> bool:
        """Whether the policy says that an entry which memory gives up is to be written."""
        if not self.may_hold(entry.key, entry.header):
            return False
        if self.policy is not WritePolicy.ON_SECOND_HIT:
            return True
        return entry.hits > 0 or entry.key in self._dropped_once

    def note_dropped(self, entry: HostEntry) -> None:
        """Remember that memory gave an entry up unwritten: the next time it is worth writing."""
        self._dropped_once.note(entry.key, True)

    def write(self, entry: HostEntry) -> None:
        """Write an entry; its extents stay as they are until it is written or lost."""
        self.spill.write(entry)
        self.spill.advance()

    # Reading

    def has_copy(self, key: Hashable) -> bool:
        """Whether the store had the entry when it was last heard of; it may have evicted it."""
        return key in self._present

    def note_present(self, entry: HostEntry) -> None:
        """Remember that the store holds an entry, and what it looks like."""
        self._note_present(entry.key, entry.header)

    def _note_present(self, key: Hashable, header: EntryHeader) -> None:
        header = shared(header)
        self._present.note(key, header if is_small(header) else None)

    def touch(self, key: Hashable) -> None:
        """Tell the store that memory gave an entry up just now, so that it is not the oldest."""
        full_key = self._full_key(key)
        if full_key is not None and self.client.is_ready:
            self.client.touch(self.spill.store_key(full_key))

    def look_up(self, key: Hashable) -> EntryHeader | Absence:
        """Ask the store for an entry's header; waits at most ``read_timeout_s``.

        Reading needs no question where the header is known: the worker compares it again.
        """
        full_key = self._askable(key)
        if isinstance(full_key, Absence):
            return full_key
        reply = self.client.look_up(
            store_key=self.spill.store_key(full_key),
            full_key=full_key,
            timeout_s=self.read_timeout_s,
        )
        return self.heard_of(key, reply)

    def begin_look_up(
        self, key: Hashable, on_answer: Callable[[Reply], None]
    ) -> EntryHeader | Absence | int:
        """The header when it is known, the reason when it cannot be asked for, else ask for it.

        Args:
            key: The entry.
            on_answer: Called by a later :meth:`poll` or by :meth:`await_look_up`. Whoever still
                wants the answer hands it to :meth:`heard_of`; one that was superseded meanwhile
                must not be heard.

        Returns:
            With an ``int``, the number of the request.
        """
        full_key = self._askable(key)
        if isinstance(full_key, Absence):
            return full_key
        known = self._present.get(key)
        if known is not None:
            return known
        store_key = self.spill.store_key(full_key)
        number = self.client.begin_look_up(store_key=store_key, full_key=full_key)
        self._on_answer[number] = on_answer
        return number

    def await_look_up(self, key: Hashable, number: int, deadline_s: float) -> Absence | None:
        """Wait for the answer to :meth:`begin_look_up`; None when ``on_answer`` was called."""
        reply = self.client.answer_to(number, max(0.0, deadline_s - self._clock()))
        if reply is None:
            return self._absence(key, reply)
        self._take(reply)
        return None

    def heard_of(self, key: Hashable, reply: Reply | None) -> EntryHeader | Absence:
        """What the answer to a look-up says, which is remembered."""
        if isinstance(reply, protocol.Found):
            self._note_present(key, reply.header)
            return reply.header
        if isinstance(reply, protocol.Absent):
            self._absent.note(key, True)
        return self._absence(key, reply)

    def header_to_read(self, key: Hashable) -> EntryHeader | Absence:
        """As :meth:`look_up`, but from memory when the store was heard to hold the entry."""
        known = self._present.get(key)
        if known is None:
            return self.look_up(key)
        askable = self._askable(key)
        return askable if isinstance(askable, Absence) else known

    def declines(self, header: EntryHeader, *, asked_only: bool = False) -> bool:
        """Whether reading an entry would take longer than encoding it took.

        This alone decides it: in a group of ranks, the one that reads asks here and tells the
        others.

        Args:
            header: The entry, as the store holds it.
            asked_only: No read follows, and none is declined: do not count this.
        """
        if not self._adaptive:
            return False
        decide = self.read_speed.would_decline if asked_only else self.read_speed.decline
        return decide(header.payload_bytes, header.cost_s)

    def _askable(self, key: Hashable) -> bytes | Absence:
        """The full key of an entry that the store may hold, or why it is of no use to ask."""
        full_key = self._full_key(key)
        if full_key is None or self.spill.is_deleted(full_key):
            return Absence(reason="absent")
        return full_key if self.client.answers else Absence(reason="disk_down")

    def begin_read(
        self, entry: HostEntry, on_end: Callable[[Reply], None] = lambda reply: None
    ) -> Read | Absence:
        """Have the worker copy an entry into its extents; never waits.

        Nobody else may touch the extents (``entry.filling``) until the worker has answered, which
        :meth:`finish_read` waits for, or a later :meth:`poll` finds out.

        Args:
            entry: Its extents hold at least the payload.
            on_end: Called by :meth:`poll`, not by :meth:`finish_read`, with the answer; whoever
                still wants the entry hands it to :meth:`outcome_of_read`.

        Returns:
            The read, or why none was made: the worker may have ended since the
            entry was looked up.
        """
        full_key = self._full_key(entry.key)
        assert full_key is not None
        if not self.client.answers:
            return Absence(reason="disk_down")
        alone_since_s = None if self._on_answer else self._clock()
        number = self.client.fill(
            store_key=self.spill.store_key(full_key),
            full_key=full_key,
            header=entry.header,
            extents=list(entry.extents),
        )

        read = Read(entry, number)

        def end(reply: Reply) -> None:
            entry.filling = False
            read.reply = reply
            self._alone_since_s.pop(number, None)
            on_end(reply)

        entry.filling = True
        self._on_answer[number] = end
        if alone_since_s is not None:
            self._alone_since_s[number] = alone_since_s
        return read

    def finish_read(
        self,
        read: Read,
        deadline_s: float,
        on_progress: Callable[[int], None],
    ) -> Absence | None:
        """Wait for the end of a read; None when all of the entry is there and right.

        Args:
            read: What :meth:`begin_read` returned.
            deadline_s: When to give up.
            on_progress: Called with the number of leading bytes that are there and verified.
        """
        entry, number = read.entry, read.request
        if read.reply is not None:
            return self.outcome_of_read(entry, read.reply)
        timeout_s = max(0.0, deadline_s - self._clock())
        reply = self.client.answer_to(number, timeout_s, on_progress)
        since_s = self._alone_since_s.pop(number, None)
        if since_s is not None and (reply is None or isinstance(reply, protocol.Done)):
            self.read_speed.note(entry.header.payload_bytes, self._clock() - since_s)
        if reply is None:
            return self._absence(entry.key, reply)
        del self._on_answer[number]
        entry.filling = False
        return self.outcome_of_read(entry, reply)

    def outcome_of_read(self, entry: HostEntry, reply: Reply) -> Absence | None:
        """What the answer to a read says, which is remembered; None when the entry is there."""
        if isinstance(reply, protocol.Done):
            self.note_present(entry)
            self._counters.moved_bytes["disk_to_host"] += entry.header.payload_bytes
            return None
        return self._absence(entry.key, reply)

    def _absence(self, key: Hashable, reply: Reply | None) -> Absence:
        if isinstance(reply, protocol.Absent):
            self._present.forget(key)
            return Absence(reason="absent")
        if isinstance(reply, protocol.Failed):
            self._faults.report(reply.cause, reply.problem)
            return Absence(reason="disk_fault")
        self._faults.report("read_timeout", f"no answer within {self.read_timeout_s} s")
        return Absence(reason="read_timeout")

    # Away

    def supersede(self, key: Hashable) -> None:
        """Forget what the store holds under a key that is about to be set anew."""
        self._present.forget(key)
        if not self._absent.forget(key):
            self._delete(key)

    def free(self, key: Hashable, *, known: bool) -> bool:
        """Remove a key from the store; True when it was ``known`` elsewhere or is there."""
        if not known:
            found = self.look_up(key)
            if isinstance(found, Absence) and found.is_certain:
                return False
            known = isinstance(found, EntryHeader)
        self._present.forget(key)
        self._delete(key)
        return known

    def clear(self, version: str | None) -> None:
        """Move to another generation; waits at most ``read_timeout_s`` for its commit."""
        self._absent.clear()
        self._present.clear()
        self._dropped_once.clear()
        fresh = _fresh_generation() if version is None else generation_of_version(version)
        self.spill.begin_generation(fresh)
        deadline_s = self._clock() + self.read_timeout_s
        self.poll()
        while self.client.answers and self.spill.clear_pending and self._clock() < deadline_s:
            self.client.wait(deadline_s - self._clock())
            self.poll()

    def snapshot(self) -> dict[str, float]:
        """How full the store was when the worker last said so, what was written, how reads go."""
        totals = self.client.totals
        return {
            "entries": totals.entries,
            "bytes": totals.used_bytes,
            "payload_bytes": totals.payload_bytes,
            "budget_bytes": self.client.budget_bytes,
            "file_bytes": totals.file_bytes,
            "coldest_age_seconds": _age_s(totals.coldest_created_s),
            "quarantined_stores": self.client.quarantined_stores,
            "worker_is_up": int(self.client.is_ready),
            "spills": self._counters.spills,
            "worker_starts": self.client.starts,
            "mean_read_bytes": self.read_speed.mean_bytes,
            "mean_read_seconds": self.read_speed.mean_s,
        }

    def _take(self, reply: Reply) -> None:
        on_answer = self._on_answer.pop(reply.request, None)
        if on_answer is None:
            self._report_failed_change(reply)
            self.spill.take(reply)
        else:
            on_answer(reply)

    def _report_failed_change(self, reply: Reply) -> None:
        """At once: the attempts that follow may take minutes, or never be made."""
        if isinstance(reply, protocol.Failed) and reply.cause not in NOTHING_TO_WAIT_FOR:
            self._faults.report(reply.cause, reply.problem)

    def _full_key(self, key: Hashable) -> bytes | None:
        """What the store knows an entry by; None when it may only be kept in memory."""
        return encode_full_key(key) if self._may_store(key) else None

    def _delete(self, key: Hashable) -> None:
        full_key = self._full_key(key)
        if full_key is not None:
            self.spill.delete(full_key)
            self.spill.advance()


def _fresh_generation() -> bytes:
    return os.urandom(16)


def _age_s(created_s: int) -> float:
    """0 for what is not there, and for what a clock that was set back has not made yet."""
    return max(0.0, time.time() - created_s) if created_s else 0.0
