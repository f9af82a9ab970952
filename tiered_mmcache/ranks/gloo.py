"""A gloo group of some of a program's ranks, made by these ranks alone.

Owns: making it without torch's registry of groups, to which all ranks of a program would have to
come, members or not.
Does not own: what is sent (:mod:`.exchange`).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_CPU = torch.device("cpu")


def gloo_group(
    store: Store, rank: int, size: int, timeout_s: float, device: torch.device = _CPU
) -> dist.ProcessGroup:
    """One rank's end of a gloo group, whose ranks meet at the store.

    Args:
        store: Where they meet; no other group may have been made with it.
        rank: This process's rank in the group, from 0.
        size: The number of ranks.
        timeout_s: Seconds to wait for the others here, and in each collective afterwards.
        device: A kind of device whose tensors it carries beside those of the CPU.

    Raises:
        RuntimeError: The others did not come in time.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, rank, size)
    for kind in {_CPU.type, device.type}:
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def gloo_group_of(members: list[int], name: str, timeout_s: float) -> dist.ProcessGroup:
    """A group of its own for some ranks of the program, which has ``init_process_group`` behind it.

    Args:
        members: The program's ranks, in the group's order; this process is among them.
        name: Unlike that of any other group of the program; the same on all members.
        timeout_s: As for :func:`gloo_group`.

    Raises:
        RuntimeError: The others did not come in time.
        ValueError: The program has no ranks yet, or this process is no member.
    """
    store = PrefixStore(f"tiered_mmcache/{name}", dist.distributed_c10d._get_default_store())
    return gloo_group(store, members.index(dist.get_rank()), len(members), timeout_s)
