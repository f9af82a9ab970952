"""One tensor-parallel rank of a played server, in a process of its own.

Owns: what a rank of each scenario does, and the report that it prints.
Does not own: starting the ranks and comparing their reports (test_ranks.py), the server
(serving.py).

The played encoder is tensor-parallel, too: its ranks tell each other what they encode, as real ones
exchange activations. A rank that encodes alone waits for the others and is found out.
"""

import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from unittest import mock

import released
import torch
import torch.distributed as dist
import xxhash
from serving import KIB, Encoder, Request, Server, embedding_of, hash_of, idle_scheduler

_IMAGES = [(hash_of(number), 6 + number % 27) for number in range(48)]  # 6 to 32 KiB each
_HOT_BYTES = 96 * KIB
_BATCHES_A_KILL = 150


class DivergedError(Exception):
    """The ranks encode different images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What one rank is to do.

    Attributes:
        scenario: The function of this module that it runs.
        version: The release of SGLang.
        rank: Its number in the program.
        ranks: The numbers of those that run its batches.
        size: How many the program has.
        folder: Where store and configuration are.
        batches: How many batches a scenario of random ones has.
        seed: What the batches follow from.
        patience_s: How long the encoder's ranks wait for each other.
        arguments: Of the server, beyond what every one has.
    """

    scenario: str
    version: str
    rank: int
    ranks: list
    size: int
    folder: str
    batches: int = 0
    seed: int = 0
    patience_s: float = 60.0
    arguments: dict = dataclasses.field(default_factory=dict)


class ParallelEncoder(Encoder):
    """An encoder whose ranks have to run it together."""

    def __init__(self, version, group):
        super().__init__(version)
        self._group = group

    def __call__(self, items):
        mine = hash_of([item.hash for item in items]) % 2**62
        everyone = [torch.zeros(1, dtype=torch.long) for _ in range(self._group.size())]
        try:
            self._group.allgather([everyone], [torch.tensor([mine])]).wait()
        except RuntimeError as error:
            raise DivergedError(f"this rank encodes alone: {error}") from None
        if any(int(other) != mine for other in everyone):
            raise DivergedError("the ranks encode different images")
        return super().__call__(items)


class Lines(logging.Handler):
    """What the package logs, to be reported."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.found = []

    def emit(self, record):
        self.found.append(f"{record.levelname}: {record.getMessage()}")


class Rank:
    """A server's rank, and what it saw."""

    def __init__(self, orders, release):
        self.orders = orders
        self.index = orders.ranks.index(orders.rank)
        group = dist.new_group(
            orders.ranks,
            backend="gloo",
            timeout=timedelta(seconds=orders.patience_s),
            use_local_synchronization=True,
        )
        folder = Path(orders.folder)
        self.server = Server(release, folder, lambda name, value: None)
        self.server.encoder = ParallelEncoder(orders.version, group)
        vars(release.arguments).update({"tp_size": orders.size, **orders.arguments})
        release.coordinator = types.SimpleNamespace(ranks=orders.ranks, device_group=group)
        self.lines = Lines()
        logging.getLogger("tiered_mmcache").addHandler(self.lines)
        logging.getLogger("tiered_mmcache").setLevel(logging.INFO)
        self.seen = []
        self.calls = self.kills = 0

    def start(self, max_size=_HOT_BYTES):
        self.server.activate().start(max_size)
        if hasattr(self.cache, "locate"):
            self._count_calls()
        return self

    @property
    def cache(self):
        return self.server.cache

    @property
    def leads(self):
        return self.index == 0

    def _count_calls(self):
        for name in ("get_single", "set", "free"):
            setattr(self.cache, name, self._counted(getattr(self.cache, name)))

    def _counted(self, function):
        def count(*arguments, **named):
            self.calls += 1
            return function(*arguments, **named)

        return count

    def prefill(self, *requests):
        """A batch, whose answer is compared with what the encoder makes, and noted."""
        self.server.check(*requests)
        self.note()

    def note(self):
        """What this rank answers and holds now; the same on every rank."""
        answer = self.server.answer[0]
        digest = 0 if answer is None else xxhash.xxh3_64_intdigest(answer.numpy().tobytes())
        hot = [str(key) for key in self.cache.mm_cache]
        runs = self.server.encoder.runs
        self.seen.append(xxhash.xxh3_64_intdigest(repr((digest, hot, runs)).encode()))

    def worker(self):
        below = getattr(self.cache, "_below", None)
        return None if below is None or below.disk is None else below.disk.client.pid

    def report(self, **more):
        cache = self.cache
        stats = cache.stats() if hasattr(cache, "stats") else None
        tiers = {t: getattr(stats, t)["hits"] for t in ("hot", "host", "disk")} if stats else {}
        return {
            "seen": self.seen,
            "calls": self.calls,
            "kills": self.kills,
            "encoder runs": self.server.encoder.runs,
            "items encoded": len(self.server.encoder.items),
            "hits": tiers,
            "misses": stats.misses if stats else 0,
            "reasons": stats.misses_by_reason if stats else {},
            "faults": stats.faults if stats else {},
            "group": stats.group if stats else {},
            "hot bytes": cache.max_size,
            "has tiers below": getattr(cache, "_below", None) is not None,
            "lines": self.lines.found,
            **more,
        }


