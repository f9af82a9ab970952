"""SGLang's functions after which embeddings are no longer what the encoder would make.

Owns: which functions these are, in every supported release, and what each of them means.
Does not own: how they are wrapped (:mod:`.activation`), or what the cache does (:mod:`.cache`).

In none of these releases does SGLang itself touch its embeddings then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tiered_mmcache.integrations.sglang.adapters import reach_the_encoder

SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
# Where a release has these; the first is of 0.5.13 and newer, the second of older ones.
_UPDATERS = (
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"),
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"),
)

Around = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A method of SGLang to be wrapped.

    Attributes:
        module: Where its class is.
        owner: The class.
        method: The method.
        around: Called with the original method and its arguments, in its place.
    """

    module: str
    owner: str
    method: str
    around: Around

    @property
    def path(self) -> str:
        """As SGLang's registry names it."""
        return f"{self.module}.{self.owner}.{self.method}"

    @property
    def owner_class(self) -> type:
        """The class itself."""
        found: type = getattr(sys.modules[self.module], self.owner)
        return found


def targets() -> list[Target]:
    """What is to be wrapped in this process; nothing where there is no scheduler.

    Only a process that runs a scheduler has its module loaded when plug-ins are, and only there
    are flushes and updates.
    """
    if SCHEDULER not in sys.modules:
        return []
    return [target for target in _every_target() if hasattr(target.owner_class, target.method)]


def what_is_missing(found: list[Target]) -> str | None:
    """Why changes of weights would go unnoticed in a scheduler, or None when they do not."""
    names = {target.method for target in found}
    missing = [name for name in ("flush_cache", *_UPDATES[:3]) if name not in names]
    if SCHEDULER not in sys.modules or not missing:
        return None
    return (
        f"SGLang's {', '.join(missing)} cannot be watched, so that new weights would be served old "
        "embeddings; look for an earlier error of SGLang's plug-in registry, or use a release that "
        "docs/sglang.md lists"
    )


def _every_target() -> Iterator[Target]:
    yield Target(module=SCHEDULER, owner="Scheduler", method="flush_cache", around=_around_a_flush)
    for method in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        yield Target(module=SCHEDULER, owner="Scheduler", method=method, around=_around_an_adapter)
    yield Target(
        module=SCHEDULER,
        owner="Scheduler",
        method="record_weight_version_change",
        around=_around_an_update,
    )
    for module, owner in _UPDATERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            for method in _UPDATES:
                yield Target(module=module, owner=owner, method=method, around=_around_an_update)


def _around_a_flush(original: Around, *args: Any, **kwargs: Any) -> Any:
    """``flush_cache`` is refused while requests run; only one that was done empties memory."""
    flushed = original(*args, **kwargs)
    if flushed:
        for cache in _caches():
            cache.clear_memory()
    return flushed


def _around_an_update(original: Around, *args: Any, **kwargs: Any) -> Any:
    """Also one that fails may have changed some weights."""
    try:
        return original(*args, **kwargs)
    finally:
        for cache in _caches():
            cache.weights_changed()


def _around_an_adapter(original: Around, *args: Any, **kwargs: Any) -> Any:
    """An adapter is loaded while the server runs; it may reach the encoder."""
    request = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
    path = str(getattr(request, "lora_path", "") or "")
    reason = ""
    if reach_the_encoder([path]) is not None:
        reason = f"the LoRA adapter {path!r} changes the encoder, or cannot be read to rule it out"
    for cache in _caches():
        cache.adapter_loaded(reason)
    return original(*args, **kwargs)


def _caches() -> list[Any]:
    from tiered_mmcache.integrations.sglang.cache import live_caches

    return list(live_caches)
