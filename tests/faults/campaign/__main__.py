"""Run the campaigns, print their table, fail when a bound is missed."""

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from .children import last_lines
from .outcome import table

CAMPAIGNS = [
    "kill_loop",
    "damage",
    "full_disk",
    "churn",
    "many_processes",
    "stopped_worker",
    "fuzz",
    "store_faults",
    "ranks",
]
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


def main():
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--only", choices=CAMPAIGNS, action="append", help="run this one")
    parser.add_argument("--small", action="store_true", help="reduced size, as in `make test`")
    parser.add_argument("--json", action="store_true", help="print one JSON object a campaign")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    options = parser.parse_args()
    outcomes = []
    for name in options.only or CAMPAIGNS:
        outcomes.append(_run(name, full=not options.small))
        if options.json:
            print(json.dumps({**vars(outcomes[-1]), "failures": outcomes[-1].failures}))
    report = f"{table(outcomes)}\n\n{_machine()}"
    if not options.json:
        print(report)
    failures = [f"{each.campaign}: {why}" for each in outcomes for why in each.failures]
    for failure in failures:
        print(f"MISSED {failure}", file=sys.stderr)
    if options.write and not failures:
        _write(options.write, report)
    return 1 if failures else 0


def _run(name, *, full):
    campaign = importlib.import_module(f"{__package__}.{name}")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        outcome = campaign.run(Path(folder), full=full)
        if outcome.failures:
            print(last_lines(Path(folder) / "stderr.log"), file=sys.stderr)
    outcome.figures.append(f"{time.monotonic() - began_s:.0f} s")
    print(f"{name}: {'failed' if outcome.failures else 'passed'}", file=sys.stderr, flush=True)
    return outcome


def _machine():
    import lmdb
    import torch

    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lmdb_version = ".".join(map(str, lmdb.version()))
    return (
        f"Machine: {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory_gib:.0f} GiB of memory, Linux {platform.release().split('-')[0]}; "
        f"{versions}, LMDB {lmdb_version}."
    )


def _write(page, report):
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text(f"{before}{_BEGIN}\n{report}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
