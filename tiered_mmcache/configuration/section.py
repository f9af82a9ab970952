"""The base of each section of the configuration, and its one kind of error.

Owns: where a configuration comes from, and turning what a validator or pydantic found into the
:class:`~tiered_mmcache.errors.ConfigError` that names file, key, value and remedy.
Does not own: the keys (:mod:`tiered_mmcache.config`) and their rules
(:mod:`tiered_mmcache.configuration.rules`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from tiered_mmcache.configuration.quantities import UnusableValueError
from tiered_mmcache.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails
    from typing_extensions import Self

_REFERENCE = "docs/configuration.md lists what each key takes."


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a configuration comes from; validators get it as pydantic's context.

    Attributes:
        file: The file, as errors name it.
        base: The folder in which relative paths start; None is the working directory.
        check_machine: Whether sizes beyond this machine are refused.
    """

    file: str | None = None
    base: Path | None = None
    check_machine: bool = True


def origin_of(info: ValidationInfo) -> Origin:
    """Tell where the configuration being validated comes from."""
    return info.context if isinstance(info.context, Origin) else Origin()


class Section(BaseModel):
    """One mapping of the configuration; what is wrong with it is raised as ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    section: ClassVar[str] = ""
    example: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _name_mistakes(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        file = origin_of(info).file
        if isinstance(data, Mapping):
            _refuse_unknown_keys(cls, data, file)
        try:
            section = handler(data)
            section.check_together()
        except ValidationError as error:
            raise _config_error(cls, error.errors(include_url=False)[0], file) from error
        except UnusableValueError as error:
            raise _from_rule(error, _dotted(cls, error.key or ""), None, file) from error
        return section

    def check_together(self) -> None:
        """Check what concerns several keys.

        Raises:
            UnusableValueError: With the key at fault, relative to this section.
        """


def _refuse_unknown_keys(model: type[Section], data: Mapping[Any, Any], file: str | None) -> None:
    """Report these first: a key that is missing is often one that is misspelt."""
    keys = _written_keys(model)
    for key, value in data.items():
        if key in keys or key in model.model_fields:
            continue
        close = difflib.get_close_matches(str(key), keys, n=1)
        remedy = f"Did you mean {close[0]}?" if close else f"The keys here are {', '.join(keys)}."
        raise ConfigError(
            file=file,
            key=_dotted(model, str(key)),
            value=value,
            problem="there is no such key",
            remedy=remedy,
        )


def _config_error(model: type[Section], found: ErrorDetails, file: str | None) -> ConfigError:
    cause = found.get("ctx", {}).get("error")
    name = str(found["loc"][0]) if found["loc"] else ""
    key, value = _dotted(model, name), found["input"]
    if isinstance(cause, UnusableValueError):
        return _from_rule(cause, key, value, file)
    if found["type"] == "missing":
        value, problem = None, "is missing"
        remedy = f"Write {model.example}" if model.example else _REFERENCE
    elif found["type"] in ("model_type", "model_attributes_type"):
        problem, remedy = "must be a mapping of keys", f"Write {model.example}"
    elif (
        found["type"] == "extra_forbidden"
    ):  # unknown keys are refused before: a name and its alias
        problem, remedy = "the same setting is given under two names", "Keep one of the two."
    else:
        problem, remedy = _type_problem(_field(model, name), found)
    return ConfigError(file=file, key=key, value=value, problem=problem, remedy=remedy)


def _from_rule(rule: UnusableValueError, key: str, value: object, file: str | None) -> ConfigError:
    return ConfigError(file=file, key=key, value=value, problem=rule.problem, remedy=rule.remedy)


def _type_problem(field: FieldInfo | None, found: ErrorDetails) -> tuple[str, str]:
    choices = _choices(field)
    if choices:
        return (
            "this is not one of the choices",
            f"Write {', '.join(choices[:-1])} or {choices[-1]}.",
        )
    is_text = found["type"] == "string_type"
    return ("this must be text", "Put it in quotes.") if is_text else (found["msg"], _REFERENCE)


def _choices(field: FieldInfo | None) -> list[str]:
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return [
        str(choice.value)
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, Enum)
        for choice in kind
    ]


def _field(model: type[Section], key: str) -> FieldInfo | None:
    return next((f for n, f in model.model_fields.items() if key in (n, f.alias)), None)


def _written_keys(model: type[Section]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _dotted(model: type[Section], key: str) -> str:
    return ".".join(part for part in (model.section, key) if part)
