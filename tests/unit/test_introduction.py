"""What follows for all ranks from what each says of itself, and groups that only members make.

Owns: the conclusions, what cannot be understood, and a member that does not come.
Does not own: how words travel (test_exchange.py), or what SGLang's ranks do (tests/engines).
"""

import dataclasses

import msgpack
import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from tiered_mmcache.errors import GroupOutOfStepError
from tiered_mmcache.ranks.exchange import MOST_WORDS_BYTES, NO_KEY, Kind, RankExchange, Step
from tiered_mmcache.ranks.gloo import gloo_group
from tiered_mmcache.ranks.introduction import Introduction, agree_on_terms, concluded
from tiered_mmcache.testing.ranks import gloo_groups, on_all_ranks

PLAIN = Introduction(max_size=100, spill_oversize=False, namespace=7, refusal="")
introductions = st.builds(
    Introduction,
    max_size=st.integers(0, 2**50),
    spill_oversize=st.booleans(),
    namespace=st.integers(0, 2**64 - 1),
    refusal=st.text(max_size=400),
)


def changed(**fields):
    return dataclasses.replace(PLAIN, **fields)


@given(st.lists(introductions, min_size=1, max_size=8))
def test_the_terms_follow_from_all_and_from_the_leader(said):
    terms = concluded(said)
    assert terms.max_size == min(one.max_size for one in said)
    assert terms.spill_oversize == said[0].spill_oversize
    assert (terms.refusal is None) == (not any(one.refusal for one in said))
    assert terms.strangers == [
        r for r, one in enumerate(said) if one.namespace != said[0].namespace
    ]


@given(introductions)
@example(changed(refusal="\N{GRINNING FACE}" * 200, max_size=2**50, namespace=2**64 - 1))
@example(changed(refusal="/adapters/\udcff"))
def test_an_introduction_fits_into_a_message(one):
    assert len(one.packed()) <= MOST_WORDS_BYTES


def test_the_rank_that_refuses_is_named():
    terms = concluded([PLAIN, changed(refusal="no room"), changed(refusal="no model")])
    assert terms.refusal == "rank 1: no room; rank 2: no model"


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_that_cannot_be_understood_is_a_refusal(place):
    said = [PLAIN, PLAIN]
    said[place] = None
    terms = concluded(said)
    assert terms.refusal == f"rank {place}: it runs another version of this package"
    assert terms.max_size == 100


def each(exchanges, call):
    ended = on_all_ranks(len(exchanges), lambda rank: call(exchanges[rank]))
    return [future.exception() or future.result() for future in ended]


def test_all_ranks_come_to_the_same_terms():
    exchanges = [RankExchange(group) for group in gloo_groups(3)]
    terms = each(exchanges, lambda x: agree_on_terms(x, changed(max_size=100 - x.rank)))
    assert terms == [concluded([changed(max_size=100 - rank) for rank in range(3)])] * 3


@pytest.mark.parametrize(
    "words",
    [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"max_size": 1}), b"x" * MOST_WORDS_BYTES],
    ids=["nothing", "no msgpack", "a list", "other fields", "noise"],
)
def test_words_of_another_version_are_a_refusal_on_all(words):
    exchanges = [RankExchange(group) for group in gloo_groups(2)]
    terms = each(exchanges, lambda x: x.introduce(words) if x.rank else agree_on_terms(x, PLAIN))
    assert "rank 1: it runs another version" in terms[0].refusal


def test_a_rank_elsewhere_is_met_with_an_error():
    exchanges = [RankExchange(group) for group in gloo_groups(2)]
    step = Step(kind=Kind.FIND, key=NO_KEY, state=0, hot_hits=0)
    ended = each(exchanges, lambda x: x.meet(step) if x.rank else agree_on_terms(x, PLAIN))
    assert [type(one) for one in ended] == [GroupOutOfStepError] * 2


def test_too_many_words_are_refused_before_anything_is_sent():
    (exchange,) = [RankExchange(group) for group in gloo_groups(1)]
    with pytest.raises(ValueError, match="more than a message carries"):
        exchange.introduce(bytes(MOST_WORDS_BYTES + 1))
    assert exchange.steps == 0
    assert exchange.introduce(b"after that") == [b"after that"]


def test_a_member_that_does_not_come_ends_the_wait():
    with pytest.raises(RuntimeError):
        gloo_group(HashStore(), 0, 2, 0.2)


def test_a_group_is_made_by_its_members_alone(tmp_path):
    """The other rank of the program is not asked."""
    from tiered_mmcache.ranks.gloo import gloo_group_of

    store = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        first = gloo_group_of([0], "0/0", 10.0)
        second = gloo_group_of([0], "0/1", 10.0)
        assert [group.size() for group in (first, second)] == [1, 1]
        with pytest.raises(ValueError, match="not in list"):
            gloo_group_of([1], "1/0", 10.0)
    finally:
        dist.destroy_process_group()
