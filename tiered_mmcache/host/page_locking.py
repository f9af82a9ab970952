"""Page-locking: memory that a device reaches by itself, so that copies run beside everything else.

Owns: the calls of the CUDA or HIP runtime, and what to say when they fail.
Does not own: which memory is locked when, or the thread on which it happens (:mod:`.preparation`).

torch's own page-locked allocator is not used: it rounds sizes up to powers of two, and its memory
could not be shared with the spill worker. ``torch.cuda.cudart()`` gives the interpreter's lock up
during the calls; on ROCm its names lead to HIP.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from tiered_mmcache.config import PageLocked
from tiered_mmcache.configuration import machine
from tiered_mmcache.configuration.quantities import written_size
from tiered_mmcache.host import memory_policy

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class PageLockingError(Exception):
    """Memory stays as it is; the message says why and what to change."""


class PageLocker(Protocol):
    """Locks ranges of memory. Its calls come from one thread at a time, not always the same."""

    def lock(self, address: int, size_bytes: int) -> None:
        """Lock a range.

        Raises:
            PageLockingError: It is not locked.
        """

    def unlock(self, address: int) -> None:
        """Unlock the range that begins here, while no copy touches it; never raises."""


class NoPageLocking:
    """Leaves memory as it is."""

    def lock(self, address: int, size_bytes: int) -> None:
        """See :class:`PageLocker`."""

    def unlock(self, address: int) -> None:
        """See :class:`PageLocker`."""


class RuntimePageLocker:
    """Locks memory through the CUDA or HIP runtime.

    Args:
        device: The device whose context the calls need; a new thread's own would be device 0's,
            and a context there costs some hundred MB of device memory.
        runtime: What ``torch.cuda.cudart()`` returns.
        on_device: Makes a device current for a while.
    """

    def __init__(
        self,
        device: torch.device,
        runtime: Any,
        on_device: Callable[[torch.device], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._device = device
        self._runtime = runtime
        self._on_device = on_device

    def lock(self, address: int, size_bytes: int) -> None:
        """See :class:`PageLocker`."""
        with self._on_device(self._device):
            error = int(self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
            if error:
                raise PageLockingError(_refused(self._name_of(error), size_bytes))

    def unlock(self, address: int) -> None:
        """See :class:`PageLocker`."""
        with contextlib.suppress(RuntimeError), self._on_device(self._device):
            self._runtime.cudaHostUnregister(address)

    def _name_of(self, error: int) -> str:
        try:
            text = self._runtime.cudaGetErrorString(self._runtime.cudaError(error))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            text = ""
        return f"error {error}{text and f', {text}'}"


def page_locker_for(setting: PageLocked, device: torch.device) -> PageLocker:
    """What locks memory for copies to and from a device, as ``host.page_locked`` says.

    Raises:
        PageLockingError: The setting is ``on``, and there is no runtime to lock memory with.
    """
    if setting is not PageLocked.OFF and device.type == "cuda":
        return RuntimePageLocker(device, _cuda_runtime(), _cuda_device)  # pragma: gpu
    if setting is PageLocked.ON:
        raise PageLockingError(
            f"nothing here can lock memory for {device.type} tensors, only the CUDA and HIP "
            "runtimes can: write host.page_locked: auto"
        )
    return NoPageLocking()


def numa_node_of(device: torch.device) -> int | None:
    """The NUMA node whose memory is nearest to a device; None where it does not matter."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
    except AttributeError:  # older versions of torch do not tell them
        return None
    return memory_policy.node_of_pci_device(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def _cuda_runtime() -> Any:  # pragma: gpu
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _cuda_device(device: torch.device) -> Iterator[None]:  # pragma: gpu
    with torch.cuda.device(device), _relaxed_capture(_capture_mode_exchange()):
        yield


@contextlib.contextmanager
def _relaxed_capture(exchange: Callable[[Any], object] | None) -> Iterator[None]:
    """Make this thread's calls harmless to a graph that another thread captures.

    While any thread captures a graph in CUDA's default mode, calls that lock memory fail in all
    threads and spoil the capture, unless the calling thread has said that it is not concerned.
    """
    mode = ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@functools.cache
def _capture_mode_exchange() -> Callable[[Any], object] | None:  # pragma: gpu
    """The driver's call: the runtime may be linked into torch, and then has no symbols."""
    if torch.version.hip is None:
        return _symbol("libcuda.so.1", "cuThreadExchangeStreamCaptureMode")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    mapped = {line.split()[-1] for line in maps.splitlines() if "libamdhip64.so" in line}
    return _symbol(min(mapped, default="libamdhip64.so"), "hipThreadExchangeStreamCaptureMode")


def _symbol(library: str, name: str) -> Callable[[Any], object] | None:
    try:
        found: Callable[[Any], object] = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):
        return None
    return found


def _refused(reason: str, size_bytes: int) -> str:
    limit = machine.locked_memory_limit_bytes()
    raise_limit = (
        ""
        if limit is None
        else f" RLIMIT_MEMLOCK is {written_size(limit)}: raise it where the driver counts by it "
        "(ulimit -l unlimited, docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)."
    )
    return (
        f"the runtime did not lock {written_size(size_bytes)} ({reason}).{raise_limit} "
        "Or lower host.max_size, or write host.page_locked: off"
    )
