"""Copies between tensors and the arena: every dtype and layout, bit for bit.

Owns: the copy engines of CPU tensors, headers and dtypes. Does not own: streams (tests/gpu).
"""

import contextlib
import itertools
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_mmcache.host import transfer
from tiered_mmcache.host.transfer import (
    FINISHED,
    DeviceCopyEngine,
    HostCopyEngine,
    StreamCopyEngine,
    dtype_of,
    header_of,
    is_storable,
    payload_bytes_of,
)

# torch warns once in each process that it makes a tensor of this dtype.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

EVERY_DTYPE = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTIZED = [dtype for dtype in EVERY_DTYPE if str(dtype).startswith(("torch.qint", "torch.quint"))]
DTYPES = [dtype for dtype in EVERY_DTYPE if dtype not in QUANTIZED]
ENGINES = [HostCopyEngine(), DeviceCopyEngine()]


def header(tensor):
    return header_of(tensor, class_tag="tag", extras=b"", cost_s=0.5)


def random_bytes(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def random_tensor(dtype, shape):
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return (random_bytes(count) > 127).reshape(shape)
    flat = random_bytes(max(count, 1) * dtype.itemsize).view(dtype)
    return flat[:count].reshape(shape)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


def pieces(total, cuts):
    """Uninitialised arena parts of ``total`` bytes, cut at these places."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < total}), total]
    return [torch.full((end - start,), 0xAA, dtype=torch.uint8) for start, end in
            itertools.pairwise(edges)]  # fmt: skip


def through(tensor, engine=ENGINES[1], cuts=(1000,)):
    """The tensor after a copy to the arena and back."""
    about = header(tensor)
    parts = pieces(about.payload_bytes, cuts)
    assert engine.demote(tensor, iter(parts)).done()
    target = torch.empty(about.shape, dtype=dtype_of(about))
    transfer = engine.promote(iter(parts), payload_bytes_of(target), FINISHED)
    transfer.wait()
    assert transfer.done()
    return target


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 33), (2, 3, 4, 5)], ids=str)
def test_every_dtype_and_shape(engine, dtype, shape):
    tensor = random_tensor(dtype, shape)
    assert is_storable(tensor)
    back = through(tensor, engine)
    assert back.dtype is dtype
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int16])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[3:, 4:],
        lambda t: t[2],
        lambda t: t[:, 5],
        lambda t: t[1, 1],
        lambda t: t[:1].expand(9, -1),
        lambda t: t[:, :1].expand(-1, 4).unsqueeze(1),
        lambda t: t.as_strided((3, 3), (1, 2), 5),
        lambda t: t[4:4],
        lambda t: t.reshape(1, 10, 12).transpose(0, 2),
    ],
    ids=range(11),
)
def test_every_kind_of_view(dtype, view):
    tensor = view(random_tensor(dtype, (10, 12)))
    assert bits(through(tensor)) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_conjugated_views(dtype, shape):
    tensor = torch.ones(shape, dtype=torch.complex64).mul(1 + 2j).to(dtype).conj()
    assert tensor.is_conj()
    back = through(tensor)
    assert not back.is_conj()
    assert bits(back) == bits(tensor.resolve_conj())
    if back.numel():
        assert torch.view_as_real(back.to(torch.complex64)).reshape(-1, 2)[0].tolist() == [1, -2]


def test_negated_views():
    tensor = torch.arange(12, dtype=torch.float32).view(torch.complex64).conj().imag
    assert tensor.is_neg()
    back = through(tensor)
    assert not back.is_neg()
    assert back.tolist() == [-1, -3, -5, -7, -9, -11]


def test_bits_of_nan_and_zero_survive():
    tensor = torch.tensor([0x7F800001, -0x80000000, 0x7FC00123, 1], dtype=torch.int32)
    back = through(tensor.view(torch.float32))
    assert torch.equal(back.view(torch.int32), tensor)


def test_what_requires_a_gradient_is_copied_without_its_graph():
    tensor = torch.ones(6, requires_grad=True) * 3
    back = through(tensor)
    assert back.tolist() == [3] * 6
    assert not back.requires_grad


def test_a_parameter_is_copied_as_a_tensor():
    parameter = torch.nn.Parameter(torch.arange(6.0))
    assert is_storable(parameter)
    back = through(parameter)
    assert type(back) is torch.Tensor
    assert back.tolist() == parameter.tolist()


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("demoted_in", [True, False])
@pytest.mark.parametrize("promoted_in", [True, False])
def test_in_and_out_of_inference_mode(made_in, demoted_in, promoted_in):
    engine = HostCopyEngine()
    with torch.inference_mode(made_in):
        tensor = torch.arange(10.0)[1:]
    parts = pieces(36, [10])
    with torch.inference_mode(demoted_in):
        engine.demote(tensor, parts)
    for target_in in (True, False):
        with torch.inference_mode(target_in):
            target = torch.empty(9)
        with torch.inference_mode(promoted_in):
            engine.promote(parts, payload_bytes_of(target), None)
        assert target.is_inference() == target_in
        assert torch.equal(target, torch.arange(10.0)[1:])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64, torch.complex128]),
    st.lists(st.integers(0, 600), max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_cut_of_the_arena_and_any_order_of_dimensions(shape, dtype, cuts, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = random_tensor(dtype, shape).permute(order)
    assert bits(through(tensor, cuts=cuts)) == bits(tensor)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
@pytest.mark.parametrize("excess", [-1, 0, 1, transfer._BLOCK_BYTES, 3 * 10**6 + 7])
@pytest.mark.parametrize("cut", [0, 1, 1_000_003])
def test_what_is_copied_in_blocks_arrives_whole(engine, excess, cut):
    total = transfer._MOST_BYTES_BY_TORCH + excess
    source, parts = random_bytes(total), pieces(total, [cut])
    engine.demote(source, parts)
    assert torch.equal(torch.cat(parts), source)
    target = torch.zeros(total + 2, dtype=torch.uint8)
    engine.promote(parts, target[1:-1], None)
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


def test_a_busy_thread_does_not_hold_a_copy_up_at_each_block():
    interval_s, blocks = 0.02, 40
    source = random_bytes(blocks * transfer._BLOCK_BYTES)
    target = [torch.zeros_like(source)]
    waits = []
    with busy_thread(interval_s):
        for _ in range(3):
            began_s = time.perf_counter()
            HostCopyEngine().demote(source, target)
            waits.append((time.perf_counter() - began_s) / interval_s)
    assert min(waits) < blocks / 4  # an interval for each, if each gave the lock up


@contextlib.contextmanager
def busy_thread(interval_s):
    """Another Python thread that never waits, with long turns."""
    ended = threading.Event()

    def spin():
        while not ended.is_set():
            pass

    before_s = sys.getswitchinterval()
    thread = threading.Thread(target=spin, daemon=True)
    sys.setswitchinterval(interval_s)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        sys.setswitchinterval(before_s)
        thread.join()


def test_a_contiguous_payload_is_a_view():
    tensor = torch.arange(10, dtype=torch.float32)[2:6]
    flat = payload_bytes_of(tensor)
    assert flat.dtype is torch.uint8
    assert flat.numel() == 16
    assert flat.data_ptr() == tensor.data_ptr()


def test_a_promotion_waits_for_the_demotion_before_it():
    class Unfinished:
        waited = False

        def done(self):
            return self.waited

        def wait(self):
            self.waited = True

    before = Unfinished()
    HostCopyEngine().promote(
        [torch.zeros(4, dtype=torch.uint8)], torch.empty(4, dtype=torch.uint8), before
    )
    assert before.waited


def test_the_engine_is_chosen_by_the_device():
    engine = DeviceCopyEngine()
    assert isinstance(engine._engine(torch.device("cpu")), HostCopyEngine)
    assert isinstance(engine._engine(torch.device("cuda", 0)), StreamCopyEngine)


# What can be stored


class _Named(torch.Tensor):
    """A tensor that means more than its bytes."""


def quantized():
    return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2).as_subclass(_Named),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.zeros(2, 2).to_sparse_csr(),
        lambda: torch.zeros(2, 2).to_mkldnn(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged),
        quantized,
        *(
            lambda dtype=dtype: torch.zeros(16, dtype=torch.uint8).view(dtype)
            for dtype in QUANTIZED
        ),
    ],
)
def test_what_is_more_than_plain_memory_is_not_stored(make):
    assert not is_storable(make())


# Headers


def test_a_header_says_everything_but_the_bytes():
    about = header(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert (about.dtype, about.item_bytes, about.shape) == ("bfloat16", 2, (3, 4))
    assert (about.class_tag, about.device_type, about.cost_s) == ("tag", "cpu", 0.5)
    assert about.payload_bytes == 24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtype_of_a_header(dtype):
    assert dtype_of(header(torch.zeros(16, dtype=torch.uint8).view(dtype))) is dtype


@pytest.mark.parametrize(
    ("name", "item_bytes"),
    [("nosuchtype", 1), ("Tensor", 8), ("nn", 1), ("__name__", 1), ("float32", 2), ("qint8", 1)],
)
def test_a_dtype_that_torch_does_not_know_as_such(name, item_bytes):
    about = header(torch.zeros(1))
    about = type(about)(
        class_tag="",
        dtype=name,
        item_bytes=item_bytes,
        shape=(),
        extras=b"",
        device_type="cpu",
    )
    assert dtype_of(about) is None
