"""`mmcache config check`: what a configuration comes to on this machine, or what is wrong with it.

Owns: the text and the JSON. Does not own: the rules (:mod:`tiered_mmcache.config`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import print_json, printable, written_bytes
from tiered_mmcache.config import CacheConfig, load_config
from tiered_mmcache.errors import ConfigError

__all__ = ["check_file"]

_SIZES = {"max_size", "clean_ahead", "prefetch", "write_buffer"}


def check_file(file: Path, *, as_json: bool) -> int:
    """Say what the file comes to; the exit code.

    Raises:
        OSError: It cannot be read.
        ConfigError: It is no file.
    """
    if file.is_file():  # opening a pipe would wait for whoever writes to it
        file.open("rb").close()
    else:
        load_config(file)  # says what it is
    try:
        config = load_config(file)
    except ConfigError as error:
        _print_problem(file, error, as_json=as_json)
        return ExitCode.FOUND
    if as_json:
        _print_answer(file, problem=None, configuration=_plain(config))
        return ExitCode.FINE
    for key, value in _lines(_plain(config)):
        print(f"{key:<32} {value}")
    return ExitCode.FINE


def _print_problem(file: Path, error: ConfigError, *, as_json: bool) -> None:
    if not as_json:
        complain(str(error))
        return
    problem = {
        "key": error.key,
        "value": None if error.value is None else str(error.value),
        "problem": error.problem,
        "remedy": error.remedy,
    }
    _print_answer(file, problem=problem, configuration=None)


def _print_answer(
    file: Path, *, problem: dict[str, Any] | None, configuration: dict[str, Any] | None
) -> None:
    print_json(
        {
            "command": "config check",
            "file": str(file),
            "ok": problem is None,
            "problem": problem,
            "configuration": configuration,
        }
    )


def _plain(config: CacheConfig) -> dict[str, Any]:
    """Every key with the value that it comes to: sizes in bytes, durations in seconds."""
    plain: dict[str, Any] = json.loads(config.model_dump_json(by_alias=True))
    return plain


def _lines(section: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    lines = []
    for key, value in section.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{before}{key}.")
        else:
            lines.append((before + key, _written(key, value)))
    return lines


def _written(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key in _SIZES:
        return f"{written_bytes(value)} ({value} bytes)"
    return printable(value if isinstance(value, str) else json.dumps(value))
