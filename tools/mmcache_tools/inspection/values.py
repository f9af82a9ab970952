"""What the values of an embedding look like: least, greatest, mean, NaN and infinite ones.

Owns: reading the bytes of each dtype that numpy knows, and of bfloat16, the float8 kinds and
complex32, which it lacks, a chunk at a time.
Does not own: whether those bytes are the right ones. Imports numpy, never torch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ValueSummary", "why_not_computed"]

_SAME_NAME = {
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}

# The kinds of float8: exponent bits, mantissa bits, bias. All but e5m2, which is the upper half of
# a float16, have no infinity; "uz" has one NaN in the place of minus zero (OCP OFP8; the "fnuz"
# kinds are those of arXiv 2206.02915).
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}
_BUILT_HERE = {*_FLOAT8, "float8_e8m0fnu", "bfloat16", "complex32"}


def why_not_computed(dtype: str) -> str | None:
    """Why values of this dtype are not summed up, or None when they are."""
    return None if dtype in _SAME_NAME | _BUILT_HERE else f"its values are not known as {dtype}"


@functools.cache
def _float8_values(dtype: str) -> npt.NDArray[np.float32]:
    """What each of the 256 bytes stands for."""
    if dtype == "float8_e8m0fnu":  # a power of two
        powers = np.ldexp(np.float32(1), np.arange(255) - 127)
        return np.append(powers, np.float32(np.nan))
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    codes = np.arange(128)
    exponents = codes >> mantissa_bits
    fractions = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    significands = np.where(exponents > 0, 1 + fractions, fractions)
    positive = np.ldexp(significands, np.maximum(exponents, 1) - bias)
    if dtype == "float8_e5m2":
        positive[exponents == (1 << exponent_bits) - 1] = np.nan
        positive[124] = np.inf
    elif dtype == "float8_e4m3fn":
        positive[127] = np.nan
    values = np.concatenate([positive, -positive]).astype(np.float32)
    if dtype.endswith("uz"):
        values[128] = np.nan
    return values


class ValueSummary:
    """Sums up values as chunks arrive.

    Args:
        dtype: A dtype that :func:`why_not_computed` has nothing against.

    Attributes:
        count: All values.
        nan: Those that are not a number.
        inf: Those that are infinite.
        least: Of the finite values; None for complex ones, or when there are none.
        greatest: As ``least``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._sum: Any = 0
        self.count = 0
        self.nan = 0
        self.inf = 0
        self.least: float | int | None = None
        self.greatest: float | int | None = None

    @property
    def mean(self) -> float | complex | None:
        """Of the finite values, or None when there are none."""
        finite = self.count - self.nan - self.inf
        return self._sum / finite if finite else None

    def add(self, data: memoryview) -> None:
        """Take a chunk, which holds whole elements."""
        values = self._values(data)
        self.count += values.size
        if values.dtype.kind in "fc":
            nan = np.isnan(values)
            inf = np.isinf(values) & ~nan
            self.nan += int(nan.sum())
            self.inf += int(inf.sum())
            values = values[~(nan | inf)]
        if values.size:
            self._add_finite(values)

    def _add_finite(self, values: npt.NDArray[Any]) -> None:
        if values.dtype.kind == "c":
            self._sum += complex(values.sum(dtype=np.complex128))
            return
        self._sum += float(values.sum(dtype=np.float64))
        least, greatest = values.min().item(), values.max().item()
        self.least = least if self.least is None else min(self.least, least)
        self.greatest = greatest if self.greatest is None else max(self.greatest, greatest)

    def _values(self, data: memoryview) -> npt.NDArray[Any]:
        if self._dtype == "bfloat16":  # the upper half of a float32
            halves = np.frombuffer(data, dtype="<u2").astype("<u4")
            values: npt.NDArray[Any] = (halves << np.uint32(16)).view("<f4")
            return values
        if self._dtype.startswith("float8"):
            return _float8_values(self._dtype)[np.frombuffer(data, dtype=np.uint8)]
        if self._dtype == "complex32":
            halves = np.frombuffer(data, dtype="<f2").astype("<f4")
            return halves.view("<c8")
        if self._dtype == "bool":
            return np.frombuffer(data, dtype=np.uint8).astype(np.bool_)
        return np.frombuffer(data, dtype=np.dtype(self._dtype).newbyteorder("<"))
