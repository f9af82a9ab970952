"""A real Prometheus scrapes a played server; what the dashboard and the alerts ask is answered.

Owns: that every query returns series and every rule is evaluated, and when each alert fires.
Does not own: names and labels (tests/unit/test_monitoring_files.py).
"""

import math
import subprocess

import pytest
import yaml

from mmcache_tools.monitoring.prometheus_server import binary
from mmcache_tools.monitoring.scene import MONITORING, dashboard, filled_in, playing

QUERIES = sorted(
    {target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])}
)
ALERTS = {
    rule["alert"]: rule
    for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
}
LABELS = 'namespace="a",cache="0",process="1"'
# What makes each alert fire, as promtool writes series: from, +each minute x how many minutes.
FIRING = {
    "MmcacheWorkerDown": {f"mmcache_worker_is_up{{{LABELS}}}": "0x90"},
    "MmcacheWorkerRestarts": {f"mmcache_worker_starts_total{{{LABELS}}}": "1+1x90"},
    "MmcacheDamage": {f'mmcache_faults_total{{{LABELS},cause="digest"}}': "0x60 1x30"},
    "MmcacheStoreSetAside": {f"mmcache_quarantined_stores{{{LABELS}}}": "1x90"},
    "MmcacheDiskTooSlow": {
        f'mmcache_drops_total{{{LABELS},reason="write_buffer_full"}}': "0+60x90"
    },
    "MmcacheBug": {f'mmcache_faults_total{{{LABELS},cause="internal"}}': "0x60 1x30"},
}
CALM = {
    f"mmcache_worker_is_up{{{LABELS}}}": "1x90",
    f"mmcache_worker_starts_total{{{LABELS}}}": "1x90",
    f'mmcache_faults_total{{{LABELS},cause="digest"}}': "0x90",
    f'mmcache_faults_total{{{LABELS},cause="internal"}}': "0x90",
    f"mmcache_quarantined_stores{{{LABELS}}}": "0x90",
    f'mmcache_drops_total{{{LABELS},reason="write_buffer_full"}}': "0x90",
}


@pytest.fixture(scope="module")
def prometheus():
    """One that has scraped a played server often enough for rates."""
    with playing(seconds=20) as running:
        running.wait_for(lambda: bool(running.query("mmcache_entries")), "the first scrape")
        yield running


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_dashboard_returns_series(prometheus, query):
    def answered():
        values = [float(one["value"][1]) for one in prometheus.query(filled_in(query))]
        return bool(values) and not all(map(math.isnan, values))

    prometheus.wait_for(answered, query)


def test_the_variable_of_the_dashboard_has_the_namespaces(prometheus):
    (query,) = [v["query"] for v in dashboard()["templating"]["list"] if v["name"] == "namespace"]
    assert "label_values(mmcache_hits_total, namespace)" in str(query)
    values = prometheus.ask("label/namespace/values", **{"match[]": "mmcache_hits_total"})
    assert values == ["Qwen/Qwen2.5-VL-7B-Instruct@main/bf16"]


def test_every_rule_is_evaluated(prometheus):
    def rules():
        groups = prometheus.ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    prometheus.wait_for(lambda: all(rule["health"] == "ok" for rule in rules()), "the rules")
    assert {rule["name"] for rule in rules()} == ALERTS.keys()


def test_the_target_is_scraped_without_an_error(prometheus):
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


def test_promtool_finds_nothing_to_say():
    for command in (["check", "rules", "alerts.yaml"], ["check", "config", "prometheus.yaml"]):
        done = subprocess.run(
            [binary("promtool"), *command], cwd=MONITORING, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def firing(tmp_path, series):
    """The alerts that fire at the end of an hour and a half, by promtool."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "89m", "alertname": name, "exp_alerts": []} for name in ALERTS
        ],
    }
    file = tmp_path / "case.yaml"
    rules = [str(MONITORING / "alerts.yaml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": [case]}))
    done = subprocess.run(
        [binary("promtool"), "test", "rules", file], capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    fired = {name for name in ALERTS if f"alertname: {name}" in output}
    assert (done.returncode == 0) == (not fired), output
    return fired


def test_no_alert_fires_while_all_is_well(tmp_path):
    assert firing(tmp_path, CALM) == set()


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_when_it_should_and_no_other_one_does(tmp_path, alert):
    assert firing(tmp_path, {**CALM, **FIRING[alert]}) == {alert}
