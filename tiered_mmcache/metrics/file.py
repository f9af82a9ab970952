"""The metrics as a file that is kept up to date, for readers on this machine without a port.

Owns: the file of one cache, when it is written, and its end.
Does not own: what is in it (:mod:`.openmetrics`). No thread runs here: the cache's caller writes,
which is why the file has to be in memory.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_numbers = itertools.count()


class MetricsFile:
    """One file, ``mmcache-<process>-<number>.prom``, replaced as a whole each time.

    Args:
        folder: Where it is; made if need be.
        interval_s: It is not written again earlier.
        text: Makes what is written.
        report: Called with a cause and a problem when it cannot be written.
        clock: Monotonic seconds.

    Attributes:
        path: The file.
    """

    def __init__(
        self,
        folder: Path,
        interval_s: float,
        text: Callable[[], bytes],
        report: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = folder / f"mmcache-{os.getpid()}-{next(_numbers)}.prom"
        self._interval_s = interval_s
        self._text = text
        self._report = report
        self._clock = clock
        self._due_at_s = clock()
        self._writing = threading.Lock()
        self._removed = False

    def write_if_due(self) -> None:
        """Write the file unless that was done a short while ago, or another thread does it."""
        now_s = self._clock()
        if now_s < self._due_at_s or not self._writing.acquire(blocking=False):
            return
        try:
            if not self._removed:
                self._due_at_s = now_s + self._interval_s
                self._write()
        finally:
            self._writing.release()

    def _write(self) -> None:
        fresh = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(self._text())
            fresh.replace(self.path)
        except Exception as error:  # noqa: BLE001 - what is only told must not reach the engine
            self._report("metrics_file", str(error))

    def remove(self) -> None:
        """Take the file away for good; not to be called with the lock of what is written held."""
        with self._writing:
            self._removed = True
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                self._report("metrics_file", str(error))
