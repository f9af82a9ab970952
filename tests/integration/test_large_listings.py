"""Listings that are larger than a screen: memory, the writer beside them, and the lines' text."""

import contextlib
import fcntl
import io
import json
import re
import subprocess
import sys
import tracemalloc

import pytest

from mmcache_tools.bench.populate import populate
from mmcache_tools.inspection import lines, listing, selection, sorting, statistics
from mmcache_tools.inspection.rows import entry_row
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.keys import combine_hashes

FEW, MANY = 3_000, 15_000
KIB = 1024
NOW_S = 2_000_000_000.0


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores, one with five times as many entries."""
    folder = tmp_path_factory.mktemp("stores")
    for entries in (FEW, MANY):
        populate(folder / str(entries), entries, 2**28)
    return {entries: folder / str(entries) for entries in (FEW, MANY)}


class _Nowhere(io.TextIOBase):
    def write(self, text):
        return len(text)


def _peak_bytes(work):
    with contextlib.redirect_stdout(_Nowhere()):
        work()  # what is imported and kept once does not count
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"as_json": True},
        {"tree": True},
        {"order": "size"},
        {"order": "key", "as_json": True},
        {"order": "age", "limit": 50},
        {"selection": selection.Selection(prefix="1")},
        "stats",
    ],
    ids=str,
)
def test_memory_does_not_grow_with_the_entries(stores, monkeypatch, wanted):
    monkeypatch.setattr(sorting, "RUN_BYTES", 64 * KIB)

    def work(entries):
        target = Target(folder=stores[entries])
        if wanted == "stats":
            return statistics.sum_up(target, as_json=False)
        return listing.list_store(target, listing.Listing(**{"as_json": False, **wanted}))

    few, many = (_peak_bytes(lambda entries=entries: work(entries)) for entries in (FEW, MANY))
    assert many < few + 256 * KIB  # what 12,000 ranks more would take is 800 KiB, rows 1,400


def _written_over(maker, *, rounds, between=lambda store: None):
    """Write the same entries again and again; the length of the file in the end."""
    with maker.open() as store:
        for number in range(rounds):
            store.apply([maker.entry(key, bytes([number]) * 5000) for key in range(300)])
            between(store)
    return (maker.folder / layout.DATA_FILE).stat().st_size


def test_a_reader_that_stops_reading_holds_nothing(maker, tmp_path):
    """A listing is left standing in a pager while the store is written over many times."""
    beside = type(maker)(tmp_path / "beside")
    beside.begin()
    for each in (maker, beside):
        _written_over(each, rounds=3)
        each.put_many(3000)
    command = [sys.executable, "-m", "mmcache_tools", "ls", str(maker.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # much less than the listing
        process.stdout.readline()
        held = []

        def look(store):
            found = re.findall(r"^\s*(\d+)\s+\S+\s+(\d+)", store._environment.readers(), re.M)
            held.append([pid for pid, _ in found])

        read_beside = _written_over(maker, rounds=40, between=look)
        assert held[-1] == []  # no transaction is open, though the listing is not at its end
        assert process.poll() is None
        rest = process.stdout.read().decode().splitlines()
        assert process.wait(timeout=60) == 0
    assert "entries listed" in rest[-1]
    assert read_beside <= _written_over(beside, rounds=40) + 64 * KIB


@pytest.fixture
def odd(maker):
    """Entries that differ in every field, stale ones and strange names among them."""
    maker.namespace = 'quoted "name" \x1b[2J'
    maker.put("old\n", bytes(10))
    maker.begin("2")
    maker.put(combine_hashes([1, 2]), bytes(24), shape=(3, 4), dtype="bfloat16", item_bytes=2)
    maker.namespace = "second/\u00fc\u4e2d"
    maker.put("k" * 100, bytes(300_000), cost_s=0.25, class_tag="other \x07", device_type="cuda")
    maker.put(-(2**70), b"", shape=(0, 8))
    maker.put(b"\xff\x00", b"x", shape=())
    return maker


def test_a_json_line_is_that_of_its_row(odd):
    with StoreReader.open(odd.folder) as reader:
        stale = {bucket.number for bucket in reader.buckets() if bucket.stale}
        entries = list(
            selection.Selector(selection.EVERYTHING, now_s=NOW_S).selected(reader.entries())
        )
    as_json = lines.JsonLines(stale, now_s=NOW_S)
    as_text = lines.TextLines(stale, now_s=NOW_S)
    assert len(entries) == 5
    for entry in entries:
        row = entry_row(entry, stale, now_s=NOW_S)
        assert as_json.line(entry) == json.dumps(row.as_dict())
        text = as_text.line(entry)
        columns = zip(
            lines.cells(row), lines.HEADINGS, [32, 9, 8, 8, 14, 12, 16, 24, 0], strict=True
        )
        assert text == "  ".join(
            cell.rjust(width) if heading in lines.RIGHT_SIDE else cell.ljust(width)
            for cell, heading, width in columns
        )
