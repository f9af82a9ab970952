"""The file of metrics: when it is written, what it holds, and that it harms nobody.

Owns: the file, on a manual clock, and its configuration. Does not own: the metrics in it
(test_prometheus.py).
"""

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.errors import ConfigError
from tiered_mmcache.metrics.file import MetricsFile


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-test-") as made:
        yield Path(made) / "metrics"


class Stage:
    def __init__(self, folder):
        self.now_s = 100.0
        self.texts = [b"first", b"second", b"third"]
        self.problems = []
        self.file = MetricsFile(folder, 10.0, self.text, self.report, clock=lambda: self.now_s)

    def text(self):
        return self.texts.pop(0)

    def report(self, cause, problem):
        self.problems.append((cause, problem))


def test_it_is_written_at_once_and_then_once_an_interval(folder):
    stage = Stage(folder)
    for now_s, expected in [(100.0, b"first"), (109.9, b"first"), (110.0, b"second")]:
        stage.now_s = now_s
        stage.file.write_if_due()
        assert stage.file.path.read_bytes() == expected
    assert list(folder.iterdir()) == [stage.file.path]
    assert str(os.getpid()) in stage.file.path.name


def test_two_caches_have_two_files(folder):
    assert Stage(folder).file.path != Stage(folder).file.path


def test_what_cannot_be_written_is_reported(folder):
    folder.write_text("in the way")
    stage = Stage(folder)
    stage.file.write_if_due()
    stage.file.write_if_due()  # not due
    assert [cause for cause, _ in stage.problems] == ["metrics_file"]


def test_what_cannot_be_told_is_reported(folder):
    stage = Stage(folder)
    stage.texts = []
    stage.file.write_if_due()
    assert stage.problems == [("metrics_file", "pop from empty list")]


def test_a_removed_file_stays_away(folder):
    stage = Stage(folder)
    stage.file.write_if_due()
    stage.file.remove()
    stage.file.remove()
    stage.now_s += 100.0
    stage.file.write_if_due()
    assert list(folder.iterdir()) == []
    assert not stage.problems


def test_nobody_waits_for_another_thread_that_writes(folder):
    stage = Stage(folder)
    inside, go_on = threading.Event(), threading.Event()

    def text():
        inside.set()
        assert go_on.wait(60)
        return b"slow"

    stage.file._text = text
    writer = threading.Thread(target=stage.file.write_if_due)
    writer.start()
    assert inside.wait(60)
    stage.now_s += 100.0
    stage.file.write_if_due()  # returns
    go_on.set()
    writer.join()
    assert stage.file.path.read_bytes() == b"slow"


def test_a_cache_keeps_its_file_up_to_date_and_removes_it(folder):
    config = CacheConfig.from_mapping({"hot": {"max_size": 4096}, "metrics": {"folder": folder}})
    with TieredMultimodalCache(config=config) as cache:
        cache.set(1, EmbeddingResult(embedding=torch.ones(10)))
        (file,) = folder.iterdir()
        families = {
            family.name: family for family in text_string_to_metric_families(file.read_text())
        }
        assert families["mmcache_admissions"].samples[0].value == 1
    assert list(folder.iterdir()) == []


def test_a_miss_writes_it_too(folder):
    config = CacheConfig.from_mapping(
        {"hot": {"max_size": 4096}, "host": {"max_size": 8192}, "metrics": {"folder": folder}}
    )
    with TieredMultimodalCache(config=config) as cache:
        cache.get_single(1)
        (file,) = folder.iterdir()
        assert 'reason="never_seen"} 1.0' in file.read_text()


@pytest.mark.parametrize(
    ("keys", "key", "remedy"),
    [
        ({"folder": "/var/lib/metrics"}, "metrics.folder", "/dev/shm or /run"),
        ({"folder": "/dev/shm/a", "interval": "10ms"}, "metrics.interval", "1s or longer"),
        ({"folder": "/dev/shm/../../etc"}, "metrics.folder", "/dev/shm or /run"),
        ({}, "metrics.folder", "folder: /dev/shm/mmcache"),
    ],
)
def test_what_is_refused(keys, key, remedy):
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_mapping({"metrics": keys})
    assert caught.value.key == key
    assert remedy in caught.value.remedy
