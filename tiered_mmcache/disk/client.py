"""The server's handle on its spill worker: requests, answers, deadlines, restarts.

Owns: the socket, the outstanding requests, and when a worker is started, given up and started
again.
Does not own: what the requests mean for memory (:mod:`tiered_mmcache.tiers.lower_tiers`).

Nothing here waits unless a deadline is given. A worker that died is noticed by end-of-file; its
outstanding requests then fail, and it is started again, first at once, then after growing pauses.
A worker that left a request unanswered beyond its deadline is not asked again until it answers,
and is killed when it stays silent.

A killed worker may take long to end: the kernel finishes a system call on a disk that hangs first.
Nobody waits for that, no other worker is started before, and its requests fail only then, since
memory that it was given is not free while it exists.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import os
import select
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.launch import SubprocessWorker, WorkerProcess
from tiered_mmcache.disk.protocol import Extents, StoreTotals
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.errors import RecordError

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_STEADY_S = 60.0  # a worker that lived this long starts with a clean slate
_START_LIMIT_S = 30.0
_SILENCE_LIMIT_S = 10.0
_REAP_S = 0.05
_LAST_REAP_S = 5.0  # at close, after which nobody will look for the killed worker again
_SLOW_END_S = 1.0  # a killed worker that is there for longer is stuck in a system call
# An answer from memory takes a fraction of a millisecond; being woken for it can take longer than
# that (measured on a virtual machine: 8 MB read in 2.0 ms asleep, 1.4 ms awake). So the socket is
# looked at for some 2 ms first. With a single core the worker needs it instead.
_LOOKS_BEFORE_SLEEP = 1000 if len(os.sched_getaffinity(0)) > 1 else 0
_MOST_DOUBLINGS = 10
_DEATHS_TO_QUARANTINE = 2
# What reading a damaged store ends with: pages beyond the file, and LMDB's own assertions.
_SIGNALS_OF_DAMAGE = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})
_GRACE_S = 0.001  # waiting ends after a limit, not on it

Reply = protocol.Done | protocol.Found | protocol.Absent | protocol.Failed
Clock = Callable[[], float]
Launcher = Callable[[int], WorkerProcess]


class WorkerState(enum.Enum):
    """What can be asked of the worker now."""

    DOWN = "down"  # none is running; one is started when the pause is over
    STARTING = "starting"  # running, the store is not open yet
    READY = "ready"
    CLOSED = "closed"  # given up for good


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a worker is told about its store; see :class:`tiered_mmcache.disk.protocol.Open`."""

    path: str
    budget_bytes: int
    largest_entry_bytes: int
    synchronous: bool
    namespace: str
    allow_network: bool = False
    keep_quarantined: int = 2


_clients: weakref.WeakSet[SpillClient] = weakref.WeakSet()


