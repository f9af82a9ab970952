"""What SGLang's engine relies on beyond the specified sentences, on every kind of cache.

Owns: storage accounting, clones, identity, order of refusal, subclasses, keys that collide.
Does not own: the sentences of the specification (test_specified_interface.py).
"""

import copy
import dataclasses
import pickle

import pytest
import torch

from tiered_mmcache import EmbeddingResult, static_cache

KIB = 1024
PRIME = 2**61 - 1  # Python's hash of an integer is its remainder by this


@dataclasses.dataclass(kw_only=True)
class FramesResult(EmbeddingResult):
    """Like SGLang's result of efficient video sampling."""

    num_tokens_per_frame: list[int]


@dataclasses.dataclass(kw_only=True)
class CheckedResult(EmbeddingResult):
    """A class whose initialiser must not run again, with a field that it does not take."""

    rows: int = dataclasses.field(init=False, default=-1)

    def __post_init__(self):
        if self.embedding.untyped_storage().nbytes() != 400:
            raise AssertionError("the initialiser ran again")
        self.rows = 7


def entry(size_bytes=KIB, fill=0):
    return EmbeddingResult(embedding=torch.full((size_bytes,), fill, dtype=torch.uint8))


def order(cache):
    return list(cache.mm_cache)


# What set promises


def test_after_a_set_the_next_look_up_finds_the_entry(make):
    cache = make(4 * KIB)
    for mm_hash in range(1, 30):
        admitted = cache.set(mm_hash, entry(mm_hash * 256))
        assert admitted == (mm_hash * 256 <= 4 * KIB)
        assert (cache.get_single(mm_hash) is not None) == admitted


def test_a_repeated_set_keeps_the_first_value(make):
    cache = make(4 * KIB)
    first = entry(fill=1)
    assert cache.set(1, first)
    assert cache.set(1, entry(fill=2))
    assert cache.get_single(1) is first


def test_a_known_hash_is_accepted_whatever_the_size_of_the_new_value(make):
    cache = make(4 * KIB)
    first = entry()
    cache.set(1, first)
    assert cache.set(1, entry(100 * KIB)) is True
    assert cache.get_single(1) is first


def test_the_same_object_is_stored_when_no_clone_is_needed(make):
    cache = make(4 * KIB)
    stored = entry()
    tensor = stored.embedding
    cache.set(1, stored)
    assert cache.get_single(1) is stored
    assert stored.embedding is tensor


def test_a_refused_set_leaves_recency_alone(make):
    cache = make(2 * KIB)
    cache.set(1, entry())
    cache.set(2, entry())
    assert not cache.set(3, entry(3 * KIB))
    assert order(cache) == [1, 2]


def test_free_takes_the_engines_two_arguments(make):
    cache = make(2 * KIB)
    cache.set(1, entry())
    assert cache.free(1, None) is True
    assert cache.get_single(1) is None


# Storage


def test_the_size_of_a_tensor_is_its_storage():
    batch = torch.zeros(100, 4)
    assert static_cache._get_tensor_size(batch) == 1600
    assert static_cache._get_tensor_size(batch[:1]) == 1600
    assert static_cache._get_tensor_size(torch.zeros(0)) == 0


def test_a_tensor_without_storage_is_charged_its_payload():
    sparse = torch.zeros(4, 4).to_sparse()
    assert static_cache._get_tensor_size(sparse) == 64


def test_the_clone_of_a_view_does_not_keep_the_batch(make):
    cache = make(KIB)
    batch = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    for row in range(10):
        assert cache.set(row, EmbeddingResult(embedding=batch[row]))
    held = [cache.get_single(mm_hash) for mm_hash in order(cache)]
    assert cache.current_size == sum(r.embedding.untyped_storage().nbytes() for r in held)
    assert all(r.embedding.untyped_storage().nbytes() == 400 for r in held)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[:, ::2],
        lambda base: base[3:5].t(),
        lambda base: base[1, 1],
        lambda base: base[4:4],
        lambda base: base[2:4].unsqueeze(0),
    ],
    ids=["strided", "transposed", "scalar", "empty", "unsqueezed"],
)
def test_every_kind_of_view_is_held_exactly(make, view):
    cache = make(4 * KIB)
    base = torch.randn(8, 8)
    expected = view(base).clone()
    assert cache.set(1, EmbeddingResult(embedding=view(base)))
    held = cache.get_single(1).embedding
    assert held.shape == expected.shape
    assert torch.equal(held, expected)
    assert held.untyped_storage().nbytes() == cache.current_size == expected.nbytes


def test_a_view_is_admitted_by_what_its_clone_takes(make):
    cache = make(KIB)
    batch = torch.zeros(100 * KIB, dtype=torch.uint8)
    assert cache.set(1, EmbeddingResult(embedding=batch[:KIB])) is True
    assert cache.set(2, EmbeddingResult(embedding=batch[: KIB + 1])) is False
    assert order(cache) == [1]


