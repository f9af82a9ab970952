"""The inspection commands on real stores: what they print, how they end, what they leave alone."""

import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import time as clock
import types

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.inspection import listing, outcome, rows
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.folder import IN_USE_FILE, LAST_CLOSE_FILE
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.extras import encode_extras
from tiered_mmcache.entries.keys import combine_hashes
from tiered_mmcache.entries.record import CHUNK_BYTES

ROW_FIELDS = {
    *("store_key", "key", "namespace", "generation", "stale", "class_tag", "dtype", "shape"),
    *("payload_bytes", "charged_bytes", "chunks", "created_s", "age_s", "cost_s", "device_type"),
}
COMMANDS = ("ls", "stats", "verify")


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch):
    monkeypatch.delenv(outcome.ENVIRONMENT_VARIABLE, raising=False)


def run(*arguments, env=None):
    return CliRunner().invoke(app, [str(each) for each in arguments], env=env)


def run_process(*arguments):
    command = [sys.executable, "-m", "mmcache_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def answer(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def listed_keys(*arguments):
    return [row["key"] for row in answer("ls", *arguments)["entries"]]


# ls


def test_lists_every_field(maker):
    store_key = maker.put(
        7, bytes(24), shape=(3, 4), dtype="bfloat16", item_bytes=2, device_type="cuda", cost_s=0.25
    )
    listed = answer("ls", maker.folder)
    assert listed.keys() == {"command", "store", "entries", "listed", "damaged", "totals"}
    assert (listed["command"], listed["store"]) == ("ls", str(maker.folder))
    assert (listed["listed"], listed["damaged"]) == (1, 0)
    (row,) = listed["entries"]
    assert row.keys() == ROW_FIELDS
    wanted = {
        "store_key": store_key,
        "key": "7",
        "namespace": maker.namespace,
        "generation": maker.generation.hex(),
        "stale": False,
        "class_tag": "embedding",
        "dtype": "bfloat16",
        "shape": [3, 4],
        "payload_bytes": 24,
        "chunks": 1,
        "cost_s": 0.25,
        "device_type": "cuda",
    }
    assert wanted.items() <= row.items()
    assert listed["totals"] == {
        "entries": 1,
        "used_bytes": row["charged_bytes"],
        "payload_bytes": 24,
    }


def test_a_pipe_gets_plain_columns_with_a_totals_line(maker):
    store_key = maker.put(combine_hashes([1, 2]), bytes(2048), cost_s=0.0125)
    result = run("ls", maker.folder)
    heading, row, totals = result.stdout.splitlines()
    assert heading.split("  ")[0] == "STORE KEY"
    assert row.startswith(f"{store_key}     2.0KiB  ")
    assert re.search(r" 12\.5 ms  uint8 +2048 +embedding +model@main/bf16 +\[1, 2\]$", row)
    assert totals.startswith("1 of 1 entries listed")
    assert "\x1b" not in result.stdout


def test_an_empty_store_is_fine(maker):
    assert run("ls", maker.folder).stdout.splitlines()[1].startswith("0 of 0 entries")
    assert answer("ls", maker.folder)["entries"] == []
    assert "none" in run("stats", maker.folder).stdout
    assert answer("stats", maker.folder)["file_to_used"] is None
    assert answer("verify", maker.folder)["totals"] == "equal"


def test_orders(maker):
    for key, size in ((30, 5), (4, 9), ("text", 1), (-2, 7)):
        maker.put(key, bytes(size))
    maker.touch(4)
    assert listed_keys(maker.folder) == ["4", "-2", "'text'", "30"]
    assert listed_keys(maker.folder, "--sort", "size") == ["4", "-2", "30", "'text'"]
    assert listed_keys(maker.folder, "--sort", "age") == ["30", "4", "'text'", "-2"]
    assert listed_keys(maker.folder, "--sort", "key") == ["-2", "4", "30", "'text'"]
    for order in ("recency", "size", "age", "key"):
        everything = listed_keys(maker.folder, "--sort", order)
        assert listed_keys(maker.folder, "--sort", order, "--limit", "2") == everything[:2]


@pytest.fixture
def varied(maker):
    """Entries of two namespaces, classes, sizes and ages: keys 1 to 4 and a text."""
    maker.namespace = "org/one@main"
    maker.put(1, bytes(10))
    maker.put(2, bytes(2000), class_tag="other")
    maker.namespace = "org/two@main"
    maker.put(3, bytes(3000))
    maker.put("image-7", bytes(40))
    return maker


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--namespace", "org/one@main"], ["2", "1"]),
        (["--class", "other"], ["2"]),
        (["--larger-than", "2000"], ["3", "2"]),
        (["--larger-than", "2KB", "--smaller-than", "2KiB"], ["2"]),
        (["--smaller-than", "40B"], ["'image-7'", "1"]),
        (["--prefix", "image-"], ["'image-7'"]),
        (["--older-than", "1h"], []),
        (["--newer-than", "1.5h", "--class", "embedding"], ["'image-7'", "3", "1"]),
        (["--smaller-than", "40B", "--limit", "1"], ["'image-7'"]),
    ],
)
def test_filters(varied, options, keys):
    assert listed_keys(varied.folder, *options) == keys
    if "--limit" not in options:
        assert sorted(listed_keys(varied.folder, *options, "--sort", "size")) == sorted(keys)


