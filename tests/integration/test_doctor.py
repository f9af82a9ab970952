"""The doctor: what it finds on machines that are played, and that it leaves nothing behind."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.doctor import disk_checks, machine_checks
from tiered_mmcache.configuration.machine import Memory


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def findings(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return {each["check"]: each for each in json.loads(result.stdout)["findings"]}


@pytest.fixture
def file(tmp_path, maker):
    """A configuration whose store has one entry."""
    maker.put(1, b"one")
    made = tmp_path / "mmcache.yaml"
    disk = {"path": str(maker.folder), "max_size": "64MiB"}
    host = {"max_size": "8MiB", "huge_pages": True}
    made.write_text(yaml.safe_dump({"namespace": "m", "host": host, "disk": disk}))
    return made


def test_without_a_configuration_the_machine_is_looked_at():
    found = findings()
    assert set(found) == {
        *("lmdb", "torch", "sglang", "sglang_plug_in", "accelerators", "memory"),
        *("page_locking", "numa"),
    }
    assert found["sglang_plug_in"]["state"] == "ok"
    assert found["lmdb"]["found"].startswith("LMDB 0.9.")


def test_the_disk_is_measured_and_nothing_is_left(file, maker):
    before = sorted(maker.folder.iterdir())
    found = findings(file)
    assert "/s written" in found["disk_speed"]["found"]
    assert found["store"]["found"] == "1 entries"
    assert found["configuration"]["state"] == "ok"
    assert sorted(maker.folder.iterdir()) == before
    assert "disk_speed" not in findings(file, "--no-speed")


def test_a_disk_that_cannot_be_measured_is_a_note(file, monkeypatch):
    monkeypatch.setattr(disk_checks, "_LEAST_ROOM_BYTES", 2**62)
    speed = findings(file)["disk_speed"]
    assert (speed["state"], speed["found"]) == ("note", "not measured: No space left on device")


def test_a_configuration_that_cannot_be_used_is_bad(file):
    file.write_text("hot:\n  max_size: 4G\n")
    found = findings(file, code=1)["configuration"]
    assert found["state"] == "bad"
    assert "hot.max_size" in found["found"]
    assert found["remedy"].startswith("Write GiB")
    shown = run(file).stdout
    assert shown.startswith("bad   configuration")


@pytest.mark.parametrize(
    ("kind", "state"), [("ext4", "ok"), ("overlay", "note"), ("tmpfs", "note"), ("nfs", "bad")]
)
def test_file_systems(file, monkeypatch, kind, state):
    monkeypatch.setattr("tiered_mmcache.disk.folder.file_system_of", lambda _: kind)
    monkeypatch.setattr(disk_checks, "file_system_of", lambda _: kind)
    found = findings(file, "--no-speed", code=1 if state == "bad" else 0)["file_system"]
    assert (found["state"], found["found"]) == (state, kind)
    assert (found["remedy"] is None) is (state == "ok")


def test_too_little_memory_is_bad(file, monkeypatch):
    little = Memory(total_bytes=2**30, available_bytes=2**20, bound="the limit")
    monkeypatch.setattr(machine_checks, "memory", lambda: little)
    found = findings(file, "--no-speed", code=1)["memory"]
    assert found["remedy"] == "Lower host.max_size, or raise the limit."


@pytest.mark.parametrize(("limit_bytes", "state"), [(None, "ok"), (2**30, "ok"), (2**20, "note")])
def test_the_limit_of_locked_memory(file, monkeypatch, limit_bytes, state):
    monkeypatch.setattr(machine_checks, "locked_memory_limit_bytes", lambda: limit_bytes)
    assert findings(file, "--no-speed")["page_locking"]["state"] == state


def test_a_plug_in_that_is_not_installed_is_a_note(monkeypatch):
    monkeypatch.setattr(machine_checks, "_PLUG_INS", "no.such.group")
    found = findings()["sglang_plug_in"]
    assert found["state"] == "note"
    assert "pip install" in found["remedy"]


def test_devices_nodes_and_huge_pages(file, monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "node0", "node1"):
        (tmp_path / name).touch()
    (tmp_path / "enabled").write_text("always within_size [advise] never")
    monkeypatch.setattr(machine_checks, "_DEVICES", tmp_path)
    monkeypatch.setattr(machine_checks, "_NODES", tmp_path)
    monkeypatch.setattr(machine_checks, "_SHMEM_HUGE_PAGES", tmp_path / "enabled")
    found = findings(file, "--no-speed")
    assert found["accelerators"]["found"] == "2 of NVIDIA"
    assert found["numa"]["found"] == "2 memory nodes"
    assert found["huge_pages"]["state"] == "ok"
    (tmp_path / "enabled").write_text("always advise [never]")
    assert "echo advise" in findings(file, "--no-speed")["huge_pages"]["remedy"]


def test_a_damaged_store_is_bad(file, maker):
    data_file = maker.folder / "data.mdb"
    data_file.write_bytes(b"nonsense" * 4096)
    found = findings(file, "--no-speed", code=1)["store"]
    assert (found["state"], bool(found["remedy"])) == ("bad", True)
