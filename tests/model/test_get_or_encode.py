"""get_or_encode against a dictionary, with encoders that end when and as the test says.

Each value knows the key and the *epoch* it was made in; ``free`` and ``clear`` begin a new epoch.
Whoever asks gets a value of that key from the epoch in which it asked, or a later one. What a
look-up finds is of the epoch now: nothing that was being encoded comes back. In one epoch, no
entry is encoded twice at a time. Nobody waits for ever.
"""

import asyncio
import dataclasses
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiered_mmcache import EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.config import CacheConfig
from tiered_mmcache.testing import ManualCopyEngine, audit, audit_idle

COMBINED = [TieredMultimodalCache.combine_hashes(parts) for parts in ([5], [5 + 2**61 - 1])]
KEYS = st.sampled_from([1, 2, "text", *COMBINED])
REQUESTS = st.lists(KEYS, min_size=1, max_size=4)
SIZES = st.sampled_from([8, 1000, 4000, 20_000])  # the hot tier has 8,192 bytes
STEPS = 30  # of the event loop: more than any answer takes


class EncoderError(Exception):
    pass


@dataclasses.dataclass(eq=False)
class Run:
    """A call of the encoder that has not returned."""

    keys: list
    epochs: list
    size: int
    end: asyncio.Future
    passed_by: set = dataclasses.field(default_factory=set)  # keys that nobody waits for any more


@dataclasses.dataclass(eq=False)
class Request:
    """A task that asks."""

    keys: list
    epochs: list
    task: asyncio.Task


