"""Ranks in processes of their own, over groups as torch.distributed makes them.

Owns: that the groups of an engine can be given as they are.
Does not own: what ranks do when something fails (tests/faults/campaign/ranks.py).
"""

import json
import subprocess
import sys

import pytest

RANK = """
import json, sys
import torch
import torch.distributed as dist
from tiered_mmcache import EmbeddingResult, TensorParallelMultimodalCache

rank, kind, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(f"{folder}/rendezvous", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
groups = {"world": lambda: dist.group.WORLD, "own": lambda: dist.new_group(backend="gloo")}
yaml = f"{folder}/mmcache.yaml"
with TensorParallelMultimodalCache.from_yaml(yaml, group=groups[kind]()) as cache:
    for key in range(8):
        result = EmbeddingResult(embedding=torch.full((1024, ), key, dtype=torch.uint8))
        assert cache.set(key, result)
    assert cache.drain()
    tiers = [str(cache.locate(key)) for key in range(8)]
    values = [cache.get_single(key).embedding.unique().tolist() for key in range(7, -1, -1)]
    assert cache.get_single(99) is None
    stats = cache.stats().as_dict()
    answer = {"tiers": tiers, "values": values, "hot": list(cache.mm_cache), "stats": stats}
print(json.dumps(answer))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["world", "own"])
def test_two_processes_agree(tmp_path, kind):
    (tmp_path / "mmcache.yaml").write_text(
        "namespace: ranks\n"
        "hot:\n  max_size: 2KiB\n"
        "host:\n  max_size: 12KiB\n"
        "disk:\n  path: store\n  max_size: 16MiB\n  write_buffer: 1MiB\n  read_timeout: 30s\n"
    )
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(rank), kind, tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    first, second = (json.loads(out) for out, _ in ended)
    assert first["tiers"] == second["tiers"]
    assert first["tiers"] == ["Tier.DISK"] * 3 + ["Tier.HOST"] * 3 + ["Tier.HOT"] * 2
    assert first["values"] == second["values"] == [[key] for key in range(7, -1, -1)]
    assert first["hot"] == second["hot"] == [1, 0]
    for tier in ("host", "disk"):
        assert first["stats"][tier]["hits"] == second["stats"][tier]["hits"] > 0
    assert "budget_bytes" in first["stats"]["host"]
    assert "budget_bytes" not in second["stats"]["host"]
    assert (tmp_path / "store" / "data.mdb").is_file()
