"""Exceptions of the package, named by what the reader has to do about them.

Owns: the exception classes and the fields they carry.
Does not own: misses (``None``), refusals (``False`` or an enum) or faults that a tier survives
(counted in :mod:`tiered_mmcache.metrics.counters`): none of those raises.
"""

from __future__ import annotations


class TieredCacheError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(TieredCacheError):
    """The configuration cannot be used as written: change the named key.

    Attributes:
        file: The file that holds the key, or None for a configuration built in code.
        key: The dotted key, such as ``host.max_size``; empty when the whole file is at fault.
        value: The offending value as written, or None when the key is missing.
        problem: What is wrong with it.
        remedy: What to write instead.
    """

    def __init__(
        self, *, file: str | None, key: str, value: object, problem: str, remedy: str
    ) -> None:
        self.file = file
        self.key = key
        self.value = value
        self.problem = problem
        self.remedy = remedy
        where = file if file is not None else "configuration"
        at = f"{where}: {key}" if key else where
        shown = "" if value is None else f" (got {value!r})"
        super().__init__(f"{at}: {problem}{shown}. {remedy}")


class StoreUnavailableError(TieredCacheError):
    """A store cannot be opened for the stated cause: mend the cause or name another store.

    Attributes:
        path: The store's folder.
        cause: A short, stable label such as ``not_a_store``, ``future_format`` or ``permission``.
        remedy: What the operator can do about it.
    """

    def __init__(self, *, path: str, cause: str, problem: str, remedy: str) -> None:
        self.path = path
        self.cause = cause
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{path}: {problem}. {remedy}")


class RecordError(TieredCacheError):
    """A stored record does not decode to something this version can serve: treat it as a miss.

    Attributes:
        cause: A short, stable label such as ``digest``, ``truncated`` or ``future_version``.
    """

    def __init__(self, cause: str, problem: str) -> None:
        self.cause = cause
        super().__init__(problem)


class UseAfterForkError(TieredCacheError):
    """The store was opened before this process was forked off: open it in this process instead."""


class GroupError(TieredCacheError):
    """The ranks of a group cannot go on together: end all of them, and start them again.

    Attributes:
        rank: This process's rank in the group.
    """

    def __init__(self, rank: int, problem: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {problem}")


class GroupOutOfStepError(GroupError):
    """The ranks made different calls, or hold different entries: mend the caller.

    Attributes:
        ranks: Those that were elsewhere than this one.
    """

    def __init__(self, rank: int, ranks: list[int], problem: str) -> None:
        self.ranks = ranks
        super().__init__(rank, problem)


class GroupLostError(GroupError):
    """A rank died, or did not come within the group's own limit; its error is the cause."""


class PeerFailedError(TieredCacheError):
    """The same step failed on other ranks, so it counts nowhere: their logs say why.

    Attributes:
        ranks: Where it failed.
    """

    def __init__(self, ranks: list[int], step: str) -> None:
        self.ranks = ranks
        super().__init__(f"{step} failed on rank {', '.join(map(str, ranks))}")


class UnsupportedEngineError(TieredCacheError):
    """An inference engine in a version that the plug-in cannot serve: install another one.

    Attributes:
        engine: The engine's name.
        version: The version that was found; empty when there is none.
        problem: What is wrong with it.
        remedy: What to do about it.
    """

    def __init__(self, *, engine: str, version: str, problem: str, remedy: str) -> None:
        self.engine = engine
        self.version = version
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{engine} {version}".strip() + f": {problem}. {remedy}")
