"""The handle on the spill worker: death, silence, restarts, deadlines, all on a manual clock.

Owns: supervision of a worker that is played by the test. Does not own: real workers
(tests/faults) or the encoding of messages (test_disk_protocol.py).
"""

import errno
import os
import select
import socket

import pytest

from tiered_mmcache.disk import client as client_module
from tiered_mmcache.disk import launch, protocol
from tiered_mmcache.disk.client import SpillClient, StoreSettings, WorkerState
from tiered_mmcache.disk.protocol import StoreTotals
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.arena import Arena

SETTINGS = StoreSettings(
    path="store", budget_bytes=1000, largest_entry_bytes=100, synchronous=True, namespace="n"
)
HEADER = EntryHeader(
    class_tag="", dtype="uint8", item_bytes=1, shape=(3,), extras=b"", device_type="cpu"
)
GENERATION = b"g" * 16
TOTALS = StoreTotals(entries=1, used_bytes=2, payload_bytes=3)
ARENA_FD = 99


class FakeProcess:
    """A worker whose end of the socket the test holds."""

    def __init__(self, number):
        self.pid = number
        self.connection, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)
        self.killed = 0
        self.reaped = 0

    def kill(self):
        self.killed += 1
        self.theirs.close()

    exit_signal = None

    def reap(self, timeout_s):
        self.reaped += 1
        return self.theirs.fileno() < 0

    def die(self):
        self.theirs.close()

    def send(self, *messages):
        for message in messages:
            self.theirs.send(protocol.encode_message(message))

    def ready(self, generation=GENERATION):
        self.send(protocol.Ready(generation=generation, totals=TOTALS))

    def received(self):
        messages = []
        while True:
            try:
                packet = self.theirs.recv(protocol.MAX_PACKET_BYTES)
            except BlockingIOError:
                return messages
            messages.append(protocol.decode_message(packet))


class Stage:
    """The client, its clock, and the workers that it started."""

    def __init__(self):
        self.now_s = 1000.0
        self.processes = []
        self.launch_error = None
        self.attempts = 0
        self.while_waiting = []
        self.client = SpillClient(
            SETTINGS, ARENA_FD, launcher=self.launch, clock=lambda: self.now_s
        )
        self.client.wait = self.wait  # waiting for the socket is the test's next step instead

    def launch(self, arena_fd):
        assert arena_fd == ARENA_FD
        self.attempts += 1
        if self.launch_error is not None:
            raise self.launch_error
        self.processes.append(FakeProcess(len(self.processes) + 1))
        return self.processes[-1]

    def wait(self, timeout_s):
        assert timeout_s >= 0
        if self.while_waiting:
            self.while_waiting.pop(0)()
        else:
            self.now_s += timeout_s

    @property
    def worker(self):
        return self.processes[-1]

    def start(self):
        self.client.poll()
        self.worker.ready()
        self.client.poll()
        self.worker.received()
        assert self.client.is_ready
        return self.client

    def pass_time(self, seconds):
        self.now_s += seconds
        return self.client.poll()


@pytest.fixture
def stage():
    made = Stage()
    yield made
    for process in made.processes:
        process.theirs.close()
        process.connection.close()


def look_up(client, timeout_s=2.0):
    return client.look_up(store_key=b"k", full_key=b"f", timeout_s=timeout_s)


# Start


def test_nothing_is_started_before_the_first_poll(stage):
    assert stage.client.state is WorkerState.DOWN
    assert stage.client.pid is None
    assert stage.client.budget_bytes == 1000
    assert stage.client.generation is None
    assert stage.attempts == 0


def test_the_first_poll_starts_a_worker_and_tells_it_of_the_store(stage):
    assert stage.client.poll() == []
    assert stage.client.state is WorkerState.STARTING
    assert stage.client.pid == 1
    assert stage.worker.received() == [
        protocol.Open(
            path="store",
            budget_bytes=1000,
            largest_entry_bytes=100,
            synchronous=True,
            namespace="n",
            allow_network=False,
            keep_quarantined=2,
            generation=b"",
            killed_worker=False,
        )
    ]
    assert not stage.client.answers


