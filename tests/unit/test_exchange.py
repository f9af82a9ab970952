"""Messages between ranks, over real gloo groups whose ranks are threads.

Owns: what is sent and compared, and what being out of the group means.
Does not own: what the cache sends when (test_agreement.py).
"""

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tiered_mmcache.errors import GroupLostError, GroupOutOfStepError
from tiered_mmcache.ranks import exchange as module
from tiered_mmcache.ranks.exchange import MESSAGE_BYTES, Kind, RankExchange, Step
from tiered_mmcache.testing.ranks import gloo_groups, on_all_ranks

STEP = Step(kind=Kind.FIND, key=bytes(range(16)), state=2**64 - 1, hot_hits=7, detail=9)


@pytest.fixture
def exchanges():
    """Three ranks that wait for each other for as long as it takes."""
    return [RankExchange(group) for group in gloo_groups(3)]


@pytest.fixture
def impatient():
    """Two ranks that do not wait long for each other."""
    groups = gloo_groups(2)
    for group in groups:
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.2))
    return [RankExchange(group) for group in groups]


def each(exchanges, call):
    """What a call comes to on each rank: an answer or an exception."""
    ended = on_all_ranks(len(exchanges), lambda rank: call(exchanges[rank]))
    return [future.exception() or future.result() for future in ended]


def test_every_rank_hears_the_leader(exchanges):
    answers = each(exchanges, lambda one: one.meet(STEP, answer=f"rank {one.rank}".encode()))
    assert [meeting.answer for meeting in answers] == [b"rank 0"] * 3
    assert [meeting.failed for meeting in answers] == [[]] * 3
    assert [one.leads for one in exchanges] == [True, False, False]


@pytest.mark.parametrize(
    "length", [0, 1, MESSAGE_BYTES - 60, MESSAGE_BYTES - 59, MESSAGE_BYTES, 70_000]
)
def test_an_answer_of_any_length_arrives(exchanges, length):
    said = bytes(number % 251 for number in range(length))
    for _ in range(2):
        answers = each(exchanges, lambda one: one.meet(STEP, answer=said if one.leads else b""))
        assert all(meeting.answer == said for meeting in answers)


def test_every_rank_hears_who_failed(exchanges):
    answers = each(exchanges, lambda one: one.meet(STEP, ok=one.rank == 1))
    assert [meeting.failed for meeting in answers] == [[0, 2]] * 3


@pytest.mark.parametrize(
    ("field", "other", "words"),
    [
        ("kind", Kind.SET, "rank 1 at set, step 1: all ranks have to make the same calls"),
        ("key", bytes(16), "asked for different keys"),
        ("state", 5, "had different calls before"),
        ("hot_hits", 8, "had different calls before"),
        ("detail", 10, "gave different arguments"),
    ],
)
def test_every_rank_hears_that_one_is_elsewhere(exchanges, field, other, words):
    def call(one):
        return one.meet(dataclasses.replace(STEP, **{field: other}) if one.rank == 1 else STEP)

    errors = each(exchanges, call)
    assert [type(error) for error in errors] == [GroupOutOfStepError] * 3
    assert [error.ranks for error in errors] == [[1], [0, 2], [1]]
    assert words in str(errors[0])
    assert [error.rank for error in errors] == [0, 1, 2]


def test_different_settings_are_named(exchanges):
    step = dataclasses.replace(STEP, kind=Kind.SETTINGS)
    errors = each(exchanges, lambda one: one.meet(dataclasses.replace(step, detail=one.rank)))
    assert all("hot.max_size" in str(error) for error in errors)


def test_a_rank_that_took_more_steps_is_elsewhere(exchanges):
    exchanges[2].steps += 1
    errors = each(exchanges, lambda one: one.meet(STEP))
    assert "rank 2 at find, step 2" in str(errors[0])


def test_what_others_send_over_the_group_is_no_message(exchanges):
    def call(one):
        if one.rank != 1:
            return one.meet(STEP)
        strange = torch.full((MESSAGE_BYTES,), 250, dtype=torch.uint8)
        everyone = [torch.empty_like(strange) for _ in range(3)]
        return one._group.allgather([everyone], [strange]).wait()

    errors = each(exchanges, call)
    assert all(isinstance(errors[rank], GroupOutOfStepError) for rank in (0, 2))
    assert "give the cache its own group" in str(errors[0])


