"""The config commands: what they accept is what a server accepts."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.configuring import starting
from mmcache_tools.configuring.schema import configuration_schema
from tiered_mmcache.config import (
    CacheConfig,
    DiskConfig,
    HostConfig,
    HotConfig,
    MetricsConfig,
    TraceConfig,
    load_config,
)
from tiered_mmcache.errors import ConfigError

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def run(*arguments):
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "mmcache.yaml"
    disk = {"path": str(tmp_path / "store"), "max_size": "50%", "read_timeout": "500ms"}
    made.write_text(yaml.safe_dump({"namespace": "m", "hot": {"max_size": "1MiB"}, "disk": disk}))
    return made


def test_check_says_what_a_configuration_comes_to(file):
    result = run("check", file)
    assert result.exit_code == 0, result.output
    assert re.search(r"^hot\.max_size +1\.0MiB \(1048576 bytes\)$", result.stdout, re.MULTILINE)
    assert re.search(r"^disk\.read_timeout +0\.5$", result.stdout, re.MULTILINE)
    checked = json.loads(run("check", file, "--json").stdout)
    assert (checked["ok"], checked["problem"]) == (True, None)
    assert checked["configuration"]["hot"]["max_size"] == 2**20
    assert checked["configuration"]["host"] is None
    assert checked["configuration"]["disk"]["max_size"] > 0


def test_check_finds_a_mistake_and_says_what_to_write(file):
    file.write_text("hot:\n  max_size: 4G\n")
    result = run("check", file)
    assert result.exit_code == 1
    assert "hot.max_size" in result.stderr
    assert "Write GiB or GB" in result.stderr
    checked = run("check", file, "--json")
    assert checked.exit_code == 1
    answer = json.loads(checked.stdout)
    assert (answer["ok"], answer["configuration"]) == (False, None)
    assert answer["problem"]["key"] == "hot.max_size"
    assert answer["problem"]["value"] == "4G"


def test_check_refuses_sizes_beyond_the_machine(file):
    file.write_text("host:\n  max_size: 900TiB\n")
    assert run("check", file).exit_code == 1


def test_a_file_that_is_not_there_ends_with_three(tmp_path):
    result = run("check", tmp_path / "none.yaml")
    assert result.exit_code == 3
    assert "none.yaml" in result.stderr


def test_the_schema_has_every_key_and_no_other():
    schema = json.loads(run("schema").stdout)
    sections = {
        "hot": HotConfig,
        "host": HostConfig,
        "disk": DiskConfig,
        "metrics": MetricsConfig,
        "trace": TraceConfig,
    }
    assert set(schema["properties"]) == {"namespace", *sections}
    for section in sections.values():
        described = schema["$defs"][section.__name__]
        names = {field.alias or name for name, field in section.model_fields.items()}
        assert set(described["properties"]) == names
        assert described["additionalProperties"] is False


def _fits(described, value):
    """Whether a value fits, for as much of JSON schema as is used."""
    if "anyOf" in described:
        return any(_fits(each, value) for each in described["anyOf"])
    if "enum" in described:
        return value in described["enum"]
    if "$ref" in described:
        return _fits(configuration_schema()["$defs"][described["$ref"].rpartition("/")[2]], value)
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
    if not isinstance(value, kinds[described["type"]]):
        return False
    pattern = described.get("pattern")
    return pattern is None or re.search(pattern, value) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("HotConfig.max_size", each) for each in (0, 12, "12", "4GiB", "1.5 MB", "4G", "25%")),
        *(("HostConfig.max_size", each) for each in ("25%", "4GiB", "4 parsecs", 1.5)),
        *(("HostConfig.demote_wait", each) for each in (0, 1.5, "2s", "500 ms", "1min", "7d", "2")),
        *(("HostConfig.page_locked", each) for each in ("auto", True, "on", "maybe")),
        *(("DiskConfig.durability", each) for each in ("relaxed", "none")),
    ],
)
def test_the_schema_agrees_with_the_server(key, value):
    section, name = key.split(".")
    mapping = {"hot": {"max_size": 1}} if section == "HotConfig" else {}
    others = {"HostConfig": {"max_size": "1MiB"}, "DiskConfig": {"path": "/s", "max_size": "1MiB"}}
    short = section.removesuffix("Config").lower()
    mapping[short] = {**others.get(section, {}), name: value}
    try:
        CacheConfig.from_mapping({"namespace": "m", **mapping}, check_machine=False)
        accepted = True
    except ConfigError:
        accepted = False
    described = configuration_schema()["$defs"][section]["properties"][name]
    assert _fits(described, value) is accepted


def test_the_schema_takes_the_documented_configuration():
    (text, *_) = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENTED.read_text(), re.M | re.S)
    schema = configuration_schema()
    for name, section in yaml.safe_load(text).items():
        if isinstance(section, dict):
            properties = schema["$defs"][f"{name.title()}Config"]["properties"]
            for key, value in section.items():
                assert _fits(properties[key], value), f"{name}.{key}: {value}"


def test_init_writes_what_check_accepts(tmp_path):
    out = tmp_path / "new.yaml"
    result = run("init", "--out", out, "--namespace", "a: b # c", "--store", tmp_path / "store")
    assert result.exit_code == 0, result.output
    assert out.read_text().count("#") > 8
    config = load_config(out)
    assert config.namespace == "a: b # c"
    assert config.disk.path == tmp_path / "store"
    assert run("check", out).exit_code == 0
    printed = run("init", "--namespace", "a: b # c", "--store", tmp_path / "store").stdout
    assert yaml.safe_load(printed).keys() == yaml.safe_load(out.read_text()).keys()


def test_init_never_overwrites(file):
    before = file.read_bytes()
    result = run("init", "--out", file)
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert file.read_bytes() == before


def test_init_refuses_what_no_server_takes(tmp_path):
    result = run("init", "--namespace", "")
    assert result.exit_code == 3
    assert "namespace" in result.stderr


@pytest.mark.parametrize(
    ("count_bytes", "text"), [(5 * 2**30 + 7, "5GiB"), (2**29, "512MiB"), (12, "1MiB")]
)
def test_sizes_are_rounded_down(count_bytes, text):
    assert starting._rounded(count_bytes) == text
