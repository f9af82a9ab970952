"""Plain values of options and arguments, converted without a validation library.

Owns: which values need no more than Python's own types. Does not own: the command line
(:mod:`.cli`), or any value that is in doubt: that goes to typer as before, errors included.

typer converts through pydantic from some version on, whose import takes longer than listing a
small store. Commands that look into a store need nothing of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

__all__ = ["convert_plainly"]

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")

Converter = Callable[[Any], Any]


class _InDoubtError(Exception):
    """Not a plain value."""


def convert_plainly(command: Any) -> None:
    """Have a command, and those in it, convert plain values by themselves."""
    for each in getattr(command, "commands", {}).values():
        convert_plainly(each)
    usual = command.get_params

    def get_params(context: Any) -> Any:  # asked for when the command runs, --help included
        parameters = usual(context)
        for each in parameters:
            if "process_value" not in vars(each):
                _convert_plainly(each)
        return parameters

    command.get_params = get_params


def _convert_plainly(parameter: Any) -> None:
    described = getattr(parameter, "type_descriptor", None)  # absent where typer does it by itself
    if described is None:
        return
    convert = _converter(described.annotation, described.parameter_info)
    if convert is None:
        return
    usual = parameter.process_value

    def process_value(context: Any, value: Any) -> Any:
        try:
            absent = value is None and not parameter.required and parameter.nargs == 1
            plain = None if absent else convert(value)
        except _InDoubtError:
            return usual(context, value)
        called = parameter.callback
        return plain if called is None else called(context, parameter, plain)

    parameter.process_value = process_value


def _converter(annotation: Any, info: Any) -> Converter | None:
    """What converts to a type, or None when that is left to typer."""
    if get_origin(annotation) is list:
        each = _converter(get_args(annotation)[0], info)
        return None if each is None else lambda values: _plain_list(values, each)
    if not isinstance(annotation, type) or info.parser is not None:
        return None
    if issubclass(annotation, Enum):
        return lambda value: _plain_choice(value, annotation)
    return {
        bool: _plain_bool,
        str: _plain_text,
        Path: lambda value: _plain_path(value, info),
        int: lambda value: _plain_number(value, info, _WHOLE, int),
        float: lambda value: _plain_number(value, info, _DECIMAL, float),
    }.get(annotation)


def _plain_list(values: Any, each: Converter) -> list[Any]:
    if not isinstance(values, (list, tuple)) or not values:
        raise _InDoubtError
    return [each(value) for value in values]


def _plain_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _InDoubtError
    return value


def _plain_text(value: Any) -> str:
    if type(value) is not str:
        raise _InDoubtError
    return value


def _plain_choice(value: Any, choices: type[Enum]) -> Enum:
    for choice in choices:
        if value is choice or (type(value) is str and value == choice.value):
            return choice
    raise _InDoubtError


def _plain_path(value: Any, info: Any) -> Path:
    """A path of which nothing is asked but, perhaps, that it can be read if it is there."""
    asked = (info.exists, info.writable, info.resolve_path, info.allow_dash, info.path_type)
    if any(asked) or not (info.file_okay and info.dir_okay):
        raise _InDoubtError
    if not isinstance(value, (str, Path)) or "\0" in str(value):
        raise _InDoubtError
    if info.readable and os.path.exists(value) and not os.access(value, os.R_OK):  # noqa: PTH110
        raise _InDoubtError
    return Path(value)


def _plain_number(value: Any, info: Any, form: re.Pattern[str], kind: type[Any]) -> Any:
    if type(value) is str and form.fullmatch(value) and value.isascii():
        value = kind(value)
    if type(value) is not kind or info.clamp:
        raise _InDoubtError
    too_small = info.min is not None and value < info.min
    if too_small or (info.max is not None and value > info.max):
        raise _InDoubtError
    return value
