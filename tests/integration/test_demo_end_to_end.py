"""`mmcache demo` at reduced size: real pictures, real encoder, real store, real second process."""

import json
import subprocess
import sys

import pytest

SIZES = ("--hot", "5MiB", "--host", "6MiB", "--disk", "64MiB")


def run(store, *more):
    command = [sys.executable, "-m", "mmcache_tools", "demo", "--store", str(store)]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Two runs on the same store."""
    store = tmp_path_factory.mktemp("demo") / "store"
    words = ("--requests", "40", "--json", *SIZES)
    return store, [run(store, *words) for _ in range(2)]


@pytest.fixture(params=[0, 1], ids=["new-store", "store-of-an-earlier-run"])
def result(twice, request):
    done = twice[1][request.param]
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_each_item_is_encoded_exactly_once(result):
    assert result["requests"] == 40
    assert result["encoder_runs"] == result["items"] == 8
    assert result["encoded_again"] == 0
    assert result["encoder_runs_saved"] == 32


def test_every_tier_serves_and_every_hit_is_bit_identical(result):
    assert all(result["hits"][tier] > 0 for tier in ("hot", "host", "disk"))
    assert result["bit_identical"] == sum(result["hits"].values()) == 32


def test_the_second_process_serves_everything_from_disk_without_the_encoder(result):
    second = result["second_process"]
    assert second["served"] == {"hot": 0, "host": 0, "disk": 8, "encoder": 0}
    assert second["bit_identical"] == second["items"] == 8
    assert second["encoder_loaded"] is False


def test_the_store_stays_and_the_next_line_names_it(twice, result):
    assert twice[0].is_dir()
    assert result["next"] == f"mmcache ls {twice[0]}"
    assert (result["ok"], result["failures"]) == (True, [])


def test_a_hot_tier_smaller_than_an_item_fails_with_the_remedy(tmp_path):
    done = run(tmp_path / "store", "--requests", "20", *SIZES, "--hot", "200KiB")
    assert done.returncode == 1
    assert "give a larger --hot" in done.stdout


def test_a_wrong_size_is_refused_before_anything_is_encoded(tmp_path):
    done = run(tmp_path / "store", "--requests", "20", "--host", "plenty")
    assert done.returncode == 2
    assert "plenty" in done.stderr
    assert "Traceback" not in done.stderr
