"""`mmcache top` tells what running caches publish, and how much that says about now.

Owns: the command, on files that real caches have written. Does not own: the metrics
(tests/unit/test_metrics.py).
"""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.watching.readings import Source, State, read_all
from mmcache_tools.watching.view import Pair, view
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

ENTRY_BYTES = 4 * 64 * 4


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-test-") as made:
        yield Path(made)


def _cache(folder, **more):
    mapping = {
        "namespace": 'a \\ "b"',
        "hot": {"max_size": 2 * ENTRY_BYTES},
        "host": {"max_size": "64KiB"},
        "metrics": {"folder": str(folder), "interval": "10s"},
        **more,
    }
    return TieredMultimodalCache(config=CacheConfig.from_mapping(mapping))


def _published(folder, cache):
    """Some requests, published: three misses, three sets, one hit in host memory, one in hot."""
    for key in range(3):
        cache.get_single(key)
        cache.set(key, EmbeddingResult(embedding=torch.zeros(4, 64)))
    cache.get_single(0)
    cache.get_single(0)
    cache._metrics_file._due_at_s = 0.0
    cache.set(0, EmbeddingResult(embedding=torch.zeros(4, 64)))
    (file,) = folder.glob("*.prom")
    return file


@pytest.fixture
def file(folder):
    with _cache(folder) as cache:
        yield _published(folder, cache)


def run(*arguments):
    return CliRunner().invoke(app, ["top", *(str(each) for each in arguments)])


def test_a_live_cache_is_told_in_numbers(file, folder):
    result = run(folder, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["command"], answer["folder"]) == ("top", str(folder))
    (cache,) = answer["caches"]
    assert cache["file"] == str(file)
    assert cache["process"] == os.getpid()
    assert cache["state"] == "live"
    assert cache["namespace"] == 'a \\ "b"'
    assert (cache["hits"], cache["misses"], cache["hit_ratio"]) == (2, 3, 0.4)
    assert cache["misses_by_reason"] == {"never_seen": 3}
    assert cache["tiers"]["hot"]["used_bytes"] == cache["tiers"]["hot"]["budget_bytes"]
    assert cache["tiers"]["hot"]["entries"] == 2
    assert cache["tiers"]["host"]["hits"] == 1
    assert "disk" not in cache["tiers"]
    assert cache["worker_is_up"] is None


def test_text_names_tiers_hits_and_misses(file, folder):
    result = run(folder, "--once")
    assert result.exit_code == 0
    for text in ("live", "hot", "host", "100%", "40.0% since the start, of 5", "never_seen 3"):
        assert text in result.stdout.replace(" full", " 100%")
    assert "\x1b" not in result.stdout
    assert run(file, "--once").stdout.splitlines()[0] == result.stdout.splitlines()[0]


def test_a_server_that_stopped_writing_is_stale(file, folder):
    late_s = time.time() - 100
    os.utime(file, (late_s, late_s))
    result = run(folder, "--once")
    assert result.exit_code == 1
    assert "stale: the server is idle" in result.stdout
    assert "1.7 min ago" in result.stdout


def test_a_server_that_was_killed_is_gone(file, folder):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    file.rename(folder / f"mmcache-{child.pid}-0.prom")
    result = run(folder, "--json")
    assert result.exit_code == 1
    assert [each["state"] for each in json.loads(result.stdout)["caches"]] == ["gone"]
    assert "gone: the process ended" in run(folder, "--once").stdout


def test_where_nothing_is_published_a_line_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)
    silent = tmp_path / "silent.yaml"
    silent.write_text("hot:\n  max_size: 1MiB\n")
    configured = tmp_path / "configured.yaml"
    missing = {"folder": str(folder / "none")}
    configured.write_text(yaml.safe_dump({"hot": {"max_size": 1}, "metrics": missing}))
    for arguments, code, told in [
        ([folder, "--once"], 3, "no cache publishes its metrics"),
        ([configured], 3, "no cache publishes its metrics"),
        ([folder / "mmcache-1-0.prom"], 3, "no cache publishes its metrics"),
        ([folder / "none"], 3, "no cache publishes its metrics"),
        ([silent], 2, "no section `metrics`"),
        ([tmp_path / "none.yaml"], 3, "none.yaml"),
        ([], 2, "TIERED_MMCACHE_CONFIG"),
    ]:
        result = run(*arguments)
        assert result.exit_code == code, arguments
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not result.stdout


