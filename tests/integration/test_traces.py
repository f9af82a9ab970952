"""A trace of a running cache: what is in it, its bounds, and that it harms nobody.

Owns: recording, `mmcache trace`, and the file's format. Does not own: plans.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mmcache_tools.cli import app
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.errors import ConfigError
from tiered_mmcache.tracing.format import (
    BLOCK_HEADER_BYTES,
    HEADER_BYTES,
    RECORD,
    Outcome,
    TraceReader,
    block_of_array,
    header,
)
from tiered_mmcache.tracing.recorder import BLOCK_RECORDS, TraceRecorder, key_digest

SALT = "a salt of some length"


def _result(rows=4):
    return EmbeddingResult(embedding=torch.zeros(rows, 64))


def _cache(folder, *, hot=2048, host=None, **trace):
    mapping = {"hot": {"max_size": hot}, "trace": {"folder": str(folder / "traces"), **trace}}
    if host:
        mapping["host"] = {"max_size": host}
    return TieredMultimodalCache(config=CacheConfig.from_mapping(mapping))


def _read(folder):
    (path,) = (folder / "traces").glob("*.trace")
    with path.open("rb") as file:
        reader = TraceReader(file)
        blocks = list(reader.blocks())
    return np.concatenate([np.empty(0, RECORD), *blocks]), reader.damage


def test_each_request_has_what_came_of_it(tmp_path):
    with _cache(tmp_path, host="1MiB", salt=SALT) as cache:
        assert cache.get_single("a") is None
        cache.set("a", _result())
        cache.get_single("a")
        for key in ("b", "c"):  # two entries are hot
            cache.get_single(key)
            cache.set(key, _result())
        assert cache.get_single("a") is not None  # from host memory
        cache.get([1, 2])
        cache.set(cache.combine_hashes([1, 2]), _result())
        assert cache.get([1, 2]) is not None
        cache.get_single("large")
        cache.set("large", _result(100))
        cache.get_single("never")
    records, damage = _read(tmp_path)
    assert not damage
    names = [Outcome(each).name for each in records["outcome"]]
    assert names == ["MISS", "HOT", "MISS", "MISS", "HOST", "MISS", "HOT", "REFUSED", "NOT_SET"]
    assert records["bytes"].tolist() == [1024] * 7 + [25_600, 0]
    assert records["tokens"].tolist() == [4] * 7 + [100, 0]
    assert records["key"][0] == records["key"][1] == records["key"][4] != records["key"][2]
    assert records["key"][5] == records["key"][6]
    assert (np.diff(records["time"]) >= 0).all()


def test_encoded_entries_have_their_cost_and_are_one_request(tmp_path):
    def encode(keys):
        return [_result() for _ in keys]

    async def aencode(keys):
        return encode(keys)

    with _cache(tmp_path) as cache:
        cache.get_or_encode(["a", "b"], encode)
        cache.get_or_encode(["a"], encode)
        asyncio.run(cache.aget_or_encode(["c"], aencode))
    records, _ = _read(tmp_path)
    assert [Outcome(each).name for each in records["outcome"]] == ["MISS", "MISS", "HOT", "MISS"]
    assert (records["cost"] > 0).all()


def test_an_untraced_cache_has_its_own_methods(tmp_path):
    """A hot hit costs what it did: nothing stands before it."""
    shadowed = {"get_single", "_find_hot", "_set"}
    with TieredMultimodalCache(4096) as cache:
        assert not shadowed & set(vars(cache))
    with _cache(tmp_path) as cache:
        assert shadowed <= set(vars(cache))
    assert not shadowed & set(vars(cache))


def test_keys_of_one_salt_are_comparable_and_of_another_not():
    for key in (5, "5", b"5", (5, "x"), frozenset([5])):
        assert key_digest(key, b"one") == key_digest(key, b"one")
        assert key_digest(key, b"one") != key_digest(key, b"two")


class Stage:
    def __init__(self, folder, most_bytes=1 << 20):
        self.problems = []
        self.recorder = TraceRecorder(
            folder, most_bytes, b"salt", lambda cause, problem: self.problems.append(cause)
        )

    def hits(self, count):
        for key in range(count):
            if not self.recorder.ended:
                self.recorder.hit(key, Outcome.HOT, 10, 1, 0.0)


def test_traces_are_bounded_together(tmp_path):
    bound = HEADER_BYTES + 2 * (BLOCK_HEADER_BYTES + BLOCK_RECORDS * RECORD.itemsize) + 100
    stage = Stage(tmp_path, bound)
    stage.hits(10 * BLOCK_RECORDS)
    stage.recorder.close()
    second = Stage(tmp_path, bound)
    second.hits(10 * BLOCK_RECORDS)
    assert second.recorder.ended
    files = list(tmp_path.glob("*.trace"))
    assert sum(each.stat().st_size for each in files) <= bound + HEADER_BYTES
    assert max(each.stat().st_size for each in files) == bound - 100
    assert not stage.problems + second.problems


def test_a_folder_that_cannot_be_written_ends_the_trace_alone(tmp_path):
    with _cache(tmp_path, hot=1 << 20) as cache:
        (tmp_path / "traces").write_text("in the way")
        for key in range(2 * BLOCK_RECORDS):
            cache.get_single(key % 9)
            cache.set(key % 9, _result())
        assert cache.get_single(1) is not None
        assert cache.stats().faults["trace_file"] == 1


def test_a_disk_that_is_full_ends_the_trace_alone(tmp_path):
    stage = Stage(tmp_path)
    stage.hits(BLOCK_RECORDS)
    stage.recorder._file.close()
    stage.recorder._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    stage.hits(3 * BLOCK_RECORDS)
    assert stage.problems == ["trace_file"]
    assert stage.recorder.ended


def test_misses_that_are_never_set_stay_bounded(tmp_path):
    stage = Stage(tmp_path)
    for key in range(20_000):
        stage.recorder.missed(key)
    assert len(stage.recorder._pending) <= 4096
    stage.recorder.close()
    (path,) = tmp_path.glob("*.trace")
    with path.open("rb") as file:
        records = np.concatenate(list(TraceReader(file).blocks()))
    assert len(records) == 20_000
    assert set(records["outcome"]) == {Outcome.NOT_SET}


KILLED = """
import os, signal, sys
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
import torch
folder, fork = sys.argv[1:]
cache = TieredMultimodalCache(
    config=CacheConfig.from_mapping({"hot": {"max_size": "1MiB"}, "trace": {"folder": folder}})
)
for number in range(1300):
    if cache.get_single(number % 50) is None:
        cache.set(number % 50, EmbeddingResult(embedding=torch.zeros(4, 64)))