# Scenarios


def random_batches(rank):
    """The same random batches on every rank, while the leader's disk and worker fail."""
    rank.start()
    dice = random.Random(rank.orders.seed)
    diverged = None
    for number in range(rank.orders.batches):
        if rank.leads:
            _misfortune(rank, number)
        try:
            _random_batch(rank, dice)
        except DivergedError as error:
            diverged = f"batch {number}: {error}"
            break
    return rank.report(diverged=diverged)


def _random_batch(rank, dice):
    fate = dice.random()
    if fate < 0.002:
        idle_scheduler().flush_cache()
        return
    if fate < 0.003:
        _update_weights(rank)
        return
    if fate < 0.02:
        rank.cache.free(rank.server.key(dice.choice(_IMAGES)[0]))
        return
    for _ in range(8):
        _random_call(rank, dice)
    requests = []
    for _ in range(dice.randint(1, 3)):
        images = [
            _IMAGES[int(len(_IMAGES) * dice.random() ** 2)] for _ in range(dice.randint(1, 2))
        ]
        request = Request(images)
        if fate < 0.2:  # prefilled in part
            start = dice.randrange(request.length)
            request = Request(images, prefix=start, extend=dice.randint(1, request.length - start))
        elif fate < 0.3:
            request = Request([images[0]] * 2, one_item=True)
        requests.append(request)
    rank.prefill(*requests)


def _random_call(rank, dice):
    """What SGLang asks of the cache, without the rest of it."""
    mm_hash, rows = dice.choice(_IMAGES[:12])
    key = rank.server.key(mm_hash)
    if dice.random() < 0.1:
        rank.cache.free(key)
    elif dice.random() < 0.2:
        result_class = rank.server.release.cache_module.EmbeddingResult
        rank.cache.set(key, result_class(embedding=embedding_of(mm_hash, rows)))
    else:
        found = rank.cache.get_single(key)
        assert found is None or torch.equal(found.embedding, embedding_of(mm_hash, rows))


def _update_weights(rank):
    """As each of SGLang's ways to bring in other weights does: the cache is told."""
    rank.cache.weights_changed()


def _misfortune(rank, number):
    pid = rank.worker()
    if pid is None:
        return
    dice = random.Random(f"{rank.orders.seed}/{number}")
    with contextlib.suppress(ProcessLookupError):
        if number % _BATCHES_A_KILL == _BATCHES_A_KILL // 2:
            os.kill(pid, signal.SIGKILL)
            rank.kills += 1
        elif dice.random() < 0.01:  # reads that take too long
            os.kill(pid, signal.SIGSTOP if dice.random() < 0.5 else signal.SIGCONT)
        elif dice.random() < 0.01:
            _damage(Path(rank.orders.folder) / "store" / "data.mdb", dice)


def _damage(file, dice):
    size = file.stat().st_size
    with file.open("r+b") as store:
        store.seek(dice.randrange(32 * KIB, size))  # beyond the pages that say where all is
        store.write(dice.randbytes(16))


def two_rounds(rank):
    """Every image twice; the second time it comes from some tier."""
    rank.start()
    for image in _IMAGES:
        rank.prefill(Request([image]))
    if hasattr(rank.cache, "drain"):
        assert rank.cache.drain(60)
    for image in reversed(_IMAGES):
        rank.prefill(Request([image]))
    return rank.report()