class GetOrEncodeMachine(RuleBasedStateMachine):
    """Requests, encoders that end, and everything else that is called meanwhile."""

    @initialize(
        host=st.sampled_from([None, 16 * 1024]),
        disk=st.sampled_from([False, False, True]),
        manual=st.booleans(),
    )
    def build(self, host, disk, manual):
        self.folder = Path(tempfile.mkdtemp(prefix="mmcache-model-"))
        sections = {"namespace": "model/encode", "hot": {"max_size": 8192, "oversize": "spill"}}
        if host is not None:
            sections["host"] = {"max_size": host}
        if disk:
            sections["disk"] = {
                "path": str(self.folder / "store"),
                "max_size": "16MiB",
                "write_buffer": "1MiB",
                "durability": "relaxed",
                "read_timeout": "30s",
            }
        self.engine = ManualCopyEngine() if manual else None
        self.cache = TieredMultimodalCache(
            config=CacheConfig.from_mapping(sections), engine=self.engine
        )
        self.loop = asyncio.new_event_loop()
        self.made = {}  # serial -> (key, epoch)
        self.frees = Counter()
        self.clears = 0
        self.runs = []
        self.requests = []
        self.errors = set()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        try:
            for _ in range(10 * len(self.requests)):
                if not self.runs:
                    break
                self.end_run(0)
            assert not self.runs
            assert not self.requests, "somebody waits for ever"
            assert len(self.cache._encoding.flights) == 0
            assert self.cache.drain()
            audit_idle(self.cache)
        finally:
            self.loop.close()
            self.cache.close()
            shutil.rmtree(self.folder)

    # Values

    def epoch(self, key):
        return self.frees[key] + self.clears

    def make(self, key, size, epoch):
        serial = len(self.made)
        self.made[serial] = key, epoch
        payload = torch.zeros(size, dtype=torch.uint8)
        payload[:8] = torch.tensor(list(serial.to_bytes(8, "big")), dtype=torch.uint8)
        return EmbeddingResult(embedding=payload)

    def check(self, key, found, since):
        if self.engine is not None:
            self.engine.synchronize()
        serial = int.from_bytes(bytes(found.embedding[:8].tolist()), "big")
        made_for, epoch = self.made[serial]
        assert made_for == key
        assert epoch >= since, f"{key!r} came back"

    # Requests

    @rule(keys=REQUESTS, size=SIZES)
    def ask(self, keys, size):
        async def encode(wanted):
            assert len(set(wanted)) == len(wanted)
            for run in self.runs:
                for key, epoch in zip(run.keys, run.epochs, strict=True):
                    alone = key not in wanted or key in run.passed_by or epoch != self.epoch(key)
                    assert alone, f"{key!r} is encoded twice at a time"
            run = Run(wanted, [self.epoch(k) for k in wanted], size, self.loop.create_future())
            self.runs.append(run)
            try:
                return await run.end
            finally:
                self.runs.remove(run)

        async def asking():
            return await self.cache.aget_or_encode(keys, encode, timeout_s=None)

        epochs = [self.epoch(key) for key in keys]
        self.requests.append(Request(keys, epochs, self.loop.create_task(asking())))
        self.settle()

    @rule(keys=REQUESTS, size=SIZES, fails=st.booleans())
    def ask_blocking(self, keys, size, fails):
        def encode(wanted):
            for run in self.runs:
                run.passed_by.update(wanted)
            if fails:
                raise self.error()
            return [self.make(key, size, self.epoch(key)) for key in wanted]

        epochs = [self.epoch(key) for key in keys]
        try:
            results = self.cache.get_or_encode(keys, encode, timeout_s=0 if self.runs else None)
        except EncoderError as error:
            assert fails
            assert error in self.errors
            return
        for key, found, since in zip(keys, results, epochs, strict=True):
            self.check(key, found, since)

    @rule(number=st.integers(0, 5))
    def end_run(self, number):
        if self.runs:
            run = self.runs[number % len(self.runs)]
            values = zip(run.keys, run.epochs, strict=True)
            run.end.set_result([self.make(key, run.size, epoch) for key, epoch in values])
            self.settle()

    @rule(number=st.integers(0, 5))
    def fail_run(self, number):
        if self.runs:
            self.runs[number % len(self.runs)].end.set_exception(self.error())
            self.settle()

    @rule(number=st.integers(0, 5))
    def answer_wrongly(self, number):
        if self.runs:
            self.runs[number % len(self.runs)].end.set_result([])
            self.settle()

    @rule(number=st.integers(0, 5))
    def cancel(self, number):
        if self.requests:
            self.requests[number % len(self.requests)].task.cancel()
            self.settle()

    def error(self):
        error = EncoderError(len(self.errors))
        self.errors.add(error)
        return error

    def settle(self):
        for _ in range(STEPS):
            self.loop.run_until_complete(asyncio.sleep(0))
        for request in [each for each in self.requests if each.task.done()]:
            self.requests.remove(request)
            self.judge(request)

    def judge(self, request):
        if request.task.cancelled():
            return
        error = request.task.exception()
        if error is not None:
            assert error in self.errors or "0 results" in str(error)
            return
        for key, found, since in zip(
            request.keys, request.task.result(), request.epochs, strict=True
        ):
            self.check(key, found, since)

    # What else is called meanwhile

    @rule(key=KEYS, size=SIZES)
    def set(self, key, size):
        known = key in self.cache.mm_cache
        result = self.make(key, size, self.epoch(key))
        if self.cache.set(key, result) and not known and size <= self.cache.max_size:
            assert self.cache.get_single(key) is result

    @rule(key=KEYS)
    def get_single(self, key):
        found = self.cache.get_single(key)
        if found is not None:
            self.check(key, found, self.epoch(key))

    @rule(key=KEYS)
    def free(self, key):
        self.frees[key] += 1
        self.cache.free(key)
        assert self.cache.get_single(key) is None

    @rule(now=st.integers(0, 2))
    def clear(self, now):
        if now == 0:
            self.clears += 1
            self.cache.clear()
            assert len(self.cache) == 0

    @rule(number=st.integers(0, 7))
    def complete_a_copy(self, number):
        if self.engine is not None:
            self.engine.complete(number)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "cache"):
            audit(self.cache)
            assert not self.cache.stats().faults
            assert self.cache._costs._costs.keys() <= self.cache.mm_cache.keys()
            assert len(self.cache._encoding.flights) == sum(len(run.keys) for run in self.runs)


TestGetOrEncode = GetOrEncodeMachine.TestCase
TestGetOrEncode.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking restarts real processes
    suppress_health_check=[HealthCheck.too_slow],
)
