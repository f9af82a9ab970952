"""Every command has help with an example and a section in docs/cli.md; its JSON shapes are true."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.inspection.outcome import ExitCode
from mmcache_tools.inspection.rows import EntryRow
from tiered_mmcache.disk.audit import Cause

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = sorted(typer.main.get_command(app).commands)

INSPECTING = ["ls", "show", "stats", "verify"]
CHANGING = ["rm", "prune", "compact", "copy", "export"]
ARGUMENTS = {"show": ["0000"], "rm": ["0000"], "prune": ["--older-than", "1d"]}
ARGUMENTS["copy"] = ["copied"]
ARGUMENTS["export"] = ["0000", "--to", "npy", "--out", "exported"]


def _section(name):
    match = re.search(rf"^#+ mmcache {name}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, f"docs/cli.md has no section `mmcache {name}`"
    return match[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_and_has_help(name):
    assert f"$ mmcache {name} " in _section(name)
    assert f"[`mmcache {name}`](#mmcache-{name})" in PAGE
    command = typer.main.get_command(app).commands[name]
    assert f"Example: mmcache {name} " in command.help
    for parameter in command.params:
        assert parameter.help, f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_printed(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.stdout


@pytest.mark.parametrize("name", INSPECTING + CHANGING)
def test_the_documented_shape_is_json_of_that_command(name):
    (text,) = re.findall(r"^```json\n(.*?)^```$", _section(name), re.MULTILINE | re.DOTALL)
    shape = json.loads(text)
    assert shape["command"] == name
    if name == "ls":
        assert list(shape["entries"][0]) == list(EntryRow.__slots__)


@pytest.mark.parametrize("name", INSPECTING + CHANGING)
def test_the_documented_shape_has_the_fields_of_a_real_answer(name, tmp_path, monkeypatch):
    from tiered_mmcache.disk.changes import PutEntry
    from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
    from tiered_mmcache.disk.store import Store
    from tiered_mmcache.entries.record import EntryHeader

    settings = OpenSettings(
        path=tmp_path, budget_bytes=2**24, largest_entry_bytes=2**20, synchronous=False
    )
    opened = open_for_writing(settings)
    header = EntryHeader(
        class_tag="embedding",
        dtype="uint8",
        item_bytes=1,
        shape=(4,),
        extras=b"",
        device_type="cpu",
    )
    change = PutEntry(
        store_key=bytes(16),
        full_key=b"",
        namespace="n",
        generation=bytes(16),
        header=header,
        parts=[memoryview(b"1234")],
    )
    Store(opened.environment, budget_bytes=2**24).apply([change])
    opened.close()
    monkeypatch.chdir(tmp_path.parent)
    arguments = [name, str(tmp_path), *ARGUMENTS.get(name, []), "--json"]
    answer = json.loads(CliRunner().invoke(app, arguments).stdout)
    (text,) = re.findall(r"^```json\n(.*?)^```$", _section(name), re.MULTILINE | re.DOTALL)
    assert list(answer) == list(json.loads(text))


def test_causes_and_exit_codes_are_documented():
    for cause in Cause:
        assert f"| `{cause.value}` |" in PAGE
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("trace info", ["requests.csv"]),
        ("plan", ["requests.csv", "--memory", "1KiB", "--disk", "0"]),
    ],
)
def test_the_documented_shape_of_an_answer_about_a_trace(name, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("requests.csv").write_text("time,key,bytes\n1,a,10\n2,a,10\n")
    (text,) = re.findall(
        r"^```json\n(.*?)^```$", _section(name.split()[0]), re.MULTILINE | re.DOTALL
    )
    result = CliRunner().invoke(app, [*name.split(), *arguments, "--json"])
    answer, shape = json.loads(result.stdout), json.loads(text)
    assert list(answer) == list(shape)
    assert answer["command"] == shape["command"] == name
    for field, value in shape.items():
        if isinstance(value, dict):
            assert list(answer[field]) == list(value)
    if name == "plan":
        assert list(answer["hot"][0]) == list(shape["hot"][0])
        assert list(answer["host"][0]) == list(shape["hot"][0])


def test_the_documented_shape_of_what_top_says(tmp_path):
    sample = 'mmcache_budget_bytes{namespace="n",cache="0",tier="hot"} 1.0\n'
    (tmp_path / "mmcache-1-0.prom").write_text(sample)
    answer = json.loads(CliRunner().invoke(app, ["top", str(tmp_path), "--json"]).stdout)
    (text,) = re.findall(r"^```json\n(.*?)^```$", _section("top"), re.MULTILINE | re.DOTALL)
    shape = json.loads(text)
    assert list(answer) == list(shape)
    assert list(answer["caches"][0]) == list(shape["caches"][0])
    assert set(answer["caches"][0]["tiers"]["hot"]) <= set(shape["caches"][0]["tiers"]["hot"])


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands["trace"].commands))
def test_every_command_of_trace_is_documented_and_has_help(name):
    assert f"$ mmcache trace {name} " in _section("trace")
    result = CliRunner().invoke(app, ["trace", name, "--help"])
    assert f"Example: mmcache trace {name} " in " ".join(result.stdout.split())
    for parameter in typer.main.get_command(app).commands["trace"].commands[name].params:
        assert parameter.help


def test_pictures_are_there_in_light_and_dark():
    named = re.findall(r'(?:src|srcset)="(pictures/[^"]+)"', PAGE)
    assert {"pictures/plan-dark.svg", "pictures/top-light.svg"} <= set(named)
    for name in named:
        picture = Path(__file__).resolve().parents[2] / "docs" / name
        assert picture.read_text(encoding="utf-8").startswith("<svg"), name


CONFIGURING = sorted(typer.main.get_command(app).commands["config"].commands)


@pytest.mark.parametrize("name", CONFIGURING)
def test_every_command_of_config_is_documented_and_has_help(name):
    assert f"$ mmcache config {name}" in _section("config")
    result = CliRunner().invoke(app, ["config", name, "--help"])
    assert f"Example: mmcache config {name}" in " ".join(result.stdout.split())
    for parameter in typer.main.get_command(app).commands["config"].commands[name].params:
        assert parameter.help