def restarted(rank):
    """A second server on the store of a first one."""
    rank.start()
    for image in _IMAGES[:20]:
        rank.prefill(Request([image]))
    rank.server.stop()
    dist.barrier()
    rank.start()
    first = len(rank.server.encoder.items)
    for image in _IMAGES[:20]:
        rank.prefill(Request([image]))
    return rank.report(first=first)


def new_weights(rank):
    """Weights change between two rounds: nothing of the first may be found, by anybody."""
    rank.start()
    for image in _IMAGES[:20]:
        rank.prefill(Request([image]))
    _update_weights(rank)
    counts = [len(rank.server.encoder.items)]
    for image in (*_IMAGES[:20], *_IMAGES[:20]):
        rank.prefill(Request([image]))
    counts.append(len(rank.server.encoder.items))
    rank.server.stop()
    dist.barrier()
    rank.start()
    for image in _IMAGES[:20]:
        rank.prefill(Request([image]))
    counts.append(len(rank.server.encoder.items))
    return rank.report(counts=counts)


def other_hot_sizes(rank):
    """The YAML of one machine gives less to the hot tier."""
    rank.start(_HOT_BYTES - rank.index * 64 * KIB)
    for image in (*_IMAGES[:20], *_IMAGES[:20]):
        rank.prefill(Request([image]))
    return rank.report()


def one_refuses(rank):
    """One rank has a reason of its own to have no tiers below."""
    if rank.index == 1:
        os.environ["SGLANG_MM_SKIP_COMPUTE_HASH"] = "1"
    return two_rounds(rank)


def one_lacks_the_plugin(rank):
    """One rank was started without it."""
    if rank.index == 1:
        del os.environ["TIERED_MMCACHE_CONFIG"]
    return two_rounds(rank)


def one_cannot_read_an_adapter(rank):
    """An adapter is loaded that one rank cannot read, on whose machine it is not."""
    rank.start()
    for image in _IMAGES[:10]:
        rank.prefill(Request([image]))
    where = Path(rank.orders.folder) / ("adapter" if rank.index == 0 else "nowhere")
    idle_scheduler().load_lora_adapter(mock.MagicMock(lora_path=str(where)))
    emptied = not len(rank.cache)
    for image in (*_IMAGES[:10], *_IMAGES[8:10]):
        rank.prefill(Request([image]))
    return rank.report(emptied=emptied)


def one_dies(rank):
    """A rank is killed between two batches; the others are told instead of waiting for ever."""
    rank.start()
    rank.prefill(Request([_IMAGES[0]]))
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    try:
        for image in _IMAGES[1:9]:
            rank.prefill(Request([image]))
    except Exception as error:  # noqa: BLE001 - is reported
        return rank.report(error=type(error).__name__, waited_s=time.monotonic() - began_s)
    return rank.report(error=None)


def later_stage(rank):
    """The ranks of a later pipeline stage make a cache, too, and never use it."""
    if rank.orders.rank >= 2:
        rank.start()
        return rank.report()
    return two_rounds(rank)


def inconsistent_rows(rank):
    """A pruned video on disk has other rows than frames; only the leader sees it."""
    from sglang.srt.multimodal.evs import EVSEmbeddingResult

    rank.start()
    key = hash_of("pruned")
    result = EVSEmbeddingResult(embedding=torch.rand(20, 256), num_tokens_per_frame=[14, 6])
    assert rank.cache.set(key, result)
    rank.cache.mm_cache[key].num_tokens_per_frame[0] = 13  # as from a store that lies
    for image in _IMAGES[:20]:
        rank.prefill(Request([image]))
    found = [rank.cache.get_single(key) is None, rank.cache.has(key)]
    rank.prefill(Request([_IMAGES[1]]))
    return rank.report(found=found)


def main():
    orders = Orders(**json.loads(sys.argv[1]))
    store = dist.FileStore(f"{orders.folder}/rendezvous", orders.size)
    dist.init_process_group("gloo", store=store, rank=orders.rank, world_size=orders.size)
    with released.loaded(orders.version) as release:
        rank = Rank(orders, release)
        report = globals()[orders.scenario](rank)
        with contextlib.suppress(Exception):
            rank.cache.close(5.0)
    Path(orders.folder, f"rank-{orders.rank}.json").write_text(json.dumps(report))
    # A gloo group of a rank that died would hold the others up at their end.
    os._exit(0)


if __name__ == "__main__":
    main()
