"""Marks on a device's stream: when work that was handed to it is done, without waiting for it.

Owns: recording an event on the caller's current stream, and ordering another stream behind it.
Does not own: copies (:mod:`tiered_mmcache.host.transfer`) or what the marks are for
(:mod:`.encoder_time`, :mod:`.get_or_encode`).

For tensors of the CPU there is nothing to mark: their work is done when the call returns.
"""

from __future__ import annotations

import torch

from tiered_mmcache.host.transfer import is_capturing


def mark(device: torch.device | None, *, timed: bool = False) -> torch.Event | None:
    """An event on the device's current stream, or None where work ends with the call.

    None also while the stream captures a CUDA graph: an event of a graph marks nothing outside.

    Args:
        device: Where the work is done; None for no device.
        timed: Whether the time between two marks will be asked for.
    """
    if device is None or not _has_streams(device) or is_capturing(device):
        return None
    event = torch.Event(device, enable_timing=timed)  # pragma: gpu
    event.record(torch.accelerator.current_stream(device))  # pragma: gpu
    return event  # pragma: gpu


def has_passed(event: torch.Event) -> bool:
    """Whether the device is done with all before a mark; never waits.

    False, without asking, while the caller captures a graph, which the question would spoil.
    """
    return not is_capturing(event.device) and event.query()


def follow(event: torch.Event | None, device: torch.device) -> None:
    """Order the device's current stream behind a mark; the caller does not wait."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)  # pragma: gpu


def device_in_use() -> torch.device | None:
    """The current accelerator, or None while this process has not used one.

    Asking does not initialise it: that would take device memory from a process that wants none.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return None
    return _current_if_initialised(kind)  # pragma: gpu


def _current_if_initialised(kind: torch.device) -> torch.device | None:  # pragma: gpu
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _has_streams(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind is not None and kind.type == device.type
