"""The arithmetic of the bench, and that each measurement can be made."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from mmcache_tools.bench import (
    busy_loop,
    cold,
    command,
    device_moves,
    eviction,
    hot_hits,
    inspecting,
    moves,
    populate,
    scale,
    spilling,
)
from mmcache_tools.bench.pairing import (
    Row,
    limit_row,
    p99,
    speed_row,
    time_row,
    timed_in_turn,
    usual_p99,
)
from mmcache_tools.cli import app
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.keys import encode_full_key


def test_contestants_take_turns():
    order = []
    timed_in_turn(
        {"a": lambda n: order.append(("a", n)), "b": lambda n: order.append(("b", n))},
        rounds=2,
        warm_up=1,
    )
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_speed_is_the_inverse_of_a_time():
    medians_s = {"own": 2.0, "reference": 1.0}
    assert speed_row("own", "reference", medians_s, wanted=0.4).ratio == 0.5
    assert time_row("own", "reference", medians_s, wanted=1.3).ratio == 2.0


@pytest.mark.parametrize(
    ("better", "ratio", "wanted", "holds"),
    [
        ("higher", 0.5, 0.4, True),
        ("higher", 0.3, 0.4, False),
        ("lower", 1.2, 1.3, True),
        ("lower", 1.4, 1.3, False),
        ("lower", 99.0, None, True),
    ],
)
def test_a_bound_holds_on_its_own_side(better, ratio, wanted, holds):
    row = Row(
        name="a",
        reference="b",
        ratio=ratio,
        wanted=wanted,
        better=better,
        median_s=1.0,
        reference_s=1.0,
    )
    assert row.holds is holds


def test_a_limit_is_kept_or_not():
    assert limit_row("a", 150.0, 300.0, unit="bytes").ratio == 0.5
    assert limit_row("a", 300.0, 300.0).holds
    assert not limit_row("a", 301.0, 300.0).holds


def test_p99_and_that_of_the_usual_spell():
    quiet = [1.0] * 98 + [2.0, 3.0]
    disturbed = [*quiet, *[50.0] * 100, *quiet]
    assert (p99(quiet), usual_p99(quiet)) == (2.0, 2.0)
    assert (p99(disturbed), usual_p99(disturbed)) == (50.0, 2.0)
    assert (p99([1.0, 5.0]), usual_p99([1.0, 5.0])) == (5.0, 5.0)


def test_a_store_is_filled_without_a_server(tmp_path):
    populate.populate(tmp_path, 50, 2**20)
    with StoreReader.open(tmp_path) as reader:
        records = [entry.record() for entry in reader.entries()]
        assert reader.totals().entries == 50
    assert {record.header.payload_bytes for record in records} == {populate.ENTRY_BYTES}
    assert {record.full_key for record in records} == {encode_full_key(n) for n in range(50)}


def test_the_large_store_needs_room(monkeypatch):
    full = dataclasses.make_dataclass("Usage", [("free", int)])(free=1)
    monkeypatch.setattr(scale.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(RuntimeError, match="--entries"):
        scale.measure(5000, rounds=1)


def test_every_measurement_of_the_bench_can_be_made(monkeypatch):
    monkeypatch.setattr(moves, "LARGE_BYTES", 16 * moves.MIB)
    monkeypatch.setattr(cold, "LARGE_BYTES", 16 * moves.MIB)
    rows = [
        *hot_hits.measure(rounds=1),
        *moves.measure(rounds=1),
        *cold.measure(rounds=1),
        *spilling.measure(rounds=1),
        *eviction.measure(rounds=2),
        *busy_loop.measure(rounds=1, phase_s=0.05),
        *inspecting.measure(rounds=1, entries=2),
        *scale.measure(2000, rounds=1),
    ]
    assert {row.name for row in rows} == {
        "hot get_single",
        "hot get",
        "traced get_single",
        "host promotion, 8 MB",
        "disk promotion, 8 MB",
        "host promotion, 16 MB",
        "disk promotion, 16 MB",
        "disk promotion, 16 MB, cold",
        "look-up after a prefetch, 8 MB",
        "spill, relaxed",
        "spill, ordered",
        "set that evicts, p99",
        "set that evicts while spilling, p99",
        "set that evicts a clean one, p99",
        "step of a busy loop beside spilling, p99",
        "spilling beside a busy loop",
        "step of a busy loop beside a thread committing each entry, p99",
        "a thread committing each entry beside a busy loop",
        "step of a busy loop beside a thread committing each chunk, p99",
        "a thread committing each chunk beside a busy loop",
        "verify, 8 MB entries, warm",
        "mmcache ls of 2,000",
        "mmcache --help",
        "mmcache ls --limit 20",
        "host hit among 2,000",
        "disk hit among 2,000",
        "first disk hit among 2,000",
        "server memory per entry on disk",
        "server memory per host entry",
        "opening 2,000 entries",
        "opening 2,000 after a kill",
    }
    assert all(row.ratio > 0 for row in rows)


def test_every_measurement_on_a_device_can_be_made():
    """On CPU tensors in the device's place, and small: what the ratios are is a GPU's affair."""
    device = torch.device("cpu")
    rows = [
        *device_moves.measure(2, device, entry_bytes=1 << 20),
        *device_moves.measure_beside(2, device, matrix=16),
        *device_moves.measure_locking(1, device, segments=1),
    ]
    assert [row.name for row in rows] == [
        "promotion, 1 MiB",
        "promotion, 1 MiB, page_locked: off",
        "demotion, 1 MiB",
        "8 matrix products beside 4 promotions and a demotion",
        "page-locking 1 GiB",
    ]
    assert all(row.median_s > 0 and row.reference_s > 0 for row in rows)


def test_without_a_gpu_the_bench_for_one_says_so_in_a_line(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    ended = CliRunner().invoke(app, ["bench", "--gpu"])
    assert ended.exit_code == 2
    assert ended.stderr == "mmcache: bench --gpu: torch sees no GPU here\n"
    assert ended.stdout == ""


def test_what_is_measured_on_a_device_is_reported_like_the_rest(monkeypatch, capsys):
    calls = []
    row = {"better": "higher", "median_s": 1e-3, "reference_s": 1e-3, "reference": "copy"}
    missed = Row(name="promotion", ratio=0.5, wanted=0.9, **row)
    monkeypatch.setattr(
        device_moves,
        "measure",
        lambda rounds, device, *, entry_bytes: calls.append((rounds, entry_bytes)) or [missed],
    )
    monkeypatch.setattr(device_moves, "measure_beside", lambda rounds, device: [])
    monkeypatch.setattr(device_moves, "measure_locking", lambda rounds, device: [])
    assert command._measure_on(torch.device("cpu"), quick=True, as_json=False) == 1
    assert calls == [(20, 8 << 20), (20, 64 << 20)]
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "cpu." in printed


@pytest.fixture
def measured(monkeypatch):
    """Stand-ins for the measurements: one bound met, one to be set."""
    row = {"name": "a", "reference": "b", "better": "lower", "median_s": 1e-7, "reference_s": 1e-3}
    met = Row(ratio=1.0, wanted=1.3, **row)
    missed = Row(ratio=2.0, wanted=1.3, **row)
    monkeypatch.setattr(hot_hits, "measure", lambda rounds: [met])
    monkeypatch.setattr(moves, "measure", lambda rounds: [])
    monkeypatch.setattr(cold, "measure", lambda rounds: [])
    monkeypatch.setattr(spilling, "measure", lambda rounds: [])
    monkeypatch.setattr(eviction, "measure", lambda rounds: [])
    monkeypatch.setattr(busy_loop, "measure", lambda rounds, phase_s: [])
    monkeypatch.setattr(inspecting, "measure", lambda rounds: [])
    monkeypatch.setattr(
        scale, "measure", lambda entries, rounds: [limit_row("c", entries, 1e9, unit="bytes")]
    )
    return lambda: monkeypatch.setattr(moves, "measure", lambda rounds: [missed])


def test_the_exit_code_says_whether_a_bound_was_missed(measured, capsys):
    assert command.run(quick=True, as_json=False) == 0
    assert "MISSED" not in capsys.readouterr().out
    measured()
    assert command.run(quick=False, as_json=False, entries=5000) == 1
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "5000 B" in printed


def test_json_has_every_row(measured, capsys):
    measured()
    assert command.run(quick=True, as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [row["holds"] for row in printed["rows"]] == [True, False, True]
    assert printed["rows"][-1]["median_s"] == 20_000
    assert printed["machine"]["cores"] >= 1
