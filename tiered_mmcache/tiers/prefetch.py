"""Reading ahead: entries that the worker brings from disk into host memory before a look-up.

Owns: which look-ups and reads are under way for nobody who waits, how many bytes of them there may
be, and whether an entry that was read ahead was used or wasted.
Does not own: the requests themselves (:mod:`.disk_tier`), room (:mod:`.host_room`), or what a
look-up does with an entry (:mod:`.promotion`).

Nothing here waits but :meth:`Prefetcher.take`, within the deadline of a look-up. An entry is
findable only when all of it is there and right. What is freed, superseded or cleared while it is
on its way is void: the worker's answer is then not heard, and the extents stay out of use until it
has come.

Two kinds of reading ahead share this. ``prefetch`` brings entries into the host tier, within its
own budget, for look-ups that come some time later. ``get_many`` reads the next entries of the same
call; these may also lie in the write buffer, and stay there no longer than the call.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial

from tiered_mmcache.contract import Tier, class_of_tag
from tiered_mmcache.disk.client import Reply
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.tier import DiskCopy, HostEntry, HostTier
from tiered_mmcache.metrics.counters import Counters
from tiered_mmcache.tiers.disk_tier import Absence, DiskTier, Read
from tiered_mmcache.tiers.host_room import HostRoom

# A look-up of another entry waits behind these: 64 MiB take a tenth of a second where a cold disk
# gives 640 MB/s. A small read takes the worker about as long as a quarter of a MiB.
_MOST_READ_AT_ONCE_BYTES = 64 * 1024 * 1024
_LEAST_READ_BYTES = 256 * 1024
_MOST_ON_THE_WAY = 4096
_HELD_S = 60.0


class Step(enum.Enum):
    """How far an entry has come."""

    ASKING = "asking"  # the worker was asked for its header
    WAITING = "waiting"  # known to the store, to be read as soon as others have been
    READING = "reading"  # the worker fills its extents
    UNUSED = "unused"  # in host memory
    ABSENT = "absent"  # not in the store; kept until the look-up of the same call hears of it


@dataclasses.dataclass(slots=True, eq=False)
class _Ahead:
    """One entry that is read ahead.

    Attributes:
        key: The caller's key.
        for_call: For a ``get_many`` under way, not for ``prefetch``.
        step: How far it has come.
        request: The number of the look-up.
        read: What the worker was asked to read; None once a look-up took that over.
        header: What the store said of it.
        entry: Its place in host memory, while reading and after.
        charged_bytes: What it takes of the budget.
        lapses_at_s: When it counts as wasted.
        absence: Why it did not come.
    """

    key: Hashable
    for_call: bool
    step: Step = Step.ASKING
    request: int = 0
    read: Read | None = None
    header: EntryHeader | None = None
    entry: HostEntry | None = None
    charged_bytes: int = 0
    lapses_at_s: float = 0.0
    absence: Absence | None = None


class Prefetcher:
    """Reads ahead for one cache.

    Args:
        host: The bookkeeping of host memory.
        room: Hands it out.
        disk: The tier that is read.
        counters: Where outcomes are counted.
        budget_bytes: What entries that were asked for with :meth:`start` may take of the host tier
            until they are used.
        clock: Monotonic seconds.

    Attributes:
        budget_bytes: As above.
        charged_bytes: What they take now.
        under_way_bytes: What the worker reads, or has read for a call in which it is not used yet.
    """

    def __init__(
        self,
        *,
        host: HostTier,
        room: HostRoom,
        disk: DiskTier,
        counters: Counters,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.charged_bytes = 0
        self._host = host
        self._room = room
        self._disk = disk
        self._counters = counters
        self._clock = clock
        self._ahead: dict[Hashable, _Ahead] = {}
        self._waiting: OrderedDict[Hashable, _Ahead] = OrderedDict()
        self._unused: OrderedDict[Hashable, _Ahead] = OrderedDict()  # oldest first
        self.under_way_bytes = 0
        host.on_forgotten = self._forgotten

    @property
    def pending(self) -> int:
        """Entries asked for with :meth:`start` of which it is not decided whether they are used."""
        return sum(not ahead.for_call for ahead in self._ahead.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is asked for, waiting or being read."""
        return len(self._ahead) == len(self._unused)

    # Starting

    def start(self, keys: Iterable[Hashable]) -> int:
        """Bring entries into the host tier; how many of them are now on their way.

        Those in host memory are made most recently used there.
        """
        started = sum(self._start(key, for_call=False) for key in dict.fromkeys(keys))
        self.advance()
        return started

    def start_for_call(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Read entries for the look-ups that follow at once; :meth:`end_call` takes the answer."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            self._start(key, for_call=True)
        self.advance()
        return [key for key in keys if key in self._ahead and self._ahead[key].for_call]

    def end_call(self, keys: Iterable[Hashable]) -> None:
        """Let go of what was read for a call and not used."""
        for key in keys:
            ahead = self._ahead.get(key)
            if ahead is not None and ahead.for_call:
                entry = ahead.entry if ahead.step is Step.UNUSED else None
                self.void(key)
                if entry is not None and entry.ledger is self._host.buffer_ledger:
                    self._host.forget(entry)
        self._room.reclaim()

    def _start(self, key: Hashable, *, for_call: bool) -> bool:
        resident = self._host.find(key)
        if resident is not None and not for_call:
            self._keep(resident)
        if resident is not None or key in self._ahead:
            return False
        ahead = _Ahead(key, for_call)
        if not for_call:
            self._counters.prefetches["asked"] += 1
        if len(self._ahead) >= _MOST_ON_THE_WAY:
            return self._end(ahead, "refused")
        self._ahead[key] = ahead
        answer = self._disk.begin_look_up(key, partial(self._heard, ahead))
        if isinstance(answer, int):
            ahead.request = answer
            return True
        return self._is_accepted(ahead, answer)

    def _keep(self, resident: HostEntry) -> None:
        self._host.touch(resident)
        ahead = self._unused.get(resident.key)
        if ahead is not None:
            ahead.lapses_at_s = self._clock() + _HELD_S
            self._unused.move_to_end(ahead.key)

    def _heard(self, ahead: _Ahead, reply: Reply) -> None:
        if self._is_current(ahead, Step.ASKING):
            self._is_accepted(ahead, self._disk.heard_of(ahead.key, reply))

    def _is_accepted(self, ahead: _Ahead, answer: EntryHeader | Absence) -> bool:
        if isinstance(answer, Absence):
            ahead.absence = answer
            if ahead.for_call and answer.is_certain:
                ahead.step = Step.ABSENT
                return False
            return self._end(ahead, "absent" if answer.is_certain else "failed")
        size_bytes = rounded(answer.payload_bytes)
        if class_of_tag(answer.class_tag) is None:
            return self._end(ahead, "failed")  # the look-up says why
        if ahead.for_call:
            if self._disk.declines(answer, asked_only=True):
                return self._end(ahead, "refused")  # the look-up decides when its turn comes
        else:
            if self.charged_bytes + size_bytes > self.budget_bytes:
                return self._end(ahead, "refused")
            ahead.charged_bytes = size_bytes
            self.charged_bytes += size_bytes
        ahead.header = answer
        ahead.step = Step.WAITING
        self._waiting[ahead.key] = ahead
        return True

    # Progress

    def advance(self) -> None:
        """Hand reads to the worker, and let what was not used in time lapse; never waits."""
        if self._unused:
            self._lapse_until(self._clock())
        while self._waiting:
            ahead = next(iter(self._waiting.values()))
            assert ahead.header is not None
            after_bytes = self.under_way_bytes + _weight(ahead.header)
            if self.under_way_bytes and after_bytes > _MOST_READ_AT_ONCE_BYTES:
                return
            del self._waiting[ahead.key]
            self._read(ahead, ahead.header)

    def _lapse_until(self, now_s: float) -> None:
        while self._unused:
            oldest = next(iter(self._unused.values()))
            if oldest.lapses_at_s > now_s:
                return
            assert oldest.entry is not None
            self._host.first_to_go(oldest.entry)
            self._end(oldest, "wasted")

    def _read(self, ahead: _Ahead, header: EntryHeader) -> None:
        result_class = class_of_tag(header.class_tag)
        if result_class is None or not self._disk.client.answers:
            self._end(ahead, "failed")
            return
        entry = self._room.reserve_ahead(
            ahead.key, result_class, header, may_use_buffer=ahead.for_call
        )
        if entry is None:
            self._end(ahead, "refused")
            return
        entry.disk_copy = DiskCopy.PRESENT
        read = self._disk.begin_read(entry, partial(self._read_ended, ahead, entry))
        if isinstance(read, Absence):  # making room for it found the worker dead
            self._room.give_back(entry)
            self._end(ahead, "failed")
            return
        self._host.incoming[ahead.key] = ahead.entry = entry
        ahead.step = Step.READING
        ahead.read = read
        self.under_way_bytes += _weight(header)

    def _read_ended(self, ahead: _Ahead, entry: HostEntry, reply: Reply) -> None:
        if ahead.read is not None:
            self.under_way_bytes -= _weight(entry.header)
        if not self._is_current(ahead, Step.READING):
            return
        self._stop_reading(ahead)
        is_there = self._disk.outcome_of_read(entry, reply) is None
        if not is_there or self._host.find(ahead.key) is not None:
            self._room.give_back(entry)
            self._end(ahead, "failed")
            return
        self._host.admit(entry)
        ahead.step = Step.UNUSED
        ahead.lapses_at_s = self._clock() + _HELD_S
        self._unused[ahead.key] = ahead
        if ahead.for_call:
            self.under_way_bytes += _weight(entry.header)

    # Use and waste

    def take(self, key: Hashable, deadline_s: float) -> Read | Absence | None:
        """Hand the read of an entry over to a look-up; None when there is none under way.

        Waits for the worker's answer when it was asked for the header only.

        Args:
            key: An entry that is not in host memory.
            deadline_s: When to give up.
        """
        ahead = self._ahead.get(key)
        if ahead is None:
            return None
        if not self._disk.client.answers:
            self.void(key)  # nobody waits for a worker that owes an answer
            return None
        if ahead.step is Step.ABSENT:
            return self._absence_of(ahead, key)
        if ahead.step is Step.ASKING:
            absence = self._disk.await_look_up(key, ahead.request, deadline_s)
            if absence is not None:
                self._end(ahead, "failed")
            if self._ahead.get(key) is not ahead or ahead.absence is not None:
                return absence or self._absence_of(ahead, key)
        if not self._is_current(ahead, Step.READING):
            self._end(ahead, "used")  # the look-up reads it by itself, with the header known now
            return None
        entry = self._stop_reading(ahead)
        read, ahead.read = ahead.read, None
        self.under_way_bytes -= _weight(entry.header)
        self._end(ahead, "used")
        return read

    def _absence_of(self, ahead: _Ahead, key: Hashable) -> Absence | None:
        """What was heard, unless of a combined hash under the equal number, or the reverse."""
        if ahead.step is Step.ABSENT:
            self._end(ahead, "absent")
        return ahead.absence if type(ahead.key) is type(key) else None

    def use(self, key: Hashable) -> Tier:
        """Note that a look-up finds an entry in host memory; the tier that it came from for it."""
        ahead = self._unused.get(key)
        if ahead is None:
            return Tier.HOST
        self._end(ahead, "used")
        return Tier.DISK if ahead.for_call else Tier.HOST

    def coming(self, key: Hashable) -> EntryHeader | None:
        """The header of an entry that the store was just heard to hold, and that is on its way."""
        ahead = self._ahead.get(key)
        return None if ahead is None or not self._disk.client.answers else ahead.header

    def void(self, key: Hashable) -> None:
        """What is on its way under a key must not be found any more."""
        ahead = self._ahead.get(key)
        if ahead is None:
            return
        if ahead.step is Step.READING:
            self._room.give_back(self._stop_reading(ahead))
        self._end(ahead, "wasted")

    def void_everything(self) -> None:
        """As :meth:`void`, for every key."""
        for key in list(self._ahead):
            self.void(key)

    def _forgotten(self, entry: HostEntry) -> None:
        ahead = self._unused.get(entry.key)
        if ahead is not None and ahead.entry is entry:
            self._end(ahead, "wasted")

    def _stop_reading(self, ahead: _Ahead) -> HostEntry:
        assert ahead.entry is not None
        del self._host.incoming[ahead.key]
        return ahead.entry

    def _is_current(self, ahead: _Ahead, step: Step) -> bool:
        return self._ahead.get(ahead.key) is ahead and ahead.step is step

    def _end(self, ahead: _Ahead, outcome: str) -> bool:
        """Count what became of an entry; False, since it is not on its way any more."""
        for where in (self._ahead, self._waiting):
            where.pop(ahead.key, None)
        if self._unused.pop(ahead.key, None) is not None and ahead.for_call:
            assert ahead.entry is not None
            self.under_way_bytes -= _weight(ahead.entry.header)
        self.charged_bytes -= ahead.charged_bytes
        ahead.charged_bytes = 0
        if not ahead.for_call:
            self._counters.prefetches[outcome] += 1
        return False


def _weight(header: EntryHeader) -> int:
    return max(rounded(header.payload_bytes), _LEAST_READ_BYTES)
