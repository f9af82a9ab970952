"""The worker's end of the socket: what a server said before it died still counts.

Owns: receiving. Does not own: what is done about messages (tests/faults).
"""

import socket

import pytest

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.worker import ServerGoneError, SpillWorker


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
