"""How a run is measured and divided, on a manual clock and with marks that the test plays.

Owns: durations, shares, and the costs of hot entries. Does not own: real events of a device
(tests/gpu).
"""

import pytest
import torch

from tiered_mmcache import EmbeddingResult
from tiered_mmcache.encoding import encoder_time as module
from tiered_mmcache.encoding import stream_marks
from tiered_mmcache.encoding.encoder_time import (
    UNKNOWN_COST,
    Cost,
    DeviceTime,
    EncodingTime,
    HostTime,
    HotCosts,
    Stopwatch,
    UnknownTime,
    divided,
)
from tiered_mmcache.encoding.stream_marks import device_in_use, follow, mark


class Mark:
    """An event of a device that passes it when the test says so."""

    device = torch.device("cuda", 0)

    def __init__(self, at_ms=0.0, *, passed=False, lost=False):
        self.at_ms = at_ms
        self.passed = passed
        self.lost = lost
        self.queries = 0

    def query(self):
        self.queries += 1
        if self.lost:
            raise RuntimeError("the device is lost")
        return self.passed

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def result(*shape, dtype=torch.float32, device="cpu"):
    return EmbeddingResult(embedding=torch.empty(shape, dtype=dtype, device=device))


def test_a_run_on_the_host_takes_the_time_of_the_clock():
    now = iter([10.0, 12.5])
    assert Stopwatch(lambda: next(now)).stop([result(2), result(3)]).seconds() == 2.5


def test_a_clock_that_goes_back_measures_nothing():
    now = iter([10.0, 9.0])
    assert Stopwatch(lambda: next(now)).stop([result(2)]).seconds() == 0.0


def test_a_run_whose_start_was_not_marked_is_unknown():
    # The meta device stands for one that was not in use when the run began.
    run = Stopwatch(lambda: 1.0).stop([result(2), result(2, device="meta")])
    assert run == UnknownTime()
    assert run.seconds() == 0.0


def test_a_run_on_a_device_is_known_when_it_has_passed():
    end = Mark(1750.0)
    run = DeviceTime(Mark(250.0), end)
    assert run.seconds() is None
    assert Cost(run, 0.5).seconds == 0.0
    end.passed = True
    assert run.seconds() == 1.5
    assert Cost(run, 0.5).seconds == 0.75
    assert end.queries == 3  # later answers ask nothing


def test_no_mark_is_asked_for_while_a_graph_is_captured(monkeypatch):
    end = Mark(500.0, passed=True)
    run = DeviceTime(Mark(), end)
    with monkeypatch.context() as capture:
        capture.setattr(stream_marks, "is_capturing", lambda device: device == end.device)
        assert run.seconds() is None
        assert end.queries == 0
    assert run.seconds() == 0.5


def test_a_run_on_a_lost_device_is_unknown():
    run = DeviceTime(Mark(), Mark(lost=True))
    assert run.seconds() == 0.0


def test_a_run_is_divided_by_bytes():
    results = [result(3, 4), result(1, 4), result(0, 4), result(4, 4, dtype=torch.float16)]
    costs = divided(HostTime(6.0), results)
    assert [cost.seconds for cost in costs] == [3.0, 1.0, 0.0, 2.0]


def test_a_run_of_empty_results_is_divided_evenly():
    costs = divided(HostTime(6.0), [result(0), result(0), result(0)])
    assert [cost.seconds for cost in costs] == [2.0, 2.0, 2.0]
    assert divided(HostTime(6.0), []) == []


def test_costs_of_hot_entries():
    costs = HotCosts()
    costs.record(1, Cost(HostTime(2.0), 0.5))
    costs.record(2, UNKNOWN_COST)
    assert (costs.seconds(1), costs.seconds(2), costs.seconds(3)) == (1.0, 0.0, 0.0)
    assert len(costs) == 1
    costs.forget(1)
    costs.forget(1)
    assert (costs.seconds(1), len(costs)) == (0.0, 0)
    costs.record(1, Cost(HostTime(2.0), 0.5))
    costs.clear()
    assert len(costs) == 0


def test_the_time_of_all_runs_waits_for_no_device():
    total, end = EncodingTime(), Mark(1000.0)
    total.add(HostTime(1.0))
    total.add(DeviceTime(Mark(), end))
    total.add(HostTime(3.0))
    assert total.seconds() == 1.0
    end.passed = True
    assert total.seconds() == total.seconds() == 5.0


def test_runs_on_a_device_that_stands_still_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_MOST_UNFINISHED", 3)
    total = EncodingTime()
    for _ in range(5):
        total.add(DeviceTime(Mark(), Mark(1000.0)))
    assert len(total._unfinished) == 3


def test_there_is_nothing_to_mark_on_the_host():
    cpu = torch.device("cpu")
    assert mark(None) is None
    assert mark(cpu) is None
    follow(None, cpu)
    if not torch.accelerator.is_available():
        assert device_in_use() is None


@pytest.mark.parametrize("timed", [True, False])
def test_the_meta_device_has_no_streams(timed):
    assert mark(torch.device("meta"), timed=timed) is None
