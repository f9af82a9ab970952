"""What encoding cost, through real tiers, a real worker and a restart; reads from a slow store.

Owns: the cost in records, and reads that are declined for it. Does not own: how it is measured
(tests/unit/test_encoder_time.py) or the estimate (tests/unit/test_read_speed.py).
"""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from mmcache_tools import cli
from tiered_mmcache import CacheConfig, EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.testing import ManualClock, audit, audit_idle

SIZE = 1000
COUNT = 12
COST_S = 0.25


def result(number, size=SIZE):
    return EmbeddingResult(embedding=torch.full((size,), number, dtype=torch.uint8))


def config(folder, *, host=None, write="on_evict", **disk):
    sections = {
        "namespace": "cost/test",
        "hot": {"max_size": 4 * SIZE},
        "disk": {
            "path": str(folder / "store"),
            "max_size": "16MiB",
            "write_buffer": "1MiB",
            "read_timeout": "60s",
            "write": write,
            **disk,
        },
    }
    if host:
        sections["host"] = {"max_size": host * 4096}
    return CacheConfig.from_mapping(sections)


def encode_all(cache, clock):
    """Entries of 1 to COUNT times COST_S seconds."""

    def encode(keys):
        clock.now_s += sum(COST_S * (1 + key) for key in keys)
        return [result(key) for key in keys]

    cache._encoding._clock = clock
    for key in range(COUNT):
        cache.get_or_encode([key], encode)
        audit(cache)


def never(keys):
    raise AssertionError(f"{keys} need no encoder")


@pytest.mark.parametrize("host", [None, 4])
@pytest.mark.parametrize("write", ["on_evict", "through"])
def test_the_cost_survives_every_move_and_a_restart(tmp_path, host, write):
    settings = config(tmp_path, host=host, write=write)
    with TieredMultimodalCache(config=settings) as cache:
        encode_all(cache, ManualClock())
        # Up and down again, from every tier.
        for key in (*range(COUNT), *range(COUNT)):
            assert cache.get_or_encode([key], never)[0].embedding.eq(key).all()
        counted = cache.stats().encoding
        assert counted["encode_seconds"] == pytest.approx(COST_S * 78)
        assert counted["encoder_runs"] == counted["encoded_items"] == COUNT
        assert counted["saved_seconds"] == pytest.approx(2 * COST_S * 78)
        assert cache.drain()
        audit_idle(cache)
    assert costs_on_disk(tmp_path) == pytest.approx({k: COST_S * (1 + k) for k in range(COUNT)})
    with TieredMultimodalCache(config=settings) as cache:
        for key in range(COUNT):
            assert cache.locate(key) is Tier.DISK
            assert cache.get_or_encode([key], never)[0].embedding.eq(key).all()
            assert cache._costs.seconds(key) == pytest.approx(COST_S * (1 + key))
        assert cache.stats().encoding["saved_seconds"] == pytest.approx(COST_S * 78)
        assert cache.drain()
        audit_idle(cache)
    assert costs_on_disk(tmp_path) == pytest.approx({k: COST_S * (1 + k) for k in range(COUNT)})


def costs_on_disk(folder):
    shown = CliRunner().invoke(cli.app, ["ls", str(folder / "store"), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["entries"]
    return {int(row["key"]): row["cost_s"] for row in rows}


def test_what_was_set_by_hand_has_no_cost(tmp_path):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        for key in range(COUNT):
            cache.set(key, result(key))
    assert set(costs_on_disk(tmp_path).values()) == {0.0}


class SlowClient(SpillClient):
    """A real worker behind a connection that takes its time, by the clock of the test."""

    clock: ManualClock
    delay_s = 0.0

    def fill(self, **request):
        self.clock.now_s += self.delay_s
        return super().fill(**request)


def test_a_slow_disk_is_left_alone_until_it_recovers(tmp_path, monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(SlowClient, "clock", clock, raising=False)
    with TieredMultimodalCache(config=config(tmp_path), make_client=SlowClient) as cache:
        encode_all(cache, clock)
        assert cache.drain()
        disk = cache._below.disk
        disk._clock = disk.read_speed._clock = clock
        disk.client.delay_s = 2 * COST_S
        for key in [*range(COUNT)] * 2:
            cache.get_single(key)
        declined = cache.stats().misses_by_reason["slower_than_encoding"]
        assert declined > 0
        assert cache.locate(0) is None  # encoded in COST_S
        assert cache.get_single(0) is None
        assert cache.get_single(9) is not None  # encoded in ten times that
        disk.client.delay_s = 0.0
        read = [cache.get_single(key) is not None for key in [*range(COUNT)] * 20]
        assert all(read[-5 * COUNT :])
        assert cache.drain()
        audit_idle(cache)


def test_real_reads_are_measured(tmp_path):
    with TieredMultimodalCache(config=config(tmp_path)) as cache:
        encode_all(cache, ManualClock())
        assert cache.drain()
        began_s = time.monotonic()
        for key in range(COUNT):
            assert cache.get_single(key) is not None
        took_s = time.monotonic() - began_s
        snapshot = cache.stats().disk
        assert snapshot["mean_read_bytes"] == pytest.approx(SIZE)
        assert 0.0 < snapshot["mean_read_seconds"] <= took_s
