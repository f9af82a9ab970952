"""The configuration: what is read, what is refused, and what the refusal says."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_mmcache.config import (
    CacheConfig,
    DiskConfig,
    Durability,
    HostConfig,
    HotConfig,
    Oversize,
    PageLocked,
    WritePolicy,
    load_config,
    parse_size,
)
from tiered_mmcache.configuration import machine
from tiered_mmcache.errors import ConfigError

GIB = 1 << 30

EVERYTHING = """\
namespace: Qwen/Qwen2.5-VL-7B-Instruct@main/bf16
hot:
  max_size: 4GiB
  device: cuda:1
  clean_ahead: 256MiB
  oversize: spill
host:
  max_size: 25%
  prefetch: 1GiB
  page_locked: on
  huge_pages: true
  demote_wait: 20ms
disk:
  path: store
  max_size: 50%
  write: on_second_hit
  durability: relaxed
  read_timeout: 500ms
  close_timeout: 10
  write_buffer: 64MiB
"""


@pytest.fixture(autouse=True)
def computer(monkeypatch):
    """64 GiB of memory, 40 GiB of it available, and 1000 GiB of room on the disk."""
    memory = machine.Memory(total_bytes=64 * GIB, available_bytes=40 * GIB)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    monkeypatch.setattr(machine, "disk_room_bytes", lambda folder: 1000 * GIB)


@pytest.fixture
def load(tmp_path):
    def write_and_load(text, **how):
        file = tmp_path / "mmcache.yaml"
        file.write_text(text)
        return load_config(file, **how)

    return write_and_load


def _disk(**changes):
    return {"namespace": "m", "disk": {"path": "/x", "max_size": "1GiB", **changes}}


def _refusal(mapping, **how):
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_mapping(mapping, **how)
    assert caught.value.problem
    assert caught.value.remedy
    return caught.value


def test_every_key_is_read(load, tmp_path):
    assert load(EVERYTHING) == CacheConfig(
        namespace="Qwen/Qwen2.5-VL-7B-Instruct@main/bf16",
        hot=HotConfig(
            max_size=4 * GIB,
            device="cuda:1",
            clean_ahead=256 << 20,
            oversize=Oversize.SPILL,
        ),
        host=HostConfig(
            max_size=10 * GIB,
            prefetch=GIB,
            page_locked=PageLocked.ON,
            huge_pages=True,
            demote_wait_s=0.02,
        ),
        disk=DiskConfig(
            path=tmp_path / "store",
            max_size=500 * GIB,
            write=WritePolicy.ON_SECOND_HIT,
            durability=Durability.RELAXED,
            read_timeout_s=0.5,
            close_timeout_s=10.0,
            write_buffer=64 << 20,
        ),
    )


def test_what_is_left_out_has_a_default():
    config = CacheConfig.from_mapping({**_disk(), "host": {"max_size": "1GiB"}})
    assert config.hot == HotConfig(
        max_size=None, device="auto", clean_ahead=None, oversize=Oversize.REFUSE
    )
    assert config.host == HostConfig(
        max_size=GIB, page_locked=PageLocked.AUTO, huge_pages=False, demote_wait_s=0.0
    )
    assert config.host.prefetch_bytes == GIB // 4
    assert config.disk == DiskConfig(
        path=Path("/x"),
        max_size=GIB,
        write=WritePolicy.ON_EVICT,
        durability=Durability.ORDERED,
        read_timeout_s=2.0,
        close_timeout_s=30.0,
        write_buffer=GIB,
    )


def test_an_empty_mapping_is_the_hot_tier_alone():
    config = CacheConfig.from_mapping({})
    assert (config.namespace, config.host, config.disk) == (None, None, None)


@pytest.mark.parametrize("tiers", [(), ("host",), ("disk",), ("host", "disk")])
def test_every_combination_of_tiers_is_accepted(tiers):
    sections = {"host": {"max_size": "1GiB"}, "disk": _disk()["disk"]}
    chosen = {tier: sections[tier] for tier in tiers}
    config = CacheConfig.from_mapping({"namespace": "m", **chosen})
    assert {tier for tier in sections if getattr(config, tier) is not None} == set(tiers)


def test_python_values_build_the_same_as_yaml(tmp_path):
    built = CacheConfig(
        namespace="m",
        hot=HotConfig(max_size="4MiB"),
        host=HostConfig(max_size=1 << 20),
        disk=DiskConfig(path=tmp_path, max_size="1GiB"),
    )
    assert built == CacheConfig.from_mapping(
        {
            "namespace": "m",
            "hot": {"max_size": 4 << 20},
            "host": {"max_size": "1MiB"},
            "disk": {"path": str(tmp_path), "max_size": GIB},
        }
    )


def test_a_size_beyond_a_control_group_says_which_limit_to_raise(monkeypatch):
    limit = "the control group's /sys/fs/cgroup/memory.max"
    memory = machine.Memory(total_bytes=8 * GIB, available_bytes=4 * GIB, total_bound=limit)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    error = _refusal({"host": {"max_size": "9GiB"}})
    assert error.problem == "this is more than the 8.0GiB of memory that there is"
    assert error.remedy.endswith(f"25%. Or raise {limit}.")


def test_a_configuration_is_frozen():
    config = CacheConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.namespace = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("on", PageLocked.ON),
        ("off", PageLocked.OFF),
        ("true", PageLocked.ON),
        ("no", PageLocked.OFF),
        ("auto", PageLocked.AUTO),
        ("'on'", PageLocked.ON),
    ],
)
def test_on_and_off_are_words_although_yaml_makes_them_truth_values(load, written, expected):
    config = load(f"host: {{max_size: 1GiB, page_locked: {written}}}")
    assert config.host.page_locked is expected


def test_a_relative_path_starts_in_the_folder_of_the_file(load, tmp_path):
    config = load("namespace: m\ndisk: {path: a/b, max_size: 1GiB}")
    assert config.disk.path == tmp_path / "a" / "b"


def test_a_relative_path_in_code_starts_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DiskConfig(path="a", max_size="1GiB").path == tmp_path / "a"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DiskConfig(path="~/a", max_size="1GiB").path == tmp_path / "a"


def test_the_write_buffer_is_at_most_a_sixteenth_of_the_memory(monkeypatch):
    small = machine.Memory(total_bytes=2 * GIB, available_bytes=GIB)
    monkeypatch.setattr(machine, "memory", lambda: small)
    assert DiskConfig(path="/x", max_size="1GiB").write_buffer == GIB // 8


def test_the_write_buffer_may_be_a_share_of_available_memory():
    assert DiskConfig(path="/x", max_size="1GiB", write_buffer="10%").write_buffer == 4 * GIB


@pytest.mark.parametrize(
    ("mapping", "key", "problem", "remedy"),
    [
        # keys
        ({"hots": {}}, "hots", "no such key", "Did you mean hot?"),
        ({"host": {"max_sise": 1}}, "host.max_sise", "no such key", "Did you mean max_size?"),
        (_disk(read_timout=1), "disk.read_timout", "no such key", "Did you mean read_timeout?"),
        ({"zzz": 1}, "zzz", "no such key", "namespace, hot, host, disk"),
        ({7: 1}, "7", "no such key", "namespace, hot, host, disk"),
        ({"host": {}}, "host.max_size", "is missing", "max_size: 32GiB"),
        ({"disk": {"max_size": 1}}, "disk.path", "is missing", "path: /var/cache"),
        (_disk(read_timeout=1, read_timeout_s=1), "disk.read_timeout_s", "two names", "Keep one"),
        # sections
        ({"host": "32GiB"}, "host", "must be a mapping", "max_size: 32GiB"),
        ({"hot": None}, "hot", "must be a mapping", "max_size: 4GiB"),
        ([], "", "must be a mapping", "hot"),
        # sizes
        ({"host": {"max_size": 0}}, "host.max_size", "no size", "leave the section out"),
        (_disk(max_size=0), "disk.max_size", "no size", "leave the section out"),
        ({"host": {"max_size": -1}}, "host.max_size", "negative", "4GiB"),
        ({"host": {"max_size": True}}, "host.max_size", "truth value", "4GiB"),
        ({"host": {"max_size": None}}, "host.max_size", "null", "4GiB"),
        ({"host": {"max_size": float("nan")}}, "host.max_size", "fraction", "4GiB"),
        ({"host": {"max_size": "4G"}}, "host.max_size", "not a unit", "GiB or GB"),
        ({"hot": {"max_size": "25%"}}, "hot.max_size", "share", "4GiB"),
        ({"hot": {"clean_ahead": "25%"}}, "hot.clean_ahead", "share", "4GiB"),
        (_disk(write_buffer=0), "disk.write_buffer", "reach the disk", "256MiB"),
        # sizes beyond the machine
        ({"host": {"max_size": "65GiB"}}, "host.max_size", "64.0GiB of memory", "25%"),
        (_disk(write_buffer="65GiB"), "disk.write_buffer", "64.0GiB of memory", "25%"),
        (_disk(max_size="1001GiB"), "disk.max_size", "1000.0GiB", "50%"),
        # namespace
        ({"disk": {"path": "/x", "max_size": 9}}, "namespace", "disk tier needs one", "bf16"),
        ({"namespace": ""}, "namespace", "empty", "Qwen"),
        ({"namespace": " \t"}, "namespace", "empty", "Qwen"),
        ({"namespace": "m "}, "namespace", "white space", "without"),
        ({"namespace": "a\nb"}, "namespace", "control character", "printable"),
        ({"namespace": "a\x00b"}, "namespace", "control character", "printable"),
        ({"namespace": "a\ud800b"}, "namespace", "control character", "printable"),
        ({"namespace": "é" * 513}, "namespace", "1024 bytes", "Shorten"),
        ({"namespace": 1.0}, "namespace", "must be text", "quotes"),
        # choices
        ({"hot": {"oversize": "drop"}}, "hot.oversize", "choices", "refuse or spill"),
        (_disk(write="never"), "disk.write", "choices", "on_evict, on_second_hit or through"),
        (_disk(durability=1), "disk.durability", "choices", "ordered or relaxed"),
        ({"host": {"max_size": 1, "page_locked": 2}}, "host.page_locked", "choices", "auto, on"),
        ({"host": {"max_size": 1, "huge_pages": "2M"}}, "host.huge_pages", "boolean", "docs"),
        ({"host": {"max_size": 1, "demote_wait": "2"}}, "host.demote_wait", "needs its unit", "ms"),
        # device
        ({"hot": {"device": "GPU 0"}}, "hot.device", "not a device", "cuda:0"),
        ({"hot": {"device": 0}}, "hot.device", "must be text", "quotes"),
        # durations
        (_disk(read_timeout="2"), "disk.read_timeout", "needs its unit", "500ms"),
        (_disk(read_timeout=0), "disk.read_timeout", "never serve", "2s"),
        (_disk(read_timeout=-1), "disk.read_timeout", "at least 0", "500ms"),
        (_disk(close_timeout="2h"), "disk.close_timeout", "not a unit", "500ms"),
        # paths
        (_disk(path=""), "disk.path", "not a folder's path", "/var/cache"),
        (_disk(path=3), "disk.path", "not a folder's path", "/var/cache"),
        (_disk(path=b"/x"), "disk.path", "not a folder's path", "/var/cache"),
        (_disk(path="a\0b"), "disk.path", "NUL", "without"),
        (_disk(path="$HOME/x"), "disk.path", "variables", "~"),
        (_disk(path="~no-such-user-here/x"), "disk.path", "cannot be used", "Name another"),
        (_disk(path="/" + "x" * 300), "disk.path", "File name too long", "Name another"),
        (_disk(path=__file__), "disk.path", "not a folder", "need not exist"),
    ],
)
def test_what_cannot_be_used_is_refused(mapping, key, problem, remedy):
    refusal = _refusal(mapping, file="mmcache.yaml")
    assert (refusal.file, refusal.key) == ("mmcache.yaml", key)
    assert problem in refusal.problem
    assert remedy in refusal.remedy


def test_the_message_names_file_key_value_and_remedy():
    message = str(_refusal({"host": {"max_size": "4G"}}, file="etc/mmcache.yaml"))
    assert message == (
        "etc/mmcache.yaml: host.max_size: 'G' is not a unit of size (got '4G'). Write GiB or GB."
    )


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: HotConfig(max_size="25%"), "hot.max_size"),
        (lambda: HostConfig(max_size=0), "host.max_size"),
        (lambda: HostConfig(max_size=10, prefetch=11), "host.prefetch"),
        (lambda: HostConfig(max_size=10, prefetch="25%"), "host.prefetch"),
        (lambda: HostConfig(), "host.max_size"),
        (lambda: DiskConfig(path="", max_size=1), "disk.path"),
        (lambda: DiskConfig(path="/x", max_size=1, read_timeout_s="2"), "disk.read_timeout_s"),
        (lambda: CacheConfig(hot=5), "hot"),
        (lambda: CacheConfig(unknown=5), "unknown"),
        (lambda: CacheConfig(disk=DiskConfig(path="/x", max_size=1)), "namespace"),
    ],
)
def test_what_is_built_in_code_is_refused_alike(build, key):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.file is None
    assert caught.value.key == key


@pytest.mark.parametrize("section", ["hot", "host", "disk"])
def test_a_section_without_keys_in_a_file_is_refused(load, section):
    with pytest.raises(ConfigError, match="has no keys") as caught:
        load(f"{section}:\n  # max_size: 1GiB\n")
    assert caught.value.key == section


def test_a_disk_that_cannot_be_asked_for_its_room_is_refused(monkeypatch):
    def fail(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(machine, "disk_room_bytes", fail)
    assert "Input/output error" in _refusal(_disk()).problem


def test_a_reader_of_the_store_may_skip_the_limits_of_the_machine(load):
    text = "namespace: m\nhost: {max_size: 9TiB}\ndisk: {path: x, max_size: 9PiB}"
    assert load(text, check_machine=False).disk.max_size == 9 << 50


def test_parse_size_reads_a_size_and_names_its_key_when_it_cannot():
    assert parse_size("4GiB") == 4 * GIB
    with pytest.raises(ConfigError, match="--hot"):
        parse_size("4G", key="--hot")


_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["namespace", "hot", "host", "disk", "max_size", "path", "device"])
            | st.integers(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_ANYTHING)
def test_any_value_is_a_configuration_or_a_config_error(value):
    try:
        assert isinstance(CacheConfig.from_mapping(value), CacheConfig)
    except ConfigError as error:
        assert error.remedy


def test_the_configuration_is_read_without_torch():
    code = "import sys, tiered_mmcache.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
