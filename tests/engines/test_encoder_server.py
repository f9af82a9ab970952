"""SGLang's encoder server: its published function, under asyncio, on CPU tensors."""

import asyncio
import os
import signal
import time
import types
from unittest import mock

import pytest
import released
import torch
from conftest import on, versions
from serving import KIB, WIDTH, embedding_of, hash_of

from tiered_mmcache import Tier

ROWS = 32


class BadRequestError(Exception):
    """Stands for SGLang's."""


class InternalError(Exception):
    """Stands for SGLang's."""


class EncoderServer:
    """The part of the published encoder server that uses the cache."""

    def __init__(self, server):
        self.server = server
        self.metrics = mock.MagicMock()
        given = {
            "torch": torch,
            "time": time,
            "asyncio": asyncio,
            "MultiModalStaticCache": server.release.cache_module.MultiModalStaticCache,
            "EmbeddingResult": server.release.cache_module.EmbeddingResult,
            "BadRequestError": BadRequestError,
            "InternalError": InternalError,
            "encoder_metrics_collector": self.metrics,
            "Modality": types.SimpleNamespace(VIDEO=object()),
        }
        wanted = ["_compute_direct_embedding", "_validate_embedding_token_count"]
        found = server.release.functions(released.ENCODER, "MMEncoder", wanted, **given)
        self._compute = found["_compute_direct_embedding"]
        self._validate_embedding_token_count = found.get("_validate_embedding_token_count")
        self.encoded = []
        self.ticks = 0

    def start(self, max_size=4 * ROWS * WIDTH * 4):
        self.mm_cache = self.server.release.cache_module.MultiModalStaticCache(max_size)
        self.mm_cache_lock = asyncio.Lock()
        self.server._caches.append(self.mm_cache)
        return self

    def _build_model_mm_items(self, feature, *_):
        return [types.SimpleNamespace(hash=h, set_pad_value=lambda: None) for h in feature]

    def _encode(self, items):
        self.encoded.append([item.hash for item in items])
        return torch.cat([embedding_of(item.hash, ROWS) for item in items])

    async def ask(self, *hashes, rows=ROWS):
        context = types.SimpleNamespace(
            modality=types.SimpleNamespace(name="IMAGE"),
            mm_feature=list(hashes),
            num_items=len(hashes),
            preprocess_result=types.SimpleNamespace(token_counts=[rows] * len(hashes)),
            is_health_check=False,
            items_per_req=[len(hashes)],
            get_feature_fn=self._encode,
            aux_data={},
        )
        found = await self._compute(self, context, keep_on_gpu=False)
        expected = torch.cat([embedding_of(mm_hash, ROWS) for mm_hash in hashes])
        assert torch.equal(found, expected)

    async def tick(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0)


@pytest.fixture
def encoder(server):
    server.release.arguments.encoder_only = True
    server.activate()
    return EncoderServer(server).start()


RELEASES = on(*versions("0.5.19"))


@RELEASES
def test_requests_at_once_are_answered_from_every_tier(encoder):
    async def serve():
        ticking = asyncio.create_task(encoder.tick())
        wanted = [[hash_of(number)] for number in range(30)]
        await asyncio.gather(*[encoder.ask(*hashes) for hashes in wanted])
        await asyncio.gather(*[encoder.ask(*hashes) for hashes in reversed(wanted)])
        await encoder.ask(hash_of(1), hash_of(2))
        await encoder.ask(hash_of(1), hash_of(2))
        ticking.cancel()

    asyncio.run(serve())
    assert len(encoder.encoded) == 31
    stats = encoder.mm_cache.stats()
    assert stats.hot["hits"] + stats.host["hits"] + stats.disk["hits"] == 31
    assert stats.host["hits"]
    assert stats.disk["hits"]
    assert encoder.ticks


@RELEASES
def test_what_it_reports_is_the_hot_tier(encoder):
    asyncio.run(encoder.ask(hash_of(1)))
    ((size, entries), _) = encoder.metrics.set_cache_state.call_args
    assert (size, entries) == (ROWS * WIDTH * 4, 1)
    assert len(encoder.mm_cache) == 1
    assert encoder.mm_cache.has(type(encoder.mm_cache).combine_hashes([hash_of(1)]))


@RELEASES
def test_the_next_encoder_server_starts_warm(encoder):
    for number in range(20):
        asyncio.run(encoder.ask(hash_of(number)))
    encoder.server.stop()
    encoder.start()
    for number in range(20):
        asyncio.run(encoder.ask(hash_of(number)))
    assert len(encoder.encoded) == 20
    assert encoder.mm_cache.current_size <= 128 * KIB


@on(*versions("0.5.22"))
def test_a_malformed_entry_is_removed_from_every_tier(encoder):
    asyncio.run(encoder.ask(hash_of(1)))
    encoder.server.stop()
    encoder.start()
    with pytest.raises(InternalError):
        asyncio.run(encoder.ask(hash_of(1), rows=ROWS + 1))
    assert encoder.mm_cache.locate(type(encoder.mm_cache).combine_hashes([hash_of(1)])) is None


@RELEASES
def test_a_disk_that_does_not_answer_holds_the_loop_up_for_its_time_limit_only(encoder):
    """The worker is stopped, so that no look-up is ever answered; every request still is."""
    cache = encoder.mm_cache
    key = type(cache).combine_hashes([hash_of(0)])

    async def fill():
        for number in range(30):
            await encoder.ask(hash_of(number))

    asyncio.run(fill())
    assert cache.drain(60)
    assert cache.locate(key) is Tier.DISK
    client = cache._below.disk.client
    waits = []
    original = client.wait

    def noted(timeout_s):
        waits.append(timeout_s)
        original(timeout_s)

    client.wait = noted
    cache._below.disk.read_timeout_s = 0.05
    os.kill(client.pid, signal.SIGSTOP)
    try:
        asyncio.run(encoder.ask(hash_of(0)))
        asyncio.run(encoder.ask(hash_of(100)))
    finally:
        os.kill(client.pid, signal.SIGCONT)
    assert cache.stats().misses_by_reason["read_timeout"] == 1
    assert all(wait <= 0.05 for wait in waits)
    assert cache.drain(60)
