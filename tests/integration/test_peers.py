"""The comparison with the peers: its systems, its processes, its faults, and what is made of it.

Owns: everything of it that needs no download. Does not own: the ratios of a real run, and SGLang's
class (tests/engines/test_peers.py).
"""

import dataclasses

import pytest
import torch
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.peers import bounds, endings, environments, page, tables, turns
from mmcache_tools.peers.environments import CannotRunError, Environment
from mmcache_tools.peers.measuring import faults, growth, interference, limits, micro, replay
from mmcache_tools.peers.registry import SYSTEMS, Entry, system_class
from mmcache_tools.peers.system import Budgets, InFront, embedding, is_of, is_whole
from mmcache_tools.workload import kinds

HERE = ["ours", "ours-relaxed", "diskcache", "files"]  # what needs nothing but this environment
ROWS = 20
SIZE = ROWS * 7168


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    said = []
    made = turns.Systems(["ours", "files"], tmp_path_factory.mktemp("peers"), said.append)
    yield made
    made.close()


def budgets(folder, **changed):
    return Budgets(folder=folder, **{"hot_bytes": 4 * SIZE, "disk_bytes": 20 * SIZE, **changed})


# The systems


@pytest.mark.parametrize("name", HERE)
def test_a_system_serves_what_it_was_given_also_after_a_restart(name, tmp_path):
    system = system_class(name)(budgets(tmp_path))
    assert system.get(7) is None
    for key in range(8):
        assert system.set(key, embedding(key, ROWS))
        system.settle()
    system = system.restart()
    try:
        assert all(is_whole(key, system.get(key)) for key in range(8))
        assert system.get(100) is None
    finally:
        system.close()


@pytest.mark.parametrize("name", HERE)
def test_a_system_keeps_to_its_disk_budget(name, tmp_path):
    system = system_class(name)(budgets(tmp_path))
    for key in range(60):
        system.set(key, embedding(key, ROWS))
        system.settle()
    system.close()
    held = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert held < 1.7 * 20 * SIZE


