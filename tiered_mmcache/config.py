"""The configuration: which tiers there are, how large, and how they behave.

Owns: the keys, their types and defaults, and how they are told in YAML and in code.
Does not own: the rules of single values, the errors, reading YAML, or units (the modules of
:mod:`tiered_mmcache.configuration`), or device memory: this module works without torch.

Every mistake is a :class:`~tiered_mmcache.errors.ConfigError`, also where a section is built in
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from tiered_mmcache.configuration import rules, yaml_file
from tiered_mmcache.configuration.quantities import UnusableValueError, duration_s, size_bytes
from tiered_mmcache.configuration.section import Origin, Section, origin_of
from tiered_mmcache.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


SHORTEST_SALT = 16
AUTO_NAMESPACE = "auto"  # an engine's plug-in derives it


class Oversize(str, Enum):
    """What becomes of an entry that is larger than the whole hot tier."""

    REFUSE = "refuse"
    SPILL = "spill"


class PageLocked(str, Enum):
    """Whether the host tier's memory is to be page-locked, so that a device copies it by DMA."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class WritePolicy(str, Enum):
    """When an entry is written to disk."""

    ON_EVICT = "on_evict"
    ON_SECOND_HIT = "on_second_hit"
    THROUGH = "through"


class Durability(str, Enum):
    """What a power failure may cost: with ``ordered`` the last writes, with ``relaxed`` more."""

    ORDERED = "ordered"
    RELAXED = "relaxed"


class HotConfig(Section):
    """The hot tier: entries in device memory.

    Attributes:
        max_size: Bytes it may hold; None leaves it to the cache's ``max_size`` argument.
        device: Where embeddings live, as torch names it; ``auto`` is the kind of
            device that an entry came from.
        clean_ahead: Bytes of the coldest entries to copy down ahead of need; None is 0.
        oversize: What becomes of an entry larger than the whole tier.
    """

    section: ClassVar[str] = "hot"
    example: ClassVar[str] = "`hot:` and below it `max_size: 4GiB`."

    max_size: int | None = None
    device: str = "auto"
    clean_ahead: int | None = None
    oversize: Oversize = Oversize.REFUSE

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_size: int | str | None = None,
            device: str = "auto",
            clean_ahead: int | str | None = None,
            oversize: Oversize | str = Oversize.REFUSE,
        ) -> None: ...

    @field_validator("max_size", "clean_ahead", mode="before")
    @classmethod
    def _read_size(cls, value: object) -> int | None:
        return None if value is None else size_bytes(value)

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        return rules.usable_device(value)


class HostConfig(Section):
    """The host tier: entries in host memory.

    Attributes:
        max_size: Bytes it may hold; written as a share it is of the memory available now.
        prefetch: Bytes of it that entries fetched ahead of need may take until they are used;
            None is a quarter of ``max_size``, 0 turns prefetching off.
        page_locked: Whether that memory is to be page-locked.
        huge_pages: Whether the kernel is asked for huge pages for it.
        demote_wait_s: How long one call waits for the disk to take entries, rather than drop them.
    """

    section: ClassVar[str] = "host"
    example: ClassVar[str] = "`host:` and below it `max_size: 32GiB`, or leave the section out."

    max_size: int
    prefetch: int | None = None
    page_locked: PageLocked = PageLocked.AUTO
    huge_pages: bool = False
    demote_wait_s: float = Field(default=0.0, alias="demote_wait")

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            max_size: int | str,
            prefetch: int | str | None = None,
            page_locked: PageLocked | str | bool = PageLocked.AUTO,
            huge_pages: bool = False,
            demote_wait_s: float | str = 0.0,
        ) -> None: ...

    @property
    def prefetch_bytes(self) -> int:
        """``prefetch``, or what it is when it is not given."""
        return self.max_size // 4 if self.prefetch is None else self.prefetch

    @field_validator("max_size", mode="before")
    @classmethod
    def _read_size(cls, value: object, info: ValidationInfo) -> int:
        size = rules.host_size_bytes(value, check_machine=origin_of(info).check_machine)
        return rules.tier_size_bytes(size, example="32GiB or 25%")

    @field_validator("prefetch", mode="before")
    @classmethod
    def _read_prefetch(cls, value: object) -> int | None:
        return None if value is None else size_bytes(value)

    @field_validator("page_locked", mode="before")
    @classmethod
    def _read_truth(cls, value: object) -> object:
        """YAML 1.1 reads a bare ``on`` or ``off`` as a truth value."""
        return PageLocked.ON if value is True else PageLocked.OFF if value is False else value

    @field_validator("demote_wait_s", mode="before")
    @classmethod
    def _read_duration(cls, value: object) -> float:
        return duration_s(value)

    def check_together(self) -> None:
        """Refuse to prefetch more than the tier holds."""
        if self.prefetch_bytes > self.max_size:
            problem = "this is more than host.max_size"
            raise UnusableValueError(problem, "Write a part of that.", key="prefetch")


