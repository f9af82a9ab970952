"""The copy engine: bytes between device tensors and the arena.

Owns: how a copy is started, on which stream, and how its end is seen.
Does not own: what is copied when, or when memory is reused
(:mod:`tiered_mmcache.tiers.lower_tiers`).

Copies of CPU tensors are finished when the call returns. On an accelerator, demotion runs on a
side stream that first waits for the caller's stream; promotion runs on the caller's stream, so
its consumer needs no wait. Only the device-neutral API is used (``torch.Stream``,
``torch.Event``, ``torch.accelerator``), and the caller's current device and stream are left as
they were.

While a stream captures a graph, nothing here may happen on it: a copy would become part of the
graph and be repeated with it, and asking for an event's state ends the capture with an error
(https://github.com/pytorch/pytorch/pull/104487). Who starts copies asks ``capturing`` first; a
transfer says that it has not ended, without asking the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from tiered_mmcache.entries.record import EntryHeader

# torch copies a large CPU tensor in one loop over its elements. The C library's copy of blocks that
# fit the processor's second-level cache was 1.25 times as fast for 8 MB and 1.19 times for 64 MB;
# with blocks of 64 KiB it was 1.10 and 1.04 times (AMD EPYC, glibc 2.36). The parts of a read under
# way, 2 to 4 MiB that another core has just written, it copies more slowly: promotion from disk
# fell from 0.49 to 0.40 of memcpy. Those are left to torch, and with them all of their size.
_BLOCK_BYTES = 512 * 1024
_MOST_BYTES_BY_TORCH = 4 * 1024 * 1024


class Transfer(Protocol):
    """A copy that was started. Its source and destination must stay untouched until it is done."""

    def done(self) -> bool:
        """Whether the copy has ended; never waits, and is False while a graph is captured."""

    def wait(self) -> None:
        """Wait for the end of the copy; bounded by the speed of the bus.

        Returns at once while a graph is captured: the copy may not have ended then.
        """


class CopyEngine(Protocol):
    """Starts copies between tensors and arena bytes."""

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """Start copying a tensor's elements, in row-major order, into consecutive bytes."""

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """Start copying bytes to a ``uint8`` tensor on a device, once ``after`` has ended."""

    def capturing(self, device: torch.device) -> bool:
        """Whether the caller's current stream captures a graph there: start nothing then."""


class _Finished:
    """A transfer that ended before the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


FINISHED: Transfer = _Finished()


class HostCopyEngine:
    """Copies between CPU tensors and the arena, on the caller's thread."""

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`CopyEngine`; finished on return."""
        _copy_out(payload_bytes_of(source), target, _copy_in_blocks)
        return FINISHED

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`CopyEngine`; finished on return."""
        if after is not None:
            after.wait()
        _copy_in(source, target, _copy_in_blocks)
        return FINISHED

    def capturing(self, device: torch.device) -> bool:
        """See :class:`CopyEngine`; never, on a CPU."""
        return False


class _EventTransfer:
    """A copy on a stream, over when its event is."""

    def __init__(self, event: torch.Event, device: torch.device, held: object) -> None:
        self.event = event
        self._device = device
        self._held: object = held  # the source lives until the copy has ended

    def done(self) -> bool:
        if is_capturing(self._device) or not self.event.query():
            return False
        self._held = None
        return True

    def wait(self) -> None:
        if not is_capturing(self._device):
            self.event.synchronize()
            self._held = None


