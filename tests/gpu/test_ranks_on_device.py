"""Ranks that share tensors of an accelerator.

Owns: that a tensor arrives whole on every rank's device, over a group for such tensors.
Does not own: what ranks agree on (tests/unit/test_agreement.py). The ranks are threads.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tiered_mmcache import CacheConfig, EmbeddingResult, TensorParallelMultimodalCache
from tiered_mmcache.config import HostConfig
from tiered_mmcache.testing import audit
from tiered_mmcache.testing.ranks import gloo_groups, on_all_ranks

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ENTRIES = 6
CONFIG = CacheConfig(namespace="gpu", host=HostConfig(max_size="64MiB"))


def payload(key, device):
    """What an encoder makes of a key."""
    return torch.arange(key, key + MIB // 4, dtype=torch.float32, device=device).reshape(-1, 64)


def answers(ranks):
    """What each rank returned; what one raised is raised."""
    return [future.result() for future in ranks]


def make_caches(groups, device_groups=(None, None)):
    def make(rank):
        return TensorParallelMultimodalCache(
            2 * MIB, group=groups[rank], device_group=device_groups[rank], config=CONFIG
        )

    return answers(on_all_ranks(2, make))


def serve(machine, cache, device):
    """Set more than the hot tier holds while the device is busy, then look everything up."""
    torch.accelerator.set_device_index(device.index or 0)
    with machine.on(machine.new_stream()):
        for key in range(ENTRIES):
            machine.keep_busy()
            assert cache.set(key, EmbeddingResult(embedding=payload(key, device)))
        found = [cache.get_single(key) for key in range(ENTRIES)]
        right = [
            one is not None
            and one.embedding.device.type == device.type
            and one.embedding.device.index == device.index
            and torch.equal(one.embedding, payload(key, device))
            for key, one in enumerate(found)
        ]
    audit(cache)
    return right


def close(caches):
    for cache in caches:
        assert cache.stats().host["hits"] > 0
        cache.close()


def test_ranks_on_one_device_get_the_tensors_of_the_leader(machine, device):
    caches = make_caches(gloo_groups(2, device=device))
    ended = on_all_ranks(2, lambda rank: serve(machine, caches[rank], device))
    assert answers(ended) == [[True] * ENTRIES] * 2
    assert [list(cache.mm_cache) for cache in caches] == [[4, 5]] * 2
    close(caches)


def test_ranks_on_devices_of_their_own_get_the_tensors_of_the_leader(machine, device):
    """Over the groups that engines have: one for messages, and the device's own for tensors."""
    if not machine.others:
        pytest.skip("NCCL and its like need a device for each rank, and there is only one")
    devices = [device, machine.others[0]]
    caches = make_caches(gloo_groups(2), device_groups(devices))
    ended = on_all_ranks(2, lambda rank: serve(machine, caches[rank], devices[rank]))
    assert answers(ended) == [[True] * ENTRIES] * 2
    close(caches)


def device_groups(devices):
    """The ends of a group that carries tensors of these devices only."""
    if devices[0].type == "cpu":
        return gloo_groups(2)
    store = HashStore()

    def join(rank):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=60)
        torch.accelerator.set_device_index(devices[rank].index)
        backend = dist.ProcessGroupNCCL(store, rank, 2, options)
        group = dist.ProcessGroup(store, rank, 2)
        kind = torch.device(devices[rank].type)
        group._register_backend(kind, dist.ProcessGroup.BackendType.NCCL, backend)
        return group

    return answers(on_all_ranks(2, join))


def test_a_leader_without_memory_is_a_miss_on_all(machine, device):
    caches = make_caches(gloo_groups(2, device=device))
    answers(on_all_ranks(2, lambda rank: serve(machine, caches[rank], device)))
    held = [list(cache.mm_cache.values()) for cache in caches]  # what is evicted frees no memory
    with machine.without_memory():
        assert answers(on_all_ranks(2, lambda rank: caches[rank].get_single(0))) == [None, None]
    found = answers(on_all_ranks(2, lambda rank: caches[rank].get_single(0)))
    assert all(torch.equal(one.embedding, payload(0, device)) for one in found)
    assert [len(results) for results in held] == [2, 2]
    close(caches)
