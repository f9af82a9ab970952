"""The tables of an open store, and what every transaction reads from them.

Owns: the handles of the databases, and decoding the rows that readers and the writer share.
Does not own: transactions (:mod:`.store`) or changes (:mod:`.changes`). Imports no torch.
"""

from __future__ import annotations

import lmdb

from tiered_mmcache.disk import layout
from tiered_mmcache.disk.layout import Bookkeeping, Bucket
from tiered_mmcache.entries.keys import namespace_digest
from tiered_mmcache.entries.keys import store_key as make_store_key
from tiered_mmcache.entries.record import Record, decode_record
from tiered_mmcache.errors import RecordError


class Tables:
    """The databases of one environment.

    Args:
        environment: Open; the databases are made when it may be written.

    Attributes:
        entries: Store key to place and record.
        chunks: Store key and number to a part of the payload.
        recency: Place to store key.
        meta: Totals, namespaces, generations, the format's version.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        create = not environment.flags()["readonly"]
        self.entries = environment.open_db(layout.ENTRIES, create=create)
        self.chunks = environment.open_db(layout.CHUNKS, create=create)
        self.recency = environment.open_db(layout.RECENCY, create=create)
        self.meta = environment.open_db(layout.META, create=create)

    def bookkeeping(self, transaction: lmdb.Transaction) -> Bookkeeping:
        """The totals row.

        Raises:
            RecordError: It is damaged.
        """
        row = transaction.get(layout.TOTALS_ROW, db=self.meta)
        return Bookkeeping() if row is None else Bookkeeping.from_bytes(bytes(row))

    def pages_in_use(self, transaction: lmdb.Transaction) -> int:
        """Pages that hold rows, as LMDB counts them, free ones left out."""
        pages = 0
        for table in (self.entries, self.chunks, self.recency, self.meta):
            counts = transaction.stat(table)
            pages += counts["branch_pages"] + counts["leaf_pages"] + counts["overflow_pages"]
        return pages

    def buckets(self, transaction: lmdb.Transaction) -> list[Bucket]:
        """Every generation of every namespace.

        Raises:
            RecordError: A row is damaged.
        """
        return layout.read_buckets(transaction.cursor(self.meta))

    def coldest(self, transaction: lmdb.Transaction, namespace: str) -> Record | None:
        """The entry of a namespace's current generation that was used longest ago.

        Raises:
            RecordError: It is damaged.
        """
        digest = namespace_digest(namespace)
        generation = transaction.get(layout.namespace_row(digest), db=self.meta)
        if generation is None:
            return None
        row = layout.generation_row(digest, bytes(generation))
        prefix = transaction.get(row, db=self.meta)  # the number of its bucket
        if prefix is None:
            return None
        cursor = transaction.cursor(self.recency)
        if not cursor.set_range(bytes(prefix)) or not bytes(cursor.key()).startswith(bytes(prefix)):
            return None
        return self.record(transaction, bytes(cursor.value()), None)

    def record(
        self, transaction: lmdb.Transaction, store_key: bytes, full_key: bytes | None
    ) -> Record | None:
        """The record under a store key, unless it is of another ``full_key``.

        Raises:
            RecordError: It is damaged, or does not belong under this key: namespace, generation
                and full key together make the key again.
        """
        value = transaction.get(store_key, db=self.entries)
        if value is None:
            return None
        record = decode_record(bytes(value[layout.PLACE_BYTES :]))
        if full_key is None:
            return record
        if record.full_key != full_key:
            return None
        own_key = make_store_key(
            namespace=record.namespace, generation=record.generation, full_key=record.full_key
        )
        if own_key != store_key:
            raise RecordError("misplaced", "the record lies under the key of another")
        return record
