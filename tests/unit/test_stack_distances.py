"""Stack distances are those of a plain list, and a sample says about the same in bounded memory.

Owns: distances, sampling and the reading of CSVs. Does not own: agreement with the real cache
(tests/integration/test_plan_and_cache.py).
"""

import gzip
import lzma
import tracemalloc
from collections import OrderedDict
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache_tools.inspection.outcome import UsageError
from mmcache_tools.sizing.curves import hot_curve, knee_of, round_sizes
from mmcache_tools.sizing.distances import COLD, StackDistances
from mmcache_tools.sizing.sampling import Sample
from mmcache_tools.sizing.traces import Trace


def _plainly(keys, sizes):
    stack, found = [], []
    for key in keys:
        if key in stack:
            place = stack.index(key)
            found.append(sum(sizes[each] for each in stack[place:]))
            del stack[place]
        else:
            found.append(COLD)
        stack.append(key)
    return found


@given(
    st.lists(st.integers(0, 12), max_size=200),
    st.lists(st.integers(1, 1000), min_size=13, max_size=13),
    st.integers(1, 200),
)
def test_distances_are_those_of_a_plain_stack_however_cut_into_blocks(keys, sizes, length):
    distances = StackDistances(np.array(sizes))
    found = []
    for at in range(0, len(keys), length):
        found += distances.of(np.array(keys[at : at + length], np.int64)).tolist()
    assert found == _plainly(keys, sizes)


def test_a_whole_block_of_the_largest_length():
    keys = np.random.default_rng(1).integers(0, 300, 1 << 16)
    sizes = np.arange(1, 301)
    whole = StackDistances(sizes).of(keys)
    cut = StackDistances(sizes)
    parts = [cut.of(part) for part in np.split(keys, 64)]
    assert whole.tolist() == np.concatenate(parts).tolist()


def _write(path, keys, size_of=lambda key: 100, costs=False):
    with path.open("w") as file:
        file.write("time,key,bytes,tokens,cost\n" if costs else "time,key,bytes\n")
        more = ",7,0.5" if costs else ""
        file.writelines(f"{at},{key},{size_of(key)}{more}\n" for at, key in enumerate(keys))
    return path


def _hits(keys, size_of, budget):
    held, used, hits = OrderedDict(), 0, 0
    for key in keys:
        size = size_of(key)
        if key in held:
            held.move_to_end(key)
            hits += 1
        elif size <= budget:
            while used + size > budget:
                used -= held.popitem(last=False)[1]
            held[key] = size
            used += size
    return hits


@given(st.lists(st.integers(0, 15), min_size=1, max_size=150), st.integers(1, 5))
def test_a_curve_counts_the_hits_of_each_size(tmp_path_factory, keys, factor):
    def size_of(key):
        return (1 + key * factor) * 10

    path = _write(tmp_path_factory.mktemp("trace") / "trace.csv", keys, size_of)
    budgets = [10, 35, 100, 160, 480, 4000]
    with closing(Sample(Trace(path))) as sample:
        points = hot_curve(sample, budgets, sample.costs_s)
    found = [round(point.hot * len(keys)) for point in points]
    assert found == [_hits(keys, size_of, budget) for budget in budgets]
    assert all(point.error == 0 and point.saved_s is None for point in points)


def test_a_sample_is_as_right_as_it_says(tmp_path):
    chance = np.random.default_rng(5)
    keys = np.minimum(chance.zipf(1.2, 60_000), 50_000)
    path = _write(tmp_path / "trace.csv", keys.tolist(), lambda key: 100 + key % 7 * 30, costs=True)
    with closing(Sample(Trace(path))) as exact, closing(Sample(Trace(path), most_keys=1500)) as few:
        assert exact.rate == 1.0
        assert few.keys <= 1500
        assert few.rate < 0.3
        assert few.keys / few.rate == pytest.approx(exact.keys, rel=0.1)
        budgets = round_sizes(20_000, 2_000_000)
        right = hot_curve(exact, budgets, exact.costs_s)
        told = hot_curve(few, budgets, few.costs_s)
    for truth, point in zip(right, told, strict=True):
        assert 0 < point.error < 0.1
        assert abs(truth.hit_ratio - point.hit_ratio) < 3 * point.error
        assert point.saved_s == pytest.approx(truth.saved_s, rel=0.2)


def test_memory_does_not_grow_with_the_requests(tmp_path):
    chance = np.random.default_rng(5)
    peaks = []
    for number in (100_000, 400_000):
        keys = chance.integers(0, number, number).tolist()
        path = _write(tmp_path / f"{number}.csv", keys)
        tracemalloc.start()
        with closing(Sample(Trace(path), most_keys=2000)) as sample:
            hot_curve(sample, [50_000, 5_000_000], sample.costs_s)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sample.keys <= 2000
    assert peaks[1] < 1.2 * peaks[0]


def test_the_knee_is_where_the_curve_bends(tmp_path):
    keys = [*list(range(10)) * 50, *range(100, 200), *range(100, 200)]
    with closing(Sample(Trace(_write(tmp_path / "trace.csv", keys)))) as sample:
        points = hot_curve(sample, [500, 1000, 5000, 10_000, 12_000], sample.costs_s)
        assert knee_of(points).sizes.hot == 1000
        unique = hot_curve(sample, [100], sample.costs_s)
    assert knee_of(unique) is None


HEADED = "key;ignored;bytes;time\na;x;10;1.5\nb;y;20;2.5\na;z;10;4.5\n"


@pytest.mark.parametrize(
    "content",
    [
        b"time,key,bytes\n1.5,a,10\n2.5,b,20\n4.5,a,10\n",
        b"1.5 a 10\n2.5 b 20\n4.5 a 10",
        b"1.5\ta\t10\r\n2.5\tb\t20\r\n\r\n4.5\ta\t10\r\n",
        HEADED.encode(),
        gzip.compress(HEADED.encode()),
        lzma.compress(HEADED.encode()),
    ],
)
def test_csvs_of_others_are_read(content, tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(content)
    (records,) = Trace(path).blocks()
    assert records["time"].tolist() == [1.5, 2.5, 4.5]
    assert records["bytes"].tolist() == [10, 20, 10]
    assert records["key"][0] == records["key"][2] != records["key"][1]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "an empty file"),
        (b"time,key\n1,2\n", "no column bytes"),
        (b"a line\n", "begins with a line 'a line'"),
        (b"time,key,bytes\n1,2,3\n1,2\n", "line 3: '1,2' is not time,key,bytes"),
        (b"time,key,bytes\n1,2,-3\n", "line 2"),
        (b"time,key,bytes\nnan,2,3\n", "line 2"),
        (b"time,key,bytes\n1,2,1e99\n", "line 2"),
        (b"time,key,bytes\n" + b"1" * 70_000, "characters"),
        (b"\xff\xfe\x00", "neither a trace nor a CSV"),
        (gzip.compress(b"time,key,bytes\n" * 99)[:-9], "cannot be unpacked"),
        (b"MMTRACE\0" + b"x" * 40, "the header is damaged"),
        (b"MMTRACE\0", "this is not a trace"),
    ],
)
def test_what_is_no_trace_is_said_in_a_line(content, told, tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        list(Trace(path).blocks())
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
