"""What is expected of reads, and which are declined, on a manual clock.

Owns: the estimate and its recovery. Does not own: where reads are measured (test_disk_tier.py).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_mmcache.testing import ManualClock
from tiered_mmcache.tiers import read_speed as module
from tiered_mmcache.tiers.read_speed import ReadSpeed

MB = 1_000_000


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def speed(clock):
    return ReadSpeed(clock)


def read(speed, count=20, *, sizes=(MB, 8 * MB, 64 * MB), latency_s=0.001, s_per_byte=1e-9):
    for number in range(count):
        size = sizes[number % len(sizes)]
        speed.note(size, latency_s + size * s_per_byte)


def test_nothing_is_expected_before_the_first_read(speed):
    assert speed.expected_s(MB) == 0.0
    assert not speed.would_decline(MB, 1e-9)


@pytest.mark.parametrize(("latency_s", "s_per_byte"), [(0.001, 1e-9), (0.02, 1e-10), (0.0, 5e-9)])
@pytest.mark.parametrize("size", [0, MB, 30 * MB, 100 * MB])
def test_latency_and_speed_are_told_apart(speed, latency_s, s_per_byte, size):
    read(speed, 60, latency_s=latency_s, s_per_byte=s_per_byte)
    expected_s = latency_s + size * s_per_byte
    assert speed.expected_s(size) == pytest.approx(expected_s, rel=0.1, abs=1e-4)


def test_equal_sizes_give_the_lower_answer_for_others(speed):
    read(speed, sizes=(8 * MB,), latency_s=0.0, s_per_byte=1e-9)
    assert speed.expected_s(8 * MB) == pytest.approx(0.008)
    assert speed.expected_s(MB) == pytest.approx(0.001)  # as if all were speed
    assert speed.expected_s(80 * MB) == pytest.approx(0.008)  # as if all were latency


def test_empty_entries_have_a_latency_only(speed):
    read(speed, sizes=(0,), latency_s=0.003)
    assert speed.expected_s(0) == speed.expected_s(MB) == pytest.approx(0.003)


@given(
    reads=st.lists(st.tuples(st.integers(0, 2**40), st.floats(0.0, 1e4)), max_size=50),
    size=st.integers(0, 2**40),
)
def test_an_expectation_is_a_possible_duration(reads, size):
    speed = ReadSpeed(lambda: 0.0)
    for each, duration_s in reads:
        speed.note(each, duration_s)
    assert speed.expected_s(size) >= 0.0
    assert speed.expected_s(size) <= speed.expected_s(size + 1) * (1 + 1e-9) + 1e-12
    assert speed.mean_s <= max((duration_s for _, duration_s in reads), default=0.0) + 1e-9


def test_one_slow_read_changes_little(speed):
    read(speed)
    before_s = speed.expected_s(8 * MB)
    speed.note(8 * MB, 1000 * before_s)
    assert before_s < speed.expected_s(8 * MB) < 2 * before_s


def test_a_slow_first_read_is_soon_forgotten(speed):
    speed.note(8 * MB, 1.0)
    read(speed, 7, sizes=(8 * MB,))
    assert speed.expected_s(8 * MB) < 2 * 0.009


def test_a_clock_that_stood_still_at_first_does_not_stop_learning(speed):
    speed.note(MB, 0.0)
    for _ in range(40):
        speed.note(MB, 0.5)
    assert speed.expected_s(MB) > 0.25


def test_a_disk_that_stays_slow_is_recognised(speed):
    read(speed, sizes=(8 * MB,))
    for _ in range(12):
        speed.note(8 * MB, 1.0)
    assert speed.expected_s(8 * MB) > 0.5
    assert speed.would_decline(8 * MB, 0.2)


def test_what_is_faster_than_encoding_is_read(speed):
    read(speed)
    expected_s = speed.expected_s(8 * MB)
    assert not speed.decline(8 * MB, expected_s)
    assert not speed.decline(8 * MB, 10 * expected_s)
    assert speed.decline(8 * MB, 0.9 * expected_s)


def test_what_nobody_measured_is_read(speed):
    read(speed, latency_s=10.0)
    assert not speed.decline(8 * MB, 0.0)


def test_a_few_reads_decline_nothing(speed):
    for _ in range(module._FEWEST_READS - 1):
        speed.note(MB, 10.0)
        assert not speed.would_decline(MB, 0.1)
    speed.note(MB, 10.0)
    assert speed.would_decline(MB, 0.1)


def test_one_in_sixteen_is_tried_all_the_same(speed):
    read(speed, latency_s=1.0)
    tried = [not speed.decline(MB, 0.1) for _ in range(48)]
    assert tried == ([False] * 15 + [True]) * 3


def test_asking_does_not_count(speed):
    read(speed, latency_s=1.0)
    assert all(speed.would_decline(MB, 0.1) for _ in range(100))


def test_old_evidence_declines_nothing(speed, clock):
    read(speed, latency_s=1.0)
    clock.now_s += module._EVIDENCE_LASTS_S
    assert speed.would_decline(MB, 0.1)
    clock.now_s += 0.001
    assert not speed.would_decline(MB, 0.1)
    speed.note(MB, 1.0)
    assert speed.would_decline(MB, 0.1)


def test_a_disk_that_recovers_is_read_again(speed):
    read(speed, sizes=(MB,), latency_s=1.0)  # a hundred times too slow
    declined = 0
    while speed.decline(MB, 0.01) or speed.expected_s(MB) > 0.01:
        declined += 1
        if declined % 16 == 0:  # the one that was tried
            speed.note(MB, 0.001)
        assert declined < 16 * 10
    assert not any(speed.decline(MB, 0.01) for _ in range(100))
