"""Export and import: the same entries come back, through every format, and nothing else does."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmcache_tools.cli import app
from mmcache_tools.inspection import outcome
from tiered_mmcache import EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.entries.extras import encode_extras
from tiered_mmcache.entries.keys import combine_hashes
from tiered_mmcache.entries.record import CHUNK_BYTES


@pytest.fixture(autouse=True)
def _no_store_in_the_environment(monkeypatch):
    monkeypatch.delenv(outcome.ENVIRONMENT_VARIABLE, raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def answer(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def other(tmp_path, maker):
    """The configuration of a store that is not there yet, with the first one's namespace."""
    disk = {"path": str(tmp_path / "other"), "max_size": "64MiB", "write_buffer": "8MiB"}
    configuration = {"namespace": maker.namespace, "hot": {"max_size": "16MiB"}, "disk": disk}
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump(configuration))
    return file


def _rows(store):
    rows = answer("ls", store, "--sort", "key")["entries"]
    for row in rows:
        del row["age_s"], row["created_s"]
    return rows


DTYPES = {
    "npy": [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64],
    "safetensors": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool],
    "pt": [torch.float32, torch.bfloat16, torch.float8_e5m2fnuz, torch.complex64],
}


@pytest.mark.parametrize("kind", ["npy", "safetensors", "pt"])
def test_the_same_entries_come_back(maker, other, tmp_path, kind):
    for number, dtype in enumerate(DTYPES[kind]):
        raw = np.random.default_rng(number).integers(0, 2, 3 * 8 * dtype.itemsize, dtype="u1")
        maker.put(
            combine_hashes([number, "part"]),
            raw.tobytes(),
            shape=(3, 8),
            dtype=str(dtype).removeprefix("torch."),
            item_bytes=dtype.itemsize,
            extras=encode_extras({"grid": (1, 2)}),
            device_type="cuda",
            cost_s=0.5,
        )
    maker.put("large", bytes(range(251)) * (2 * CHUNK_BYTES // 250))
    maker.put("empty", b"", shape=(0, 4), dtype="float32", item_bytes=4)
    exported = answer("export", maker.folder, "--all", "--to", kind, "--out", tmp_path / "files")
    assert len(exported["files"]) == len(DTYPES[kind]) + 2
    imported = answer("import", other, tmp_path / "files")
    assert (imported["entries"], imported["refused"]) == (len(DTYPES[kind]) + 2, [])
    assert _rows(other) == _rows(maker.folder)
    assert answer("verify", other)["ok"]
    for row in _rows(other):
        first, second = (answer("show", at, row["store_key"]) for at in (maker.folder, other))
        assert (first["extras"], first["values"]) == (second["extras"], second["values"])


def test_a_server_starts_warm(maker, other, tmp_path):
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    np.save(tmp_path / "17.npy", values)
    np.save(tmp_path / "[11, 12].npy", values + 1)
    assert answer("import", other, tmp_path / "17.npy", tmp_path / "[11, 12].npy")["entries"] == 2
    with TieredMultimodalCache.from_yaml(other) as cache:
        found = cache.get_single(17)
        assert type(found) is EmbeddingResult
        assert torch.equal(found.embedding, torch.from_numpy(values))
        assert torch.equal(cache.get([11, 12]).embedding, torch.from_numpy(values + 1))
        assert cache.get_single("17") is None


def test_what_others_wrote_with_torch_is_read(other, tmp_path):
    torch.save({"5": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / "some.pt")
    assert answer("import", other, tmp_path / "some.pt")["entries"] == 1
    (row,) = _rows(other)
    assert (row["key"], row["dtype"], row["shape"]) == ("5", "bfloat16", [2, 2])


def test_the_library_reads_what_is_written_and_the_reverse(maker, other, tmp_path):
    values = torch.randn(5, 7).to(torch.bfloat16)
    raw = values.view(torch.uint8).numpy().tobytes()
    maker.put(1, raw, shape=(5, 7), dtype="bfloat16", item_bytes=2)
    (file,) = answer("export", maker.folder, "1", "--out", tmp_path)["files"]
    assert torch.equal(load_file(file)["embedding"], values)
    save_file({"8": values, "name": torch.arange(6.0)}, tmp_path / "theirs.safetensors")
    assert answer("import", other, tmp_path / "theirs.safetensors")["entries"] == 2
    assert {row["key"]: row["shape"] for row in _rows(other)} == {"8": [5, 7], "'name'": [6]}
    with TieredMultimodalCache.from_yaml(other) as cache:
        assert torch.equal(cache.get_single(8).embedding, values)


def test_another_namespace_and_changed_bytes_are_refused(maker, other, tmp_path):
    maker.put(1, b"kept")
    changed = maker.put(2, b"changed")
    maker.namespace = "another/model@main"
    maker.put(3, b"foreign")
    run("export", maker.folder, "--all", "--to", "npy", "--out", tmp_path / "files")
    np.save(tmp_path / "files" / f"{changed}.npy", np.frombuffer(b"chanted", dtype="u1"))
    result = run("import", other, tmp_path / "files")
    assert result.exit_code == 1
    assert "it is of the namespace 'another/model@main'" in result.stderr
    assert "its bytes are not those that were exported" in result.stderr
    assert [row["key"] for row in _rows(other)] == ["1"]


def test_damaged_entries_are_not_exported(maker, tmp_path):
    maker.put(1, b"whole")
    damaged = maker.put(2, b"\xa5\x5a" * 2000)
    maker.flip(b"\xa5\x5a" * 2000)
    exported = answer(
        "export", maker.folder, "--all", "--to", "npy", "--out", tmp_path / "files", code=1
    )
    assert exported["skipped"] == [damaged]
    assert len(exported["files"]) == 1


def test_only_the_named_entries_are_exported(maker, tmp_path):
    maker.put(1, b"one")
    maker.put(2, b"two")
    exported = answer("export", maker.folder, "2", "--to", "npy", "--out", tmp_path / "files")
    (file,) = exported["files"]
    assert np.load(file).tobytes() == b"two"
    result = run("export", maker.folder, "9", "--to", "npy", "--out", tmp_path / "files")
    assert result.exit_code == 2
    assert "there is no entry '9'" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.npy", b"nonsense", "cannot be read"),
        ("a.safetensors", b"nonsense", "cannot be read"),
        ("a.pt", b"nonsense", "cannot be read"),
        ("a.txt", b"nonsense", "none of .safetensors, .npy and .pt"),
    ],
)
def test_files_that_hold_no_tensors_end_with_two(other, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    result = run("import", other, tmp_path / name)
    assert result.exit_code == 2
    assert says in result.stderr


def test_objects_in_files_are_never_built(other, tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "b.pt")
    for name in ("a.npy", "b.pt"):
        assert run("import", other, tmp_path / name).exit_code == 2


def test_a_dtype_that_a_format_lacks_is_told(maker, tmp_path):
    maker.put(1, b"abcd", shape=(2,), dtype="bfloat16", item_bytes=2)
    result = run("export", maker.folder, "1", "--to", "npy", "--out", tmp_path)
    assert result.exit_code == 2
    assert "npy has no bfloat16. Write --to safetensors" in result.stderr
