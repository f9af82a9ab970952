"""The worker's end of the socket: what a server said before it died still counts.

Owns: receiving, and the order of answers. Does not own: faults (tests/faults).
"""

import socket
import threading

import pytest

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk import store as store_module
from tiered_mmcache.disk.worker import ServerGoneError, SpillWorker
from tiered_mmcache.entries.keys import encode_full_key, store_key
from tiered_mmcache.entries.record import EntryHeader


def test_what_a_server_sent_before_it_died_with_an_answer_unread_is_received():
    servers, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with workers:
        worker = SpillWorker(workers, memoryview(bytearray(1)))
        with servers:
            worker._send(protocol.Absent(request=1))
            servers.send(protocol.encode_message(protocol.Flush(request=2)))
        assert worker._receive() == protocol.Flush(request=2)
        with pytest.raises(ServerGoneError):
            worker._receive()


HEADER = EntryHeader(
    class_tag="EmbeddingResult",
    dtype="uint8",
    item_bytes=1,
    shape=(40_000,),
    extras=b"",
    device_type="cpu",
)


class Server:
    """The server's end, by hand, of a worker that runs on a thread of the test."""

    def __init__(self, folder, budget_bytes):
        self.connection, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(60)
        worker = SpillWorker(workers, memoryview(bytearray(1 << 20)))
        self._thread = threading.Thread(target=self._serve, args=(worker, workers), daemon=True)
        self._thread.start()
        self.send(
            protocol.Open(
                path=str(folder),
                budget_bytes=budget_bytes,
                largest_entry_bytes=1 << 20,
                synchronous=False,
                namespace="test",
                allow_network=False,
                keep_quarantined=0,
                generation=b"",
                killed_worker=False,
            )
        )
        self.ready = self.receive()

    def _serve(self, worker, connection):
        with connection:
            worker.serve()

    def send(self, message):
        self.connection.send(protocol.encode_message(message))

    def receive(self):
        return protocol.decode_message(self.connection.recv(protocol.MAX_PACKET_BYTES))

    def key(self, number):
        return store_key(
            namespace="test",
            generation=self.ready.generation,
            full_key=encode_full_key(number),
        )

    def put(self, request, number):
        self.send(
            protocol.Put(
                request=request,
                store_key=self.key(number),
                full_key=encode_full_key(number),
                generation=self.ready.generation,
                header=HEADER,
                extents=[(0, 65_536)],
            )
        )

    def look_up(self, request, number):
        key = encode_full_key(number)
        self.send(protocol.LookUp(request=request, store_key=self.key(number), full_key=key))

    def close(self):
        self.send(protocol.Close())
        self._thread.join(60)
        self.connection.close()
        assert not self._thread.is_alive()


def test_look_ups_are_answered_while_a_lowered_budget_is_brought_about(tmp_path, monkeypatch):
    first = Server(tmp_path, 8 << 20)
    for number in range(50):
        first.put(number, number)
        assert isinstance(first.receive(), protocol.Done)
    first.close()

    monkeypatch.setattr(store_module, "MOST_EVICTED_ENTRIES", 2)
    evict_some = store_module.Store.evict_some
    steps = []

    def watched(store):
        steps.append(len(steps))
        if len(steps) == 1:
            second.put(100, 100)
        elif len(steps) == 3:
            second.look_up(101, 49)
        return evict_some(store)

    begun = threading.Event()
    monkeypatch.setattr(
        store_module.Store,
        "evict_some",
        lambda store: watched(store) if begun.wait(60) else pytest.fail("never begun"),
    )
    second = Server(tmp_path, 1 << 20)
    begun.set()
    found, written = second.receive(), second.receive()
    second.close()
    assert (found.request, type(found)) == (101, protocol.Found)
    assert (written.request, type(written)) == (100, protocol.Done)
    assert len(steps) > 3
    assert written.totals.used_bytes <= 1 << 20
