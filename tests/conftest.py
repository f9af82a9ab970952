"""What every test runs under.

Owns: fixtures that hold for the whole suite. Does not own: fixtures of one folder, which stand in
that folder's conftest.py.
"""

import os

import pytest

from tiered_mmcache.disk import launch

_MEASURE = "import coverage; coverage.process_startup(); "


@pytest.fixture(scope="session", autouse=True)
def _measured_workers():
    """Let coverage measure spill workers too, when it measures at all.

    Coverage reaches child processes by a .pth file, which Python reads on behalf of ``site``; the
    worker runs without it (``-S``), so its boot code starts coverage instead: tests only.
    """
    if "COVERAGE_PROCESS_CONFIG" not in os.environ:
        yield
        return
    boot = launch._BOOT.replace("from tiered_mmcache", _MEASURE + "from tiered_mmcache", 1)
    assert boot != launch._BOOT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_BOOT", boot)
        yield
