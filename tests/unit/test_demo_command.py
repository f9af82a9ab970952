"""The command line, and what the demo says when it cannot run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmcache_tools import cli
from mmcache_tools.demo import command, second
from mmcache_tools.demo.command import DemoOptions, run_demo

OPTIONS = DemoOptions(
    store=Path("demo-store"),
    requests=40,
    hot="1MiB",
    host="1MiB",
    disk="8MiB",
    seed=0,
    as_json=False,
)


def test_the_command_line_loads_neither_torch_nor_the_cache():
    code = "import sys, mmcache_tools.cli as c; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert not {"torch", "numpy", "lmdb", "pydantic"} & set(loaded.split())


def test_runs_as_a_module():
    shown = subprocess.run(
        [sys.executable, "-m", "mmcache_tools", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: mmcache" in shown.stdout


def test_demo_hands_its_options_over(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "run_demo", lambda options: seen.append(options) or 7)
    words = ["--store", "demo-store", "--requests", "40"]
    words += ["--hot", "1MiB", "--host", "1MiB", "--disk", "8MiB"]
    assert CliRunner().invoke(cli.app, ["demo", *words]).exit_code == 7
    assert seen == [OPTIONS]


def test_both_processes_get_the_same_configuration():
    config = OPTIONS.cache_config("cpu")
    assert config["disk"] == {"path": str(Path.cwd() / "demo-store"), "max_size": "8MiB"}
    assert config["hot"] == {"max_size": "1MiB", "device": "cpu"}
    assert config["namespace"] == command.NAMESPACE


def test_a_missing_package_is_told_with_its_remedy(monkeypatch, capsys):
    def missing(*args):
        raise ModuleNotFoundError("No module named 'skimage'", name="skimage.data")

    monkeypatch.setattr(command, "_play_both", missing)
    assert run_demo(OPTIONS) == 2
    assert "pip install 'tiered-mmcache[demo]'" in capsys.readouterr().err


def test_another_missing_module_is_a_bug_and_not_hidden(monkeypatch):
    def missing(*args):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(command, "_play_both", missing)
    with pytest.raises(ModuleNotFoundError):
        run_demo(OPTIONS)


def test_a_second_process_without_a_result_fails_the_demo(monkeypatch, capsys):
    def fail(handover):
        raise second.SecondProcessError("it ended with 3:\nwhat it printed")

    monkeypatch.setattr(command, "_play_first", lambda *args: (None, None))
    monkeypatch.setattr(second, "start", fail)
    assert run_demo(replace(OPTIONS, as_json=True)) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["ok"] is False
    assert "what it printed" in shown.err
