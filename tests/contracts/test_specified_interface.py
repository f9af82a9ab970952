"""The specified interface, sentence by sentence, on every kind of cache.

Owns: signatures, names, and each sentence of the specification about the interface and the hot
tier. Each test quotes the sentence that it checks. Does not own: rules that engines rely on beyond
the specification (test_rules_of_engines.py), or lower tiers (test_around_the_cache.py).
"""

import dataclasses
import inspect
from collections import OrderedDict

import pytest
import torch

from tiered_mmcache import (
    EmbeddingResult,
    MultimodalCache,
    MultiModalStaticCache,
    TensorParallelMultimodalCache,
    TieredMultimodalCache,
)

KIB = 1024
CLASSES = [
    MultimodalCache,
    MultiModalStaticCache,
    TieredMultimodalCache,
    TensorParallelMultimodalCache,
]
CONCRETE = [MultiModalStaticCache, TieredMultimodalCache]


def entry(size_bytes=KIB, fill=0):
    return EmbeddingResult(embedding=torch.full((size_bytes,), fill, dtype=torch.uint8))


def order(cache):
    return list(cache.mm_cache)


def parameters(function):
    return list(inspect.signature(function).parameters.values())


def names(function):
    return [parameter.name for parameter in parameters(function)]


# The abstract interface


def test_the_interface_is_abstract():
    """`MultimodalCache` (abstract)."""
    assert inspect.isabstract(MultimodalCache)
    assert MultimodalCache.__abstractmethods__ == {
        "get",
        "set",
        "has",
        "free",
        "clear",
        "available_size",
    }
    with pytest.raises(TypeError):
        MultimodalCache()


@pytest.mark.parametrize("cache_class", CLASSES)
def test_combine_hashes_is_static(cache_class):
    """`combine_hashes` | static `(mm_hashes: list[int]) -> int or None`."""
    assert isinstance(inspect.getattr_static(cache_class, "combine_hashes"), staticmethod)
    assert names(cache_class.combine_hashes) == ["mm_hashes"]
    assert isinstance(cache_class.combine_hashes([1, 2]), int)


@pytest.mark.parametrize("cache_class", CLASSES)
def test_no_hashes_have_no_combination(cache_class):
    """None for an empty list."""
    assert cache_class.combine_hashes([]) is None


@pytest.mark.parametrize("hashes", [[1], [1, 2], [-1, -2], [2**64 - 1, 0, 2**63]])
@pytest.mark.parametrize("cache_class", CLASSES)
def test_a_combination_is_the_hash_of_the_tuple(cache_class, hashes):
    """Else equal to `hash(tuple(mm_hashes))`."""
    combined = cache_class.combine_hashes(hashes)
    assert combined == hash(tuple(hashes))
    assert hash(tuple(hashes)) == combined
    assert hash(combined) == hash(hash(tuple(hashes)))


def test_order_is_part_of_the_combination(make):
    """The whole ordered combination is the key, `[h1, h2]` and `[h2, h1]` differ."""
    cache = make(8 * KIB)
    assert cache.combine_hashes([1, 2]) != cache.combine_hashes([2, 1])
    cache.set(cache.combine_hashes([1, 2]), entry(fill=12))
    assert cache.get([2, 1]) is None
    cache.set(cache.combine_hashes([2, 1]), entry(fill=21))
    assert cache.get([1, 2]).embedding[0] == 12
    assert cache.get([2, 1]).embedding[0] == 21


def test_nothing_is_matched_by_prefix_or_subset(make):
    """Nothing is matched by prefix or subset."""
    cache = make(8 * KIB)
    cache.set(cache.combine_hashes([1, 2, 3]), entry())
    for other in ([1], [2], [1, 2], [2, 3], [1, 3], [1, 2, 3, 4], [1, 2, 2, 3]):
        assert cache.get(other) is None
        assert not cache.has(cache.combine_hashes(other))


@pytest.mark.parametrize("cache_class", CLASSES)
def test_the_signature_of_get(cache_class):
    """`get` | `(mm_hashes: list[int], combined_hash: int or None = None)`."""
    assert names(cache_class.get) == ["self", "mm_hashes", "combined_hash"]
    assert parameters(cache_class.get)[2].default is None


def test_get_answers_with_the_entry_of_the_combination_or_none(make):
    """The entry of the combination, or None."""
    cache = make(8 * KIB)
    stored = entry()
    assert cache.get([1, 2]) is None
    cache.set(cache.combine_hashes([1, 2]), stored)
    assert cache.get([1, 2]) is stored
    assert cache.get([]) is None


