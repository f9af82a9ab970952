"""docs/operations.md knows every metric and every reason, and no others.

Owns: the comparison of that page with the exported names. Does not own: its examples and links
(test_documentation.py).
"""

import re
from pathlib import Path

from tiered_mmcache.metrics.families import FAMILIES, MISS_REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def rows(heading):
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    return [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]


def test_the_table_of_metrics_is_that_of_the_code():
    documented = [tuple(cell.strip("| ") for cell in row) for row in rows("The metrics")]
    assert documented == [
        (
            f"`{family.exported_name}`",
            family.kind.value,
            f"`{family.label}`" if family.label else "none",
            family.meaning,
        )
        for family in FAMILIES
    ]


def test_every_reason_of_a_miss_is_explained():
    explained = [
        name for row in rows("Why a look-up missed") for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert sorted(explained) == sorted(MISS_REASONS)
    assert len(explained) == len(set(explained))
