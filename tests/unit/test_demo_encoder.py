"""The demo's encoder: trained, deterministic, one row per patch."""

import pytest
import torch

from mmcache_tools.demo.encoder import HIDDEN, Encoder, leave_one_core
from mmcache_tools.demo.images import load_images

CATS = range(281, 288)  # ImageNet's classes


@pytest.fixture(scope="module")
def encoder():
    before = torch.get_num_threads()
    leave_one_core()
    yield Encoder()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images():
    return load_images(["chelsea", "coffee"])


def test_one_token_per_patch(encoder, images):
    for image in images.values():
        embedding = encoder.encode([image])
        assert embedding.shape == (image.tokens, HIDDEN)
        assert embedding.is_contiguous()
        assert embedding.untyped_storage().nbytes() == embedding.nbytes


def test_the_same_picture_gives_the_same_bits(encoder, images):
    first, second = (encoder.encode([images["coffee"]]) for _ in range(2))
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_a_combination_is_the_concatenation(encoder, images):
    parts = [encoder.encode([image]) for image in images.values()]
    assert torch.equal(encoder.encode(list(images.values())), torch.cat(parts))


def test_the_weights_are_trained_ones(encoder, images):
    pooled = encoder.encode([images["chelsea"]]).mean(0)
    with torch.inference_mode():
        assert int(encoder._model._fc(pooled).argmax()) in CATS