def test_a_prefix_is_also_that_of_the_store_key(varied):
    store_key = varied.put(9)
    assert listed_keys(varied.folder, "--prefix", store_key[:8].upper()) == ["9"]


def test_ages_are_compared_with_the_time_of_storing(maker, monkeypatch):
    maker.put(1)
    real = clock.time
    monkeypatch.setattr(clock, "time", lambda: real() + 2 * 86400)
    maker.put(2)
    assert listed_keys(maker.folder, "--older-than", "1d") == ["1"]
    assert listed_keys(maker.folder, "--newer-than", "36h") == ["2"]


def test_a_tree_of_namespaces(varied):
    shown = answer("ls", varied.folder, "--tree")
    assert (shown["listed"], shown["totals"]["entries"]) == (4, 4)
    (org,) = shown["tree"]
    assert (org["name"], org["entries"], org["payload_bytes"]) == ("org", 4, 5050)
    assert org["charged_bytes"] == shown["totals"]["used_bytes"]
    assert [(node["name"], node["payload_bytes"]) for node in org["children"]] == [
        ("two@main", 3040),
        ("one@main", 2010),
    ]
    first, second, *_ = run("ls", varied.folder, "--tree").stdout.splitlines()
    assert re.fullmatch(r" +4 entries +[\d.]+KiB  org", first)
    assert second.endswith("    two@main")
    assert answer("ls", varied.folder, "--tree", "--class", "other")["listed"] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--older-than", "7"], "--older-than '7' is not a span of time. Write 90s"),
        (["--larger-than", "7 parsecs"], "--larger-than '7 parsecs': 'parsecs' is not a unit"),
    ],
)
def test_a_filter_that_means_nothing_ends_with_two(maker, options, says):
    result = run("ls", maker.folder, *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_recency_holds_across_namespaces_and_batches(maker, monkeypatch):
    monkeypatch.setattr("tiered_mmcache.disk.reader.BATCH_ROWS", 3)
    order = []
    for number in range(20):
        maker.namespace = f"model{number % 3}"
        maker.put(number)
        order.insert(0, str(number))
    assert listed_keys(maker.folder) == order
    assert listed_keys(maker.folder, "--namespace", "model1") == order[0::3]
    assert listed_keys(maker.folder, "--namespace", "model1", "--sort", "key") == order[::-1][1::3]


def test_an_unknown_namespace_lists_nothing_and_says_so(maker):
    maker.put(1)
    result = run("ls", maker.folder, "--namespace", "other")
    assert result.exit_code == 0
    assert "no entry here has the namespace 'other'" in result.stderr


def test_entries_of_a_generation_that_is_gone_are_marked(maker):
    maker.put(1)
    maker.begin("2")
    maker.put(1)
    assert [row["stale"] for row in answer("ls", maker.folder)["entries"]] == [False, True]
    assert run("ls", maker.folder).stdout.count("(stale)") == 1


def test_a_damaged_record_is_left_out_and_counted(maker):
    maker.put(1, b"kept")
    maker.put("damaged-key")
    maker.flip(b"damaged-key")
    for order in ("recency", "size"):
        result = run("ls", maker.folder, "--sort", order)
        assert result.exit_code == 1
        assert "1 of 2 entries" in result.stdout
        assert "records that are damaged: 1" in result.stderr
    assert answer("stats", maker.folder, code=1)["damaged"] == 1


def test_what_a_caller_put_into_a_key_cannot_reach_the_terminal(maker):
    maker.namespace = "evil\x1b[2J"
    maker.put("\x1b[31mred\n")
    result = run("ls", maker.folder)
    assert "\x1b" not in result.stdout
    assert "evil\\x1b[2J" in result.stdout


def test_a_terminal_gets_a_table(maker, monkeypatch, capsys):
    maker.put(combine_hashes([1, 2]), bytes(3))
    maker.put(3, bytes(3))
    shown = _on_terminal(maker, monkeypatch, capsys, width=140)
    assert "CLASS" in shown
    assert "[1, 2]" in shown  # not taken for rich's markup
    assert f"All in the namespace {maker.namespace}" in shown
    maker.namespace = "another-namespace-with-a-name-that-is-rather-long"
    maker.put("a" * 200, bytes(3))
    narrow = _on_terminal(maker, monkeypatch, capsys, width=90)
    assert "CLASS" not in narrow
    assert "NAMESPACE" in narrow
    assert "…" in narrow
    assert all(len(line) <= 90 for line in narrow.splitlines())


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
def test_a_narrow_table_has_fewer_columns_and_no_cut_sizes(maker, monkeypatch, capsys, width):
    names = ["Qwen/Qwen2.5-VL-7B-Instruct@main/bf16", "openai/whisper-large-v3@main/fp16"]
    for number, maker.namespace in enumerate(names * 3):
        shape = (2691, 384) if number % 2 else (529, 384)
        keys = (2**64 - 1 - number, combine_hashes([2**60, 2**61, number]))
        for key in keys:
            maker.put(key, bytes(shape[0] * shape[1]), shape=shape, dtype="uint8", cost_s=0.0315)
    shown = _on_terminal(maker, monkeypatch, capsys, width=width).splitlines()
    heading, *table = [line for line in shown if "listed" not in line]
    assert all(len(line) <= width for line in (heading, *table))
    assert len(table) == 12
    for row in table:
        assert re.match(r"[0-9a-f]{12} +\d+\.\dKiB ", row)
        assert "ms" in row or "AGE" not in heading or re.search(r"\d (s|min) ", row)
    assert ("COST" in heading) == (width >= 120)
    assert ("NAMESPACE" in heading) == (width >= 80)
    if width >= 80:  # both ends of a name are kept
        assert sum("bf16  " in row for row in table) == 6
        assert sum("fp16  " in row for row in table) == 6
        assert sum("18446744073709551" in row for row in table) == 6


def test_stale_rows_are_told_from_others_by_words(maker, monkeypatch, capsys):
    maker.put(1)
    assert "stale" not in _on_terminal(maker, monkeypatch, capsys, width=80)
    maker.begin("2")
    maker.put(1)
    assert "Dim rows are stale" in _on_terminal(maker, monkeypatch, capsys, width=80)


def test_fields_are_wrapped_between_words_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    fields = [("key", "short"), ("values", "one word after the other, until the line ends")]
    rows.print_fields(fields)
    assert capsys.readouterr().out.splitlines()[1] == f"values       {fields[1][1]}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows.print_fields(fields)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "key          short"
    assert second == "values       one word after the other,"
    assert third == "             until the line ends"


def test_a_long_listing_on_a_terminal_is_plain(maker, monkeypatch, capsys):
    maker.put_many(listing._TABLE_ROWS + 5)
    shown = _on_terminal(maker, monkeypatch, capsys, width=100)
    assert len(shown.splitlines()) == listing._TABLE_ROWS + 7


def _on_terminal(maker, monkeypatch, capsys, *, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    wanted = listing.Listing(as_json=False)
    assert listing.list_store(listing.Target(folder=maker.folder), wanted) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


# show


def test_shows_every_field(maker):
    values = np.array([[1.5, -2.0], [math.nan, math.inf]], dtype=np.float32)
    extras = encode_extras({"grid": (1, 2), "raw": b"\x01", "scale": math.inf, "by": {1: [True]}})
    store_key = maker.put(
        "image", values.tobytes(), shape=(2, 2), dtype="float32", item_bytes=4, extras=extras
    )
    shown = answer("show", maker.folder, store_key)
    assert shown["entry"].keys() == ROW_FIELDS
    assert shown["entry"]["store_key"] == store_key
    assert shown["place"] == {"bucket": 1, "sequence": 1}
    assert shown["item_bytes"] == 4
    assert shown["record_bytes"] > 100
    assert shown["extras"] == {
        "grid": {"tuple": [1, 2]},
        "raw": {"bytes": "01"},
        "scale": {"float": "inf"},
        "by": {"map": [[1, [True]]]},
    }
    assert shown["digests"] == {"state": "matching", "matching": 1, "of": 1, "problems": []}
    assert shown["values"] == {
        "computed": True,
        "count": 4,
        "min": -2.0,
        "max": 1.5,
        "mean": -0.25,
        "nan": 1,
        "inf": 1,
    }
    text = run("show", maker.folder, store_key).stdout
    for part in ("'image'", "grid=(1, 2)", "1 of 1 chunks match", "1 NaN, 1 Inf of 4", "(current)"):
        assert part in text


def test_values_that_numpy_does_not_know_are_not_computed(maker):
    maker.put(1, b"abcd", dtype="float4_e2m1fn_x2")
    assert answer("show", maker.folder, "1")["values"] == {
        "computed": False,
        "reason": "its values are not known as float4_e2m1fn_x2",
    }
    assert (
        "not computed: its values are not known as float4_e2m1fn_x2"
        in run("show", maker.folder, "1").stdout
    )


def test_complex_and_empty_values(maker):
    numbers = np.array([1 + 2j, 3 - 1j], dtype=np.complex64)
    maker.put("c", numbers.tobytes(), shape=(2,), dtype="complex64", item_bytes=8)
    maker.put("e", b"", shape=(0, 8), dtype="float16", item_bytes=2)
    complex_values = answer("show", maker.folder, "c")["values"]
    assert complex_values["mean"] == {"complex": [2.0, 0.5]}
    assert complex_values["min"] is None
    empty = answer("show", maker.folder, "e")
    assert empty["values"]["mean"] is None
    assert empty["digests"]["of"] == 0
    assert "min -" in run("show", maker.folder, "e").stdout


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (18446744073709551615, "18446744073709551615"),
        (-5, "-5"),
        ("image", "'image'"),
        ("image", "image"),
        (b"\x00\xff", "b'\\x00\\xff'"),
        (combine_hashes([3, -4]), "[3, -4]"),
        (("a", 1), "('a', 1)"),
        (("single",), "('single')"),
        (combine_hashes([("b",), 2]), "[('b'), 2]"),
    ],
)
def test_an_entry_is_found_by_the_callers_key(maker, key, text):
    maker.put(0)
    store_key = maker.put(key, b"payload")
    assert answer("show", maker.folder, text)["entry"]["store_key"] == store_key


