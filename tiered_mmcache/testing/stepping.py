"""A spill worker without a process, which does one step when a test says so.

Owns: :class:`SteppingWorkers`, which stands in for the launcher of processes, and
:class:`SteppedClient`, whose waits are the test's.
Does not own: what a worker does. It is the real one, over the real protocol, on a real store; only
when it does the next thing, and whether it lives to do it, is the test's to say.

Until it is stepped, a worker has received nothing: a message that was sent to it waits in the
socket, and the extents that it names are read, or written, at the step and not before. Whoever
uses them again too early thereby stores, or is served, other bytes.
"""

from __future__ import annotations

import math
import mmap
import select
import signal
import socket
from collections import deque
from collections.abc import Callable

from tiered_mmcache.disk import protocol, recovery
from tiered_mmcache.disk.changes import Change
from tiered_mmcache.disk.client import Clock, SpillClient, StoreSettings
from tiered_mmcache.disk.worker import ServerGoneError, SpillWorker, UnusableStoreError, Write

OnStore = Callable[[protocol.Put, bytes], None]
OpenStore = Callable[[recovery.OpenSettings], recovery.OpenStore]
_GARBAGE = b"\xa5"


class _Steps(SpillWorker):
    """The worker's own code; a read is cut into the steps in which its bytes arrive."""

    least_step_bytes = 1

    def __init__(
        self,
        connection: socket.socket,
        arena: memoryview,
        open_store: OpenStore,
        on_store: OnStore,
    ) -> None:
        super().__init__(connection, arena, open_store)
        self._on_store = on_store
        self._is_open = False
        self._reading = False
        self._read = bytearray()  # what a read gave
        self._target: list[memoryview] = []  # where it goes
        self._arrived_bytes = 0
        self._arriving: deque[tuple[int, protocol.Reply | None]] = deque()

    @property
    def closes(self) -> bool:
        """Whether it was told to end."""
        return self._closing

    def step(self, *, write_first: bool) -> bool:
        """Do one thing; False when there is nothing to do."""
        poller = select.poll()  # takes any number of a file descriptor
        poller.register(self._connection, select.POLLIN)
        readable = bool(poller.poll(0))
        if not self._is_open:
            return readable and self._begin()
        if self._arriving:
            filled_bytes, message = self._arriving.popleft()
            self.arrive_up_to(filled_bytes)
            if message is not None:
                super()._send(message)
        elif readable and not (write_first and self._writes):
            self._accept(self._receive())
        elif self._writes or self._over_budget:
            self._advance()
        else:
            self._write_recency()
            return False
        return True

    def arrive_up_to(self, filled_bytes: int | None = None) -> None:
        """Let the bytes of the read that is under way be in its extents, all of them for None."""
        end = len(self._read) if filled_bytes is None else filled_bytes
        before = 0
        for part in self._target:
            first, last = max(self._arrived_bytes - before, 0), min(end - before, len(part))
            if first < last:
                part[first:last] = self._read[before + first : before + last]
            before += len(part)
        self._arrived_bytes = max(self._arrived_bytes, end)

    def end(self, *, cleanly: bool) -> None:
        """Let go of everything, after the last writes when ``cleanly``."""
        try:
            if cleanly and self._is_open:
                self._write_everything(math.inf)
        finally:
            if self._opened is not None:
                self._opened.close(cleanly=cleanly)
            self._connection.close()

    def _begin(self) -> bool:
        first = self._receive()
        assert isinstance(first, protocol.Open)
        if self._open(first) is None:
            raise ServerGoneError
        self._announce(first)
        self._is_open = True
        return True

    def _fill(self, message: protocol.Fill) -> None:
        payload_bytes = message.header.payload_bytes
        self._target = super()._parts(message.extents, payload_bytes)
        self._read = bytearray(_GARBAGE * payload_bytes)
        self._arrived_bytes = 0
        self._arriving.append((payload_bytes // 2, None))
        self._reading = True
        try:
            super()._fill(message)
        finally:
            self._reading = False

    def _parts(self, extents: protocol.Extents, payload_bytes: int) -> list[memoryview]:
        return [memoryview(self._read)] if self._reading else super()._parts(extents, payload_bytes)

    def _changes(self, write: Write) -> list[Change]:
        if isinstance(write, protocol.Put):
            parts = self._parts(write.extents, write.header.payload_bytes)
            self._on_store(write, b"".join(parts))
        return super()._changes(write)

    def _send(self, message: protocol.Reply) -> None:
        if not self._reading:
            super()._send(message)
        elif isinstance(message, protocol.Progress):
            self._arriving.append((message.filled_bytes, message))
        else:
            self._arriving.append((len(self._read), message))


class SteppingWorker:
    """One worker; see :class:`tiered_mmcache.disk.launch.WorkerProcess`.

    Attributes:
        connection: The server's end of the socket.
        pid: Which worker of its :class:`SteppingWorkers` it is; no process has this number.
        exit_signal: What ended it.
        hangs: It cannot be killed: the kernel waits for its disk. It goes on with a read that it
            has begun, and ends at the step after.
        alive: Whether it has not ended.
        steps: How many it has made.
    """

    def __init__(
        self, number: int, arena_fd: int, open_store: OpenStore, on_store: OnStore
    ) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._steps = _Steps(theirs, memoryview(mmap.mmap(arena_fd, 0)), open_store, on_store)
        self._killed = False
        self.pid = number
        self.exit_signal: int | None = None
        self.hangs = False
        self.alive = True
        self.steps = 0

    def step(self, *, write_first: bool = False) -> bool:
        """Do one thing: receive a message, answer a look-up, read some bytes, or commit.

        Args:
            write_first: Commit what was received before receiving more, as a worker may.

        Returns:
            False when there was nothing to do.
        """
        if not self.alive:
            return False
        self.steps += 1
        try:
            if self._killed:
                self._steps.arrive_up_to()
                self.die()
            elif not self._steps.step(write_first=write_first):
                return False
            elif self._steps.closes:
                self._end(cleanly=True)
        except ServerGoneError:
            self._end(cleanly=True)
        except UnusableStoreError:
            self._end(cleanly=False)
        return True

    def die(self) -> None:
        """End at once: what it has not committed is not made, what it has not said is not said."""
        if self.alive:
            self.exit_signal = int(signal.SIGKILL)
            self._end(cleanly=False)

    def kill(self) -> None:
        """See :class:`tiered_mmcache.disk.launch.WorkerProcess`."""
        self._killed = True
        if not self.hangs:
            self.die()

    def reap(self, timeout_s: float) -> bool:
        """See :class:`tiered_mmcache.disk.launch.WorkerProcess`; does not wait."""
        return not self.alive

    def _end(self, *, cleanly: bool) -> None:
        self.alive = False
        self._steps.end(cleanly=cleanly)


class SteppingWorkers:
    """Starts workers that do a step when a test says so.

    Its instance is called to start one; see ``launcher`` of
    :class:`tiered_mmcache.disk.client.SpillClient`.

    Args:
        open_store: Opens the store. To open one takes longer than most of what is done with it:
            a test that starts many workers may keep one open for all.

    Attributes:
        workers: Those that were started, oldest first.
        on_store: Called with each entry that is about to be committed, and the bytes it has.
    """

    def __init__(self, open_store: OpenStore = recovery.open_for_writing) -> None:
        self.workers: list[SteppingWorker] = []
        self.on_store: OnStore = lambda message, payload: None
        self._open_store = open_store

    def __call__(self, arena_fd: int) -> SteppingWorker:
        """Start one; what it opens, it opens at its first step."""
        number = len(self.workers) + 1

        def on_store(message: protocol.Put, payload: bytes) -> None:
            self.on_store(message, payload)

        self.workers.append(SteppingWorker(number, arena_fd, self._open_store, on_store))
        return self.workers[-1]

    @property
    def latest(self) -> SteppingWorker | None:
        """The one that was started last, while it has not ended."""
        return self.workers[-1] if self.workers and self.workers[-1].alive else None

    def step(self, *, write_first: bool = False) -> bool:
        """Let the latest worker do one thing; False when there was nothing to do."""
        return self.latest is not None and self.latest.step(write_first=write_first)


class SteppedClient(SpillClient):
    """The server's handle on such workers; where it would wait, the test decides what happens.

    Args:
        settings: The store.
        arena_fd: The arena.
        workers: Starts the workers.
        clock: Monotonic seconds.
        on_wait: Called with the seconds that may be waited, instead of waiting. It has to let
            time pass or a worker take a step, or the wait has no end.
    """

    def __init__(
        self,
        settings: StoreSettings,
        arena_fd: int,
        *,
        workers: SteppingWorkers,
        clock: Clock,
        on_wait: Callable[[float], None],
    ) -> None:
        super().__init__(settings, arena_fd, launcher=workers, clock=clock)
        self._on_wait = on_wait

    def wait(self, timeout_s: float) -> None:
        """Let the test say what happens meanwhile, within the limits of a real wait."""
        limit_s = math.inf
        if self._process is not None:
            limit_s = self._patience_s()
        elif self._dying is None:
            limit_s = -math.inf if self.is_closed else self._start_at - self._clock()
        if limit_s > 0:
            self._on_wait(max(0.0, min(timeout_s, limit_s)))
