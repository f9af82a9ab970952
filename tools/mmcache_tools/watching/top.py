"""`mmcache top`: the caches that publish in a folder, once or again and again.

Owns: when it is read and drawn, the keyboard, and the exit code.
Does not own: what is drawn (:mod:`.view`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mmcache_tools.inspection.outcome import ExitCode, complain
from mmcache_tools.inspection.rows import print_json
from mmcache_tools.watching.readings import Reading, Source, State, find_source, read_all
from mmcache_tools.watching.view import Pair, view

__all__ = ["watch"]

_QUIT = (b"q", b"Q", b"\x1b", b"\x03", b"\x04", b"")


class _Follower:
    """Remembers of each cache the reading before the newest, to tell rates by."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: dict[Path, Pair] = {}

    def pairs(self) -> list[Pair]:
        """The caches as they are now; those that were closed are left out."""
        try:
            readings = read_all(self._source)
        except FileNotFoundError:
            readings = []
        self._last = {reading.file: self._pair(reading) for reading in readings}
        return list(self._last.values())

    def _pair(self, reading: Reading) -> Pair:
        last = self._last.get(reading.file)
        if last is None:
            return Pair(now=reading)
        newer = reading.written_s > last.now.written_s
        return Pair(now=reading, before=last.now if newer else last.before)


def watch(source: Path | None, *, interval_s: float, once: bool, as_json: bool) -> int:
    """Show the caches until ``q`` or Ctrl-C, or once; the exit code.

    Raises:
        UsageError: Nothing is named, or it publishes nothing.
        ConfigError: The YAML file cannot be used.
        OSError: The folder cannot be read.
    """
    found = find_source(source)
    follower = _Follower(found)
    pairs = follower.pairs()
    if not pairs:
        complain(
            f"no cache publishes its metrics in {found.folder}. Is a server running with "
            "`metrics.folder` set to it, and has it had a request?"
        )
        return ExitCode.CANNOT_OPEN
    if once or as_json or not sys.stdout.isatty():
        return _show_once(found, pairs, as_json=as_json)
    _show_live(found, follower, pairs, interval_s)
    return ExitCode.FINE


def _show_once(source: Source, pairs: list[Pair], *, as_json: bool) -> int:
    if as_json:
        caches: list[dict[str, Any]] = [pair.now.as_dict() for pair in pairs]
        print_json({"command": "top", "folder": str(source.folder), "caches": caches})
    else:
        console = Console(highlight=False)
        with console.capture() as captured:
            console.print(view(pairs, source, console))
        print(captured.get(), end="")
    live = all(pair.now.state is State.LIVE for pair in pairs)
    return ExitCode.FINE if live else ExitCode.FOUND


def _show_live(source: Source, follower: _Follower, pairs: list[Pair], interval_s: float) -> None:
    console = Console(highlight=False)
    hint = Text("q ends", style="dim")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the screen is given back
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys_at_once(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(Group(view(pairs, source, console), Text(""), hint), refresh=True)
            if _was_told_to_quit(interval_s):
                return
            pairs = follower.pairs()


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys are read without a line's end, and not shown, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _was_told_to_quit(timeout_s: float) -> bool:
    """Wait; True when a key says to end, or the keyboard is gone."""
    if not sys.stdin.isatty():
        time.sleep(timeout_s)
        return False
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        pressed = select.select([sys.stdin], [], [], left_s)[0]
        if pressed and os.read(sys.stdin.fileno(), 64) in _QUIT:
            return True
    return False