def test_a_ready_worker_answers(stage):
    client = stage.start()
    assert client.answers
    assert client.generation == GENERATION
    assert client.totals == TOTALS
    assert client.starts == 1
    assert client.down_cause == ""
    assert not client.is_closed


def test_a_worker_that_starts_too_slowly_is_killed(stage):
    stage.client.poll()
    stage.pass_time(30.0)
    assert stage.worker.killed == 0
    stage.pass_time(0.1)
    assert stage.processes[0].killed == 1
    assert stage.client.down_cause == "silent"


def test_a_store_that_is_unavailable_is_asked_for_again_after_growing_pauses(stage):
    for pause_s in (0.0, 0.5, 1.0, 2.0):
        assert stage.client.poll() == []
        assert stage.client.state is WorkerState.STARTING
        stage.worker.send(protocol.Unavailable(cause="future_format", problem="too new"))
        stage.client.poll()
        assert stage.client.state is WorkerState.DOWN
        assert stage.client.down_cause == "future_format"
        stage.now_s += pause_s
    assert ("future_format", "too new") in stage.client.take_ends()
    assert stage.client.starts == 4


def test_a_worker_that_cannot_be_started(stage):
    stage.launch_error = OSError(errno.EMFILE, "too many open files")
    attempts = []
    for _ in range(20):
        stage.pass_time(0.25)
        attempts.append(stage.attempts)
    assert stage.client.down_cause == "not_started"
    assert stage.client.state is WorkerState.DOWN
    assert attempts[-1] <= 6  # at once, then after 0.5, 1, 2, 4 seconds
    (*_, (cause, problem)) = stage.client.take_ends()
    assert cause == "not_started"
    assert "too many open files" in problem
    stage.launch_error = None
    stage.pass_time(60.0)
    assert stage.client.state is WorkerState.STARTING


def test_pauses_grow_also_when_the_last_worker_had_lived_long(stage):
    client = stage.start()
    stage.launch_error = OSError(errno.EMFILE, "too many open files")
    stage.now_s += 3600.0
    stage.worker.die()
    for _ in range(20):
        client.poll()
    assert stage.attempts <= 3


# Requests


def test_requests_are_sent_as_they_are_made(stage):
    client = stage.start()
    put = client.put(store_key=b"k", full_key=b"f", header=HEADER, extents=[(0, 4096)])
    delete = client.delete(b"k")
    clear = client.clear(b"h" * 16)
    flush = client.flush()
    assert stage.worker.received() == [
        protocol.Put(
            request=put,
            store_key=b"k",
            full_key=b"f",
            generation=GENERATION,
            header=HEADER,
            extents=[(0, 4096)],
        ),
        protocol.Delete(request=delete, store_key=b"k"),
        protocol.Clear(request=clear, generation=b"h" * 16),
        protocol.Flush(request=flush),
    ]
    assert list(client.unanswered) == [put, delete, clear, flush]
    answers = [
        protocol.Done(request=put, totals=StoreTotals(entries=7)),
        protocol.Failed(request=delete, cause="io_error", problem="p"),
    ]
    stage.worker.send(*answers)
    assert client.poll() == answers
    assert list(client.unanswered) == [clear, flush]
    assert client.totals.entries == 7


def test_a_look_up_is_answered_while_it_waits(stage):
    client = stage.start()

    def answer():
        (request,) = stage.worker.received()
        assert request == protocol.LookUp(request=request.request, store_key=b"k", full_key=b"f")
        stage.worker.send(protocol.Found(request=request.request, header=HEADER))

    stage.while_waiting = [lambda: None, answer]
    assert look_up(client).header == HEADER
    assert client.poll() == []
    assert not client.unanswered


def fill(client, timeout_s, on_progress=lambda filled_bytes: None):
    number = client.fill(store_key=b"k", full_key=b"f", header=HEADER, extents=[(4096, 8192)])
    return number, client.answer_to(number, timeout_s, on_progress)


