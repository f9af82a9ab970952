"""Kill the spill worker, or its whole server, at random moments of writing.

After each kill: the store opens, its totals equal a full scan, and whatever is served is what was
set last, in this life of the server, or at some time, in an earlier one.
"""

import dataclasses
import os
import random
import signal
import time

from .children import Child, ChildFailedError, Watched
from .outcome import Outcome
from .subject import (
    MIB,
    ForkedWorker,
    SubprocessWorker,
    configuration,
    is_right,
    open_cache,
    quarantined,
    ready_worker,
    restart_quickly,
    result,
    scan,
    size_of,
    token_in,
)

_KEYS = 120
_FREED = -1
_LONGEST_DELAY_S = 0.06
_GONE_LIMIT_S = 2.0


@dataclasses.dataclass
class Checked:
    """What a server says after a look at all keys."""

    hits: int = 0
    wrong: int = 0
    faults: dict = dataclasses.field(default_factory=dict)


class _Life:
    """One life of a server and what it knows to have set."""

    def __init__(self, folder, seed, launcher):
        restart_quickly()
        config = configuration(folder, hot=MIB // 2, max_size="8MiB", write_buffer="4MiB")
        self.cache = open_cache(config, launcher)
        self._random = random.Random(seed)
        self._revision = seed << 32
        self._set = {}  # key -> revision, in this life

    def act(self):
        """One call at random."""
        key = self._random.randrange(_KEYS)
        if self._random.random() < 0.1:
            self.cache.free(key)
            self._set[key] = _FREED
        elif self._random.random() < 0.1:
            return self._check(key)[1]
        elif key not in self.cache.mm_cache:
            self._revision += 1
            if self.cache.set(key, result(key, self._revision, _size(key))):
                self._set[key] = self._revision
        return 0

    def check_all(self):
        counts = Checked(faults=dict(self.cache.stats().faults))
        for key in range(_KEYS):
            hits, wrong = self._check(key)
            counts.hits += hits
            counts.wrong += wrong
        return counts

    def _check(self, key):
        found = self.cache.get_single(key)
        if found is None:
            return 0, 0
        token = self._set.get(key, token_in(found))
        return 1, int(token == _FREED or not is_right(found, key, token, _size(key)))


def _size(key):
    return size_of(key, 16, 300_000)


def _serve(connection, folder, seed, launcher):
    life = _Life(folder, seed, launcher)
    connection.send(life.check_all())
    for _ in connection:
        connection.send(ready_worker(life.cache))
        starts = life.cache._below.disk.client.starts
        wrong = 0
        while life.cache._below.disk.client.starts == starts:
            wrong += life.act()
        ready_worker(life.cache)
        checked = life.check_all()
        checked.wrong += wrong
        connection.send(checked)
    life.cache.close()


def run(folder, *, full):
    cycles = 300 if full else 40
    outcome = Outcome(campaign="kill loop")
    launcher = SubprocessWorker if full else ForkedWorker
    loop = _Loop(folder, outcome, launcher)
    for cycle in range(cycles):
        loop.cycle(kill_server=cycle % 10 == 9)
    loop.finish()
    return outcome


class _Loop:
    def __init__(self, folder, outcome, launcher):
        self._folder = folder / "store"
        self._log = folder / "stderr.log"
        self._outcome = outcome
        self._launcher = launcher
        self._random = random.Random(1)
        self._hits = self._entries = self._findings = self._servers = 0
        self._gone_s = 0.0
        self._server = self._start()

    def cycle(self, *, kill_server):
        self._outcome.cases += 1
        try:
            pid = self._server.ask("write")
            with Watched(pid) as worker:
                time.sleep(self._random.uniform(0, _LONGEST_DELAY_S))  # the stimulus
                if kill_server:
                    self._server.kill()
                    self._gone_s = max(self._gone_s, worker.gone_after_s(10.0))
                else:
                    os.kill(pid, signal.SIGKILL)
            if kill_server:
                self._scan()
                self._server = self._start()
            else:
                self._take(self._server.answer())
                self._scan()
        except ChildFailedError as error:
            self._outcome.deaths += 1
            self._outcome.missed.append(str(error))
            self._server = self._start()

    def finish(self):
        self._outcome.expect(self._server.end(), "the last server did not end cleanly")
        self._scan()
        aside = quarantined(self._folder)
        self._outcome.expect(aside == 0, f"{aside} stores were set aside")
        self._outcome.expect(self._findings == 0, f"{self._findings} findings of scans")
        self._outcome.expect(self._hits > 0, "nothing was ever served")
        servers = self._servers - 1
        workers = self._outcome.cases - servers
        self._outcome.figures += [
            f"{workers} workers and {servers} whole servers killed",
            f"{self._hits:,} answers checked",
            f"{self._entries:,} entries scanned, {self._findings} findings",
        ]
        self._outcome.bound(
            "s until an orphaned worker was gone:", self._gone_s, f"<= {_GONE_LIMIT_S}"
        )

    def _start(self):
        self._servers += 1
        server = Child(_serve, self._folder, self._servers, self._launcher, stderr=self._log)
        self._take(server.answer())
        return server

    def _take(self, checked):
        self._hits += checked.hits
        self._outcome.wrong += checked.wrong
        strange = checked.faults.keys() - {"died", "worker_died"}
        self._outcome.expect(not strange, f"faults {sorted(strange)}")

    def _scan(self):
        entries, findings = scan(self._folder)
        self._entries += entries
        self._findings += len(findings)
        self._outcome.missed += findings[:3]