def test_an_embedding_tells_its_key():
    assert is_of(3, embedding(3, ROWS))
    assert not is_of(4, embedding(3, ROWS))
    damaged = embedding(3, ROWS).view(torch.int16)
    damaged[ROWS // 2, 5] ^= 1
    assert is_of(3, damaged)
    assert not is_whole(3, damaged.view(torch.bfloat16))


def test_in_front_of_a_system_without_a_device_tier_stands_a_bounded_lru(tmp_path):
    below = system_class("files")(budgets(tmp_path, disk_bytes=2 * SIZE))
    asked = InFront(below)
    for key in range(6):
        asked.set(key, embedding(key, ROWS))
    served = [asked.get(key) is not None for key in range(6)]
    assert served == [False, False, True, True, True, True]


# Their processes


def test_what_a_process_dies_of_is_told(systems):
    with systems.new_child("ours") as child, pytest.raises(CannotRunError, match="flight: Module"):
        child.ask("flight")
    with systems.new_child("ours") as child:
        child.kill()
        with pytest.raises(CannotRunError, match="its process was ended"):
            child.ask("describe")


def test_an_answer_that_does_not_come_ends_the_process(systems, tmp_path):
    child = systems.new_child("files")
    with pytest.raises(CannotRunError, match="no answer in"):
        child.ask("faults", 0.5, fault="write", folder=str(tmp_path))
    child.close()


def test_a_system_that_cannot_be_installed_is_listed_with_what_was_tried(tmp_path, monkeypatch):
    missing = Environment(name="missing", packages=(str(tmp_path / "nothing-1.0.whl"),))
    entry = Entry(module="ours", kind="Ours", environment=missing)
    monkeypatch.setitem(SYSTEMS, "missing", entry)
    made = turns.Systems(["missing"], tmp_path, lambda _: None)
    assert made.names == []
    assert "cannot be installed" in made.cannot_run["missing"]
    assert "tried: " in made.cannot_run["missing"]


def test_a_child_imports_its_own_packages_before_these(tmp_path):
    python = environments.interpreter(environments.OURS, tmp_path)
    lines = (tmp_path / "ours").rglob("zz-ours.pth")
    assert "addsitedir" in next(lines).read_text()
    assert python.exists()
    assert "PYTHONPATH" not in environments.environment_variables()


def test_a_system_that_is_not_known_is_refused():
    result = CliRunner().invoke(app, ["compare", "--system", "redis"])
    assert result.exit_code == 2
    assert "choose among ours," in result.output


def test_a_damaged_trace_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "turns").write_text("{}\n")
    arguments = ["compare", "--conversations", str(tmp_path / "turns")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "turns, line 1" in result.output


# What is measured


@pytest.mark.parametrize("name", HERE)
def test_single_operations_of_a_system_are_those_of_its_tiers(name):
    system = system_class(name)
    gave = micro.measure(system, size_bytes=SIZE, rounds=1)
    assert gave["failures"] == {}
    operations = {"set", "set, evicting", "miss", "spill", "restart to first hit"}
    operations |= {"disk promotion, warm", "disk promotion, cold"}
    if name.startswith("ours"):
        operations |= {"hot hit", "host promotion"}
    assert set(gave["times"]) == operations
    assert all(seconds > 0 for values in gave["times"].values() for seconds in values)


def test_the_limits_are_those_of_operations():
    assert {"hot hit", "host promotion"} <= set(limits.measure(None, size_bytes=SIZE, rounds=1))


def test_a_replay_saves_what_it_served(tmp_path):
    (tmp_path / "trace.csv").write_text(
        f"time,key,bytes,tokens,cost\n0,1,{SIZE},1,0.5\n1,1,{SIZE},1,0.5\n2,2,{SIZE},1,0.25\n"
    )
    options = {"trace": str(tmp_path / "trace.csv"), "scale": 1000, "folder": str(tmp_path)}
    room = {"hot_bytes": 4 * SIZE, "host_bytes": 0, "disk_bytes": 8 * SIZE}
    for name in HERE:
        folder = str(tmp_path / name)
        gave = replay.measure(
            system_class(name), start=0, stop=3, **{**options, "folder": folder, "scale": 1}, **room
        )
        assert (gave["hits"], gave["wrong"], gave["saved_s"]) == (1, 0, 0.5)
        assert gave["possible_s"] == 1.25
        assert gave["served_bytes"] == SIZE


def test_both_halves_of_a_replay_are_played_around_a_restart(systems):
    played = list(zip(range(200), kinds.zipf(keys=20, alpha=1.0), strict=False))
    result = turns.replay(systems, {"Zipf": [request for _, request in played]}, scale=64)
    assert result["failures"] == {}
    for halves in result["figures"]["Zipf"]["systems"].values():
        assert halves["first"]["requests"] == halves["restarted"]["requests"] == 100
        assert halves["restarted"]["saved_s"] > 0
        assert halves["first"]["saved_s"] <= result["figures"]["Zipf"]["unlimited_s"]["first"]


@pytest.mark.parametrize(
    ("fault", "of_files"),
    [
        ("truncated", {"right": 0, "get_errors": 12}),
        ("flipped", {"right": 0, "wrong": 12}),
        ("killed", {}),
        ("full", {}),
    ],
)
def test_faults_show_who_serves_what_is_not_true(systems, fault, of_files):
    result = endings.faults(systems, [fault])
    if fault == "full" and not result["figures"]:  # where nothing may be mounted, it is said
        assert set(result["failures"]) == {"ours, full", "files, full"}
        return
    assert result["failures"] == {}
    outcome = result["figures"][fault]
    assert (outcome["ours"]["wrong"], outcome["ours"]["get_errors"]) == (0, 0)
    assert outcome["ours"]["right"] + outcome["ours"]["missing"] >= 12
    assert of_files.items() <= outcome["files"].items()


@pytest.mark.parametrize("name", HERE)
def test_no_fault_is_needed_for_right_answers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_damage", lambda *_: None)
    gave = faults.measure(system_class(name), fault="flipped", folder=str(tmp_path))
    assert (gave["right"], gave["missing"], gave["wrong"]) == (12, 0, 0)


def test_growth_goes_as_far_as_it_comes(systems):
    result = endings.growth(systems, most=1000, fill_s=60)
    for of in result["figures"].values():
        assert list(of["figures"]) == ["100", "1000"]
        assert all(at["found"] == 1.0 for at in of["figures"].values())
    stopped = growth.measure(system_class("files"), most=1000, fill_s=0.0)
    assert stopped == {"figures": {}, "reached": 0}


def test_a_busy_loop_counts_its_calls_as_its_own():
    gave = interference.measure(system_class("files"), size_bytes=SIZE, seconds=0.1)
    assert gave["turn beside"][2] > gave["turn alone"][0]
    assert gave["hits"][0] == gave["hits"][1] > 0
    assert interference.percentiles([1.0] * 990 + [2.0] * 10) == [1.0, 2.0, 2.0]


# What is made of it


def half(saved_s):
    keys = ["requests", "hits", "wrong", "refused", "served_bytes", "written_bytes", "get_p50_s"]
    return {**dict.fromkeys([*keys, "get_p99_s"], 0), "possible_s": 10.0, "saved_s": saved_s}


def spread(median):
    return {"median": median, "low": median, "high": median, "number": 3}


def made_up(*, hot_s=1.0, saved=(6.0, 2.0, 5.0)):
    names = ["ours", "sglang", "files"]
    described = {
        name: {"name": name.title(), "version": "1", "tiers": ["disk"], "cannot": {"bound": "|"}}
        for name in names
    }
    played = {
        name: {"first": half(s), "restarted": half(s)} for name, s in zip(names, saved, strict=True)
    }
    hits = {"ours": spread(hot_s * 1e-7), "sglang": spread(1e-7), "limits": spread(5e-8)}
    figures = {"hot hit": hits, "spill": {"ours": spread(0.01), "files": spread(0.02)}}
    loop = {
        name: {what: [1e-3, 2e-3, 3e-3] for what in ("turn alone", "turn beside", "get", "set")}
        | {"hits": [1.0, 2.0]}
        for name in names
    }
    counts = {"right": 1, "missing": 2, "wrong": 3, "get_errors": 4}
    grown = {"100": {"get_p50_s": 1e-6, "found": 1.0, "set_s": 1e-5}}
    workload = {
        "requests": 9, "keys": 3, "working_set_bytes": 100, "scale": 16, "hot_bytes": 5,
        "host_bytes": 10, "disk_bytes": 50, "unlimited_s": {"first": 8.0, "restarted": 8.0},
        "systems": played,
    }  # fmt: skip
    result = {
        "machine": {
            "processor": "x86", "cores": 2, "memory_bytes": 2**34, "system": "Linux",
            "python": "3.11", "torch": "2", "gpu": None,
        },
        "quick": False, "took_s": 60.0, "systems": described, "cannot_run": {"redis": "no wheel"},
        "micro": {"figures": {"4000000": figures}, "failures": {"files, 4 MB": "broken"}},
        "replay": {"figures": {"Zipf": workload}, "failures": {}},
        "interference": {"figures": loop, "failures": {}},
        "growth": {"figures": {"files": {"figures": grown, "reached": 100}}, "failures": {}},
        "faults": {"figures": {"flipped": {"files": counts}}, "failures": {}},
    }  # fmt: skip
    result["bounds"] = [dataclasses.asdict(bound) for bound in bounds.of(result)]
    return result


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, [True, True, True, True, True]),
        ({"hot_s": 1.3}, [False, True, True, True, True]),
        ({"saved": (5.9, 2.0, 5.0)}, [True, False, True, False, True]),
        ({"saved": (6.0, 2.0, 6.0)}, [True, True, False, True, False]),
    ],
)
def test_the_bounds_are_those_that_were_promised(changed, holds):
    assert [bound.holds for bound in bounds.of(made_up(**changed))] == holds


