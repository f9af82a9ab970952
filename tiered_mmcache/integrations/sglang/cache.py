"""The cache that SGLang makes in place of its own.

Owns: what SGLang relies on beyond the tiered cache: tiers that are built with the first use, its
own result classes, the row rule of pruned videos, and what becomes of entries when weights change.
Does not own: the tiers (:mod:`tiered_mmcache.tiered_cache`), which of them a process gets
(:mod:`.plan`), or when weights change (:mod:`.invalidation`).

The first use is the first look-up or ``set``: a server for a model without images makes a cache,
and never uses it. A look-up counts, since a store that a former server filled has to be asked
before the first image is encoded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import uuid
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
import xxhash

from tiered_mmcache.config import CacheConfig
from tiered_mmcache.configuration.rules import LARGEST_NAMESPACE_BYTES
from tiered_mmcache.contract import EmbeddingResult, Tier, register_result_class
from tiered_mmcache.encoding.encoder_time import UNKNOWN_COST, Cost
from tiered_mmcache.integrations.sglang.plan import Plan, read_timeout_s
from tiered_mmcache.integrations.sglang.ranks import exchange_of_ranks
from tiered_mmcache.integrations.sglang.server import server_arguments
from tiered_mmcache.integrations.sglang.weak_hashes import is_weak
from tiered_mmcache.metrics.remedies import log_fields, remedy_of
from tiered_mmcache.ranks.agreement import RankMultimodalCache
from tiered_mmcache.ranks.exchange import RankExchange
from tiered_mmcache.ranks.introduction import Introduction, Terms, agree_on_terms
from tiered_mmcache.tiered_cache import TieredMultimodalCache
from tiered_mmcache.tiers.lower_tiers import LowerTiers

_CLOSE_TIMEOUT_S = 5.0
_PRIVATE = "+weights-"
_REFUSED = log_fields("refused", "Do as the line says, and start SGLang again.")
_INCONSISTENT_ROWS = "inconsistent_rows"

log = logging.getLogger("tiered_mmcache")
# The caches of this process, which the hooks on SGLang's functions have to reach.
live_caches: weakref.WeakSet[SGLangTieredCache] = weakref.WeakSet()


class SGLangTieredCache(RankMultimodalCache):
    """The tiered cache under the rules of SGLang.

    SGLang dereferences the look-up that follows a ``set`` which returned True, so True means that
    the entry is in the hot tier.

    Args:
        max_size: Bytes that SGLang reserved for it.
    """

    make_plan: ClassVar[Callable[[int], Plan]]

    def __init__(self, max_size: int) -> None:
        plan = type(self).make_plan(max_size)
        super().__init__(plan.hot_bytes, config=CacheConfig(hot=plan.config.hot))
        self._unopened: CacheConfig | None = plan.config
        self._among_ranks = plan.among_ranks
        self._refusal = "" if plan.has_lower_tiers else "; ".join(plan.refused)
        self._namespace_is_private = False
        live_caches.add(self)
        for reason in plan.refused:
            log.error("tiers below the hot one are off: %s", reason, extra=_REFUSED)
        for note in plan.notes:
            log.warning("%s", note, extra=log_fields("plugin", "Do as the line says."))
        log.info("the tiered cache is active in SGLang: %s", plan.summary())

    # The first use

    def _open_if_needed(self) -> None:
        if self._unopened is None:
            return
        with self._lock:
            config = self._take_unopened()
            self._unopened = None
            if config is None:
                return
            self.config = config
            register_result_classes()
            if self._among_ranks:
                self._open_among_ranks(config)
            else:
                self._open_alone(config)

    def _open_alone(self, config: CacheConfig) -> None:
        if self._refusal:  # there still are metrics to be published
            config = _hot_alone(config)
        try:
            self._open_lower_tiers(config, read_timeout_s(config.disk))
            if self._below is not None:
                self._below.promoter.objection = _objection
        except Exception as error:  # noqa: BLE001 - SGLang must go on with the hot tier
            self._faults.report("internal", repr(error))
            log.error(
                "tiers below the hot one are off: they cannot be built: %s", error, extra=_REFUSED
            )

    def _open_among_ranks(self, config: CacheConfig) -> None:
        """All ranks come here with their first use, and go on alike."""
        try:
            exchange = self._exchange or exchange_of_ranks(server_arguments())
            if exchange is None:  # SGLang has several ranks, but none that shares batches with this
                self._among_ranks = False
                self._open_alone(config)
                return
            terms = agree_on_terms(exchange, self._introduction(config))
            self._accept(terms, exchange)
            goes_below = exchange.leads and terms.refusal is None
            self._open_alone(config if goes_below else _hot_alone(config))
            self._enter_group(exchange)
        except Exception as error:  # noqa: BLE001 - SGLang must go on with the hot tier
            self._go_on_without_ranks(error)

    def _introduction(self, config: CacheConfig) -> Introduction:
        return Introduction(
            max_size=self.max_size,
            spill_oversize=self._spill_oversize,
            namespace=xxhash.xxh3_64_intdigest(self._shared_name(config).encode()),
            refusal=self._refusal,
        )

    def _shared_name(self, config: CacheConfig) -> str:
        """The namespace, without what each rank chooses for itself."""
        return (config.namespace or "").partition(_PRIVATE)[0]

    def _accept(self, terms: Terms, exchange: RankExchange) -> None:
        if terms.max_size < self.max_size:
            log.warning(
                "hot.max_size is limited to that of another rank: %d",
                terms.max_size,
                extra=log_fields("ranks_differ", "Give every rank the same YAML."),
            )
        self.max_size = terms.max_size
        self._spill_oversize = terms.spill_oversize
        here = f"rank {exchange.rank} of {exchange.size}"
        if terms.refusal is not None:
            log.error(
                "%s: tiers below the hot one are off on all ranks: %s",
                here,
                terms.refusal,
                extra=_REFUSED,
            )
            return
        log.info("%s agrees with the others; rank 0 has the tiers below the hot one", here)
        if exchange.leads and terms.strangers:
            log.warning(
                "ranks %s would use another namespace, as with a copy of the model whose files "
                "have other times: make sure that it is the same model there",
                terms.strangers,
                extra=log_fields("ranks_differ", "Give every rank the same model."),
            )

    def _namespace_of_group(self) -> str | None:
        """The leader's alone counts, who alone has tiers below."""
        return None

    def _go_on_without_ranks(self, error: Exception) -> None:
        self._close_lower_tiers()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange, self._among_ranks = None, False
        self._refusal = "the ranks could not be brought together"
        self._faults.report("ranks_apart", repr(error))
        log.error(
            "tiers below the hot one are off: the ranks could not be brought together: %s. %s",
            error,
            remedy_of("ranks_apart"),
            extra=log_fields("ranks_apart"),
        )

    def _take_unopened(self) -> CacheConfig | None:
        """Asked again under the lock: another thread may have been first."""
        return None if self._closed else self._unopened

    def _look_below(self, mm_hash: Hashable) -> EmbeddingResult | None:
        self._open_if_needed()
        result = super()._look_below(mm_hash)
        # Another thread's look-up may have come between: then an entry is freed that need not be.
        if result is None and self._counters.look_up == _INCONSISTENT_ROWS:
            TieredMultimodalCache.free(self, mm_hash)  # where it was found; no other rank has it
        return result

    def locate(self, mm_hash: Hashable) -> Tier | None:
        """As in the tiered cache; the first use opens what is below."""
        if mm_hash not in self.mm_cache:
            self._open_if_needed()
        return super().locate(mm_hash)

    def get_many(self, mm_hashes: Sequence[Hashable]) -> list[EmbeddingResult | None]:
        """As in the tiered cache; the first use opens what is below."""
        self._open_if_needed()
        return super().get_many(mm_hashes)

    def prefetch(self, mm_hashes: Sequence[Hashable]) -> int:
        """As in the tiered cache; the first use opens what is below."""
        self._open_if_needed()
        return super().prefetch(mm_hashes)

    def _set(self, mm_hash: Hashable, embedding: EmbeddingResult, cost: Cost) -> bool:
        self._open_if_needed()
        if not rows_agree(embedding):
            self._counters.drops[_INCONSISTENT_ROWS] += 1
            return False
        return super()._set(mm_hash, embedding, cost) and mm_hash in self.mm_cache

    def free(self, mm_hash: Hashable, mm_embedding_allocator: object = None) -> bool:
        """As in the tiered cache; the first use opens what is below."""
        self._open_if_needed()
        return super().free(mm_hash, mm_embedding_allocator)

    def _may_reach_disk(self, mm_hash: Hashable) -> bool:
        disk = None if self.config is None else self.config.disk
        return (disk is not None and disk.allow_weak_hashes) or not is_weak(mm_hash)

    # What ends entries

    def weights_changed(self) -> None:
        """Forget every entry on every tier: they were made by other weights.

        The namespace on disk moves to a fresh generation, for every server that opens it later;
        what this process makes from now on goes to a namespace of its own, since nobody else can
        know which weights it has.
        """
        with self._lock:
            config = self.config if self._unopened is None else self._unopened
            self.clear()
            self._close_lower_tiers()
            if config is None or (self._refusal and not self._among_ranks):
                return
            self._namespace_is_private = True
            self._unopened = _with_private_namespace(config)

    def adapter_loaded(self, refusal: str) -> None:
        """Go on with the hot tier alone, emptied, if a LoRA adapter changes what is encoded.

        Args:
            refusal: Why it does, as far as this rank can tell; empty when it does not.
        """
        with self._lock:
            ranks = [0] if refusal else []
            if self._exchange is not None:
                ranks = self._ranks_against(objects=bool(refusal))
                refusal = refusal or (ranks and f"as rank {ranks[0]} says") or ""
            if not ranks:
                return
            self._refusal = refusal
            self.clear()
            self._close_lower_tiers()
            if not self._among_ranks or self._exchange is not None:
                self._unopened = None
        log.error("tiers below the hot one are off: %s", refusal, extra=_REFUSED)

    def close(self, timeout_s: float | None = None) -> None:
        """As in the tiered cache; entries that no other process may use are not written."""
        live_caches.discard(self)
        with self._lock:
            self._unopened = None
            if self._namespace_is_private:
                self.clear()
        super().close(timeout_s)

    def _close_lower_tiers(self) -> None:
        self._leader_has_tiers = False
        below = self._below
        if below is None:
            return
        if _is_unheard(below):
            self.drain(_CLOSE_TIMEOUT_S)  # a worker that has just ended is started again
        self._below = None
        if _is_unheard(below):
            log.error(
                "the store could not be told that weights changed: before another server uses the "
                "namespace %s, remove %s",
                None if self.config is None else self.config.namespace,
                None if self.config is None or self.config.disk is None else self.config.disk.path,
                extra=log_fields("stale_store", "Remove the folder that the line names."),
            )
        with contextlib.suppress(Exception):
            below.close(_CLOSE_TIMEOUT_S)

    def _give_up_lower_tiers(self, below: LowerTiers) -> None:
        self._refusal = "a copy below could not be voided"
        super()._give_up_lower_tiers(below)

    def _abandon_lower_tiers(self) -> None:
        super()._abandon_lower_tiers()
        self._unopened, self._among_ranks = None, False
        self._refusal = "this is a forked child"


