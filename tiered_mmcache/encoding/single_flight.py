"""Single flight: of several callers who want the same entry, one makes it and the others wait.

Owns: who makes what now, how the others learn of the end, and which waits can never end.
Does not own: how an entry is made or kept (:mod:`.get_or_encode`). Imports no torch; no thread
runs.

* A *flight* is the making of one entry, by one *leader*. Whoever wants that entry meanwhile joins
  the flight: threads wait on it, asyncio tasks await it, in any mixture.
* A flight ends with an answer, with an error that all who joined get, or given up: then whoever
  still wants the entry begins anew. A leader that is cancelled or interrupted gives up.
* A flight that is *voided* can be joined no more. Those who joined before get its answer, which
  must not be kept.
* A leader ends its flights before it waits for others. So waits cannot form a circle, unless an
  encoder waits for entries itself: that is found out before the wait, and refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from tiered_mmcache.entries.keys import CombinedHash

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(slots=True, eq=False)
class Leader:
    """One caller who makes entries.

    Attributes:
        name: The thread, and the asyncio task if there is one.
        loop: The event loop whose task it is.
        waits_for: Other leaders for whom its encoder waits.
    """

    name: str
    loop: asyncio.AbstractEventLoop | None
    waits_for: list[Leader] = dataclasses.field(default_factory=list)


_leading: contextvars.ContextVar[tuple[Leader, ...]] = contextvars.ContextVar(
    "tiered_mmcache_leading", default=()
)


@dataclasses.dataclass(slots=True, eq=False)
class Flight(Generic[_Answer]):
    """The making of one entry.

    Attributes:
        key: The entry's key.
        leader: Who makes it.
        answer: What was made, once it has ended well.
        error: What the making raised. Without answer and error, the leader gave up.
        voided: Its answer must not be kept.
        ended: Done at the end; it carries no value.
    """

    key: Hashable
    leader: Leader
    answer: _Answer | None = None
    error: Exception | None = None
    voided: bool = False
    ended: concurrent.futures.Future[None] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )

    def wait(self, timeout_s: float | None) -> None:
        """Wait on this thread for the end, or until the time is over."""
        concurrent.futures.wait([self.ended], timeout=timeout_s)

    async def wait_async(self, timeout_s: float | None) -> None:
        """Wait in this task for the end, or until the time is over."""
        waiter = asyncio.wrap_future(self.ended)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            waiter.cancel()  # of this wait alone: the flight itself cannot be cancelled


class SingleFlight(Generic[_Answer]):
    """The flights of one cache. Its lock is held for bookkeeping only."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every flight: in a forked child their leaders do not exist."""
        self._mutex = threading.Lock()
        self._open: dict[Hashable, Flight[_Answer]] = {}  # those that can be joined
        self._under_way: dict[Flight[_Answer], None] = {}

    def claim(
        self, keys: Iterable[Hashable], *, alone: bool
    ) -> tuple[list[Flight[_Answer]], list[Flight[_Answer]]]:
        """Become the leader for each key that nobody makes yet.

        Args:
            keys: Different ones.
            alone: Join nobody: lead for all keys, also where another flight is open.

        Returns:
            The caller's own new flights, and those of others to join.
        """
        leader = _this_caller()
        own: list[Flight[_Answer]] = []
        others: list[Flight[_Answer]] = []
        with self._mutex:
            for key in keys:
                flight = None if alone else self._open.get(identity_of(key))
                if flight is not None:
                    others.append(flight)
                    continue
                own.append(Flight(key, leader))
                own[-1].ended.set_running_or_notify_cancel()
                self._open[identity_of(key)] = own[-1]
                self._under_way[own[-1]] = None
        return own, others

    @contextlib.contextmanager
    def leading(self, flights: list[Flight[_Answer]]) -> Iterator[None]:
        """Make the entries inside this block; what is left at its end was given up.

        An exception ends the flights that are left with it. Whatever else ends the block, such
        as a cancellation or Ctrl-C, concerns the leader alone. The list is empty afterwards: an
        error holds the frames that it passed, and would be held by their flights.
        """
        token = _leading.set((*_leading.get(), *{flight.leader: None for flight in flights}))
        try:
            yield
        except Exception as error:
            for flight in flights:
                self.end(flight, error=error)
            raise
        finally:
            for flight in flights:
                self.end(flight)
            flights.clear()
            with contextlib.suppress(ValueError):  # a task that nobody ran to its end
                _leading.reset(token)

    def end(
        self,
        flight: Flight[_Answer],
        *,
        answer: _Answer | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a flight, unless it has ended: with an answer, with an error, or given up."""
        with self._mutex:
            if flight not in self._under_way:
                return
            del self._under_way[flight]
            self._close(flight)
            flight.answer = answer
            flight.error = error
        flight.ended.set_result(None)

    @contextlib.contextmanager
    def joining(self, flight: Flight[_Answer], *, blocking: bool) -> Iterator[None]:
        """Wait for a flight inside this block.

        Args:
            flight: Another caller's.
            blocking: The wait blocks the thread, with its event loop if it has one.

        Raises:
            RuntimeError: The wait could never end.
        """
        waiting = _leading.get()
        for leader in waiting:
            leader.waits_for.append(flight.leader)
        try:
            self._refuse_endless_wait(flight, waiting, blocking=blocking)
            yield
        finally:
            for leader in waiting:
                leader.waits_for.remove(flight.leader)

    def void(self, key: Hashable) -> None:
        """Let no result that is being made for a key be kept or joined any more."""
        with self._mutex:
            for flight in self._under_way:
                if flight.key == key:
                    flight.voided = True
                    self._close(flight)

    def void_all(self) -> None:
        """Let no result that is being made be kept or joined any more."""
        with self._mutex:
            for flight in self._under_way:
                flight.voided = True
            self._open.clear()

    def __len__(self) -> int:
        return len(self._under_way)

    def _close(self, flight: Flight[_Answer]) -> None:
        identity = identity_of(flight.key)
        if self._open.get(identity) is flight:
            del self._open[identity]

    def _refuse_endless_wait(
        self, flight: Flight[_Answer], waiting: tuple[Leader, ...], *, blocking: bool
    ) -> None:
        who = flight.leader.name
        if flight.leader in waiting:
            raise RuntimeError(
                f"the encoder for {flight.key!r} asks for that entry itself: {who} would wait "
                "for its own end"
            )
        if waiting and _leads_to(flight.leader, waiting):
            raise RuntimeError(
                f"{waiting[-1].name} encodes what {who} waits for, and asks for {flight.key!r}, "
                f"which {who} encodes: both would wait for ever"
            )
        if blocking and flight.leader.loop is not None and flight.leader.loop is _running_loop():
            raise RuntimeError(
                f"{who} encodes {flight.key!r} on this event loop, which the call would block: "
                "await aget_or_encode here"
            )


def identity_of(key: Hashable) -> Hashable:
    """What makes two keys one flight: stricter than ``==``.

    A combined hash equals a plain integer of its value. Here they must differ: through that
    integer, two combinations that collide would be one.
    """
    return (CombinedHash, key.parts) if isinstance(key, CombinedHash) else key


def _leads_to(start: Leader, targets: tuple[Leader, ...]) -> bool:
    """Whether a leader waits, directly or through others, for one of these."""
    seen: set[int] = set()
    pending = [start]
    while pending:
        leader = pending.pop()
        if leader in targets:
            return True
        if id(leader) not in seen:
            seen.add(id(leader))
            pending += leader.waits_for
    return False


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _this_caller() -> Leader:
    name = f"thread {threading.current_thread().name!r}"
    loop = _running_loop()
    if loop is None:
        return Leader(name, None)
    task = asyncio.current_task(loop)
    return Leader(name if task is None else f"{name}, task {task.get_name()!r}", loop)