def test_a_fill_is_answered_while_it_waits(stage):
    client = stage.start()

    def answer():
        (request,) = stage.worker.received()
        assert request.extents == [(4096, 8192)]
        stage.worker.send(protocol.Done(request=request.request, totals=TOTALS))

    stage.while_waiting = [answer]
    number, reply = fill(client, timeout_s=2.0)
    assert reply == protocol.Done(request=number, totals=TOTALS)


def test_the_progress_of_a_fill_is_told_and_is_no_answer(stage):
    client = stage.start()
    told = []

    def send(*messages):
        number = list(client.unanswered)[-1]
        stage.worker.send(*(message(number) for message in messages))

    def progress(filled_bytes):
        return lambda number: protocol.Progress(request=number, filled_bytes=filled_bytes)

    def done(number):
        return protocol.Done(request=number, totals=TOTALS)

    stage.while_waiting = [
        lambda: send(progress(1)),
        lambda: send(progress(2), progress(3)),
        lambda: send(done),
    ]
    _, reply = fill(client, timeout_s=2.0, on_progress=told.append)
    assert isinstance(reply, protocol.Done)
    assert told == [1, 3]
    assert client.poll() == []
    assert not client._filled


def test_progress_that_nobody_waits_for_is_forgotten(stage):
    client = stage.start()
    number, reply = fill(client, timeout_s=0.0)
    assert reply is None
    stage.worker.send(protocol.Progress(request=number, filled_bytes=1))
    assert client.poll() == []
    assert not client.answers  # progress is no answer
    stage.worker.send(protocol.Absent(request=number))
    assert len(client.poll()) == 1
    assert not client._filled
    assert client.answers


def test_a_touch_has_no_answer(stage):
    client = stage.start()
    client.touch(b"k")
    assert stage.worker.received() == [protocol.Touch(store_key=b"k")]
    assert not client.unanswered


def test_answers_to_others_are_kept_for_the_next_poll(stage):
    client = stage.start()
    flush = client.flush()
    done = protocol.Done(request=flush, totals=TOTALS)

    def answer():
        request = stage.worker.received()[-1].request
        stage.worker.send(done, protocol.Absent(request=request))

    stage.while_waiting = [answer]
    assert isinstance(look_up(client), protocol.Absent)
    assert client.poll() == [done]


def test_without_a_ready_worker_nothing_is_asked(stage):
    assert look_up(stage.client) is None
    stage.client.poll()
    stage.worker.received()
    assert look_up(stage.client) is None
    assert stage.worker.received() == []
    assert not stage.client.unanswered


def test_requests_that_do_not_fit_the_socket_are_sent_later_in_order(stage):
    client = stage.start()
    sent = [client.flush() for _ in range(5000)]
    arrived = [message.request for message in stage.worker.received()]
    assert len(arrived) < len(sent)
    while len(arrived) < len(sent):
        client.poll()
        arrived += [message.request for message in stage.worker.received()]
    assert arrived == sent
    assert client.starts == 1


def test_a_message_longer_than_a_packet_does_not_kill_the_worker(stage):
    client = stage.start()
    extents = [(2**40 + 8192 * number, 4096) for number in range(40_000)]
    client.put(store_key=b"k", full_key=b"f", header=HEADER, extents=extents)
    client.poll()
    assert stage.worker.killed == 0
    assert client.is_ready


# Deadlines


def test_an_overdue_read_is_no_answer_and_nothing_more_is_asked(stage):
    client = stage.start()
    began_s = stage.now_s
    assert look_up(client, timeout_s=2.0) is None
    assert stage.now_s == began_s + 2.0
    assert client.is_ready
    assert not client.answers
    (request,) = stage.worker.received()
    assert list(client.unanswered) == [request.request]
    assert look_up(client) is None
    assert stage.worker.received() == []


