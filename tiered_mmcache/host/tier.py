"""Which entries are in host memory, what is being done with them, and whose budget they use.

Owns: the entries below the hot tier, their recency, and two ledgers over the one arena: the host
tier (resident) and the write buffer (on the way to or from the disk).
Does not own: memory (:mod:`.arena`), copies (:mod:`.transfer`) or the disk.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator

from tiered_mmcache.contract import EmbeddingResult
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.extents import Extent
from tiered_mmcache.host.transfer import Transfer

_MOST_BUSY_LOOKED_AT = 64


class DiskCopy(enum.Enum):
    """What the disk holds of an entry."""

    NONE = "none"  # nothing: dropping the entry loses it
    QUEUED = "queued"  # to be handed to the worker as soon as it can be
    WRITING = "writing"  # the worker reads the extents; not committed yet
    PRESENT = "present"  # committed: the entry is clean


@dataclasses.dataclass(slots=True)
class Ledger:
    """A byte budget over part of the arena."""

    budget_bytes: int
    used_bytes: int = 0

    def fits(self, size_bytes: int) -> bool:
        """Whether that many more bytes stay within the budget."""
        return self.used_bytes + size_bytes <= self.budget_bytes


@dataclasses.dataclass(slots=True, eq=False)
class HostEntry:
    """One entry in host memory.

    Attributes:
        key: The caller's key.
        result_class: The exact class to restore.
        header: How to rebuild the embedding and the other fields.
        extents: Where its bytes are.
        arena_bytes: What it takes from its ledger.
        ledger: The budget that it is charged to.
        arriving: The copy that fills the extents from the device, until it has ended.
        leaving: Copies that read the extents, until they have ended.
        disk_copy: What the disk holds of it.
        filling: The worker may be writing into the extents: a read that was not answered yet.
        write_attempts: How often it was handed to a worker.
        hits: Look-ups that found it below the hot tier.
        pinned: It is being promoted: no victim now.
        used_at_s: When it was last admitted or used here.
        wanted: False once it was freed or superseded: it is kept only until it is idle.
    """

    key: Hashable
    result_class: type[EmbeddingResult]
    header: EntryHeader
    extents: list[Extent]
    arena_bytes: int
    ledger: Ledger
    arriving: Transfer | None = None
    leaving: tuple[Transfer, ...] = ()
    disk_copy: DiskCopy = DiskCopy.NONE
    filling: bool = False
    write_attempts: int = 0
    hits: int = 0
    pinned: bool = False
    used_at_s: float = 0.0
    wanted: bool = True

    def arrived(self) -> bool:
        """Whether the extents hold the whole payload."""
        if self.arriving is not None and self.arriving.done():
            self.arriving = None
        return self.arriving is None and not self.filling

    def settle(self) -> bool:
        """Forget copies that have ended; True when nothing touches the extents any more."""
        if self.leaving:
            self.leaving = tuple(copy for copy in self.leaving if not copy.done())
        return self.arrived() and not self.leaving and self.disk_copy is not DiskCopy.WRITING


class HostTier:
    """Residency and recency of the entries in host memory.

    Attributes:
        resident: Entries charged to the host tier, least recently used first.
        in_transit: Entries charged to the write buffer, still readable, oldest first.
        incoming: Entries that the worker fills before anyone asks; not findable yet.
        retired: Entries that nobody can find any more but something may still touch, the ones
            that were looked at longest ago last.
        read_by_copies: Findable entries that copies may still read.
        on_forgotten: Called with each entry that becomes unfindable.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        buffer_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.host_ledger = Ledger(budget_bytes)
        self.buffer_ledger = Ledger(buffer_bytes)
        self.resident: OrderedDict[Hashable, HostEntry] = OrderedDict()
        self.in_transit: OrderedDict[Hashable, HostEntry] = OrderedDict()
        self.incoming: dict[Hashable, HostEntry] = {}
        self.retired: deque[HostEntry] = deque()
        self.read_by_copies: dict[HostEntry, None] = {}
        self.on_forgotten: Callable[[HostEntry], None] = lambda entry: None

    def find(self, key: Hashable) -> HostEntry | None:
        """The entry of a key, wherever in host memory it is; does not change recency."""
        return self.resident.get(key) or self.in_transit.get(key)

    def admit(self, entry: HostEntry) -> None:
        """Make an entry that is charged already findable."""
        where = self.resident if entry.ledger is self.host_ledger else self.in_transit
        where[entry.key] = entry
        entry.used_at_s = self._clock()

    def touch(self, entry: HostEntry) -> None:
        """Make a resident entry the most recently used."""
        if entry.key in self.resident:
            self.resident.move_to_end(entry.key)
            entry.used_at_s = self._clock()

    def coldest_age_s(self) -> float:
        """Seconds since the next victim was admitted or used; 0.0 when nothing is resident."""
        coldest = next(iter(self.resident.values()), None)
        return 0.0 if coldest is None else self._clock() - coldest.used_at_s

    def first_to_go(self, entry: HostEntry) -> None:
        """Make a resident entry the next victim: the hot tier holds it now."""
        if entry.key in self.resident:
            self.resident.move_to_end(entry.key, last=False)

    def to_buffer(self, entry: HostEntry) -> bool:
        """Charge a resident entry to the write buffer instead; False when it has no room."""
        if not self.buffer_ledger.fits(entry.arena_bytes):
            return False
        del self.resident[entry.key]
        entry.ledger.used_bytes -= entry.arena_bytes
        entry.ledger = self.buffer_ledger
        entry.ledger.used_bytes += entry.arena_bytes
        self.admit(entry)
        return True

    def forget(self, entry: HostEntry) -> None:
        """Make an entry unfindable; its bytes stay charged until :meth:`reclaim`."""
        for where in (self.resident, self.in_transit):
            if where.get(entry.key) is entry:
                del where[entry.key]
        self.retired.append(entry)
        self.on_forgotten(entry)

    def note_leaving(self, entry: HostEntry) -> None:
        """Keep an eye on an entry until the copies that read it have ended."""
        if entry.leaving:
            self.read_by_copies[entry] = None

    def settle_copies(self) -> None:
        """Forget the copies that have ended, of the entries that are kept an eye on."""
        ended = [entry for entry in self.read_by_copies if entry.settle() or not entry.leaving]
        for entry in ended:
            del self.read_by_copies[entry]

    def reclaim(self) -> list[HostEntry]:
        """Retired entries that are idle now, no longer charged: release their extents.

        The newest are looked at first, and no more than 64 that are not idle: thousands may wait
        for the worker, and this is called often. Those are the last to be looked at again.
        """
        idle: list[HostEntry] = []
        busy: list[HostEntry] = []
        while self.retired and len(busy) < _MOST_BUSY_LOOKED_AT:
            entry = self.retired.pop()
            if entry.settle():
                entry.ledger.used_bytes -= entry.arena_bytes
                idle.append(entry)
            else:
                busy.append(entry)
        self.retired.extendleft(busy)
        return idle

    def every_entry(self) -> Iterator[HostEntry]:
        """All entries that occupy the arena, the retired ones included."""
        yield from self.resident.values()
        yield from self.in_transit.values()
        yield from self.incoming.values()
        yield from self.retired
