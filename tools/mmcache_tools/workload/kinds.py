"""The kinds of workload: which image each request shows.

Owns: identity and repetition. Does not own: sizes, arrivals of a service, the CSV.

No public trace has identities of images and arrival times together, so ``service`` joins two: sizes
and arrivals of ServeGen, and the order of keys of an object trace with a popularity of its own.
"""

from __future__ import annotations

import itertools
import json
import lzma
import math
import random
from collections.abc import Iterator
from pathlib import Path

from mmcache_tools.workload import servegen
from mmcache_tools.workload.requests import Request, TraceError
from mmcache_tools.workload.sizes import BYTES_A_TOKEN, USUAL_TOKENS, draw, encoder_seconds

_BLOCKS_AN_IMAGE = 16
_XZ = b"\xfd7zXZ\x00"


def service(
    description: Path, popularity: Path, *, start_s: float = 0.0, seed: int = 0
) -> Iterator[Request]:
    """ServeGen's arrivals and sizes; each image is the next key of the popularity trace.

    Args:
        description: ServeGen's folder of ``chunk-*`` files.
        popularity: Lines of sequence, key, bytes, plain or xz; the bytes are not used.
        start_s: From which second of the described day on.
        seed: Which of the possible traces.
    """
    keys = _popularity_keys(popularity)
    tokens_of: dict[int, int] = {}
    for arrival in servegen.arrivals(description, start_s=start_s, seed=seed):
        for tokens in arrival.image_tokens:
            key = next(keys, None)
            if key is None:
                return
            yield _request(arrival.time_s, key, tokens_of.setdefault(key, tokens))


def conversation(turns: Path, *, seed: int = 0) -> Iterator[Request]:
    """Turns of conversations that show their images again at each turn, as chat clients do.

    A Mooncake trace names the blocks of 512 tokens that each prompt consists of. The second block
    and each sixteenth after it stand for an image; the first is what all prompts share.
    """
    for number, line in _lines(turns):
        try:
            turn = json.loads(line)
            time_s = float(turn["timestamp"]) / 1000
            keys = [int(key) for key in list(turn["hash_ids"])[1::_BLOCKS_AN_IMAGE]]
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError(f"{turns}, line {number}: {error}") from None
        if not math.isfinite(time_s):
            raise TraceError(f"{turns}, line {number}: the timestamp is {time_s}")
        for key in keys:
            yield _request(time_s, key, _tokens_of(key, seed))


def zipf(*, keys: int, alpha: float, rate: float = 10.0, seed: int = 0) -> Iterator[Request]:
    """The key of rank r is asked for in proportion to r to the power of -``alpha``; no end."""
    chance = random.Random(f"zipf {seed}")
    weights = list(itertools.accumulate((rank + 1) ** -alpha for rank in range(keys)))
    names = [chance.getrandbits(63) for _ in range(keys)]
    for time_s in _poisson(rate, chance):
        key = chance.choices(names, cum_weights=weights)[0]
        yield _request(time_s, key, _tokens_of(key, seed))


def unique(*, repeated: float = 0.02, rate: float = 10.0, seed: int = 0) -> Iterator[Request]:
    """New images but for the share ``repeated``, which shows one of the last thousand; no end."""
    chance = random.Random(f"unique {seed}")
    recent: list[int] = []
    for time_s in _poisson(rate, chance):
        again = bool(recent) and chance.random() < repeated
        key = chance.choice(recent) if again else chance.getrandbits(63)
        if not again:
            recent = [*recent[-999:], key]
        yield _request(time_s, key, _tokens_of(key, seed))


def _request(time_s: float, key: int, tokens: int) -> Request:
    return Request(
        time_s=time_s,
        key=key,
        size_bytes=tokens * BYTES_A_TOKEN,
        tokens=tokens,
        cost_s=encoder_seconds(tokens),
    )


def _tokens_of(key: int, seed: int) -> int:
    return draw(USUAL_TOKENS, random.Random(f"{seed} {key}"))


def _poisson(rate: float, chance: random.Random) -> Iterator[float]:
    time_s = 0.0
    while True:
        time_s += chance.expovariate(rate)
        yield time_s


def _popularity_keys(path: Path) -> Iterator[int]:
    for number, line in _lines(path):
        try:
            yield int(line.split()[1])
        except (ValueError, IndexError):
            raise TraceError(f"{path}, line {number}: no sequence, key and bytes") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file, plain or xz, with their numbers."""
    with path.open("rb") as file:
        packed = file.read(len(_XZ)) == _XZ
    number = 0
    try:
        with lzma.open(path, "rt") if packed else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, str(line)
    except (EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise TraceError(f"{path}, after line {number}: {error}") from None
