"""Traces of requests: what each kind repeats, that a seed decides it, and the CSV.

Owns: `mmcache workload`. Does not own: whether its example runs (tests/docs).
"""

import collections
import csv
import itertools
import json
import lzma

import pytest
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.workload import kinds, requests, servegen
from mmcache_tools.workload.sizes import BYTES_A_TOKEN, USUAL_TOKENS

HOUR_S = 3600.0


def first(count, trace):
    return list(itertools.islice(trace, count))


def run(*arguments):
    return CliRunner().invoke(app, ["workload", *map(str, arguments)])


@pytest.fixture
def service(tmp_path):
    """Two clients: one at 2 a second all the time, one at 20 a second in the second hour."""
    folder = tmp_path / "clients"
    folder.mkdir()
    pdf = {"image_tokens": "{0: 0.5, 100: 0.25, 300: 0.25}", "image_count": "{0: 0.2, 2: 0.8}"}
    for client, windows in enumerate([[(0, 2), (HOUR_S, 2)], [(0, 0), (HOUR_S, 20)]]):
        lines = [f"{start},{rate},1.0,Gamma,1,1" for start, rate in windows]
        (folder / f"chunk-{client}-trace.csv").write_text("\n".join(lines))
        (folder / f"chunk-{client}-dataset.json").write_text(json.dumps({"0": pdf}))
    return folder


@pytest.fixture
def popularity(tmp_path):
    path = tmp_path / "objects.xz"
    path.write_bytes(lzma.compress(b"".join(b"%d %d 10\n" % (n, n % 7) for n in range(100_000))))
    return path


def test_zipf_asks_for_ranks_as_often_as_it_says():
    counts = collections.Counter(each.key for each in first(60_000, kinds.zipf(keys=50, alpha=1.0)))
    ranked = [count for _, count in counts.most_common()]
    assert len(ranked) == 50
    assert ranked[0] / ranked[9] == pytest.approx(10, rel=0.15)
    flat = collections.Counter(each.key for each in first(60_000, kinds.zipf(keys=50, alpha=0.0)))
    assert max(flat.values()) < 1.2 * min(flat.values())


def test_unique_repeats_the_share_that_it_is_told():
    trace = first(20_000, kinds.unique(repeated=0.1))
    again = len(trace) - len({each.key for each in trace})
    assert again / len(trace) == pytest.approx(0.1, abs=0.01)
    everything_new = first(1000, kinds.unique(repeated=0.0))
    assert len({each.key for each in everything_new}) == 1000


@pytest.mark.parametrize(
    "make",
    [lambda seed: kinds.zipf(keys=20, alpha=1, seed=seed), lambda seed: kinds.unique(seed=seed)],
)
def test_the_seed_decides_the_trace(make):
    assert first(200, make(1)) == first(200, make(1))
    assert first(200, make(1)) != first(200, make(2))


@pytest.mark.parametrize("trace", [kinds.zipf(keys=300, alpha=0.5), kinds.unique(repeated=0.5)])
def test_a_key_keeps_its_size_and_time_goes_on(trace):
    some = first(3000, trace)
    sizes = {}
    for each in some:
        assert sizes.setdefault(each.key, each.size_bytes) == each.size_bytes
        assert each.size_bytes == each.tokens * BYTES_A_TOKEN
        assert each.tokens in USUAL_TOKENS
        assert each.cost_s == pytest.approx(0.167 * each.tokens / 2691)
    assert [each.time_s for each in some] == sorted(each.time_s for each in some)


def test_a_service_has_the_rates_and_sizes_of_its_clients(service):
    arrivals = list(servegen.arrivals(service, start_s=0, seed=0))
    times = [each.time_s for each in arrivals]
    assert times == sorted(times)
    early = sum(time_s < HOUR_S for time_s in times)
    assert early == pytest.approx(2 * HOUR_S, rel=0.1)
    assert len(times) - early == pytest.approx(22 * HOUR_S, rel=0.1)
    assert {len(each.image_tokens) for each in arrivals} == {2}
    assert {tokens for each in arrivals for tokens in each.image_tokens} == {100, 300}


def test_a_service_may_begin_later(service):
    arrivals = list(servegen.arrivals(service, start_s=HOUR_S, seed=0))
    assert len(arrivals) == pytest.approx(22 * HOUR_S, rel=0.1)
    assert arrivals[0].time_s < 60


def test_a_service_shows_the_keys_of_the_popularity_trace(service, popularity):
    trace = list(kinds.service(service, popularity))
    assert [each.key for each in trace[:10]] == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert {each.tokens for each in trace[:7]} <= {100, 300}
    assert len({(each.key, each.tokens) for each in trace}) == 7  # the first size stays


def test_a_conversation_shows_its_images_again(tmp_path):
    path = tmp_path / "turns.jsonl"
    turns = [
        {"timestamp": 0, "hash_ids": list(range(20))},
        {"timestamp": 1500, "hash_ids": list(range(40))},
    ]
    path.write_text("\n".join(map(json.dumps, turns)))
    trace = list(kinds.conversation(path))
    assert [(each.time_s, each.key) for each in trace] == [
        (0.0, 1),
        (0.0, 17),
        (1.5, 1),
        (1.5, 17),
        (1.5, 33),
    ]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_file_has_what_was_asked_for(tmp_path):
    trace = first(50, kinds.zipf(keys=9, alpha=1.0))
    path = tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        assert requests.write(trace, file) == 50
    rows = rows_of(path)
    assert len(rows) == 50
    for row, request in zip(rows, trace, strict=True):
        numbers = [int(row[name]) for name in ("key", "bytes", "tokens")]
        assert numbers == [request.key, request.size_bytes, request.tokens]
        assert float(row["time"]) == pytest.approx(request.time_s, abs=1e-6)
        assert float(row["cost"]) == pytest.approx(request.cost_s, abs=1e-6)


