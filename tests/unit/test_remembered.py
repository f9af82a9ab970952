"""What is remembered of keys: which keys are the same, how many stay, what headers share."""

import dataclasses

import pytest

from tiered_mmcache.entries.keys import combine_hashes
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.tiers import remembered as module
from tiered_mmcache.tiers.remembered import RememberedKeys, is_small, shared


def header(**changes):
    fields = {
        "class_tag": "".join(["Embedding", "Result"]),
        "dtype": "".join(["bfloat", "16"]),
        "item_bytes": 2,
        "shape": tuple(range(1000, 3000, 1000)),
        "extras": bytes(range(10)),
        "device_type": "".join(["cp", "u"]),
        **changes,
    }
    return EntryHeader(**fields)


def test_the_last_value_of_a_key_is_remembered():
    memory = RememberedKeys(10)
    assert memory.get("a") is None
    assert "a" not in memory
    memory.note("a", 1)
    memory.note("a", 2)
    memory.note("b", None)
    assert memory.get("a") == 2
    assert "b" in memory
    assert memory.get("b") is None
    assert len(memory) == 2


def test_a_value_noted_anew_is_not_hidden_by_an_old_one():
    memory = RememberedKeys(4)
    for key in (1, 2, 3):  # 1 and 2 are in the older half from then on
        memory.note(key, "old")
    memory.note(1, None)
    assert memory.get(1) is None
    assert 1 in memory


def test_what_is_forgotten_is_in_neither_half():
    memory = RememberedKeys(4)
    for key in (1, 2, 3):
        memory.note(key, key)
    assert memory.forget(1)
    assert memory.forget(3)
    assert not memory.forget(1)
    assert [key for key in (1, 2, 3) if key in memory] == [2]
    memory.clear()
    assert len(memory) == 0
    assert not memory.forget(2)


def test_keys_are_the_same_as_on_disk():
    memory = RememberedKeys(10)
    combined = combine_hashes([1, 2])
    memory.note(combined, "combined")
    assert memory.get(int(combined)) is None
    assert memory.get(combine_hashes([1, 2])) == "combined"
    assert memory.get(combine_hashes([2, 1])) is None


def test_keys_that_cannot_be_stored_are_not_remembered():
    memory = RememberedKeys(10)
    memory.note(1.5, "x")
    memory.note(None, "x")
    assert len(memory) == 0
    assert memory.get(1.5) is None
    assert None not in memory
    assert not memory.forget(1.5)


@pytest.mark.parametrize("most_keys", [1, 2, 7, 100])
def test_at_most_so_many_are_remembered_and_half_as_many_always(most_keys):
    memory = RememberedKeys(most_keys)
    for key in range(300):
        memory.note(key, key)
        assert len(memory) <= most_keys
        last = range(max(0, key + 1 - most_keys // 2), key + 1)
        assert all(memory.get(each) == each for each in last)


def test_many_are_kept_in_parts_so_that_none_takes_long_to_forget(monkeypatch):
    monkeypatch.setattr(module, "_KEYS_A_PART", 64)
    memory = RememberedKeys(1024)
    lost_at_once = 0
    for key in range(5000):
        before = len(memory)
        memory.note(key, key)
        lost_at_once = max(lost_at_once, before - len(memory))
        assert len(memory) <= 1024
    assert 0 < lost_at_once <= 64
    assert sum(key in memory for key in range(4700, 5000)) > 290


def test_equal_headers_become_one():
    first, second = shared(header()), shared(header())
    assert first is second
    assert first == header()


def test_headers_with_their_own_encoding_time_share_the_rest():
    first, second = shared(header(cost_s=0.25)), shared(header(cost_s=0.75))
    assert (first, second) == (header(cost_s=0.25), header(cost_s=0.75))
    for field in dataclasses.fields(EntryHeader):
        if field.name != "cost_s":
            assert getattr(first, field.name) is getattr(second, field.name), field.name


def test_headers_with_long_extra_fields_are_left_alone():
    long = header(extras=bytes(1000))
    assert shared(long) is long
    assert not is_small(long)
    assert is_small(header())