def test_an_entry_is_found_by_the_first_digits_of_its_store_key(maker):
    maker.put_many(64)
    (row,) = answer("ls", maker.folder, "--limit", "1")["entries"]
    for length in (8, 9, 31, 32):
        digits = row["store_key"][:length]
        assert answer("show", maker.folder, digits)["entry"] == {
            **row,
            "age_s": pytest.approx(row["age_s"], abs=60),
        }
        assert run("show", maker.folder, "0x" + digits.upper()).exit_code == 0


def test_what_is_ambiguous_is_listed_and_refused(maker):
    maker.put(1)
    maker.namespace = "second"
    second = maker.put(1)
    result = run("show", maker.folder, "1")
    assert result.exit_code == 2
    assert "can be any of 2 entries" in result.stderr
    assert second in result.stderr
    chosen = answer("show", maker.folder, "1", "--namespace", "second")
    assert chosen["entry"]["store_key"] == second


def test_a_key_of_an_older_generation_is_found_when_there_is_no_newer(maker):
    old = maker.put(1)
    maker.begin("2")
    assert answer("show", maker.folder, "1")["entry"]["store_key"] == old
    assert "(stale)" in run("show", maker.folder, "1").stdout
    new = maker.put(1)
    assert answer("show", maker.folder, "1")["entry"]["store_key"] == new


