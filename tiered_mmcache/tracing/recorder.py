"""Writing the access trace of one cache: records gather in memory and are written in blocks.

Owns: the file of one cache, its bound, and its end. Does not own: the format (:mod:`.format`), or
what is recorded of which call (:mod:`.recording`). Imports no torch.

No thread runs here: the caller whose request fills a block writes it, some tens of kilobytes into
the page cache. A disk that fails, or takes longer than ``_MOST_S`` for one block, ends the trace,
never the caller. A killed process loses the block that was not full.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import BinaryIO

from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.tracing.format import HEADER_BYTES, Outcome, block, header, packed

__all__ = ["TraceRecorder", "key_digest"]

log = logging.getLogger("tiered_mmcache")

BLOCK_RECORDS = 512
_MOST_S = 1.0
_MOST_PENDING = 4096
_MOST_DIGESTS = 65_536
_numbers = itertools.count()

_Row = tuple[float, Hashable, int, int, float, int]


def key_digest(key: Hashable, salt: bytes) -> int:
    """What stands for a key in a trace: 64 bits that tell nothing of it without the salt."""
    known = encode_full_key(key)
    data = f"{hash(key)}".encode() if known is None else known
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=salt[:64]).digest(), "little")


class TraceRecorder:
    """The trace of one cache.

    Args:
        folder: Where the file is; made if need be.
        most_bytes: What all traces in the folder may take together when it is begun, and this one
            at most what they leave.
        salt: Makes digests of keys; None is one of its own, that is told to nobody.
        report: Called with a cause and a problem when the trace ends early.
        clock: Seconds since 1970.

    Attributes:
        path: The file; it is begun with the first block.
        ended: Whether nothing is recorded any more.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        salt: bytes | None,
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock()))
        self.path = folder / f"mmcache-{began}-{os.getpid()}-{next(_numbers)}.trace"
        self.ended = False
        self._most_bytes = most_bytes
        self._salt = secrets.token_bytes(32) if salt is None else salt
        self._report = report
        self._clock = clock
        self._rows: list[_Row] = []
        self._digests: dict[Hashable, int] = {}
        self._pending: dict[Hashable, list[float]] = {}
        self._file: BinaryIO | None = None
        self._left_bytes = 0
        self._writing = threading.Lock()

    def hit(
        self, key: Hashable, outcome: Outcome, size_bytes: int, tokens: int, cost_s: float
    ) -> None:
        """A request that a tier answered."""
        # Threads may append while one takes the list away: what one of them adds too late is lost.
        self._rows.append((self._clock(), key, size_bytes, tokens, cost_s, outcome))
        if len(self._rows) >= BLOCK_RECORDS:
            self.flush()

    def missed(self, key: Hashable) -> None:
        """A request that no tier answered; how large the entry is, :meth:`was_set` says."""
        if self.ended:
            return
        self._pending.setdefault(key, []).append(self._clock())
        if len(self._pending) > _MOST_PENDING:
            self._settle(next(iter(self._pending)), Outcome.NOT_SET, 0, 0, 0.0)

    def was_set(
        self, key: Hashable, size_bytes: int, tokens: int, cost_s: float, *, admitted: bool
    ) -> None:
        """The entry that a look-up missed was made and set."""
        outcome = Outcome.MISS if admitted else Outcome.REFUSED
        self._settle(key, outcome, size_bytes, tokens, cost_s)

    def _settle(
        self, key: Hashable, outcome: Outcome, size_bytes: int, tokens: int, cost_s: float
    ) -> None:
        for time_s in self._pending.pop(key, ()):
            self._rows.append((time_s, key, size_bytes, tokens, cost_s, outcome))
        if len(self._rows) >= BLOCK_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered, unless another thread does."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            rows, self._rows = self._rows, []
            if rows and not self.ended:
                self._write(rows)
        except Exception as error:  # noqa: BLE001 - what is only told must not reach the engine
            self.end(str(error))
        finally:
            self._writing.release()

    def _write(self, rows: list[_Row]) -> None:
        began_s = time.monotonic()
        digest = self._digest
        data = block([packed(row[0], digest(row[1]), *row[2:]) for row in rows])
        file = self._begin() if self._file is None else self._file
        if len(data) > self._left_bytes:
            log.info("the trace %s is full", self.path)
            self._finish()
            return
        self._left_bytes -= len(data)
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, "a block was written in part")
        if time.monotonic() - began_s > _MOST_S:
            raise TimeoutError(f"a block took {time.monotonic() - began_s:.1f} s")

    def _digest(self, key: Hashable) -> int:
        known = self._digests.get(key)
        if known is None:
            if len(self._digests) >= _MOST_DIGESTS:
                self._digests.clear()
            known = self._digests[key] = key_digest(key, self._salt)
        return known

    def _begin(self) -> BinaryIO:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        there = sum(each.stat().st_size for each in folder.glob("*.trace"))
        self._left_bytes = self._most_bytes - there - HEADER_BYTES
        file = self._file = self.path.open("xb", buffering=0)
        file.write(header(self._clock()))
        return file

    def end(self, problem: str) -> None:
        """Record no more, and say why."""
        if not self.ended:
            self._report("trace_file", problem)
        self._finish()

    def _finish(self) -> None:
        self.ended = True
        self._rows.clear()
        self._digests.clear()
        self._pending.clear()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._report("trace_file", str(error))

    def close(self) -> None:
        """Write what is left; requests whose entry was never set have no size."""
        for key in list(self._pending):
            self._settle(key, Outcome.NOT_SET, 0, 0, 0.0)
        self.flush()
        with self._writing:
            self._finish()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self._writing = threading.Lock()
        self._finish()