def test_three_times_is_not_asked_for_where_no_cache_could():
    result = made_up(saved=(7.0, 3.0, 5.0))
    asked = [one["is_asked"] for one in result["bounds"]]
    assert asked == [True, False, True, False, True]
    assert all(one["holds"] for one in result["bounds"])
    (row,) = [row for row in tables.bounds(result).rows if "Zipf, beside the static" in row[0]]
    assert row[1:] == ["2.33", "a cache without bounds: 2.67", "not asked for"]


def test_the_page_has_every_table_and_its_charts(tmp_path):
    result = made_up()
    path = tmp_path / "peers.md"
    page.check(path)
    page.write(result, path)
    text = path.read_text()
    for table in tables.all_tables(result):
        assert f"## {table.title}" in text
    assert "**not run**: there is no GPU here" in text
    for told in ("no wheel", "broken", "bound: \\|"):
        assert told in text
    charts = sorted(file.name for file in (tmp_path / "pictures").iterdir())
    assert len(charts) == 8
    for chart in charts:
        assert f"(pictures/{chart})" in text
        assert (tmp_path / "pictures" / chart).read_bytes().startswith(b"\x89PNG")


def test_the_tables_are_printed(capsys):
    tables.show(made_up())
    assert "Served after damage" in capsys.readouterr().out
