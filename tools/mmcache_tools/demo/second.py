"""The second process: the same pictures, the same store, and no encoder.

Owns: replaying the distinct items of an earlier process and comparing digests. Run as
`python -m mmcache_tools.demo.second`: it reads a :class:`Handover` from standard input and
writes a :class:`SecondResult` to standard output, both as JSON.
Does not own: the encoder, which it never loads; a miss stays a miss.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmcache_tools.demo.images import DemoImage, load_images

__all__ = ["Handover", "HandoverItem", "SecondProcessError", "SecondResult", "replay", "start"]

_TIMEOUT_S = 240.0
_ENCODER_MODULES = ("efficientnet_lite_pytorch", "mmcache_tools.demo.encoder")


class SecondProcessError(RuntimeError):
    """The second process gave no result; the message says what it printed instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverItem:
    """An item, the hashes of its pictures, and the digest of what the encoder made of it."""

    pictures: tuple[str, ...]
    mm_hashes: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What the first process knows: the cache's configuration as plain values, and the items."""

    config: dict[str, Any]
    items: tuple[HandoverItem, ...]

    def to_json(self) -> str:
        """Plain JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handover:
        """The value that :meth:`to_json` wrote."""
        read = json.loads(text)
        items = (
            HandoverItem(
                pictures=tuple(each["pictures"]),
                mm_hashes=tuple(each["mm_hashes"]),
                digest=each["digest"],
            )
            for each in read["items"]
        )
        return cls(config=read["config"], items=tuple(items))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondResult:
    """What the second process saw.

    Attributes:
        items: Distinct items asked for.
        served: How many each tier answered; under ``encoder`` those that nothing could answer.
        bit_identical: Answers with exactly the bits that the first process's encoder made.
        other_hashes: Pictures whose content hash came out differently in this process.
        encoder_loaded: Whether the encoder's code was imported at all.
        serving_s: Time of all the look-ups.
    """

    items: int
    served: dict[str, int]
    bit_identical: int
    other_hashes: int
    encoder_loaded: bool
    serving_s: float


def start(handover: Handover) -> SecondResult:
    """Run the second process and wait for its result.

    Raises:
        SecondProcessError: It failed, or took too long.
    """
    command = [sys.executable, "-m", "mmcache_tools.demo.second"]
    try:
        done = subprocess.run(
            command,
            input=handover.to_json(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        told = str(error.stderr).strip()[-2000:]
        raise SecondProcessError(f"it ended with {error.returncode}:\n{told}") from error
    except subprocess.TimeoutExpired as error:
        raise SecondProcessError(f"it took longer than {_TIMEOUT_S:.0f} s") from error
    return SecondResult(**json.loads(done.stdout))


def replay(cache: Any, items: Sequence[HandoverItem]) -> SecondResult:
    """Ask a cache once for every item, by hashes computed anew from the pictures."""
    from mmcache_tools.demo.session import Served, digest, look_up

    images = load_images({name for item in items for name in item.pictures})
    served = {tier.value: 0 for tier in Served}
    identical, serving_s = 0, 0.0
    for item in items:
        started_s = time.perf_counter()
        tier, result = look_up(cache, [images[name].content_hash for name in item.pictures])
        serving_s += time.perf_counter() - started_s
        served[tier.value] += 1
        identical += result is not None and digest(result.embedding) == item.digest
    return SecondResult(
        items=len(items),
        served=served,
        bit_identical=identical,
        other_hashes=_other_hashes(images, items),
        encoder_loaded=any(name in sys.modules for name in _ENCODER_MODULES),
        serving_s=serving_s,
    )


def _other_hashes(images: Mapping[str, DemoImage], items: Sequence[HandoverItem]) -> int:
    handed_over = {
        name: mm_hash
        for item in items
        for name, mm_hash in zip(item.pictures, item.mm_hashes, strict=True)
    }
    return sum(images[name].content_hash != mm_hash for name, mm_hash in handed_over.items())


def main() -> None:
    """Read the handover, replay it, write the result."""
    from tiered_mmcache import CacheConfig, TieredMultimodalCache

    handover = Handover.from_json(sys.stdin.read())
    config = CacheConfig.from_mapping(handover.config)
    with TieredMultimodalCache(config=config) as cache:
        result = replay(cache, handover.items)
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
