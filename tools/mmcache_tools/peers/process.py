"""The parent's handle on a child that has one system.

Owns: starting, asking with a limit of time, killing. Does not own: what the child does.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from mmcache_tools.peers.environments import CannotRunError, environment_variables, interpreter
from mmcache_tools.peers.registry import SYSTEMS

_START_S = 120.0


class Child:
    """One process with one system. Ended by ``close``, and by the end of a ``with`` block."""

    def __init__(self, name: str, environments: Path, *, before: tuple[str, ...] = ()) -> None:
        """Start it; ``before`` goes before its command, as ``unshare`` does.

        Raises:
            CannotRunError: It does not start here.
        """
        self.name = name
        python = interpreter(SYSTEMS[name].environment, environments)
        self._log = environments / f"{name}.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [*before, str(python), "-m", "mmcache_tools.peers.child", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment_variables(),
            )
        self._answers = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._answers.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self._answer("start", _START_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, what: str, limit_s: float = 300.0, **options: object) -> Any:
        """What a measurement gave.

        Raises:
            CannotRunError: The system failed at it, died of it, or took longer than the limit.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise CannotRunError(f"{what}: its process was ended")
        try:
            self._process.stdin.write(json.dumps({"what": what, **options}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CannotRunError(f"{what}: its process is gone; {self._last_words()}") from None
        return self._answer(what, limit_s)

    def _answer(self, what: str, limit_s: float) -> Any:
        assert self._process.stdout is not None
        began_s = time.monotonic()
        if not self._answers.select(limit_s):
            self.kill()
            raise CannotRunError(f"{what}: no answer in {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            after_s = time.monotonic() - began_s
            words = self._last_words()
            raise CannotRunError(
                f"{what}: its process ended with {code} in {after_s:.0f} s; {words}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise CannotRunError(f"{what}: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def kill(self) -> None:
        """End it at once, as a fault does."""
        self._process.kill()
        self._end()

    def close(self) -> None:
        """End it in order; at once when it does not."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        self._answers.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