class StreamCopyEngine:
    """Copies between an accelerator's tensors and the arena, on streams."""

    def __init__(self) -> None:
        self._side_streams: dict[torch.device, torch.Stream] = {}

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`CopyEngine`; runs on a side stream behind the caller's stream."""
        device = source.device
        flat = payload_bytes_of(source)  # on the caller's stream, where it has to be gathered
        side = self._side_stream(device)
        side.wait_stream(torch.accelerator.current_stream(device))
        with on_stream(side):
            _copy_out(flat, target, _copy_on_stream)
            event = side.record_event()
        return _EventTransfer(event, device, (source, flat))

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`CopyEngine`; runs on the caller's current stream."""
        current = torch.accelerator.current_stream(target.device)
        if isinstance(after, _EventTransfer):
            current.wait_event(after.event)
        elif after is not None:
            after.wait()
        _copy_in(source, target, _copy_on_stream)
        return _EventTransfer(current.record_event(), target.device, None)

    def capturing(self, device: torch.device) -> bool:
        """See :class:`CopyEngine`."""
        return is_capturing(device)

    def _side_stream(self, device: torch.device) -> torch.Stream:
        if device not in self._side_streams:
            self._side_streams[device] = torch.Stream(device)
        return self._side_streams[device]


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current on its device, and then all as it was.

    ``with stream`` does this too, but not in every version of torch that is supported.
    """
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # makes its device the current one
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is captured on the current stream, of this device or of the current one."""
    module: Any = getattr(torch, device.type, None)  # some kinds of device, such as meta, have none
    ask = getattr(module, "is_current_stream_capturing", None)
    if ask is None or not module.is_initialized():
        return False
    if ask():
        return True
    if device.index in (None, module.current_device()):
        return False
    with module.device(device):
        return bool(ask())


class DeviceCopyEngine:
    """Chooses by device: CPU tensors are copied at once, all others on streams."""

    def __init__(self) -> None:
        self._host = HostCopyEngine()
        self._stream = StreamCopyEngine()

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`CopyEngine`."""
        return self._engine(source.device).demote(source, target)

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`CopyEngine`."""
        return self._engine(target.device).promote(source, target, after)

    def capturing(self, device: torch.device) -> bool:
        """See :class:`CopyEngine`."""
        return self._engine(device).capturing(device)

    def _engine(self, device: torch.device) -> CopyEngine:
        return self._host if device.type == "cpu" else self._stream


# A new tensor of these dtypes also has a scale, even where the stored one was plain memory.
_QUANTIZED = frozenset(
    getattr(torch, name)
    for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
    if hasattr(torch, name)
)


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain strided memory whose bytes say everything about it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.dtype not in _QUANTIZED
        and tensor.device.type != "meta"
        and tensor.dtype.itemsize in (1, 2, 4, 8, 16)
    )


def header_of(tensor: torch.Tensor, *, class_tag: str, extras: bytes, cost_s: float) -> EntryHeader:
    """What has to be known to rebuild such a tensor."""
    return EntryHeader(
        class_tag=class_tag,
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=tensor.dtype.itemsize,
        shape=tuple(tensor.shape),
        extras=extras,
        device_type=tensor.device.type,
        cost_s=cost_s,
    )


def dtype_of(header: EntryHeader) -> torch.dtype | None:
    """The dtype of a header, or None when this torch does not know it as such."""
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != header.item_bytes:
        return None
    if dtype in _QUANTIZED:
        return None
    return dtype


def payload_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in row-major order as ``uint8``; a view where it is contiguous."""
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        flat = torch.empty(0, dtype=torch.uint8, device=plain.device)
        start = plain.storage_offset() * plain.element_size()
        size = plain.numel() * plain.element_size()
        return flat.set_(plain.untyped_storage(), start, (size,), (1,))


def _copy_out(
    flat: torch.Tensor, target: Iterable[torch.Tensor], copy: Callable[..., object]
) -> None:
    done = 0
    with torch.no_grad():
        for part in target:
            copy(part, flat[done : done + part.numel()])
            done += part.numel()


def _copy_in(
    source: Iterable[torch.Tensor], flat: torch.Tensor, copy: Callable[..., object]
) -> None:
    done = 0
    with torch.no_grad():
        for part in source:
            copy(flat[done : done + part.numel()], part)
            done += part.numel()


def _copy_on_stream(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _copy_in_blocks(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes between CPU tensors, keeping the interpreter's lock as any Python code does.

    To give it up for each block would be a trap: with a busy Python thread beside, each block then
    waits for a whole switch interval (measured: 8 MB in 80 ms instead of 0.4).
    """
    size_bytes = target.numel()
    if size_bytes <= _MOST_BYTES_BY_TORCH:
        target.copy_(source)
        return
    to, of = target.numpy().data, source.numpy().data
    for start in range(0, size_bytes, _BLOCK_BYTES):
        to[start : start + _BLOCK_BYTES] = of[start : start + _BLOCK_BYTES]
