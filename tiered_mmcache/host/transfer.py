"""The copy engine: bytes between device tensors and the arena.

Owns: how a copy is started, on which stream, and how its end is seen.
Does not own: what is copied when, or when memory is reused (:mod:`tiered_mmcache.lower_tiers`).

Copies of CPU tensors are finished when the call returns. On an accelerator, demotion runs on a
side stream that first waits for the caller's stream; promotion runs on the caller's stream, so
its consumer needs no wait. Only the device-neutral API is used (``torch.Stream``,
``torch.Event``, ``torch.accelerator``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from tiered_mmcache.record import EntryHeader


class Transfer(Protocol):
    """A copy that was started. Its source and destination must stay untouched until it is done."""

    def done(self) -> bool:
        """Whether the copy has ended; never waits."""

    def wait(self) -> None:
        """Wait for the end of the copy; bounded by the speed of the bus."""


class CopyEngine(Protocol):
    """Starts copies between tensors and arena bytes."""

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """Start copying a tensor's elements, in row-major order, into consecutive bytes."""

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """Start copying bytes to a ``uint8`` tensor on a device, once ``after`` has ended."""


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
        _copy_out(payload_bytes_of(source), target)
        return FINISHED

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`CopyEngine`; finished on return."""
        if after is not None:
            after.wait()
        _copy_in(source, target)
        return FINISHED


class _EventTransfer:  # pragma: gpu
    """A copy on a stream, over when its event is."""

    def __init__(self, event: torch.Event, held: object) -> None:
        self.event = event
        self._held: object = held  # the source lives until the copy has ended

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._held = None
        return True

    def wait(self) -> None:
        self.event.synchronize()
        self._held = None


class StreamCopyEngine:  # pragma: gpu
    """Copies between an accelerator's tensors and the arena, on streams."""

    def __init__(self) -> None:
        self._side_streams: dict[torch.device, torch.Stream] = {}

    def demote(self, source: torch.Tensor, target: Iterable[torch.Tensor]) -> Transfer:
        """See :class:`CopyEngine`; runs on a side stream behind the caller's stream."""
        device = source.device
        current = torch.accelerator.current_stream(device)
        flat = payload_bytes_of(source)
        side = self._side_stream(device)
        side.wait_stream(current)
        with side:
            _copy_out(flat, target)
            event = side.record_event()
        return _EventTransfer(event, (source, flat))

    def promote(
        self, source: Iterable[torch.Tensor], target: torch.Tensor, after: Transfer | None
    ) -> Transfer:
        """See :class:`CopyEngine`; runs on the caller's current stream."""
        current = torch.accelerator.current_stream(target.device)
        if isinstance(after, _EventTransfer):
            current.wait_event(after.event)
        elif after is not None:
            after.wait()
        _copy_in(source, target)
        return _EventTransfer(current.record_event(), None)

    def _side_stream(self, device: torch.device) -> torch.Stream:
        if device not in self._side_streams:
            self._side_streams[device] = torch.Stream(device)
        return self._side_streams[device]


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


def _copy_out(flat: torch.Tensor, target: Iterable[torch.Tensor]) -> None:
    done = 0
    with torch.no_grad():
        for part in target:
            part.copy_(flat[done : done + part.numel()], non_blocking=True)
            done += part.numel()


def _copy_in(source: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    done = 0
    with torch.no_grad():
        for part in source:
            flat[done : done + part.numel()].copy_(part, non_blocking=True)
            done += part.numel()
