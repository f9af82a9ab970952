"""Measurements that end badly on purpose, or that no two systems need take turns at.

Owns: faults, kills and full disks from outside; the busy loop; growth.
Does not own: what a child does in them (:mod:`.measuring`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any

from mmcache_tools.peers.environments import CannotRunError
from mmcache_tools.peers.turns import Systems

FAULTS = {
    "truncated": "each large file cut to half",
    "flipped": "one bit in each quarter of a MiB",
    "full": "a disk of 24 MiB for 48 entries of 1 MiB",
    "killed": "SIGKILL while it stores without end",
}
_FULL = 'mount -t tmpfs -o size=24m none "$0" && exec "$@"'
_KILLED_KEYS = 64
_FAULT_S = 45.0


def faults(systems: Systems, chosen: Iterable[str] = FAULTS) -> dict[str, Any]:
    """Fault to system to how many answers were of which kind; and the failures."""
    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for fault in chosen:
        for name in systems.different:
            described = systems.described[name]
            if "disk" not in described["tiers"]:
                continue
            if fault == "killed" and "restart" in described["cannot"]:
                continue
            systems.say(f"faults: {fault}, {name}")
            try:
                outcome = _outcome(systems, name, fault)
                found.setdefault(fault, {})[name] = outcome
            except CannotRunError as error:
                failures[f"{name}, {fault}"] = str(error)
    return {"figures": found, "failures": failures}


def _outcome(systems: Systems, name: str, fault: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        if fault == "killed":
            _kill_in_mid_write(systems, name, folder)
            options: dict[str, Any] = {"fault": "read", "keys": _KILLED_KEYS}
            return systems.ask(name, "faults", limit_s=_FAULT_S, folder=folder, **options)
        if fault != "full":
            return systems.ask(name, "faults", limit_s=_FAULT_S, folder=folder, fault=fault)
        small_disk = (*_own_mounts(), "sh", "-c", _FULL, folder)
        with systems.new_child(name, before=small_disk) as child:
            return child.ask("faults", _FAULT_S, folder=folder, fault=fault)


def _kill_in_mid_write(systems: Systems, name: str, folder: str) -> None:
    child = systems.new_child(name)
    try:
        child.ask("faults", 1.5, fault="write", folder=folder)
    except CannotRunError:
        return  # it never answers: after its time it is killed
    finally:
        child.kill()
    raise AssertionError("storing without end has ended")


def _own_mounts() -> tuple[str, ...]:
    """Begins a command that may mount without anybody else seeing it."""
    return ("unshare", "--mount") + (() if os.geteuid() == 0 else ("--map-root-user",))


def interference(systems: Systems, *, size_bytes: int, seconds: float) -> dict[str, Any]:
    """System to percentiles of the busy loop's turns and of the calls."""
    return _each(systems, "interference", size_bytes=size_bytes, seconds=seconds)


def growth(systems: Systems, *, most: int, fill_s: float) -> dict[str, Any]:
    """System to look-ups among ever more entries."""
    return _each(systems, "growth", most=most, fill_s=fill_s)


def _each(systems: Systems, what: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name in systems.different:
        systems.say(f"{what}: {name}")
        try:
            found[name] = systems.ask(name, what, **options)
        except CannotRunError as error:
            failures[f"{name}, {what}"] = str(error)
    return {"figures": found, "failures": failures}
