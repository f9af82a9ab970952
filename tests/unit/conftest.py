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
        self.budget_bytes = settings.budget_bytes
        self._numbers = itertools.count(1)
        self._pending = {}
        self._arrived = []
        self._overdue = {}
        self._ends = []

    @property
    def answers(self):
        return self.is_ready and not self._overdue

    @property
    def unanswered(self):
        return {*self._pending, *self._overdue}

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
        number = next(self._numbers)
        self.log.append(("look_up", full_key))
        if self.silent:
            self._overdue[number] = lambda: None
            return None
        found = self.entries.get(store_key)
        if found is None or found[0] != full_key:
            return protocol.Absent(request=number)
        return protocol.Found(request=number, header=found[1])

    def fill(self, *, store_key, full_key, header, extents, timeout_s, on_progress):
        number = next(self._numbers)
        if not self.answers:
            return number, None
        self.log.append(("fill", full_key))
        found = self.entries.get(store_key)
        if found is None or found[:2] != (full_key, header):
            return number, protocol.Absent(request=number)

        def write():
            self._write(extents, found[2])

        if self.silent:
            self._overdue[number] = write
            return number, None
        write()
        on_progress(len(found[2]) // 2)
        self.reads_ended += 1
        return number, protocol.Done(request=number, totals=self.totals)

    # Progress

    def poll(self):
        if not self.paused:
            self.answer()
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

    def answer_oddly(self, kind):
        """Answer the oldest change of a kind with what is no answer to it."""
        number = next(n for n, (pending, _) in self._pending.items() if pending == kind)
        del self._pending[number]
        self._arrived.append(protocol.Absent(request=number))

    def speak_again(self):
        """Answer what was left unanswered; a late read writes into its extents now."""
        self.silent = False
        for number, change in self._overdue.items():
            change()
            self._arrived.append(protocol.Done(request=number, totals=self.totals))
        self._overdue.clear()

    def die(self, cause="died"):
        """End without having made any of the pending changes."""
        self.is_ready = False
        self.down_cause = cause
        self._ends.append((cause, "the worker ended"))
        for number in self.unanswered:
            self._fail(number, "worker_died")
        self._pending.clear()
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