def test_an_overdue_answer_arrives_with_a_poll_and_reads_go_on(stage):
    client = stage.start()
    look_up(client)
    (request,) = stage.worker.received()
    late = protocol.Found(request=request.request, header=HEADER)
    stage.worker.send(late)
    assert client.poll() == [late]
    assert client.answers
    stage.pass_time(3600.0)
    assert stage.worker.killed == 0


def test_a_silent_worker_is_killed_after_the_limit(stage):
    client = stage.start()
    look_up(client)
    (request,) = stage.worker.received()
    assert stage.pass_time(10.0) == []
    assert stage.worker.killed == 0
    (failed,) = stage.pass_time(0.1)
    assert stage.processes[0].killed == 1
    assert (failed.request, failed.cause) == (request.request, "worker_died")
    assert client.down_cause == "silent"
    client.poll()
    assert client.starts == 2


def test_a_second_overdue_read_does_not_extend_the_limit(stage):
    client = stage.start()
    number, reply = fill(client, timeout_s=0.0)
    assert reply is None
    assert number in client.unanswered
    stage.pass_time(6.0)
    assert look_up(client) is None
    stage.pass_time(4.1)
    assert stage.processes[0].killed == 1


# Death


def test_the_requests_of_a_dead_worker_fail_and_it_is_started_again_at_once(stage):
    client = stage.start()
    numbers = [client.flush(), client.delete(b"k")]
    stage.worker.die()
    replies = client.poll()
    assert [(reply.request, reply.cause) for reply in replies] == [
        (number, "worker_died") for number in numbers
    ]
    assert not client.unanswered
    assert client.state is WorkerState.DOWN
    assert client.down_cause == "died"
    assert stage.processes[0].reaped == 1
    assert stage.processes[0].killed == 0
    assert client.poll() == []
    assert client.state is WorkerState.STARTING
    assert stage.worker.received()[0].generation == GENERATION


def test_answers_that_were_sent_before_the_death_count(stage):
    client = stage.start()
    first, second = client.flush(), client.flush()
    stage.worker.received()
    stage.worker.send(protocol.Done(request=first, totals=TOTALS))
    stage.worker.die()
    assert [type(reply) for reply in client.poll()] == [protocol.Done, protocol.Failed]
    assert second not in client.unanswered


def test_answers_count_also_when_requests_were_left_unread(stage):
    client = stage.start()
    first = client.flush()
    stage.worker.received()
    client.flush()
    stage.worker.send(protocol.Done(request=first, totals=TOTALS))
    stage.worker.die()
    assert [type(reply) for reply in client.poll()] == [protocol.Done, protocol.Failed]


def test_a_death_is_noticed_by_sending(stage):
    client = stage.start()
    stage.worker.die()
    number = client.flush()
    assert client.state is WorkerState.DOWN
    (failed,) = client.poll()
    assert failed.request == number


def test_a_death_while_a_look_up_waits_is_a_failure(stage):
    client = stage.start()
    stage.while_waiting = [lambda: stage.worker.die()]
    assert look_up(client).cause == "worker_died"


@pytest.mark.parametrize("act", [SpillClient.poll, SpillClient.flush])
def test_a_socket_that_fails_is_a_death(stage, act):
    client = stage.start()
    stage.worker.connection.close()
    act(client)
    assert client.down_cause == "died"
    assert stage.processes[0].killed == 1


# A worker that does not end when it is killed: its system call on a hung disk ends first


def hang(process):
    """Let nothing but the test end the process; returns what ends it."""
    ended = []
    limits_s = []
    process.kill = lambda: setattr(process, "killed", process.killed + 1)

    def reap(timeout_s):
        limits_s.append(timeout_s)
        return bool(ended)

    process.reap = reap
    process.limits_s = limits_s
    return lambda: ended.append(True)


def test_a_worker_that_hangs_after_closing_its_socket_is_killed(stage):
    client = stage.start()
    process = stage.worker
    hang(process)
    process.die()
    client.poll()
    assert process.killed == 1


