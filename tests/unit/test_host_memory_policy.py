"""What the kernel is asked about memory, and what it answers here.

Owns: the system calls on real memory, and reading what the kernel says. Does not own: when they
are made (test_host_arena.py).
"""

import mmap
import os
from pathlib import Path

import pytest
import torch

from tiered_mmcache.host import memory_policy

PAGE = 4096


@pytest.fixture
def shared():
    """A memfd of 64 pages, mapped, with something in its second page."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64 * PAGE)
    os.pwrite(fd, b"here", PAGE)
    memory = mmap.mmap(fd, 64 * PAGE)
    yield fd, memory, torch.frombuffer(memory, dtype=torch.uint8)
    os.close(fd)


def backed_pages(fd):
    return os.fstat(fd).st_blocks * 512 // PAGE


def test_committed_memory_is_backed_and_unchanged(shared):
    fd, memory, _ = shared
    memory_policy.commit(fd, 0, 8 * PAGE)
    assert backed_pages(fd) == 8
    assert memory[PAGE : PAGE + 4] == b"here"
    assert os.fstat(fd).st_size == 64 * PAGE


def test_memory_that_cannot_be_committed_is_an_error():
    reader, writer = os.pipe()  # no file at all: what a full machine answers needs a full machine
    try:
        with pytest.raises(OSError):  # noqa: PT011 - which one is the kernel's affair
            memory_policy.commit(writer, 0, PAGE)
    finally:
        os.close(reader)
        os.close(writer)


def test_mapped_memory_costs_no_fault_and_is_unchanged(shared):
    fd, memory, tensor = shared
    if not memory_policy.map_in(tensor.data_ptr(), 8 * PAGE):
        pytest.skip("this kernel is older than 5.14")
    assert backed_pages(fd) == 8
    assert memory[PAGE : PAGE + 4] == b"here"
    assert resident_pages(tensor.data_ptr()) == 8


def resident_pages(address):
    """Pages of the mapping at this address that are in this process's page table."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.split()[0].startswith(f"{address:x}-"):
            break
    return next(int(line.split()[1]) * 1024 // PAGE for line in lines if line.startswith("Rss:"))


def test_what_is_not_mapped_cannot_be_mapped_in(shared):
    _, _, tensor = shared
    assert not memory_policy.map_in(tensor.data_ptr() + 1, PAGE)  # no page begins there


# Huge pages


@pytest.mark.parametrize("chosen", ["always", "within_size", "advise", "force"])
def test_huge_pages_where_the_kernel_has_them(shared, monkeypatch, tmp_path, chosen):
    file = tmp_path / "shmem_enabled"
    file.write_text(f"one other [{chosen}] another\n")
    monkeypatch.setattr(memory_policy, "_SHMEM_HUGE_PAGES", file)
    asked = []

    class Mapping:
        def madvise(self, advice):
            asked.append(advice)

    assert memory_policy.advise_huge_pages(Mapping()) is None
    assert asked == [mmap.MADV_HUGEPAGE]


@pytest.mark.parametrize("chosen", ["never", "deny"])
def test_huge_pages_that_are_turned_off(shared, monkeypatch, tmp_path, chosen):
    file = tmp_path / "shmem_enabled"
    file.write_text(f"always [{chosen}] advise\n")
    monkeypatch.setattr(memory_policy, "_SHMEM_HUGE_PAGES", file)
    problem = memory_policy.advise_huge_pages(shared[1])
    assert problem == f"{file} says {chosen}: write advise to it, or host.huge_pages: false"


def test_a_kernel_without_huge_pages(shared, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_policy, "_SHMEM_HUGE_PAGES", tmp_path / "none")
    assert "no huge pages" in memory_policy.advise_huge_pages(shared[1])


def test_huge_pages_that_the_kernel_refuses(monkeypatch, tmp_path):
    file = tmp_path / "shmem_enabled"
    file.write_text("[advise]")
    monkeypatch.setattr(memory_policy, "_SHMEM_HUGE_PAGES", file)

    class Mapping:
        def madvise(self, advice):
            raise OSError(22, "Invalid argument")

    assert "Invalid argument" in memory_policy.advise_huge_pages(Mapping())


# NUMA


@pytest.fixture
def machine_with_nodes(monkeypatch, tmp_path):
    def make(nodes, text):
        for number in range(nodes):
            (tmp_path / "node" / f"node{number}").mkdir(parents=True)
        (tmp_path / "node" / "possible").touch()
        device = tmp_path / "pci" / "0000:3b:00.0"
        device.mkdir(parents=True)
        if text is not None:
            (device / "numa_node").write_text(text)
        monkeypatch.setattr(memory_policy, "_NODES", tmp_path / "node")
        monkeypatch.setattr(memory_policy, "_PCI_DEVICES", tmp_path / "pci")

    return make


@pytest.mark.parametrize(
    ("nodes", "text", "expected"),
    [
        (2, "1\n", 1),
        (2, "0\n", 0),
        (1, "0\n", None),  # nothing to prefer
        (2, "-1\n", None),  # the firmware does not say
        (2, "what\n", None),
        (2, None, None),
    ],
)
def test_the_node_of_a_device(machine_with_nodes, nodes, text, expected):
    machine_with_nodes(nodes, text)
    assert memory_policy.node_of_pci_device("0000:3b:00.0") == expected
    assert memory_policy.node_of_pci_device("0000:ff:00.0") is None


def test_a_node_that_is_there_can_be_preferred(shared):
    tensor = shared[2]
    if not memory_policy.prefer_node(tensor.data_ptr(), 64 * PAGE, 0):
        pytest.skip("this kernel, or a filter around this process, refuses mbind")
    policies = Path("/proc/self/numa_maps").read_text()
    (line,) = [one for one in policies.splitlines() if one.startswith(f"{tensor.data_ptr():x} ")]
    assert line.split()[1].startswith("prefer")
    assert line.split()[1].endswith(":0")


def test_a_node_that_is_not_there_is_refused(shared):
    assert not memory_policy.prefer_node(shared[2].data_ptr(), 64 * PAGE, 1000)


def test_a_machine_whose_system_calls_are_not_known_is_left_alone(shared, monkeypatch):
    monkeypatch.setattr(memory_policy.platform, "machine", lambda: "riscv64")
    assert not memory_policy.prefer_node(shared[2].data_ptr(), 64 * PAGE, 0)
