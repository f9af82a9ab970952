"""The cache beside its peers, in the quick form of `mmcache compare`: no gross regression.

Owns: the interface and the processes of the systems, and ratios of one run with wide margins.
Does not own: the bounds that the project sets itself, which the command prints.

SGLang's class comes out of its published wheel, as in the tests beside these.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmcache_tools.cli import app

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "peers"


@pytest.fixture(scope="module")
def result():
    """One run; what a system failed at is told by its tests."""
    arguments = ["compare", "--quick", "--json", "--environments", str(ENVIRONMENTS)]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code in {0, 1}, answer.output
    return json.loads(answer.stdout)


def test_every_quick_system_runs_here(result):
    assert result["cannot_run"] == {}
    assert set(result["systems"]) == {"ours", "sglang", "diskcache", "files"}
    failures = [result[part]["failures"] for part in ("micro", "replay")]
    assert failures == [{}, {}]


def test_a_hot_hit_costs_about_what_the_static_cache_s_does(result):
    (operations,) = result["micro"]["figures"].values()
    hits = operations["hot hit"]
    assert hits["ours"]["median"] < 2.5 * hits["sglang"]["median"]


@pytest.mark.parametrize("operation", ["set, evicting", "disk promotion, warm", "spill"])
def test_no_move_is_much_slower_than_diskcache_and_plain_files(result, operation):
    (operations,) = result["micro"]["figures"].values()
    times = operations[operation]
    others = [times[name]["median"] for name in ("diskcache", "files")]
    assert times["ours"]["median"] < 5 * max(others)


@pytest.mark.parametrize("half", ["first", "restarted"])
def test_more_of_the_encoder_is_saved_than_by_any_other(result, half):
    (figures,) = result["replay"]["figures"].values()
    saved = {name: halves[half]["saved_s"] for name, halves in figures["systems"].items()}
    assert saved["ours"] > 2 * saved["sglang"]
    assert saved["ours"] > 0.95 * max(saved["diskcache"], saved["files"])


def test_nobody_was_served_another_s_embedding(result):
    (figures,) = result["replay"]["figures"].values()
    for halves in figures["systems"].values():
        assert [halves[half]["wrong"] for half in ("first", "restarted")] == [0, 0]
