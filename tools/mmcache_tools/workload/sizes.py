"""How many tokens an image has, how many bytes they are, and what encoding them takes.

Owns: the recorded figures. Does not own: which image is asked for.

The figures are those of Qwen2.5-VL-7B in bf16: 3,584 values of 2 bytes a token, 28 x 28 pixels a
token. The encoder's time is one recorded figure, 167 ms for a 1080p image (2,691 tokens) on an H100
with its preprocessing, taken in proportion to the tokens. Attention makes large images dearer than
that, so what a cache saves on them is rather understated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

BYTES_A_TOKEN = 7168
_RECORDED_TOKENS = 2691
_RECORDED_S = 0.167

# Images of 640 x 640 pixels, of 1920 x 1080, and of the largest size the processor lets through.
USUAL_TOKENS: Mapping[int, float] = {529: 0.70, 2691: 0.28, 16384: 0.02}


def encoder_seconds(tokens: int) -> float:
    """What the encoder takes for that many tokens."""
    return _RECORDED_S * tokens / _RECORDED_TOKENS


def draw(shares: Mapping[int, float], chance: random.Random) -> int:
    """One of the keys, as often as its share says."""
    return chance.choices(list(shares), weights=list(shares.values()))[0]
