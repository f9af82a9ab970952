"""The pictures, as the encoder takes them.

Owns: which pictures there are, their processing, and the hash of the processed pixels.
Does not own: the encoder. Works without torch, and without a network: the pictures ship inside
scikit-image and scikit-learn. Eleven are not enough to fill three tiers, so the four quarters of
each one count as pictures too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "PATCH_PX",
    "SIDES_PX",
    "DemoImage",
    "choose_names",
    "content_hash",
    "load_images",
    "process",
]

Pixels = npt.NDArray[np.uint8]
Processed = npt.NDArray[np.float32]

#: One token stands for a square of this side.
PATCH_PX = 32
#: The resolutions, as a serving engine picks one by the size of the picture.
SIDES_PX = (224, 448, 896)
QUARTERS = ("top-left", "top-right", "bottom-left", "bottom-right")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoImage:
    """A picture ready for the encoder.

    Attributes:
        name: The picture, or picture/quarter.
        processed: float32 ``(3, side, side)``, contiguous, normalised.
        content_hash: Unsigned 64-bit hash of ``processed``.
    """

    name: str
    processed: Processed
    content_hash: int

    @property
    def tokens(self) -> int:
        """Rows of the embedding that the encoder makes of it."""
        side_px: int = self.processed.shape[-1]
        return (side_px // PATCH_PX) ** 2


def _from_skimage(function: str, index: int | None = None) -> Callable[[], Pixels]:
    def load() -> Pixels:
        from skimage import data

        found: Any = getattr(data, function)()
        picture: Pixels = found if index is None else found[index]
        return picture

    return load


def _from_sklearn(file: str) -> Callable[[], Pixels]:
    def load() -> Pixels:
        from sklearn.datasets import load_sample_image

        picture: Pixels = load_sample_image(file)
        return picture

    return load


#: Every colour photograph that the two packages ship. Their colour wheel and logo are drawings.
_PHOTOS: dict[str, Callable[[], Pixels]] = {
    "chelsea": _from_skimage("chelsea"),
    "coffee": _from_skimage("coffee"),
    "retina": _from_skimage("retina"),
    "china": _from_sklearn("china.jpg"),
    "hubble": _from_skimage("hubble_deep_field"),
    "flower": _from_sklearn("flower.jpg"),
    "astronaut": _from_skimage("astronaut"),
    "rocket": _from_skimage("rocket"),
    "motorcycle-left": _from_skimage("stereo_motorcycle", 0),
    "motorcycle-right": _from_skimage("stereo_motorcycle", 1),
    "immunohistochemistry": _from_skimage("immunohistochemistry"),
}


def choose_names(count: int, *, seed: int) -> tuple[str, ...]:
    """The names of ``count`` pictures: whole ones first, then quarters in a seeded order."""
    quarters = [f"{photo}/{quarter}" for photo in _PHOTOS for quarter in QUARTERS]
    random.Random(seed).shuffle(quarters)
    names = (*_PHOTOS, *quarters)
    if not 1 <= count <= len(names):
        raise ValueError(f"there are {len(names)} pictures, not {count}")
    return names[:count]


def load_images(names: Iterable[str]) -> dict[str, DemoImage]:
    """Load and process pictures; the same names give the same hashes in every process."""
    return {name: _load_image(name) for name in names}


def _load_image(name: str) -> DemoImage:
    photo, _, quarter = name.partition("/")
    pixels = _photo(photo)
    processed = process(_quarter(pixels, QUARTERS.index(quarter)) if quarter else pixels)
    return DemoImage(name=name, processed=processed, content_hash=content_hash(processed))


@cache
def _photo(name: str) -> Pixels:
    return _PHOTOS[name]()


def _quarter(pixels: Pixels, index: int) -> Pixels:
    rows, columns = pixels.shape[0] // 2, pixels.shape[1] // 2
    top, left = index // 2 * rows, index % 2 * columns
    return pixels[top : top + rows, left : left + columns]


def process(pixels: Pixels) -> Processed:
    """Scale to the nearest resolution and normalise as EfficientNet-Lite was trained.

    Args:
        pixels: uint8 ``(height, width, 3)``.

    Returns:
        float32 ``(3, side, side)``, contiguous; ``(pixel - 127) / 128`` as in the TensorFlow
        release of the weights.
    """
    from PIL import Image

    side_px = _nearest_side_px(min(pixels.shape[:2]))
    scaled = Image.fromarray(pixels).resize((side_px, side_px), Image.Resampling.BICUBIC)
    normalised = (np.asarray(scaled, dtype=np.float32) - 127.0) / 128.0
    return np.ascontiguousarray(normalised.transpose(2, 0, 1), dtype=np.float32)


def _nearest_side_px(short_side_px: int) -> int:
    return min(SIDES_PX, key=lambda side: max(side / short_side_px, short_side_px / side))


def content_hash(processed: npt.NDArray[Any]) -> int:
    """Unsigned 64-bit: the first 8 bytes of the SHA-256, as SGLang hashes processed features."""
    digest = hashlib.sha256(np.ascontiguousarray(processed).data).digest()
    return int.from_bytes(digest[:8], byteorder="big", signed=False)
