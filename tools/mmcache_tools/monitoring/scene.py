"""A played server, its port of metrics, and a Prometheus that scrapes it, for as long as wanted.

Owns: starting and ending the three, and asking the dashboard's queries.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmcache_tools.monitoring.prometheus_server import Prometheus, running

MONITORING = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
RATE_INTERVAL = "5s"  # a few scrapes


def dashboard() -> dict[str, Any]:
    """docs/monitoring/dashboard.json."""
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return found


def filled_in(expression: str) -> str:
    """A query of the dashboard as Grafana sends it, for all namespaces."""
    return expression.replace("$__rate_interval", RATE_INTERVAL).replace("$namespace", ".*")


@contextlib.contextmanager
def playing(seconds: float) -> Iterator[Prometheus]:
    """The three, until the end of the block.

    Args:
        seconds: Over which the played server's misfortunes are divided.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-played-")
        )
        module = "mmcache_tools.monitoring.played_server"
        stack.enter_context(_process("-m", module, folder, str(seconds)))
        metrics = Path(folder, "metrics")
        metrics.mkdir()
        exporter = stack.enter_context(
            _process("-m", "mmcache_tools", "metrics", str(metrics), "--port", "0")
        )
        assert exporter.stdout is not None
        address = exporter.stdout.readline().split()[-1]  # ...at http://127.0.0.1:1234/metrics
        target = address.removeprefix("http://").removesuffix("/metrics")
        yield stack.enter_context(running(MONITORING / "prometheus.yaml", target))


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that ends when its standard input does, or at a signal."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
