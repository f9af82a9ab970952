"""Sizes and durations as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_mmcache.configuration.quantities import (
    LARGEST_SIZE_BYTES,
    UnusableValueError,
    duration_s,
    size_bytes,
    written_size,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("7B", 7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        (" 4GiB ", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("0.1KiB", 102),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("1PiB", 1 << 50),
        ("1PB", 10**15),
        (LARGEST_SIZE_BYTES, LARGEST_SIZE_BYTES),
    ],
)
def test_a_size_is_read_exactly(written, expected):
    assert size_bytes(written) == expected


@pytest.mark.parametrize(
    ("written", "problem", "remedy"),
    [
        (True, "truth value", "4GiB"),
        (None, "null", "4GiB"),
        (1.5, "fraction", "4GiB"),
        (math.nan, "fraction", "4GiB"),
        (math.inf, "fraction", "4GiB"),
        ([], "list", "4GiB"),
        (-1, "negative", "4GiB"),
        (2**63, "beyond", "4GiB"),
        ("9999999PiB", "beyond", "4GiB"),
        ("-1GiB", "not a size", "4GiB"),
        ("", "not a size", "4GiB"),
        ("GiB", "not a size", "4GiB"),
        ("nan", "not a size", "4GiB"),
        ("1e9", "not a size", "4GiB"),
        ("1,5GiB", "not a size", "4GiB"),
        ("٤GiB", "not a size", "4GiB"),
        ("9" * 5000, "not a size", "4GiB"),
        ("4G", "'G' is not a unit", "GiB or GB"),
        ("4g", "'g' is not a unit", "GiB or GB"),
        ("4gib", "'gib' is not a unit", "Write GiB."),
        ("4Gb", "'Gb' is not a unit", "Write GB."),
        ("4 parsecs", "'parsecs' is not a unit", "GiB"),
        ("25%", "share", "4GiB"),
    ],
)
def test_what_is_no_size_is_refused_with_a_remedy(written, problem, remedy):
    with pytest.raises(UnusableValueError) as caught:
        size_bytes(written)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(("written", "expected"), [("25%", 250), ("100%", 1000), ("0.15 %", 1)])
def test_a_share_is_of_what_the_caller_says(written, expected):
    assert size_bytes(written, share_of_bytes=lambda: 1000) == expected


@pytest.mark.parametrize("written", ["0%", "101%", "100.01%"])
def test_a_share_is_above_nothing_and_at_most_all(written):
    with pytest.raises(UnusableValueError, match="share"):
        size_bytes(written, share_of_bytes=lambda: 1000)


def test_without_a_share_the_whole_is_not_asked_for():
    assert size_bytes("1KiB", share_of_bytes=lambda: pytest.fail("asked")) == 1024


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1.5s", 1.5),
        ("1min", 60.0),
        ("0s", 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (3600, 3600.0),
    ],
)
def test_a_duration_is_read_in_seconds(written, expected):
    assert duration_s(written) == expected


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (True, "truth value"),
        (None, "null"),
        (-1, "at least 0"),
        (math.nan, "at least 0"),
        (math.inf, "at least 0"),
        (10**400, "at least 0"),
        ("2h", "'h' is not a unit"),
        ("2", "needs its unit"),
        ("soon", "not a duration"),
        ("61min", "one hour"),
    ],
)
def test_what_is_no_duration_is_refused_with_a_remedy(written, problem):
    with pytest.raises(UnusableValueError) as caught:
        duration_s(written)
    assert problem in caught.value.problem
    assert "500ms" in caught.value.remedy


@pytest.mark.parametrize(
    ("count_bytes", "expected"),
    [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (5 << 30, "5.0GiB"), (1 << 60, "1024.0PiB")],
)
def test_a_size_is_written_in_the_unit_that_fits(count_bytes, expected):
    assert written_size(count_bytes) == expected


@given(st.integers(0, 2**40), st.sampled_from(["B", "KiB", "MiB"]))
def test_whole_numbers_with_a_unit_lose_nothing(number, unit):
    factor = {"B": 1, "KiB": 1024, "MiB": 1024**2}[unit]
    assert size_bytes(f"{number}{unit}") == number * factor


@given(st.one_of(st.text(max_size=30), st.integers(), st.floats(), st.booleans(), st.none()))
def test_any_value_is_a_size_in_range_or_refused(value):
    try:
        assert 0 <= size_bytes(value) <= LARGEST_SIZE_BYTES
    except UnusableValueError as error:
        assert error.problem
        assert error.remedy


@given(st.one_of(st.text(max_size=30), st.integers(), st.floats(), st.booleans(), st.none()))
def test_any_value_is_a_duration_in_range_or_refused(value):
    try:
        assert 0 <= duration_s(value) <= 3600
    except UnusableValueError as error:
        assert error.problem
        assert error.remedy
