"""The cache of a rank: what all ranks do together, and what becomes of a failure on one of them.

Owns: the steps of each call, and one rank's failure at each of them, over real gloo groups whose
ranks are threads.
Does not own: the messages (test_exchange.py), the interface (tests/contracts, where two ranks run
every test), or ranks in processes (tests/faults/campaign/ranks.py).
"""

import asyncio
import dataclasses
import threading
import weakref
from datetime import timedelta

import pytest
import torch

from tiered_mmcache import (
    CacheConfig,
    EmbeddingResult,
    TensorParallelMultimodalCache,
    Tier,
    register_result_class,
)
from tiered_mmcache.config import DiskConfig, HostConfig, HotConfig
from tiered_mmcache.errors import (
    ConfigError,
    GroupError,
    GroupLostError,
    GroupOutOfStepError,
    PeerFailedError,
)
from tiered_mmcache.ranks import agreement, receiver
from tiered_mmcache.ranks.exchange import Kind
from tiered_mmcache.testing import audit, audit_idle
from tiered_mmcache.testing.ranks import UnisonCache, gloo_groups, on_all_ranks
from tiered_mmcache.tiers import promotion

KIB = 1024
SIZE = 3
_this = threading.local()


@dataclasses.dataclass(kw_only=True)
class Frames(EmbeddingResult):
    num_tokens_per_frame: list[int]


@dataclasses.dataclass(kw_only=True)
class Unregistered(EmbeddingResult):
    pass


register_result_class("test.agreement.Frames", Frames)


def entry(size_bytes=KIB, fill=0):
    return EmbeddingResult(embedding=torch.full((size_bytes,), fill, dtype=torch.uint8))


class Ranks:
    """Caches of several ranks, each called on a thread of its own."""

    def __init__(self, make, groups):
        self._make = make
        self.groups = groups
        self.caches = list(groups)
        self.caches = self.each(lambda rank: make(rank, groups[rank]), by_rank=True)

    def each(self, call, *, by_rank=False):
        """What a call comes to on each rank: an answer or an exception."""

        def run(rank):
            _this.rank = rank
            return call(rank if by_rank else self.caches[rank])

        ended = on_all_ranks(len(self.caches), run)
        return [
            future.result() if f is None else f for future in ended for f in [future.exception()]
        ]

    def all(self, call):
        """The one answer that a call has on all ranks; afterwards their hot tiers are equal."""
        answers = self.each(call)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        held = [list(cache.mm_cache) for cache in self.caches]
        assert held == held[:1] * len(held)
        for answer in answers[1:]:
            if isinstance(answers[0], EmbeddingResult):
                assert type(answer) is type(answers[0])
                assert torch.equal(answer.embedding, answers[0].embedding)
            else:
                assert answer == answers[0]
        return answers[0]

    def set(self, key, result):
        return self.all(lambda cache: cache.set(key, result))

    def get(self, key):
        return self.all(lambda cache: cache.get_single(key))

    @property
    def steps(self):
        counts = {cache.stats().group["steps"] for cache in self.caches}
        assert len(counts) == 1
        return counts.pop()

    @property
    def leader(self):
        return self.caches[0]

    @property
    def followers(self):
        return self.caches[1:]


@pytest.fixture
def make_ranks():
    """Makes ranks of ``max_size`` bytes with a configuration's sections."""
    made = []

    def make(max_size=2 * KIB, *, size=SIZE, groups=None, **sections):
        config = CacheConfig(namespace="agreement", **sections)

        def one(rank, group):
            return TensorParallelMultimodalCache(max_size, group=group, config=config)

        made.append(Ranks(one, groups or gloo_groups(size)))
        return made[-1]

    yield make
    for ranks in made:
        for cache in ranks.caches:
            if isinstance(cache, TensorParallelMultimodalCache):
                assert cache.drain()
                audit(cache)
                audit_idle(cache)
                cache.close()