class SpillClient:
    """Talks to one worker at a time.

    Args:
        settings: The store.
        arena_fd: The descriptor of the arena, inherited by every worker.
        launcher: Starts a worker; a process unless a test says otherwise.
        clock: Monotonic seconds.

    Attributes:
        state: See :class:`WorkerState`.
        generation: The namespace's generation, None until a worker was ready once.
        totals: What the store held at the last answer that said so.
        quarantined_stores: How many unreadable stores lay beside it when it was opened.
        starts: How many workers were started.
        down_cause: Why there is no worker: ``died``, ``silent`` or the store's own cause.
    """

    def __init__(
        self,
        settings: StoreSettings,
        arena_fd: int,
        *,
        launcher: Launcher = SubprocessWorker,
        clock: Clock = time.monotonic,
    ) -> None:
        self._settings = settings
        self._arena_fd = arena_fd
        self._launcher = launcher
        self._clock = clock
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, None] = {}
        self._outbox: deque[bytes] = deque()
        self._arrived: list[Reply] = []
        self._ends: list[tuple[str, str]] = []
        self._filled: dict[int, int] = {}  # request -> leading bytes that can be read
        self._process: WorkerProcess | None = None
        self._dying: WorkerProcess | None = None  # killed, and has not ended yet
        self._dying_told = False
        self._killed_at = clock()
        self._failures = 0
        self._killed_by_store = 0
        self._start_at = clock()
        self._started_at = clock()
        self._ready_at: float | None = None
        self._silent_since: float | None = None
        self._overdue: set[int] = set()
        self.state = WorkerState.DOWN
        self.generation: bytes | None = None
        self.totals = StoreTotals()
        self.quarantined_stores = 0
        self.starts = 0
        self.down_cause = ""
        _clients.add(self)

    @property
    def pid(self) -> int | None:
        """The worker's process number, or None when there is none."""
        return None if self._process is None else self._process.pid

    @property
    def budget_bytes(self) -> int:
        """What the store's entries may be charged."""
        return self._settings.budget_bytes

    @property
    def is_ready(self) -> bool:
        """Whether the store is open."""
        return self.state is WorkerState.READY

    @property
    def is_closed(self) -> bool:
        """Whether there will be no worker any more."""
        return self.state is WorkerState.CLOSED

    @property
    def answers(self) -> bool:
        """Whether a request can be expected to be answered in time."""
        return self.state is WorkerState.READY and not self._overdue

    @property
    def unanswered(self) -> Collection[int]:
        """The numbers of the requests that have no answer yet."""
        return self._outstanding.keys()

    # Requests

    def put(
        self, *, store_key: bytes, full_key: bytes, header: EntryHeader, extents: Extents
    ) -> int:
        """Ask to store an entry; the answer comes with :meth:`poll`."""
        assert self.generation is not None
        number = next(self._numbers)
        message = protocol.Put(
            request=number,
            store_key=store_key,
            full_key=full_key,
            generation=self.generation,
            header=header,
            extents=extents,
        )
        return self._submit(number, message)

    def delete(self, store_key: bytes) -> int:
        """Ask to remove an entry; the answer comes with :meth:`poll`."""
        number = next(self._numbers)
        return self._submit(number, protocol.Delete(request=number, store_key=store_key))

    def clear(self, generation: bytes) -> int:
        """Ask to move the namespace to a generation; the answer comes with :meth:`poll`."""
        number = next(self._numbers)
        return self._submit(number, protocol.Clear(request=number, generation=generation))

    def flush(self) -> int:
        """Ask to be told when all before is committed; the answer comes with :meth:`poll`."""
        number = next(self._numbers)
        return self._submit(number, protocol.Flush(request=number))

    def touch(self, store_key: bytes) -> None:
        """Tell that an entry was used; there is no answer."""
        self._outbox.append(protocol.encode_message(protocol.Touch(store_key=store_key)))
        self._flush_outbox()

    def look_up(self, *, store_key: bytes, full_key: bytes, timeout_s: float) -> Reply | None:
        """Ask whether the store has an entry; None when there was no answer in time."""
        if not self.answers:
            return None
        number = self.begin_look_up(store_key=store_key, full_key=full_key)
        return self.answer_to(number, timeout_s)

    def begin_look_up(self, *, store_key: bytes, full_key: bytes) -> int:
        """Ask whether the store has an entry.

        The answer comes with :meth:`poll` or :meth:`answer_to`.
        """
        number = next(self._numbers)
        message = protocol.LookUp(request=number, store_key=store_key, full_key=full_key)
        return self._submit(number, message)

    def fill(
        self, *, store_key: bytes, full_key: bytes, header: EntryHeader, extents: Extents
    ) -> int:
        """Ask to have an entry copied into the extents.

        The answer comes with :meth:`poll` or :meth:`answer_to`; until then the worker may write
        into the extents. It is ABSENT when the store holds the entry with another header,
        its cost aside.
        """
        number = next(self._numbers)
        message = protocol.Fill(
            request=number,
            store_key=store_key,
            full_key=full_key,
            header=header,
            extents=extents,
        )
        return self._submit(number, message)

    def answer_to(
        self,
        number: int,
        timeout_s: float,
        on_progress: Callable[[int], None] = lambda filled_bytes: None,
    ) -> Reply | None:
        """Wait for the answer to a request that :meth:`poll` has not brought yet.

        Args:
            number: The request.
            timeout_s: When there is no answer by then, None is returned, and the worker is not
                asked again until it has answered; :meth:`poll` will bring it.
            on_progress: Hears how many leading bytes of the extents of a fill can be read.
        """
        deadline = self._clock() + timeout_s
        looks_left = _LOOKS_BEFORE_SLEEP
        while True:
            self._receive_all()
            if self._filled.get(number):
                on_progress(self._filled.pop(number))
                looks_left = _LOOKS_BEFORE_SLEEP
            for index, reply in enumerate(self._arrived):
                if reply.request == number:
                    return self._arrived.pop(index)
            remaining_s = deadline - self._clock()
            if remaining_s <= 0:
                self._overdue.add(number)
                self._silent_since = (
                    self._clock() if self._silent_since is None else self._silent_since
                )
                return None
            if looks_left and not self._outbox:
                looks_left -= 1
                os.sched_yield()  # in case the worker waits for this core
                continue
            self.wait(remaining_s)
            self._flush_outbox()

    # Progress

    def poll(self) -> list[Reply]:
        """Answers that have arrived since the last call, and a step of supervision; never waits."""
        self._supervise()
        if self._outbox:
            self._flush_outbox()
        self._receive_all()
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_ends(self) -> list[tuple[str, str]]:
        """Cause and problem of every worker that ended, or could not start, since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def wait(self, timeout_s: float) -> None:
        """Wait until something may have arrived, or a worker may be started."""
        if self._dying is not None:
            self._dying.reap(max(0.0, timeout_s))
            return
        if self._process is None:
            pause_s = min(timeout_s, max(0.0, self._start_at - self._clock()))
            if not self.is_closed and pause_s > 0:
                time.sleep(pause_s)
            return
        events = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        poller = select.poll()
        poller.register(self._process.connection, events)
        poller.poll(max(0.0, min(timeout_s, self._patience_s())) * 1000)

    def close(self, timeout_s: float) -> None:
        """End the worker: politely, and after ``timeout_s`` at once."""
        deadline = self._clock() + timeout_s
        if self._process is not None:
            self._outbox.append(protocol.encode_message(protocol.Close()))
            while self.pid is not None and self._clock() < deadline:
                self._flush_outbox()
                self._receive_all(on_end="closed")
                if self.pid is not None:
                    self.wait(deadline - self._clock())
        if self._process is not None:
            self._bury(self._process)
        if self._dying is not None:
            self._dying.reap(_LAST_REAP_S)
        self._process = self._dying = None
        self.state = WorkerState.CLOSED

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of the parent's worker, which must see the parent end."""
        if self._process is not None:
            os.close(self._process.connection.detach())
        self._process = self._dying = None
        self.state = WorkerState.CLOSED

    # Inside

    def _submit(self, number: int, message: protocol.Request) -> int:
        packet = protocol.encode_message(message)
        if len(packet) > protocol.MAX_PACKET_BYTES:
            problem = f"a message of {len(packet)} bytes: the entry lies in too many pieces"
            failed = protocol.Failed(request=number, cause="too_many_pieces", problem=problem)
            self._arrived.append(failed)
            return number
        self._outstanding[number] = None
        self._outbox.append(packet)
        self._flush_outbox()
        return number

    def _flush_outbox(self) -> None:
        while self._outbox and self._process is not None:
            try:
                self._process.connection.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                self._receive_all()  # what it said before its end still counts
                if self._process is not None:
                    self._bury_dead("died")
                return
            self._outbox.popleft()

    def _receive_all(self, on_end: str = "died") -> None:
        if self._dying is not None:
            self._collect_dying()
        while self._process is not None:
            try:
                packet = self._process.connection.recv(protocol.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:  # reported once; what was sent before can still be read
                continue
            except OSError:
                packet = b""
            if not packet:
                self._bury_dead(on_end)
                return
            try:
                self._take(protocol.decode_message(packet))
            except RecordError:
                self._process.kill()
                self._bury_dead("protocol")

    def _take(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Ready):
            self.state = WorkerState.READY
            self._ready_at = self._clock()
            if self._killed_by_store >= _DEATHS_TO_QUARANTINE:
                self._killed_by_store = 0  # it was set aside
            self.down_cause = ""
            self.totals = message.totals
            self.quarantined_stores = message.quarantined_stores
            if self.generation is None:
                self.generation = message.generation
        elif isinstance(message, protocol.Unavailable):
            self._bury_dead(message.cause, message.problem)
        elif isinstance(message, protocol.Progress):
            self._filled[message.request] = message.filled_bytes
        elif isinstance(message, Reply):
            self._answered(message)
        else:
            raise RecordError("protocol", "a worker does not send requests")

    def _answered(self, reply: Reply) -> None:
        if isinstance(reply, protocol.Done):
            self.totals = reply.totals
        self._outstanding.pop(reply.request, None)
        self._filled.pop(reply.request, None)
        self._overdue.discard(reply.request)
        if not self._overdue:
            self._silent_since = None
        self._arrived.append(reply)

    def _supervise(self) -> None:
        now = self._clock()
        if self._dying is not None:
            self._collect_dying()
        if self.state is WorkerState.DOWN and now >= self._start_at and self._dying is None:
            self._launch(now)
        late_start = self.state is WorkerState.STARTING and now - self._started_at > _START_LIMIT_S
        silent = self._silent_since is not None and now - self._silent_since > _SILENCE_LIMIT_S
        if self._process is not None and (late_start or silent):
            self._process.kill()
            self._bury_dead("silent")

    def _patience_s(self) -> float:
        """How long the worker may stay as it is before :meth:`_supervise` gives it up."""
        now = self._clock()
        left_s = math.inf
        if self.state is WorkerState.STARTING:
            left_s = self._started_at + _START_LIMIT_S - now
        if self._silent_since is not None:
            left_s = min(left_s, self._silent_since + _SILENCE_LIMIT_S - now)
        return left_s + _GRACE_S

    def _launch(self, now: float) -> None:
        try:
            self._process = self._launcher(self._arena_fd)
        except OSError as error:
            self._fail_all("not_started", str(error))
            return
        self._process.connection.setblocking(False)
        self.starts += 1
        self._started_at = now
        self.state = WorkerState.STARTING
        settings = dataclasses.asdict(self._settings)
        opening = protocol.Open(
            **settings,
            generation=self.generation or b"",
            killed_worker=self._killed_by_store >= _DEATHS_TO_QUARANTINE,
        )
        self._outbox.appendleft(protocol.encode_message(opening))
        self._flush_outbox()

    def _bury_dead(self, cause: str, problem: str = "the spill worker ended") -> None:
        process, self._process = self._process, None
        if process is not None:
            self._bury(process)
        if cause != "closed":
            self._fail_all(cause, problem)

    def _bury(self, process: WorkerProcess) -> None:
        process.connection.close()
        if not process.reap(_REAP_S):  # it is on its way out, or it hangs
            process.kill()
            self._dying = process
            self._dying_told = False
            self._killed_at = self._clock()
        elif process.exit_signal in _SIGNALS_OF_DAMAGE:
            self._killed_by_store += 1

    def _collect_dying(self) -> None:
        """Let go of a killed worker that has ended, and of what it was asked for."""
        assert self._dying is not None
        if self._dying.reap(0.0):
            self._dying = None
            self._fail_outstanding()
        elif not self._dying_told and self._clock() - self._killed_at > _SLOW_END_S:
            self._dying_told = True
            self._ends.append(("disk_hangs", "the killed worker does not end: its disk hangs"))

    def _fail_all(self, cause: str, problem: str) -> None:
        self._ends.append((cause, problem))
        now = self._clock()
        if self._ready_at is not None and now - self._ready_at > _STEADY_S:
            self._failures = 0
            self._killed_by_store = 0
        self._ready_at = None
        doublings = min(self._failures - 1, _MOST_DOUBLINGS)
        pause_s = 0.0 if not self._failures else _FIRST_PAUSE_S * 2.0**doublings
        self._failures += 1
        self._start_at = now + min(pause_s, _LONGEST_PAUSE_S)
        self.state = WorkerState.DOWN
        self.down_cause = cause
        self._outbox.clear()
        self._silent_since = None
        if self._dying is None:
            self._fail_outstanding()

    def _fail_outstanding(self) -> None:
        problem = "the worker ended before it answered"
        for number in self._outstanding:
            failed = protocol.Failed(request=number, cause="worker_died", problem=problem)
            self._arrived.append(failed)
        self._outstanding.clear()
        self._filled.clear()
        self._overdue.clear()
        self._silent_since = None


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