if fork == "fork" and os.fork() == 0:
    cache.get_single(1)
    cache.close()
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


EXITING = """
import sys
from tiered_mmcache import CacheConfig, TieredMultimodalCache
cache = TieredMultimodalCache(
    config=CacheConfig.from_mapping({"hot": {"max_size": "1MiB"}, "trace": {"folder": sys.argv[1]}})
)
cache.get_single(1)
"""


def test_a_server_that_exits_without_a_close_leaves_everything(tmp_path):
    arguments = [sys.executable, "-c", EXITING, str(tmp_path / "traces")]
    subprocess.run(arguments, timeout=100, check=True)
    records, damage = _read(tmp_path)
    assert len(records) == 1
    assert not damage


@pytest.mark.parametrize("fork", ["fork", "alone"])
def test_a_killed_server_leaves_all_but_the_last_block(fork, tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "traces"), fork]
    killed = subprocess.run(arguments, timeout=100, env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    records, damage = _read(tmp_path)
    assert len(records) == 1300 // BLOCK_RECORDS * BLOCK_RECORDS
    assert not damage


@pytest.mark.parametrize("value", [{"salt": "short"}, {"max_size": "4G"}, {"folder": ""}])
def test_what_cannot_be_used_is_refused(value, tmp_path):
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_mapping({"trace": {"folder": str(tmp_path), **value}})
    assert caught.value.key == f"trace.{next(iter(value))}"


# The command


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def csv_of_another(tmp_path):
    path = tmp_path / "log.csv"
    lines = [
        f"{number * 0.5},image-{number % 40 if number < 300 else number},100,3,0.25"
        for number in range(400)
    ]
    path.write_text("\n".join(["time,key,bytes,tokens,cost", *lines]) + "\n")
    return path


def test_a_csv_becomes_a_trace_that_tells_no_keys(csv_of_another, tmp_path):
    out = tmp_path / "out.trace"
    result = run("trace", "record", csv_of_another, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["requests"] == 400
    assert answer["file_bytes"] == out.stat().st_size
    assert b"image" not in out.read_bytes()
    again = tmp_path / "again.trace"
    run("trace", "record", csv_of_another, "--out", again)
    assert out.read_bytes() != again.read_bytes()
    sums = [
        json.loads(run("trace", "info", each, "--json").stdout) for each in (csv_of_another, out)
    ]
    for each in sums:
        assert (each["requests"], each["keys"], each["once"]) == (400, 140, 100)
        assert each["footprint_bytes"] == 14_000
        assert each["span_s"] == 199.5
        assert each["hit_ratio"] is None
    plans = [
        json.loads(run("plan", each, "--json", "--memory", "1MiB", "--disk", "1MiB").stdout)
        for each in (csv_of_another, out)
    ]
    assert plans[0]["hot"] == plans[1]["hot"]
    assert plans[0]["encoder_s"] == 100


def test_info_counts_what_a_cache_recorded(tmp_path):
    with _cache(tmp_path, hot="1MiB") as cache:
        for key in [1, 2, 1, 1]:
            if cache.get_single(key) is None:
                cache.set(key, _result())
    (path,) = (tmp_path / "traces").iterdir()
    answer = json.loads(run("trace", "info", path, "--json").stdout)
    assert answer["hit_ratio"] == 0.5
    assert answer["outcomes"]["hot"] == answer["outcomes"]["miss"] == 2
    text = run("trace", "info", path).stdout
    assert "50.0% of the requests" in text
    assert "2, 50.0% of them asked for once" in text


@pytest.mark.parametrize(
    ("damage", "told", "left"),
    [
        (lambda data: data[:-5], "the last block is cut off", 1),
        (lambda data: data + b"BLCK", "the last block is cut off", 2),
        (lambda data: data[:100] + b"\xff" + data[101:], "does not match its digest", 1),
        (lambda data: data[:32] + data[33:], "no block begins here", 1),
    ],
)
def test_damage_is_named_and_costs_one_block(damage, told, left, tmp_path):
    stage = Stage(tmp_path)
    stage.hits(2 * BLOCK_RECORDS)
    stage.recorder.close()
    path = stage.recorder.path
    path.write_bytes(damage(path.read_bytes()))
    result = run("trace", "info", path, "--json")
    assert result.exit_code == 1
    assert told in result.stderr
    answer = json.loads(result.stdout)
    assert answer["requests"] == left * BLOCK_RECORDS
    assert len(answer["damage"]) == 1
    planned = run("plan", path, "--memory", "1MiB", "--disk", "1MiB")
    assert planned.exit_code == 1
    assert told in planned.stderr


def test_records_that_cannot_be_are_named_and_left_out(tmp_path):
    records = np.zeros(6, RECORD)
    records["bytes"] = 10
    records["time"][0] = np.nan
    records["bytes"][1] = 2**64 - 1
    records["cost"][2] = -1
    records["cost"][3] = np.inf
    records["outcome"][4] = 7
    path = tmp_path / "odd.trace"
    path.write_bytes(header(1.0) + block_of_array(records))
    result = run("trace", "info", path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["requests"] == 1
    assert "5 records that cannot be" in result.stderr


def test_what_cannot_be_read_or_written_ends_in_a_line(csv_of_another, tmp_path):
    there = tmp_path / "there"
    there.write_text("kept")
    new = tmp_path / "new"
    bad = tmp_path / "bad.csv"
    bad.write_text("time,key,bytes\n1,2,3\nx\n")
    for arguments, code in [
        (("trace", "info", tmp_path / "none"), 3),
        (("trace", "info", tmp_path), 3),
        (("trace", "info", bad), 2),
        (("trace", "record", csv_of_another, "--out", there), 2),
        (("trace", "record", bad, "--out", new), 2),
        (("plan", bad), 2),
        (("plan", tmp_path / "none"), 3),
    ]:
        result = run(*arguments)
        assert result.exit_code == code, arguments
        assert not result.stdout
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("mmcache: ")
    assert there.read_text() == "kept"
    assert not new.exists()
