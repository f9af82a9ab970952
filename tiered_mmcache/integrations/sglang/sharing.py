"""Which ways of sharing a model among processes leave ranks that cannot be brought to agree.

Owns: the refusals. Does not own: finding the ranks (:mod:`.ranks`). Loads neither SGLang nor torch.
"""

from __future__ import annotations

from tiered_mmcache.integrations.sglang.release import Release

_FIRST_WITH_ENCODERS_BY_REPLICA = (0, 5, 9)
_SPLITTING = (
    "enable_prefill_cp",
    "enable_prefill_context_parallel",
    "enable_nsa_prefill_context_parallel",
    "enable_dsa_prefill_context_parallel",
)


def reasons_against_sharing(arguments: object | None, release: Release) -> list[str]:
    """Why the ranks of a server with these arguments cannot be brought to agree.

    Equal on all ranks, as the arguments are.
    """
    reasons = []
    with_replicas = bool(getattr(arguments, "enable_dp_attention", False))
    own_images = bool(getattr(arguments, "mm_enable_dp_encoder", False))
    if with_replicas and own_images and release.number < _FIRST_WITH_ENCODERS_BY_REPLICA:
        reasons.append(
            f"SGLang {release.text} spreads the images of --mm-enable-dp-encoder over the ranks of "
            "all replicas of --enable-dp-attention; leave one of the two out, or upgrade"
        )
    if _sequences_are_split(arguments):
        reasons.append(
            "with context parallelism (--attn-cp-size, --enable-prefill-cp) it has "
            "not been tried which ranks embed the same images; leave it out"
        )
    if getattr(arguments, "enable_pdmux", False):
        reasons.append(
            "with --enable-pdmux two batches run at once, so that ranks may make calls in another "
            "order; leave it out"
        )
    if getattr(arguments, "elastic_ep_backend", None):
        reasons.append(
            "with --elastic-ep-backend ranks come and go while the server runs; leave it out"
        )
    return reasons


def _sequences_are_split(arguments: object | None) -> bool:
    size = getattr(arguments, "attn_cp_size", 1)
    return (isinstance(size, int) and size > 1) or any(
        bool(getattr(arguments, name, False)) for name in _SPLITTING
    )
