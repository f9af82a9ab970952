"""Results taken apart and put together: exactly, or not at all.

Owns: describe and rebuild, the registry of classes, target devices. Does not own: copies.
"""

import dataclasses
from typing import ClassVar

import pytest
import torch

from tiered_mmcache import contract
from tiered_mmcache.contract import (
    EmbeddingResult,
    class_of_tag,
    register_result_class,
    tag_of,
    with_embedding,
)
from tiered_mmcache.entries.extras import encode_extras
from tiered_mmcache.entries.results import (
    CannotLeaveError,
    describe,
    detached,
    empty_target,
    rebuild,
    target_device,
)
from tiered_mmcache.errors import RecordError
from tiered_mmcache.host.recycled import RecycledBuffers

BUFFERS = RecycledBuffers(1 << 20)


@dataclasses.dataclass(kw_only=True)
class Frames(EmbeddingResult):
    num_tokens_per_frame: list[int]
    source: str | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Slotted(EmbeddingResult):
    grid: tuple[int, ...]


@dataclasses.dataclass(kw_only=True, eq=False)
class WriteProtected(EmbeddingResult):
    """A dataclass cannot be frozen below one that is not; engines write this instead."""

    scale: float

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError(f"{name} is read-only")
        super().__setattr__(name, value)


@dataclasses.dataclass(kw_only=True)
class Derived(EmbeddingResult):
    limit: ClassVar[int] = 3
    offset: dataclasses.InitVar[int] = 0
    rows: int = dataclasses.field(init=False)
    runs: ClassVar[list[int]] = []

    def __post_init__(self, offset):
        self.rows = self.embedding.shape[0] + offset
        self.runs.append(self.rows)


class Plain(EmbeddingResult):
    """A subclass that is no dataclass of its own."""


class HandSlotted(EmbeddingResult):
    """A subclass with an attribute that is neither a field nor in its dictionary."""

    __slots__ = ("note",)


@pytest.fixture
def register(monkeypatch):
    """Registers classes for one test."""
    monkeypatch.setattr(contract, "_CLASS_OF_TAG", dict(contract._CLASS_OF_TAG))
    monkeypatch.setattr(contract, "_TAG_OF_CLASS", dict(contract._TAG_OF_CLASS))
    return register_result_class


def tensor():
    return torch.arange(12, dtype=torch.float32).reshape(3, 4)


def through(result):
    header = describe(result)
    target = empty_target(header, torch.device("cpu"), BUFFERS)
    target.copy_(result.embedding)
    return rebuild(type(result), target, header.extras)


SAMPLES = [
    EmbeddingResult(embedding=tensor()),
    Frames(embedding=tensor(), num_tokens_per_frame=[1, 2]),
    Slotted(embedding=tensor(), grid=(1, (2, 3))),
    WriteProtected(embedding=tensor(), scale=0.1),
    Derived(embedding=tensor(), offset=5),
    Plain(embedding=tensor()),
    HandSlotted(embedding=tensor()),
]


@pytest.mark.parametrize("result", SAMPLES, ids=lambda result: type(result).__name__)
def test_a_result_comes_back_as_the_exact_class_with_its_fields(result):
    runs = len(Derived.runs)
    back = through(result)
    assert type(back) is type(result)
    assert torch.equal(back.embedding, result.embedding)
    for field in dataclasses.fields(result):
        if field.name != "embedding":
            assert getattr(back, field.name) == getattr(result, field.name)
            assert type(getattr(back, field.name)) is type(getattr(result, field.name))
    assert len(Derived.runs) == runs  # no initialiser ran


def test_a_header_carries_the_tag_of_a_registered_class(register):
    result = Frames(embedding=tensor(), num_tokens_per_frame=[])
    assert describe(result).class_tag == ""
    register("results.Frames", Frames)
    assert describe(result).class_tag == "results.Frames"
    assert describe(EmbeddingResult(embedding=tensor())).class_tag == "EmbeddingResult"


@pytest.mark.parametrize("value", [object(), torch.zeros(1), {1, 2}, [object()]])
def test_a_field_that_is_no_plain_value_keeps_the_result_in_memory(value):
    result = Frames(embedding=tensor(), num_tokens_per_frame=value)
    with pytest.raises(CannotLeaveError) as error:
        describe(result)
    assert error.value.reason == "extra_fields"


@pytest.mark.parametrize("kind", [EmbeddingResult, Plain, HandSlotted])
def test_an_attribute_that_is_no_field_keeps_the_result_in_memory(kind):
    result = kind(embedding=tensor())
    result.note = "it would be lost"
    with pytest.raises(CannotLeaveError) as error:
        describe(result)
    assert error.value.reason == "extra_fields"


def test_a_missing_field_keeps_the_result_in_memory():
    result = Frames(embedding=tensor(), num_tokens_per_frame=[])
    del result.num_tokens_per_frame
    with pytest.raises(CannotLeaveError) as error:
        describe(result)
    assert error.value.reason == "extra_fields"


