"""Which store is meant: a folder, a YAML file that names one, or the environment.

Owns: reading the STORE argument. Does not own: opening the store.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE, UsageError
from tiered_mmcache.errors import ConfigError, StoreUnavailableError

__all__ = ["Target", "find_target", "is_there", "names_a_store", "store_is_in_the_environment"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A store that somebody asked for.

    Attributes:
        folder: Its folder.
        budget_bytes: What the configuration lets it hold; None when only the folder is known.
    """

    folder: Path
    budget_bytes: int | None = None


def find_target(store: str | None) -> Target:
    """The store that an argument, or else the environment, names.

    Raises:
        UsageError: Neither names any.
        ConfigError: It is a YAML file that cannot be used, or one without a disk tier.
        StoreUnavailableError: There is no such file or folder.
        OSError: Nobody can say what is there, as without the right to look.
    """
    named = store or os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        problem = "no store is named. Give its folder or the YAML that names it"
        raise UsageError(f"{problem}, or set {ENVIRONMENT_VARIABLE}.")
    path = Path(named)
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return Target(folder=path)
        there = True
    except (FileNotFoundError, NotADirectoryError, ValueError):
        there = path.suffix in (".yaml", ".yml")
    if there:
        return _configured(path)
    raise StoreUnavailableError(
        path=named,
        cause="not_there",
        problem="there is no such folder or file",
        remedy="Name the folder that the configuration calls disk.path, or the YAML file.",
    )


def is_there(text: str) -> bool:
    """Whether a text names a file or folder; a key may be longer than any name."""
    return os.path.exists(text)  # noqa: PTH110 - Path's raises for those


def names_a_store(text: str) -> bool:
    """Whether an argument that can be a STORE or a KEY is taken for a STORE."""
    return is_there(text) or text.endswith((".yaml", ".yml"))


def store_is_in_the_environment() -> bool:
    """Whether the STORE may be left out."""
    return bool(os.environ.get(ENVIRONMENT_VARIABLE))


def _configured(file: Path) -> Target:
    from tiered_mmcache.config import load_config

    disk = load_config(file, check_machine=False).disk
    if disk is None:
        raise ConfigError(
            file=str(file),
            key="disk",
            value=None,
            problem="is missing, so this configuration has no store",
            remedy="Name a store's folder instead, or add the section.",
        )
    return Target(folder=disk.path, budget_bytes=disk.max_size)