def test_get_recomputes_the_combined_hash(make):
    """`combined_hash` is accepted and recomputed."""
    cache = make(8 * KIB)
    stored = entry()
    cache.set(cache.combine_hashes([1, 2]), stored)
    wrong = cache.combine_hashes([3, 4])
    assert cache.get([1, 2], wrong) is stored
    assert cache.get([1, 2], combined_hash=wrong) is stored
    assert cache.get([3, 4], cache.combine_hashes([1, 2])) is None
    assert cache.get([], cache.combine_hashes([1, 2])) is None


def test_the_signature_of_set_in_the_interface():
    """`set` | `(mm_hash: int, embedding, mm_embedding_allocator=None) -> bool`."""
    assert names(MultimodalCache.set) == ["self", "mm_hash", "embedding", "mm_embedding_allocator"]
    assert parameters(MultimodalCache.set)[3].default is None


@pytest.mark.parametrize("cache_class", CONCRETE)
def test_the_signature_of_set_in_the_static_cache(cache_class):
    """The third argument exists for the engine's allocator (`loc` in the static cache)."""
    assert names(cache_class.set)[:4] == ["self", "mm_hash", "embedding", "loc"]
    assert parameters(cache_class.set)[3].default is None


def test_the_allocator_is_not_needed(make):
    """And is not needed here."""
    cache = make(8 * KIB)
    allocator = object()
    assert cache.set(1, entry()) is True
    assert cache.set(2, entry(), None) is True
    assert cache.set(3, entry(), allocator) is True
    assert cache.set(4, entry(), loc=allocator) is True
    assert cache.set(5, entry(), mm_embedding_allocator=allocator) is True
    assert len(cache) == 5


@pytest.mark.parametrize("cache_class", CLASSES)
def test_the_signature_of_has(cache_class):
    """`has` | `(mm_hash: int) -> bool`."""
    assert names(cache_class.has) == ["self", "mm_hash"]


def test_has_does_not_change_recency(make):
    """Does not change recency."""
    cache = make(8 * KIB)
    for mm_hash in (1, 2, 3):
        cache.set(mm_hash, entry())
    assert cache.has(1) is True
    assert cache.has(99) is False
    assert order(cache) == [1, 2, 3]


@pytest.mark.parametrize("cache_class", CLASSES)
def test_the_signature_of_free(cache_class):
    """`free` | `(mm_hash: int, mm_embedding_allocator=None) -> bool`."""
    assert names(cache_class.free) == ["self", "mm_hash", "mm_embedding_allocator"]
    assert parameters(cache_class.free)[2].default is None


def test_free_says_whether_the_hash_was_known(make):
    """False when unknown."""
    cache = make(8 * KIB)
    cache.set(1, entry())
    assert cache.free(2) is False
    assert cache.free(1) is True
    assert cache.free(1, None) is False


@pytest.mark.parametrize("cache_class", CLASSES)
def test_clear_needs_no_argument(cache_class):
    """`clear` | `()`."""
    assert all(
        parameter.default is not inspect.Parameter.empty
        for parameter in parameters(cache_class.clear)[1:]
    )


@pytest.mark.parametrize("cache_class", CLASSES)
def test_the_signature_of_available_size(cache_class):
    """`available_size` | `()`."""
    assert names(cache_class.available_size) == ["self"]


def test_available_size_is_the_number_of_entries(make):
    """Number of entries."""
    cache = make(8 * KIB)
    assert cache.available_size() == 0
    cache.set(1, entry())
    cache.set(2, entry())
    assert cache.available_size() == 2
    cache.free(1)
    assert cache.available_size() == 1


# The result


def test_a_result_is_a_keyword_only_dataclass():
    """Keyword-only dataclass with `embedding: torch.Tensor`."""
    assert dataclasses.is_dataclass(EmbeddingResult)
    (field,) = dataclasses.fields(EmbeddingResult)
    assert field.name == "embedding"
    assert inspect.get_annotations(EmbeddingResult, eval_str=True) == {"embedding": torch.Tensor}
    assert field.kw_only
    with pytest.raises(TypeError):
        EmbeddingResult(torch.zeros(1))
    tensor = torch.zeros(1)
    assert EmbeddingResult(embedding=tensor).embedding is tensor


def test_engines_subclass_the_result_with_further_fields(make):
    """Engines subclass it with further fields."""

    @dataclasses.dataclass(kw_only=True)
    class WithFrames(EmbeddingResult):
        num_tokens_per_frame: list[int]

    cache = make(8 * KIB)
    stored = WithFrames(embedding=torch.zeros(6, 4), num_tokens_per_frame=[2, 4])
    assert cache.set(1, stored)
    assert cache.get_single(1) is stored


# The hot tier


def test_the_static_cache_takes_one_size():
    """`MultiModalStaticCache(max_size)`."""
    assert names(MultiModalStaticCache) == ["max_size"]
    assert MultiModalStaticCache(5).max_size == 5
    assert MultiModalStaticCache(max_size=5).max_size == 5


