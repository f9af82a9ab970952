"""The dashboard and the alerts, in the real Prometheus.

All tests here are marked ``prometheus``: they need its binary, which ``make test-prometheus``
fetches where the machine has none. A machine where it cannot be had fails them, and says so.
"""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.prometheus)
