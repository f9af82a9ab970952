"""The demo's engine in miniature and its second process, against a cache made of dictionaries."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mmcache_tools.demo import second
from mmcache_tools.demo.images import DemoImage, load_images
from mmcache_tools.demo.second import Handover, HandoverItem, replay
from mmcache_tools.demo.session import Served, Session, digest, look_up
from mmcache_tools.demo.workload import Item
from tiered_mmcache import EmbeddingResult, MultimodalCache

CAT, DOG = Item(pictures=("cat",)), Item(pictures=("dog",))
BOTH = Item(pictures=("cat", "dog"))


@dataclass
class Counted:
    counts: dict

    def as_dict(self):
        return {name: {"hits": count} for name, count in self.counts.items()}


class FakeCache:
    """Three least-recently-used dictionaries of bounded length; a hit moves an entry to the top."""

    def __init__(self, *lengths):
        self.tiers = [OrderedDict() for _ in lengths]
        self.lengths = lengths
        self.counts = {"hot": 0, "host": 0, "disk": 0}
        self.admits = True

    def get(self, mm_hashes):
        key = MultimodalCache.combine_hashes(mm_hashes)
        for name, tier in zip(self.counts, self.tiers, strict=True):
            if key in tier:
                self.counts[name] += 1
                result = tier.pop(key)
                self.place(key, result)
                return result
        return None

    def set(self, key, result):
        if self.admits:
            self.place(key, result)
        return self.admits

    def place(self, key, result, level=0):
        tier = self.tiers[level]
        tier[key] = result
        if len(tier) > self.lengths[level]:
            self.place(*tier.popitem(last=False), level + 1)

    def stats(self):
        return Counted(dict(self.counts))


class FakeEncoder:
    def __init__(self):
        self.runs = 0

    def __call__(self, images):
        self.runs += 1
        return torch.cat([torch.full((image.tokens, 4), image.content_hash) for image in images])


def blank(name, content_hash):
    processed = np.zeros((3, 64, 64), dtype=np.float32)
    return DemoImage(name=name, processed=processed, content_hash=content_hash)


@pytest.fixture
def cache():
    return FakeCache(1, 1, 100)


@pytest.fixture
def encoder():
    return FakeEncoder()


@pytest.fixture
def session(cache, encoder):
    ticks = iter(range(1000))
    images = {"cat": blank("cat", 7), "dog": blank("dog", 8)}
    return Session(cache=cache, encode=encoder, images=images, clock=lambda: float(next(ticks)))


def test_an_item_is_encoded_once_and_then_served_by_each_tier(session, encoder):
    served = [session.serve(item) for item in (CAT, CAT, DOG, CAT, DOG, BOTH, CAT)]
    assert served == [
        Served.ENCODER,
        Served.HOT,
        Served.ENCODER,
        Served.HOST,
        Served.HOST,
        Served.ENCODER,
        Served.DISK,
    ]
    assert encoder.runs == 3
    cat = session.accounts[CAT]
    assert cat.hits == {Served.HOT: 1, Served.HOST: 1, Served.DISK: 1}
    assert cat.identical == 3


def test_a_combination_is_an_item_of_its_own_and_ordered(session):
    assert session.hashes(BOTH) == [7, 8]
    session.serve(BOTH)
    reverse = Item(pictures=("dog", "cat"))
    assert session.serve(reverse) is Served.ENCODER
    assert session.accounts[reverse].digest != session.accounts[BOTH].digest


def test_seconds_saved_are_the_mean_encoder_time_times_the_hits(session):
    for _ in range(4):
        session.serve(CAT)
    account = session.accounts[CAT]
    assert account.encode_s == [1.0]
    assert account.saved_s == 3.0
    assert session.hits_s == 3.0
    assert account.embedding_bytes == 4 * 4 * 8


def test_a_wrong_bit_is_not_counted_as_identical(session, cache):
    session.serve(CAT)
    cache.tiers[0][MultimodalCache.combine_hashes([7])].embedding[0, 0] += 1
    session.serve(CAT)
    account = session.accounts[CAT]
    assert account.hits[Served.HOT] == 1
    assert account.identical == 0


def test_a_refused_embedding_is_counted(session, cache):
    cache.admits = False
    assert [session.serve(CAT), session.serve(CAT)] == [Served.ENCODER, Served.ENCODER]
    assert session.accounts[CAT].refused == 2
    assert session.accounts[CAT].saved_s == 0.0


def test_a_hit_that_no_tier_counted_is_an_error(cache):
    cache.set(MultimodalCache.combine_hashes([7]), EmbeddingResult(embedding=torch.zeros(1)))
    cache.stats = lambda: Counted({"hot": 0, "host": 0, "disk": 0})
    with pytest.raises(RuntimeError, match="no tier"):
        look_up(cache, [7])


def test_the_digest_tells_dtype_shape_and_bits_apart():
    base = torch.arange(6, dtype=torch.int32)
    others = [base.reshape(2, 3), base.to(torch.int64), base.view(torch.float32), base + 1]
    assert len({digest(each) for each in [base, *others]}) == 5
    assert digest(base.reshape(2, 3).T) == digest(base.reshape(2, 3).T.contiguous())
    assert digest(torch.empty(0, 4)) == digest(torch.empty(0, 4))
    assert digest(torch.tensor(1.5, dtype=torch.bfloat16))


@pytest.fixture
def handed_over(cache):
    """The cat picture, held by the lowest tier only, and what is known of it."""
    (image,) = load_images(["chelsea"]).values()
    result = EmbeddingResult(embedding=torch.ones(2, 3))
    cache.place(MultimodalCache.combine_hashes([image.content_hash]), result, level=2)
    return HandoverItem(
        pictures=("chelsea",), mm_hashes=(image.content_hash,), digest=digest(result.embedding)
    )


def test_the_second_process_serves_from_disk(cache, handed_over):
    result = replay(cache, [handed_over])
    assert result.served == {"hot": 0, "host": 0, "disk": 1, "encoder": 0}
    assert (result.items, result.bit_identical, result.other_hashes) == (1, 1, 0)


def test_the_second_process_tells_misses_wrong_bits_and_other_hashes(cache, handed_over):
    wrong = HandoverItem(pictures=("chelsea",), mm_hashes=(1,), digest="another")
    absent = HandoverItem(pictures=("chelsea", "chelsea"), mm_hashes=(1, 1), digest="any")
    result = replay(cache, [wrong, absent])
    assert result.served == {"hot": 0, "host": 0, "disk": 1, "encoder": 1}
    assert (result.bit_identical, result.other_hashes) == (0, 1)


def test_the_handover_survives_json(handed_over):
    handover = Handover(config={"namespace": "n"}, items=(handed_over,))
    assert Handover.from_json(handover.to_json()) == handover


def test_a_second_process_that_fails_says_what_it_printed(monkeypatch):
    handover = Handover(config={"no_such_section": 1}, items=())
    with pytest.raises(second.SecondProcessError, match="no_such_section"):
        second.start(handover)


def test_a_second_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(second, "_TIMEOUT_S", 0.01)
    with pytest.raises(second.SecondProcessError, match="longer"):
        second.start(Handover(config={}, items=()))