@pytest.mark.parametrize("cache_class", CONCRETE)
def test_one_positional_size_is_enough_for_every_cache(cache_class):
    """`MultiModalStaticCache(max_size)`."""
    assert isinstance(cache_class(100), MultimodalCache)
    assert isinstance(cache_class(100), MultiModalStaticCache)


def test_sizes_are_bytes(make):
    """`max_size` and `current_size` in bytes."""
    cache = make(8 * KIB)
    assert (cache.max_size, cache.current_size) == (8 * KIB, 0)
    cache.set(1, EmbeddingResult(embedding=torch.zeros(10, 3, dtype=torch.float64)))
    assert cache.current_size == 240


def test_entries_are_in_an_ordered_dictionary_oldest_first(make):
    """`mm_cache: OrderedDict[int, EmbeddingResult]`, oldest first."""
    cache = make(8 * KIB)
    assert isinstance(cache.mm_cache, OrderedDict)
    stored = {mm_hash: entry(fill=mm_hash) for mm_hash in (5, 3, 4)}
    for mm_hash, result in stored.items():
        cache.set(mm_hash, result)
    assert order(cache) == [5, 3, 4]
    assert all(cache.mm_cache[mm_hash] is result for mm_hash, result in stored.items())


@pytest.mark.parametrize("cache_class", CONCRETE)
def test_the_signature_of_get_single(cache_class):
    """`get_single(mm_hash)`."""
    assert names(cache_class.get_single) == ["self", "mm_hash"]


def test_a_hit_moves_the_entry_to_the_end(make):
    """A hit moves the entry to the end (most recently used)."""
    cache = make(8 * KIB)
    combined = cache.combine_hashes([1])
    for mm_hash in (combined, 2, 3):
        cache.set(mm_hash, entry())
    cache.get_single(2)
    assert order(cache) == [combined, 3, 2]
    cache.get([1])
    assert order(cache) == [3, 2, combined]


def test_a_hit_returns_the_stored_result(make):
    """And returns the stored `EmbeddingResult`."""
    cache = make(8 * KIB)
    single, combination = entry(), entry()
    cache.set(1, single)
    cache.set(cache.combine_hashes([1, 2]), combination)
    assert cache.get_single(1) is single
    assert cache.get([1, 2]) is combination


def test_a_miss_is_none(make):
    """A miss is None."""
    cache = make(8 * KIB)
    cache.set(1, entry())
    assert cache.get_single(2) is None
    assert cache.get([1]) is None
    assert order(cache) == [1]


@pytest.mark.parametrize("wrong", [None, torch.zeros(2), {"embedding": torch.zeros(2)}, object()])
def test_set_asserts_that_it_got_a_result(make, wrong):
    """`set`: asserts that it got an `EmbeddingResult`."""
    cache = make(8 * KIB)
    cache.set(1, entry())
    for mm_hash in (1, 2):
        with pytest.raises(AssertionError):
            cache.set(mm_hash, wrong)
    assert order(cache) == [1]


def test_a_known_hash_is_only_moved_to_the_end(make):
    """A known hash is only moved to the end, True; the stored value stays."""
    cache = make(8 * KIB)
    first = entry(fill=1)
    cache.set(1, first)
    cache.set(2, entry())
    assert cache.set(1, entry(2 * KIB, fill=9)) is True
    assert order(cache) == [2, 1]
    assert cache.current_size == 2 * KIB
    assert cache.get_single(1) is first


def test_entries_are_taken_from_the_front_until_the_new_one_fits(make):
    """Otherwise entries are taken from the front (`popitem(last=False)`) until the new one fits.

    Then it is added, True.
    """
    cache = make(4 * KIB)
    for mm_hash in (1, 2, 3, 4):
        cache.set(mm_hash, entry())
    assert cache.set(5, entry(2 * KIB)) is True
    assert order(cache) == [3, 4, 5]
    assert cache.set(6, entry(4 * KIB)) is True
    assert order(cache) == [6]
    assert cache.current_size == 4 * KIB


def test_nothing_more_is_evicted_than_is_needed(make):
    """Entries are taken from the front until the new one fits."""
    cache = make(4 * KIB)
    for mm_hash in (1, 2, 3):
        cache.set(mm_hash, entry())
    cache.set(4, entry())
    assert order(cache) == [1, 2, 3, 4]
    cache.set(5, entry(1))
    assert order(cache) == [2, 3, 4, 5]


def test_what_was_evicted_is_gone(make_hot_only):
    """Otherwise entries are taken from the front (`popitem(last=False)`)."""
    cache = make_hot_only(2 * KIB)
    for mm_hash in (1, 2, 3):
        cache.set(mm_hash, entry())
    assert cache.get_single(1) is None
    assert cache.has(1) is False
    assert cache.free(1) is False


