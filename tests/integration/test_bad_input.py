"""Whatever a command is given, it ends with one clear line, a documented code, and no traceback."""

import errno
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE
from tiered_mmcache.disk import layout
from tiered_mmcache.disk.folder import FORMAT_FILE

LONG = "k" * 5000
NUMBERS = [f"--{name}" for name in ("older-than", "newer-than", "larger-than", "smaller-than")]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*arguments, **options):
    command = [sys.executable, "-m", "mmcache_tools", *map(str, arguments)]
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, text=True, timeout=60, check=False, **{**kept, **options})


def run_here(*arguments):
    """The same in this process, which is quicker."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return types.SimpleNamespace(
        returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr
    )


def refused(result, *parts, code=3):
    """One line on stderr that says what to do, and nothing on stdout."""
    assert result.returncode == code, result.stderr
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("mmcache: ")
    assert line.endswith((".", "?", "`"))
    for part in parts:
        assert part in line
    assert "[Errno" not in line


ON_A_STORE = {
    "ls": ["ls", "STORE"],
    "ls --tree": ["ls", "STORE", "--tree", "--json"],
    "ls --sort": ["ls", "STORE", "--sort", "key"],
    "show": ["show", "STORE", "7"],
    "stats": ["stats", "STORE"],
    "verify": ["verify", "STORE"],
    "verify --repair": ["verify", "STORE", "--repair"],
    "rm": ["rm", "STORE", "7"],
    "prune": ["prune", "STORE", "--to-size", "1"],
    "prune --dry-run": ["prune", "STORE", "--older-than", "1d", "--dry-run"],
    "compact": ["compact", "STORE"],
    "copy": ["copy", "STORE", "copied"],
    "export": ["export", "STORE", "7", "--out", "out"],
    "export --all": ["export", "STORE", "--all", "--out", "out"],
}


def _a_file(store):
    shutil.rmtree(store)
    store.write_text("some text\n" * 10)


def _a_pipe(store):
    shutil.rmtree(store)
    os.mkfifo(store)


def _replaced(name, make):
    def damage(store):
        (store / name).unlink(missing_ok=True)
        make(store / name)

    return damage


def _cut(length):
    return lambda store: os.truncate(store / layout.DATA_FILE, length)


BAD_STORES = {
    "nothing there": (shutil.rmtree, "there is no such folder or file"),
    "a file": (_a_file, "must hold a mapping"),
    "a pipe": (_a_pipe, "is not a file"),
    "an empty folder": (lambda store: (shutil.rmtree(store), store.mkdir()), "no store here"),
    "a folder in place of the data": (_replaced("data.mdb", os.mkdir), "no store here"),
    "a folder in place of the lock": (_replaced("lock.mdb", os.mkdir), "Is a directory. Move the"),
    "a link to nowhere": (_replaced("data.mdb", lambda p: p.symlink_to("/no")), "no store here"),
    "a link to itself": (_replaced("data.mdb", lambda p: p.symlink_to(p)), "no store here"),
    "a pipe in place of the data": (_replaced("data.mdb", os.mkfifo), "no store here"),
    "an empty file": (_cut(0), "no store here"),
    "half a meta page": (_cut(100), "is not LMDB's"),
    "meta pages alone": (_cut(9000), "of "),
    "a later format": (
        lambda store: (store / FORMAT_FILE).write_text("99\n"),
        "has format version 99",
    ),
}


@pytest.mark.parametrize("damage", BAD_STORES)
@pytest.mark.parametrize("command", ON_A_STORE)
def test_what_is_no_store(maker, tmp_path, damage, command):
    maker.put_many(20)
    maker.folder.chmod(0o700)
    make, says = BAD_STORES[damage]
    make(maker.folder)
    before = sorted(tmp_path.rglob("*"))
    refused(run_here(*[maker.folder if a == "STORE" else a for a in ON_A_STORE[command]]), says)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ON_A_STORE)
@pytest.mark.parametrize(
    ("place", "says"),
    [("file/deeper", "no such folder or file"), ("x" * 300, "File name too long")],
    ids=["through a file", "a long name"],
)
def test_paths_that_lead_nowhere(tmp_path, command, place, says):
    (tmp_path / "file").write_text("x")
    refused(run_here(*[place if a == "STORE" else a for a in ON_A_STORE[command]]), says)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["rm", "STORE", LONG], 1, "has no entry"),
        (["show", "STORE", LONG], 1, "has no entry"),
        (["show", "STORE", ""], 1, "has no entry ''"),
        (["export", "STORE", LONG, "--out", "o"], 2, "there is no entry"),
        (["rm", LONG], 2, "no store is named"),
        (["show", LONG], 2, "no store is named"),
        (["prune", "STORE", "--to-size", "-1"], 2, "--to-size '-1'"),
        (["prune", "STORE"], 2, "say what is to go"),
        *((["ls", "STORE", each, "many"], 2, f"{each} 'many'") for each in NUMBERS),
        (["export", "STORE", "7", "--out", "file"], 3, "file: File exists"),
        (["export", "STORE", "7", "--out", "file/x"], 3, "file/x: Not a directory"),
        (["export", "STORE", "7", "--out", "/proc/x"], 3, "/proc/x: No such file"),
        (["copy", "STORE", "file"], 3, "Name a folder that is not there yet"),
        (["copy", "STORE", "STORE"], 2, "lies in the store itself"),
        (["copy", "STORE", "STORE/inside"], 2, "lies in the store itself"),
        (["copy", "STORE", "/proc/x"], 3, "Set disk.path to a place that is there"),
        (["import", "STORE", "file.npy"], 3, "is not a file"),
        (["import", "YAML", "nowhere"], 2, "nowhere is no file"),
        (["import", "YAML", "file.npy"], 2, "it is no .npy file"),
        (["import", "YAML", "zip.npy"], 2, "it is no .npy file"),
        (["import", "YAML", "file.safetensors"], 2, "it is no safetensors file"),
        (["import", "YAML", "far.safetensors"], 2, "cannot be read"),
        (["import", "YAML", "file.pt"], 2, "it is no .pt file"),
        (["import", LONG, "file.npy"], 3, "File name too long"),
        (["config", "check", "nowhere.yaml"], 3, "does not exist"),
        (["config", "check", "STORE"], 3, "is not a file"),
        (["config", "check", "pipe"], 3, "is not a file"),
        (["config", "check", LONG], 3, "File name too long"),
        (["config", "init", "--out", "file"], 2, "file is there already"),
        (["config", "init", "--out", "file/x"], 3, "Not a directory"),
        (["workload", "zipf", "--out", "file/x"], 3, "Not a directory"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_arguments_that_cannot_be_followed(maker, tmp_path, arguments, code, says):
    maker.put_many(20)
    for name in ("file", "file.npy", "file.safetensors", "file.pt"):
        (tmp_path / name).write_text("no tensors\n" * 3)
    os.mkfifo("pipe")
    head = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,1000000000000000000]}}'
    (tmp_path / "far.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    np.savez("zip.npz", a=np.zeros(3))
    (tmp_path / "zip.npz").rename("zip.npy")
    disk = {"path": str(tmp_path / "filled"), "max_size": "1GiB"}
    sections = {"namespace": "n", "hot": {"max_size": "1MiB", "device": "cpu"}, "disk": disk}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(sections))
    places = {"STORE": str(maker.folder), "YAML": "c.yaml"}
    for name, place in places.items():
        arguments = [each.replace(name, place) for each in arguments]
    refused(run_here(*arguments), says, code=code)


def test_no_end_is_too_many(maker):
    maker.put_many(3)
    assert "3 of 3 entries" in run("ls", maker.folder, "--limit", 2**70).stdout


def test_damage_in_the_middle_of_a_listing_is_called_damage(maker):
    """LMDB also refuses what is read in the same transaction after a page that it cannot read."""
    maker.put_many(2000)
    file = maker.folder / layout.DATA_FILE
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(1)
    for at in rng.integers(2 * 4096, len(data) - 8, 400):
        data[at : at + 8] = rng.bytes(8)
    file.write_bytes(data)
    ends = {}
    for command, arguments in ON_A_STORE.items():
        result = run(*[maker.folder if a == "STORE" else a for a in arguments])
        ends[command] = result.returncode
        assert result.returncode in (0, 1, 2, 3), (command, result.stderr)
        assert "Traceback" not in result.stderr
        assert "(io_error)" not in result.stderr
        if result.returncode == 3:
            assert result.stderr.splitlines()[-1].startswith("mmcache: ")
        file.write_bytes(data)
    assert 3 in ends.values()


# The standard streams


@pytest.mark.parametrize(
    "arguments", [["--help"], ["ls", "STORE", "--json"], ["stats", "STORE"], ["config", "schema"]]
)
def test_output_that_cannot_be_written(maker, arguments):
    maker.put_many(200)
    arguments = [maker.folder if each == "STORE" else each for each in arguments]
    with Path("/dev/full").open("w") as full:
        refused(run(*arguments, stdout=full), "No space left on device. Free space")


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "STORE"], ["verify", "STORE"]])
def test_output_that_nobody_reads(maker, arguments):
    maker.put_many(2000)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [maker.folder if each == "STORE" else each for each in arguments]
    result = run(*arguments, stdout=writing)
    os.close(writing)
    assert result.stderr == ""
    assert result.returncode == (1 if arguments == ["--help"] else 0)  # typer's own for its help


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(maker, closed):
    """What is opened next must not get their numbers: output would be written into it."""
    maker.put_many(20)
    for command in ("ls", "prune --to-size 1GiB", "verify"):
        line = f'exec "$0" -m mmcache_tools {command.replace(" ", f" {maker.folder} ", 1)} {closed}'
        if " " not in command:
            line = f'exec "$0" -m mmcache_tools {command} {maker.folder} {closed}'
        result = subprocess.run(
            ["sh", "-c", line, sys.executable], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    assert "all is well" in run("verify", maker.folder).stdout


@pytest.mark.parametrize(
    ("limit", "value", "arguments", "says"),
    [
        (resource.RLIMIT_NOFILE, 5, ["ls", "STORE"], "ulimit -n"),
        (resource.RLIMIT_FSIZE, 1024, ["copy", "STORE", "copied"], "ulimit -f"),
        (resource.RLIMIT_FSIZE, 10, ["export", "STORE", "--all", "--out", "out"], "ulimit -f"),
    ],
)
def test_limits_of_the_process(maker, limit, value, arguments, says):
    maker.put_many(20)
    arguments = [maker.folder if each == "STORE" else each for each in arguments]
    # Measured, it would complain that its own data cannot be written.
    unmeasured = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    result = run(
        *arguments,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
        env=unmeasured,
    )
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("mmcache: ")
    assert says in line


@pytest.mark.parametrize("arguments", [["ls", "STORE"], ["ls", "STORE", "--json"]])
def test_an_interrupt_at_a_terminal_ends_quietly(maker, arguments):
    """Ctrl-C while output waits for its reader; the terminal sends it to parent and child."""
    maker.put_many(5000)
    master, slave = pty.openpty()
    arguments = [str(maker.folder) if each == "STORE" else each for each in arguments]
    command = [sys.executable, "-m", "mmcache_tools", *arguments]
    with subprocess.Popen(
        command, stdout=slave, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        os.close(slave)
        assert os.read(master, 10)  # it has begun, and cannot end: the terminal holds a few KiB
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    os.close(master)
    assert process.returncode == 130
    assert err == b""


def test_every_error_of_the_system_has_a_remedy():
    from mmcache_tools.inspection import outcome

    for number in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EIO, 0, None):
        error = OSError(number, "the problem", "the file")
        says = outcome._what_the_system_says(error)
        assert says.startswith("the file: the problem. ")
        assert len(says) > len("the file: the problem. ")
