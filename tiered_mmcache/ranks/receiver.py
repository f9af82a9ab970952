"""The tensor whose bytes the leader of a group is about to send, on the ranks that get them.

Owns: where it is, and what it means for the answer when it cannot be had.
Does not own: when it is asked for (:mod:`.agreement`) or how bytes arrive (:mod:`.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiered_mmcache.contract import EmbeddingResult, class_of_tag
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.entries.results import empty_target, rebuild, target_device
from tiered_mmcache.errors import RecordError
from tiered_mmcache.host.recycled import RecycledBuffers
from tiered_mmcache.host.transfer import is_capturing
from tiered_mmcache.metrics.counters import Counters, FaultLog
from tiered_mmcache.tiers.promotion import DEVICE_ERRORS


class Receiver:
    """Allocates results on a rank that does not lead.

    Args:
        device: ``auto`` or the device to promote to.
        group_carries: Whether tensors of a device can be sent.
        counters: Where misses are counted.
        faults: Where failures are reported.
    """

    def __init__(
        self,
        device: str,
        group_carries: Callable[[torch.device], bool],
        counters: Counters,
        faults: FaultLog,
    ) -> None:
        self._device = device
        self._group_carries = group_carries
        self._counters = counters
        self._faults = faults
        self._buffers = RecycledBuffers(0)

    def allocate(self, header: EntryHeader) -> EmbeddingResult | None:
        """A result whose bytes are to come, on the caller's current stream.

        Counts the miss with its reason and returns None when there is none. Raises nothing: what
        one rank raises would not be known to the others.
        """
        try:
            return self._allocated(header)
        except RecordError as error:
            cause, problem = error.cause, str(error)
        except DEVICE_ERRORS as error:  # most often: out of device memory
            cause, problem = "promotion", str(error)
        except Exception as error:  # noqa: BLE001 - a fault below must never reach the engine
            cause, problem = "internal", repr(error)
        self._faults.report(cause, problem)
        self._counters.count_miss(cause)
        return None

    def carries(self, device: torch.device) -> bool:
        """Whether a device's tensors can be sent; counts the miss when they cannot."""
        if self._group_carries(device):
            return True
        self._faults.report("no_group", f"the groups do not carry tensors of {device}")
        self._counters.count_miss("no_group")
        return False

    def _allocated(self, header: EntryHeader) -> EmbeddingResult | None:
        device = target_device(header, self._device)
        if device is None:
            raise RecordError("no_device", f"no {header.device_type} device here")
        result_class = class_of_tag(header.class_tag)
        if result_class is None:
            raise RecordError("unknown_class", f"no class is registered as {header.class_tag!r}")
        if is_capturing(device):
            self._counters.misses["capture"] += 1
            return None
        if not self.carries(device):
            return None
        return rebuild(result_class, empty_target(header, device, self._buffers), header.extras)