@pytest.mark.parametrize("key", ["99", "abcd", "'x'", "(1, 2)", "0xzz", "[[]]", "{1: []}"])
def test_a_key_that_is_not_there_ends_with_one(maker, key):
    maker.put(1)
    result = run("show", maker.folder, key)
    assert result.exit_code == 1
    assert f"has no entry {key!r}" in result.stderr


def test_a_flipped_byte_is_shown_and_its_values_are_not(maker):
    marker = b"sixteen unique bytes"
    payload = bytes(CHUNK_BYTES) + marker + bytes(50)
    maker.put(1, payload)
    maker.flip(marker)
    shown = answer("show", maker.folder, "1", code=1)
    assert shown["digests"] == {
        "state": "damaged",
        "matching": 1,
        "of": 2,
        "problems": ["chunk 1 does not match its digest"],
    }
    assert shown["values"] == {"computed": False, "reason": "its bytes cannot be trusted"}
    assert "chunk 1 does not match its digest" in run("show", maker.folder, "1").stdout


def test_a_damaged_record_is_refused(maker):
    store_key = maker.put("damaged-key")
    maker.flip(b"damaged-key")
    result = run("show", maker.folder, store_key[:12])
    assert result.exit_code == 1
    assert "does not match its digest" in result.stderr
    maker.namespace = "n"
    again = maker.put(store_key[:4], b"")
    ambiguous = run("show", maker.folder, store_key[:4])
    assert ambiguous.exit_code == 2
    assert "damaged" in ambiguous.stderr
    assert again in ambiguous.stderr
    assert run("show", maker.folder, store_key[:4], "--namespace", "n").exit_code == 0


