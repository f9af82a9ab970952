"""The spill worker: the only process that opens the store for writing.

Owns: the store, and the order of what is done to it. Look-ups are answered before queued writes;
queued writes become one transaction of bounded size; an answer is sent after the commit.
Does not own: memory (the arena is the server's) or policy. Imports no torch, so that it starts
quickly and stays small.

It ends when the server does: the socket then reports end-of-file, whatever killed the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import lmdb

from tiered_mmcache.disk import protocol, recovery
from tiered_mmcache.disk.causes import cause_of
from tiered_mmcache.disk.changes import (
    BeginGeneration,
    Change,
    DeleteEntry,
    Outcome,
    PutEntry,
    TouchEntry,
)
from tiered_mmcache.disk.protocol import StoreTotals
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.keys import generation_of_version
from tiered_mmcache.errors import RecordError, StoreUnavailableError
from tiered_mmcache.metrics.counters import OncePerMinute
from tiered_mmcache.metrics.remedies import log_fields

_MAX_BATCH_REQUESTS = 256
_IDLE_S = 0.5  # after this long without a request, recency is written down
_MAX_TOUCHED = 4096
_LOOKS_BEFORE_SLEEP = 200 if len(os.sched_getaffinity(0)) > 1 else 0  # about 0.3 ms
_MOST_STEPS = 32  # in which progress of a read is told
_LAST_WRITES_S = 1.0  # after the server's death; its process is expected to be gone soon
_NO_LIMIT_S = float("inf")  # the server that closes has its own
_TOTALS_INTERVAL_S = 1.0

log = logging.getLogger("tiered_mmcache")

Write = protocol.Put | protocol.Delete | protocol.Clear | protocol.Flush


class ServerGoneError(Exception):
    """The other end of the socket is closed."""


class UnusableStoreError(Exception):
    """This worker can do no more with the store: the next one opens it anew, or sets it aside."""


class SpillWorker:
    """Serves one socket until it is closed.

    Args:
        connection: This process's end of it.
        arena: The server's memory.
        open_store: Opens a store, or raises StoreUnavailableError; for tests.

    Attributes:
        least_step_bytes: Progress of a read is told at most this often.
    """

    least_step_bytes = 2 * 1024 * 1024

    def __init__(
        self,
        connection: socket.socket,
        arena: memoryview,
        open_store: Callable[
            [recovery.OpenSettings], recovery.OpenStore
        ] = recovery.open_for_writing,
    ) -> None:
        self._open_store = open_store
        self._connection = connection
        self._arena = arena
        self._writes: deque[Write] = deque()
        self._touched: dict[bytes, None] = {}
        self._damaged: dict[bytes, None] = {}
        self._closing = False
        self._over_budget = False
        self._totals_due_s = 0.0
        self._last_totals = StoreTotals()
        self._coldest_created_s = 0
        self._opened: recovery.OpenStore | None = None

    def serve(self) -> None:
        """Open the store as the first message says, then answer until the end."""
        first = self._receive()
        if not isinstance(first, protocol.Open):
            raise RecordError("protocol", "the first message must open the store")
        opened = self._open(first)
        if opened is None:
            return
        cleanly = True
        try:
            self._announce(first)
            self._loop()
        except ServerGoneError:
            self._write_everything(_LAST_WRITES_S)
        except UnusableStoreError as error:
            cleanly = False
            log.error(
                "the worker of %s ends, to open it anew: %s",
                first.path,
                error,
                extra=log_fields("reopen", "Look for what the next worker says of the store."),
            )
        finally:
            opened.close(cleanly=cleanly)

    def _open(self, first: protocol.Open) -> recovery.OpenStore | None:
        """Open the store, or say why it cannot be and return None."""
        settings = recovery.OpenSettings(
            path=Path(first.path),
            budget_bytes=first.budget_bytes,
            largest_entry_bytes=first.largest_entry_bytes,
            synchronous=first.synchronous,
            allow_network=first.allow_network,
            keep_quarantined=first.keep_quarantined,
            killed_worker=first.killed_worker,
        )
        try:
            opened = self._open_store(settings)
        except StoreUnavailableError as error:
            self._send(protocol.Unavailable(cause=error.cause, problem=str(error)))
            return None
        self._opened = opened
        self._batch_bytes = settings.batch_bytes
        self._namespace = first.namespace
        self._store = Store(opened.environment, budget_bytes=first.budget_bytes)
        return opened

    def _announce(self, first: protocol.Open) -> None:
        held = self._store.current_generation(self._namespace)
        generation = first.generation or held or generation_of_version(None)
        if held is None:
            self._store.apply([BeginGeneration(namespace=self._namespace, generation=generation)])
        self._over_budget = self._store.is_over_budget()
        quarantined = len(recovery.quarantined_stores(Path(first.path)))
        totals = self._totals(after_commit=True)
        self._send(
            protocol.Ready(generation=generation, totals=totals, quarantined_stores=quarantined)
        )

    def _totals(self, *, after_commit: bool) -> StoreTotals:
        """What the store holds; between own commits, and what takes more to find, each second."""
        now_s = time.monotonic()
        due = now_s >= self._totals_due_s
        if due:
            self._totals_due_s = now_s + _TOTALS_INTERVAL_S
            self._coldest_created_s = int(self._store.coldest_created_s(self._namespace))
        if due or after_commit:
            self._last_totals = dataclasses.replace(
                self._store.totals(), coldest_created_s=self._coldest_created_s
            )
        return self._last_totals

    def _loop(self) -> None:
        looks_left = 0
        while not self._closing:
            busy = bool(self._writes) or self._over_budget
            wait_s = 0 if busy or looks_left else _IDLE_S
            if select.select([self._connection], [], [], wait_s)[0]:
                self._accept(self._receive())
                looks_left = _LOOKS_BEFORE_SLEEP
            elif looks_left and not busy:
                looks_left -= 1  # a look-up is often followed by its read
            elif busy:
                self._advance()
            else:
                self._check_place()
                self._write_recency()
                self._over_budget = self._store.is_over_budget()
        self._write_everything(_NO_LIMIT_S)

    def _check_place(self) -> None:
        """End when the file that is open is no longer the one in the folder."""
        if self._opened is None or not self._opened.is_in_place():
            raise UnusableStoreError("its file was removed or replaced")

    def _accept(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.LookUp):
            self._look_up(message)
        elif isinstance(message, protocol.Fill):
            self._fill(message)
        elif isinstance(message, protocol.Touch):
            self._touch(message.store_key)
        elif isinstance(message, protocol.Close):
            self._closing = True
        elif isinstance(message, Write):
            self._writes.append(message)
        else:
            raise RecordError("protocol", f"unexpected {type(message).__name__}")

    # Reading

    def _look_up(self, message: protocol.LookUp) -> None:
        try:
            record = self._store.look_up(message.store_key, message.full_key)
        except (RecordError, lmdb.Error) as error:
            self._fail_read(message, error)
            return
        if record is None:
            self._send(protocol.Absent(request=message.request))
        else:
            self._send(protocol.Found(request=message.request, header=record.header))

    def _fill(self, message: protocol.Fill) -> None:
        payload_bytes = message.header.payload_bytes
        parts = self._parts(message.extents, payload_bytes)
        step_bytes = max(self.least_step_bytes, payload_bytes // _MOST_STEPS)
        told_bytes = 0

        def tell(filled_bytes: int) -> None:
            nonlocal told_bytes
            if filled_bytes - told_bytes >= step_bytes:
                told_bytes = filled_bytes
                self._send(protocol.Progress(request=message.request, filled_bytes=filled_bytes))

        try:
            there = self._store.fill(
                message.store_key, message.full_key, message.header, parts, tell
            )
        except (RecordError, lmdb.Error) as error:
            self._fail_read(message, error)
            return
        if not there:
            self._send(protocol.Absent(request=message.request))
            return
        self._touch(message.store_key)
        self._send(protocol.Done(request=message.request, totals=self._totals(after_commit=False)))

    def _touch(self, store_key: bytes) -> None:
        self._touched.pop(store_key, None)
        self._touched[store_key] = None
        if len(self._touched) >= _MAX_TOUCHED:
            self._write_recency()

    def _fail_read(
        self, message: protocol.LookUp | protocol.Fill, error: RecordError | lmdb.Error
    ) -> None:
        if isinstance(error, RecordError):
            self._damaged[message.store_key] = (
                None  # an entry that cannot be served only takes room
            )
        self._send(_failed(message.request, error))

    # Writing

    def _advance(self) -> None:
        """Make one short transaction; look-ups are answered between two of them."""
        self._over_budget = self._store.is_over_budget() and self._evict_some()
        if self._writes and not self._over_budget:
            self._write_batch()

    def _evict_some(self) -> bool:
        """Evict a bounded part of what is too much; False when nothing could be evicted."""
        try:
            return self._store.evict_some() > 0
        except (RecordError, lmdb.CorruptedError, lmdb.PanicError) as error:
            raise UnusableStoreError(str(error)) from error
        except (lmdb.Error, OSError) as error:
            log.warning("nothing was evicted: %s", error, extra=log_fields(cause_of(error)))
            return False

    def _write_batch(self) -> None:
        batch: list[Write] = []
        size_bytes = 0
        while self._writes and len(batch) < _MAX_BATCH_REQUESTS:
            payload_bytes = _payload_bytes(self._writes[0])
            if batch and size_bytes + payload_bytes > self._batch_bytes:
                break
            size_bytes += payload_bytes
            batch.append(self._writes.popleft())
        self._commit(batch)

    def _commit(self, batch: list[Write]) -> None:
        self._check_place()
        changes = [change for write in batch for change in self._changes(write)]
        recency = self._take_recency()
        try:
            outcomes = iter(self._apply([*recency, *changes])[len(recency) :])
            totals = self._totals(after_commit=True)
        except (lmdb.Error, OSError, RecordError) as error:
            self._fail_batch(batch, error)
            return
        for write in batch:
            outcome = Outcome.DONE if isinstance(write, protocol.Flush) else next(outcomes)
            self._answer(write, outcome, totals)

    def _fail_batch(self, batch: list[Write], error: lmdb.Error | OSError | RecordError) -> None:
        if isinstance(error, (RecordError, lmdb.CorruptedError, lmdb.PanicError)):
            for write in batch:
                self._send(_failed(write.request, error))
            raise UnusableStoreError(str(error)) from error
        if len(batch) > 1:  # one of them may be at fault: the others need not suffer
            for write in batch:
                self._commit([write])
        else:
            self._send(_failed(batch[0].request, error))

    def _apply(self, changes: list[Change]) -> list[Outcome]:
        try:
            outcomes = self._store.apply(changes)
        except lmdb.MapFullError:
            # Pages freed in one transaction are usable two commits later: make two, then try again.
            self._store.make_room(self._batch_bytes)
            outcomes = self._store.apply(changes)
        if self._opened is not None:
            self._opened.cover_last_page()
        return outcomes

    def _answer(self, write: Write, outcome: Outcome, totals: StoreTotals) -> None:
        if outcome is Outcome.DONE:
            self._send(protocol.Done(request=write.request, totals=totals))
        else:
            problem = "the entry is larger than disk.max_size"
            self._send(protocol.Failed(request=write.request, cause=outcome.value, problem=problem))

    def _changes(self, write: Write) -> list[Change]:
        if isinstance(write, protocol.Put):
            return [
                PutEntry(
                    store_key=write.store_key,
                    full_key=write.full_key,
                    namespace=self._namespace,
                    generation=write.generation,
                    header=write.header,
                    parts=self._parts(write.extents, write.header.payload_bytes),
                )
            ]
        if isinstance(write, protocol.Delete):
            return [DeleteEntry(store_key=write.store_key)]
        if isinstance(write, protocol.Clear):
            return [BeginGeneration(namespace=self._namespace, generation=write.generation)]
        return []

    def _take_recency(self) -> list[Change]:
        changes: list[Change] = [DeleteEntry(store_key=key) for key in self._damaged]
        changes += [TouchEntry(store_key=key) for key in self._touched]
        self._damaged.clear()
        self._touched.clear()
        return changes

    def _write_recency(self) -> None:
        changes = self._take_recency()
        if not changes:
            return
        try:
            self._apply(changes)
        except (RecordError, lmdb.CorruptedError, lmdb.PanicError) as error:
            raise UnusableStoreError(str(error)) from error
        except (lmdb.Error, OSError) as error:
            log.warning("recency was not written: %s", error, extra=log_fields(cause_of(error)))

    def _write_everything(self, limit_s: float) -> None:
        """Commit what is queued, as far as the time allows, and recency."""
        deadline_s = time.monotonic() + limit_s
        while self._writes and time.monotonic() < deadline_s:
            try:
                self._write_batch()
            except ServerGoneError:
                continue  # nobody is left to hear the answer; the commit counts
            except UnusableStoreError as error:
                log.error("the last writes were lost: %s", error, extra=log_fields("damaged"))
                return
        self._write_recency()

    # The socket and the arena

    def _parts(self, extents: protocol.Extents, payload_bytes: int) -> list[memoryview]:
        parts = []
        for offset, length in extents:
            if offset + length > len(self._arena):
                raise RecordError("protocol", "an extent lies outside the arena")
            taken = min(length, payload_bytes)
            if taken:
                parts.append(self._arena[offset : offset + taken])
            payload_bytes -= taken
        if payload_bytes:
            raise RecordError("protocol", "the extents are smaller than the payload")
        return parts

    def _receive(self) -> protocol.Message:
        while True:
            try:
                packet = self._connection.recv(protocol.MAX_PACKET_BYTES)
            except ConnectionResetError:  # said once when the server died before it read an answer
                continue
            if not packet:
                raise ServerGoneError
            return protocol.decode_message(packet)

    def _send(self, message: protocol.Reply) -> None:
        try:
            self._connection.send(protocol.encode_message(message))
        except (BrokenPipeError, ConnectionResetError):
            raise ServerGoneError from None


def _payload_bytes(write: Write) -> int:
    return write.header.payload_bytes if isinstance(write, protocol.Put) else 0


def _failed(request: int, error: RecordError | lmdb.Error | OSError) -> protocol.Failed:
    cause = error.cause if isinstance(error, RecordError) else cause_of(error)
    return protocol.Failed(request=request, cause=cause, problem=str(error)[:1000])


def _give_way_to_whoever_wakes_it() -> None:
    """Never take the core from the server's thread that sends a request.

    With every core busy the kernel lets a process that it wakes run first, in the place of the
    one that woke it (measured: handing over a write took 2 ms, that of the write itself).
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(connection_fd: int, arena_fd: int) -> None:
    """Serve the socket and the arena that were inherited under these descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    _give_way_to_whoever_wakes_it()
    os.umask(0o077)
    log.addFilter(OncePerMinute())
    arena = mmap.mmap(arena_fd, 0)
    os.close(arena_fd)
    with socket.socket(fileno=connection_fd) as connection:
        try:
            SpillWorker(connection, memoryview(arena)).serve()
        except ServerGoneError:
            return
