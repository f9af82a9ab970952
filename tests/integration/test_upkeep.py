"""The commands that change a store: what is gone afterwards, what is left, what they refuse."""

import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.inspection import outcome
from tiered_mmcache.disk import folder, layout, maintenance
from tiered_mmcache.disk.audit import Audit, TotalsState
from tiered_mmcache.disk.changes import BeginGeneration
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.entries.record import CHUNK_BYTES


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch):
    monkeypatch.delenv(outcome.ENVIRONMENT_VARIABLE, raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def run_process(*arguments):
    command = [sys.executable, "-m", "mmcache_tools", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def answer(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def keys_in(store):
    return sorted(row["key"] for row in answer("ls", store)["entries"])


def assert_whole(store):
    with StoreReader.open(store) as reader:
        audit = Audit(reader)
        assert list(audit.findings()) == []
        assert audit.totals is TotalsState.EQUAL


@pytest.fixture
def filled(maker):
    """Entries 1 to 4 in one namespace, 5 and 6 in another."""
    for key in (1, 2, 3, 4):
        maker.put(key, bytes(key * 1000))
    maker.namespace = "other@main"
    for key in (5, 6):
        maker.put(key, bytes(key * 1000))
    return maker


# rm


def test_removes_by_key_and_by_store_key(filled):
    store_key = filled.put(7, bytes(3 * CHUNK_BYTES))
    removed = answer("rm", filled.folder, store_key[:12], "2")
    assert removed["removed"] == [store_key, removed["removed"][1]]
    assert removed["missing"] == []
    assert keys_in(filled.folder) == ["1", "3", "4", "5", "6"]
    assert_whole(filled.folder)


def test_a_key_that_is_not_there_ends_with_one_and_the_rest_go(filled):
    result = run("rm", filled.folder, "1", "99")
    assert result.exit_code == 1
    assert "has no entry '99'" in result.stderr
    assert keys_in(filled.folder) == ["2", "3", "4", "5", "6"]


def test_an_unclear_key_removes_nothing(filled):
    filled.put(1, b"the same key in another namespace")
    result = run("rm", filled.folder, "2", "1")
    assert result.exit_code == 2
    assert keys_in(filled.folder) == ["1", "1", "2", "3", "4", "5", "6"]
    assert run("rm", filled.folder, "1", "--namespace", "other@main").exit_code == 0
    assert keys_in(filled.folder) == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize(("arguments", "says"), [(["1", "--oops"], "--oops"), ([], "KEY after")])
def test_wrong_usage_of_rm(filled, arguments, says):
    result = run("rm", filled.folder, *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


# prune


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--namespace", "other@main"], ["1", "2", "3", "4"]),
        (["--older-than", "1h"], ["1", "2", "3", "4", "5", "6"]),
        (["--newer-than", "1h", "--smaller-than", "2500B"], ["3", "4", "5", "6"]),
        (["--prefix", "4"], None),
        (["--class", "embedding"], []),
    ],
)
def test_prunes_what_meets_all_conditions(filled, options, left):
    foreseen = answer("prune", filled.folder, *options, "--dry-run")
    before = keys_in(filled.folder)
    assert before == ["1", "2", "3", "4", "5", "6"]
    pruned = answer("prune", filled.folder, *options)
    after = keys_in(filled.folder)
    assert pruned["removed"] == foreseen["removed"] == len(before) - len(after)
    assert pruned["removed_bytes"] == foreseen["removed_bytes"]
    assert foreseen["used_bytes"] - pruned["used_bytes"] == pruned["removed_bytes"]
    assert left is None or after == left
    assert "4" not in after or options[0] != "--prefix"
    assert_whole(filled.folder)


def test_old_entries_go(filled, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 8 * 86400)
    filled.put(7, b"new")
    assert "6 entries" in run("prune", filled.folder, "--older-than", "1w").stdout
    assert keys_in(filled.folder) == ["7"]


def test_prunes_to_a_size_from_the_least_recently_used_on(maker):
    for key in range(20):
        maker.put(key, bytes(100_000))
    maker.touch(0)
    foreseen = answer("prune", maker.folder, "--to-size", "1MiB", "--dry-run")
    pruned = answer("prune", maker.folder, "--to-size", "1MiB")
    assert pruned["used_bytes"] <= 2**20
    left = keys_in(maker.folder)
    assert left == sorted(["0", *map(str, range(20 - len(left) + 1, 20))])
    assert len(left) + pruned["evicted"] == 20
    assert abs(foreseen["evicted"] - pruned["evicted"]) <= 1
    assert_whole(maker.folder)


def test_many_entries_go_in_bounded_transactions(maker, monkeypatch):
    maker.put_many(50)
    monkeypatch.setattr(maintenance, "MOST_EVICTED_ENTRIES", 8)
    with StoreReader.open(maker.folder) as reader:
        before = reader.last_transaction()
    assert answer("prune", maker.folder, "--namespace", maker.namespace)["removed"] == 50
    with StoreReader.open(maker.folder) as reader:
        assert reader.last_transaction() - before >= 50 // 8


def test_prune_asks_what_is_to_go(filled):
    result = run("prune", filled.folder)
    assert result.exit_code == 2
    assert "say what is to go" in result.stderr


def test_a_live_store_is_pruned_and_its_server_goes_on(filled):
    with filled.open() as store:
        result = run_process("prune", filled.folder, "--namespace", "other@main", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["removed"] == 2
        assert run_process("rm", filled.folder, "1").returncode == 0
        assert store.totals().entries == 3
        store.apply([filled.entry(8, b"more")])
    assert keys_in(filled.folder) == ["2", "3", "4", "8"]
    assert_whole(filled.folder)


# verify --repair


def test_repair_drops_damaged_entries_alone(filled):
    filled.put("damaged", b"\x5a\xa5" * 4096)
    with filled.raw() as (transaction, tables):
        key = bytes.fromhex(filled.store_key("damaged").hex())
        row = layout.chunk_key(key, 0)
        transaction.put(row, b"x" * 8192, db=tables[layout.CHUNKS])
    found = answer("verify", filled.folder, "--repair", code=1)
    assert [each["cause"] for each in found["findings"]] == ["chunk_digest"]
    assert found["repaired"] == {"dropped": 1, "rows": 0, "totals_counted": True, "left": 0}
    assert keys_in(filled.folder) == ["1", "2", "3", "4", "5", "6"]
    assert_whole(filled.folder)


def _break_record(transaction, tables, key):
    row = bytearray(transaction.get(key, db=tables[layout.ENTRIES]))
    row[-1] ^= 0xFF
    transaction.put(key, bytes(row), db=tables[layout.ENTRIES])


def _shorten_row(transaction, tables, key):
    transaction.put(key, b"short", db=tables[layout.ENTRIES])


def _lose_entry(transaction, tables, key):
    transaction.delete(key, db=tables[layout.ENTRIES])


def _lose_recency(transaction, tables, key):
    row = transaction.get(key, db=tables[layout.ENTRIES])
    transaction.delete(row[: layout.PLACE_BYTES], db=tables[layout.RECENCY])


def _lose_chunk(transaction, tables, key):
    transaction.delete(layout.chunk_key(key, 0), db=tables[layout.CHUNKS])


def _add_chunk(transaction, tables, key):
    transaction.put(layout.chunk_key(key, 9), b"more", db=tables[layout.CHUNKS])


def _add_loose_row(transaction, tables, key):
    transaction.put(layout.Place(1, 10**6).to_bytes(), key, db=tables[layout.RECENCY])


def _move_record(transaction, tables, key):
    row = transaction.get(key, db=tables[layout.ENTRIES])
    transaction.put(bytes(16), row, db=tables[layout.ENTRIES])


@pytest.mark.parametrize(
    "damage",
    [
        *(_break_record, _shorten_row, _lose_entry, _lose_recency, _lose_chunk, _add_chunk),
        *(_add_loose_row, _move_record),
    ],
)
def test_repair_leaves_a_whole_store(filled, damage):
    with filled.raw() as (transaction, tables):
        damage(transaction, tables, filled.store_key(5))
    assert answer("verify", filled.folder, code=1)["repaired"] is None
    found = answer("verify", filled.folder, "--repair", code=1)
    assert found["repaired"]["left"] == 0
    assert set(keys_in(filled.folder)) >= {"1", "2", "3", "4", "6"}
    assert_whole(filled.folder)


def test_repair_of_a_whole_store_changes_nothing(filled):
    with StoreReader.open(filled.folder) as reader:
        before = reader.last_transaction()
    found = answer("verify", filled.folder, "--repair")
    assert found["repaired"] == {"dropped": 0, "rows": 0, "totals_counted": False, "left": 0}
    with StoreReader.open(filled.folder) as reader:
        assert reader.last_transaction() == before


def test_repair_beside_a_server_leaves_the_totals(filled):
    with filled.raw() as (transaction, tables):
        books = layout.Bookkeeping(entries=9, next_sequence=100, next_bucket=9)
        transaction.put(layout.TOTALS_ROW, books.to_bytes(), db=tables[layout.META])
        _lose_chunk(transaction, tables, filled.store_key(5))
    with filled.open():
        result = run_process("verify", filled.folder, "--repair", "--json")
        assert result.returncode == 1, result.stderr
        assert json.loads(result.stdout)["repaired"] == {
            "dropped": 1,
            "rows": 0,
            "totals_counted": False,
            "left": 1,
        }
    assert "totals counted anew" in run("verify", filled.folder, "--repair").stdout
    assert_whole(filled.folder)


# compact


def test_compacts_and_keeps_everything(filled):
    filled.put("large", bytes(4 * 1024 * 1024))
    filled.put("stays", bytes(range(256)) * 64)
    run("rm", filled.folder, "large")
    before = answer("ls", filled.folder)["entries"]
    compacted = answer("compact", filled.folder)
    assert compacted["before_bytes"] - compacted["after_bytes"] > 4 * 1024 * 1024
    assert compacted["after_bytes"] == (filled.folder / layout.DATA_FILE).stat().st_size
    after = answer("ls", filled.folder)["entries"]
    for row in (*before, *after):
        row.pop("age_s")
    assert after == before
    assert_whole(filled.folder)
    filled.put("more", bytes(1000))
    assert_whole(filled.folder)
    assert not list(filled.folder.glob(".compact-*"))


def test_compact_refuses_while_a_server_has_the_store_open(filled):
    with filled.open():
        result = run_process("compact", filled.folder)
        assert result.returncode == 3
        assert "has the store open. Stop it first" in result.stderr
    assert run("compact", filled.folder).exit_code == 0


def test_a_reader_that_is_open_during_compaction_reads_on(filled):
    with StoreReader.open(filled.folder) as reader:
        result = run_process("compact", filled.folder)
        assert result.returncode == 0, result.stderr
        put_elsewhere(filled)
        assert reader.totals().entries == 6
        assert len(list(reader.entries())) == 6
    assert "7" in keys_in(filled.folder)
    assert_whole(filled.folder)


def put_elsewhere(maker):
    """Write to the store in a process of its own, as this one has a reader in the old file."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\nfrom conftest import Maker\n"
        "made = Maker(Path(sys.argv[1])); made.put(7, b'new')\n"
    )
    folder_of_tests = __file__.rpartition("/")[0]
    subprocess.run(
        [sys.executable, "-c", script, str(maker.folder), folder_of_tests], check=True, timeout=60
    )


@pytest.mark.parametrize("at", ["copy", "check", "replace"])
def test_an_interrupted_compaction_leaves_the_store(filled, monkeypatch, at):
    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if at == "copy":
            patch.setattr(StoreReader, "copy_compactly", fail)
        elif at == "check":
            patch.setattr(maintenance, "_flush", fail)
        else:
            patch.setattr(maintenance.Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            maintenance.compact(filled.folder)
    assert keys_in(filled.folder) == ["1", "2", "3", "4", "5", "6"]
    assert_whole(filled.folder)
    filled.put(7)
    assert_whole(filled.folder)


def test_a_copy_that_lacks_rows_is_not_taken(filled, monkeypatch):
    counts = iter([[6], [5]])
    monkeypatch.setattr(StoreReader, "row_counts", lambda _: next(counts))
    before = (filled.folder / layout.DATA_FILE).stat().st_ino
    result = run("compact", filled.folder)
    assert result.exit_code == 3
    assert "lacks rows" in result.stderr
    assert (filled.folder / layout.DATA_FILE).stat().st_ino == before
    assert not list(filled.folder.glob(".compact-*"))


def test_what_a_killed_compaction_left_behind_is_removed(filled):
    left = filled.folder / f"{folder.COMPACTING}12"
    left.mkdir()
    (left / layout.DATA_FILE).write_bytes(b"half")
    assert run("compact", filled.folder).exit_code == 0
    assert not left.exists()


def test_compaction_keeps_the_note_of_an_unclean_use(filled):
    folder.note_use(filled.folder)
    assert run("compact", filled.folder).exit_code == 0
    assert not folder.last_use_was_clean(filled.folder)


# copy


def _rows(store):
    rows = answer("ls", store)["entries"]
    for row in rows:
        row.pop("age_s")
    return rows


def test_copies_records_order_and_generations(filled, tmp_path):
    filled.put("large", bytes(range(256)) * 4096)
    filled.namespace = "model@main/bf16"
    filled.begin("2")
    filled.put(8, b"newer")
    filled.touch(8)
    destination = tmp_path / "elsewhere" / "copy"
    copied = answer("copy", filled.folder, destination)
    assert (copied["entries"], copied["damaged"], copied["changed"]) == (8, 0, 0)
    assert _rows(destination) == _rows(filled.folder)
    assert (
        answer("stats", destination)["used_bytes"] == answer("stats", filled.folder)["used_bytes"]
    )
    assert answer("show", destination, "'large'")["digests"]["state"] == "matching"
    assert_whole(destination)
    assert [each.name for each in destination.parent.iterdir()] == ["copy"]
    filled.folder = destination  # the copy is a store to be written to
    filled.put(9, b"more")
    assert keys_in(destination) == sorted([*"12345689", "'large'"])
    assert_whole(destination)


def test_a_copy_of_a_live_store_holds_no_reader(filled, tmp_path, monkeypatch):
    """Another process removes an entry meanwhile: the copy is whole, and has the others."""
    seen = []
    visit_chunks = StoreReader.visit_chunks

    def disturbed(self, entry, visit):
        seen.append([each.transaction for each in self.readers()])
        if len(seen) == 3:
            removed = run_process("rm", filled.folder, entry.store_key.hex())
            assert removed.returncode == 0, removed.stderr
        return visit_chunks(self, entry, visit)

    monkeypatch.setattr(StoreReader, "visit_chunks", disturbed)
    copied = answer("copy", filled.folder, tmp_path / "copy")
    assert (copied["entries"], copied["changed"]) == (5, 1)
    assert seen == [[None]] * 6
    monkeypatch.undo()
    assert_whole(tmp_path / "copy")


def test_a_copy_leaves_damage_behind(filled, tmp_path):
    with filled.raw() as (transaction, tables):
        _lose_chunk(transaction, tables, filled.store_key(5))
        _break_record(transaction, tables, filled.store_key(6))
    result = run("copy", filled.folder, tmp_path / "copy")
    assert result.exit_code == 1
    assert "left out because damaged: 2" in result.stderr
    assert keys_in(tmp_path / "copy") == ["1", "2", "3", "4"]
    assert_whole(tmp_path / "copy")


def test_a_destination_that_is_there_is_refused(filled, tmp_path):
    (tmp_path / "copy").mkdir()
    result = run("copy", filled.folder, tmp_path / "copy")
    assert result.exit_code == 3
    assert "already. Name a folder that is not there yet" in result.stderr
    assert list((tmp_path / "copy").iterdir()) == []


def test_an_interrupted_copy_leaves_nothing(filled, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoreReader, "visit_chunks", fail)
    result = run("copy", filled.folder, tmp_path / "place" / "copy")
    assert result.exit_code == 3
    assert "Free space on that file system" in result.stderr
    assert list((tmp_path / "place").iterdir()) == []


# all of them


@pytest.mark.parametrize("arguments", [["rm", "1"], ["prune", "--older-than", "1h"], ["compact"]])
def test_what_is_no_store_is_refused_and_left_alone(tmp_path, arguments):
    name, *options = arguments
    result = run(name, tmp_path, *options)
    assert result.exit_code == 3
    assert "there is no store here" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_store_is_refused_and_not_set_aside(filled):
    with filled.raw() as (transaction, tables):
        transaction.put(layout.TOTALS_ROW, b"\xff", db=tables[layout.META])
    result = run("rm", filled.folder, "1")
    assert result.exit_code == 3
    assert not list(filled.folder.glob(".quarantine-*"))


def test_a_generation_that_is_gone_is_pruned_first(filled):
    filled.namespace = "model@main/bf16"
    filled.apply(BeginGeneration(namespace=filled.namespace, generation=bytes(16)))
    pruned = answer("prune", filled.folder, "--to-size", "24KiB")
    assert 1 <= pruned["evicted"] <= 4
    assert {"5", "6"} <= set(keys_in(filled.folder))
    assert_whole(filled.folder)