def test_a_tensor_that_is_not_plain_keeps_the_result_in_memory():
    with pytest.raises(CannotLeaveError) as error:
        describe(EmbeddingResult(embedding=tensor().to_sparse()))
    assert error.value.reason == "tensor_kind"


@pytest.mark.parametrize(
    "fields", [{}, {"num_tokens_per_frame": []}, {"num_tokens_per_frame": [], "source": "", "x": 1}]
)
def test_fields_of_a_class_that_has_changed_are_a_record_error(fields):
    with pytest.raises(RecordError) as error:
        rebuild(Frames, tensor(), encode_extras(fields))
    assert error.value.cause == "changed_class"


def test_a_stored_embedding_field_is_a_record_error():
    with pytest.raises(RecordError):
        rebuild(EmbeddingResult, tensor(), encode_extras({"embedding": 1}))


def test_damaged_fields_are_a_record_error():
    with pytest.raises(RecordError) as error:
        rebuild(Frames, tensor(), b"\xc1")
    assert error.value.cause == "malformed"


def test_a_target_has_the_shape_and_dtype_of_the_entry():
    header = describe(EmbeddingResult(embedding=tensor().to(torch.bfloat16).t()))
    target = empty_target(header, torch.device("cpu"), BUFFERS)
    assert (target.shape, target.dtype) == ((4, 3), torch.bfloat16)
    assert target.is_contiguous()


def test_a_target_on_another_device_takes_no_buffer():
    header = describe(EmbeddingResult(embedding=tensor()))
    target = empty_target(header, torch.device("meta"), BUFFERS)
    assert target.device.type == "meta"
    assert target.shape == (3, 4)


def test_a_dtype_of_another_torch_is_a_record_error():
    header = dataclasses.replace(describe(SAMPLES[0]), dtype="float7_e3m3")
    with pytest.raises(RecordError) as error:
        empty_target(header, torch.device("cpu"), BUFFERS)
    assert error.value.cause == "unknown_dtype"


def test_a_shape_that_no_memory_holds_is_a_runtime_error():
    header = dataclasses.replace(describe(SAMPLES[0]), shape=(2**50, 2**10))
    with pytest.raises(RuntimeError):
        empty_target(header, torch.device("cpu"), BUFFERS)


def test_detaching():
    plain = SAMPLES[0]
    assert detached(plain) is plain
    graph = Frames(embedding=tensor().requires_grad_() * 2, num_tokens_per_frame=[3])
    alone = detached(graph)
    assert type(alone) is Frames
    assert alone.num_tokens_per_frame == [3]
    assert not alone.embedding.requires_grad
    assert alone.embedding.data_ptr() == graph.embedding.data_ptr()
    assert graph.embedding.requires_grad


def test_another_embedding_for_a_write_protected_result():
    other = with_embedding(SAMPLES[3], torch.zeros(1))
    assert type(other) is WriteProtected
    assert (other.scale, other.embedding.tolist()) == (0.1, [0])
    assert SAMPLES[3].embedding.shape == (3, 4)


# Devices


def header_from(device_type):
    return dataclasses.replace(describe(SAMPLES[0]), device_type=device_type)


def test_an_entry_goes_back_to_the_kind_of_device_it_came_from():
    assert target_device(header_from("cpu"), "auto") == torch.device("cpu")
    assert target_device(header_from("nosuchdevice"), "auto") is None


def test_a_configured_device_wins():
    assert target_device(header_from("cuda"), "cpu") == torch.device("cpu")
    assert target_device(header_from("cpu"), "cuda:3") == torch.device("cuda", 3)


# The registry


def test_registering_returns_the_class_and_is_repeatable(register):
    assert register("results.Frames", Frames) is Frames
    assert register("results.Frames", Frames) is Frames
    assert class_of_tag("results.Frames") is Frames
    assert tag_of(Frames) == "results.Frames"


def test_a_subclass_has_no_tag_of_its_own(register):
    register("results.Frames", Frames)

    class More(Frames):
        pass

    assert tag_of(More) is None
    assert class_of_tag("nosuchtag") is None


def test_a_tag_stands_for_one_class_and_a_class_has_one_tag(register):
    register("results.Frames", Frames)
    with pytest.raises(ValueError, match=r"results\.Frames"):
        register("results.Frames", Slotted)
    with pytest.raises(ValueError, match=r"results\.Frames"):
        register("results.Other", Frames)


@pytest.mark.parametrize("tag", ["", "x" * 256, "ü" * 128])
def test_a_tag_has_bounds(register, tag):
    with pytest.raises(ValueError, match="255 bytes"):
        register(tag, Frames)


@dataclasses.dataclass
class _NoEmbedding:
    other: int


@pytest.mark.parametrize("kind", [int, object, _NoEmbedding, SAMPLES[0]])
def test_only_dataclasses_with_an_embedding_are_registered(register, kind):
    with pytest.raises(TypeError):
        register("results.wrong", kind)
