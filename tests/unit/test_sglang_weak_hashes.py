"""Which hashes may outlive a process."""

import hashlib

import pytest

from tiered_mmcache.entries.keys import CombinedHash
from tiered_mmcache.integrations.sglang.weak_hashes import is_weak

STRONG = int.from_bytes(hashlib.sha256(b"an image").digest()[:8], "big")


def as_sglang_reads_it(hexadecimal):
    """A caller's hash: SGLang keeps the last 64 bits."""
    return int(hexadecimal, 16) & (2**64 - 1)


@pytest.mark.parametrize(
    "weak",
    [
        0,
        1,
        2**32 - 1,
        -1,
        -2,
        2**63,
        0xDEADBEEF << 32,
        as_sglang_reads_it("abcdef".ljust(64, "0")),
        as_sglang_reads_it("c0ffee"),
        CombinedHash([0]),
        CombinedHash([STRONG, 0]),
        CombinedHash([CombinedHash([0])]),
        (STRONG, 7),
        "",
        b"",
        False,
    ],
)
def test_these_tell_too_little_apart(weak):
    assert is_weak(weak)


@pytest.mark.parametrize(
    "strong",
    [
        STRONG,
        -STRONG,
        2**32 + 1,
        2**64 - 1,
        as_sglang_reads_it(hashlib.sha256(b"another").hexdigest()),
        CombinedHash([STRONG]),
        (STRONG, STRONG + 1),
        "sha256:" + "0" * 64,
        b"digest",
    ],
)
def test_these_may_be_digests(strong):
    assert not is_weak(strong)


def test_hardly_any_true_digest_is_taken_for_weak():
    digests = [hashlib.sha256(str(n).encode()).digest()[:8] for n in range(20_000)]
    assert not [d for d in digests if is_weak(int.from_bytes(d, "big"))]
