"""The disk tier's own waits and memories, on a manual clock.

Owns: waiting for the first worker, flushing, and what is remembered of the store.
Does not own: the races between memory and worker (test_lower_tiers.py).
"""

import dataclasses

import pytest

from tiered_mmcache.config import DiskConfig, WritePolicy
from tiered_mmcache.disk.client import StoreSettings
from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.tier import HostEntry, Ledger
from tiered_mmcache.metrics.counters import Counters, FaultLog
from tiered_mmcache.tiers import disk_tier as module
from tiered_mmcache.tiers.disk_tier import Absence, DiskTier


def header(class_tag="EmbeddingResult"):
    return EntryHeader(
        class_tag=class_tag, dtype="uint8", item_bytes=1, shape=(3,), extras=b"", device_type="cpu"
    )


class Stage:
    """The tier, the worker that the test plays, and the clock, which only waiting moves."""

    def __init__(self, fake_client, tmp_path):
        self.now_s = 1000.0
        settings = StoreSettings(
            path=str(tmp_path),
            budget_bytes=1000,
            largest_entry_bytes=100,
            synchronous=True,
            namespace="n",
        )
        self.client = fake_client(settings, -1)
        self.client.wait = self.wait
        self.while_waiting = []
        self.counters = Counters()
        self.tier = DiskTier(
            self.client,
            config=DiskConfig(path=tmp_path, max_size="1MiB", write_buffer="1MiB"),
            namespace="n",
            counters=self.counters,
            faults=FaultLog(self.counters),
            on_written=lambda entry: None,
            on_lost=lambda entry, cause: None,
            clock=lambda: self.now_s,
        )

    def wait(self, timeout_s):
        assert timeout_s > 0
        if self.while_waiting:
            self.while_waiting.pop(0)()
        else:
            self.now_s += timeout_s

    def entry(self, key, *, hits=0, class_tag="EmbeddingResult", extras=b""):
        fields = dataclasses.replace(header(class_tag), extras=extras)
        return HostEntry(key, object, fields, [], 0, Ledger(0), hits=hits)


@pytest.fixture
def stage(fake_client, tmp_path):
    return Stage(fake_client, tmp_path)


def test_the_first_worker_is_waited_for(stage):
    stage.client.is_ready = False
    stage.while_waiting = [lambda: None, stage.client.start]
    stage.tier.wait_until_ready(10.0)
    assert stage.now_s == 1000.0
    assert not stage.counters.faults


def test_a_first_worker_that_takes_too_long_is_a_fault(stage, caplog):
    stage.client.is_ready = False
    stage.tier.wait_until_ready(10.0)
    assert stage.now_s == 1010.0
    assert stage.counters.faults == {"disk_not_ready": 1}
    assert "still starting" in caplog.text


def test_a_first_worker_that_ends_is_not_waited_for(stage, caplog):
    stage.client.die("permission")
    stage.client.pid = None
    stage.tier.wait_until_ready(10.0)
    assert stage.now_s == 1000.0
    assert stage.counters.faults == {"permission": 1, "disk_not_ready": 1}
    assert "not ready: permission" in caplog.text


def test_a_flush_waits_for_its_answer(stage):
    stage.client.paused = True
    stage.while_waiting = [lambda: None, stage.client.answer]
    stage.tier.flush(1005.0)
    assert stage.now_s == 1000.0
    assert not stage.client.unanswered


def test_a_flush_keeps_its_time(stage):
    stage.client.paused = True
    stage.tier.flush(1005.0)
    assert stage.now_s == 1005.0


def test_without_a_worker_nothing_is_flushed(stage):
    stage.client.die()
    stage.tier.flush(1005.0)
    assert stage.client.asked("flush") == []
    assert stage.now_s == 1000.0


def test_a_clear_is_waited_for_no_longer_than_a_read(stage):
    stage.client.paused = True
    stage.tier.clear(None)
    assert stage.now_s == 1000.0 + stage.tier.read_timeout_s
    assert stage.tier.spill.clear_pending
    stage.client.paused = False
    stage.while_waiting = [lambda: None] * 3
    stage.tier.clear("version")
    assert stage.now_s == 1000.0 + stage.tier.read_timeout_s
    assert not stage.tier.spill.clear_pending


