"""What the numbers of a cache are called outside of it: the exported metrics.

Owns: the name, type, unit, labels and meaning of every metric, and reading its values from a
snapshot. Nothing is counted here.
Does not own: the numbers (:mod:`.counters`), or the format they are exported in
(:mod:`tiered_mmcache.prometheus`). Imports no torch.

Names follow the Prometheus conventions: base units, ``_total`` for counters. Every reason that is
known is exported from the beginning, as 0, so that rates and alerts have something to start from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from tiered_mmcache.metrics.counters import CacheStats, Histogram
from tiered_mmcache.metrics.key_history import ABSENCES
from tiered_mmcache.metrics.remedies import REMEDIES

# Besides these, a look-up can miss for the reasons of ``ABSENCES``. Those of ``FAULTY_MISSES``
# are counted as faults under the same name, with a log line.
FAULTY_MISSES = (
    "internal",
    "read_timeout",
    "unknown_class",
    "unknown_dtype",
    "changed_class",
    "no_device",
    "promotion",
    "inconsistent_rows",  # of a pruned video, in SGLang
)
GROUP_MISSES = ("leader", "no_group", "other_rank")  # of ranks that agree
MISS_REASONS = (
    *ABSENCES,
    "capture",
    "disk_down",
    "disk_fault",
    "no_room",
    "slower_than_encoding",
    *FAULTY_MISSES,
    *GROUP_MISSES,
)
# What a store is refused for, and what LMDB and the system raise (tiered_mmcache.disk.causes).
STORE_CAUSES = (
    "damaged",
    "disk",
    "file_size_limit",
    "future_format",
    "io_error",
    "lock",
    "map_full",
    "no_space",
    "not_a_folder",
    "other_lmdb_version",
    "out_of_memory",
    "permission",
    "read_only_file_system",
    "readers_full",
    "same_process_number",
    "too_many_files",
)
FAULT_CAUSES = tuple(sorted({*REMEDIES, *STORE_CAUSES}))
DROP_REASONS = ("capture", "no_disk_tier", "no_room", "not_hit_again", "write_buffer_full")
REFUSAL_REASONS = ("closed", "larger_than_hot_tier", "no_room_below")
MEMORY_ONLY_REASONS = ("extra_fields", "key_or_class", "tensor_kind")
WAYS = ("device_to_host", "disk_to_host", "host_to_device", "host_to_disk")
PREFETCH_OUTCOMES = ("absent", "asked", "failed", "refused", "used", "wasted")
CLEAN_AHEAD_OUTCOMES = ("copied", "used", "wasted")
TIERS = ("hot", "host", "disk")


class Kind(str, Enum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Value = float | Histogram
Values = Mapping[str, Value]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric.

    Attributes:
        name: Without the suffix ``_total`` of a counter.
        kind: Its type.
        meaning: What it says, in one sentence.
        values: Its values in a snapshot, by the value of the label; under an empty key without.
        label: The name of the label, or empty when there is none.
        unit: The base unit that its name ends in, or empty.
    """

    name: str
    kind: Kind
    meaning: str
    values: Callable[[CacheStats], Values]
    label: str = ""
    unit: str = ""

    @property
    def exported_name(self) -> str:
        """What its samples are called; those of a histogram begin so."""
        return self.name + ("_total" if self.kind is Kind.COUNTER else "")


def _known(reasons: Iterable[str], counted: Mapping[str, int]) -> Values:
    """The counts of all known reasons, and of others that were counted."""
    return {**dict.fromkeys(reasons, 0), **counted}


def _misses(stats: CacheStats) -> Values:
    counted = {**stats.misses_by_reason, **stats.absences}
    counted.pop("absent", None)  # the absences are its parts
    return _known(MISS_REASONS, counted)


def _of_tiers(name: str, tiers: Iterable[str] = TIERS) -> Callable[[CacheStats], Values]:
    def values(stats: CacheStats) -> Values:
        held = {tier: getattr(stats, tier) for tier in tiers}
        return {tier: snapshot[name] for tier, snapshot in held.items() if name in snapshot}

    return values


def _of_one(tier: str, name: str) -> Callable[[CacheStats], Values]:
    def values(stats: CacheStats) -> Values:
        snapshot = getattr(stats, tier)
        return {"": snapshot[name]} if name in snapshot else {}

    return values


def _fills(what: str) -> Callable[[CacheStats], Values]:
    def values(stats: CacheStats) -> Values:
        found = dict(_of_tiers(what)(stats))
        buffered = stats.host.get(f"write_buffer_{what}")
        return found if buffered is None else {**found, "write_buffer": buffered}

    return values


def _saved(stats: CacheStats) -> Values:
    return {"": stats.encoding["saved_seconds"]}


def _counter(
    name: str, meaning: str, values: Callable[[CacheStats], Values], label: str = "", unit: str = ""
) -> Family:
    return Family(
        name=name, kind=Kind.COUNTER, meaning=meaning, values=values, label=label, unit=unit
    )


def _gauge(
    name: str, meaning: str, values: Callable[[CacheStats], Values], label: str = "", unit: str = ""
) -> Family:
    return Family(
        name=name, kind=Kind.GAUGE, meaning=meaning, values=values, label=label, unit=unit
    )