class DiskConfig(Section):
    """The disk tier: entries in an LMDB store.

    Attributes:
        path: The store's folder, absolute; it need not exist yet.
        max_size: Bytes it may hold; written as a share it is of the free space, with the space that
            the store uses already counted as free, so that a restart does not shrink it.
        write: When an entry is written.
        durability: What a power failure may cost.
        read_timeout_s: How long a ``get`` waits for the disk before it is a miss.
        adaptive_read: Do not read an entry that would take longer to read than to encode.
        close_timeout_s: How long ``close`` goes on spilling what only memory holds.
        write_buffer: Bytes of host memory for entries on their way to or from the disk.
        allow_network_file_system: Open the store on a network file system too.
        keep_quarantined: How many unreadable stores are kept aside.
        allow_weak_hashes: An engine's plug-in lets hashes reach the disk that may not tell contents
            apart; in your own code keys are yours to choose.
    """

    section: ClassVar[str] = "disk"
    example: ClassVar[str] = (
        "`disk:` and below it `path: /var/cache/mmcache` and `max_size: 500GiB`."
    )

    path: Path
    max_size: int
    write: WritePolicy = WritePolicy.ON_EVICT
    durability: Durability = Durability.ORDERED
    read_timeout_s: float = Field(default=2.0, alias="read_timeout")
    adaptive_read: bool = True
    close_timeout_s: float = Field(default=30.0, alias="close_timeout")
    write_buffer: int = Field(default_factory=rules.default_write_buffer_bytes)
    allow_network_file_system: bool = False
    keep_quarantined: int = Field(default=2, ge=0, le=1000)
    allow_weak_hashes: bool = False

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            path: Path | str,
            max_size: int | str,
            write: WritePolicy | str = WritePolicy.ON_EVICT,
            durability: Durability | str = Durability.ORDERED,
            read_timeout_s: float | str = 2.0,
            adaptive_read: bool = True,
            close_timeout_s: float | str = 30.0,
            write_buffer: int | str = ...,
            allow_network_file_system: bool = False,
            keep_quarantined: int = 2,
            allow_weak_hashes: bool = False,
        ) -> None: ...

    @field_validator("path", mode="before")
    @classmethod
    def _read_path(cls, value: object, info: ValidationInfo) -> Path:
        return rules.store_folder(value, origin_of(info).base)

    @field_validator("max_size", mode="before")
    @classmethod
    def _read_size(cls, value: object, info: ValidationInfo) -> int:
        folder: Path | None = info.data.get("path")
        if folder is None:  # the path is at fault, and is reported before this
            return 0
        size = rules.disk_size_bytes(
            value, folder=folder, check_machine=origin_of(info).check_machine
        )
        return rules.tier_size_bytes(size, example="500GiB or 50%")

    @field_validator("read_timeout_s", "close_timeout_s", mode="before")
    @classmethod
    def _read_duration(cls, value: object) -> float:
        return duration_s(value)

    @field_validator("read_timeout_s")
    @classmethod
    def _check_read_timeout(cls, value: float) -> float:
        if value == 0:
            problem = "with no time to read, the disk would never serve anything"
            raise UnusableValueError(problem, "Write 2s, say, or leave the section out.")
        return value

    @field_validator("write_buffer", mode="before")
    @classmethod
    def _read_write_buffer(cls, value: object, info: ValidationInfo) -> int:
        size = rules.host_size_bytes(value, check_machine=origin_of(info).check_machine)
        if size == 0:
            raise UnusableValueError("entries reach the disk through it", "Write 256MiB, say.")
        return size


class MetricsConfig(Section):
    """A file with the metrics of each cache.

    Attributes:
        folder: Where it is written, on a file system in memory.
        interval_s: It is not written again earlier.
    """

    section: ClassVar[str] = "metrics"
    example: ClassVar[str] = "`metrics:` and below it `folder: /dev/shm/mmcache`."

    folder: Path
    interval_s: float = Field(default=10.0, alias="interval")

    if TYPE_CHECKING:

        def __init__(self, *, folder: Path | str, interval_s: float | str = 10.0) -> None: ...

    @field_validator("folder", mode="before")
    @classmethod
    def _read_path(cls, value: object, info: ValidationInfo) -> Path:
        return rules.folder_in_memory(value, origin_of(info).base)

    @field_validator("interval_s", mode="before")
    @classmethod
    def _read_duration(cls, value: object) -> float:
        duration = duration_s(value)
        if duration < 1.0:
            raise UnusableValueError("that is too often", "Write 1s or longer.")
        return duration


