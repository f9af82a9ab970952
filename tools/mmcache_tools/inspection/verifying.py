"""`mmcache verify`: a whole store checked, with its findings.

Owns: the progress bar, the text and the JSON. Does not own: what is checked
(:mod:`tiered_mmcache.disk.audit`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmcache_tools.inspection.outcome import ExitCode
from mmcache_tools.inspection.rows import print_json, printable, written_bytes
from mmcache_tools.inspection.target import Target
from tiered_mmcache.disk.audit import Audit, Finding, TotalsState
from tiered_mmcache.disk.reader import StoreReader
from tiered_mmcache.errors import RecordError

__all__ = ["verify_store"]

_BAR_STEP_BYTES = 16 * 1024 * 1024
_TOTALS_TEXT = {
    TotalsState.EQUAL: "totals equal a full count",
    TotalsState.DIFFERENT: "totals do not equal a full count",
    TotalsState.NOT_COMPARED: "totals not compared (the store was changing, or has damage)",
}


def verify_store(target: Target, *, as_json: bool, repair: bool = False) -> int:
    """Check the store and print what was found; the command's exit code.

    With ``repair`` what is bad is dropped afterwards; the code still says that it was found.
    """
    started_s = time.monotonic()
    findings: list[Finding] = []
    with StoreReader.open(target.folder, readahead=True) as reader, _progress(reader) as on_bytes:
        audit = Audit(reader, on_bytes=on_bytes)
        findings.extend(audit.findings())
    answer = _answer(target, audit, findings, elapsed_s=time.monotonic() - started_s)
    if repair:
        answer["repaired"] = _repaired(target, findings)
    if as_json:
        print_json(answer)
    else:
        _print_text(answer, audit)
    return ExitCode.FOUND if findings else ExitCode.FINE


def _repaired(target: Target, findings: list[Finding]) -> dict[str, Any]:
    from tiered_mmcache.disk.maintenance import Mended, opened_as_it_is

    if not findings:
        return dataclasses.asdict(Mended(dropped=0, rows=0, totals_counted=False, left=0))
    with opened_as_it_is(target.folder) as opened:
        return dataclasses.asdict(opened.mend(findings))


def _answer(
    target: Target, audit: Audit, findings: list[Finding], *, elapsed_s: float
) -> dict[str, Any]:
    return {
        "command": "verify",
        "store": str(target.folder),
        "ok": not findings,
        "entries": audit.entries,
        "chunks": audit.chunks,
        "payload_bytes": audit.payload_bytes,
        "totals": audit.totals.value,
        "elapsed_s": elapsed_s,
        "findings": [
            {
                "cause": finding.cause.value,
                "store_key": None if finding.store_key is None else finding.store_key.hex(),
                "detail": finding.detail,
            }
            for finding in findings
        ],
        "repaired": None,
    }


def _print_text(answer: dict[str, Any], audit: Audit) -> None:
    for finding in answer["findings"]:
        who = finding["store_key"] or "the store"
        print(f"{who:<32}  {finding['cause']:<13}  {printable(finding['detail'])}")
    rate = written_bytes(int(audit.payload_bytes / max(answer["elapsed_s"], 1e-6)))
    read = f"{written_bytes(audit.payload_bytes)} in {answer['elapsed_s']:.1f} s, {rate}/s"
    print(f"{audit.entries} entries, {audit.chunks} chunks checked ({read})")
    print(f"{_TOTALS_TEXT[audit.totals]}")
    count = len(answer["findings"])
    if (mended := answer["repaired"]) is not None:
        print(_mended_text(mended))
    print(
        "all is well" if not count else f"{count} {'thing is' if count == 1 else 'things are'} bad"
    )


def _mended_text(mended: dict[str, Any]) -> str:
    text = f"dropped what lies under {mended['dropped']} store keys"
    if mended["rows"]:
        text += f" and {mended['rows']} rows of the order of eviction"
    if mended["totals_counted"]:
        text += "; totals counted anew"
    if mended["left"]:
        text += f"; {mended['left']} findings need the servers stopped, or a new store"
    return text


@contextlib.contextmanager
def _progress(reader: StoreReader) -> Iterator[Callable[[int], None]]:
    """What to call with bytes as they are read; a bar on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text("" if task.speed is None else f"{written_bytes(int(task.speed))}/s")

    columns = (
        progress.BarColumn(),
        progress.TaskProgressColumn("{task.percentage:>3.0f}%"),
        progress.DownloadColumn(binary_units=True),
        Rate(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=_expected_bytes(reader))
        unshown_bytes = 0

        def on_bytes(count_bytes: int) -> None:
            nonlocal unshown_bytes
            unshown_bytes += count_bytes
            if unshown_bytes >= _BAR_STEP_BYTES:
                bar.advance(task, unshown_bytes)
                unshown_bytes = 0

        yield on_bytes


def _expected_bytes(reader: StoreReader) -> int | None:
    try:
        return reader.totals().payload_bytes
    except RecordError:
        return None
