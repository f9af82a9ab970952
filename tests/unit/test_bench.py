"""The arithmetic of the bench, and that each measurement can be made."""

import json

import pytest
import torch
from typer.testing import CliRunner

from mmcache_tools.bench import cold, command, device_moves, hot_hits, moves, spilling
from mmcache_tools.bench.pairing import Row, speed_row, time_row, timed_in_turn
from mmcache_tools.cli import app


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


def test_every_measurement_of_the_bench_can_be_made(monkeypatch):
    monkeypatch.setattr(moves, "LARGE_BYTES", 16 * moves.MIB)
    monkeypatch.setattr(cold, "LARGE_BYTES", 16 * moves.MIB)
    measurements = (hot_hits, moves, cold, spilling)
    rows = [row for module in measurements for row in module.measure(rounds=1)]
    assert {row.name for row in rows} == {
        "hot get_single",
        "hot get",
        "host promotion, 8 MB",
        "disk promotion, 8 MB",
        "host promotion, 16 MB",
        "disk promotion, 16 MB",
        "disk promotion, 16 MB, cold",
        "look-up after a prefetch, 8 MB",
        "spill, relaxed",
        "spill, ordered",
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
    return lambda: monkeypatch.setattr(moves, "measure", lambda rounds: [missed])


def test_the_exit_code_says_whether_a_bound_was_missed(measured, capsys):
    assert command.run(quick=True, as_json=False) == 0
    assert "MISSED" not in capsys.readouterr().out
    measured()
    assert command.run(quick=False, as_json=False) == 1
    assert "MISSED" in capsys.readouterr().out


def test_json_has_every_row(measured, capsys):
    measured()
    assert command.run(quick=True, as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [row["holds"] for row in printed["rows"]] == [True, False]
    assert printed["machine"]["cores"] >= 1