FAMILIES = (
    _counter(
        "mmcache_hits",
        "Look-ups answered, by the tier that answered.",
        _of_tiers("hits"),
        "tier",
    ),
    _counter("mmcache_misses", "Look-ups answered with None, by reason.", _misses, "reason"),
    Family(
        name="mmcache_look_up_seconds",
        kind=Kind.HISTOGRAM,
        meaning="How long look-ups below the hot tier took, by what they came to.",
        values=lambda stats: stats.look_ups,
        label="outcome",
        unit="seconds",
    ),
    _counter(
        "mmcache_admissions",
        "Entries that set took into a tier anew.",
        lambda stats: {"": stats.admissions},
    ),
    _counter(
        "mmcache_refusals",
        "Entries that set did not take, by reason.",
        lambda stats: _known(REFUSAL_REASONS, stats.refusals),
        "reason",
    ),
    _counter(
        "mmcache_demotions",
        "Entries copied from the device to host memory.",
        _of_one("host", "demotions"),
    ),
    _counter(
        "mmcache_clean_evictions",
        "Entries that left the hot tier without a copy, since one was below already.",
        _of_one("host", "clean_evictions"),
    ),
    _counter(
        "mmcache_clean_ahead_copies",
        "Copies made before the entry had to go, and what came of them.",
        lambda stats: _known(CLEAN_AHEAD_OUTCOMES, stats.clean_ahead),
        "outcome",
    ),
    _counter(
        "mmcache_demote_waits",
        "Answers of the worker that a call waited for, to have room for what it evicts.",
        _of_one("host", "demote_waits"),
    ),
    _counter(
        "mmcache_promotions",
        "Entries copied back to the device.",
        _of_one("host", "promotions"),
    ),
    _counter("mmcache_spills", "Entries committed to the store.", _of_one("disk", "spills")),
    _counter(
        "mmcache_drops",
        "Entries lost to every tier of this process, by what there was no room or leave for.",
        lambda stats: _known(DROP_REASONS, stats.drops),
        "reason",
    ),
    _counter(
        "mmcache_memory_only",
        "Times that an entry could not leave memory, by reason.",
        lambda stats: _known(MEMORY_ONLY_REASONS, stats.memory_only),
        "reason",
    ),
    _counter(
        "mmcache_prefetches",
        "Entries asked for ahead of their look-ups, and what became of them.",
        lambda stats: _known(PREFETCH_OUTCOMES, stats.prefetches),
        "outcome",
    ),
    _counter(
        "mmcache_moved_bytes",
        "Bytes of embeddings moved, by way.",
        lambda stats: _known(WAYS, stats.moved_bytes),
        "way",
        "bytes",
    ),
    _counter(
        "mmcache_encoder_runs",
        "Calls of an encoder by get_or_encode.",
        _of_one("encoding", "encoder_runs"),
    ),
    _counter(
        "mmcache_encoder_failures",
        "Those among them that failed.",
        _of_one("encoding", "encoder_failures"),
    ),
    _counter(
        "mmcache_encoded_items",
        "Results that encoders returned.",
        _of_one("encoding", "encoded_items"),
    ),
    _counter(
        "mmcache_encoder_seconds",
        "Seconds that these runs took, as far as is known.",
        _of_one("encoding", "encode_seconds"),
        unit="seconds",
    ),
    _counter(
        "mmcache_saved_seconds",
        "Seconds of encoding that hits spared, as far as is known.",
        _saved,
        unit="seconds",
    ),
    _counter(
        "mmcache_single_flight_waits",
        "Entries for which a caller waited while another encoded them.",
        _of_one("encoding", "single_flight_waits"),
    ),
    _counter(
        "mmcache_single_flight_timeouts",
        "Those among them for which it waited in vain.",
        _of_one("encoding", "single_flight_timeouts"),
    ),
    _counter(
        "mmcache_faults",
        "Failures, by cause.",
        lambda stats: _known(FAULT_CAUSES, stats.faults),
        "cause",
    ),
    _counter(
        "mmcache_worker_starts",
        "Spill workers that were started; all but the first are restarts.",
        _of_one("disk", "worker_starts"),
    ),
    _gauge(
        "mmcache_worker_is_up",
        "1 when the spill worker has the store open, else 0.",
        _of_one("disk", "worker_is_up"),
    ),
    _gauge(
        "mmcache_quarantined_stores",
        "Unreadable stores that lay beside the store when it was opened.",
        _of_one("disk", "quarantined_stores"),
    ),
    _gauge("mmcache_entries", "Entries held, by tier.", _fills("entries"), "tier"),
    _gauge("mmcache_used_bytes", "Bytes taken, by tier.", _fills("bytes"), "tier", "bytes"),
    _gauge(
        "mmcache_budget_bytes",
        "Bytes that may be taken, by tier.",
        _fills("budget_bytes"),
        "tier",
        "bytes",
    ),
    _gauge(
        "mmcache_coldest_age_seconds",
        "Seconds since the next victim was admitted (hot), used or admitted (host), stored (disk).",
        _of_tiers("coldest_age_seconds"),
        "tier",
        "seconds",
    ),
    _gauge(
        "mmcache_page_locked_bytes",
        "Host memory that a device reaches by itself.",
        _of_one("host", "page_locked_bytes"),
        unit="bytes",
    ),
    _gauge(
        "mmcache_store_payload_bytes",
        "Bytes of the embeddings alone on disk.",
        _of_one("disk", "payload_bytes"),
        unit="bytes",
    ),
    _gauge(
        "mmcache_store_file_bytes",
        "What the store's file takes on disk.",
        _of_one("disk", "file_bytes"),
        unit="bytes",
    ),
    _gauge(
        "mmcache_mean_read_bytes",
        "The size of recent reads from disk.",
        _of_one("disk", "mean_read_bytes"),
        unit="bytes",
    ),
    _gauge(
        "mmcache_mean_read_seconds",
        "How long recent reads from disk took.",
        _of_one("disk", "mean_read_seconds"),
        unit="seconds",
    ),
)
