"""``python -m tiered_mmcache.integrations.sglang``: whether SGLang would get the cache.

Owns: what is printed. Does not own: the checks. Starts nothing, and loads neither SGLang nor torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tiered_mmcache.config import load_config
from tiered_mmcache.errors import TieredCacheError
from tiered_mmcache.integrations.sglang import CONFIG_VARIABLE
from tiered_mmcache.integrations.sglang.release import FIRST_WITH_PLUGINS, installed_release
from tiered_mmcache.integrations.sglang.summary import described_tiers

_GROUP = "sglang.srt.plugins"
_NAME = "tiered_mmcache"


class NotInOrderError(TieredCacheError):
    """Something that the operator has to set right; the message says how."""


def findings() -> Iterator[str]:
    """What is in order, line by line.

    Raises:
        TieredCacheError: The first thing that is not.
    """
    release = installed_release()
    has_plugins = release.number >= FIRST_WITH_PLUGINS
    way = "its plug-ins" if has_plugins else "install(), see docs/sglang.md"
    tested = ", but newer than what was tested" if release.is_newer_than_tested else ""
    yield f"SGLang {release.text} is supported, through {way}{tested}"
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        raise NotInOrderError(f"{CONFIG_VARIABLE} is not set: let it name the YAML file")
    config = load_config(path)
    yield f"{Path(path).name} can be used: {described_tiers(config)}"
    if has_plugins:
        yield _whether_found()


def _whether_found() -> str:
    if not [e for e in importlib.metadata.entry_points(group=_GROUP) if e.name == _NAME]:
        raise NotInOrderError("the plug-in is not installed: install this package with pip")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed.strip(" ,") and _NAME not in [name.strip() for name in allowed.split(",")]:
        raise NotInOrderError(f"SGLANG_PLUGINS leaves the plug-in out: add {_NAME} to it")
    return "SGLang will find the plug-in"


def main() -> int:
    """Print what was found; 1 when something is not in order."""
    try:
        for line in findings():
            print(line)  # noqa: T201 - this is a command
    except TieredCacheError as error:
        print(error)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