def test_nobody_waits_for_a_killed_worker_that_does_not_end(stage):
    client = stage.start()
    process = stage.worker
    hang(process)
    assert look_up(client) is None
    stage.pass_time(10.1)
    assert process.killed >= 1
    assert client.down_cause == "silent"
    assert not client.answers
    assert look_up(client) is None
    assert sum(process.limits_s) <= 0.05
    began_s = stage.now_s
    client.poll()
    assert stage.now_s == began_s


def test_its_requests_stay_unanswered_and_no_other_worker_is_started_before_it_has_ended(stage):
    client = stage.start()
    end = hang(stage.worker)
    put = client.put(store_key=b"k", full_key=b"f", header=HEADER, extents=[(0, 4096)])
    number, _ = fill(client, timeout_s=2.0)
    for _ in range(20):
        assert stage.pass_time(10.1) == []
    assert set(client.unanswered) == {put, number}  # it may write into their memory
    assert stage.attempts == 1
    assert client.take_ends() == [
        ("silent", "the spill worker ended"),
        ("disk_hangs", "the killed worker does not end: its disk hangs"),
    ]
    end()
    assert {reply.request for reply in client.poll()} == {put, number}
    assert not client.unanswered
    assert stage.attempts == 2
    stage.worker.ready()
    client.poll()
    assert client.answers


def test_a_killed_worker_that_ends_a_little_late_is_not_told_of(stage):
    client = stage.start()
    end = hang(stage.worker)
    assert look_up(client) is None
    stage.pass_time(10.1)
    stage.pass_time(0.9)
    end()
    stage.pass_time(60.0)
    assert [cause for cause, _ in client.take_ends()] == ["silent"]


def test_a_look_up_that_waits_for_a_worker_that_does_not_end_keeps_its_time(stage):
    client = stage.start()
    hang(stage.worker)
    began_s = stage.now_s
    stage.while_waiting = [stage.worker.die]
    assert look_up(client, timeout_s=2.0) is None
    assert stage.now_s == began_s + 2.0


def test_closing_waits_some_seconds_for_a_worker_that_does_not_end(stage):
    client = stage.start()
    process = stage.worker
    hang(process)
    client.close(1.0)
    assert client.is_closed
    assert process.killed == 1
    assert max(process.limits_s) == 5.0


def test_pauses_before_a_restart_grow_to_a_minute(stage):
    pauses = []
    for _ in range(11):
        stage.client.poll()
        assert stage.client.state is WorkerState.STARTING
        stage.worker.die()
        stage.client.poll()
        began_s = stage.now_s
        while stage.client.state is WorkerState.DOWN:
            stage.client.poll()
            stage.now_s += 0.25 if stage.client.state is WorkerState.DOWN else 0.0
        pauses.append(stage.now_s - began_s)
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_worker_that_lived_long_starts_with_a_clean_slate(stage):
    for _ in range(5):
        stage.client.poll()
        stage.worker.die()
        stage.pass_time(0.0)
        stage.now_s += 60.0
    client = stage.start()
    stage.now_s += 61.0
    stage.worker.die()
    client.poll()
    assert client.state is WorkerState.DOWN
    client.poll()
    assert client.state is WorkerState.STARTING


def test_what_was_not_sent_is_not_sent_to_the_next_worker(stage):
    client = stage.start()
    for _ in range(5000):
        client.flush()
    stage.worker.die()
    assert len(client.poll()) == 5000
    client.poll()
    assert [type(message) for message in stage.worker.received()] == [protocol.Open]


@pytest.mark.parametrize("packet", [b"garbage", protocol.encode_message(protocol.Flush(request=1))])
def test_a_worker_that_talks_nonsense_is_killed(stage, packet):
    client = stage.start()
    number = client.flush()
    stage.worker.theirs.send(packet)
    (failed,) = client.poll()
    assert failed.request == number
    assert stage.processes[0].killed >= 1
    assert client.down_cause == "protocol"


def test_a_new_worker_does_not_change_the_generation(stage):
    client = stage.start()
    client.generation = b"h" * 16
    stage.worker.die()
    client.poll()
    client.poll()
    stage.worker.ready(GENERATION)
    client.poll()
    assert client.generation == b"h" * 16


