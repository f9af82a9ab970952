"""The plug-in for SGLang: its multimodal embedding cache becomes the tiered one, without a fork.

Owns: the two ways in. ``register`` is the entry point that SGLang calls in each of its processes
(group ``sglang.srt.plugins``, releases with plug-ins); ``install`` is for older releases.
Does not own: what is put in place (:mod:`.activation`), or the cache (:mod:`.cache`).

Nothing happens unless the environment variable ``TIERED_MMCACHE_CONFIG`` names a YAML file.
Importing this package loads neither SGLang nor torch.
"""

from __future__ import annotations

import logging
import os

from tiered_mmcache.errors import TieredCacheError
from tiered_mmcache.metrics.remedies import log_fields

__all__ = ["CONFIG_VARIABLE", "install", "register"]

CONFIG_VARIABLE = "TIERED_MMCACHE_CONFIG"  # as in tiered_mmcache.tiers.assembly, which loads torch

log = logging.getLogger("tiered_mmcache")


def register() -> None:
    """Register the cache with SGLang's plug-in registry; SGLang calls this by itself.

    Raises nothing: SGLang would swallow it. What is wrong is logged as an error with its remedy,
    and SGLang goes on with its own cache.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    from tiered_mmcache.integrations.sglang import activation

    try:
        activation.register_hooks(os.environ[CONFIG_VARIABLE])
    except TieredCacheError as error:
        fields = log_fields("plugin", "Do as the line says, and start SGLang again.")
        log.error("the tiered cache is not active, SGLang uses its own: %s", error, extra=fields)
    except Exception:
        log.exception(
            "the tiered cache is not active, SGLang uses its own", extra=log_fields("internal")
        )


def install() -> None:
    """Put the cache in place in this process, for releases of SGLang that have no plug-ins.

    Call it before SGLang makes its schedulers, in every process that makes one: at the top of the
    script that starts the engine, outside of its ``if __name__ == "__main__":``, since each
    scheduler is a process that imports the script again; or from a ``.pth`` file.

    SGLang is not imported here: its modules are changed when they are imported, or at once where
    they already are.

    Raises:
        UnsupportedEngineError: There is no SGLang, or one that this package does not know.
    """
    if not os.environ.get(CONFIG_VARIABLE):
        return
    from tiered_mmcache.integrations.sglang import activation

    activation.install_on_import(os.environ[CONFIG_VARIABLE])
