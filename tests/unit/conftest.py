"""A spill worker without a process, for the tests of what stands above it.

Owns: :class:`FakeClient`, which answers as the handle on a worker does, when a test says so.
Does not own: the real handle (test_disk_client.py) or its worker (tests/faults).
"""

import itertools
import os

import pytest

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.protocol import StoreTotals


class FakeClient:
    """Keeps entries in a dictionary, and reads and writes the arena as a worker would.

    Attributes:
        paused: Changes wait until :meth:`answer`; look-ups are answered from what is there now.
        silent: Look-ups and reads get no answer in time.
        reads_held: Look-ups and reads are answered only when one is waited for, those that were
            sent before it first, or by :meth:`answer_read`.
        fails: The cause with which changes of a kind fail.
        reads_ended: Reads that were waited for to their end.
        log: Every request, in order: its kind and what it is about.
    """

    def __init__(self, settings, arena_fd):
        self.settings = settings
        self.arena_fd = arena_fd
        self.entries = {}
        self.paused = False
        self.silent = False
        self.reads_held = False
        self.fails = {}
        self.log = []
        self.touched = []
        self.reads_ended = 0
        self.waits_s = []
        self.is_ready = True
        self.is_closed = False
        self.generation = b"g" * 16
        self.down_cause = ""
        self.pid = 1
        self.starts = 1
        self.quarantined_stores = 0
        self.budget_bytes = settings.budget_bytes
        self._numbers = itertools.count(1)
        self._pending = {}
        self._arrived = []
        self._reads = {}
        self._overdue = {}
        self._ends = []

    @property
    def answers(self):
        return self.is_ready and not self._overdue

    @property
    def unanswered(self):
        return {*self._pending, *self._reads, *self._overdue}

    @property
    def totals(self):
        used = sum(len(data) for _, _, data in self.entries.values())
        return StoreTotals(entries=len(self.entries), used_bytes=used, payload_bytes=used)

    # Requests

    def put(self, *, store_key, full_key, header, extents):
        def store():
            self.entries[store_key] = (full_key, header, self._read(extents, header))

        return self._submit(("put", full_key), store)

    def delete(self, store_key):
        return self._submit(("delete", store_key), lambda: self.entries.pop(store_key, None))

    def clear(self, generation):
        return self._submit(("clear", generation), lambda: None)

    def flush(self):
        return self._submit(("flush", None), lambda: None)

    def touch(self, store_key):
        self.touched.append(store_key)

    def look_up(self, *, store_key, full_key, timeout_s):
        if not self.answers:
            return None
        number = self.begin_look_up(store_key=store_key, full_key=full_key)
        return self.answer_to(number, timeout_s)

    def begin_look_up(self, *, store_key, full_key):
        def answer(number, on_progress):
            found = self.entries.get(store_key)
            if found is None or found[0] != full_key:
                return protocol.Absent(request=number)
            return protocol.Found(request=number, header=found[1])

        return self._submit_read(("look_up", full_key), answer)

    def fill(self, *, store_key, full_key, header, extents):
        def answer(number, on_progress):
            found = self.entries.get(store_key)
            if found is None or found[:2] != (full_key, header):
                return protocol.Absent(request=number)
            self._write(extents, found[2])
            on_progress(len(found[2]) // 2)
            self.reads_ended += 1
            return protocol.Done(request=number, totals=self.totals)

        return self._submit_read(("fill", full_key), answer)

    def answer_to(self, number, timeout_s, on_progress=lambda filled_bytes: None):
        if self.silent:
            self._overdue[number] = self._reads.pop(number)
            return None
        for earlier in [request for request in self._reads if request < number]:
            self._arrived.append(self._reads.pop(earlier)(earlier, lambda filled_bytes: None))
        for index, reply in enumerate(self._arrived):
            if reply.request == number:
                return self._arrived.pop(index)
        return self._reads.pop(number)(number, on_progress)

    # Progress

    def poll(self):
        if not self.paused:
            self.answer()
        while self._reads and not (self.reads_held or self.silent):
            self.answer_read()
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_ends(self):
        ends, self._ends = self._ends, []
        return ends

    def wait(self, timeout_s):
        self.waits_s.append(timeout_s)

    def close(self, timeout_s):
        self.answer()
        self.is_ready = False
        self.is_closed = True

    # What a test does to it

    def answer(self, *, until=None):
        """Make the pending changes in order, all of them or up to the first of a kind."""
        for number, (kind, change) in list(self._pending.items()):
            del self._pending[number]
            if kind in self.fails:
                self._fail(number, self.fails[kind])
            else:
                change()
                self._arrived.append(protocol.Done(request=number, totals=self.totals))
            if kind == until:
                return

    def answer_read(self):
        """Answer the oldest look-up or read."""
        number = next(iter(self._reads))
        self._arrived.append(self._reads.pop(number)(number, lambda filled_bytes: None))

    def answer_oddly(self, kind):
        """Answer the oldest change of a kind with what is no answer to it."""
        number = next(n for n, (pending, _) in self._pending.items() if pending == kind)
        del self._pending[number]
        self._arrived.append(protocol.Absent(request=number))

    def speak_again(self):
        """Answer what was left unanswered; a late read writes into its extents now."""
        self.silent = False
        for number, answer in self._overdue.items():
            self._arrived.append(answer(number, lambda filled_bytes: None))
        self._overdue.clear()

    def die(self, cause="died"):
        """End without having made any of the pending changes."""
        self.is_ready = False
        self.down_cause = cause
        self._ends.append((cause, "the worker ended"))
        for number in self.unanswered:
            self._fail(number, "worker_died")
        self._pending.clear()
        self._reads.clear()
        self._overdue.clear()

    def start(self):
        self.is_ready = True
        self.down_cause = ""
        self.starts += 1

    def asked(self, kind):
        return [about for what, about in self.log if what == kind]

    # Inside

    def _submit(self, request, change):
        number = next(self._numbers)
        self.log.append(request)
        self._pending[number] = request[0], change
        return number

    def _submit_read(self, request, answer):
        number = next(self._numbers)
        self.log.append(request)
        self._reads[number] = answer
        return number

    def _fail(self, number, cause):
        self._arrived.append(protocol.Failed(request=number, cause=cause, problem="as told"))

    def _read(self, extents, header):
        data = b"".join(os.pread(self.arena_fd, length, offset) for offset, length in extents)
        return data[: header.payload_bytes]

    def _write(self, extents, data):
        for offset, length in extents:
            os.pwrite(self.arena_fd, data[:length], offset)
            data = data[length:]


@pytest.fixture
def fake_client():
    """The class, which ``TieredMultimodalCache(make_client=...)`` takes."""
    return FakeClient
