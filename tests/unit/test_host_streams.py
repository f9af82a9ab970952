"""The copy engine of accelerators, on an accelerator that the test plays.

Owns: which stream what is asked of, the order, what is current before and after, and silence
while a graph is captured. Does not own: real streams (tests/gpu), or the bytes that are copied
(test_host_transfer.py): the tensors here are on the CPU, so that copies end at once.
"""

import pytest
import torch

from tiered_mmcache.host import transfer
from tiered_mmcache.host.transfer import StreamCopyEngine, is_capturing

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")


class Event:
    def __init__(self, stream):
        self.stream = stream
        self.ended = False

    def query(self):
        self.stream.log.append(("query", self.stream.name))
        return self.ended

    def synchronize(self):
        self.stream.log.append(("synchronize", self.stream.name))
        self.ended = True


class Stream:
    def __init__(self, device, log, name="side"):
        self.device = torch.device(device)
        self.log = log
        self.name = name

    def wait_stream(self, other):
        self.log.append(("wait_stream", self.name, other.name))

    def wait_event(self, event):
        self.log.append(("wait_event", self.name, event))

    def record_event(self):
        self.log.append(("record_event", self.name))
        return Event(self)


class Accelerator:
    """Two devices with a current stream each, device 0 being the current one."""

    def __init__(self, log):
        self.log = log
        self.index = 0
        self.streams = {CPU: Stream(CPU, log, "caller's")}

    def current_device_index(self):
        return self.index

    def set_device_index(self, index):
        self.index = index

    def current_stream(self, device):
        return self.streams[device]

    def set_stream(self, stream):
        self.streams[stream.device] = stream
        self.index = 1  # that of the stream's device, as torch documents
        self.log.append(("set_stream", stream.name))


@pytest.fixture
def log():
    return []


@pytest.fixture
def accelerator(monkeypatch, log):
    """Device 1 is played by CPU tensors."""
    made = Accelerator(log)
    monkeypatch.setattr(torch, "accelerator", made)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(device, log))
    real = transfer._copy_out

    def copy_out(flat, target, copy):
        log.append(("copy", made.current_stream(CPU).name))
        real(flat, target, copy)

    monkeypatch.setattr(transfer, "_copy_out", copy_out)
    return made


@pytest.fixture
def capture(monkeypatch):
    """Plays ``torch.cuda``: the device on whose current stream a graph is captured, or None."""
    state = {"device": None, "current": 0}

    class On:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before, state["current"] = state["current"], self.index

        def __exit__(self, *error):
            state["current"] = self.before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: state["device"] == state["current"]
    )
    return state


def test_a_demotion_runs_on_a_side_stream_behind_the_callers(accelerator, log):
    engine = StreamCopyEngine()
    target = torch.zeros(8, dtype=torch.uint8)
    down = engine.demote(torch.arange(8, dtype=torch.uint8), [target[:3], target[3:]])
    assert log == [
        ("wait_stream", "side", "caller's"),
        ("set_stream", "side"),
        ("copy", "side"),
        ("record_event", "side"),
        ("set_stream", "caller's"),
    ]
    assert accelerator.index == 0
    assert target.tolist() == list(range(8))
    assert not down.done()
    down.wait()
    assert down.done()


def test_all_demotions_of_a_device_share_a_side_stream(accelerator):
    engine = StreamCopyEngine()
    tensor, target = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    streams = {engine.demote(tensor, [target]).event.stream for _ in range(3)}
    assert len(streams) == 1


def test_everything_is_current_again_when_a_copy_cannot_be_started(accelerator, log, monkeypatch):
    def fail(flat, target, copy):
        raise RuntimeError("lost")

    monkeypatch.setattr(transfer, "_copy_out", fail)
    with pytest.raises(RuntimeError, match="lost"):
        StreamCopyEngine().demote(torch.zeros(4), [])
    assert log[-1] == ("set_stream", "caller's")
    assert accelerator.index == 0
    assert accelerator.current_stream(CPU).name == "caller's"


def test_the_source_lives_until_its_copy_has_ended(accelerator):
    source = torch.zeros(4, 2, dtype=torch.uint8).t()  # gathered into another tensor first
    down = StreamCopyEngine().demote(source, [torch.zeros(8, dtype=torch.uint8)])
    assert down._held[0] is source
    assert not down.done()
    assert down._held[0] is source
    down.event.ended = True
    assert down.done()
    assert down._held is None


def test_a_promotion_runs_on_the_callers_stream_behind_the_demotion(accelerator, log):
    engine = StreamCopyEngine()
    arena = torch.zeros(8, dtype=torch.uint8)
    down = engine.demote(torch.arange(8, dtype=torch.uint8), [arena])
    del log[:]
    target = torch.zeros(8, dtype=torch.uint8)
    up = engine.promote([arena[:5], arena[5:]], target, down)
    assert log == [("wait_event", "caller's", down.event), ("record_event", "caller's")]
    assert target.tolist() == list(range(8))
    assert not up.done()


def test_a_promotion_waits_for_a_transfer_of_another_kind(accelerator, log):
    class Other:
        def wait(self):
            log.append("waited")

    target = torch.zeros(4, dtype=torch.uint8)
    StreamCopyEngine().promote([target.clone()], target, Other())
    assert log == ["waited", ("record_event", "caller's")]


# While a graph is captured


def test_a_capture_is_seen_on_the_current_device_and_on_the_one_asked_about(capture):
    assert not is_capturing(CUDA0)
    capture["device"] = 0
    assert is_capturing(CUDA0)
    assert is_capturing(CUDA1)  # memory taken there is taken during the capture, too
    assert is_capturing(torch.device("cuda"))
    capture["device"] = 1
    assert not is_capturing(CUDA0)
    assert not is_capturing(torch.device("cuda"))
    assert is_capturing(CUDA1)
    assert capture["current"] == 0
    assert StreamCopyEngine().capturing(CUDA1)


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps", "xpu", "cuda"])
def test_a_device_that_cannot_capture_does_not(kind):
    assert not is_capturing(torch.device(kind))


def test_no_event_is_asked_while_a_graph_is_captured(accelerator, log, capture):
    event = Event(Stream(CUDA0, log, "side"))
    event.ended = True
    down = transfer._EventTransfer(event, CUDA0, "held")
    capture["device"] = 0
    assert not down.done()
    down.wait()
    assert log == []
    assert down._held == "held"
    capture["device"] = None
    assert down.done()
    assert log == [("query", "side")]
