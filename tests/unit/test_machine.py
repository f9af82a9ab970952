"""What the machine has, within the limits of its control groups."""

from types import SimpleNamespace

import pytest

from tiered_mmcache.configuration import machine

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A machine of 64 GiB, 48 GiB of it available, and a control group tree to write into."""
    monkeypatch.setattr(machine, "_PROC_CGROUP", tmp_path / "self_cgroup")
    monkeypatch.setattr(machine, "_CGROUP_MOUNT", tmp_path / "mount")
    ram = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: ram)

    def write(proc, **files):
        (tmp_path / "self_cgroup").write_text(proc)
        for name, text in files.items():
            file = tmp_path / "mount" / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def _bounds():
    memory = machine.memory()
    return memory.total_bytes, memory.available_bytes


def test_without_control_groups_it_is_the_machine(cgroup):
    assert _bounds() == (64 * GIB, 48 * GIB)


def test_version_2_limits(cgroup):
    cgroup(
        "0::/pod\n",
        pod__memory_dot_max=f"{8 * GIB}\n",
        pod__memory_dot_current=f"{6 * GIB}\n",
        pod__memory_dot_stat=f"anon 1\ninactive_file {2 * GIB}\n",
    )
    assert _bounds() == (8 * GIB, 4 * GIB)


def test_what_bounds_the_memory_is_named(cgroup, tmp_path):
    assert machine.memory().bound == machine.memory().total_bound == machine.THIS_MACHINE
    cgroup("0::/pod\n", pod__memory_dot_max=f"{8 * GIB}", memory_dot_max=f"{9 * GIB}")
    assert machine.memory().bound == f"the control group's {tmp_path / 'mount/pod/memory.max'}"
    assert machine.memory().total_bound == machine.memory().bound
    cgroup("0::/pod\n", pod__memory_dot_max=f"{80 * GIB}", memory_dot_max=f"{90 * GIB}")
    assert machine.memory().bound == machine.memory().total_bound == machine.THIS_MACHINE


@pytest.mark.parametrize(("soft", "expected"), [(8 << 20, 8 << 20), (-1, None), (0, 0)])
def test_the_limit_of_locked_memory(monkeypatch, soft, expected):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, -1))
    assert machine.locked_memory_limit_bytes() == expected


def test_a_group_around_it_limits_too(cgroup):
    cgroup("0::/slice/pod\n", slice__memory_dot_max=f"{4 * GIB}", slice__pod__memory_dot_max="max")
    assert _bounds() == (4 * GIB, 4 * GIB)


def test_in_a_container_the_root_of_the_mount_counts(cgroup):
    cgroup("0::/docker/of/the/host\n", memory_dot_max=f"{2 * GIB}\n")
    assert _bounds() == (2 * GIB, 2 * GIB)


def test_version_1_limits(cgroup):
    cgroup(
        "5:devices:/\n4:memory:/pod\n0::/\n",
        memory__pod__memory_dot_limit_in_bytes=f"{8 * GIB}\n",
        memory__pod__memory_dot_usage_in_bytes=f"{6 * GIB}\n",
        memory__pod__memory_dot_stat=f"total_inactive_file {1 * GIB}\n",
    )
    assert _bounds() == (8 * GIB, 3 * GIB)


def test_no_limit_in_version_1_is_a_huge_number(cgroup):
    cgroup("4:memory:/\n", memory__memory_dot_limit_in_bytes="9223372036854771712\n")
    assert _bounds() == (64 * GIB, 48 * GIB)


def test_more_used_than_allowed_leaves_nothing(cgroup):
    cgroup("0::/\n", memory_dot_max=f"{GIB}", memory_dot_current=f"{2 * GIB}", memory_dot_stat="x")
    assert _bounds() == (GIB, 0)


def test_this_machine_has_memory():
    memory = machine.memory()
    assert memory.available_bytes > 0
    assert memory.available_bytes <= memory.total_bytes


def test_the_room_of_a_disk_is_what_is_free_and_what_the_store_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    store = tmp_path / "not" / "yet"
    assert machine.disk_room_bytes(store) == 1000
    store.mkdir(parents=True)
    data = store / "data.mdb"
    data.write_bytes(bytes(10_000))
    assert machine.disk_room_bytes(store) == 1000 + data.stat().st_blocks * 512
