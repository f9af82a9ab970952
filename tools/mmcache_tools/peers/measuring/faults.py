"""What a system serves after damage: whole embeddings, misses, errors, or something else.

Owns: the damage, and judging each answer bit by bit. Does not own: killing; the parent does that.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from mmcache_tools.peers.system import Budgets, System, embedding, is_whole

_MIB = 1024 * 1024
_ROWS = 146  # about a MiB
_ENTRIES = 12
_LARGE_BYTES = _MIB // 4
_SETTLE_S = 0.3  # a system that waits for room on a full disk is not waited for


def measure(system: type[System], *, fault: str, folder: str, keys: int = 0) -> dict[str, int]:
    """How many answers were right, missing, wrong, or an error; and of sets, refused or an error.

    Args:
        system: What is measured, with hardly any memory: its answers come from disk.
        fault: ``truncated``, ``flipped``, ``full``; ``write`` stores without end, ``read`` looks.
        folder: Where the files are.
        keys: For ``read``: how many keys are asked for.
    """
    size = (_ROWS + 1) * 7168
    budgets = Budgets(folder=Path(folder), hot_bytes=2 * size, disk_bytes=64 * size)
    cache = system(budgets)
    if fault == "write":
        for key in itertools.count():
            cache.set(key % 64, embedding(key % 64, _ROWS))
    if fault == "read":
        outcome = _answers(cache, keys)
        cache.close()
        return outcome
    outcome = _fill(cache, 48 if fault == "full" else _ENTRIES)
    if fault != "full":
        if "restart" not in system.cannot:
            cache.close()
        _damage(Path(folder), fault)
        if "restart" not in system.cannot:
            cache = system(budgets)
    outcome |= _answers(cache, 48 if fault == "full" else _ENTRIES)
    cache.close()
    return outcome


def _fill(cache: System, number: int) -> dict[str, int]:
    outcome = {"refused": 0, "set_errors": 0}
    for key in range(number):
        try:
            outcome["refused"] += not cache.set(key, embedding(key, _ROWS))
            cache.settle(_SETTLE_S)
        except Exception as error:  # noqa: BLE001 - what a peer raises is the finding
            print(f"set {key}: {error!r}")
            outcome["set_errors"] += 1
    return outcome


def _damage(folder: Path, fault: str) -> None:
    for file in folder.rglob("*"):
        if not file.is_file() or file.stat().st_size < _LARGE_BYTES:
            continue
        size_bytes = file.stat().st_size
        with file.open("r+b") as opened:
            if fault == "truncated":
                opened.truncate(size_bytes // 2)
                continue
            for place in range(_LARGE_BYTES // 2, size_bytes, _LARGE_BYTES):  # some in each entry
                opened.seek(place)
                byte = opened.read(1)
                opened.seek(place)
                opened.write(bytes([byte[0] ^ 1]))


def _answers(cache: System, number: int) -> dict[str, int]:
    outcome = {"right": 0, "missing": 0, "wrong": 0, "get_errors": 0}
    for key in range(number):
        try:
            found = cache.get(key)
            if found is None:
                outcome["missing"] += 1
            else:
                wanted_rows = found.dim() == 2 and found.shape[0] == _ROWS
                outcome["right" if wanted_rows and is_whole(key, found) else "wrong"] += 1
        except Exception as error:  # noqa: BLE001 - what a peer raises is the finding
            print(f"get {key}: {error!r}")
            outcome["get_errors"] += 1
    return outcome
