"""Value statistics against numpy's own over the whole tensor."""

import math

import numpy as np
import pytest
import torch

from mmcache_tools.inspection import values
from mmcache_tools.inspection.values import ValueSummary, why_not_computed


def summed(dtype, data, parts=3):
    summary = ValueSummary(dtype)
    item_bytes = len(data) // parts // 16 * 16
    for at in range(0, len(data), item_bytes):
        summary.add(memoryview(data)[at : at + item_bytes])
    return summary


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    ],
)
def test_numbers(dtype):
    values = (np.random.default_rng(0).normal(size=999) * 50).astype("f8")
    values = np.abs(values).astype(dtype) if dtype.startswith("u") else values.astype(dtype)
    summary = summed(dtype, values.tobytes())
    assert summary.count == 999
    assert summary.least == values.min()
    assert summary.greatest == values.max()
    assert summary.mean == pytest.approx(values.mean(dtype="f8"))
    assert type(summary.least) is (float if dtype.startswith("float") else int)
    assert summary.nan == summary.inf == 0


def test_bfloat16_is_the_upper_half_of_float32():
    values = np.array([1.5, -2.25, 0.0, 3e38, math.inf, math.nan, -math.inf, 7.0], dtype="<f4")
    upper = (values.view("<u4") >> 16).astype("<u2")
    summary = summed("bfloat16", upper.tobytes(), parts=1)
    assert (summary.count, summary.nan, summary.inf) == (8, 1, 2)
    assert summary.least == -2.25
    assert summary.greatest == pytest.approx(3e38, rel=0.01)


def test_half_precision_does_not_overflow():
    assert summed("float16", np.full(4096, 60000, dtype="f2").tobytes()).mean == 60000


def test_truth_values():
    summary = summed("bool", bytes([0, 1, 1, 1] * 8), parts=1)
    assert (summary.least, summary.greatest, summary.mean) == (False, True, 0.75)


def test_complex_numbers_have_no_order():
    values = np.array([1 + 1j, 3 - 5j, complex(math.nan, 0)], dtype="complex128")
    summary = summed("complex128", values.tobytes(), parts=1)
    assert summary.mean == 2 - 2j
    assert (summary.least, summary.greatest, summary.nan) == (None, None, 1)


def test_nothing_finite():
    summary = summed("float32", np.full(16, math.nan, dtype="f4").tobytes(), parts=1)
    assert (summary.mean, summary.least, summary.nan) == (None, None, 16)


@pytest.mark.parametrize("dtype", ["quint8", "float4_e2m1fn_x2"])
def test_what_numpy_lacks(dtype):
    assert dtype in why_not_computed(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float16", "uint64"])
def test_what_it_has(dtype):
    assert why_not_computed(dtype) is None


@pytest.mark.parametrize(
    "name",
    [
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "complex32",
    ],
)
def test_what_numpy_lacks_is_read_as_torch_reads_it(name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    if name == "complex32":
        data = np.arange(1, 65, dtype="<f2").tobytes()
        wanted = np.frombuffer(data, "<f2").astype("<f4").view("<c8")
        assert summed(name, data, parts=1).mean == pytest.approx(wanted.mean())
        return
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(getattr(torch, name)).to(torch.float32).numpy()
    assert np.array_equal(values._float8_values(name), wanted, equal_nan=True)
    summary = summed(name, codes.numpy().tobytes(), parts=1)
    finite = wanted[np.isfinite(wanted)]
    assert (summary.least, summary.greatest) == (finite.min(), finite.max())
    assert summary.nan == np.isnan(wanted).sum()
    assert summary.inf == np.isinf(wanted).sum()