@pytest.mark.parametrize("key", [1.5, None, frozenset({1}), "\ud800", (1, 2.0), "x" * 100_000])
def test_keys_that_cannot_be_stored_are_never_asked_for(stage, key):
    assert not stage.tier.may_hold(key, header())
    assert stage.tier.look_up(key) == Absence(reason="absent")
    assert isinstance(stage.tier.header_to_read(key), Absence)
    stage.tier.touch(key)
    stage.tier.supersede(key)
    assert stage.tier.free(key, known=False) is False
    assert stage.tier.free(key, known=True) is True
    assert stage.client.log == []
    assert stage.client.touched == []


def test_a_class_without_a_tag_cannot_be_stored(stage):
    assert stage.tier.may_hold(1, header())
    assert not stage.tier.may_hold(1, header(class_tag=""))


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_the_policies_want(stage, policy):
    stage.tier.policy = policy
    always = policy is not WritePolicy.ON_SECOND_HIT
    assert stage.tier.wants(stage.entry(1)) is always
    assert stage.tier.wants(stage.entry(1, hits=1))
    assert not stage.tier.wants(stage.entry(1, hits=1, class_tag=""))
    stage.tier.note_dropped(stage.entry(1))
    assert stage.tier.wants(stage.entry(1))
    assert stage.tier.wants(stage.entry(2)) is always


def test_what_is_known_to_be_absent_is_not_deleted(stage):
    assert stage.tier.look_up(1) == Absence(reason="absent")
    stage.tier.supersede(1)
    assert stage.client.asked("delete") == []
    stage.tier.supersede(1)  # meanwhile it may have been written
    assert len(stage.client.asked("delete")) == 1


def test_memories_are_bounded(fake_client, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED_KEYS", 6)
    monkeypatch.setattr(module, "_REMEMBERED_ENTRIES", 4)
    stage = Stage(fake_client, tmp_path)
    for number in range(8):
        stage.tier.look_up(number)
        stage.tier.note_dropped(stage.entry(number))
        stage.tier.note_present(stage.entry(number))
    stage.tier.policy = WritePolicy.ON_SECOND_HIT
    wanted = [number for number in range(8) if stage.tier.wants(stage.entry(number))]
    assert wanted == [3, 4, 5, 6, 7]
    assert [number for number in range(8) if stage.tier.has_copy(number)] == [6, 7]
    for number in range(8):
        stage.tier.supersede(number)
    assert len(stage.client.asked("delete")) == 3


def test_a_header_with_long_extra_fields_is_asked_for_each_time(stage):
    stage.tier.note_present(stage.entry(1, extras=bytes(1000)))
    assert stage.tier.has_copy(1)
    stage.tier.header_to_read(1)
    assert len(stage.client.asked("look_up")) == 1
    stage.tier.note_present(stage.entry(2))
    assert stage.tier.header_to_read(2) == header()
    assert len(stage.client.asked("look_up")) == 1


def test_without_a_worker_a_look_up_is_no_certain_absence(stage):
    stage.client.die()
    absence = stage.tier.look_up(1)
    assert absence == Absence(reason="disk_down")
    assert not absence.is_certain
    assert stage.tier.free(1, known=False) is False
    stage.client.start()
    stage.tier.poll()
    assert len(stage.client.asked("delete")) == 1


def test_a_worker_that_ends_between_a_look_up_and_its_read_is_down_and_not_late(stage):
    entry = stage.entry(1)
    stage.client.put(
        store_key=stage.tier.spill.store_key(encode_full_key(1)),
        full_key=encode_full_key(1),
        header=entry.header,
        extents=[],
    )
    stage.client.answer()
    assert stage.tier.look_up(1) == entry.header
    stage.client.die()
    absence = stage.tier.begin_read(entry)
    assert absence == Absence(reason="disk_down")
    assert not absence.is_certain
    assert not entry.filling  # nobody will write into its memory
    assert stage.tier.idle
    assert not stage.counters.faults["read_timeout"]
    assert stage.client.asked("fill") == []