@pytest.fixture
def ranks(make_ranks):
    """Three ranks; the hot tier holds two entries, and what it evicts goes to host memory."""
    return make_ranks(host=HostConfig(max_size="1MiB"))


@pytest.fixture
def below(ranks):
    """The same, with entry 1 in the leader's host memory and 2 and 3 in the hot tiers."""
    for key in (1, 2, 3):
        assert ranks.set(key, entry(fill=key))
    assert ranks.all(lambda cache: cache.locate(1)) is Tier.HOST
    return ranks


def only_on(rank, function, error):
    """A function that raises an error on one rank."""

    def call(*arguments, **named):
        if _this.rank == rank:
            raise error
        return function(*arguments, **named)

    return call


def impatient(group):
    """The group, which does not wait long for a rank from now on."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.2))
    return group


def hurried(exchange, kind):
    """How a rank meets the others, and from one kind of step on does not wait long for them."""
    meet = exchange.meet

    def hurry(step, **said):
        if step.kind is kind:
            impatient(exchange._group)
        return meet(step, **said)

    return hurry


def lost(ranks):
    """Whether each rank holds nothing and refuses to answer."""
    for cache in ranks.caches:
        calls = [
            lambda cache=cache: cache.get_single(2),
            lambda cache=cache: cache.get([1, 2]),
            lambda cache=cache: cache.get_single(1.5),
            lambda cache=cache: cache.has(2),
            lambda cache=cache: cache.set(2, entry()),
            lambda cache=cache: cache.free(2),
            lambda cache=cache: cache.prefetch([2]),
            lambda cache=cache: cache.get_many([2, 3]),
            lambda cache=cache: cache.get_or_encode([2], lambda keys: [entry()]),
        ]
        for call in calls:
            with pytest.raises(GroupLostError):
                call()
        assert len(cache) == cache.current_size == 0
        assert cache.stats().group["failure"]
    return True


# What is sent


def test_only_the_leader_has_lower_tiers(ranks):
    assert ranks.leader._below is not None
    assert all(cache._below is None for cache in ranks.followers)
    assert [cache.stats().group["rank"] for cache in ranks.caches] == [0, 1, 2]
    assert {cache.stats().group["size"] for cache in ranks.caches} == {3}


def test_nothing_is_sent_on_a_hot_hit(below):
    combined = below.leader.combine_hashes([8, 9])
    below.set(combined, entry())
    steps = below.steps
    hits = [
        lambda cache: cache.get_single(3).embedding[0],
        lambda cache: cache.get([8, 9]).embedding[0],
        lambda cache: cache.has(3),
        lambda cache: cache.locate(3),
        lambda cache: cache.set(3, entry(fill=99)),
        lambda cache: cache.get_or_encode([3, combined], None)[0].embedding[0],
        lambda cache: cache.free(3),
    ]
    for hit in hits:
        assert below.all(hit) is not None
    assert below.steps == steps


def test_a_miss_is_one_message_and_a_hit_below_two_and_the_tensor(below):
    steps = below.steps
    assert below.get(99) is None
    assert below.steps == steps + 1
    assert torch.equal(below.get(1).embedding, entry(fill=1).embedding)
    assert below.steps == steps + 3
    assert {cache.stats().group["shared_bytes"] for cache in below.caches} == {KIB}


def test_without_lower_tiers_only_a_set_is_sent(make_ranks):
    ranks = make_ranks()
    steps = ranks.steps
    assert ranks.get(1) is None
    assert not ranks.all(lambda cache: cache.has(1))
    assert not ranks.all(lambda cache: cache.free(1))
    assert ranks.steps == steps
    assert ranks.set(1, entry())
    assert ranks.steps == steps + 1


def test_a_group_of_one_sends_nothing(make_ranks):
    ranks = make_ranks(size=1, host=HostConfig(max_size="1MiB"))
    for key in (1, 2, 3):
        assert ranks.set(key, entry(fill=key))
    assert ranks.get(1).embedding[0] == 1
    assert ranks.leader.stats().group == {}
    assert ranks.leader.stats().host["hits"] == 1


# What comes from below


@pytest.mark.parametrize(
    "result",
    [
        entry(KIB, 7),
        EmbeddingResult(embedding=torch.randn(3, 5, 7, dtype=torch.bfloat16)),
        EmbeddingResult(embedding=torch.tensor(3.5)),
        EmbeddingResult(embedding=torch.empty(0, 4)),
        EmbeddingResult(embedding=torch.arange(60.0).reshape(6, 10).T),
        Frames(embedding=torch.ones(4, 4), num_tokens_per_frame=[1, 3]),
        Frames(embedding=torch.ones(4, 4), num_tokens_per_frame=list(range(1000))),
    ],
)
def test_every_rank_gets_what_was_set(ranks, result):
    ranks.set(1, result)
    for key in (2, 3):
        ranks.set(key, entry(KIB))
    ranks.set(4, entry(2 * KIB))
    assert ranks.all(lambda cache: cache.locate(1)) is Tier.HOST
    answers = ranks.each(lambda cache: cache.get_single(1))
    for answer in answers:
        assert type(answer) is type(result)
        assert answer.embedding.dtype == result.embedding.dtype
        assert torch.equal(answer.embedding, result.embedding)
        assert getattr(answer, "num_tokens_per_frame", 0) == getattr(
            result, "num_tokens_per_frame", 0
        )
    assert len({id(answer) for answer in answers}) == SIZE


def test_ranks_count_hits_alike_and_say_who_missed(below):
    below.get(1)
    below.get(99)
    stats = [cache.stats() for cache in below.caches]
    assert [one.host["hits"] for one in stats] == [1, 1, 1]
    assert [one.misses for one in stats] == [1, 1, 1]
    assert stats[0].misses_by_reason == {"absent": 1}
    assert stats[1].misses_by_reason == {"leader": 1}


def test_an_entry_from_disk_is_a_hit_on_disk_everywhere(make_ranks, tmp_path):
    disk = DiskConfig(path=tmp_path / "store", max_size="16MiB", write_buffer="1MiB")
    ranks = make_ranks(disk=disk)
    for key in range(6):
        ranks.set(key, entry(fill=key))
    assert ranks.leader.drain()
    assert ranks.all(lambda cache: cache.locate(0)) is Tier.DISK
    assert ranks.get(0).embedding[5] == 0
    assert [cache.stats().disk["hits"] for cache in ranks.caches] == [1, 1, 1]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_each_rank_counts_and_times_every_look_up(below, monkeypatch, failing):
    no_memory = only_on(failing, promotion.empty_target, RuntimeError("out of memory"))
    monkeypatch.setattr(promotion, "empty_target", no_memory)
    no_memory = only_on(failing, receiver.empty_target, RuntimeError("out of memory"))
    monkeypatch.setattr(receiver, "empty_target", no_memory)
    for key in (3, 3, 1, 99, 1.5):  # hot twice, in host memory, nowhere, and not to be told
        below.get(key)
    for stats in (cache.stats() for cache in below.caches):
        hits = stats.hot["hits"] + stats.host["hits"] + stats.disk["hits"]
        assert hits + stats.misses == 5
        found = 0 if failing is not None else 1
        timed = {outcome: sum(times.counts) for outcome, times in stats.look_ups.items()}
        assert timed == {"host": found, "disk": 0, "miss": 2 - found}


def test_several_look_ups_and_prefetches_are_decided_by_the_leader(make_ranks, tmp_path):
    disk = DiskConfig(path=tmp_path / "store", max_size="16MiB", write_buffer="1MiB")
    host = HostConfig(max_size="16KiB", prefetch="8KiB")
    ranks = make_ranks(host=host, disk=disk)
    for key in range(12):
        ranks.set(key, entry(fill=key))
        assert ranks.leader.drain()
    assert ranks.all(lambda cache: cache.locate(1)) is Tier.DISK
    steps = ranks.steps
    assert ranks.all(lambda cache: cache.prefetch([0, 1, 11, 1.5])) == 2
    assert ranks.all(lambda cache: cache.prefetch([11, 1.5])) == 0
    assert ranks.steps == steps + 1
    assert ranks.leader.drain()
    assert ranks.get(0).embedding[0] == 0
    assert {cache.stats().host["hits"] for cache in ranks.caches} == {1}
    answers = ranks.each(lambda cache: cache.get_many([2, 99, 3, 2]))
    for found in answers:
        assert found[1] is None
        assert [found[at].embedding[0].item() for at in (0, 2, 3)] == [2, 3, 2]
    assert ranks.all(lambda cache: list(cache.mm_cache)) == [3, 2]


def test_an_entry_larger_than_the_hot_tier_is_kept_below_by_the_leader(make_ranks):
    hot = HotConfig(oversize="spill")
    ranks = make_ranks(hot=hot, host=HostConfig(max_size="16KiB"))
    ranks.set(1, entry(fill=1))
    assert ranks.set(2, entry(4 * KIB, fill=2))
    assert ranks.get(2).embedding[0] == 2
    assert ranks.get(1).embedding[0] == 1
    assert list(ranks.leader.mm_cache) == [1]
    assert not ranks.set(3, entry(32 * KIB))
    assert ranks.get(3) is None


def test_free_and_clear_reach_the_tiers_of_the_leader(below):
    assert below.all(lambda cache: cache.free(1))
    assert not below.all(lambda cache: cache.free(1))
    assert below.get(1) is None
    below.set(4, entry())
    assert below.all(lambda cache: cache.has(2))
    below.all(lambda cache: cache.clear("weights 2"))
    assert below.get(2) is None


def test_what_cannot_be_told_to_others_stays_in_the_hot_tier(ranks):
    steps = ranks.steps
    assert ranks.get(1.5) is None
    assert not ranks.all(lambda cache: cache.has(1.5))
    assert not ranks.all(lambda cache: cache.free(1.5))
    assert ranks.steps == steps
    assert ranks.set(1.5, entry())
    assert ranks.get(1.5) is not None
    assert ranks.set(2, Unregistered(embedding=torch.zeros(KIB, dtype=torch.uint8)))
    for key in (3, 4):
        ranks.set(key, entry())
    assert ranks.get(1.5) is None
    assert ranks.all(lambda cache: cache.locate(2)) is None
    assert ranks.get(2) is None
    assert ranks.leader.stats().memory_only == {"key_or_class": 2}


def test_a_result_with_a_gradient_is_kept_without_it(ranks):
    ranks.set(1, EmbeddingResult(embedding=torch.ones(4, requires_grad=True)))
    assert not ranks.get(1).embedding.requires_grad


# Failures of one rank that are misses on all


@pytest.mark.parametrize("failing", range(1, SIZE))
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a bug")])
def test_a_rank_without_memory_is_a_miss_on_all(below, monkeypatch, failing, error):
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "empty_target", only_on(failing, receiver.empty_target, error))
        assert below.get(1) is None
    stats = [cache.stats() for cache in below.caches]
    assert [one.host["hits"] for one in stats] == [0] * SIZE
    assert [one.misses for one in stats] == [1] * SIZE
    assert stats[0].misses_by_reason == {"other_rank": 1}
    assert stats[0].faults == {"other_rank": 1}
    cause = "promotion" if isinstance(error, RuntimeError) else "internal"
    assert stats[failing].faults == stats[failing].misses_by_reason == {cause: 1}
    below.caches[failing]._counters.faults.clear()
    assert below.get(1).embedding[0] == 1  # it stayed below


def test_a_leader_without_memory_is_a_miss_on_all(below, monkeypatch):
    with monkeypatch.context() as patch:
        error = RuntimeError("out of memory")
        patch.setattr(promotion, "empty_target", only_on(0, promotion.empty_target, error))
        assert below.get(1) is None
    assert below.leader.stats().misses_by_reason == {"promotion": 1}
    assert below.followers[0].stats().misses_by_reason == {"leader": 1}
    assert below.get(1).embedding[0] == 1


def test_a_fault_of_the_leader_is_a_miss_on_all(below, monkeypatch):
    def find(key):
        raise OSError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(below.leader._below.promoter, "find", find)
        assert below.get(1) is None
    assert below.leader.stats().faults == {"internal": 1}
    below.leader._counters.faults.clear()
    assert below.get(1).embedding[0] == 1


def test_a_class_or_device_that_a_rank_lacks_is_a_miss_on_all(below, monkeypatch):
    for name, answer, cause in [
        ("class_of_tag", None, "unknown_class"),
        ("target_device", None, "no_device"),
        ("is_capturing", True, "capture"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(receiver, name, lambda *arguments, answer=answer: answer)
            assert below.get(1) is None
        assert below.followers[0].stats().misses_by_reason[cause] == 1
    assert below.get(1).embedding[0] == 1


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_device_whose_tensors_the_group_does_not_carry_is_a_miss_on_all(
    below, monkeypatch, failing
):
    with monkeypatch.context() as patch:
        patch.setattr(below.caches[failing]._receiver, "_group_carries", lambda device: False)
        assert below.get(1) is None
    assert below.caches[failing].stats().misses_by_reason == {"no_group": 1}
    assert [cache.stats().host["hits"] for cache in below.caches] == [0] * SIZE
    assert below.get(1).embedding[0] == 1


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_rank_that_cannot_clone_a_view_is_a_refusal_on_all(below, monkeypatch, failing):
    view = EmbeddingResult(embedding=torch.zeros(4 * KIB, dtype=torch.uint8)[:KIB])
    error = RuntimeError("out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(agreement, "compact", only_on(failing, agreement.compact, error))
        assert below.set(9, view) is False
    assert not below.all(lambda cache: cache.has(9))
    causes = [set(cache.stats().faults) for cache in below.caches]
    assert causes == [{"admission"} if r == failing else {"other_rank"} for r in range(SIZE)]
    assert below.set(9, view)
    assert below.get(9).embedding.untyped_storage().nbytes() == KIB


# Encoding


def test_each_rank_encodes_what_no_rank_has(below):
    runs = []

    def encode(keys):
        runs.append(keys)
        return [entry(fill=key) for key in keys]

    answer = below.each(lambda cache: cache.get_or_encode([1, 7, 3, 7], encode))
    assert [[result.embedding[0].item() for result in one] for one in answer] == [[1, 7, 3, 7]] * 3
    assert runs == [[7]] * 3
    assert below.get(7).embedding[0] == 7


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("problem", [ValueError("a broken image"), "one result too few"])
def test_an_encoder_that_fails_on_one_rank_is_kept_nowhere(ranks, awaited, problem):
    def encode(keys):
        if _this.rank == 1 and isinstance(problem, Exception):
            raise problem
        return [] if _this.rank == 1 else [entry() for _ in keys]

    async def aencode(keys):
        return encode(keys)

    def call(cache):
        if awaited:
            return asyncio.run(cache.aget_or_encode([5], aencode))
        return cache.get_or_encode([5], encode)

    errors = ranks.each(call)
    assert [type(error) for error in errors] == [PeerFailedError, ValueError, PeerFailedError]
    assert errors[0].ranks == [1]
    assert "the encoder failed on rank 1" in str(errors[0])
    assert ranks.get(5) is None
    assert ranks.set(5, entry())


def test_an_encoder_that_fails_everywhere_raises_its_own_error(ranks):
    def encode(keys):
        raise ValueError(f"rank {_this.rank}")

    errors = ranks.each(lambda cache: cache.get_or_encode([5], encode))
    assert [str(error) for error in errors] == ["rank 0", "rank 1", "rank 2"]


def test_asyncio_encoders_agree_too(ranks):
    async def encode(keys):
        return [entry(fill=key) for key in keys]

    answers = ranks.each(lambda cache: asyncio.run(cache.aget_or_encode([4, 5], encode)))
    assert all([r.embedding[0].item() for r in one] == [4, 5] for one in answers)
    assert ranks.all(lambda cache: cache.has(5))


# Out of step, and out of the group


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda cache, odd: cache.get_single(98 if odd else 99), "different keys"),
        (lambda cache, odd: cache.has(98) if odd else cache.get_single(98), "the same calls"),
        (lambda cache, odd: cache.set(9, entry(8 if odd else 9)), "different arguments"),
        (lambda cache, odd: cache.free(98) if odd else cache.set(98, entry()), "the same calls"),
    ],
)
@pytest.mark.parametrize("which", range(SIZE))
def test_a_rank_that_makes_another_call_ends_the_group(below, call, words, which):
    errors = below.each(lambda cache: call(cache, cache is below.caches[which]))
    assert [type(error) for error in errors] == [GroupOutOfStepError] * SIZE
    assert all(words in str(error) for error in errors)
    assert lost(below)


@pytest.mark.parametrize(
    "alone",
    [
        lambda cache: cache.get_single(2),
        lambda cache: cache.free(2),
        lambda cache: cache.clear(),
        lambda cache: cache.set(2, entry()),
    ],
)
def test_a_call_that_one_rank_made_alone_is_found_out_at_the_next_step(below, alone):
    alone(below.followers[1])
    errors = below.each(lambda cache: cache.get_single(99))
    assert [type(error) for error in errors] == [GroupOutOfStepError] * SIZE
    assert "different calls before" in str(errors[0])
    assert lost(below)


def test_who_is_out_of_the_group_can_still_be_looked_at_cleared_and_closed(below):
    below.each(lambda cache: cache.get_single(98 if cache is below.leader else 99))
    for cache in below.caches:
        cache.clear("next")
        assert cache.drain()
        assert cache.stats().group["failure"]
        cache.close()
        cache.close()
    assert lost(below)


def test_a_failure_after_all_agreed_ends_the_group_for_that_rank(below, monkeypatch):
    monkeypatch.setattr(below.followers[0], "_insert", only_on(1, None, ValueError("a bug")))
    answers = below.each(lambda cache: cache.get_single(1))
    assert isinstance(answers[1], ValueError)
    assert len(below.followers[0]) == 0
    with pytest.raises(GroupLostError, match="a bug"):
        below.followers[0].get_single(3)


def test_an_interrupted_read_of_the_leader_ends_the_group_for_it(below, monkeypatch):
    def restore(found):
        raise KeyboardInterrupt

    monkeypatch.setattr(below.leader._below.promoter, "restore", restore)
    for cache in below.followers:
        monkeypatch.setattr(cache._exchange, "meet", hurried(cache._exchange, Kind.TAKE))
    answers = below.each(lambda cache: cache.get_single(1))
    assert [type(answer) for answer in answers] == [
        KeyboardInterrupt,
        GroupLostError,
        GroupLostError,
    ]
    assert lost(below)


def test_a_forked_child_is_no_rank(below):
    child = below.followers[0]
    group = weakref.ref(below.groups.pop(1))
    steps = child.stats().group["steps"]
    child._abandon_lower_tiers()
    assert child.get_single(3) is not None
    assert child.get_single(1) is None
    assert child.set(9, entry())
    assert not child.free(1)
    assert child.prefetch([1]) == 0
    assert child.stats().group == {}
    child.close()
    assert group() is not None  # its end would wait for threads that a child does not have
    assert below.leader.stats().group["steps"] == steps


# The beginning and the end


def test_ranks_of_different_sizes_are_refused():
    groups = gloo_groups(SIZE)
    ranks = Ranks(
        lambda rank, group: TensorParallelMultimodalCache(KIB + rank, group=group), groups
    )
    assert [type(error) for error in ranks.caches] == [GroupOutOfStepError] * SIZE
    assert "hot.max_size" in str(ranks.caches[0])


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_rank_that_cannot_be_built_is_an_error_on_all(failing, monkeypatch):
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)

    def make(rank, group):
        size = None if rank == failing else KIB  # no size at all is refused
        return TensorParallelMultimodalCache(size, group=group)

    errors = Ranks(make, gloo_groups(SIZE)).caches
    kinds = [ConfigError if rank == failing else PeerFailedError for rank in range(SIZE)]
    assert [type(error) for error in errors] == kinds


def test_a_rank_that_cannot_be_built_nor_say_so_raises_its_own_error(monkeypatch):
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)
    group = impatient(gloo_groups(2)[0])
    with pytest.raises(ConfigError):
        TensorParallelMultimodalCache(group=group)


def test_each_rank_reads_the_yaml(tmp_path):
    file = tmp_path / "mmcache.yaml"
    file.write_text("hot:\n  max_size: 3KiB\nhost:\n  max_size: 64KiB\n")
    ranks = Ranks(
        lambda rank, group: TensorParallelMultimodalCache.from_yaml(file, group=group),
        gloo_groups(2),
    )
    assert [cache.max_size for cache in ranks.caches] == [3 * KIB] * 2
    assert [cache._below is None for cache in ranks.caches] == [False, True]
    for cache in ranks.caches:
        cache.close()


def test_after_the_end_everything_is_a_miss_and_nothing_is_sent(below):
    below.each(lambda cache: cache.close())
    steps = below.steps
    assert below.get(1) is None
    assert below.set(1, entry()) is False
    assert not below.all(lambda cache: cache.has(1))
    assert not below.all(lambda cache: cache.free(1))
    assert below.steps == steps


def test_a_closed_cache_lets_go_of_its_group():
    """A gloo group that is alive when the interpreter exits can abort the process."""
    groups = gloo_groups(2)
    ranks = Ranks(lambda rank, group: TensorParallelMultimodalCache(KIB, group=group), groups)
    alive = [weakref.ref(group) for group in groups]
    groups.clear()
    assert all(group() is not None for group in alive)
    for cache in ranks.caches:
        assert cache._at_exit is not None  # for those who do not close it
        cache._at_exit()
        assert cache.get_single(1) is None
    assert all(group() is None for group in alive)


def test_after_the_end_each_rank_encodes_alone(ranks):
    ranks.each(lambda cache: cache.close())
    (answer,) = ranks.leader.get_or_encode([5], lambda keys: [entry(fill=5)])
    assert answer.embedding[0] == 5


def test_ranks_in_unison_are_compared(tmp_path):
    config = CacheConfig(host=HostConfig(max_size="1MiB"))
    with UnisonCache(4 * KIB, config=config) as cache:
        cache.set(1, entry())
        cache.set(2, entry())
        cache.followers[0].mm_cache.move_to_end(1)
        with pytest.raises(AssertionError, match="1, 2"):
            cache.has(1)
        cache.followers[0].mm_cache.move_to_end(2)
        cache.followers[0].mm_cache[1] = entry(fill=9)
        with pytest.raises(AssertionError, match="get_single: embedding"):
            cache.get_single(1)
        cache.followers[0].mm_cache[1] = cache.mm_cache[1]


def test_every_error_of_a_group_can_be_caught_as_one():
    assert issubclass(GroupOutOfStepError, GroupError)
    assert issubclass(GroupLostError, GroupError)
    assert not issubclass(GroupError, promotion.DEVICE_ERRORS)  # those become misses