def test_the_yaml_says_where_and_how_often(file, folder, tmp_path, monkeypatch):
    path = tmp_path / "mmcache.yaml"
    metrics = {"folder": str(folder), "interval": "5min"}
    path.write_text(yaml.safe_dump({"hot": {"max_size": 1}, "metrics": metrics}))
    late_s = time.time() - 100
    os.utime(file, (late_s, late_s))
    assert run(path).exit_code == 0  # within three intervals
    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", str(path))
    assert run().exit_code == 0


def test_damage_and_other_files_are_passed_over(file, folder):
    (folder / "mmcache-1-0.new").write_text("x")
    (folder / "other.prom").write_text("x")
    file.write_bytes(b'\xff{}\nmmcache_hits_total{tier="hot"} 7\nmmcache_hits_total{} x\n')
    (cache,) = json.loads(run(folder, "--json").stdout)["caches"]
    assert cache["hits"] == 7
    assert run(folder, "--once").exit_code == 0


def _seen(pair, folder, width=100, encoding="utf-8"):
    console = Console(width=width, file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with console.capture() as captured:
        console.print(view([pair], Source(folder=folder, interval_s=1.0), console))
    return captured.get()


def test_rates_are_those_between_two_readings(file, folder):
    (now,) = read_all(Source(folder=folder, interval_s=10.0))
    values = {each: value / 2 for each, value in now.values.items()}
    before = type(now)(
        **{name: getattr(now, name) for name in now.__slots__}
        | {"values": values, "written_s": now.written_s - 2.0}
    )
    text = _seen(Pair(now=now, before=before), folder)
    assert "40.0% of 1.2/s now" in text
    assert "device to host 512B/s" in text
    assert "/s now" not in _seen(Pair(now=now), folder)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_its_width_and_its_encoding(width, encoding, file, folder):
    (now,) = read_all(Source(folder=folder, interval_s=10.0))
    worst = {
        **now.values,
        ("mmcache_worker_is_up", ""): 0.0,
        **{("mmcache_faults_total", f"cause_{number}"): 10.0**number for number in range(9)},
        **{("mmcache_drops_total", f"drop_{number}"): 10.0**number for number in range(9)},
        **{("mmcache_used_bytes", room): 2.0**49 for room in ("hot", "host", "disk")},
        **{("mmcache_budget_bytes", room): 2.0**49 + 1 for room in ("hot", "host", "disk")},
        **{("mmcache_entries", room): 12_345_678.0 for room in ("hot", "host", "disk")},
    }
    reading = type(now)(
        **{name: getattr(now, name) for name in now.__slots__}
        | {"values": worst, "state": State.LIVE, "namespace": "n" * 500}
    )
    text = _seen(Pair(now=reading, before=now), folder, width, encoding)
    text.replace("…", "").encode(encoding)
    assert max(len(line) for line in text.splitlines()) <= width
    for told in ("down: misses", "cause_8 100,000,000", "5 other kinds", "512.0TiB", "12,345,678"):
        assert told in text


def _until(terminal, wanted, limit_s=60.0):
    seen = b""
    deadline_s = time.monotonic() + limit_s
    while wanted not in seen:
        left_s = deadline_s - time.monotonic()
        assert left_s > 0, seen
        if select.select([terminal], [], [], left_s)[0]:
            seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize("ends", [b"q", b"\x03", signal.SIGTERM])
def test_the_live_view_follows_and_ends_cleanly(ends, folder):
    with _cache(folder) as cache:
        _published(folder, cache)
        ours, theirs = pty.openpty()
        arguments = [sys.executable, "-m", "mmcache_tools", "top", str(folder), "--interval", "0.1"]
        child = subprocess.Popen(
            arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(theirs)
        try:
            _until(ours, b"q ends")
            cache._metrics_file._due_at_s = 0.0
            cache.get_single("unknown")
            _until(ours, b"never_seen 4")
            if isinstance(ends, bytes):
                os.write(ours, ends)
            else:
                child.send_signal(ends)
            left = _until(ours, b"\x1b[?1049l")  # the screen is given back
            assert b"Traceback" not in left
            assert child.wait(60) == 0
        finally:
            child.kill()
            child.wait()
            os.close(ours)


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
