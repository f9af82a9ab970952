"""After a failed change: how long the next one waits, and what is counted at once.

Owns: the pauses of the spill queue. Does not own: what becomes of entries (test_lower_tiers.py).
"""

import pytest

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.client import SpillClient, StoreSettings
from tiered_mmcache.tiers.spill import SpillQueue


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def queue(clock):
    """A queue with four deletions that were sent, and never answered."""
    settings = StoreSettings(
        path="/nowhere",
        budget_bytes=1,
        largest_entry_bytes=1,
        synchronous=False,
        namespace="n",
    )
    client = SpillClient(settings, -1, clock=lambda: clock[0])
    client.generation = bytes(16)
    queue = SpillQueue(
        client,
        namespace="n",
        on_written=lambda entry: None,
        on_lost=lambda entry, cause: None,
        new_generation=lambda: bytes(16),
        clock=lambda: clock[0],
    )
    for number in range(4):
        queue.delete(bytes([number]))
    queue._send_deletions()
    return queue


def fail(queue, request):
    queue.take(protocol.Failed(request=request, cause="no_space", problem="full"))


def test_the_failures_of_one_batch_make_one_pause(queue, clock):
    for request in range(1, 4):
        fail(queue, request)
    first_s = queue.resumes_in_s
    assert first_s > 0
    clock[0] += first_s
    fail(queue, 4)
    assert queue.resumes_in_s == 2 * first_s
