"""get_or_encode with an encoder that runs on an accelerator.

Owns: the time of a run as the device counts it, that nobody waits for it, and the order between
streams. Does not own: what is encoded by whom (tests/unit/test_get_or_encode.py).
"""

import threading

import pytest
import torch

from tiered_mmcache import EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.encoding.single_flight import Flight
from tiered_mmcache.encoding.stream_marks import mark

pytestmark = pytest.mark.gpu

COUNT = 1024 * 1024
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def device():
    kind = torch.accelerator.current_accelerator(check_available=True)
    assert kind is not None, "these tests need an accelerator"
    made = torch.device(kind.type, torch.accelerator.current_device_index())
    torch.zeros(1, device=made)  # a run is measured on a device that is in use
    return made


@pytest.fixture
def cache():
    with TieredMultimodalCache(64 * COUNT) as made:
        yield made
        torch.accelerator.synchronize()


def slow_result(device, value, rounds=40):
    """A result that the device finishes long after the call has returned."""
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(rounds):
        busy = torch.nn.functional.normalize(busy @ busy)
    embedding = torch.full((COUNT,), value, dtype=torch.uint8, device=device)
    embedding += (busy[0, 0] * 0).to(torch.uint8)  # not before the rest
    return EmbeddingResult(embedding=embedding)


def test_a_run_is_measured_on_the_device_and_nobody_waits_for_it(cache, device):
    slow_result(device, 0)  # what a first run sets up is not part of the second
    torch.accelerator.synchronize()
    ended = []

    def encode(keys):
        results = [slow_result(device, 3), slow_result(device, 4)]
        ended.append(mark(device))
        return results

    cache.get_or_encode([3, 4], encode)
    assert not ended[0].query(), "somebody waited for the device"
    assert cache._costs.seconds(3) == 0.0
    torch.accelerator.synchronize()
    total_s = cache.stats().encoding["encode_seconds"]
    assert total_s > 0.0
    assert cache._costs.seconds(3) == pytest.approx(total_s / 2)
    assert cache._costs.seconds(4) == pytest.approx(total_s / 2)


def test_who_waits_on_another_stream_reads_what_was_encoded(cache, device, monkeypatch):
    entered, joined = threading.Event(), threading.Event()
    wait = Flight.wait
    read = []

    def announced(self, timeout_s):
        joined.set()
        wait(self, timeout_s)

    monkeypatch.setattr(Flight, "wait", announced)

    def encode(keys):
        entered.set()
        assert joined.wait(LIMIT_S)
        return [slow_result(device, 7)]

    def ask():
        with torch.Stream(device):
            (got,) = cache.get_or_encode([1], encode)
            read.append((got, got.embedding.eq(7).all()))

    asking = [threading.Thread(target=ask) for _ in range(2)]
    asking[0].start()
    assert entered.wait(LIMIT_S)
    asking[1].start()
    for thread in asking:
        thread.join(LIMIT_S)
    torch.accelerator.synchronize()
    assert len(read) == 2
    assert read[0][0] is read[1][0]
    assert all(right.item() for _, right in read)


def test_a_stream_that_captures_a_graph_is_not_marked(device):
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert mark(device) is None
    assert mark(device) is not None
