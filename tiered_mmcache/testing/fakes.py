"""Fakes and checks that ship, for the tests of this package and of engines that use it.

Owns: :func:`audit`, which compares every ledger with what it counts;
:class:`ManualCopyEngine`, whose copies end when a test says so; :func:`poison_released`, which
shows too early a reuse; :class:`ManualPageLocker` and :class:`ManualThread`, with which memory is
made ready when a test says so.
Does not own: anything that runs in a server.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from tiered_mmcache.host.extents import Extent, rounded
from tiered_mmcache.host.page_locking import PageLockingError
from tiered_mmcache.host.tier import HostEntry, Ledger
from tiered_mmcache.host.transfer import Transfer, payload_bytes_of
from tiered_mmcache.static_cache import MultiModalStaticCache, _get_tensor_size
from tiered_mmcache.tiered_cache import TieredMultimodalCache
from tiered_mmcache.tiers.lower_tiers import LowerTiers
from tiered_mmcache.tiers.prefetch import Prefetcher

_POISON = 0xA5


def audit(cache: MultiModalStaticCache) -> None:
    """Check that every count agrees with what it counts; cheap enough to run after every call.

    Raises:
        AssertionError: A budget is exceeded, a ledger disagrees with its entries, or the arena
            with the ledgers.
    """
    held_bytes = sum(_get_tensor_size(result.embedding) for result in cache.mm_cache.values())
    assert cache.current_size == held_bytes, (cache.current_size, held_bytes)
    assert cache.current_size <= cache.max_size
    if isinstance(cache, TieredMultimodalCache) and cache._below is not None:
        _audit_below(cache._below)
        _audit_counts(cache, cache._below)
        internal = cache._counters.faults["internal"]
        assert internal == 0, f"{internal} internal faults: see the log"


def _audit_counts(cache: TieredMultimodalCache, below: LowerTiers) -> None:
    counters = cache._counters
    assert sum(counters.absences.values()) == counters.misses["absent"]
    ahead = counters.clean_ahead
    assert ahead["copied"] == ahead["used"] + ahead["wasted"] + len(below._cleaned_ahead)


def audit_idle(cache: TieredMultimodalCache) -> None:
    """After ``drain``: as :func:`audit`, and nothing is in flight; the worker's totals hold.

    Raises:
        AssertionError: As for :func:`audit`, or something is still in flight.
    """
    audit(cache)
    below = cache._below
    if below is None:
        return
    assert not below.in_flight()
    assert all(entry.settle() for entry in below.host.every_entry()), "something is in flight"
    assert below.prefetcher is None or below.prefetcher.under_way_bytes == 0
    assert not below.host.in_transit, "an entry stays in the write buffer"
    assert below.host.buffer_ledger.used_bytes == 0
    if below.disk is not None:
        client = below.disk.client
        assert client.totals.used_bytes <= client.budget_bytes


def _audit_below(below: LowerTiers) -> None:
    host = below.host
    for ledger in (host.host_ledger, host.buffer_ledger):
        charged = sum(entry.arena_bytes for entry in host.every_entry() if entry.ledger is ledger)
        assert ledger.used_bytes == charged, (ledger, charged)
        assert ledger.used_bytes <= ledger.budget_bytes, ledger
    _audit_entries(list(host.every_entry()), host.host_ledger)
    used_bytes = sum(entry.arena_bytes for entry in host.every_entry())
    assert below.arena.used_bytes == used_bytes, (below.arena.used_bytes, used_bytes)
    assert all(entry.ledger is host.host_ledger for entry in host.resident.values())
    if below.prefetcher is not None:
        _audit_prefetches(below, below.prefetcher)
    assert all(entry.ledger is host.buffer_ledger for entry in host.in_transit.values())


def _audit_prefetches(below: LowerTiers, prefetcher: Prefetcher) -> None:
    counted = below.promoter._counters.prefetches
    ended = sum(counted.values()) - counted["asked"]
    assert counted["asked"] == ended + prefetcher.pending, (counted, prefetcher.pending)
    assert 0 <= prefetcher.charged_bytes <= prefetcher.budget_bytes
    assert prefetcher.under_way_bytes >= 0
    for key, entry in below.host.incoming.items():
        assert entry.filling
        assert below.host.find(key) is None, "an entry on its way is there already"


def _audit_entries(entries: list[HostEntry], host_ledger: Ledger) -> None:
    taken: list[tuple[int, int]] = []
    for entry in entries:
        assert entry.arena_bytes == rounded(entry.header.payload_bytes)
        assert sum(run.length for run in entry.extents) == entry.arena_bytes
        taken += [(run.offset, run.offset + run.length) for run in entry.extents]
    taken.sort()
    for (_, end), (start, _) in itertools.pairwise(taken):
        assert end <= start, "two entries share arena pages"


class ManualClock:
    """Seconds that pass when told to: a clock to hand to what takes one.

    Attributes:
        now_s: What it says.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time."""
        return self.now_s


class ManualTransfer:
    """A copy that ends when :meth:`complete` or :meth:`wait` is called.

    It reads its source as that is then. Where that is a tensor which nobody holds any more, its
    memory may have been used again: garbage is read instead.

    Attributes:
        is_promotion: It goes to the device.
        source: The bytes that it reads.
        target: The bytes that it writes.
        ended: Whether it has happened.
    """

    def __init__(
        self,
        engine: ManualCopyEngine,
        source: list[torch.Tensor],
        target: list[torch.Tensor],
        after: Sequence[Transfer],
        holder: torch.Tensor | None,
        is_promotion: bool,
    ) -> None:
        self.is_promotion = is_promotion
        self.source = source
        self.target = target
        self.ended = False
        self._engine = engine
        self._after = tuple(after)
        self._holder = None if holder is None else weakref.ref(holder)
        self._held: torch.Tensor | None = None
        for part in target:
            part.fill_(_POISON)  # whoever reads before the end reads this

    def hold(self) -> None:
        """Keep the source until the end: nobody can wait for it while a graph is captured."""
        self._held = None if self._holder is None else self._holder()

    def done(self) -> bool:
        """See :class:`tiered_mmcache.host.transfer.Transfer`."""
        self._engine.on_call()
        return self.ended and not self._engine.captures

    def wait(self) -> None:
        """See :class:`tiered_mmcache.host.transfer.Transfer`: the latest possible moment."""
        self._engine.on_call()
        if not self._engine.captures:
            self.complete()

    def complete(self) -> None:
        """Let the copy happen now, after those that it depends on."""
        if self.ended:
            return
        self.ended = True
        self._engine.pending.remove(self)
        for earlier in self._after:
            if isinstance(earlier, ManualTransfer):
                earlier.complete()
            else:
                earlier.wait()
        self._after = ()
        whole = torch.cat([part.clone() for part in self.source] or [torch.empty(0)])
        if self._holder is not None and self._holder() is None:
            whole.fill_(_POISON)
        self._held = None
        done = 0
        for part in self.target:
            part.copy_(whole[done : done + part.numel()])
            done += part.numel()


class ManualCopyEngine:
    """Copies end on command; by themselves, at the latest possible moment: when waited for.

    Whoever breaks a rule of copying sees garbage. The target of a copy holds garbage until the
    copy has ended. A tensor that is copied down is read as garbage once nobody holds it, unless
    its elements had to be gathered first, which happens on the caller's stream at once. With
    :func:`poison_released`, so are arena bytes that were given back.

    As on a device, promotions and their consumers share the caller's stream: they end in the
    order in which they were started, and a demotion reads what was promoted before. A test calls
    :meth:`synchronize` before it looks at what was promoted.

    Attributes:
        pending: Copies that have not ended, oldest first.
        on_call: Called whenever the cache starts a copy, waits for one or asks after it; may let
            copies end.
    """

    def __init__(self) -> None:
        self.pending: list[ManualTransfer] = []
        self._captures = False
        self.on_call: Callable[[], None] = lambda: None

    @property
    def captures(self) -> bool:
        """Whether the caller captures a graph: a copy that is started then is an AssertionError.

        What is being copied when a capture begins is held until its copy has ended.
        """
        return self._captures

    @captures.setter
    def captures(self, captures: bool) -> None:
        self._captures = captures
        for transfer in self.pending:
            transfer.hold()

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; ends on command."""
        flat = payload_bytes_of(source)
        before = self._promotions()
        if flat.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            return self._start([flat], target, before, holder=source)
        self.synchronize()
        return self._start([payload_bytes_of(source)], target, before)

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; ends on command."""
        before = self._promotions()
        after_these: list[Transfer] = [*before] if after is None else [after, *before]
        return self._start(source, [target], after_these, is_promotion=True)

    def capturing(self, device: torch.device) -> bool:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; as the test says."""
        return self.captures

    def complete(self, number: int = 0) -> None:
        """Let one pending copy end, and those that it depends on."""
        if self.pending:
            self.pending[number % len(self.pending)].complete()

    def synchronize(self) -> None:
        """Let all promotions end, as a consumer on the caller's stream finds them."""
        for promotion in self._promotions():
            promotion.complete()

    def touches(self, part: torch.Tensor) -> bool:
        """Whether a pending copy will read or write some of these bytes."""
        return any(
            _overlap(part, other)
            for transfer in self.pending
            for other in (*transfer.source, *transfer.target)
        )

    def _start(
        self,
        source: Iterable[torch.Tensor],
        target: Iterable[torch.Tensor],
        after: Sequence[Transfer],
        *,
        holder: torch.Tensor | None = None,
        is_promotion: bool = False,
    ) -> Transfer:
        assert not self.captures, "a copy was started while a graph is captured"
        self.on_call()
        transfer = ManualTransfer(
            self, list(source), list(target), after, holder=holder, is_promotion=is_promotion
        )
        self.pending.append(transfer)
        return transfer

    def _promotions(self) -> list[ManualTransfer]:
        return [transfer for transfer in self.pending if transfer.is_promotion]


