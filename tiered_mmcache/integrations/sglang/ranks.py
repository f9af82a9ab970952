"""Which processes of SGLang make the same calls as this one, and a group for them.

Owns: finding them, under the names of every supported release.
Does not own: what they agree on (:mod:`tiered_mmcache.ranks`), or which ways of sharing a model
are refused (:mod:`.sharing`).

SGLang runs a batch on all tensor-parallel ranks of a pipeline stage; with attention data
parallelism on the attention-tensor-parallel ranks of one of its replicas. It calls that its
``dp_tp_group``, and scopes its own exchange of requests to it. Only the first pipeline stage embeds
images, so nothing here may wait for the ranks of another one.
"""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from typing import Any

from tiered_mmcache.ranks.exchange import RankExchange
from tiered_mmcache.ranks.gloo import gloo_group_of

# SGLang ends a scheduler that makes no progress for its --watchdog-timeout, 300 s unless told
# otherwise. An error that says which rank is missing has to come first.
_SHARE_OF_WATCHDOG = 0.8
_WATCHDOG_S = 300.0
_PARALLEL = "sglang.srt.distributed.parallel_state"
_ATTENTION = "sglang.srt.layers.dp_attention"

_made: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class NoSuchRanksError(RuntimeError):
    """SGLang does not say which ranks run a batch together."""


def exchange_of_ranks(arguments: object | None) -> RankExchange | None:
    """The messages between the ranks that run each batch together; None where this one is alone.

    All of them have to call this, as often as the others; it returns when they have.

    Raises:
        NoSuchRanksError: SGLang does not say which they are.
        RuntimeError: They did not come in time.
        ValueError: Their groups cannot be used.
    """
    coordinator = _coordinator(arguments)
    try:
        members = [int(rank) for rank in coordinator.ranks]
        device_group = coordinator.device_group
    except (AttributeError, TypeError) as error:
        raise NoSuchRanksError(f"SGLang's group of ranks has changed: {error}") from error
    if len(members) < 2:
        return None
    among = "-".join(map(str, members))
    group = gloo_group_of(members, f"{among}/{next(_made[among])}", _patience_s(arguments))
    return RankExchange(group, device_group)


def _coordinator(arguments: object | None) -> Any:
    with_replicas = bool(getattr(arguments, "enable_dp_attention", False))
    places = [(_ATTENTION, "get_dp_tp_group")]  # 0.5.22 and newer; it looks at the arguments itself
    if with_replicas:
        places += [(_PARALLEL, "get_attn_tp_group"), (_ATTENTION, "get_attention_tp_group")]
    else:
        places += [(_PARALLEL, "get_tp_group")]
    for module, function in places:
        try:
            find = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError):
            continue  # other releases
        try:
            return find()
        except Exception as error:
            raise NoSuchRanksError(f"SGLang's {function} failed: {error!r}") from error
    raise NoSuchRanksError("SGLang does not say which ranks run a batch together")


def _patience_s(arguments: object | None) -> float:
    watchdog_s = getattr(arguments, "watchdog_timeout", None)
    if not isinstance(watchdog_s, (int, float)) or watchdog_s <= 0:
        watchdog_s = _WATCHDOG_S
    return _SHARE_OF_WATCHDOG * watchdog_s