def test_a_search_by_text_passes_over_damaged_records(maker):
    maker.put("damaged-key")
    maker.flip(b"damaged-key")
    assert run("show", maker.folder, "('single')").exit_code == 1
    store_key = maker.put(("single",))
    assert answer("show", maker.folder, "('single')")["entry"]["store_key"] == store_key


def test_an_entry_that_goes_while_it_is_read(maker, monkeypatch):
    maker.put(1, b"payload")
    monkeypatch.setattr(StoreReader, "visit_chunks", lambda *_: False)
    shown = answer("show", maker.folder, "1", code=1)
    assert shown["digests"]["state"] == "changed"


def test_damaged_extras_and_a_strange_time_do_not_end_the_command(maker, monkeypatch):
    monkeypatch.setattr("tiered_mmcache.disk.changes.time.time", lambda: 1e300)
    maker.put(1, extras=b"\xc1")
    shown = answer("show", maker.folder, "1")
    assert shown["extras"].startswith("damaged: ")
    text = run("show", maker.folder, "1").stdout
    assert "1e+300 s since 1970" in text
    assert "extras       damaged" in text


# stats


def test_sums_up(maker, tmp_path):
    maker.put(1, bytes(100))
    maker.begin("2")
    maker.put(2, bytes(5000))
    maker.put(3, bytes(70_000))
    summed = answer("stats", maker.folder)
    assert summed["entries"] == 3
    assert summed["payload_bytes"] == 75_100
    assert summed["file_bytes"] == (maker.folder / layout.DATA_FILE).stat().st_size
    assert summed["file_to_used"] == summed["file_bytes"] / summed["used_bytes"]
    assert summed["map_bytes"] > maker.budget_bytes
    assert summed["budget_bytes"] is None
    assert summed["readers"] == []
    assert [(each["stale"], each["entries"]) for each in summed["namespaces"]] == [
        (False, 2),
        (True, 1),
    ]
    assert sum(each["charged_bytes"] for each in summed["namespaces"]) == summed["used_bytes"]
    sizes = {each["below_bytes"]: each["entries"] for each in summed["sizes"]}
    assert (sizes[4096], sizes[65536], sizes[262144], sizes[None]) == (1, 1, 1, 0)
    assert sum(each["entries"] for each in summed["ages"]) == 3
    assert summed["ages"][0]["below_s"] == 60


