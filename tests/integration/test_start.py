"""A command starts at once, because it loads nothing that it does not need."""

import subprocess
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mmcache_tools import plain_values
from mmcache_tools.cli import app
from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE

# What takes long to load: pydantic is for configurations, rich for terminals, numpy for values.
HEAVY = {"torch", "pydantic", "rich", "yaml", "psutil", "numpy", "prometheus_client", "matplotlib"}
STORE = {"lmdb", "msgpack"}
COMMANDS = sorted(typer.main.get_command(app).commands)
PROGRAM = (
    "import atexit, sys\n"
    "from mmcache_tools.inspection import outcome\n"
    "outcome._writes_to_descriptors = lambda: False\n"  # the work is done in this process
    "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    "from mmcache_tools.cli import main\n"
    "main()\n"
)


def loaded(*arguments):
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return {module.partition(".")[0] for module in result.stderr.splitlines()[-1].split()}


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_in_a_pipe_loads_no_part_of_the_cache(name):
    assert not loaded(*name.split(), "--help") & (HEAVY | STORE | {"tiered_mmcache.disk"})


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("ls STORE", set()),
        ("ls STORE --limit 5 --sort key --json --prefix 1 --larger-than 1", set()),
        ("ls STORE --tree", set()),
        ("stats STORE", set()),
        ("verify STORE", set()),
        ("show STORE 7", {"numpy"}),
        ("rm STORE 7", set()),
        ("prune STORE --older-than 1d --dry-run", set()),
        ("prune STORE --to-size 1GiB", set()),
        ("compact STORE", set()),
        ("copy STORE COPY", set()),
    ],
)
def test_a_command_on_a_folder_loads_what_it_needs(maker, tmp_path, monkeypatch, arguments, needed):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    maker.put_many(10)
    places = {"STORE": maker.folder, "COPY": tmp_path / "copy"}
    assert loaded(*[places.get(each, each) for each in arguments.split()]) & HEAVY == needed


PARAMETERS = [
    pytest.param(command, parameter, id=f"{name}-{parameter.name}")
    for name, command in sorted(typer.main.get_command(app).commands.items())
    for parameter in command.params
]
TEXTS = st.text() | st.sampled_from(
    ["", "1", "-1", "01", "1_0", " 1", "1e3", "0.5", "nan", "\u0661", "true", "size", "/", "~", "."]
)


@pytest.mark.parametrize(("command", "parameter"), PARAMETERS)
def test_plain_values_are_converted_as_typer_does(command, parameter):
    """The same value, or left to typer with its errors."""
    described = parameter.type_descriptor
    convert = plain_values._converter(described.annotation, described.parameter_info)
    context = typer.Context(command) if not hasattr(command, "commands") else None

    @given(st.lists(TEXTS, min_size=1) if parameter.nargs == -1 else TEXTS)
    def compare(value):
        try:
            plain = convert(value)
        except plain_values._InDoubtError:
            return
        usual = parameter.process_value(context, value)
        assert plain == usual
        assert type(plain) is type(usual)

    compare()


def test_what_is_no_plain_value_is_refused_by_typer(maker):
    for arguments in (["--limit", "0"], ["--limit", "many"], ["--sort", "beauty"], ["--limit"]):
        command = [sys.executable, "-m", "mmcache_tools", "ls", str(maker.folder), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2
        assert arguments[0] in result.stderr
        assert "Traceback" not in result.stderr
