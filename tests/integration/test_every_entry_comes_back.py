"""Entries of every kind, through hot tier, host memory and disk, bit for bit.

Owns: what comes back after eviction, after a restart and in another process: bytes, class, dtype,
shape, device and extra fields. The expected bytes are worked out in numpy, not by the package.
Does not own: budgets and failures.

Run as a script, this file opens a cache from a YAML file and prints what it finds there.
"""

import collections
import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tiered_mmcache import EmbeddingResult, Tier, TieredMultimodalCache, register_result_class
from tiered_mmcache.testing import audit, audit_idle

# torch warns once in each process that it makes a tensor of this dtype.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

COUNT = 1000
PAGE = 4096
KINDS = ("big", "tiny")
LARGEST = {"big": 24 * 1024, "tiny": 16}  # bytes of an entry, a few larger ones apart
QUANTIZED = ("torch.qint", "torch.quint")  # not plain memory
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(QUANTIZED)
    },
    key=str,
)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
GRADIENTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, *COMPLEX[1:])
EXTRAS = [
    None,
    [],
    [1, 2, 3],
    (1, (2, "three", b"four"), [5]),
    {"grid": (4, 6), "nested": {"deep": [None, True, 1.5, -0.0, {}]}, 7: "seven"},
    2**200 + 1,
    -(2**70),
    float("inf"),
    "text \N{SNOWMAN}",
    b"\x00\xff",
    False,
]


@dataclasses.dataclass(kw_only=True)
class Frames(EmbeddingResult):
    num_tokens_per_frame: list[int]
    more: object = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Slotted(EmbeddingResult):
    grid: tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Unregistered(EmbeddingResult):
    note: str = ""


register_result_class("test.every_entry.Frames", Frames)
register_result_class("test.every_entry.Slotted", Slotted)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What an entry must look like when it comes back, and where it came from."""

    result_class: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    extras: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Entry:
    key: object
    result: EmbeddingResult
    expected: Expected

    @property
    def may_leave_memory(self):
        return type(self.result) is not Unregistered


# Making entries


def shape_of_about(generator, item_count):
    """A random shape of at most that many elements; now and then a scalar or an empty one."""
    kind = generator.randrange(12)
    if kind == 0:
        return ()
    if kind == 1:
        return generator.choice([(0,), (3, 0, 2), (0, 5)])
    shape = []
    left = max(1, item_count)
    for _ in range(generator.randrange(1, 4)):
        dimension = generator.randint(1, left)
        shape.append(dimension)
        left //= dimension
    return (*shape[:-1], shape[-1] * max(1, left))


def random_raw(generator, dtype, shape):
    """The bytes of such a tensor: an array with one more dimension, that of an element's bytes."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.frombuffer(generator.randbytes(count), dtype=np.uint8).copy()
    if dtype is torch.bool:
        raw &= 1
    return raw.reshape(*shape, dtype.itemsize)


def tensor_of(raw, dtype):
    shape = raw.shape[:-1]
    if not raw.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw.reshape(-1).copy()).view(dtype).reshape(shape)


def can_be_copied(dtype):
    """Whether torch itself can copy such elements: not those of less than a byte."""
    try:
        torch.zeros(32, dtype=torch.uint8).view(dtype)[:1].clone()
    except NotImplementedError:
        return False
    return True


def contiguous(generator, dtype, raw):
    return tensor_of(raw, dtype), raw


def permuted(generator, dtype, raw):
    order = list(range(raw.ndim - 1))
    generator.shuffle(order)
    return tensor_of(raw, dtype).permute(order), raw.transpose(*order, raw.ndim - 1)


def every_second(generator, dtype, raw):
    if raw.ndim == 1:
        return tensor_of(raw, dtype), raw
    return tensor_of(raw, dtype)[::2], raw[::2]


def slice_of_larger(generator, dtype, raw):
    if raw.ndim == 1:
        return tensor_of(raw, dtype), raw
    before, after = random_raw(generator, dtype, (2, *raw.shape[1:-1])), raw
    whole = tensor_of(np.concatenate([before, after, before]), dtype)
    return whole[2:-2], raw


def requires_gradient(generator, dtype, raw):
    return tensor_of(raw, dtype).requires_grad_(), raw


def graph_output(generator, dtype, raw):
    return tensor_of(raw, dtype).requires_grad_().view(raw.shape[:-1]), raw


def conjugate(generator, dtype, raw):
    if dtype is torch.complex32:  # torch conjugates it in another precision: no signalling NaN
        raw[..., 1::2] &= 0xBF
    flipped = raw.copy()
    flipped[..., -1] ^= 0x80  # little endian: the sign of the imaginary part
    return tensor_of(raw, dtype).conj(), flipped


