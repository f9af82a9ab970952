"""Counters and the one log line for each cause and minute, on a manual clock.

Owns: FaultLog and snapshots. Does not own: where faults come from.
"""

import ast
import json
import logging
import re
from pathlib import Path

import pytest

import tiered_mmcache
from tiered_mmcache.metrics.counters import CacheStats, Counters, FaultLog, OncePerMinute
from tiered_mmcache.metrics.remedies import REMEDIES, log_fields, remedy_of
from tiered_mmcache.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock(50.0)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, logger="tiered_mmcache")
    return lambda: [record.getMessage() for record in caplog.records]


def test_every_fault_is_counted_and_the_first_is_logged(clock, lines):
    counters = Counters()
    faults = FaultLog(counters, clock)
    for _ in range(1000):
        faults.report("digest", "a chunk does not match its digest")
    assert counters.faults == {"digest": 1000}
    assert lines() == [
        "fault digest (1 so far), served as a miss: a chunk does not match its digest. "
        + remedy_of("digest")
    ]
    assert "mmcache verify" in remedy_of("digest")


def test_a_line_carries_its_fields(clock, caplog):
    faults = FaultLog(Counters(), clock)
    faults.report("digest", "p")
    faults.report("permission", "the text that says what to do")
    known, unknown = caplog.records
    assert (known.mmcache_cause, known.mmcache_total) == ("digest", 1)
    assert known.mmcache_remedy == remedy_of("digest")
    assert unknown.mmcache_remedy == ""
    assert unknown.getMessage().endswith(": the text that says what to do")


def test_every_cause_that_the_server_names_has_a_remedy():
    package = Path(tiered_mmcache.__file__).parent
    named = set()
    for file in package.glob("**/*.py"):
        found = re.findall(
            r'(?:report|_fault|RecordError|_bury_dead|_ends\.append)\(\(?\s*"(\w+)"',
            file.read_text(encoding="utf-8"),
        )
        named |= set(found)
    assert {"digest", "read_timeout", "internal", "silent"} <= named
    assert named <= set(REMEDIES)


def test_a_cause_is_logged_again_after_a_minute(clock, lines):
    faults = FaultLog(Counters(), clock)
    for second in range(150):
        clock.now_s = 50.0 + second
        faults.report("digest", "p")
    assert [line.split(",")[0] for line in lines()] == [
        "fault digest (1 so far)",
        "fault digest (61 so far)",
        "fault digest (121 so far)",
    ]


def test_causes_are_logged_apart(clock, lines):
    counters = Counters()
    faults = FaultLog(counters, clock)
    for cause in ("digest", "truncated", "digest", "truncated"):
        faults.report(cause, "p")
    assert counters.faults == {"digest": 2, "truncated": 2}
    assert len(lines()) == 2


def test_counters_begin_at_nothing_and_are_not_shared():
    one, other = Counters(), Counters()
    one.misses["absent"] += 1
    assert other.misses == {}
    assert (other.hot_hits, other.host_hits, other.disk_hits) == (0, 0, 0)
    with pytest.raises(AttributeError):
        one.misspelled = 1


def test_a_snapshot_is_plain_and_ready_for_json():
    stats = CacheStats(
        hot={"hits": 1},
        host={"hits": 2},
        disk={"hits": 3},
        misses=4,
        misses_by_reason={"absent": 4},
        drops={},
        memory_only={},
        faults={"digest": 1},
        encoding={"encode_seconds": 1.5},
        prefetches={"asked": 1},
    )
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()
    assert stats.as_dict()["hot"] == {"hits": 1}
    stats.as_dict()["hot"]["hits"] = 99
    assert stats.hot == {"hits": 1}


def test_lines_of_one_kind_pass_once_a_minute(clock):
    def passes(text, *arguments):
        record = logging.LogRecord("n", logging.WARNING, "f", 1, text, arguments, None)
        return once.filter(record)

    once = OncePerMinute(clock)
    assert passes("failed: %s", 1)
    assert passes("another: %s", 1)
    clock.now_s += 59.0
    assert not passes("failed: %s", 2)
    clock.now_s += 1.0
    assert passes("failed: %s", 3)
    assert not passes("failed: %s", 4)


_LOUD = ("log.warning", "log.error", "log.exception")


def log_calls():
    """Every call in the package that logs a warning or worse."""
    folder = Path(tiered_mmcache.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _LOUD:
                yield f"{file.relative_to(folder)}:{node.lineno}", node


def test_every_line_of_the_log_carries_its_fields():
    calls = dict(log_calls())
    assert len(calls) > 20
    without = [
        where for where, call in calls.items() if "extra" not in {k.arg for k in call.keywords}
    ]
    assert without == []


def test_the_fields_of_a_line_name_a_remedy():
    assert log_fields("digest") == {"mmcache_cause": "digest", "mmcache_remedy": REMEDIES["digest"]}
    assert log_fields("other", "Do this.")["mmcache_remedy"] == "Do this."
