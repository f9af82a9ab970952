"""Two servers in pid namespaces of their own, whose spill workers have the same process number.

Owns: that they share a store all the same. LMDB tells its readers apart by process number; a worker
with a number that is taken is refused, and the next one has another.
Does not own: the lock that a number is claimed with (tests/unit/test_disk_folder.py).

Run as a script, this file is such a server, or a command that looks into the store.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.disk import client as client_module
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.audit import Audit
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.disk.launch import SubprocessWorker
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.errors import StoreUnavailableError

NUMBER = 50  # of the worker in either container
SIZE = 300_000
FIRST, SECOND = range(10), range(100, 110)
LIMIT_S = 60.0


def in_a_container():
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc"]


def why_not():
    try:
        tried = subprocess.run([*in_a_container(), "true"], capture_output=True, check=False)
    except OSError as error:
        return str(error)
    return tried.stderr.decode().strip()


def result(number):
    generator = torch.Generator().manual_seed(number)
    payload = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
    return EmbeddingResult(embedding=payload)


class Container:
    """A server in a pid namespace, which answers one line of JSON to each line."""

    def __init__(self, folder, mode="serve"):
        command = [*in_a_container(), sys.executable, __file__, str(folder), mode]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said = self.answer()

    def ask(self, *words):
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self):
        return json.loads(self._process.stdout.readline())

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        assert self._process.wait(LIMIT_S) == 0


@pytest.fixture(autouse=True, scope="module")
def _permitted():
    reason = why_not()
    if reason:
        pytest.skip(f"pid namespaces are not permitted here: {reason}")


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    return tmp_path_factory.mktemp("containers") / "store"


@pytest.fixture(scope="module")
def two(shared_store):
    """Both servers; the second one's first worker had the number of the first one's."""
    containers = [Container(shared_store), Container(shared_store)]
    for container, numbers in zip(containers, (FIRST, SECOND), strict=True):
        assert container.ask("set", numbers.start, numbers.stop) == "set"
    yield containers
    for container in containers:
        container.end()


def slots(store):
    """The process numbers of those who read the store at this moment."""
    with StoreReader.open(store) as reader:
        return [slot.pid for slot in reader.readers()]


def scan(store):
    with StoreReader.open(store) as reader:
        judge = Audit(reader)
        findings = [f"{finding.cause.value}: {finding.detail}" for finding in judge.findings()]
        return judge.entries, findings


def both_serve_everything(two, store):
    everything = [*FIRST, *SECOND]
    assert [container.ask("read", *everything) for container in two] == [everything] * 2
    assert scan(store) == (len(everything), [])


def test_the_second_is_refused_once_and_then_both_write_and_read(two, shared_store):
    first, second = two
    assert first.said == {"worker": NUMBER, "faults": {}}
    assert second.said["worker"] > NUMBER
    assert second.said["faults"] == {"same_process_number": 1, "disk_not_ready": 1}
    both_serve_everything(two, shared_store)


def test_a_command_with_the_number_of_a_live_worker_is_refused(two, shared_store):
    command = Container(shared_store, "look")
    assert command.said == "same_process_number"
    command.end()
    both_serve_everything(two, shared_store)


def test_both_go_on_when_their_workers_are_killed(two, shared_store):
    numbers = [container.ask("kill") for container in two]
    assert len(set(numbers)) == 2
    both_serve_everything(two, shared_store)


def test_a_worker_with_the_number_of_a_live_reader_is_refused_and_takes_no_slot_away(tmp_path):
    store = tmp_path / "store"
    writer = Container(store)
    writer.ask("set", FIRST.start, FIRST.stop)
    writer.end()
    reader = Container(store, "look")
    assert reader.said == len(FIRST)
    server = Container(store)
    assert server.said["worker"] > NUMBER
    assert server.said["faults"] == {"same_process_number": 1, "disk_not_ready": 1}
    assert slots(store) == [NUMBER]  # although every worker clears what dead readers leave
    assert server.ask("set", SECOND.start, SECOND.stop) == "set"
    assert slots(store) == [NUMBER]
    assert reader.ask("again") == len(FIRST)  # its transaction sees what it saw
    reader.end()
    server.end()
    assert scan(store) == (len(FIRST) + len(SECOND), [])


# In a container


def count_up_to(number):
    """Use process numbers up, so that the next process has that one."""
    while True:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if pid >= number - 1:
            return


class Server:
    def __init__(self, folder):
        client_module._FIRST_PAUSE_S = 0.01
        mapping = {
            "namespace": "faults/containers",
            "hot": {"max_size": 2 * SIZE},
            "disk": {"path": folder, "max_size": "64MiB", "read_timeout": "30s"},
        }
        self._first = True
        self.cache = TieredMultimodalCache(
            config=CacheConfig.from_mapping(mapping), make_client=self._make_client
        )
        self.settle()

    def worker(self):
        return self.cache._below.disk.client.pid

    def settle(self):
        assert self.cache.drain(LIMIT_S)

    def act(self, what, *numbers):
        if what == "set":
            for number in range(*numbers):
                assert self.cache.set(number, result(number))
            for number in range(-2, 0):  # what is in the hot tier is not on disk
                assert self.cache.set(number, result(number))
            self.settle()
            for number in range(-2, 0):
                assert self.cache.free(number)
            self.settle()
            return "set"
        if what == "read":
            self.cache.mm_cache.clear()
            self.cache.current_size = 0
            assert all(self.cache.locate(number) is Tier.DISK for number in numbers)
            return [number for number in numbers if self._is_right(number)]
        os.kill(self.worker(), 9)
        self.settle()
        return self.worker()

    def _is_right(self, number):
        found = self.cache.get_single(number)
        return found is not None and torch.equal(found.embedding, result(number).embedding)

    def _make_client(self, settings, arena_fd):
        return SpillClient(settings, arena_fd, launcher=self._launch)

    def _launch(self, arena_fd):
        if self._first:
            count_up_to(NUMBER)
            self._first = False
        return SubprocessWorker(arena_fd)


def say(value):
    print(json.dumps(value), flush=True)


def serve(folder):
    server = Server(folder)
    say({"worker": server.worker(), "faults": server.cache.stats().faults})
    for line in sys.stdin:
        say(server.act(*json.loads(line)))
    server.cache.close()


def look(folder):
    """Read the store as long as anybody asks, from one transaction."""
    count_up_to(NUMBER)
    pid = os.fork()
    if pid != 0:
        assert pid == NUMBER
        os.waitpid(pid, 0)
        return
    try:
        with StoreReader.open(Path(folder)) as reader, reader.transaction() as transaction:
            say(len(list(reader.rows(transaction, layout.ENTRIES, b""))))
            for _ in sys.stdin:
                say(len(list(reader.rows(transaction, layout.ENTRIES, b""))))
    except StoreUnavailableError as error:
        say(error.cause)
    os._exit(0)


if __name__ == "__main__":
    {"serve": serve, "look": look}[sys.argv[2]](sys.argv[1])