def negated(generator, dtype, raw):
    parts = raw.reshape(*raw.shape[:-1], 2, raw.shape[-1] // 2)[..., 1, :].copy()
    parts[..., -1] ^= 0x80
    return tensor_of(raw, dtype).conj().imag, parts


def layouts_of(dtype):
    layouts = [contiguous]
    if can_be_copied(dtype):
        layouts += [permuted, every_second, slice_of_larger]
    if dtype in GRADIENTS:
        layouts += [requires_gradient, graph_output]
    if dtype in COMPLEX:
        layouts += [conjugate]
    if dtype in COMPLEX[1:]:
        layouts += [negated]
    return layouts


def result_of(generator, embedding):
    kind = generator.randrange(20)
    if kind < 9:
        return EmbeddingResult(embedding=embedding)
    if kind < 16:
        frames = [generator.randrange(2**70) for _ in range(generator.randrange(5))]
        return Frames(
            embedding=embedding, num_tokens_per_frame=frames, more=generator.choice(EXTRAS)
        )
    if kind < 19:
        return Slotted(embedding=embedding, grid=tuple(range(generator.randrange(4))))
    return Unregistered(embedding=embedding, note=str(kind))


def extras_of(result):
    """Every other field, as text that tells types apart."""
    names = [field.name for field in dataclasses.fields(result) if field.name != "embedding"]
    return repr([(name, getattr(result, name)) for name in sorted(names)])


def key_of(generator, number):
    return generator.choice(
        [
            number,
            2**64 + number,
            -number - 3,
            f"image-{number}",
            f"audio-{number}".encode(),
            ("pair", number),
            TieredMultimodalCache.combine_hashes([number, number + 1]),
        ]
    )


def make_entry(generator, kind, number):
    dtype = DTYPES[number % len(DTYPES)]
    size = generator.randint(LARGEST[kind] // 2, LARGEST[kind])
    if kind == "big" and number % 100 == 7:
        size = generator.randint(300_000, 390_000)  # more than the hot tier, or a chunk on disk
    raw = random_raw(generator, dtype, shape_of_about(generator, size // dtype.itemsize))
    embedding, expected = generator.choice(layouts_of(dtype))(generator, dtype, raw)
    result = result_of(generator, embedding)
    return Entry(
        key=key_of(generator, number),
        result=result,
        expected=Expected(
            result_class=type(result).__name__,
            dtype=str(embedding.dtype),
            shape=tuple(expected.shape[:-1]),
            device="cpu",
            extras=extras_of(result),
            digest=hashlib.sha256(expected.tobytes()).hexdigest(),
        ),
    )


def make_entries(kind):
    generator = random.Random(f"entries {kind}")
    return [make_entry(generator, kind, number) for number in range(COUNT)]


def seen(result):
    """The same description of what a cache returned."""
    embedding = result.embedding.detach()
    if embedding.is_conj() or embedding.is_neg():
        embedding = embedding.resolve_conj().resolve_neg()
    plain = embedding.contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    raw = flat.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Expected(
        result_class=type(result).__name__,
        dtype=str(embedding.dtype),
        shape=tuple(embedding.shape),
        device=str(embedding.device),
        extras=extras_of(result),
        digest=hashlib.sha256(raw).hexdigest(),
    )


# The caches


def write_configuration(folder, kind):
    sections = {
        "namespace": f"every-entry/{kind}",
        "hot": {"max_size": 8 * LARGEST[kind], "oversize": "spill"},
        "host": {"max_size": 16 * max(LARGEST[kind], PAGE)},
        "disk": {
            "path": str(folder / "store"),
            "max_size": "256MiB",
            "write_buffer": "128MiB",
            "durability": "relaxed",
            "read_timeout": "60s",
        },
    }
    file = folder / "mmcache.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def check_against(entries, cache, tiers):
    """Look every entry up, the newest first, the others in a random order; count where."""
    found = collections.Counter()
    lost = []
    older, newest = entries[:-30], entries[-30:]
    for entry in [*reversed(newest), *random.Random(5).sample(older, len(older))]:
        tier = cache.locate(entry.key)
        found[tier] += 1
        result = cache.get_single(entry.key)
        audit(cache)
        if result is None:
            assert tier is None
            lost.append(entry)
            continue
        assert tier in tiers
        assert seen(result) == entry.expected, (entry.key, tier)
        if tier is not Tier.HOT:
            assert not result.embedding.requires_grad
    assert not any(entry.may_leave_memory for entry in lost)
    return found, lost


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def entries(kind):
    return make_entries(kind)


@pytest.fixture(scope="module")
def filled(kind, entries, tmp_path_factory):
    """The YAML file of a store that a closed cache has left behind."""
    file = write_configuration(tmp_path_factory.mktemp(f"every-entry-{kind}"), kind)
    with TieredMultimodalCache.from_yaml(file) as cache:
        for entry in entries:
            assert cache.set(entry.key, entry.result)
            audit(cache)
        assert cache.drain()
        audit_idle(cache)
    return file


def test_the_entries_are_of_every_kind(entries):
    embeddings = [entry.result.embedding for entry in entries]
    assert {embedding.dtype for embedding in embeddings} >= set(DTYPES)
    assert any(embedding.dim() == 0 for embedding in embeddings)
    assert any(embedding.numel() == 0 for embedding in embeddings)
    assert any(not embedding.is_contiguous() for embedding in embeddings)
    assert any(embedding.storage_offset() for embedding in embeddings)
    assert any(embedding.requires_grad for embedding in embeddings)
    assert any(embedding.is_conj() for embedding in embeddings)
    assert any(embedding.is_neg() for embedding in embeddings)
    assert len({entry.key for entry in entries}) == COUNT
    for entry in entries:
        assert seen(entry.result) == entry.expected, (entry.key, entry.expected)


def test_after_eviction_to_disk(kind, entries, tmp_path):
    file = write_configuration(tmp_path, kind)
    with TieredMultimodalCache.from_yaml(file) as cache:
        for entry in entries:
            assert cache.set(entry.key, entry.result)
            audit(cache)
        assert cache.drain()
        audit_idle(cache)
        found, lost = check_against(entries, cache, set(Tier))
        assert found[Tier.DISK] > 0.8 * COUNT
        assert cache.drain()
        audit_idle(cache)
        stats = cache.stats()
        assert stats.disk["hits"] == found[Tier.DISK]
        assert stats.host["hits"] == found[Tier.HOST] > 0
        assert stats.hot["hits"] >= found[Tier.HOT] > 0
        assert stats.misses == len(lost) > 0
        assert stats.memory_only["key_or_class"] >= len(lost)
        assert not stats.faults
        assert not stats.drops


def test_after_a_restart(entries, filled):
    with TieredMultimodalCache.from_yaml(filled) as cache:
        assert len(cache) == 0
        _, lost = check_against(entries, cache, set(Tier))
        assert {type(entry.result) for entry in lost} == {Unregistered}
        assert len(lost) == sum(not entry.may_leave_memory for entry in entries)
        assert cache.stats().disk["hits"] == COUNT - len(lost)
        assert cache.drain()
        audit_idle(cache)


def test_in_a_second_process(kind, entries, filled):
    done = subprocess.run(
        [sys.executable, __file__, str(filled), kind],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = json.loads(done.stdout)
    for number, entry in enumerate(entries):
        expected = dataclasses.asdict(entry.expected) if entry.may_leave_memory else None
        if expected is not None:
            expected["shape"] = list(expected["shape"])
        assert found[number] == expected, entry.key


# One by one


def test_an_unregistered_class_comes_back_from_host_memory_and_is_counted_at_the_end(tmp_path):
    folder = tmp_path / "store"
    sections = {
        "namespace": "every-entry",
        "hot": {"max_size": 64},
        "host": {"max_size": 2 * PAGE},
        "disk": {"path": str(folder), "max_size": "8MiB", "write_buffer": "1MiB"},
    }
    file = tmp_path / "mmcache.yaml"
    file.write_text(yaml.safe_dump(sections))
    with TieredMultimodalCache.from_yaml(file) as cache:
        cache.set(1, Unregistered(embedding=torch.arange(64, dtype=torch.uint8), note="kept"))
        for number in (2, 3):
            cache.set(number, EmbeddingResult(embedding=torch.zeros(64, dtype=torch.uint8)))
        assert cache.locate(1) is Tier.HOST
        result = cache.get_single(1)
        assert type(result) is Unregistered
        assert result.note == "kept"
        assert result.embedding.tolist() == list(range(64))
        assert not cache.stats().memory_only
        for number in (4, 5, 6, 7):
            cache.set(number, EmbeddingResult(embedding=torch.zeros(64, dtype=torch.uint8)))
        assert cache.get_single(1) is None
        assert cache.stats().memory_only == {"key_or_class": 1}
        assert cache.drain()
        audit_idle(cache)


def test_each_kind_of_extra_field(tmp_path):
    file = write_configuration(tmp_path, "tiny")
    with TieredMultimodalCache.from_yaml(file) as cache:
        for number, extra in enumerate(EXTRAS):
            frames = Frames(embedding=torch.ones(2), num_tokens_per_frame=[1], more=extra)
            assert cache.set(number, frames)
            audit(cache)
    with TieredMultimodalCache.from_yaml(file) as cache:
        for number, extra in enumerate(EXTRAS):
            assert cache.locate(number) is Tier.DISK
            result = cache.get_single(number)
            assert type(result.more) is type(extra)
            assert repr(result.more) == repr(extra)
        assert cache.drain()
        audit_idle(cache)


def main(file, kind):
    """Print what a cache on this store answers for every key."""
    answers = []
    with TieredMultimodalCache.from_yaml(Path(file)) as cache:
        for entry in make_entries(kind):
            result = cache.get_single(entry.key)
            answers.append(None if result is None else dataclasses.asdict(seen(result)))
        audit(cache)
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
