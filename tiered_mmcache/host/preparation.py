"""Making memory ready before it is needed: backed, mapped and, for a device, page-locked.

Owns: which leading part of the arena is ready, the one helper thread of the server process, and
unlocking at the end.
Does not own: how memory is locked (:mod:`.page_locking`) or backed (:mod:`.memory_policy`), or
which runs are used (:mod:`.extents`).

Nothing is prepared before :meth:`Preparation.begin`, which the first ``set`` calls: caches are
also made for models that will never have an embedding. From then on the first segment that was
never used is made ready, and another one whenever use comes near; so no more than a segment is
taken ahead of need. Memory that is not ready yet can be used like any other, only more slowly:
nobody waits for the thread.

The thread runs without the interpreter's lock nearly all the time, touches nothing but the
attributes here, and ends when there is nothing to prepare. It is a daemon, and is waited for at
exit for a second at most. A forked child has no such thread and never touches what the parent
locked.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from tiered_mmcache.configuration import machine
from tiered_mmcache.configuration.quantities import written_size
from tiered_mmcache.host.page_locking import NoPageLocking, PageLocker, PageLockingError

# cudaHostRegister takes about 0.1 s for each GiB: some milliseconds for a segment, during which
# other calls of the runtime may have to wait.
SEGMENT_BYTES = 64 * 1024 * 1024
_EXIT_TIMEOUT_S = 1.0
_MOST_LEFT_FREE_BYTES = 1 << 30

log = logging.getLogger("tiered_mmcache")
_all: weakref.WeakSet[Preparation] = weakref.WeakSet()


class HelperThread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, so long at most."""


StartThread = Callable[[Callable[[], bool]], HelperThread]


def start_daemon(step: Callable[[], bool]) -> HelperThread:
    """Start a thread that calls ``step`` for as long as it returns True.

    Raises:
        RuntimeError: The system or the interpreter gives no more threads.
    """

    def run() -> None:
        while step():
            pass

    thread = threading.Thread(target=run, name="tiered_mmcache page-locking", daemon=True)
    thread.start()
    return thread