def test_a_transposed_tensor_that_fills_its_storage_is_not_cloned(make):
    cache = make(4 * KIB)
    stored = EmbeddingResult(embedding=torch.randn(8, 4).t())
    cache.set(1, stored)
    assert cache.get_single(1) is stored


def test_the_clone_keeps_the_class_and_its_fields(make):
    cache = make(4 * KIB)
    frames = [1, 2]
    view = FramesResult(embedding=torch.zeros(100, 4)[:3], num_tokens_per_frame=frames)
    assert cache.set(1, view)
    held = cache.get_single(1)
    assert type(held) is FramesResult
    assert held.num_tokens_per_frame is frames
    assert held is not view


def test_the_clone_neither_runs_the_initialiser_nor_resets_fields(make):
    cache = make(4 * KIB)
    view = CheckedResult(embedding=torch.zeros(10, 10)[:2])
    view.rows = 9
    cache.set(1, view)
    held = cache.get_single(1)
    assert held.embedding.untyped_storage().nbytes() == 80
    assert held.rows == 9


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 3, 4), (1, 2, 1, 2, 1, 2)])
def test_any_number_of_dimensions(make, shape):
    cache = make(4 * KIB)
    tensor = torch.randn(shape)
    assert cache.set(1, EmbeddingResult(embedding=tensor))
    assert torch.equal(cache.get_single(1).embedding, tensor)
    assert cache.current_size == tensor.nbytes


def test_under_inference_mode(make):
    cache = make(KIB)
    with torch.inference_mode():
        cache.set(1, EmbeddingResult(embedding=torch.arange(128.0)))
        cache.set(2, EmbeddingResult(embedding=torch.arange(1000.0)[:128]))
        assert torch.equal(cache.get_single(2).embedding, torch.arange(128.0))
    assert cache.set(3, EmbeddingResult(embedding=torch.ones(128)))
    assert torch.equal(cache.get_single(2).embedding, torch.arange(128.0))


# Keys


COLLISIONS = [([5], [5 + PRIME]), ([-1], [-2]), ([7, -1], [7, -2]), ([0], [PRIME])]


@pytest.mark.parametrize(("asked", "other"), COLLISIONS)
def test_combinations_with_equal_hashes_are_different_entries(make, asked, other):
    assert hash(tuple(asked)) == hash(tuple(other))
    cache = make(4 * KIB)
    stored = entry(fill=1)
    cache.set(cache.combine_hashes(asked), stored)
    assert cache.get(other) is None
    assert cache.get(asked) is stored
    cache.set(cache.combine_hashes(other), entry(fill=2))
    assert cache.get(asked) is stored
    assert cache.get(other).embedding[0] == 2
    assert cache.free(cache.combine_hashes(other))
    assert cache.get(asked) is stored


def test_single_hashes_with_equal_hashes_are_different_entries(make):
    cache = make(4 * KIB)
    for mm_hash in (5, 5 + PRIME, -1, -2):
        cache.set(mm_hash, entry(fill=mm_hash % 251))
    for mm_hash in (5, 5 + PRIME, -1, -2):
        assert cache.get_single(mm_hash).embedding[0] == mm_hash % 251


def test_who_kept_only_the_number_still_finds_the_combination(make):
    cache = make(4 * KIB)
    stored = entry()
    cache.set(cache.combine_hashes([1, 2]), stored)
    assert cache.get_single(hash((1, 2))) is stored
    assert cache.has(hash((1, 2)))


def test_a_copied_or_pickled_combination_finds_its_entry(make):
    cache = make(4 * KIB)
    stored = entry()
    combined = cache.combine_hashes([1, 2])
    cache.set(combined, stored)
    for other in (copy.copy(combined), copy.deepcopy(combined)):
        assert cache.get_single(other) is stored
    assert cache.get_single(pickle.loads(pickle.dumps(combined))) is stored


@pytest.mark.parametrize("key", ["sha256:0a", b"\x00\xff", ("a", 1), 0, 2**64 - 1, -(2**63)])
def test_every_hashable_that_engines_use_is_a_key(make, key):
    cache = make(4 * KIB)
    stored = entry()
    assert cache.set(key, stored)
    assert cache.get_single(key) is stored
    assert cache.set(cache.combine_hashes([key, key]), stored)
    assert cache.get([key, key]) is stored
    assert cache.free(key)
    assert not cache.has(key)


def test_an_unhashable_key_is_a_type_error(make):
    cache = make(4 * KIB)
    for call in (cache.get_single, cache.has, cache.free):
        with pytest.raises(TypeError):
            call([1, 2])
    with pytest.raises(TypeError):
        cache.get([[1, 2]])
    with pytest.raises(TypeError):
        cache.set([1, 2], entry())
