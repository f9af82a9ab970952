"""Every example of a command in docs/cli.md and in the commands' help does what it says.

The examples run in order, in a folder with the configuration, a store and the files that they
name. `demo`, `bench` and `compare` take long, and a port is served until the end: their own tests
run them.
"""

import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from mmcache_tools.cli import app
from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.disk.changes import PutEntry
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries import keys
from tiered_mmcache.entries.record import EntryHeader

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
NAMESPACE = "Qwen/Qwen2.5-VL-7B-Instruct@main/bf16"
LONG = ("demo", "bench", "compare")
DOCUMENTED = re.findall(r"^\$ mmcache (.+)$", PAGE, re.MULTILINE)
STORE_KEY_IN_EXAMPLES = "5c3a91"


def _commands(group=None, before=""):
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


HELP = [
    re.search(r"Example: mmcache (.+)", command.help)[1]
    for name, command in _commands()
    if name not in LONG
]
EXAMPLES = [each for each in DOCUMENTED if each.split()[0] not in LONG and "--port" not in each]
EXAMPLES += HELP


def _put(store, key, payload):
    full_key = keys.encode_full_key(key)
    generation = keys.generation_of_version(None)
    store_key = keys.store_key(namespace=NAMESPACE, generation=generation, full_key=full_key)
    header = EntryHeader(
        class_tag="embedding",
        dtype="uint8",
        item_bytes=1,
        shape=(len(payload),),
        extras=b"",
        device_type="cpu",
    )
    change = PutEntry(
        store_key=store_key,
        full_key=full_key,
        namespace=NAMESPACE,
        generation=generation,
        header=header,
        parts=[memoryview(payload)],
    )
    store.apply([change])
    return store_key.hex()


@pytest.fixture
def folder_of_metrics():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-test-") as made:
        yield Path(made)


@pytest.fixture
def place(tmp_path, monkeypatch, folder_of_metrics):
    """A folder with mmcache.yaml and its store; the store key for the documented one."""
    monkeypatch.chdir(tmp_path)
    disk = {"path": str(tmp_path / "store"), "max_size": "64MiB", "write_buffer": "8MiB"}
    configuration = {
        "namespace": NAMESPACE,
        "hot": {"max_size": "1MiB"},
        "disk": disk,
        "metrics": {"folder": str(folder_of_metrics)},
    }
    published = folder_of_metrics / f"mmcache-{os.getpid()}-0.prom"
    published.write_text('mmcache_hits_total{tier="hot"} 1.0')
    (tmp_path / "mmcache.yaml").write_text(yaml.safe_dump(configuration))
    settings = OpenSettings(
        path=tmp_path / "store",
        budget_bytes=2**26,
        largest_entry_bytes=2**20,
        synchronous=False,
    )
    opened = open_for_writing(settings)
    store = Store(opened.environment, budget_bytes=2**26)
    _put(store, keys.combine_hashes([11, 12]), bytes(200_000))
    found = _put(store, 77, bytes(range(256)) * 8)
    opened.close()
    lines = [f"{number},{number % 7},{100 * (number % 7 + 1)},5" for number in range(60)]
    (tmp_path / "requests.csv").write_text("\n".join(["time,key,bytes,tokens", *lines]))
    trace = {"hot": {"max_size": "1MiB"}, "trace": {"folder": str(tmp_path / "traces")}}
    with TieredMultimodalCache(config=CacheConfig.from_mapping(trace)) as cache:
        cache.get_single(1)
        cache.set(1, EmbeddingResult(embedding=torch.zeros(4, 4)))
    (recorded,) = (tmp_path / "traces").iterdir()
    recorded.rename(tmp_path / "recorded.trace")
    return found


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, place):
    arguments = [word.replace(STORE_KEY_IN_EXAMPLES, place[:8]) for word in shlex.split(example)]
    if arguments[0] == "import":
        exported = ["export", "mmcache.yaml", "--all", "--to", "npy", "--out", "exported"]
        assert CliRunner().invoke(app, exported).exit_code == 0
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)


def test_every_command_has_an_example():
    assert {name for name, _ in _commands()} <= {
        name for name, _ in _commands() for each in DOCUMENTED if f"{each} ".startswith(f"{name} ")
    }
    assert len(HELP) == len(list(_commands())) - len(LONG)
