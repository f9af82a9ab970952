"""Several servers on one store: setting, getting, freeing and clearing, with kills among them.

A payload follows from its key and the version that its server has cleared to, as embeddings
follow from an input and a model's weights. So every answer can be checked, whichever server set
it, and an answer of another version is a wrong one. A server that clears without a version shares
with nobody: its payloads then follow from a number that only it knows.
"""

import os
import random
import signal
import time
from multiprocessing.connection import wait

from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import (
    MIB,
    ForkedWorker,
    configuration,
    is_right,
    open_cache,
    quarantined,
    restart_quickly,
    result,
    scan,
    size_of,
    worker_pid,
)

_PROCESSES = 4
_KEYS = 150
_VERSIONS = 3
_READ_TIMEOUT_S = 2.0
_TOLD_FAULTS = {"died", "worker_died", "read_timeout", "silent", "disk_not_ready"}


def _size(key):
    return size_of(key, 16, 400_000)


class _Server:
    def __init__(self, folder, seed):
        restart_quickly()
        config = configuration(
            folder,
            hot=MIB // 2,
            host=MIB,
            max_size="16MiB",
            write_buffer="4MiB",
            read_timeout=f"{_READ_TIMEOUT_S}s",
        )
        self._random = random.Random(seed)
        self.cache = open_cache(config, ForkedWorker)
        self._version = self._random.randrange(1, 1 + _VERSIONS)
        self.cache.clear(str(self._version))
        self.acts = self.hits = self.wrong = 0
        self.longest_s = 0.0

    def act(self):
        self.acts += 1
        key = self._random.randrange(_KEYS)
        dice = self._random.random()
        began_s = time.monotonic()
        if dice < 0.45:
            self._get(key)
        elif dice < 0.90:
            self.cache.set(key, result(key, self._version, _size(key)))
        elif dice < 0.995:
            self.cache.free(key)
            self.wrong += key in self.cache.mm_cache
        elif dice < 0.999:
            self._version = self._random.randrange(1, 1 + _VERSIONS)
            self.cache.clear(str(self._version))
        else:
            self._version = self._random.randrange(2**32, 2**63)
            self.cache.clear()
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def _get(self, key):
        found = self.cache.get_single(key)
        if found is not None:
            self.hits += 1
            self.wrong += not is_right(found, key, self._version, _size(key))


def _serve(connection, folder, seed):
    server = _Server(folder, seed)
    while not connection.ready():
        for _ in range(20):
            server.act()
        connection.send(_report(server))  # a sign of life, and what counts if it is killed
    connection.recv()
    server.cache.drain(30.0)
    connection.send(_report(server))
    server.cache.close()


def _report(server):
    disk_hits = server.cache._counters.disk_hits
    return {
        "worker": worker_pid(server.cache),
        "acts": server.acts,
        "hits": server.hits,
        "disk_hits": disk_hits,
        "wrong": server.wrong,
        "longest_s": server.longest_s,
        "faults": dict(server.cache.stats().faults),
    }


class _Crowd:
    """The servers, those that were killed replaced."""

    def __init__(self, folder, outcome):
        self._folder = folder
        self._outcome = outcome
        self._random = random.Random(3)
        self._seed = 0
        self._reports = {}
        self.ended = []
        self.killed_workers = self.killed_servers = 0
        self.servers = [self._start() for _ in range(_PROCESSES)]

    def live(self, seconds):
        """Let them work, and kill one or its worker now and then."""
        end_s = time.monotonic() + seconds
        kill_at_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            self._listen(min(end_s, kill_at_s) - time.monotonic())
            if time.monotonic() >= kill_at_s:
                self._kill_something()
                kill_at_s = time.monotonic() + self._random.uniform(0.1, 0.6)

    def _listen(self, limit_s):
        connections = {server.connection: server for server in self.servers}
        sentinels = {server.process.sentinel: server for server in self.servers}
        for ready in wait([*connections, *sentinels], max(0.0, limit_s)):
            server = connections.get(ready) or sentinels[ready]
            if server in self.servers:
                self._hear(server)

    def _hear(self, server):
        try:
            self._reports[server] = server.answer(30.0)
        except ChildFailedError as error:
            self._outcome.deaths += 1
            self._outcome.missed.append(str(error)[-400:])
            self._replace(server)

    def _kill_something(self):
        server = self._random.choice(self.servers)
        report = self._reports.get(server)
        if report is None or report["worker"] is None:
            return
        if self._random.random() < 0.25:
            self.killed_servers += 1
            server.kill()
            self._replace(server)
        else:
            self.killed_workers += 1
            try:
                os.kill(report["worker"], signal.SIGKILL)
            except ProcessLookupError:
                self.killed_workers -= 1  # it was killed a moment ago

    def end(self):
        for server in self.servers:
            server.tell(None)
        for server in self.servers:
            try:
                self._reports[server] = server.answer(60.0)
                while server.process.exitcode is None or server.connection.poll():
                    self._reports[server] = server.answer(60.0)
            except ChildFailedError as error:
                if server.process.exitcode != 0:
                    self._outcome.deaths += 1
                    self._outcome.missed.append(str(error)[-400:])
            self.ended.append(self._reports.get(server))

    def _start(self):
        self._seed += 1
        return Child(_serve, self._folder, self._seed, stderr=self._folder.parent / "stderr.log")

    def _replace(self, server):
        self.ended.append(self._reports.pop(server, None))
        self.servers[self.servers.index(server)] = self._start()


def run(folder, *, full):
    outcome = Outcome(campaign="four processes")
    store = folder / "store"
    crowd = _Crowd(store, outcome)
    seconds = 60 if full else 10
    crowd.live(seconds)
    crowd.end()
    reports = [report for report in crowd.ended if report is not None]
    entries, findings = scan(store)
    outcome.missed += findings[:5]
    outcome.expect(quarantined(store) == 0, "the store was set aside")
    outcome.cases = sum(report["acts"] for report in reports)
    outcome.wrong = sum(report["wrong"] for report in reports)
    hits = sum(report["hits"] for report in reports)
    disk_hits = sum(report["disk_hits"] for report in reports)
    outcome.expect(disk_hits > 0, "nothing was served from disk")
    strange = {cause for report in reports for cause in report["faults"]} - _TOLD_FAULTS
    outcome.expect(not strange, f"faults {sorted(strange)}")
    outcome.figures += [
        f"{seconds} s of calls",
        f"{hits:,} answers checked, {disk_hits:,} from disk",
        f"{crowd.killed_workers} workers and {crowd.killed_servers} servers killed",
        f"{entries} entries at the end, {len(findings)} findings",
    ]
    longest_s = max(report["longest_s"] for report in reports)
    outcome.bound("s, longest call:", longest_s, "<= 3" if full else "<= 10")
    return outcome