def test_tells_when_the_store_was_last_closed(maker):
    maker.put(1, bytes(100))
    note = maker.folder / LAST_CLOSE_FILE
    note.unlink(missing_ok=True)
    assert answer("stats", maker.folder)["last_clean_close_s"] is None
    assert re.search(r"^last close +unknown", run("stats", maker.folder).stdout, re.MULTILINE)
    note.write_text(json.dumps({"closed_s": clock.time() - 7200}))
    (maker.folder / IN_USE_FILE).unlink(missing_ok=True)
    assert answer("stats", maker.folder)["in_use_or_not_closed"] is False
    assert re.search(r"^last close +2.0 h ago$", run("stats", maker.folder).stdout, re.MULTILINE)
    (maker.folder / IN_USE_FILE).write_text("{}")
    assert answer("stats", maker.folder)["in_use_or_not_closed"] is True
    assert "ago; in use since, or not closed" in run("stats", maker.folder).stdout


def test_the_configuration_tells_the_budget(maker, tmp_path):
    maker.put(1, bytes(100))
    file = _configuration(tmp_path, maker.folder)
    assert answer("stats", file)["budget_bytes"] == 2**30
    assert "of the budget of 1.0GiB" in run("stats", file).stdout


def test_draws_bars(maker):
    maker.put_many(10)
    text = run("stats", maker.folder).stdout
    assert re.search(r"< 4\.0KiB +10  █{40}$", text, re.MULTILINE)
    assert "64.0KiB" not in text  # bars begin and end with entries
    assert re.search(r"10 entries +\w{8} current +model@main/bf16", text)


def test_an_entry_in_an_unknown_generation_is_summed_up_too(maker):
    maker.put(1, bytes(10))
    with maker.raw() as (transaction, databases):
        transaction.delete(layout.bucket_row(1), db=databases[layout.META])
    assert [each["entries"] for each in answer("stats", maker.folder)["namespaces"]] == [1]


# verify


def test_a_whole_store_is_fine(maker):
    maker.put_many(100)
    maker.put("large", bytes(3 * CHUNK_BYTES + 1))
    verified = answer("verify", maker.folder)
    assert verified.pop("elapsed_s") >= 0
    assert verified == {
        "command": "verify",
        "store": str(maker.folder),
        "ok": True,
        "entries": 101,
        "chunks": 104,
        "payload_bytes": answer("stats", maker.folder)["payload_bytes"],
        "totals": "equal",
        "findings": [],
        "repaired": None,
    }
    assert run("verify", maker.folder).stdout.endswith("all is well\n")


def test_a_flipped_byte_is_found(maker):
    maker.put_many(20)
    store_key = maker.put("victim", b"sixteen unique bytes")
    maker.flip(b"sixteen unique bytes")
    verified = answer("verify", maker.folder, code=1)
    assert not verified["ok"]
    assert verified["entries"] == 21
    assert verified["findings"] == [
        {
            "cause": "chunk_digest",
            "store_key": store_key,
            "detail": "chunk 0 does not match its digest",
        }
    ]
    text = run("verify", maker.folder).stdout
    assert text.startswith(f"{store_key}  chunk_digest   chunk 0 does not match")
    assert text.endswith("1 thing is bad\n")


def test_a_terminal_gets_a_progress_bar_on_stderr(maker, monkeypatch):
    from mmcache_tools.inspection import verifying

    maker.put(1, bytes(1000))
    monkeypatch.setattr(verifying, "_BAR_STEP_BYTES", 100)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with StoreReader.open(maker.folder) as reader, verifying._progress(reader) as on_bytes:
        on_bytes(50)
        on_bytes(60)
        on_bytes(200)
    with maker.raw() as (transaction, databases):
        transaction.put(layout.TOTALS_ROW, b"\xc1", db=databases[layout.META])
    with StoreReader.open(maker.folder) as reader:
        assert verifying._expected_bytes(reader) is None


# Which store


