"""What the demo found, whether it is as it must be, and how it looks.

Owns: the result as a value, the checks, the table and the progress bar.
Does not own: how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mmcache_tools.demo.second import SecondResult
from mmcache_tools.demo.session import TIERS, ItemAccount

__all__ = ["FirstResult", "as_dict", "failures", "progress", "summarise", "tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstResult:
    """What the first process saw, times in seconds.

    Attributes:
        requests: All of them.
        items: Distinct items among them.
        hits: Requests that each tier answered.
        encoder_runs: Requests that the encoder had to answer.
        encoded_again: Items that it had to encode more than once.
        refused: Embeddings that the cache did not admit.
        bit_identical: Hits with exactly the encoder's bits.
        embedding_bytes: Of all distinct items together.
        encode_s: Time of the encoder's runs.
        saved_s: Each item's mean encoder time, times its hits.
        hits_s: Time that the hits took.
    """

    requests: int
    items: int
    hits: dict[str, int]
    encoder_runs: int
    encoded_again: int
    refused: int
    bit_identical: int
    embedding_bytes: int
    encode_s: float
    saved_s: float
    hits_s: float

    @property
    def hits_of_all_tiers(self) -> int:
        """Encoder runs that the cache saved."""
        return sum(self.hits.values())


def summarise(accounts: Sequence[ItemAccount], *, hits_s: float) -> FirstResult:
    """Add up what a session knows of its items."""
    hits = {tier.value: sum(each.hits[tier] for each in accounts) for tier in TIERS}
    runs = sum(len(each.encode_s) for each in accounts)
    return FirstResult(
        requests=runs + sum(hits.values()),
        items=len(accounts),
        hits=hits,
        encoder_runs=runs,
        encoded_again=sum(len(each.encode_s) > 1 for each in accounts),
        refused=sum(each.refused for each in accounts),
        bit_identical=sum(each.identical for each in accounts),
        embedding_bytes=sum(each.embedding_bytes for each in accounts),
        encode_s=sum(sum(each.encode_s) for each in accounts),
        saved_s=sum(each.saved_s for each in accounts),
        hits_s=hits_s,
    )


def failures(first: FirstResult, second: SecondResult) -> list[str]:
    """Everything that is not as it must be, in words; empty when all is well."""
    wrong = first.hits_of_all_tiers - first.bit_identical
    silent = [tier for tier, count in first.hits.items() if count == 0]
    unserved = second.served["encoder"]
    found = [
        (first.refused, f"{first.refused} embeddings were refused: give a larger --hot"),
        (first.encoded_again, f"{first.encoded_again} items were encoded more than once"),
        (wrong, f"{wrong} embeddings served differ from what the encoder made"),
        (silent, f"no request was served from {' or '.join(silent)}: change the tiers' sizes"),
        (second.other_hashes, f"{second.other_hashes} pictures got another content hash"),
        (unserved, f"the second process would have had to encode {unserved} items"),
        (
            second.served["disk"] + unserved != second.items,
            f"of {second.items} items the second process served {second.served['disk']} from disk",
        ),
        (
            second.bit_identical + unserved != second.items,
            "the second process was served embeddings that differ from what the encoder made",
        ),
        (second.encoder_loaded, "the second process loaded the encoder"),
    ]
    return [text for is_wrong, text in found if is_wrong]


def progress(console: Console) -> Progress:
    """A bar that also tells what answered so far; its task needs the field ``served``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[served]}"),
        TimeElapsedColumn(),
        console=console,
    )


def tables(first: FirstResult, second: SecondResult) -> list[Table]:
    """The result for people."""
    return [_first_table(first), _second_table(second)]


def _first_table(first: FirstResult) -> Table:
    hits = first.hits_of_all_tiers
    return _table(
        "First process",
        [
            ("requests", f"{first.requests}"),
            ("distinct items", f"{first.items} ({first.embedding_bytes / 2**20:.1f} MiB)"),
            ("hits in the hot tier", f"{first.hits['hot']}"),
            ("hits in the host tier", f"{first.hits['host']}"),
            ("hits in the disk tier", f"{first.hits['disk']}"),
            ("encoder runs made", f"{first.encoder_runs} ({first.encode_s:.2f} s)"),
            ("encoder runs saved", f"{hits} ({first.saved_s:.2f} s; {first.hits_s:.2f} s of hits)"),
            ("bit-identical to the encoder", f"{first.bit_identical} of {hits}"),
        ],
    )


def _second_table(second: SecondResult) -> Table:
    return _table(
        "Second process, same store",
        [
            ("distinct items", f"{second.items}"),
            ("served from disk", f"{second.served['disk']} ({second.serving_s:.2f} s)"),
            ("encoder runs", f"{second.served['encoder']}"),
            ("encoder loaded", "yes" if second.encoder_loaded else "no"),
            ("bit-identical to the encoder", f"{second.bit_identical} of {second.items}"),
        ],
    )


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def as_dict(first: FirstResult, second: SecondResult) -> dict[str, Any]:
    """The result for programs."""
    problems = failures(first, second)
    return {
        **asdict(first),
        "encoder_runs_saved": first.hits_of_all_tiers,
        "second_process": asdict(second),
        "failures": problems,
        "ok": not problems,
    }
