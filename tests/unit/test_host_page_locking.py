"""Page-locking through a runtime that the test plays.

Owns: which calls are made, in which order, and what is said when they fail. Does not own: a real
runtime (tests/gpu), or when memory is locked (test_host_preparation.py).
"""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from tiered_mmcache.config import PageLocked
from tiered_mmcache.configuration import machine
from tiered_mmcache.host import memory_policy, page_locking
from tiered_mmcache.host.page_locking import (
    NoPageLocking,
    PageLockingError,
    RuntimePageLocker,
    numa_node_of,
    page_locker_for,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class Runtime:
    """Has the names of ``torch.cuda.cudart()``, and notes what is called."""

    def __init__(self, log):
        self.log = log
        self.error = 0
        self.text = "out of memory"

    def cudaHostRegister(self, address, size_bytes, flags):  # noqa: N802
        self.log.append(("lock", address, size_bytes, flags))
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        self.log.append(("unlock", address))
        return self.error

    def cudaError(self, number):  # noqa: N802
        return number

    def cudaGetErrorString(self, number):  # noqa: N802
        return self.text


@pytest.fixture
def log():
    return []


@pytest.fixture
def runtime(log):
    return Runtime(log)


@pytest.fixture
def locker(runtime, log):
    @contextlib.contextmanager
    def on_device(device):
        log.append(("on", device))
        yield
        log.append(("off", device))

    return RuntimePageLocker(CUDA, runtime, on_device)


def test_memory_is_locked_for_all_devices_in_the_context_of_its_own(locker, log):
    locker.lock(1 << 30, 4096)
    locker.unlock(1 << 30)
    assert log == [
        ("on", CUDA),
        ("lock", 1 << 30, 4096, 1),
        ("off", CUDA),
        ("on", CUDA),
        ("unlock", 1 << 30),
        ("off", CUDA),
    ]


@pytest.mark.parametrize("limit_bytes", [None, 8 << 20])
def test_a_refusal_says_what_to_change(locker, runtime, monkeypatch, limit_bytes):
    monkeypatch.setattr(machine, "locked_memory_limit_bytes", lambda: limit_bytes)
    runtime.error = 2
    with pytest.raises(PageLockingError) as refused:
        locker.lock(0, 64 << 20)
    text = str(refused.value)
    assert "did not lock 64.0MiB (error 2, out of memory)." in text
    assert "lower host.max_size, or write host.page_locked: off" in text
    assert ("RLIMIT_MEMLOCK is 8.0MiB: raise it" in text) == (limit_bytes is not None)
    assert ("ulimit -l unlimited" in text) == (limit_bytes is not None)


def test_an_error_without_a_text_is_a_number(locker, runtime):
    runtime.text = ""
    runtime.error = 801
    with pytest.raises(PageLockingError, match=r"\(error 801\)"):
        locker.lock(0, 4096)

    def unknown(number):
        raise ValueError(number)

    runtime.cudaError = unknown
    with pytest.raises(PageLockingError, match=r"\(error 801\)"):
        locker.lock(0, 4096)


def test_unlocking_raises_nothing(locker, runtime, monkeypatch):
    runtime.error = 4  # cudaErrorCudartUnloading
    locker.unlock(0)

    def lost(address):
        raise RuntimeError("device lost")

    monkeypatch.setattr(runtime, "cudaHostUnregister", lost)
    locker.unlock(0)


# Which locker


@pytest.mark.parametrize("setting", [PageLocked.AUTO, PageLocked.ON])
def test_cuda_and_hip_memory_is_locked(monkeypatch, runtime, setting):
    monkeypatch.setattr(page_locking, "_cuda_runtime", lambda: runtime)
    locker = page_locker_for(setting, CUDA)
    assert isinstance(locker, RuntimePageLocker)
    assert (locker._device, locker._runtime) == (CUDA, runtime)


@pytest.mark.parametrize(
    ("setting", "device"),
    [
        (PageLocked.OFF, CUDA),
        (PageLocked.OFF, CPU),
        (PageLocked.AUTO, CPU),
        (PageLocked.AUTO, torch.device("xpu", 0)),
    ],
)
def test_memory_that_is_left_as_it_is(setting, device):
    locker = page_locker_for(setting, device)
    assert isinstance(locker, NoPageLocking)
    locker.lock(0, 1 << 60)
    locker.unlock(0)


@pytest.mark.parametrize("device", [CPU, torch.device("xpu", 0)])
def test_what_was_asked_for_and_cannot_be_done_is_told(device):
    with pytest.raises(
        PageLockingError, match=f"{device.type} tensors.*write host.page_locked: auto"
    ):
        page_locker_for(PageLocked.ON, device)


# A graph that another thread captures


def test_calls_are_made_in_relaxed_mode_and_the_mode_is_put_back():
    mode = [0]
    seen = []

    def exchange(reference):
        value = reference._obj
        mode[0], value.value = value.value, mode[0]

    def lock():
        with page_locking._relaxed_capture(exchange):
            seen.append(mode[0])
            raise PageLockingError

    with pytest.raises(PageLockingError):
        lock()
    assert (seen, mode) == ([2], [0])


def test_without_the_call_memory_is_locked_all_the_same():
    with page_locking._relaxed_capture(None):
        pass
    assert page_locking._symbol("libnot-there.so.1", "anything") is None
    assert page_locking._symbol("libc.so.6", "no_such_function") is None
    assert page_locking._symbol("libc.so.6", "getpid")() == ctypes.CDLL(None).getpid()


# The NUMA node of the device


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}, "0000:3b:00.0"),
        ({"pci_domain_id": 0x10000, "pci_bus_id": 1, "pci_device_id": 2}, "10000:01:02.0"),
        ({"pci_bus_id": 1}, None),
        ({}, None),
    ],
)
def test_the_node_is_that_of_the_pci_device(monkeypatch, properties, expected):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties)
    )
    monkeypatch.setattr(memory_policy, "node_of_pci_device", lambda name: asked.append(name) or 1)
    assert numa_node_of(CUDA) == (None if expected is None else 1)
    assert asked == ([] if expected is None else [expected])
    assert numa_node_of(CPU) is None
