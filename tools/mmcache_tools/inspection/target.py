"""Which store is meant: a folder, a YAML file that names one, or the environment.

Owns: reading the STORE argument. Does not own: opening the store.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE, UsageError
from tiered_mmcache.errors import ConfigError, StoreUnavailableError

__all__ = ["Target", "find_target"]


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
    """
    named = store or os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        problem = "no store is named. Give its folder or the YAML that names it"
        raise UsageError(f"{problem}, or set {ENVIRONMENT_VARIABLE}.")
    path = Path(named)
    if path.is_dir():
        return Target(folder=path)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return _configured(path)
    raise StoreUnavailableError(
        path=named,
        cause="not_there",
        problem="there is no such folder or file",
        remedy="Name the folder that the configuration calls disk.path, or the YAML file.",
    )


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
