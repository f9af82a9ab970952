"""Tensor-parallel ranks of SGLang, each a process with the release's own code around our cache.

Owns: starting the ranks, and comparing what they report.
Does not own: what a rank does (one_rank.py); ranks without SGLang (tests/unit/test_agreement.py,
tests/faults/campaign/ranks.py).
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import versions
from one_rank import Orders
from serving import RANKS

NEWEST = versions()[-1]
_LIMIT_S = 500
_BATCHES = 625
_CALLS = 25_000  # of all ranks, with one seed


class Program:
    """Some ranks, and where they keep things."""

    def __init__(self, folder, **sections):
        self.folder = folder
        disk = {
            "path": str(folder / "store"),
            "max_size": "64MiB",
            "write_buffer": "8MiB",
            "close_timeout": "20s",
            "read_timeout": "30s",
            **sections.pop("disk", {}),
        }
        whole = {"namespace": "auto", "host": {"max_size": "96KiB"}, "disk": disk, **sections}
        (folder / "mmcache.yaml").write_text(json.dumps(whole))
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text('{"architectures": ["Tiny"], "vision": {}}')
        (model / "model.safetensors").write_bytes(bytes(range(256)) * 64)

    def run(self, scenario, *, version=NEWEST, size=2, replicas=1, dies=None, **orders):
        """Run a scenario on all ranks; what each reports, None of one that has to die."""
        among = size // replicas
        children = []
        for rank in range(size):
            first = rank - rank % among
            told = Orders(
                scenario=scenario,
                version=version,
                rank=rank,
                ranks=list(range(first, first + among)),
                size=size,
                folder=str(self.folder),
                **orders,
            )
            children.append(self._start(told))
        try:
            return [
                self._report_of(rank, child, rank == dies) for rank, child in enumerate(children)
            ]
        finally:
            for child in children:
                child.kill()
                child.communicate()

    def _report_of(self, rank, child, dies):
        _, errors = child.communicate(timeout=_LIMIT_S)
        assert child.returncode == (-signal.SIGKILL if dies else 0), errors[-4000:]
        return None if dies else json.loads((self.folder / f"rank-{rank}.json").read_text())

    def _start(self, told):
        script = Path(__file__).with_name("one_rank.py")
        return subprocess.Popen(
            [sys.executable, script, json.dumps(dataclasses.asdict(told))],
            env={**os.environ, "TIERED_MMCACHE_CONFIG": str(self.folder / "mmcache.yaml")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def agreed(reports):
    """Whether all ranks answered and held the same after each batch."""
    assert all(len(report["seen"]) > 0 for report in reports)
    return len({tuple(report["seen"]) for report in reports}) == 1


def lines(report, level):
    return [line for line in report["lines"] if line.startswith(level)]


@pytest.mark.parametrize("version", versions())
def test_ranks_of_every_release_hit_and_miss_together(program, version):
    first, second = program.run("two_rounds", version=version)
    assert agreed([first, second])
    assert first["items encoded"] == second["items encoded"] == 48
    for report in (first, second):
        assert report["hits"]["host"] > 0
        assert report["hits"]["disk"] > 0
        assert not report["faults"]
        assert not lines(report, "ERROR")
    assert first["hits"] == second["hits"]
    assert [report["has tiers below"] for report in (first, second)] == [True, False]
    assert "rank 0 has the tiers below the hot one" in "".join(second["lines"])


@pytest.mark.parametrize("seed", range(4))
def test_random_batches_with_faults_on_the_leader(tmp_path, seed):
    program = Program(tmp_path, disk={"read_timeout": "50ms"})
    reports = program.run("random_batches", size=4, batches=_BATCHES, seed=seed)
    calls = sum(report["calls"] for report in reports)
    assert [report["diverged"] for report in reports] == [None] * 4
    assert agreed(reports)
    leader = reports[0]
    assert leader["kills"] > 0
    assert leader["reasons"].get("read_timeout", 0) + leader["reasons"].get("disk_down", 0) > 0
    assert leader["hits"]["host"] > 0
    assert leader["hits"]["disk"] > 0
    assert calls >= _CALLS
    RANKS["4 ranks, one store, faults on the leader"].update(
        {
            "calls": calls,
            "batches": _BATCHES,
            "worker kills": leader["kills"],
            "faults": sum(leader["faults"].values()),
            "divergences": 0,
        }
    )


def test_ranks_that_decide_for_themselves_diverge(tmp_path):
    """The control: what agreement prevents happens without it, and is found."""
    reports = Program(tmp_path, disk={"read_timeout": "50ms"}).run(
        "random_batches",
        size=4,
        batches=_BATCHES,
        seed=11,
        patience_s=5.0,
        arguments={"tp_size": 1},
    )
    assert any(report["diverged"] for report in reports)
    RANKS["control: 4 ranks that decide for themselves"].update(
        {"calls": sum(report["calls"] for report in reports), "divergences": 1}
    )


def test_the_next_server_starts_warm_on_all_ranks(program):
    reports = program.run("restarted")
    assert agreed(reports)
    assert [report["first"] for report in reports] == [20, 20]
    assert [report["items encoded"] for report in reports] == [20, 20]
    assert [report["hits"]["disk"] for report in reports] == [20, 20]


def test_after_new_weights_nothing_old_is_found_on_any_rank(program):
    reports = program.run("new_weights")
    assert agreed(reports)
    # 20 of the old weights; 20 of the new, which are found again; and none by the next server.
    assert [report["counts"] for report in reports] == [[20, 40, 60]] * 2


def test_the_smallest_hot_tier_is_that_of_all(program):
    reports = program.run("other_hot_sizes")
    assert agreed(reports)
    assert reports[0]["hot bytes"] == reports[1]["hot bytes"]
    assert "hot.max_size is limited" in "".join(lines(reports[0], "WARNING"))
    assert [report["items encoded"] for report in reports] == [20, 20]


def test_what_one_rank_refuses_is_off_on_all(program):
    reports = program.run("one_refuses")
    assert agreed(reports)
    assert not any(report["has tiers below"] for report in reports)
    for report in reports:
        assert any("off on all ranks: rank 1: SGLANG_MM_SKIP" in e for e in lines(report, "ERROR"))
    assert not (program.folder / "store").exists()


def test_a_rank_without_the_plugin_leaves_the_others_with_the_hot_tier(program):
    reports = program.run("one_lacks_the_plugin", arguments={"watchdog_timeout": 5.0})
    assert reports[0]["items encoded"] == reports[1]["items encoded"] > 48
    assert not reports[0]["has tiers below"]
    (line,) = lines(reports[0], "ERROR")
    assert "the ranks could not be brought together" in line
    assert "Give every rank the plug-in" in line
    assert reports[0]["faults"] == {"ranks_apart": 1}


def test_an_adapter_that_one_rank_cannot_read_empties_all(program):
    adapter = program.folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(
        (lambda header: len(header).to_bytes(8, "little") + header)(
            b'{"model.layers.0.self_attn.q_proj.lora_A.weight":'
            b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        )
    )
    reports = program.run("one_cannot_read_an_adapter")
    assert agreed(reports)
    assert [report["emptied"] for report in reports] == [True, True]
    assert not any(report["has tiers below"] for report in reports)
    assert "as rank 1 says" in "".join(lines(reports[0], "ERROR"))


def test_a_rank_that_dies_is_an_error_on_the_others(program):
    reports = program.run("one_dies", dies=1, arguments={"watchdog_timeout": 30.0})
    assert reports[0]["error"] == "GroupLostError"


def test_replicas_agree_among_themselves_and_share_the_store(program):
    reports = program.run(
        "two_rounds", size=4, replicas=2, arguments={"enable_dp_attention": True, "dp_size": 2}
    )
    assert agreed(reports[:2])
    assert agreed(reports[2:])
    assert [report["has tiers below"] for report in reports] == [True, False, True, False]
    assert all(report["items encoded"] <= 48 for report in reports)


def test_a_later_pipeline_stage_is_not_waited_for(program):
    reports = program.run("later_stage", size=4, replicas=2)
    assert agreed(reports[:2])
    assert [report["has tiers below"] for report in reports] == [True, False, False, False]
    assert [report["items encoded"] for report in reports[:2]] == [48, 48]


@pytest.mark.parametrize("version", versions("0.5.19")[-1:])
def test_what_only_the_leader_objects_to_is_a_miss_on_all(program, version):
    reports = program.run("inconsistent_rows", version=version)
    assert agreed(reports)
    assert [report["found"] for report in reports] == [[True, False]] * 2
    assert reports[0]["reasons"]["inconsistent_rows"] == 1
    assert set(reports[1]["reasons"]) == {"leader"}
    assert reports[0]["misses"] == reports[1]["misses"]
