"""The process that has one system: takes a measurement's name and options, answers with JSON.

Owns: the lines that go to and fro. Does not own: the measurements (:mod:`.measuring`).

Run as ``python -m mmcache_tools.peers.child NAME``. What the system prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, TextIO

import torch

from mmcache_tools.peers.registry import system_class
from mmcache_tools.peers.system import System


def serve(system: type[System], requests: TextIO, answers: TextIO) -> None:
    """Answer each line until there are no more."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"value": _measured(system, request)}
        except Exception as error:  # noqa: BLE001 - whatever a peer does is told, never swallowed
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _measured(system: type[System], request: dict[str, Any]) -> object:
    what = request.pop("what")
    if what == "describe":
        return {
            "name": system.name,
            "version": system.version(),
            "tiers": sorted(system.tiers),
            "cannot": dict(system.cannot),
        }
    module = importlib.import_module(f"mmcache_tools.peers.measuring.{what}")
    return module.measure(system, **request)


def main() -> None:
    """Serve on the pipes that the parent gave."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # one copying thread, as memcpy has
    try:
        system = system_class(sys.argv[1])
        print(json.dumps({"value": "ready"}), file=answers, flush=True)
    except Exception as error:  # noqa: BLE001 - the parent lists the system with this reason
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    serve(system, sys.stdin, answers)
    sys.stderr.flush()
    os._exit(0)  # whatever threads a peer has left


if __name__ == "__main__":
    main()
