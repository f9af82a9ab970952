"""Stop the worker (SIGSTOP) at random moments of reading and writing; let it go on, or never.

A look-up ends within the read timeout; later ones do not wait again; the worker is used again
when it goes on, and killed and replaced when it does not.
"""

import os
import random
import signal
import threading
import time

from tiered_mmcache.disk import client as client_module
from tiered_mmcache.testing import audit

from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import (
    LIMIT_S,
    MIB,
    await_that,
    configuration,
    is_right,
    open_cache,
    ready_worker,
    restart_quickly,
    result,
    size_of,
)

_KEYS = 40
_READ_TIMEOUT_S = 0.5
_LATER_GETS = 50


def _size(key):
    return size_of(key, MIB, 8 * MIB)


class _Server:
    def __init__(self, folder):
        restart_quickly()
        config = configuration(
            folder,
            hot=16 * MIB,
            max_size="256MiB",
            write_buffer="64MiB",
            read_timeout=f"{_READ_TIMEOUT_S}s",
        )
        self.cache = open_cache(config)
        self._random = random.Random(11)
        self.checked = self.wrong = self.timeouts = 0
        self.longest_get_s = self.longest_later_s = self.longest_set_s = 0.0
        for key in range(_KEYS):
            self.cache.set(key, result(key, 0, _size(key)))
            self.cache.drain(LIMIT_S)

    def round(self, *, writing, forever):
        """Stop the worker once; seconds from its going on, or its being replaced."""
        pid = ready_worker(self.cache)
        starts = self.cache._below.disk.client.starts
        delay_s = self._random.uniform(0.0, 0.02)
        stopper = threading.Timer(delay_s, os.kill, (pid, signal.SIGSTOP))
        stopper.start()
        before = self._timeouts()
        while self._timeouts() == before:
            if writing or not stopper.finished.is_set():
                self._set()
            self._get()
        stopper.join()
        self.timeouts += 1
        for _ in range(_LATER_GETS):
            took_s = self._get()
            self.longest_later_s = max(self.longest_later_s, took_s)
            self._set()
        audit(self.cache)
        if not forever:
            os.kill(pid, signal.SIGCONT)
        # Calls alone have to bring it back: nobody drains a server.
        took_s = await_that(self._reads_from_disk)
        replaced = self.cache._below.disk.client.starts > starts
        assert replaced == forever, "it was replaced" if replaced else "it was not replaced"
        return took_s

    def _reads_from_disk(self):
        hits = self.cache._counters.disk_hits
        self._get()
        return self.cache._counters.disk_hits > hits

    def _timeouts(self):
        return self.cache._counters.faults["read_timeout"]

    def _get(self):
        key = self._random.randrange(_KEYS)
        began_s = time.monotonic()
        found = self.cache.get_single(key)
        took_s = time.monotonic() - began_s
        self.longest_get_s = max(self.longest_get_s, took_s)
        if found is not None:
            self.checked += 1
            self.wrong += not is_right(found, key, 0, _size(key))
        return took_s

    def _set(self):
        key = self._random.randrange(_KEYS)
        value = result(key, 0, _size(key))
        began_s = time.monotonic()
        self.cache.set(key, value)
        self.longest_set_s = max(self.longest_set_s, time.monotonic() - began_s)


def _serve(connection, folder):
    server = _Server(folder)
    for writing, forever, quick in connection:
        client_module._SILENCE_LIMIT_S = 1.0 if quick else 10.0
        back_s = server.round(writing=writing, forever=forever)
        connection.send(
            {
                "back_s": back_s,
                "wrong": server.wrong,
                "checked": server.checked,
                "get_s": server.longest_get_s,
                "later_s": server.longest_later_s,
                "set_s": server.longest_set_s,
            }
        )
    server.cache.close()


def run(folder, *, full):
    outcome = Outcome(campaign="stopped worker")
    server = Child(_serve, folder / "store", stderr=folder / "stderr.log")
    on_s = replaced_s = 0.0
    report = {}
    for number in range(32 if full else 6):
        forever = number % 4 == 3
        outcome.cases += 1
        try:
            report = server.ask((number % 2 == 1, forever, not full or number != 3))
        except ChildFailedError as error:
            outcome.deaths += 1
            outcome.missed.append(f"round {number}: {error}")
            return outcome
        if forever:
            replaced_s = max(replaced_s, report["back_s"])
        else:
            on_s = max(on_s, report["back_s"])
    outcome.expect(server.end(), "the server did not end cleanly")
    outcome.wrong = report["wrong"]
    outcome.figures.append(f"{report['checked']:,} answers checked")
    slack_s = 0.1 if full else 2.0  # beside other programs a call may be held up by them
    outcome.bound("s, longest get:", report["get_s"], f"<= {_READ_TIMEOUT_S + slack_s}")
    outcome.bound("s, longest get after that one:", report["later_s"], f"<= {slack_s}")
    outcome.bound("s, longest set:", report["set_s"], f"<= {slack_s}")
    outcome.bound("s from going on to the next read:", on_s, "<= 5")
    outcome.bound("s until a hung one was replaced and read:", replaced_s, "<= 15")
    return outcome