class RawTensorCache(SGLangTieredCache):
    """The same for releases whose cache is given tensors and returns them (0.5.6 and 0.5.7)."""

    def get_single(self, mm_hash: Hashable) -> Any:
        """The tensor of one hash, now most recently used, or None."""
        result = super().get_single(mm_hash)
        return None if result is None else result.embedding

    def set(  # type: ignore[override]  # a tensor, as those releases have it
        self,
        mm_hash: Hashable,
        embedding: torch.Tensor,
        loc: object = None,
        *,
        mm_embedding_allocator: object = None,
    ) -> bool:
        """Admit a tensor."""
        return self._set(mm_hash, EmbeddingResult(embedding=embedding), UNKNOWN_COST)


def cache_class(
    module: ModuleType, *, raw: bool, make_plan: Callable[[int], Plan]
) -> type[SGLangTieredCache]:
    """The class that takes the place of ``MultiModalStaticCache``.

    Args:
        module: SGLang's ``multimodal_cache``, whose abstract class it derives from.
        raw: Whether that release stores tensors.
        make_plan: What a cache of so many bytes gets.
    """
    base = RawTensorCache if raw else SGLangTieredCache
    result_class = EmbeddingResult if raw else module.EmbeddingResult
    members = {
        "make_plan": staticmethod(make_plan),
        "result_class": result_class,
        "__doc__": base.__doc__,
        "__module__": __name__,
    }
    return type("SGLangTieredCache", (base, module.MultimodalCache), members)


