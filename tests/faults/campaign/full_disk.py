"""Fill the store's file system from outside in the middle of writing, then free it.

Meanwhile answers are right or misses, and the failed writes are counted by their cause; afterwards
the same cache writes to its store again.
"""

import random
import shutil
import subprocess
import sys
import time
from collections import Counter

from tiered_mmcache import Tier
from tiered_mmcache.tiers import spill as spill_module

from . import mounts
from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import (
    MIB,
    await_that,
    configuration,
    is_right,
    open_cache,
    ready_worker,
    restart_quickly,
    result,
    scan,
    size_of,
)

_KEYS = 100
_DISK_BYTES = 40 * MIB
_FILLER = """
import os, sys
with open(sys.argv[1], "wb") as file:
    while True:
        os.write(file.fileno(), bytes(65536))
"""


def _size(key):
    return size_of(key, 1000, 700_000)


class _Server:
    def __init__(self, folder, seed):
        restart_quickly()
        spill_module._LONGEST_PAUSE_S = 0.5
        self._random = random.Random(seed)
        self._folder = folder
        self.store = folder / "store"
        self.checked = self.wrong = 0
        self.longest_s = 0.0
        self.faults = Counter()
        self.begin_anew()

    def begin_anew(self):
        """A new store: one that has grown to its full size needs no more space."""
        shutil.rmtree(self.store, ignore_errors=True)
        config = configuration(self.store, hot=MIB, max_size="24MiB", write_buffer="4MiB")
        self.cache = open_cache(config)

    def close(self):
        self.faults.update(self.cache.stats().faults)
        self.cache.close()

    def act(self):
        key = self._random.randrange(_KEYS)
        if self._random.random() < 0.6:
            self.cache.set(key, result(key, 0, _size(key)))
            return
        began_s = time.monotonic()
        found = self.cache.get_single(key)
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        if found is not None:
            self.checked += 1
            self.wrong += not is_right(found, key, 0, _size(key))

    def fill_up(self):
        """Start writing, fill the disk meanwhile, go on until writes have failed of it."""
        filler = self._folder / "somebody-elses"
        command = [sys.executable, "-S", "-c", _FILLER, str(filler)]
        for _ in range(self._random.randrange(40)):
            self.act()
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as somebody:
            while somebody.poll() is None:
                self.act()
        failed = sum(self._failures().values())
        deadline_s = time.monotonic() + 20.0
        while sum(self._failures().values()) < failed + 3 and time.monotonic() < deadline_s:
            self.act()
        return filler

    def _failures(self):
        faults = self.cache.stats().faults
        return {cause: n for cause, n in faults.items() if cause not in ("died", "worker_died")}

    def recover(self, filler):
        """Free the disk; seconds until an entry of this cache reaches the store again."""
        filler.unlink()
        began_s = time.monotonic()
        spills = self.cache.stats().disk["spills"]

        def spilled():
            for _ in range(20):
                self.act()
            self.cache.drain(0.5)
            return self.cache.stats().disk["spills"] > spills

        await_that(spilled)
        took_s = time.monotonic() - began_s
        ready_worker(self.cache)
        return took_s


def _serve(connection, folder):
    mounts.in_private_namespace()
    with mounts.tmpfs(folder / "small", _DISK_BYTES) as disk:
        server = _Server(disk, 5)
        for _ in connection:
            filler = server.fill_up()
            took_s = server.recover(filler)
            on_disk = [key for key in range(_KEYS) if server.cache.locate(key) is Tier.DISK]
            entries, findings = scan(server.store)
            server.close()
            connection.send(
                {
                    "recovered_s": took_s,
                    "on_disk": len(on_disk),
                    "entries": entries,
                    "findings": findings,
                    "wrong": server.wrong,
                    "checked": server.checked,
                    "longest_s": server.longest_s,
                    "faults": dict(server.faults),
                }
            )
            server.begin_anew()
        server.cache.close()


def run(folder, *, full):
    outcome = Outcome(campaign="full disk")
    why_not = mounts.why_not()
    if why_not:
        outcome.not_run.append(why_not)
        return outcome
    server = Child(_serve, folder, stderr=folder / "stderr.log")
    longest_s = 0.0
    report = {}
    for number in range(30 if full else 3):
        outcome.cases += 1
        try:
            report = server.ask("fill", 180.0)
        except ChildFailedError as error:
            outcome.deaths += 1
            outcome.missed.append(f"round {number}: {error}")
            return outcome
        longest_s = max(longest_s, report["recovered_s"])
        outcome.missed += report["findings"][:3]
        outcome.expect(report["on_disk"] > 0, f"round {number}: nothing on disk afterwards")
    outcome.expect(server.end(), "the server did not end cleanly")
    outcome.wrong = report["wrong"]
    faults = report["faults"]
    outcome.expect(faults.get("no_space", 0) > 0, f"no fault no_space, but {faults}")
    outcome.expect(report["checked"] > 0, "nothing was ever served")
    outcome.expect("internal" not in faults, "internal faults")
    outcome.figures += [f"{report['checked']:,} answers checked", f"faults counted {faults}"]
    outcome.bound("s from free space to the next write:", longest_s, "<= 10")
    most_s = 2.1 if full else 5.0  # beside other programs a call may be held up by them
    outcome.bound("s, longest get:", report["longest_s"], f"<= {most_s}")
    return outcome
