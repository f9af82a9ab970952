"""The accelerator of these tests, or a rehearsal of it.

Owns: what the tests ask of a device: streams, graphs, work that lasts, memory that runs out.
Does not own: what is tested.

With ``TIERED_MMCACHE_REHEARSE_GPU=1`` CPU tensors and streams that do nothing take the device's
place. That proves nothing about a device; it runs every line of these tests where there is none
(tests/unit/test_gpu_suite.py), so that they do not fail for their own mistakes where there is one.
"""

import contextlib
import os
import threading

import pytest
import torch

from tiered_mmcache.config import PageLocked
from tiered_mmcache.host import arena as arena_module
from tiered_mmcache.host import transfer
from tiered_mmcache.host.page_locking import NoPageLocking, page_locker_for
from tiered_mmcache.testing import ManualPageLocker
from tiered_mmcache.tiers import promotion

REHEARSED = os.environ.get("TIERED_MMCACHE_REHEARSE_GPU") == "1"


class RealDevice:
    """The current accelerator."""

    has_graphs = True

    def __init__(self):
        kind = torch.accelerator.current_accelerator(check_available=True)
        assert kind is not None, "these tests need an accelerator"
        index = torch.accelerator.current_device_index()
        self.device = torch.device(kind.type, index)
        self.others = [
            torch.device(kind.type, number)
            for number in range(torch.accelerator.device_count())
            if number != index
        ]

    def synchronize(self):
        for device in (self.device, *self.others):
            torch.accelerator.synchronize(device)

    def new_stream(self):
        return torch.Stream(self.device)

    @contextlib.contextmanager
    def on(self, stream):
        with transfer.on_stream(stream):
            yield

    def keep_busy(self):
        """Work on the current stream that lasts until long after the call has returned."""
        left = torch.randn(2048, 2048, device=self.device)
        for _ in range(20):
            left = torch.nn.functional.normalize(left @ left)
        return left

    @contextlib.contextmanager
    def capture(self):
        """Capture a graph on a stream of its own; yields what replays it."""
        if self.device.type != "cuda":
            pytest.skip("graphs are captured on CUDA and ROCm")
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.graph(graph):
            yield graph.replay
        self.synchronize()

    @contextlib.contextmanager
    def without_memory(self):
        """Let every allocation of a MiB or more fail."""
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.0, self.device)
        filling = []
        try:
            with contextlib.suppress(torch.OutOfMemoryError):  # what torch still has is used up
                while True:
                    filling.append(torch.empty(1 << 20, dtype=torch.uint8, device=self.device))
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            filling.clear()

    def new_locker(self):
        locker = page_locker_for(PageLocked.AUTO, self.device)
        if isinstance(locker, NoPageLocking):
            pytest.skip("memory is page-locked on CUDA and ROCm")
        return locker

    def is_locked(self, part):
        return part.is_pinned()


class RehearsedDevice:
    """CPU tensors, with streams and events that note nothing and end at once."""

    has_graphs = False

    class Event:
        def query(self):
            return True

        def synchronize(self):
            return

    class Stream:
        def __init__(self, device):
            self.device = torch.device(device)

        def wait_stream(self, other):
            return

        def wait_event(self, event):
            return

        def record_event(self):
            return RehearsedDevice.Event()

        def synchronize(self):
            return

    def __init__(self, patch):
        self.device = torch.device("cpu")
        self.others = [torch.device("cpu")]
        self._patch = patch
        self._current = self.Stream(self.device)
        self._locker = ManualPageLocker()
        patch.setattr(torch, "Stream", self.Stream)
        patch.setattr(torch, "accelerator", self)
        patch.setattr(transfer.DeviceCopyEngine, "_engine", lambda engine, device: engine._stream)
        patch.setattr(arena_module, "numa_node_of", lambda device: None)

    # As torch.accelerator

    def current_device_index(self):
        return 0

    def set_device_index(self, index):
        return

    def current_stream(self, device=None):
        return self._current

    def set_stream(self, stream):
        self._current = stream

    # As RealDevice

    def synchronize(self):
        return

    def new_stream(self):
        return self.Stream(self.device)

    @contextlib.contextmanager
    def on(self, stream):
        with transfer.on_stream(stream):
            yield

    def keep_busy(self):
        return torch.zeros(1)

    @contextlib.contextmanager
    def capture(self):
        capturing = threading.get_ident()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                transfer, "is_capturing", lambda device: threading.get_ident() == capturing
            )
            yield lambda: None

    @contextlib.contextmanager
    def without_memory(self):
        def no_memory(*arguments):
            raise torch.OutOfMemoryError("out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(promotion, "empty_target", no_memory)
            yield

    def new_locker(self):
        return self._locker

    def is_locked(self, part):
        end = part.data_ptr() + part.numel()
        ranges = self._locker.locked.items()
        return any(start <= part.data_ptr() and end <= start + size for start, size in ranges)


@pytest.fixture
def machine(monkeypatch):
    """The device and all that is asked of it."""
    made = RehearsedDevice(monkeypatch) if REHEARSED else RealDevice()
    yield made
    made.synchronize()


@pytest.fixture
def device(machine):
    return machine.device
