"""The reader and the audit on stores that are broken in one known way, or change meanwhile."""

import lmdb
import pytest

from tiered_mmcache.disk import layout, reader
from tiered_mmcache.disk.audit import Audit, Cause, ChunkCheck, TotalsState
from tiered_mmcache.disk.changes import DeleteEntry, TouchEntry
from tiered_mmcache.disk.reader import StoredEntry, StoreReader
from tiered_mmcache.entries.record import CHUNK_BYTES, EntryHeader, Record, chunk_count, digest
from tiered_mmcache.errors import RecordError


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Every walk needs several transactions."""
    monkeypatch.setattr(reader, "BATCH_ROWS", 4)
    monkeypatch.setattr(reader, "VISIT_BYTES", CHUNK_BYTES)


def audited(folder):
    with StoreReader.open(folder, readahead=True) as opened:
        audit = Audit(opened)
        found = [(finding.cause, finding.store_key) for finding in audit.findings()]
    return found, audit


@pytest.fixture
def filled(maker):
    """Nine small entries and one of four chunks, under the key ``large``."""
    maker.put_many(9)
    maker.put("large", bytes(3 * CHUNK_BYTES + 1))
    return maker


def test_a_whole_store_has_no_findings(filled):
    found, audit = audited(filled.folder)
    assert found == []
    assert (audit.entries, audit.chunks, audit.totals) == (10, 13, TotalsState.EQUAL)


def _row(transaction, databases, store_key):
    return bytes(transaction.get(store_key, db=databases[layout.ENTRIES]))


def _drop_middle_chunk(transaction, databases, store_key):
    transaction.delete(layout.chunk_key(store_key, 1), db=databases[layout.CHUNKS])


def _drop_last_chunks(transaction, databases, store_key):
    for number in (2, 3):
        transaction.delete(layout.chunk_key(store_key, number), db=databases[layout.CHUNKS])


def _add_chunk(transaction, databases, store_key):
    transaction.put(layout.chunk_key(store_key, 9), b"x", db=databases[layout.CHUNKS])


def _shorten_chunk(transaction, databases, store_key):
    transaction.put(layout.chunk_key(store_key, 3), b"xy", db=databases[layout.CHUNKS])


def _change_chunk(transaction, databases, store_key):
    transaction.put(layout.chunk_key(store_key, 3), b"x", db=databases[layout.CHUNKS])


def _change_record(transaction, databases, store_key):
    row = _row(transaction, databases, store_key)
    transaction.put(store_key, row[:-1] + b"\x01", db=databases[layout.ENTRIES])


def _cut_row(transaction, databases, store_key):
    transaction.put(store_key, b"short", db=databases[layout.ENTRIES])


def _drop_recency(transaction, databases, store_key):
    place = _row(transaction, databases, store_key)[: layout.PLACE_BYTES]
    transaction.delete(place, db=databases[layout.RECENCY])


def _drop_bucket(transaction, databases, store_key):
    transaction.delete(layout.bucket_row(1), db=databases[layout.META])


def _change_bucket(transaction, databases, store_key):
    other = layout.Bucket(number=1, namespace="other", generation=bytes(16), stale=False)
    transaction.put(layout.bucket_row(1), other.to_bytes(), db=databases[layout.META])


@pytest.mark.parametrize(
    ("damage", "causes"),
    [
        (_drop_middle_chunk, {Cause.CHUNK_COUNT}),
        (_drop_last_chunks, {Cause.CHUNK_COUNT}),
        (_add_chunk, {Cause.CHUNK_COUNT}),
        (_shorten_chunk, {Cause.CHUNK_LENGTH}),
        (_change_chunk, {Cause.CHUNK_DIGEST}),
        (_change_record, {Cause.RECORD}),
        (_cut_row, {Cause.ENTRY_ROW, Cause.RECENCY}),
        (_drop_recency, {Cause.RECENCY}),
    ],
)
def test_damage_to_one_entry_names_it_and_the_cause(filled, damage, causes):
    store_key = filled.store_key("large")
    with filled.raw() as (transaction, databases):
        damage(transaction, databases, store_key)
    found, audit = audited(filled.folder)
    assert {cause for cause, _ in found} == causes
    assert {key for _, key in found} == {store_key}
    assert audit.entries == 10


@pytest.mark.parametrize("damage", [_drop_bucket, _change_bucket])
def test_entries_outside_their_generation(filled, damage):
    with filled.raw() as (transaction, databases):
        damage(transaction, databases, b"")
    found, _ = audited(filled.folder)
    assert {cause for cause, _ in found} == {Cause.BUCKET}
    assert len(found) == 10


def test_a_damaged_generation_row_ends_the_pass_over_entries_only(filled):
    with filled.raw() as (transaction, databases):
        transaction.put(layout.bucket_row(1), b"\xc1", db=databases[layout.META])
    found, audit = audited(filled.folder)
    assert found == [(Cause.STRUCTURE, None)]
    assert audit.totals is TotalsState.EQUAL


def test_an_entry_under_the_wrong_key(filled):
    right, wrong = filled.store_key(3), bytes(16)
    with filled.raw() as (transaction, databases):
        row = _row(transaction, databases, right)
        transaction.put(wrong, row, db=databases[layout.ENTRIES])
        transaction.delete(right, db=databases[layout.ENTRIES])
    found, _ = audited(filled.folder)
    assert set(found) == {
        (Cause.STORE_KEY, wrong),
        (Cause.RECENCY, wrong),
        (Cause.CHUNK_COUNT, wrong),
        (Cause.RECENCY, right),
        (Cause.ORPHAN_CHUNKS, right),
    }


def test_chunks_and_recency_rows_without_an_entry(filled):
    store_key = filled.store_key("large")
    with filled.raw() as (transaction, databases):
        transaction.delete(store_key, db=databases[layout.ENTRIES])
    found, audit = audited(filled.folder)
    assert found == [
        (Cause.RECENCY, store_key),
        (Cause.ORPHAN_CHUNKS, store_key),
        (Cause.TOTALS, None),
    ]
    assert audit.totals is TotalsState.DIFFERENT


def test_totals_that_differ_or_are_damaged(filled):
    with filled.raw() as (transaction, databases):
        wrong = layout.Bookkeeping(entries=1, used_bytes=2, payload_bytes=3)
        transaction.put(layout.TOTALS_ROW, wrong.to_bytes(), db=databases[layout.META])
    with StoreReader.open(filled.folder) as opened:
        (finding,) = Audit(opened).findings()
    assert finding.detail.startswith("entries: 1 kept, 10 counted; used bytes: 2 kept")
    with filled.raw() as (transaction, databases):
        transaction.put(layout.TOTALS_ROW, b"\xc1", db=databases[layout.META])
    assert audited(filled.folder)[0] == [(Cause.TOTALS, None)]


def test_an_error_of_lmdb_is_a_finding(filled, monkeypatch):
    def fail(*_):
        raise lmdb.CorruptedError("page")

    monkeypatch.setattr(StoreReader, "chunk_owners", fail)
    found, audit = audited(filled.folder)
    assert found == [(Cause.STRUCTURE, None)]
    assert audit.entries == 10


# While the store changes; the changes are made between two transactions, on the same environment


class _Interfering(StoreReader):
    """Runs ``interfere`` before the given transaction, counted from one."""

    def interfere_at(self, count, interfere):
        self._countdown, self._interfere = count, interfere

    def transaction(self):
        countdown = getattr(self, "_countdown", None)
        if countdown is not None:
            self._countdown = countdown - 1
            if countdown == 1:
                self._interfere()
        return super().transaction()


def _delete(maker, store):
    store.apply([DeleteEntry(store_key=maker.store_key("large"))])


def _use(maker, store):
    store.apply([TouchEntry(store_key=maker.store_key("large"))])


def _replace(maker, store):
    store.apply([maker.entry("large", bytes(2 * CHUNK_BYTES))])


def _add(maker, store):
    store.apply([maker.entry("new", bytes(CHUNK_BYTES))])


@pytest.mark.parametrize("change", [_delete, _use, _replace, _add])
def test_a_change_at_any_moment_is_never_taken_for_damage(maker, change):
    maker.put_many(3)
    maker.put("large", bytes(3 * CHUNK_BYTES))
    with maker.open() as store:
        count = 0
        interfered = True
        while interfered:
            count += 1
            store.apply([maker.entry("large", bytes(3 * CHUNK_BYTES))])
            opened = _Interfering(store._environment)
            opened.interfere_at(count, lambda: change(maker, store))
            found = list(Audit(opened).findings())
            assert found == []
            interfered = opened._countdown <= 0
    assert count > 20


def test_the_last_entry_of_a_stale_generation_goes_with_it(maker):
    """Between reading the entry and its generation, both were evicted."""
    maker.put("large", bytes(CHUNK_BYTES))
    with maker.open() as store:
        opened = StoreReader(store._environment)
        audit = Audit(opened)

        def gone():
            _delete(maker, store)
            return []

        opened.buckets = gone
        assert list(audit.findings()) == []


def test_totals_of_a_store_that_keeps_changing_are_not_compared(filled, monkeypatch):
    numbers = iter(range(100))
    monkeypatch.setattr(StoreReader, "last_transaction", lambda _: next(numbers))
    found, audit = audited(filled.folder)
    assert found == []
    assert audit.totals is TotalsState.NOT_COMPARED


def test_totals_are_counted_again_when_something_was_committed_meanwhile(filled, monkeypatch):
    numbers = iter([1, 2, 3, 3])
    monkeypatch.setattr(StoreReader, "last_transaction", lambda _: next(numbers))
    assert audited(filled.folder)[1].totals is TotalsState.EQUAL


# Single parts


def _record(payload):
    pieces = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]
    header = EntryHeader(
        class_tag="",
        dtype="uint8",
        item_bytes=1,
        shape=(len(payload),),
        extras=b"",
        device_type="cpu",
    )
    return Record(
        header=header,
        full_key=b"",
        namespace="",
        generation=bytes(16),
        digests=b"".join(map(digest, pieces)),
        created_s=0.0,
    )


def test_a_check_of_chunks_counts_what_matches():
    payload = bytes(2 * CHUNK_BYTES + 5)
    check = ChunkCheck(_record(payload))
    assert chunk_count(len(payload)) == 3
    assert check.visit(0, memoryview(payload)[:CHUNK_BYTES])
    assert not check.visit(2, memoryview(b"12345"))
    check.finish()
    assert check.matching == 1
    assert [detail for _, detail in check.problems] == [
        "chunk 1 is missing",
        "chunk 2 does not match its digest",
    ]


def test_all_missing_chunks_are_one_problem():
    check = ChunkCheck(_record(bytes(3 * CHUNK_BYTES)))
    check.finish()
    assert check.problems == [(Cause.CHUNK_COUNT, "chunks 0-2 are missing")]


def test_an_entry_without_a_place():
    with pytest.raises(RecordError):
        _ = StoredEntry(bytes(16), b"short").place


def test_entries_by_key_come_in_the_order_asked_for(filled):
    wanted = [filled.store_key(number) for number in (8, 0, 5, 77, 3, 1)]
    with StoreReader.open(filled.folder) as opened:
        found = [entry.store_key for entry in opened.look_up(wanted)]
    assert found == [key for key in wanted if key != filled.store_key(77)]


def test_a_walk_by_recency_stops_at_a_row_that_is_no_place(filled):
    with filled.raw() as (transaction, databases):
        transaction.put(b"\x00\x00", b"x", db=databases[layout.RECENCY])
    with StoreReader.open(filled.folder) as opened:
        assert len(list(opened.newest([1]))) == 10


def test_a_failed_opening_leaves_nothing_open(filled, monkeypatch):
    def fail(*_):
        raise lmdb.CorruptedError("page")

    with monkeypatch.context() as patch:
        patch.setattr(StoreReader, "__init__", fail)
        with pytest.raises(lmdb.CorruptedError):
            StoreReader.open(filled.folder)
    assert audited(filled.folder)[0] == []  # LMDB refuses to open a file twice in one process


def test_a_visit_ends_with_false_when_the_entry_is_replaced_between_two_chunks(filled):
    with filled.open() as store:
        opened = _Interfering(store._environment)
        (entry,) = opened.look_up([filled.store_key("large")])
        opened.interfere_at(2, lambda: _replace(filled, store))
        seen = []
        assert not opened.visit_chunks(entry, lambda number, _: seen.append(number))
        assert seen == [0]