def register_result_classes() -> None:
    """Let SGLang's results be stored, and restored as exactly these classes."""
    places = {
        "EmbeddingResult": "sglang.srt.mem_cache.multimodal_cache",
        "EVSEmbeddingResult": "sglang.srt.multimodal.evs",
    }
    for name, place in places.items():
        try:
            found = getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue  # older releases have neither
        register_result_class(f"sglang.{name}", found)


def rows_agree(result: EmbeddingResult) -> bool:
    """Whether a result of a pruned video has as many rows as its frames say it has.

    SGLang does not check such results itself. Others have no frames and always agree.
    """
    counts = getattr(result, "num_tokens_per_frame", None)
    if counts is None:
        return True
    embedding = result.embedding
    width = embedding.shape[-1] if embedding.dim() else 0
    rows = embedding.numel() // width if width else 0
    return bool(sum(counts) == rows)


def _objection(result: EmbeddingResult) -> tuple[str, str] | None:
    if rows_agree(result):
        return None
    return _INCONSISTENT_ROWS, "a pruned video's frames and rows disagree"


def _hot_alone(config: CacheConfig) -> CacheConfig:
    return config.model_copy(update={"host": None, "disk": None})


def _is_unheard(below: LowerTiers) -> bool:
    """Whether the store does not know yet that it was cleared."""
    return below.disk is not None and below.disk.spill.clear_pending


def _with_private_namespace(config: CacheConfig) -> CacheConfig:
    base = (config.namespace or "").partition(_PRIVATE)[0]
    if len(base.encode()) > LARGEST_NAMESPACE_BYTES - 64:
        base = hashlib.blake2b(base.encode(), digest_size=16).hexdigest()
    return config.model_copy(update={"namespace": f"{base}{_PRIVATE}{uuid.uuid4().hex}"})
