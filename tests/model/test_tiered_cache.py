"""The tiered cache against a dictionary, whatever is called in whatever order.

The dictionary says what each key was last set to. A look-up may forget; it must never answer with
anything else, and what was freed or cleared must never come back.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiered_mmcache import EmbeddingResult, Tier, TieredMultimodalCache, register_result_class
from tiered_mmcache.config import CacheConfig
from tiered_mmcache.disk import client
from tiered_mmcache.testing import ManualCopyEngine, audit, audit_idle
from tiered_mmcache.testing.ranks import UnisonCache

KEYS = st.sampled_from([1, "text", (1, b"2"), 2**70])
COMBINATIONS = st.sampled_from([(1, 2), (2, 1), (5,), (5 + 2**61 - 1,)])
ANY_KEY = KEYS | COMBINATIONS.map(TieredMultimodalCache.combine_hashes)
SIZES = st.sampled_from([0, 1000, 3000, 4000, 6000, 8000, 20_000])  # the hot tier has 8,192 bytes
WRITE_POLICIES = st.sampled_from(["on_evict", "on_second_hit", "through"])
AHEAD_BYTES = st.sampled_from([None, 4 * 1024])
HOST_BYTES = st.sampled_from([None, 8 * 1024, 24 * 1024])
DISK_BYTES = st.sampled_from([None, 64 * 1024, 4 * 1024 * 1024, 4 * 1024 * 1024])


@dataclasses.dataclass(kw_only=True)
class FramesResult(EmbeddingResult):
    num_tokens_per_frame: list[int]


register_result_class("test.FramesResult", FramesResult)


class TieredCacheMachine(RuleBasedStateMachine):
    """Random calls on a small cache; every rule leaves the counts in agreement."""

    cache_class = TieredMultimodalCache

    @initialize(
        host=HOST_BYTES,
        disk=DISK_BYTES,
        write=WRITE_POLICIES,
        manual=st.booleans(),
        ahead=AHEAD_BYTES,
    )
    def build(self, host, disk, write, manual, ahead):
        self.folder = Path(tempfile.mkdtemp(prefix="mmcache-model-"))
        hot = {"max_size": 8 * 1024, "oversize": "spill", "clean_ahead": ahead}
        sections = {"namespace": "model/test", "hot": hot}
        if host is not None:
            sections["host"] = {"max_size": host}
        if disk is not None:
            sections["disk"] = {
                "path": str(self.folder / "store"),
                "max_size": disk,
                "write": write,
                "write_buffer": "1MiB",
                "durability": "relaxed",
                "read_timeout": "30s",
            }
        self.config = CacheConfig.from_mapping(sections)
        self.has_disk = disk is not None
        self.manual = manual
        self.model = {}
        self.serial = 0
        self.killed = False
        self.dropped = False  # by a cache that was closed since
        self.version = None
        self.versions = {}
        self.unsure = set()  # keys of a version that was cleared to: what was written is there
        self.open()

    def open(self):
        self.engine = ManualCopyEngine() if self.manual else None
        self.cache = self.cache_class(config=self.config, engine=self.engine)
        self.look_ups = 0
        self.hits = 0

    def note(self, found):
        self.look_ups += 1
        self.hits += found is not None
        return found

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        try:
            assert self.cache.drain(timeout_s=60)
            audit_idle(self.cache)
        finally:
            self.cache.close()
            shutil.rmtree(self.folder)

    @rule(entries=st.lists(st.tuples(ANY_KEY, SIZES, st.booleans()), min_size=1, max_size=5))
    def set(self, entries):
        for key, size, frames in entries:
            self.set_one(key, size, frames)

    def set_one(self, key, size, frames):
        self.serial += 1
        payload = torch.full((size,), self.serial % 251, dtype=torch.uint8)
        if size >= 8:
            payload[:8] = torch.tensor(list(self.serial.to_bytes(8, "big")), dtype=torch.uint8)
        result = EmbeddingResult(embedding=payload)
        if frames:
            result = FramesResult(embedding=payload, num_tokens_per_frame=[self.serial, size])
        in_hot = key in self.cache.mm_cache
        if not self.cache.set(key, result):
            assert size > self.cache.max_size
        elif not in_hot:
            self.model[key] = result
            self.unsure.discard(key)
        if size <= self.cache.max_size:
            found = self.note(self.cache.get_single(key))
            assert found is not None
            self.check(key, found)

    @rule(keys=st.lists(ANY_KEY, min_size=1, max_size=5))
    def get_single(self, keys):
        for key in keys:
            self.check(key, self.note(self.cache.get_single(key)))

    @rule()
    def get_everything(self):
        for key in list(self.model):
            self.check(key, self.note(self.cache.get_single(key)))

    @rule(parts=COMBINATIONS)
    def get(self, parts):
        self.check(self.cache.combine_hashes(parts), self.note(self.cache.get(list(parts))))

    @rule(keys=st.lists(ANY_KEY, min_size=1, max_size=6))
    def get_many(self, keys):
        for key, found in zip(keys, self.cache.get_many(keys), strict=True):
            self.check(key, self.note(found))

    @rule(keys=st.lists(ANY_KEY, min_size=1, max_size=6))
    def prefetch(self, keys):
        hot = list(self.cache.mm_cache.items())
        started = self.cache.prefetch(keys)
        assert 0 <= started <= len(set(keys) - set(self.cache.mm_cache))
        assert started == 0 or (self.has_disk and self.config.host is not None)
        assert list(self.cache.mm_cache.items()) == hot

    def check(self, key, found):
        if found is None:
            known = key in self.model and key not in self.unsure
            assert not known or self.may_forget(), f"{key!r} was forgotten"
            return
        if self.engine is not None:
            self.engine.synchronize()
        expected = self.model[key]
        assert type(found) is type(expected)
        assert found.embedding.dtype == expected.embedding.dtype
        assert torch.equal(found.embedding, expected.embedding)
        if isinstance(expected, FramesResult):
            assert found.num_tokens_per_frame == expected.num_tokens_per_frame

    def may_forget(self):
        """Whether anything happened that allows a miss on an entry that was set."""
        if self.engine is not None and self.engine.captures:
            return True
        disk = self.config.disk
        if disk is None or disk.max_size < 4 * 1024 * 1024 or disk.write == "on_second_hit":
            return True
        return self.killed or self.dropped or bool(self.cache.stats().drops)

    @rule(key=ANY_KEY)
    def has(self, key):
        order = list(self.cache.mm_cache)
        tier = self.cache.locate(key)
        assert self.cache.has(key) is (tier is not None)
        assert list(self.cache.mm_cache) == order
        assert (tier is Tier.HOT) is (key in self.cache.mm_cache)
        if tier is not None:
            assert key in self.model

    @rule(key=ANY_KEY)
    def free(self, key):
        known = self.cache.free(key)
        if known:
            assert key in self.model
        self.model.pop(key, None)
        assert self.note(self.cache.get_single(key)) is None
        assert not self.cache.free(key)

    @rule(version=st.sampled_from([None, "v1", "v2"]), now=st.integers(0, 3))
    def clear(self, version, now):
        if now:
            return  # one time in four, or nothing would ever be found again
        self.cache.clear(version)
        assert len(self.cache) == 0
        if not self.has_disk:
            self.model = {}
        elif version is None or version != self.version:
            # What was written under a version may be found again by those who clear to it.
            self.versions[self.version] = self.model
            self.model = {} if version is None else dict(self.versions.get(version, {}))
        self.unsure = set(self.model)
        self.version = version

    @rule(number=st.integers(0, 7))
    def complete_a_copy(self, number):
        if self.engine is not None:
            self.engine.complete(number)

    @rule(
        entries=st.lists(st.tuples(ANY_KEY, SIZES, st.booleans()), max_size=3),
        keys=st.lists(ANY_KEY, max_size=3),
    )
    def capture_a_graph(self, entries, keys):
        """The engine fails when a copy is started meanwhile, which the audit would report."""
        if self.engine is None:
            return
        self.engine.captures = True
        self.set(entries)
        self.get_single(keys)
        for key in keys:
            self.has(key)
            self.free(key)
        audit(self.cache)
        self.engine.captures = False

    @rule()
    def drain(self):
        assert self.cache.drain(timeout_s=60)
        audit_idle(self.cache)

    @rule(now=st.booleans())
    def reopen(self, now):
        if not now:
            return
        self.cache.close()
        self.dropped = self.dropped or bool(self.cache.stats().drops)
        if not self.has_disk:
            self.model.clear()
        self.open()

    @rule(now=st.booleans())
    def kill_worker(self, now):
        if now and self.has_disk and (pid := self.cache._below.disk.client.pid) is not None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "cache"):
            audit(self.cache)
            stats = self.cache.stats()
            assert self.killed or not stats.faults
            hits = sum(tier["hits"] for tier in (stats.hot, stats.host, stats.disk))
            assert (hits, stats.misses) == (self.hits, self.look_ups - self.hits)
            assert sum(stats.absences.values()) == stats.misses_by_reason.get("absent", 0)
            assert self.cache._history.hot_keys == self.cache.mm_cache.keys()
            below = self.cache._below
            assert below is None or below._cleaned_ahead <= self.cache.mm_cache.keys()


@pytest.fixture(autouse=True)
def _workers_restart_at_once(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.0)


class RanksMachine(TieredCacheMachine):
    """The same on two ranks, which are compared after each call."""

    cache_class = UnisonCache


_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking restarts real processes
    suppress_health_check=[HealthCheck.too_slow],
)
TestTieredCache = TieredCacheMachine.TestCase
TestTieredCache.settings = _SETTINGS
TestRanks = RanksMachine.TestCase
TestRanks.settings = settings(_SETTINGS, max_examples=20)
