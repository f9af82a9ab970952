"""Reading a configuration file: each mistake is an error that names the file and the place."""

import os

import pytest

from tiered_mmcache.configuration.yaml_file import LARGEST_FILE_BYTES, read_mapping
from tiered_mmcache.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def write_and_read(content):
        file = tmp_path / "mmcache.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_mapping(file)

    return write_and_read


def test_plain_values_are_read(read):
    assert read("a: 1\nb:\n  c: [x, 2.5]\n") == {"a": 1, "b": {"c": ["x", 2.5]}}


def test_a_byte_order_mark_is_no_part_of_the_first_key(read):
    assert read(b"\xef\xbb\xbfa: 1\n") == {"a": 1}


def test_merge_keys_are_no_duplicates(read):
    assert read("a: &x {p: 1}\nb: {<<: *x, p: 2}\n") == {"a": {"p": 1}, "b": {"p": 2}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds nothing"),
        ("# only a comment\n", "holds nothing"),
        ("- a\n- b\n", "must hold a mapping, not a list"),
        ("text", "must hold a mapping, not a str"),
        ("a: 1\nb: [\n", "not valid YAML on line 3"),
        ("a: 1\n\tb: 2\n", "not valid YAML on line 2"),
        ("a: 1\n---\nb: 2\n", "not valid YAML on line 2"),
        ("a: !!python/object/apply:os.getpid []\n", "not valid YAML on line 1"),
        ("? [a, b]\n: 1\n", "not valid YAML on line 1"),
        ("a: 2024-13-45\n", "month"),
        ("a: \x07\n", "not YAML that can be read"),
        ("[" * 20_000, "not YAML that can be read"),
        (b"a: \xff\n", "not UTF-8 (byte 3)"),
        (b"#" * (LARGEST_FILE_BYTES + 1), "larger than 1MiB"),
    ],
)
def test_what_is_no_mapping_is_refused(read, tmp_path, content, problem):
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert caught.value.file == str(tmp_path / "mmcache.yaml")
    assert problem in caught.value.problem
    assert caught.value.remedy


def test_a_key_written_twice_is_refused_with_both_lines(read):
    with pytest.raises(ConfigError, match="lines 2 and 4") as caught:
        read("hot:\n  max_size: 1\n  device: cpu\n  max_size: 2\n")
    assert caught.value.key == "max_size"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_mapping(tmp_path / "none.yaml")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        read_mapping(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a file"):
        read_mapping(tmp_path / "pipe")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "mmcache.yaml"
    file.write_text("a: 1\n")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "open", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        read_mapping(file)
