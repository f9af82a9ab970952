"""How the work's end becomes an exit code, also when a signal ends it."""

import errno
import os
import signal
import subprocess
import sys

import lmdb
import pytest
import typer

from mmcache_tools.inspection import outcome
from mmcache_tools.inspection.outcome import ExitCode
from tiered_mmcache.errors import ConfigError, RecordError, StoreUnavailableError


def _raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (outcome.UsageError("write this"), ExitCode.USAGE, "mmcache: write this"),
        (
            ConfigError(file="f.yaml", key="disk", value=1, problem="no", remedy="Do."),
            ExitCode.CANNOT_OPEN,
            "f.yaml: disk",
        ),
        (
            StoreUnavailableError(path="p", cause="c", problem="gone", remedy="Do."),
            ExitCode.CANNOT_OPEN,
            "p: gone. Do.",
        ),
        (RecordError("digest", "bad row"), ExitCode.CANNOT_OPEN, "bad row"),
        (lmdb.CorruptedError("page"), ExitCode.CANNOT_OPEN, "(damaged)"),
        (OSError(errno.ENOSPC, "No space left"), ExitCode.CANNOT_OPEN, "No space left"),
    ],
)
def test_each_error_is_one_line(error, code, says, capsys):
    with pytest.raises(typer.Exit) as ended:
        outcome.ended(_raising(error))
    assert ended.value.exit_code == code
    written = capsys.readouterr()
    assert says in written.err
    assert len(written.err.splitlines()) == 1
    assert written.out == ""


def test_output_that_is_captured_has_no_descriptor(monkeypatch):
    assert not outcome._writes_to_descriptors()
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", None)
    assert not outcome._writes_to_descriptors()


def _in_process(work, *, send=None):
    """Run ``work`` (source text) as a command of its own process."""
    script = (
        "import os, signal, sys, time\n"
        "from mmcache_tools.inspection import outcome\n"
        f"def work():\n    {work}\n"
        "try:\n    outcome.ended(work)\n"
        "except outcome.typer.Exit as ended:\n    sys.exit(ended.exit_code)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if send is not None:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(send)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGABRT"])
def test_a_signal_of_damage_is_explained(name):
    code, _, err = _in_process(f"print('partly'); os.kill(os.getpid(), signal.{name})")
    assert code == ExitCode.CANNOT_OPEN
    (line,) = err.splitlines()
    assert f"reading it ended in {name}" in line


def test_another_signal_ends_the_command_as_it_would_end_it():
    assert _in_process("os.kill(os.getpid(), signal.SIGKILL)")[0] == 128 + signal.SIGKILL


def test_a_request_to_end_reaches_the_work():
    code, _, _ = _in_process("print('ready', flush=True); time.sleep(60)", send=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM


def test_an_interrupt_ends_quietly():
    assert _in_process("raise KeyboardInterrupt") == (130, "", "")


def test_our_own_bug_keeps_its_traceback():
    code, _, err = _in_process("raise ZeroDivisionError")
    assert code == ExitCode.CANNOT_OPEN
    assert "Traceback" in err


def test_a_child_that_ends_does_not_flush_twice():
    code, out, _ = _in_process("print('once'); return 1")
    assert (code, out) == (1, "once\n")


def test_text_that_the_terminal_cannot_encode_is_escaped(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert _in_process("print('\\u2026'); return 0") == (0, "\\u2026\n", "")


def test_the_work_is_done_in_another_process():
    _, out, _ = _in_process("print(os.getpid(), os.getppid()); return 0")
    child, parent = map(int, out.split())
    assert child != parent
    assert os.getpid() not in (child, parent)
