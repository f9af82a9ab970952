"""Sorting store keys: ranks compare as what they stand for, with and without a file."""

import struct
import sys
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache_tools.inspection import sorting
from mmcache_tools.inspection.sorting import in_order, rank_of_float, rank_of_int, rank_of_text

INTEGERS = st.integers() | st.integers(-300, 300) | st.integers().map(lambda n: n << 200)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters() | st.sampled_from("\0\1\xff\ud800"))


def _key(number):
    return struct.pack(">QQ", 0, number)


@pytest.mark.parametrize(
    ("values", "rank"),
    [(INTEGERS, rank_of_int), (FLOATS, rank_of_float), (TEXTS, rank_of_text)],
    ids=["int", "float", "text"],
)
def test_ranks_compare_as_what_they_stand_for(values, rank):
    @given(values, values)
    def compare(a, b):
        assert (rank(a) < rank(b)) == (a < b)
        assert (rank(a) == rank(b)) == (a == b)
        if a != b:  # a store key may follow
            assert not rank(a).startswith(rank(b))

    compare()


@given(INTEGERS, TEXTS)
def test_integers_come_before_texts(number, text):
    assert rank_of_int(number) < rank_of_text(text)


def test_the_largest_float_is_a_rank():
    assert rank_of_float(sys.float_info.max) > rank_of_float(1.0) > rank_of_float(-1.0)


@given(
    st.lists(st.binary(max_size=40)),
    st.none() | st.integers(0, 40),
    st.integers(1, 400),
    st.integers(0, 1),
)
def test_keys_come_in_the_order_of_their_ranks(ranks, limit, run_bytes, heap):
    ranked = [rank_of_int(len(rank)) + _key(n) for n, rank in enumerate(ranks)]
    expected = [each[-16:] for each in sorted(ranked)][:limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "RUN_BYTES", run_bytes)
        patch.setattr(sorting, "_LEAST_BLOCK_BYTES", 5)
        patch.setattr(sorting, "_MOST_IN_HEAP", heap * 100)
        assert list(in_order(ranked, limit=limit)) == expected


def test_what_fits_takes_no_file(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    ranked = [rank_of_int(-number) + _key(number) for number in range(100)]
    assert list(in_order(ranked)) == [_key(number) for number in reversed(range(100))]
    monkeypatch.setattr(sorting, "RUN_BYTES", 1000)
    with pytest.raises(OSError, match="nowhere"):
        list(in_order(ranked))
