"""Fakes and checks that ship, for the tests of this package and of engines that use it.

Owns: :func:`audit`, which compares every ledger with what it counts;
:class:`ManualCopyEngine`, whose copies end when a test says so; :class:`ManualPageLocker` and
:class:`ManualThread`, with which memory is made ready when a test says so.
Does not own: anything that runs in a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from tiered_mmcache.host.extents import rounded
from tiered_mmcache.host.page_locking import PageLockingError
from tiered_mmcache.host.tier import HostEntry, Ledger
from tiered_mmcache.host.transfer import HostCopyEngine, Transfer
from tiered_mmcache.lower_tiers import LowerTiers
from tiered_mmcache.prefetch import Prefetcher
from tiered_mmcache.static_cache import MultiModalStaticCache, _get_tensor_size
from tiered_mmcache.tiered_cache import TieredMultimodalCache

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
        internal = cache._counters.faults["internal"]
        assert internal == 0, f"{internal} internal faults: see the log"


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


class ManualTransfer:
    """A copy that ends when :meth:`complete` or :meth:`wait` is called."""

    def __init__(
        self,
        source: Iterable[torch.Tensor],
        target: Iterable[torch.Tensor],
        engine: ManualCopyEngine,
    ) -> None:
        self._source = list(source)
        self._target = list(target)
        self._done = False
        self._engine = engine
        for part in self._target:
            part.fill_(_POISON)  # whoever reads before the end reads this

    def done(self) -> bool:
        """See :class:`tiered_mmcache.host.transfer.Transfer`."""
        return self._done and not self._engine.captures

    def wait(self) -> None:
        """See :class:`tiered_mmcache.host.transfer.Transfer`: the latest possible moment."""
        if not self._engine.captures:
            self.complete()

    def complete(self) -> None:
        """Let the copy happen now."""
        if not self._done:
            whole = torch.cat([part.clone() for part in self._source] or [torch.empty(0)])
            done = 0
            for part in self._target:
                part.copy_(whole[done : done + part.numel()])
                done += part.numel()
            self._done = True


class ManualCopyEngine:
    """Demotions end on command; promotions wait for the demotion they depend on.

    Attributes:
        pending: Copies that have not ended, oldest first.
        captures: The caller captures a graph: a copy that is started all the same is an
            AssertionError.
    """

    def __init__(self) -> None:
        self.pending: list[ManualTransfer] = []
        self.captures = False
        self._at_once = HostCopyEngine()

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; ends on command."""
        assert not self.captures, "a copy was started while a graph is captured"
        transfer = ManualTransfer(_bytes_of(source), target, self)
        self.pending.append(transfer)
        return transfer

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; ends at once, after ``after``."""
        assert not self.captures, "a copy was started while a graph is captured"
        return self._at_once.promote(source, target, after)

    def capturing(self, device: torch.device) -> bool:
        """See :class:`tiered_mmcache.host.transfer.CopyEngine`; as the test says."""
        return self.captures

    def complete(self, number: int = 0) -> None:
        """Let one pending copy end."""
        self.pending = [transfer for transfer in self.pending if not transfer.done()]
        if self.pending:
            self.pending.pop(number % len(self.pending)).complete()


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


def _bytes_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    from tiered_mmcache.host.transfer import payload_bytes_of

    yield payload_bytes_of(tensor)
