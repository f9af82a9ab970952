"""One rank of a group that makes random calls, the same on every rank, and what it saw.

What a rank is told to do follows from a seed. What goes wrong on it (a killed worker, a slow or
damaged read, no memory for a tensor) follows from a seed of its own.
"""

import contextlib
import dataclasses
import os
import random
import signal
import time

import lmdb
import torch.distributed as dist
import xxhash

from tiered_mmcache import (
    EmbeddingResult,
    TensorParallelMultimodalCache,
    TieredMultimodalCache,
    register_result_class,
)
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.disk.store import Store
from tiered_mmcache.errors import GroupError, GroupLostError, RecordError
from tiered_mmcache.ranks import agreement, receiver
from tiered_mmcache.testing import audit
from tiered_mmcache.testing.ranks import gloo_group
from tiered_mmcache.tiers import promotion

from .subject import (
    HEAD_BYTES,
    ForkedWorker,
    SubprocessWorker,
    configuration,
    give_up_quickly,
    payload,
    restart_quickly,
    size_of,
    token_in,
    worker_pid,
)

KIB = 1024
_KEYS = 60
_HOT_BYTES = 64 * KIB
_READ_TIMEOUT_S = 0.05
_SEEN_EACH = 100  # calls after which a rank reports


@dataclasses.dataclass(kw_only=True)
class Frames(EmbeddingResult):
    """A result whose description is longer than a message between ranks."""

    num_tokens_per_frame: list[int]


