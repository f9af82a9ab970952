"""The demo's pictures: real ones, from the disk alone, with stable hashes."""

import hashlib
import socket

import numpy as np
import pytest

from mmcache_tools.demo import images
from mmcache_tools.demo.images import choose_names, content_hash, load_images, process

WHOLE = 11


def test_the_photographs_load_without_a_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("the demo must not use a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    images._photo.cache_clear()
    found = load_images(choose_names(WHOLE, seed=0))
    assert {image.tokens for image in found.values()} == {49, 196, 784}


def test_all_pictures_and_quarters_are_distinct():
    names = choose_names(55, seed=0)
    found = load_images(names)
    assert len({image.content_hash for image in found.values()}) == len(set(names)) == 55


def test_the_whole_pictures_come_first_and_the_seed_orders_the_quarters():
    first, second = choose_names(55, seed=1), choose_names(55, seed=2)
    assert first[:WHOLE] == second[:WHOLE]
    assert not any("/" in name for name in first[:WHOLE])
    assert first != second
    assert set(first) == set(second)


@pytest.mark.parametrize("count", [0, 56])
def test_more_pictures_than_there_are_is_refused(count):
    with pytest.raises(ValueError, match="55 pictures"):
        choose_names(count, seed=0)


def test_processed_pixels_are_normalised_and_contiguous():
    image = load_images(["chelsea"])["chelsea"]
    assert image.processed.dtype == np.float32
    assert image.processed.shape == (3, 224, 224)
    assert image.processed.flags["C_CONTIGUOUS"]
    assert -1.0 <= image.processed.min() < image.processed.max() <= 1.0


@pytest.mark.parametrize(
    ("height", "width", "side"),
    [(100, 900, 224), (300, 451, 224), (320, 320, 448), (872, 1000, 896)],
)
def test_the_resolution_follows_the_size_of_the_picture(height, width, side):
    assert process(np.zeros((height, width, 3), dtype=np.uint8)).shape == (3, side, side)


def test_the_content_hash_is_the_first_8_bytes_of_sha256_unsigned():
    pixels = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    expected = int.from_bytes(hashlib.sha256(pixels.tobytes()).digest()[:8], "big")
    assert content_hash(pixels) == expected
    assert content_hash(pixels.transpose(2, 1, 0)) != expected


def test_a_quarter_is_a_quarter():
    photo = images._photo("chelsea")
    quarter = images._quarter(photo, images.QUARTERS.index("bottom-left"))
    assert np.array_equal(quarter, photo[150:300, :225])
