"""What the ranks of an engine tell each other before they share one cache's lower tiers.

Owns: what each says of itself, and what follows for all; an engine has to go on whatever that is.
Does not own: making the group (:mod:`.gloo`), or what its ranks do afterwards (:mod:`.agreement`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack

from tiered_mmcache.ranks.exchange import LEADER, RankExchange

_LONGEST_REASON = 240  # bytes; the whole is in that rank's own log


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a rank says of itself.

    Attributes:
        max_size: Bytes of the hot tier that it could have.
        spill_oversize: Whether entries larger than that may go below.
        namespace: A digest of the namespace whose entries it would look for on disk.
        refusal: Why it cannot have tiers below the hot one; empty when it can.
    """

    max_size: int
    spill_oversize: bool
    namespace: int
    refusal: str

    def packed(self) -> bytes:
        """As sent."""
        fields = dataclasses.asdict(self)
        reason = self.refusal.encode("utf-8", "replace")[:_LONGEST_REASON]
        fields["refusal"] = reason.decode("utf-8", "ignore")
        packed: bytes = msgpack.packb(fields)
        return packed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds on all ranks.

    Attributes:
        max_size: Bytes of every hot tier: the smallest that a rank could have, since tiers of
            different sizes evict different entries.
        spill_oversize: The leader's rule for entries larger than that.
        refusal: Why no rank has tiers below the hot one; None when the leader may.
        strangers: Ranks that would look for other entries than the leader, who alone reads and
            writes below: their files of the model differ, or only the times of these.
    """

    max_size: int
    spill_oversize: bool
    refusal: str | None
    strangers: list[int]


def agree_on_terms(exchange: RankExchange, own: Introduction) -> Terms:
    """Tell the others, hear them, and conclude; equal on all ranks.

    Raises:
        GroupOutOfStepError: A rank is elsewhere.
        GroupLostError: A rank did not come in time.
    """
    return concluded([_read(words) for words in exchange.introduce(own.packed())])


def concluded(introductions: list[Introduction | None]) -> Terms:
    """The terms of ranks that said this; None is one that could not be understood."""
    leader = introductions[LEADER]
    known = [said for said in introductions if said is not None]
    if leader is None:
        leader = known[0]  # this rank at least understands itself
    refusals = [
        f"rank {rank}: {'it runs another version of this package' if s is None else s.refusal}"
        for rank, s in enumerate(introductions)
        if s is None or s.refusal
    ]
    return Terms(
        max_size=min(said.max_size for said in known),
        spill_oversize=leader.spill_oversize,
        refusal="; ".join(refusals) or None,
        strangers=[
            rank
            for rank, said in enumerate(introductions)
            if said is not None and said.namespace != leader.namespace
        ],
    )


def _read(words: bytes) -> Introduction | None:
    try:
        fields: dict[str, Any] = msgpack.unpackb(words)
        return Introduction(**fields)
    except Exception:  # noqa: BLE001 - whatever it says, it is none of ours
        return None