class Preparation:
    """Makes memory ready from its start on, segment by segment.

    Args:
        address: Where the memory begins.
        capacity_bytes: How much there is.
        back: Has a part (start, length) backed and mapped; OSError when there is no memory. What
            it refers to must keep the memory mapped.
        segment_bytes: How much is made ready in one step.
        start: Starts the helper thread.

    Attributes:
        ready_bytes: How much, from the start on, was made ready.
        locked_bytes: How much of that is page-locked.
    """

    def __init__(
        self,
        *,
        address: int,
        capacity_bytes: int,
        back: Callable[[int, int], None],
        segment_bytes: int = SEGMENT_BYTES,
        start: StartThread = start_daemon,
    ) -> None:
        self.ready_bytes = 0
        self.locked_bytes = 0
        self._address = address
        self._capacity_bytes = capacity_bytes
        self._back = back
        self._segment_bytes = segment_bytes
        self._start = start
        self._process = os.getpid()
        # Held for a few assignments only. Re-entrant, since any of them may start a collection of
        # garbage, and that close an arena that was dropped: this one, on the helper thread.
        self._guard = threading.RLock()
        self._locker: PageLocker | None = None  # None: nothing is to be prepared
        self._locked: list[tuple[PageLocker, int]] = []
        self._used_bytes = 0
        self._wanted_bytes = 0
        self._thread: HelperThread | None = None
        self._running = False
        self._ending = False
        self._failure: str | None = None
        _all.add(self)

    def begin(self, locker: PageLocker) -> None:
        """Make memory ready from now on; with another locker, once more from the start."""
        with self._guard:
            self._locker = None if self._ending else locker
            self.ready_bytes = 0
            self._wanted_bytes = 0
        self.need(self._used_bytes)

    def need(self, used_bytes: int) -> None:
        """Say up to where memory was used so far; what lies ahead is made ready. Never waits."""
        self._used_bytes = used_bytes
        ahead_bytes = min(self._capacity_bytes, used_bytes + self._segment_bytes)
        if ahead_bytes > self._wanted_bytes and self._locker is not None:
            segments = -(-ahead_bytes // self._segment_bytes)
            self._wanted_bytes = min(self._capacity_bytes, segments * self._segment_bytes)
            self._run()

    @property
    def preferred_bytes(self) -> int:
        """Up to where memory is better than the rest: locked where any is, else mapped."""
        return self.locked_bytes or self.ready_bytes

    def take_failure(self) -> str | None:
        """Why memory is not page-locked, and what to change; told once."""
        failure, self._failure = self._failure, None
        return failure

    def close(self, timeout_s: float) -> None:
        """Unlock everything, waiting so long at most; the thread then ends it by itself.

        No copy may touch the memory any more.
        """
        if os.getpid() != self._process:
            return  # a forked child: the locks are the parent's
        with self._guard:
            self._ending = True
        if self._locked:
            self._run()
        self._wait(timeout_s)
        if not self._running:
            self._unlock_all()  # where no thread could be started

    def halt(self, timeout_s: float) -> None:
        """At exit: prepare nothing more. What is locked ends with the process."""
        if os.getpid() == self._process:
            self._locker = None
            self._wait(timeout_s)

    # Inside

    def _run(self) -> None:
        with self._guard:
            if self._running:
                return
            self._running = True
        try:
            self._thread = self._start(self._step)
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._running = False
            self._locker = None
            log.debug("memory is not prepared ahead: %s", error)

    def _wait(self, timeout_s: float) -> None:
        if timeout_s > 0 and self._running and self._thread is not None:
            self._thread.join(timeout_s)

    def _step(self) -> bool:
        """Make one segment ready, or unlock them all; False when there is nothing left to do."""
        if self._ending:
            self._unlock_all()
        with self._guard:
            locker, start = self._locker, self.ready_bytes
            if self._ending or locker is None or start >= self._wanted_bytes:
                self._running = False
                return False
        size_bytes = min(self._segment_bytes, self._capacity_bytes - start)
        problem, next_locker = self._make_ready(locker, start, size_bytes)
        with self._guard:
            if locker is self._locker:  # else another one begins from the start
                self._locker = next_locker
                self._note(locker, start + size_bytes, problem)
        return True

    def _make_ready(
        self, locker: PageLocker, start: int, size_bytes: int
    ) -> tuple[str | None, PageLocker | None]:
        """Do the work; what went wrong, and the locker for what comes next."""
        try:
            _check_room(size_bytes)
            self._back(start, size_bytes)
        except (PageLockingError, OSError) as error:
            return str(error), None
        if isinstance(locker, NoPageLocking):
            return None, locker
        try:
            locker.lock(self._address + start, size_bytes)
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
            return str(error), NoPageLocking()
        self._locked.append((locker, self._address + start))
        return None, locker

    def _note(self, locker: PageLocker, end: int, problem: str | None) -> None:
        if problem is None:
            self.ready_bytes = end
            if not isinstance(locker, NoPageLocking):
                self.locked_bytes = end
        elif not isinstance(locker, NoPageLocking):
            self._failure = problem

    def _unlock_all(self) -> None:
        self.locked_bytes = 0
        while self._locked:
            locker, address = self._locked.pop()
            locker.unlock(address)


def _check_room(size_bytes: int) -> None:
    """Leave memory to others: what is locked can be neither swapped nor given back.

    Raises:
        PageLockingError: There is too little.
    """
    memory = machine.memory()
    left_free_bytes = min(_MOST_LEFT_FREE_BYTES, memory.total_bytes // 32)
    if memory.available_bytes < size_bytes + left_free_bytes:
        raise PageLockingError(
            f"only {written_size(memory.available_bytes)} are available, bounded by "
            f"{memory.bound}: raise that, or lower host.max_size"
        )


def _halt_all() -> None:
    for preparation in list(_all):
        preparation.halt(_EXIT_TIMEOUT_S)


atexit.register(_halt_all)
