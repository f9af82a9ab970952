"""Reading a configuration file: YAML, safely, with the place of each mistake.

Owns: the file, its encoding, its syntax, and keys written twice.
Does not own: what the keys mean (:mod:`tiered_mmcache.config`).
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tiered_mmcache.errors import ConfigError

LARGEST_FILE_BYTES = 1 << 20

_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAPPING_REMEDY = "Write keys with values, such as `hot:` and below it `  max_size: 4GiB`."


class _DuplicateKeyError(yaml.YAMLError):
    """A key is written twice in one mapping; PyYAML alone would keep the last in silence."""

    def __init__(self, key: str, first_line: int, second_line: int) -> None:
        self.key = key
        super().__init__(f"written twice, on lines {first_line} and {second_line}")


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which makes plain values only, refusing duplicate keys as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        line_of: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE_TAG:
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in line_of:
                raise _DuplicateKeyError(key_node.value, line_of[key_node.value], line)
            line_of[key_node.value] = line
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path) -> dict[object, object]:
    """Read the one mapping that ``path`` holds.

    Raises:
        ConfigError: When it cannot be read, is not YAML, or holds something else.
    """
    text = _read_text(path)
    try:
        # _StrictLoader is a SafeLoader: it can make no objects but plain values.
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except _DuplicateKeyError as error:
        raise _error(path, str(error), "Keep one of the two.", key=error.key) from error
    except yaml.MarkedYAMLError as error:
        raise _error(path, *_syntax_problem(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is not YAML that can be read ({_first_line(error)})"
        raise _error(path, problem, "Write plain keys and values.") from error
    if data is None:
        raise _error(path, "holds nothing", _MAPPING_REMEDY)
    if not isinstance(data, dict):
        raise _error(path, f"must hold a mapping, not a {type(data).__name__}", _MAPPING_REMEDY)
    return data


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise _error(path, "is not a file", "Name the YAML file itself.")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise _error(path, "does not exist", "Name a file that does.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(path, f"cannot be read ({reason})", "Make it readable.") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise _error(path, "is larger than 1MiB", "Name the YAML file of the cache.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start})"
        raise _error(path, problem, "Save it as UTF-8.") from error


def _syntax_problem(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    mark = error.problem_mark or error.context_mark
    where = f" on line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"is not valid YAML{where}: {error.problem or error.context}", "Correct that line."


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _error(path: Path, problem: str, remedy: str, *, key: str = "") -> ConfigError:
    return ConfigError(file=str(path), key=key, value=None, problem=problem, remedy=remedy)
