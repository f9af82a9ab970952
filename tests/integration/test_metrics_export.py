"""The metrics of several processes, merged by `mmcache metrics`.

Owns: which files count, the labels, the port, and what is said when there is nothing to say.
Does not own: the files themselves (tests/unit/test_metrics_file.py).
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

SERVER = """
import sys, torch
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache

folder, entries = sys.argv[1], int(sys.argv[2])
sections = {"hot": {"max_size": "1MiB"}, "metrics": {"folder": folder}}
cache = TieredMultimodalCache(config=CacheConfig.from_mapping(sections))
other = TieredMultimodalCache(config=CacheConfig.from_mapping(sections))
for key in range(entries):
    cache.set(key, EmbeddingResult(embedding=torch.ones(16)))
cache._metrics_file._due_at_s = 0.0  # the interval is not what is tested
cache.get_single("unknown")
other.get_single("unknown")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-test-") as made:
        yield Path(made) / "metrics"


@pytest.fixture
def server(folder):
    started = []

    def start(entries):
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(entries)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def mmcache(*arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TIERED_MMCACHE_CONFIG"}
    return subprocess.run(
        [sys.executable, "-m", "mmcache_tools", "metrics", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


def samples(text):
    """Every sample's value by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = (sample.name, frozenset(sample.labels.items()))
            assert series not in found
            found[series] = sample.value
    return found


def value(found, name, **labels):
    (match,) = [
        v for (n, have), v in found.items() if n == name and labels.items() <= dict(have).items()
    ]
    return match


def files(found):
    return {
        state: value(found, "mmcache_metrics_files", state=state)
        for state in ("read", "left", "unreadable")
    }


def test_all_caches_of_all_processes_are_told_apart(folder, server):
    processes = {2: server(2), 3: server(3)}
    done = mmcache(folder)
    assert done.returncode == 0, done.stderr
    found = samples(done.stdout)
    for entries, process in processes.items():
        labels = {"process": str(process.pid), "cache": "0"}
        assert value(found, "mmcache_entries", tier="hot", **labels) == entries
        assert value(found, "mmcache_misses_total", reason="never_seen", **labels) == 1
        assert value(found, "mmcache_look_up_seconds_count", outcome="miss", **labels) == 0
        labels["cache"] = "1"
        assert value(found, "mmcache_entries", tier="hot", **labels) == 0
    assert files(found) == {"read": 4, "left": 0, "unreadable": 0}


def test_what_a_killed_process_left_is_not_served(folder, server):
    dead, alive = server(1), server(1)
    dead.kill()
    dead.wait()
    text = mmcache(folder).stdout
    assert f'process="{alive.pid}"' in text
    assert f'process="{dead.pid}"' not in text
    assert files(samples(text)) == {"read": 2, "left": 2, "unreadable": 0}


def test_a_number_that_another_process_has_now_does_not_revive_a_file(folder, server):
    process = server(1)
    for file in folder.iterdir():
        long_ago_s = time.time() - 3600
        os.utime(file, (long_ago_s, long_ago_s))
    text = mmcache(folder).stdout
    assert f'process="{process.pid}"' not in text
    assert files(samples(text))["left"] == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"mmcache_entries{ 1", b"# TYPE mmcache_entries gauge\nmmcache_entries x\n"],
    ids=["empty", "no text", "cut off", "no number"],
)
def test_a_damaged_file_is_counted_and_costs_the_others_nothing(folder, server, content):
    process = server(1)
    (folder / f"mmcache-{process.pid}-7.prom").write_bytes(content)
    (folder / "mmcache-1-0.new").write_bytes(b"half a file")
    (folder / "another.prom").write_bytes(b"of somebody else")
    found = samples(mmcache(folder).stdout)
    assert files(found) == {"read": 2, "left": 0, "unreadable": 1}


def test_one_port_serves_all_until_it_is_told_to_end(folder, server):
    process = server(5)
    command = [sys.executable, "-m", "mmcache_tools", "metrics", str(folder), "--port", "0"]
    exporter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = exporter.stdout.readline().split()[-1]
        for _ in range(2):
            with urllib.request.urlopen(address, timeout=30) as answer:
                text = answer.read().decode()
            assert f'mmcache_entries{{cache="0",namespace="",process="{process.pid}"' in text
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    finally:
        exporter.kill()
        exporter.communicate()


@pytest.mark.parametrize("metrics", [None, "folder"])
def test_a_configuration_names_the_folder(folder, server, tmp_path, metrics):
    server(1)
    sections = {"hot": {"max_size": "1MiB"}}
    if metrics is not None:
        sections["metrics"] = {"folder": str(folder)}
    file = tmp_path / "mmcache.yaml"
    file.write_text(yaml.safe_dump(sections))
    done = mmcache(file)
    assert done.returncode == (0 if metrics else 2)
    assert ("mmcache_entries" in done.stdout) == bool(metrics)
    assert ("has no metrics.folder" in done.stderr) != bool(metrics)


def test_what_cannot_be_done_is_one_line(folder, server):
    done = mmcache()
    assert (done.returncode, done.stdout) == (2, "")
    assert "name a folder or a YAML" in done.stderr
    done = mmcache(folder)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cannot be read" in done.stderr
    assert "metrics.folder" in done.stderr
    server(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = mmcache(folder, "--port", taken.getsockname()[1])
    assert done.returncode == 3
    assert "Name another --port" in done.stderr
    assert done.stderr.count("\n") == 1