def test_who_is_out_of_the_group_sends_nothing_any_more(exchanges):
    each(exchanges, lambda one: one.meet(dataclasses.replace(STEP, state=one.rank)))
    steps = [one.steps for one in exchanges]
    for one in exchanges:
        with pytest.raises(GroupLostError, match="since an earlier call"):
            one.meet(STEP)
        with pytest.raises(GroupLostError, match="since an earlier call"):
            one.share(torch.zeros(4, dtype=torch.uint8))
        assert one.failure is not None
    assert [one.steps for one in exchanges] == steps


def test_a_rank_that_does_not_come_ends_in_the_error_of_the_group(impatient):
    with pytest.raises(GroupLostError, match=r"step 1 .find.*Timed out") as raised:
        impatient[0].meet(STEP)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert impatient[0].failure is not None


def test_an_interrupted_wait_leaves_the_group(exchanges, monkeypatch):
    def interrupted(message):
        raise KeyboardInterrupt

    monkeypatch.setattr(exchanges[0], "_gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchanges[0].meet(STEP)
    with pytest.raises(GroupLostError, match="KeyboardInterrupt"):
        exchanges[0].meet(STEP)


def test_the_first_reason_for_leaving_stays(exchanges):
    exchanges[0].leave("the first")
    exchanges[0].leave("the second")
    assert exchanges[0].failure == "the first"


def test_the_bytes_of_the_leader_are_shared(exchanges):
    payloads = [torch.full((100_000,), rank, dtype=torch.uint8) for rank in (5, 6, 7)]
    each(exchanges, lambda one: one.share(payloads[one.rank]))
    assert all(bool((payload == 5).all()) for payload in payloads)
    assert [one.shared_bytes for one in exchanges] == [100_000] * 3


def test_no_bytes_need_no_sending(impatient):
    impatient[0].share(torch.empty(0, dtype=torch.uint8))
    assert impatient[0].shared_bytes == 0


def test_a_rank_that_does_not_take_part_in_sharing_ends_in_the_error_of_the_group(impatient):
    with pytest.raises(GroupLostError, match="sharing a tensor"):
        impatient[1].share(torch.zeros(8, dtype=torch.uint8))
    assert impatient[1].failure is not None


def test_an_interrupted_sharing_leaves_the_group(exchanges, monkeypatch):
    def interrupted(group, payload):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_broadcast", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchanges[1].share(torch.zeros(8, dtype=torch.uint8))
    assert exchanges[1].failure == "KeyboardInterrupt"


@pytest.mark.parametrize("group", [None, -100, "gloo"])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match="group has to be a group of torch"):
        RankExchange(group)
    with pytest.raises(TypeError, match="device_group has to be"):
        RankExchange(gloo_groups(1)[0], -100)


def test_a_group_without_cpu_tensors_is_refused_with_the_remedy():
    group = dist.ProcessGroup(HashStore(), 0, 1)
    with pytest.raises(ValueError, match=r"new_group.backend='gloo'"):
        RankExchange(group)


def test_groups_of_other_ranks_are_refused():
    one, three = gloo_groups(1)[0], gloo_groups(3)
    with pytest.raises(ValueError, match="the ranks of group, in the same order"):
        RankExchange(three[0], one)
    with pytest.raises(ValueError, match="the ranks of group, in the same order"):
        RankExchange(three[0], three[1])


def test_tensors_of_a_device_go_over_its_group():
    (group,), (other,) = gloo_groups(1), gloo_groups(1)
    one = RankExchange(group, other)
    cuda = torch.device("cuda", 0)
    assert one._group_for(torch.device("cpu")) is group
    assert one._group_for(cuda) is other
    assert one.carries(torch.device("cpu"))
    assert not one.carries(cuda)  # gloo was registered for CPU tensors only
    (both,) = gloo_groups(1, device=cuda)
    assert RankExchange(group, both).carries(cuda)
    assert RankExchange(both).carries(cuda)


def test_messages_pass_under_inference_mode_and_without_it(exchanges):
    def both(one):
        with torch.inference_mode():
            inside = one.meet(STEP, answer=b"inside")
        return inside.answer, one.meet(STEP, answer=b"outside").answer

    assert each(exchanges, both) == [(b"inside", b"outside")] * 3
