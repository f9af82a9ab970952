"""What the demo says about its result."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from mmcache_tools.demo.report import FirstResult, as_dict, failures, progress, summarise, tables
from mmcache_tools.demo.second import SecondResult
from mmcache_tools.demo.session import ItemAccount, Served

FIRST = FirstResult(
    requests=10,
    items=4,
    hits={"hot": 3, "host": 2, "disk": 1},
    encoder_runs=4,
    encoded_again=0,
    refused=0,
    bit_identical=6,
    embedding_bytes=2**20,
    encode_s=0.4,
    saved_s=0.6,
    hits_s=0.1,
)
SECOND = SecondResult(
    items=4,
    served={"hot": 0, "host": 0, "disk": 4, "encoder": 0},
    bit_identical=4,
    other_hashes=0,
    encoder_loaded=False,
    serving_s=0.1,
)


def test_nothing_is_wrong_with_a_good_result():
    assert failures(FIRST, SECOND) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encoded_again": 1}, "encoded more than once"),
        ({"bit_identical": 5}, "1 embeddings served differ"),
        ({"hits": {"hot": 4, "host": 2, "disk": 0}}, "from disk"),
        ({"hits": {"hot": 6, "host": 0, "disk": 0}}, "from host or disk"),
        ({"refused": 2}, "refused"),
    ],
)
def test_each_fault_of_the_first_process_is_told(change, told):
    (text,) = failures(replace(FIRST, **change), SECOND)
    assert told in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"served": {"disk": 3, "encoder": 1}, "bit_identical": 3}, "had to encode 1"),
        ({"served": {"host": 1, "disk": 3, "encoder": 0}}, "served 3 from disk"),
        ({"bit_identical": 3}, "differ"),
        ({"other_hashes": 1}, "content hash"),
        ({"encoder_loaded": True}, "loaded the encoder"),
    ],
)
def test_each_fault_of_the_second_process_is_told(change, told):
    (text,) = failures(FIRST, replace(SECOND, **change))
    assert told in text


def test_the_summary_adds_up_the_accounts():
    once = ItemAccount(encode_s=[2.0], embedding_bytes=10)
    once.hits[Served.DISK] = once.identical = 3
    twice = ItemAccount(encode_s=[1.0, 3.0], embedding_bytes=20, refused=1)
    twice.hits[Served.HOT] = twice.identical = 1
    assert summarise([once, twice], hits_s=0.5) == FirstResult(
        requests=7,
        items=2,
        hits={"hot": 1, "host": 0, "disk": 3},
        encoder_runs=3,
        encoded_again=1,
        refused=1,
        bit_identical=4,
        embedding_bytes=30,
        encode_s=6.0,
        saved_s=8.0,
        hits_s=0.5,
    )


def test_the_tables_hold_every_number():
    shown = io.StringIO()
    Console(file=shown, width=100).print(*tables(FIRST, SECOND))
    for text in ("10", "4 (1.0 MiB)", "6 (0.60 s", "6 of 6", "4 (0.40 s)", "4 (0.10 s)", "4 of 4"):
        assert text in shown.getvalue()


def test_the_result_is_plain_json():
    result = json.loads(json.dumps(as_dict(FIRST, SECOND)))
    assert result["ok"] is True
    assert result["encoder_runs_saved"] == 6
    assert result["second_process"]["served"]["disk"] == 4


def test_the_progress_bar_tells_what_answered():
    shown = io.StringIO()
    console = Console(file=shown, width=100, force_terminal=True)
    with progress(console) as bar:
        bar.add_task("serving", total=2, completed=1, served="hot 1")
    assert "1/2" in shown.getvalue()
    assert "hot 1" in shown.getvalue()
