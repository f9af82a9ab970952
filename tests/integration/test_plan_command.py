"""`mmcache plan`: what it recommends, how it looks, and what it refuses.

Owns: the command. Does not own: whether its hit ratios are right (test_plan_and_cache.py).
"""

import io
import json
import random

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.sizing.drawing import print_plan
from mmcache_tools.sizing.planning import PlanOptions, make_plan, recommended_yaml
from mmcache_tools.sizing.traces import Trace
from tiered_mmcache import load_config

MIB = 1 << 20


@pytest.fixture
def trace(tmp_path):
    """Popular keys of 1 MiB among many; 400 MiB in all."""
    chance = random.Random(4)
    keys = chance.choices(range(400), weights=[1 / (key + 1) for key in range(400)], k=8000)
    path = tmp_path / "requests.csv"
    lines = [f"{number},{key},{MIB},100,0.5" for number, key in enumerate(keys)]
    path.write_text("\n".join(["time,key,bytes,tokens,cost", *lines]))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *(str(each) for each in arguments)])


def _json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_larger_tiers_answer_more_and_save_what_they_answer(trace):
    answer = _json(trace, "--memory", "96MiB", "--disk", "1GiB")
    for tier in ("hot", "host", "disk"):
        ratios = [each["hit_ratio"] for each in answer[tier]]
        assert ratios == sorted(ratios)
        assert len(ratios) > 2
    assert answer["encoder_s"] == 4000
    for each in answer["hot"] + answer["host"] + answer["disk"]:
        assert each["saved_s"] == pytest.approx(4000 * each["hit_ratio"])
    assert answer["hot"][-1]["hit_ratio"] == pytest.approx(answer["best_hit_ratio"])


def test_the_recommendation_keeps_the_limits_and_is_a_configuration(trace, tmp_path):
    answer = _json(trace, "--hot", "32MiB", "--memory", "96MiB", "--disk", "200MiB")
    chosen = answer["recommended"]
    assert chosen["hot_bytes"] == 32 * MIB
    assert chosen["host_bytes"] == 96 * MIB
    assert 0 < chosen["disk_bytes"] <= 200 * MIB
    path = tmp_path / "mmcache.yaml"
    path.write_text(chosen["yaml"])
    config = load_config(path, check_machine=False)
    assert config.hot.max_size == chosen["hot_bytes"]
    assert config.host.max_size == chosen["host_bytes"]
    assert config.disk.max_size == chosen["disk_bytes"]


def test_a_tier_that_gains_nothing_is_not_recommended(trace):
    answer = _json(trace, "--hot", "1GiB", "--memory", "1GiB", "--disk", "1GiB")
    assert answer["knee_bytes"] == answer["recommended"]["hot_bytes"]
    assert answer["recommended"]["host_bytes"] > 0
    assert answer["recommended"]["disk_bytes"] == 0
    assert "disk" not in answer["recommended"]["yaml"]


def test_the_encoder_s_speed_gives_costs(trace):
    answer = _json(trace, "--tokens-per-s", "1000", "--memory", "0", "--disk", "0")
    assert answer["encoder_s"] == pytest.approx(800)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("sample", [32_768, 100])
def test_it_fits_its_width_and_its_encoding(sample, width, encoding, trace, tmp_path, capsys):
    options = PlanOptions(
        trace=trace, hot="32MiB", memory="96MiB", disk="1GiB", store=tmp_path, sample=sample
    )
    plan = make_plan(Trace(trace), options)
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_plan(plan, Console(width=width, file=file, highlight=False))
    text = capsys.readouterr().out
    text.encode(encoding)
    tables = text.partition("hot tier alone")[2].partition("recommended")[0]
    assert max(len(line) for line in tables.splitlines()) <= width
    assert "…" not in text
    assert text.count("chosen") == 3
    assert text.count(" knee") == 1
    assert recommended_yaml(plan) in text
    assert (" ±" in text or " +-" in text) == (sample != 32_768)


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_chart_is_a_picture(name, begins, trace, tmp_path):
    out = tmp_path / name
    result = run(trace, "--memory", "96MiB", "--disk", "1GiB", "--plot", out)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--hot", "0"), "no cache without a hot tier"),
        (("--hot", "25%"), "--hot 25%"),
        (("--memory", "4G"), "GiB or GB"),
        (("--disk", "much"), "--disk much"),
        (("--plot", "chart.pdf"), "a .png or a .svg"),
        (("--plot", __file__), "a .png or a .svg"),
    ],
)
def test_what_cannot_be_followed_is_said_in_a_line(options, told, trace):
    result = run(trace, *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_a_chart_that_is_there_is_kept(trace, tmp_path):
    (tmp_path / "there.svg").write_text("kept")
    assert run(trace, "--plot", tmp_path / "there.svg").exit_code == 2
    assert (tmp_path / "there.svg").read_text() == "kept"


def test_without_matplotlib_the_extra_is_named(trace, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(trace, "--plot", tmp_path / "new.svg")
    assert result.exit_code == 2
    assert "pip install '.[plot]'" in result.stderr


def test_the_hot_tier_that_is_chosen_is_looked_at(trace):
    answer = _json(trace, "--hot", "5000000", "--memory", "0", "--disk", "0")
    (found,) = (each for each in answer["hot"] if each["hot_bytes"] == 5_000_000)
    assert found == {name: answer["recommended"][name] for name in found}
    assert "max_size: 5000000 " in answer["recommended"]["yaml"]


@pytest.mark.parametrize("kind", ["zipf", "unique"])
def test_a_workload_is_planned_for(kind, tmp_path):
    path = tmp_path / "made.csv"
    made = CliRunner().invoke(app, ["workload", kind, "--requests", "800", "--out", str(path)])
    assert made.exit_code == 0
    answer = _json(path, "--memory", "1GiB", "--disk", "4GiB")
    assert answer["requests"] == 800
    assert answer["encoder_s"] > 0
    assert answer["largest_bytes"] == 16384 * 7168


@pytest.mark.parametrize("content", ["time,key,bytes\n", "time,key,bytes\n1,a,0\n"])
def test_a_trace_without_sizes_is_refused(content, tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text(content)
    result = run(path)
    assert result.exit_code == 2
    assert "no request with a size" in result.stderr