def test_the_command_writes_a_file_that_is_new(tmp_path):
    path = tmp_path / "trace.csv"
    done = run("zipf", "--requests", 30, "--keys", 5, "--out", path)
    assert done.exit_code == 0
    assert done.stdout == f"30 requests in {path}\n"
    assert len(rows_of(path)) == 30
    before = path.read_bytes()
    refused = run("unique", "--out", path)
    assert refused.exit_code == 2
    assert "there already" in refused.stderr
    assert path.read_bytes() == before


def test_nothing_is_left_of_a_file_that_could_not_be_finished(tmp_path):
    path, turns = tmp_path / "trace.csv", tmp_path / "turns.jsonl"
    turns.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n{')
    assert run("conversation", "--conversations", turns, "--out", path).exit_code == 2
    assert not path.exists()


def test_the_command_writes_to_stdout():
    printed = run("unique", "--requests", 3, "--seed", 4).stdout
    assert printed.splitlines()[0] == "time,key,bytes,tokens,cost"
    assert len(printed.splitlines()) == 4
    assert printed == run("unique", "--requests", 3, "--seed", 4).stdout


def test_the_command_makes_a_service(service, popularity):
    done = run("service", "--requests", 12, "--servegen", service, "--popularity", popularity)
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 13


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["service"], "--servegen"),
        (["service", "--servegen", "."], "--popularity"),
        (["conversation"], "--conversations"),
    ],
)
def test_a_kind_says_which_trace_it_needs(arguments, option):
    done = run(*arguments)
    assert done.exit_code == 2
    assert option in done.stderr


TRACE, DATASET = "chunk-1-trace.csv", "chunk-1-dataset.json"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (TRACE, b""),
        (TRACE, b"now,2,1"),
        (TRACE, b"0,2"),
        (TRACE, b"0,inf,1"),
        (TRACE, b"0,1e9,1"),
        (TRACE, b"nan,2,1"),
        (TRACE, b"0,-2,1"),
        (TRACE, b"0,2,inf"),
        (TRACE, b"\xff"),
        (DATASET, b""),
        (DATASET, b"{"),
        (DATASET, b"[]"),
        (DATASET, b"[" * 100_000),
        (DATASET, b'{"0": {"image_tokens": "{}", "image_count": "{1: 1}"}}'),
        (DATASET, b'{"0": {"image_tokens": "[1]", "image_count": "{1: 1}"}}'),
        (DATASET, b'{"0": {"image_tokens": "{1: \'x\'}", "image_count": "{1: 1}"}}'),
        (DATASET, b'{"0": {"image_tokens": 7, "image_count": "{1: 1}"}}'),
        (DATASET, b'{"0": {"image_tokens": "%s", "image_count": "{1: 1}"}}' % (b"(" * 9999)),
    ],
    ids=range(18),
)
def test_a_damaged_description_is_named(service, popularity, name, text):
    (service / name).write_bytes(text)
    with_both = ["--servegen", service, "--popularity", popularity, "--start-s", HOUR_S]
    done = run("service", *with_both)
    assert done.exit_code == 2, done.exception
    assert name in done.stderr


def test_a_folder_without_clients_is_named(tmp_path, popularity):
    done = run("service", "--servegen", tmp_path / "none", "--popularity", popularity)
    assert done.exit_code == 2
    assert "no chunk-" in done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"1 2 3\nnothing\n",
        b"1 2 3\n\xff\n",
        b"1 2 3\n1 1.5\n",
        lzma.compress(b"1 2 3\n" * 9999)[:-40],
        lzma.compress(b"1 2 3\n" * 9999)[:60] + bytes(60),
    ],
    ids=range(5),
)
def test_a_damaged_popularity_trace_is_named(service, tmp_path, data):
    objects = tmp_path / "objects"
    objects.write_bytes(data)
    done = run("service", "--servegen", service, "--popularity", objects, "--requests", 99_999)
    assert done.exit_code == 2, done.exception
    assert "objects" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"timestamp": 1}',
        b'{"timestamp": "x", "hash_ids": []}',
        b'{"timestamp": NaN, "hash_ids": []}',
        b'{"timestamp": 1, "hash_ids": "abc"}',
        b'{"timestamp": 1, "hash_ids": [1, null]}',
        b'{"timestamp": 1%s, "hash_ids": [1, 2]}' % (b"0" * 400),
    ],
    ids=range(10),
)
def test_a_damaged_conversation_is_named(tmp_path, line):
    path = tmp_path / "turns.jsonl"
    path.write_bytes(line)
    done = run("conversation", "--conversations", path)
    assert done.exit_code == 2, done.exception
    assert "turns.jsonl" in done.stderr
    assert "line" in done.stderr


def test_a_trace_that_is_not_there_cannot_be_opened(tmp_path):
    done = run("conversation", "--conversations", tmp_path / "none")
    assert done.exit_code == 3
    assert "none" in done.stderr