# The end


def test_a_polite_end(stage):
    client = stage.start()
    client.flush()
    stage.while_waiting = [lambda: stage.worker.die()]
    client.close(5.0)
    assert client.is_closed
    assert client.pid is None
    assert stage.worker.killed == 0
    assert client.down_cause == ""
    client.close(5.0)
    assert client.poll() == []
    assert client.starts == 1


def test_the_worker_is_told_to_close(stage):
    client = stage.start()
    told = []

    def end():
        told.extend(stage.worker.received())
        stage.worker.die()

    stage.while_waiting = [end]
    client.close(5.0)
    assert told == [protocol.Close()]


def test_an_impolite_end(stage):
    client = stage.start()
    began_s = stage.now_s
    client.close(5.0)
    assert stage.now_s == began_s + 5.0
    assert stage.worker.killed == 1
    assert client.is_closed


def test_closing_a_client_without_a_worker(stage):
    stage.client.close(5.0)
    assert stage.client.is_closed
    stage.client.poll()
    assert stage.attempts == 0


def test_a_forked_child_lets_go_of_the_worker(stage):
    client = stage.start()
    client.abandon_after_fork()
    assert client.is_closed
    assert client.pid is None
    assert stage.worker.killed == 0
    assert stage.worker.theirs.recv(10) == b""  # its last holder in this process is gone
    client.abandon_after_fork()


def test_a_fork_reaches_every_client_of_the_process(stage, monkeypatch):
    client = stage.start()
    monkeypatch.setattr(client_module, "_clients", {client})
    client_module._after_fork_in_child()
    assert client.is_closed


# Waiting


@pytest.fixture
def waiting(stage, monkeypatch):
    del stage.client.wait
    slept = []
    monkeypatch.setattr(client_module.time, "sleep", slept.append)
    return stage, slept


def test_without_a_worker_it_waits_for_the_next_start(waiting):
    stage, slept = waiting
    stage.client.wait(5.0)
    assert slept == []  # one may be started now
    for _ in range(3):
        stage.client.poll()
        stage.worker.die()
        stage.client.poll()
        stage.client.wait(0.75)
        stage.now_s += 5.0
    assert slept == [0.5, 0.75]
    stage.client.close(0.0)
    stage.client.wait(5.0)
    assert slept == [0.5, 0.75]


def test_with_a_worker_that_does_not_end_it_waits_for_that(waiting):
    stage, slept = waiting
    client = stage.start()
    process = stage.worker
    hang(process)
    look_up(client, timeout_s=0.0)
    stage.pass_time(10.1)
    del process.limits_s[:]
    client.wait(0.75)
    client.wait(-1.0)
    assert process.limits_s == [0.75, 0.0]
    assert slept == []


def test_with_a_worker_it_waits_for_its_socket(waiting):
    stage, slept = waiting
    client = stage.start()
    stage.worker.send(protocol.Absent(request=1))
    client.wait(60.0)  # returns at once: there is something to read
    client.wait(-1.0)
    assert len(client.poll()) == 1
    client.wait(0.0)
    for _ in range(5000):
        client.flush()
    stage.worker.received()
    client.wait(60.0)  # returns at once: there is room to write
    assert slept == []


# The real process


def test_a_worker_process_ends_with_its_socket():
    arena = Arena(4096)
    process = launch.SubprocessWorker(arena.fd)
    assert process.reap(0.0) is False
    process.connection.close()
    assert process.reap(60.0) is True
    process.kill()
    arena.close()


def test_a_worker_process_can_be_killed():
    arena = Arena(4096)
    process = launch.SubprocessWorker(arena.fd)
    assert os.getpgid(process.pid) != os.getpgid(0)  # the server's Ctrl-C is not the worker's
    process.kill()
    process.kill()
    assert process.reap(60.0) is True
    assert select.select([process.connection], [], [], 60.0)[0]
    process.connection.close()
    arena.close()
