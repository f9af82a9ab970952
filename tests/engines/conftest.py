"""SGLang's published code around our cache.

Owns: the releases that a test runs on, the server that it gets, and the counts printed at the end.
Does not own: loading the releases (released.py) or the server (serving.py).

All tests here are marked ``sglang``: they need the wheels, which ``make test-sglang`` downloads.
"""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import released
import releases
from serving import RANKS, TOTALS, Server

from tiered_mmcache import contract
from tiered_mmcache.integrations.sglang import cache as sglang_cache


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)


def pytest_terminal_summary(terminalreporter):
    if not TOTALS and not RANKS:
        return
    terminalreporter.section("SGLang releases, through their own code")
    columns = ["encoder runs", "items encoded", "hot hits", "host hits", "disk hits", "misses"]
    terminalreporter.line("release  " + "  ".join(f"{name:>13}" for name in columns))
    for version, totals in sorted(
        TOTALS.items(), key=lambda pair: releases.VERSIONS.index(pair[0])
    ):
        cells = "  ".join(f"{totals[name]:>13,}" for name in columns)
        terminalreporter.line(f"{version:7}  {cells}")
    for name, counts in RANKS.items():
        told = ", ".join(f"{number:,} {what}" for what, number in counts.items())
        terminalreporter.line(f"{name}: {told}")


def versions(at_least="0.0.0"):
    """The releases that differ, from one on."""
    numbers = {text: tuple(map(int, text.split("."))) for text in [*releases.DIFFERENT, at_least]}
    return [text for text in releases.DIFFERENT if numbers[text] >= numbers[at_least]]


@pytest.fixture(params=releases.DIFFERENT)
def release(request):
    """A release in this process; without wheels the test fails, and says so."""
    with released.loaded(request.param) as found:
        yield found
    for tag in [tag for tag in contract._CLASS_OF_TAG if tag.startswith("sglang.")]:
        del contract._TAG_OF_CLASS[contract._CLASS_OF_TAG.pop(tag)]


@pytest.fixture
def server(release, tmp_path, monkeypatch):
    made = Server(release, tmp_path, monkeypatch.setenv)
    yield made
    made.stop()
    for cache in list(sglang_cache.live_caches):
        cache.close()
    gc.collect()


def on(*chosen):
    """Run a test on these releases only."""
    return pytest.mark.parametrize("release", chosen, indirect=True)


on_every_release = on(*releases.VERSIONS)