def poison_released(cache: TieredMultimodalCache, engine: ManualCopyEngine) -> None:
    """From now on, arena bytes become garbage as soon as they are given back.

    Giving back what a pending copy still reads or writes is an AssertionError, which the cache
    counts as an internal fault: :func:`audit` reports it.
    """
    assert cache._below is not None
    arena = cache._below.arena
    release = arena.release

    def release_poisoned(runs: list[Extent]) -> None:
        for part in arena.slices(runs, 0, sum(run.length for run in runs)):
            assert not engine.touches(part), "memory was given back under a copy"
            part.fill_(_POISON)
        release(runs)

    arena.release = release_poisoned  # type: ignore[method-assign]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, other_start = one.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


class ManualPageLocker:
    """Remembers what is locked in place of locking it.

    Attributes:
        locked: Address and length of each range that is locked now.
        fails: What locking fails with, or None.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.fails: str | None = None

    def lock(self, address: int, size_bytes: int) -> None:
        """See :class:`tiered_mmcache.host.page_locking.PageLocker`.

        Raises:
            AssertionError: The range overlaps another one, which a real runtime refuses.
        """
        if self.fails is not None:
            raise PageLockingError(self.fails)
        for start, length in self.locked.items():
            assert address + size_bytes <= start or start + length <= address, "locked twice"
        self.locked[address] = size_bytes

    def unlock(self, address: int) -> None:
        """See :class:`tiered_mmcache.host.page_locking.PageLocker`."""
        del self.locked[address]


class ManualThread:
    """A thread that does one step, or all there are, when a test says so.

    Its instance is called to start it; see ``start`` of
    :class:`tiered_mmcache.host.preparation.Preparation`.

    Attributes:
        starts: How often it was started.
        waited_s: How long its end was waited for, each time.
        none_left: The system gives no more threads.
    """

    def __init__(self) -> None:
        self.starts = 0
        self.waited_s: list[float | None] = []
        self.none_left = False
        self._step: Callable[[], bool] | None = None

    def __call__(self, step: Callable[[], bool]) -> ManualThread:
        """Start it.

        Raises:
            RuntimeError: There are no more threads.
        """
        if self.none_left:
            raise RuntimeError("can't start new thread")
        assert self._step is None, "there is one helper thread only"
        self.starts += 1
        self._step = step
        return self

    def join(self, timeout: float | None = None) -> None:
        """Note that its end is waited for; it does not come by itself."""
        self.waited_s.append(timeout)

    def step(self) -> bool:
        """Make one step; False when there is none to make."""
        if self._step is not None and not self._step():
            self._step = None
        return self._step is not None

    def run(self) -> None:
        """Make every step that there is to make."""
        while self.step():
            pass
