"""Putting the cache in place of SGLang's, and checking that it is.

Owns: the two ways: SGLang's registry of hooks, and changing its modules as they are imported.
Does not own: what is put in place (:mod:`.cache`, :mod:`.invalidation`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tiered_mmcache.config import CacheConfig, load_config
from tiered_mmcache.integrations.sglang import invalidation
from tiered_mmcache.integrations.sglang.plan import Plan, plan_for
from tiered_mmcache.integrations.sglang.release import Release, installed_release
from tiered_mmcache.metrics.remedies import log_fields

CACHE_MODULE = "sglang.srt.mem_cache.multimodal_cache"
CACHE_CLASS = "MultiModalStaticCache"
_NOT_ACTIVE = (
    "the tiered cache is not active, SGLang uses its own: %s. Look for an earlier error of "
    "SGLang's plug-in registry, and for another plug-in that replaces MultiModalStaticCache"
)
_PLUGIN = log_fields("plugin", "Look for an earlier error, and for another plug-in.")

log = logging.getLogger("tiered_mmcache")


class Activation:
    """What is put in place in one process.

    Args:
        config: The user's configuration.
        release: The SGLang that is installed.

    Attributes:
        broken: Why this process is refused lower tiers; filled before the first cache is made.
    """

    def __init__(self, config: CacheConfig, release: Release) -> None:
        self._config = config
        self._release = release
        self.broken: list[str] = []

    def plan(self, max_size: int) -> Plan:
        """What a cache of that size gets; whatever goes wrong here must not end the server."""
        try:
            return plan_for(max_size, self._config, self._release, self.broken)
        except Exception as error:
            log.exception("what the server has cannot be read", extra=log_fields("internal"))
            alone = self._config.model_copy(update={"host": None, "disk": None})
            return Plan(hot_bytes=max_size, config=alone, refused=(f"{error!r}, see above",))

    def cache_class(self) -> type:
        """The class for ``MultiModalStaticCache``; imports SGLang's module and torch."""
        from tiered_mmcache.integrations.sglang.cache import cache_class

        module = importlib.import_module(CACHE_MODULE)
        return cache_class(module, raw=self._release.stores_raw_tensors, make_plan=self.plan)


def activation_for(path: str) -> Activation:
    """Check release and configuration.

    Raises:
        UnsupportedEngineError: SGLang is missing, or too old.
        ConfigError: The YAML cannot be used.
    """
    release = installed_release()
    if release.is_newer_than_tested:
        log.warning(
            "SGLang %s is newer than what the tiered cache was tested with",
            release.text,
            extra=log_fields("untested_release", "Upgrade this package, or watch the first hour."),
        )
    return Activation(load_config(path), release)


# Through SGLang's registry


def register_hooks(path: str) -> None:
    """Register everything with SGLang's registry, which applies it after all plug-ins ran."""
    if _is_ours(_loaded_class()):
        return
    activation = activation_for(path)
    replacement = activation.cache_class()
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks, kinds = registry.HookRegistry, registry.HookType
    hooks.register(f"{CACHE_MODULE}.{CACHE_CLASS}", replacement, kinds.REPLACE)
    targets = invalidation.targets()
    for target in targets:
        hooks.register(target.path, target.around, kinds.AROUND)
    if not targets:
        _on_import(invalidation.SCHEDULER, lambda _: _wrap_methods(activation))
    before = {target.path: getattr(target.owner_class, target.method) for target in targets}

    def check() -> None:
        problem = _what_is_not_replaced(replacement)
        if problem is not None:
            log.error(_NOT_ACTIVE, problem, extra=_PLUGIN)
        unchanged = [t for t in targets if getattr(t.owner_class, t.method) is before[t.path]]
        _refuse_if_unnoticed(activation, [t for t in targets if t not in unchanged])

    _after_next_call(hooks, "apply_hooks", check)


def _after_next_call(owner: type, name: str, then: Callable[[], None]) -> None:
    """Run something after the next call of a class method, which is then as it was.

    SGLang logs a hook that fails and goes on, so only after all are applied can be seen which are.
    """
    original = owner.__dict__[name]

    def call_and_check(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        result = getattr(owner, name)(*args, **kwargs)
        then()
        return result

    setattr(owner, name, staticmethod(call_and_check))


# Without a registry


def install_on_import(path: str) -> None:
    """Change SGLang's modules as they are imported, or at once where they already are.

    Raises:
        UnsupportedEngineError: SGLang is missing, or too old. The YAML is read later, when it is
            known that this process uses SGLang.
    """
    installed_release()
    activation = functools.cache(lambda: activation_for(path))

    def replace_class(module: ModuleType) -> None:
        if _is_ours(getattr(module, CACHE_CLASS)):
            return
        original = getattr(module, CACHE_CLASS)
        replacement = activation().cache_class()
        _rebind(original, replacement)
        problem = _what_is_not_replaced(replacement)
        if problem is not None:
            log.error(_NOT_ACTIVE, problem, extra=_PLUGIN)

    _on_import(CACHE_MODULE, replace_class)
    _on_import(invalidation.SCHEDULER, lambda _: _wrap_methods(activation()))


def _rebind(original: object, replacement: object) -> None:
    """Put an object in place of another under every name that a module of SGLang has for it."""
    for name, module in list(sys.modules.items()):
        if name == "sglang" or name.startswith("sglang."):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def _wrap_methods(activation: Activation) -> None:
    targets = invalidation.targets()
    for target in targets:
        _wrap(target)
    _refuse_if_unnoticed(activation, targets)


def _wrap(target: invalidation.Target) -> None:
    original = getattr(target.owner_class, target.method)
    if getattr(original, "__wrapped_for__", None) == __name__:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return target.around(original, *args, **kwargs)

    wrapped.__wrapped_for__ = __name__  # type: ignore[attr-defined]
    setattr(target.owner_class, target.method, wrapped)


def _on_import(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        _guarded(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def _guarded(then: Callable[[ModuleType], None], module: ModuleType) -> None:
    """An import of SGLang must not fail because of us."""
    try:
        then(module)
    except Exception:
        log.exception(
            "the tiered cache is not active, SGLang uses its own", extra=log_fields("internal")
        )


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls something once, right after a module was imported for the first time."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, whose loader tells us when it is done."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            _guarded(then, module)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


# Checking


def _loaded_class() -> object:
    return getattr(sys.modules.get(CACHE_MODULE), CACHE_CLASS, None)


def _is_ours(candidate: object) -> bool:
    return getattr(candidate, "__module__", "").startswith(__name__.rpartition(".")[0])


def _what_is_not_replaced(replacement: type) -> str | None:
    for name, module in list(sys.modules.items()):
        found = vars(module).get(CACHE_CLASS) if name.startswith("sglang.") else None
        if isinstance(found, type) and found is not replacement:
            return f"{name}.{CACHE_CLASS} is {found.__module__}.{found.__qualname__}"
    return None


def _refuse_if_unnoticed(activation: Activation, wrapped: list[invalidation.Target]) -> None:
    problem = invalidation.what_is_missing(wrapped)
    if problem is not None:
        activation.broken.append(problem)