class TraceConfig(Section):
    """A trace of what is asked of each cache.

    Attributes:
        folder: Where its file is written.
        max_size: Bytes that the traces in the folder may take; recording ends there.
        salt: Makes the digests of keys; None is one of its own for each cache.
    """

    section: ClassVar[str] = "trace"
    example: ClassVar[str] = "`trace:` and below it `folder: /var/tmp/mmcache-traces`."

    folder: Path
    max_size: int = 256 << 20
    salt: str | None = None

    if TYPE_CHECKING:

        def __init__(
            self, *, folder: Path | str, max_size: int | str = ..., salt: str | None = None
        ) -> None: ...

    @field_validator("folder", mode="before")
    @classmethod
    def _read_path(cls, value: object, info: ValidationInfo) -> Path:
        return rules.store_folder(value, origin_of(info).base)

    @field_validator("max_size", mode="before")
    @classmethod
    def _read_size(cls, value: object) -> int:
        return size_bytes(value)

    @field_validator("salt")
    @classmethod
    def _check_salt(cls, value: str | None) -> str | None:
        if value is not None and len(value) < SHORTEST_SALT:
            problem = f"whoever guesses it can tell which keys are in a trace: {len(value)} letters"
            remedy = f"Write {SHORTEST_SALT} random ones or more, or leave it out."
            raise UnusableValueError(problem, remedy)
        return value


class CacheConfig(Section):
    """The whole configuration; without ``host`` and ``disk`` the cache is the hot tier alone.

    Attributes:
        namespace: What makes embeddings interchangeable; needed for a disk tier. ``auto`` leaves
            it to an engine's plug-in.
        hot: The hot tier.
        host: The host tier; None is none.
        disk: The disk tier; None is none.
        metrics: The file of metrics; None is none.
        trace: The trace of requests; None is none.
    """

    example: ClassVar[str] = "the sections `hot`, `host` and `disk`."

    namespace: str | None = None
    hot: HotConfig = HotConfig()
    host: HostConfig | None = None
    disk: DiskConfig | None = None
    metrics: MetricsConfig | None = None
    trace: TraceConfig | None = None

    @classmethod
    def from_mapping(
        cls,
        mapping: Mapping[Any, Any],
        *,
        file: str | None = None,
        check_machine: bool = True,
    ) -> Self:
        """Build a configuration from plain values, as a YAML file holds them.

        Args:
            mapping: The sections and their keys.
            file: The file they come from: errors name it, and relative paths start in its folder.
            check_machine: False accepts sizes that this machine has no room for, for a reader that
                only wants to know where a store is.

        Raises:
            ConfigError: When anything in it cannot be used.
        """
        base = None if file is None else Path(file).absolute().parent
        origin = Origin(file=file, base=base, check_machine=check_machine)
        return cls.model_validate(mapping, context=origin)

    @field_validator("namespace", mode="before")
    @classmethod
    def _check_namespace(cls, value: object) -> object:
        return None if value is None else rules.usable_namespace(value)

    def check_together(self) -> None:
        """Refuse a disk tier without a namespace: its embeddings would be anyone's."""
        if self.disk is not None and self.namespace is None:
            raise UnusableValueError(
                "is missing, and a disk tier needs one", rules.NAMESPACE_REMEDY, key="namespace"
            )


def load_config(path: str | Path, *, check_machine: bool = True) -> CacheConfig:
    """Read the configuration that a YAML file holds.

    Args:
        path: The file; relative paths in it start in its folder.
        check_machine: As for :meth:`CacheConfig.from_mapping`.

    Raises:
        ConfigError: When the file cannot be read, or anything in it cannot be used.
    """
    mapping = yaml_file.read_mapping(Path(path))
    _refuse_empty_sections(mapping, str(path))
    return CacheConfig.from_mapping(mapping, file=str(path), check_machine=check_machine)


def _refuse_empty_sections(mapping: Mapping[object, object], file: str) -> None:
    """A section whose keys are all commented out reads as null: say so, do not guess."""
    for section in (HotConfig, HostConfig, DiskConfig, MetricsConfig, TraceConfig):
        if section.section in mapping and mapping[section.section] is None:
            raise ConfigError(
                file=file,
                key=section.section,
                value=None,
                problem="has no keys",
                remedy="Leave it out, or give it keys.",
            )


def parse_size(value: int | str, *, key: str = "size") -> int:
    """Read a size such as ``"4GiB"`` in bytes; shares are refused.

    Raises:
        ConfigError: When it is not a size; ``key`` is what the message calls it.
    """
    try:
        return size_bytes(value)
    except UnusableValueError as error:
        raise ConfigError(
            file=None, key=key, value=value, problem=error.problem, remedy=error.remedy
        ) from error
