"""Loading one module of a large package without the rest of it.

Owns: the stand-ins for what such a module imports and does not need here.
Does not own: which modules those are; each adapter says so.

A stand-in has any attribute that it is asked for: a class that does nothing.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class Nothing:
    """Stands for anything of a package that is not loaded."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __class_getitem__(cls, _: object) -> type[Nothing]:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _does_nothing


def stand_in(name: str, **attributes: object) -> None:
    """Let ``import name`` find a module of these attributes, and of any other."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    module.__dict__.setdefault("__path__", [])
    module.__dict__["__getattr__"] = _any_attribute
    sys.modules[name] = module


def _any_attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing


def _does_nothing(*_: object, **__: object) -> None:
    pass


def load(name: str) -> Any:
    """A module of the peer; untyped, as it is not there when this project is checked."""
    return importlib.import_module(name)
