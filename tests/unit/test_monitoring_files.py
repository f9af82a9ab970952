"""The dashboard and the alert rules ask for metrics and labels that are exported.

Owns: every name in docs/monitoring. Does not own: whether Prometheus and Grafana accept the rest.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from tiered_mmcache.metrics import families as metric_families
from tiered_mmcache.metrics.families import FAMILIES, Kind

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = QUERIES + [rule["expr"] for rule in RULES]
COMMON = {"namespace", "cache"}
VALUES = {
    "tier": {*metric_families.TIERS, "write_buffer"},
    "reason": {*metric_families.MISS_REASONS, *metric_families.DROP_REASONS},
    "cause": {*metric_families.FAULT_CAUSES},
}


def families():
    """The family of each name that a query may use."""
    for family in FAMILIES:
        if family.kind is Kind.HISTOGRAM:
            for suffix in ("_bucket", "_sum", "_count"):
                yield family.name + suffix, family
        else:
            yield family.exported_name, family


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_names_and_labels_are_exported(expression):
    known = dict(families())
    used = re.findall(r"(mmcache_\w+)(\{[^}]*\})?", expression)
    assert used
    own_labels = {"le"} if "_bucket" in expression else set()
    for name, selector in used:
        assert name in known, name
        own_labels |= {known[name].label}
        for label, operator, values in re.findall(r'(\w+)(=~?)"([^"]*)"', selector):
            assert label in COMMON | {known[name].label}, (name, label)
            if label in VALUES:
                assert set(values.split("|")) <= VALUES[label], (name, operator, values)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert set(group.split(", ")) <= own_labels | COMMON, expression


def test_legends_name_labels_that_the_query_keeps():
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_every_panel_says_what_it_shows():
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_has_a_remedy():
    assert all(rule["annotations"]["remedy"] for rule in RULES)
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_counters_are_asked_for_their_rate_only():
    for expression in EXPRESSIONS:
        for counter in re.findall(r"(\w+\()?(mmcache_\w+_(?:total|bucket))", expression):
            assert counter[0] in ("rate(", "increase("), expression