register_result_class("campaign.Frames", Frames)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What one rank is to do.

    Attributes:
        rank: Its number.
        size: How many there are.
        calls: How many calls it makes.
        seed: What the calls follow from.
        together: Whether the ranks agree; else each has tiers of its own, and decides for itself.
        faulty: Whether anything goes wrong.
        limit_s: The group's time limit.
        misstep: The number of a call that this rank makes differently, and how.
    """

    rank: int
    size: int
    calls: int
    seed: int
    together: bool = True
    faulty: bool = True
    limit_s: float = 60.0
    misstep: tuple[int, str] | None = None


def made(key, token):
    """The result that an encoder makes of a key at a token."""
    size = 80 * KIB if key == 1 else size_of(key, 16, 16 * KIB)  # the first is larger than hot
    embedding = EmbeddingResult(embedding=_tensor(payload(key, token, size)))
    if key % 5:
        return embedding
    frames = [token, *range(key * 20)]
    return Frames(embedding=embedding.embedding, num_tokens_per_frame=frames)


def _tensor(data):
    import torch

    return torch.from_numpy(data)


_CALLS_A_KILL = 400  # the worker is killed once in so many


class Rank:
    """The cache of one rank and what it knows to have set there."""

    def __init__(self, folder, orders):
        restart_quickly()
        give_up_quickly()
        self._orders = orders
        self._calls = random.Random(orders.seed)
        self._faults = random.Random(f"{orders.seed}/{orders.rank}")
        self._set = {}  # key -> token
        self.wrong = self.hits_below = self.kills = 0
        self.cache = self._open(folder)

    def _open(self, folder):
        orders = self._orders
        config = configuration(
            folder / ("store" if orders.together else f"store-{orders.rank}"),
            hot=_HOT_BYTES,
            host=160 * KIB,
            max_size="8MiB",
            write_buffer="1MiB",
            read_timeout=f"{_READ_TIMEOUT_S}s",
        )
        config = config.model_copy(
            update={"hot": config.hot.model_copy(update={"oversize": "spill"})}
        )
        if not orders.faulty:
            return self._open_with(folder, config, SubprocessWorker)
        promotion.empty_target = self._failing(promotion.empty_target)
        receiver.empty_target = self._failing(receiver.empty_target)
        agreement.compact = self._failing(agreement.compact)
        return self._open_with(folder, config, _faulty_worker)

    def _open_with(self, folder, config, launcher):
        def make_client(settings, arena_fd):
            return SpillClient(settings, arena_fd, launcher=launcher)

        orders = self._orders
        if not orders.together:
            return TieredMultimodalCache(config=config, make_client=make_client)
        store = dist.FileStore(str(folder / "rendezvous"), orders.size)
        group = gloo_group(store, orders.rank, orders.size, orders.limit_s)
        return TensorParallelMultimodalCache(group=group, config=config, make_client=make_client)

    def _failing(self, function):
        """A function that finds no memory now and then."""

        def fail_sometimes(*arguments):
            if self._faults.random() < 0.01:
                raise RuntimeError("out of memory, as told")
            return function(*arguments)

        return fail_sometimes

    # Calls

    def act(self, number):
        """Make one call; two digests, of the answer and of what the hot tier holds then."""
        dice = self._calls.random()
        key = min(self._calls.randrange(_KEYS) for _ in range(3))  # some more often than others
        misstep = self._orders.misstep
        if misstep is not None and misstep[0] == number:
            if misstep[1] == "skip":
                return 0, self._hot()
            if misstep[1] == "twice":
                self._act(dice, key, number)
            if misstep[1] == "another key":
                key = (key + 1) % _KEYS
            if misstep[1] == "another call":
                dice = (dice + 0.5) % 1.0
        if self._orders.faulty and number % _CALLS_A_KILL == _CALLS_A_KILL // 2:
            self._kill_worker()
        return _digest_of(self._act(dice, key, number)), self._hot()

    def _act(self, dice, key, number):
        if dice < 0.50:
            return self._look_up(key, self.cache.get_single(key))
        if dice < 0.77:
            return self._keep(key, number)
        if dice < 0.79:
            return self.cache.prefetch(self._several(key))
        if dice < 0.81:
            return self._look_up_several(self._several(key))
        if dice < 0.88:
            return str(self.cache.locate(key))
        if dice < 0.95:
            self._set.pop(key, None)
            return self.cache.free(key)
        if dice < 0.999:
            return self._encode(self._several(key), number)
        self._set.clear()
        return self.cache.clear()

    def _several(self, key):
        return [key, (key + 7) % _KEYS, (key + 11) % _KEYS]

    def _look_up_several(self, keys):
        found = self.cache.get_many(keys)
        return [self._look_up(key, one) for key, one in zip(keys, found, strict=True)]

    def _keep(self, key, token):
        was_hot = key in self.cache.mm_cache
        kept = self.cache.set(key, made(key, token))
        if kept and not was_hot:
            self._set[key] = token
        if not kept and key == 1:
            self._set.pop(key, None)  # too large for the hot tier, and no room below
        return kept

    def _encode(self, keys, token):
        asked = []

        def encode(missing):
            asked.extend(missing)
            return [made(key, token) for key in missing]

        results = self.cache.get_or_encode(keys, encode)
        for key in asked:
            if key in self.cache.mm_cache or (key == 1 and self.cache.has(1)):
                self._set[key] = token
        return [
            _digest(found) if key in asked else self._look_up(key, found)
            for key, found in zip(keys, results, strict=True)
        ]

    def _look_up(self, key, found):
        if found is None:
            return None
        token = self._set.get(key)
        right = None if token is None else made(key, token)
        self.wrong += right is None or _digest(right) != _digest(found)
        return _digest(found)

    def _hot(self):
        held = [(key, token_in(found)) for key, found in self.cache.mm_cache.items()]
        return _digest_of((held, self.cache.current_size))

    def _kill_worker(self):
        if self.cache._below is not None and (pid := worker_pid(self.cache)) is not None:
            self.kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _digest_of(value):
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def _digest(found):
    data = found.embedding.numpy().tobytes()
    assert len(data) >= HEAD_BYTES
    extras = getattr(found, "num_tokens_per_frame", None)
    return type(found).__name__, len(data), xxhash.xxh3_64_intdigest(data), extras


def _faulty_worker(arena_fd):
    return ForkedWorker(arena_fd, first=_misbehave)


def _misbehave():
    """In the worker: reads are slow, fail or find damage now and then."""
    dice = random.Random(os.getpid())

    def faulty(function):
        def read(*arguments):
            fate = dice.random()
            if fate < 0.02:
                time.sleep(1.5 * _READ_TIMEOUT_S)  # the stimulus
            elif fate < 0.04:
                raise lmdb.Error("as told")
            elif fate < 0.06:
                raise RecordError("digest", "as told")
            return function(*arguments)

        return read

    Store.look_up = faulty(Store.look_up)
    Store.fill = faulty(Store.fill)


def serve(connection, folder, orders):
    """Be one rank: report what was seen each hundred calls, and at the end why it ended."""
    rank = Rank(folder, orders)
    connection.send({"ready": True})
    connection.recv()
    seen, ended = [], None
    for number in range(orders.calls):
        try:
            seen.append(rank.act(number))
        except GroupError as error:
            ended = _after_an_error(rank, number, error)
            break
        if len(seen) == _SEEN_EACH:
            connection.send({"seen": seen})
            seen = []
    audit(rank.cache)
    stats = rank.cache.stats()
    rank.cache.close(5.0)
    connection.send(
        {
            "seen": seen,
            "ended": ended,
            "wrong": rank.wrong,
            "kills": rank.kills,
            "hits": {"hot": stats.hot["hits"], "below": stats.host["hits"] + stats.disk["hits"]},
            "misses": stats.misses_by_reason,
            "faults": stats.faults,
            "steps": stats.group.get("steps", 0),
        }
    )


def _after_an_error(rank, number, error):
    """When a rank is out of its group, it holds nothing and answers nothing."""
    at_s = time.monotonic()
    refused = 0
    for call in (lambda: rank.cache.get_single(2), lambda: rank.cache.set(2, made(2, 2))):
        try:
            call()
        except GroupLostError:
            refused += 1
    return {
        "number": number,
        "error": type(error).__name__,
        "text": str(error),
        "at_s": at_s,
        "refuses": refused == 2 and len(rank.cache) == 0,
    }