def _configuration(folder, store, **disk):
    file = folder / "mmcache.yaml"
    sections = {
        "namespace": "n",
        "hot": {"max_size": "1MiB", "device": "cpu"},
        "disk": {"path": str(store), "max_size": "1GiB", **disk},
    }
    file.write_text(yaml.safe_dump(sections))
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_the_store_can_be_named_by_yaml_or_environment(maker, tmp_path, command):
    file = _configuration(tmp_path, maker.folder)
    assert answer(command, file)["store"] == str(maker.folder)
    for named in (file, maker.folder):
        result = run(command, "--json", env={outcome.ENVIRONMENT_VARIABLE: str(named)})
        assert json.loads(result.stdout)["store"] == str(maker.folder)


def test_show_takes_one_argument_for_the_key(maker):
    store_key = maker.put(1)
    env = {outcome.ENVIRONMENT_VARIABLE: str(maker.folder)}
    assert store_key in run("show", "1", env=env).stdout
    assert store_key in run("show", store_key[:8], env=env).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls"], "no store is named"),
        (["show", "1"], "no store is named"),
        (["show", "."], "name a KEY after it"),
        (["show"], "Missing argument"),
        (["show", "a", "b", "c"], "one KEY"),
        (["show", "a", "--jsn"], "no option --jsn"),
        (["ls", ".", "--limit", "0"], "--limit"),
        (["ls", ".", "--sort", "beauty"], "--sort"),
        (["verify", ".", "extra"], "extra"),
    ],
)
def test_wrong_usage_ends_with_two(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


# What cannot be opened


def _clear_refusal(result, *parts):
    """One line on stderr, nothing on stdout, code 3."""
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("mmcache: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("command", COMMANDS)
def test_stores_that_cannot_be_opened(command, tmp_path, maker):
    def refused(place, *parts):
        _clear_refusal(run(command, place), *parts)
        _clear_refusal(run(command, place, "--json"), *parts)

    refused(tmp_path / "nowhere", "there is no such folder or file", "Name the folder")
    refused(tmp_path / "nowhere.yaml", "nowhere.yaml")
    refused(tmp_path, "there is no store here")
    no_disk = tmp_path / "no_disk.yaml"
    no_disk.write_text("hot: {max_size: 1MiB}")
    refused(no_disk, "disk", "has no store")
    no_disk.write_text("hot: [")
    refused(no_disk, "not valid YAML")
    data = (maker.folder / layout.DATA_FILE).read_bytes()
    broken = tmp_path / "broken"
    broken.mkdir()
    for content, says in (
        (b"", "there is no store here"),
        (b"no LMDB file" * 1000, "is not LMDB's"),
        (data[:9000], "of "),
    ):
        (broken / layout.DATA_FILE).write_bytes(content)
        refused(broken, says)


def test_an_lmdb_file_of_somebody_else(tmp_path):
    import lmdb

    with lmdb.open(str(tmp_path), max_dbs=1) as environment:
        pass
    _clear_refusal(run("ls", tmp_path), "nothing was ever stored")
    with lmdb.open(str(tmp_path), max_dbs=1) as environment, environment.begin(write=True) as txn:
        txn.put(b"theirs", b"x")
    _clear_refusal(run("ls", tmp_path), "not a store of tiered_mmcache")


def test_a_later_format(maker):
    with maker.raw() as (transaction, databases):
        transaction.put(layout.FORMAT_ROW, b"\x91\x63", db=databases[layout.META])
    _clear_refusal(run("ls", maker.folder), "format version 99", "Upgrade")


def test_damaged_totals_point_to_verify(maker):
    with maker.raw() as (transaction, databases):
        transaction.put(layout.TOTALS_ROW, b"\xc1", db=databases[layout.META])
    _clear_refusal(run("ls", maker.folder), "the store is damaged", "`mmcache verify`")
    assert answer("verify", maker.folder, code=1)["findings"][0]["cause"] == "totals"


def test_no_permission(maker, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tiered_mmcache.disk.recovery.check_length", refuse)
    _clear_refusal(run("ls", maker.folder), "Permission denied", "right to read")


def _as_nobody(*arguments):
    """Run a command in a child that is no longer root; whoever runs the tests as a user is none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            result = run(*arguments)
            os.write(writing, json.dumps([result.exit_code, result.stdout, result.stderr]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        exit_code, stdout, stderr = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return types.SimpleNamespace(exit_code=exit_code, stdout=stdout, stderr=stderr, output=stdout)


def test_no_permission_for_real(maker):
    assert run("ls", maker.folder).exit_code == 0  # and everything is imported
    (maker.folder / layout.DATA_FILE).chmod(0)
    _clear_refusal(_as_nobody("ls", maker.folder), "Permission denied")


def test_pages_that_lmdb_cannot_read(maker):
    """Errors of LMDB become a line or a finding; a signal that it dies of becomes a line."""
    maker.put_many(2000)
    file = maker.folder / layout.DATA_FILE
    whole = file.read_bytes()
    ends = set()
    for seed in range(4):
        data = bytearray(whole)
        rng = random.Random(seed)
        for page in rng.sample(range(2, len(data) // 4096), len(data) // 4096 // 8):
            at = page * 4096 + 16
            data[at : at + 200] = rng.randbytes(200)
        file.write_bytes(data)
        for command in COMMANDS:
            result = run_process(command, maker.folder)
            ends.add(result.returncode)
            assert result.returncode in (0, 1, 3), result.stderr
            assert "Traceback" not in result.stderr
            if result.returncode == 3:
                assert result.stderr.splitlines()[-1].startswith("mmcache: ")
    assert 3 in ends


# As processes


def test_ten_thousand_entries_without_torch(maker):
    maker.put_many(10_000)
    script = (
        "import atexit, os, sys\n"
        "from mmcache_tools.inspection import outcome\n"
        "outcome._writes_to_descriptors = lambda: False\n"
        "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
        "from mmcache_tools.cli import main\n"
        "main()\n"
    )
    for arguments in (["ls"], ["ls", "--json"], ["stats"], ["verify"]):
        command = [sys.executable, "-c", script, *arguments, str(maker.folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert not {"torch", "numpy", "rich.table"} & set(result.stderr.split())
        if arguments == ["ls"]:
            assert len(result.stdout.splitlines()) == 10_002
    command = [sys.executable, "-c", script, "show", str(maker.folder), "77"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "torch" not in result.stderr.split()
    assert "numpy" in result.stderr.split()


def test_a_process_ends_as_the_command_does(maker, tmp_path):
    maker.put("victim", b"sixteen unique bytes")
    assert run_process("ls", maker.folder).returncode == 0
    assert run_process("ls").returncode == 2
    assert run_process("ls", tmp_path / "nowhere").returncode == 3
    maker.flip(b"sixteen unique bytes")
    result = run_process("verify", maker.folder, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["findings"]


def test_a_reader_that_has_seen_enough(maker):
    maker.put_many(5000)
    command = [sys.executable, "-m", "mmcache_tools", "ls", str(maker.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


def test_a_live_store(maker):
    """The writer goes on while others look, and no reader stays behind."""
    maker.put_many(600)
    with maker.open() as store:
        for key in range(1000, 1010):
            store.apply([maker.entry(key, bytes(CHUNK_BYTES + key))])
            process = run_process("ls", maker.folder, "--json", "--limit", "1")
            assert json.loads(process.stdout)["entries"][0]["key"] == str(key)
        assert json.loads(run_process("verify", maker.folder, "--json").stdout)["ok"]
        assert run_process("stats", maker.folder).returncode == 0
        assert run_process("show", maker.folder, "1005").returncode == 0
        pids = set(re.findall(r"^\s*(\d+) ", store._environment.readers(), re.MULTILINE))
        assert pids <= {str(os.getpid())}


def test_a_reader_of_another_process_is_named(maker):
    maker.put(1)
    with maker.open() as store, store._reading():
        text = run_process("stats", maker.folder).stdout
        summed = json.loads(run_process("stats", maker.folder, "--json").stdout)
    assert f"process {os.getpid()} at transaction" in text
    assert [each["pid"] for each in summed["readers"]] == [os.getpid()]
    assert isinstance(summed["readers"][0]["transaction"], int)