def test_an_entry_larger_than_the_cache_is_refused_before_anything_is_evicted(make):
    """An entry larger than `max_size` is refused, False (newer: before anything is evicted)."""
    cache = make(2 * KIB)
    cache.set(1, entry())
    cache.set(2, entry())
    assert cache.set(3, entry(2 * KIB + 1)) is False
    assert order(cache) == [1, 2]
    assert cache.current_size == 2 * KIB
    assert cache.get_single(3) is None
    assert cache.set(4, entry(2 * KIB)) is True


def test_a_cache_of_no_size_refuses_everything(make):
    """An entry larger than `max_size` is refused, False."""
    cache = make(0)
    assert cache.set(1, entry(1)) is False
    assert cache.get_single(1) is None
    assert len(cache) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_a_tensor_takes_its_elements(make, dtype):
    """Bytes of a tensor: `element_size() * numel()`."""
    cache = make(8 * KIB)
    tensor = torch.zeros(3, 5, dtype=dtype)
    cache.set(1, EmbeddingResult(embedding=tensor))
    assert cache.current_size == tensor.element_size() * tensor.numel()


def test_newer_sizes_are_what_the_storage_holds(make):
    """Newer: what its storage holds."""
    cache = make(8 * KIB)
    expanded = torch.zeros(1, 4).expand(100, 4)
    cache.set(1, EmbeddingResult(embedding=expanded))
    assert cache.current_size == 16


def test_a_view_of_a_larger_storage_is_cloned(make):
    """A view whose storage is larger is cloned on admission, so that both agree."""
    cache = make(8 * KIB)
    batch = torch.arange(1000, dtype=torch.float32)
    view = EmbeddingResult(embedding=batch[100:110])
    cache.set(1, view)
    held = cache.get_single(1)
    assert torch.equal(held.embedding, batch[100:110])
    assert held.embedding.untyped_storage().nbytes() == 40 == cache.current_size
    assert held.embedding.data_ptr() != view.embedding.data_ptr()
    assert view.embedding.untyped_storage().nbytes() == 4000  # the caller's result stays as it was


def test_free_gives_the_bytes_back(make):
    """`free` and `clear` give the bytes back."""
    cache = make(8 * KIB)
    cache.set(1, entry(KIB))
    cache.set(2, entry(2 * KIB))
    cache.free(1)
    assert cache.current_size == 2 * KIB
    assert order(cache) == [2]
    cache.free(2)
    assert cache.current_size == 0


def test_clear_gives_the_bytes_back(make):
    """`free` and `clear` give the bytes back."""
    cache = make(2 * KIB)
    for mm_hash in (1, 2, 3):
        cache.set(mm_hash, entry())
    cache.clear()
    assert (cache.current_size, len(cache), order(cache)) == (0, 0, [])
    assert [cache.get_single(mm_hash) for mm_hash in (1, 2, 3)] == [None, None, None]
    assert cache.set(1, entry(2 * KIB)) is True


def test_the_length_is_the_number_of_entries(make):
    """`len()` is the number of entries."""
    cache = make(2 * KIB)
    lengths = []
    for mm_hash in (1, 2, 3):
        cache.set(mm_hash, entry())
        lengths.append(len(cache))
    assert lengths == [1, 2, 2]


def test_eviction_is_lru_and_nothing_else(make):
    """Eviction is LRU and nothing else: neither size nor number of uses counts."""
    cache = make(4 * KIB)
    cache.set(1, entry(2 * KIB))
    cache.set(2, entry(KIB))
    cache.set(3, entry(KIB))
    for _ in range(5):
        cache.get_single(2)
    cache.get_single(1)
    cache.set(4, entry(KIB))
    assert order(cache) == [2, 1, 4]
    cache.set(5, entry(KIB))
    assert order(cache) == [1, 4, 5]


class _Unwalkable(OrderedDict):
    """A dictionary that fails whoever walks over it."""

    def __iter__(self):
        raise AssertionError("walked over all entries")

    keys = values = items = __iter__


def test_no_operation_walks_over_the_entries(make):
    """All of it is O(1)."""
    cache = make(4 * KIB)
    cache.mm_cache = _Unwalkable()
    for mm_hash in range(1, 7):
        assert cache.set(mm_hash, entry())
    cache.set(6, entry())
    assert cache.get_single(6) is not None
    assert cache.get([6]) is None
    assert cache.has(6)
    assert cache.free(6)
    assert not cache.set(7, entry(5 * KIB))
    assert len(cache) == cache.available_size() == 3
    cache.mm_cache = OrderedDict(dict.items(cache.mm_cache))  # for the audit after the test
