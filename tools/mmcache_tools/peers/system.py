"""What every system is called by, and what each has to say of itself.

Owns: the interface, the budgets, and the embeddings that are stored.
Does not own: any system (:mod:`.systems`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

BYTES_A_ROW = 7168  # 3,584 values of bf16: a token of Qwen2.5-VL-7B
_Own = TypeVar("_Own", bound="System")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a system may take, in bytes; 0 is nothing.

    Attributes:
        folder: Where its files go; it survives a restart.
        hot_bytes: Device memory.
        host_bytes: Host memory.
        disk_bytes: Disk.
    """

    folder: Path
    hot_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


class System(ABC):
    """A cache of embeddings, as its users would call it.

    Attributes:
        name: How tables call it.
        tiers: Which of ``device``, ``host`` and ``disk`` it has.
        cannot: What it cannot do, and why: ``restart``, ``bound``, ``digest`` and others.
        look_up: Its own look-up of a key, with nothing of the adapter around it.
    """

    name: ClassVar[str]
    tiers: ClassVar[frozenset[str]]
    cannot: ClassVar[Mapping[str, str]] = {}
    look_up: Callable[[int], object]

    def __init__(self, budgets: Budgets) -> None:
        self.budgets = budgets

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """The release that is measured."""

    @abstractmethod
    def get(self, key: int) -> torch.Tensor | None:
        """The embedding on the device, as a tensor that the caller may keep; None is a miss."""

    @abstractmethod
    def set(self, key: int, embedding: torch.Tensor) -> bool:
        """Store it; False when it was refused."""

    def settle(self, limit_s: float = 60.0) -> None:  # noqa: B027 - most have nothing on its way
        """Wait until nothing is on its way any more, at most so long."""

    @abstractmethod
    def close(self) -> None:
        """End it as a server does that stops."""

    def restart(self: _Own) -> _Own:
        """Close it and open it anew on the same files."""
        self.close()
        return type(self)(self.budgets)


class InFront:
    """The device cache of the engine that a system without one is made for: a plain LRU."""

    def __init__(self, system: System) -> None:
        self._below = system
        self._most_bytes = system.budgets.hot_bytes
        self._held: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._held_bytes = 0

    def get(self, key: int) -> torch.Tensor | None:
        """From the device, else from the system, which brings it there."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            return found
        found = self._below.get(key)
        if found is not None:
            self._admit(key, found)
        return found

    def set(self, key: int, embedding: torch.Tensor) -> bool:
        """On the device and in the system, as engines hand on what their encoder made."""
        self._admit(key, embedding)
        return self._below.set(key, embedding)

    def _admit(self, key: int, embedding: torch.Tensor) -> None:
        if embedding.nbytes > self._most_bytes or key in self._held:
            return
        while self._held_bytes + embedding.nbytes > self._most_bytes:
            self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        self._held[key] = embedding
        self._held_bytes += embedding.nbytes


def rows_of(size_bytes: int) -> int:
    """How many rows an embedding of about that size has."""
    return max(1, size_bytes // BYTES_A_ROW)


def embedding(key: int, rows: int) -> torch.Tensor:
    """The embedding of a key, which its bits tell."""
    values = _noise(rows).clone()
    values[0, :4] = _stamp(key)
    values[-1, -4:] = _stamp(key)
    return values.view(torch.bfloat16)


def is_of(key: int, found: torch.Tensor) -> bool:
    """Whether it begins and ends as the embedding of this key does."""
    values, stamp = found.view(torch.int16), _stamp(key)
    return torch.equal(values[0, :4], stamp) and torch.equal(values[-1, -4:], stamp)


def is_whole(key: int, found: torch.Tensor) -> bool:
    """Whether each bit is that of the key's embedding."""
    wanted = embedding(key, found.shape[0] if found.dim() == 2 else 1)
    return found.shape == wanted.shape and torch.equal(
        found.view(torch.int16), wanted.view(torch.int16)
    )


_NOISE: list[torch.Tensor] = []


def _noise(rows: int) -> torch.Tensor:
    """The first rows of one large random tensor, which is made once, and larger when need be."""
    if not _NOISE or len(_NOISE[0]) < rows:
        generator = torch.Generator().manual_seed(0)
        shape = (max(rows, 1024), BYTES_A_ROW // 2)
        _NOISE[:] = [torch.randint(0, 2**15, shape, dtype=torch.int16, generator=generator)]
    return _NOISE[0][:rows]


def _stamp(key: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(key.to_bytes(8, "little")), dtype=torch.int16)
