"""The doctor's checks of the machine: accelerators, memory, locking, NUMA, software.

Owns: where the kernel tells of them. Does not own: the disk (:mod:`.disk_checks`). Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from mmcache_tools.doctor.findings import Finding, State
from mmcache_tools.inspection.rows import written_bytes
from tiered_mmcache.config import CacheConfig
from tiered_mmcache.configuration.machine import locked_memory_limit_bytes, memory

__all__ = ["machine_findings"]

_PLUG_INS = "sglang.srt.plugins"
_DEVICES = Path("/dev")
_NODES = Path("/sys/devices/system/node")
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def machine_findings(config: CacheConfig | None) -> Iterator[Finding]:
    """What the machine has, and where that is too little for the configuration."""
    yield from _software()
    yield _plug_in()
    yield _accelerators()
    yield _memory(config)
    yield _page_locking(config)
    yield _numa()
    if config is not None and config.host is not None and config.host.huge_pages:
        yield _huge_pages()


def _software() -> Iterator[Finding]:
    import lmdb

    version = ".".join(map(str, lmdb.version()))
    yield Finding(check="lmdb", state=State.OK, found=f"LMDB {version}, lmdb {lmdb.__version__}")
    for name, remedy in (("torch", "Install it: a server needs it."), ("sglang", None)):
        try:
            yield Finding(check=name, state=State.OK, found=f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            state = State.BAD if remedy else State.OK
            yield Finding(check=name, state=state, found="not installed here", remedy=remedy)


def _plug_in() -> Finding:
    """Whether SGLang would find the plug-in, which it does by its entry point."""
    names = {each.name for each in metadata.entry_points(group=_PLUG_INS)}
    if "tiered_mmcache" in names:
        return Finding(check="sglang_plug_in", state=State.OK, found="SGLang finds it")
    return Finding(
        check="sglang_plug_in",
        state=State.NOTE,
        found="not among the entry points of what is installed",
        remedy="Install this package (pip install .) where SGLang is installed.",
    )


def _accelerators() -> Finding:
    nvidia = len(list(_DEVICES.glob("nvidia[0-9]*")))
    amd = len(list(_DEVICES.glob("dri/renderD*"))) if (_DEVICES / "kfd").exists() else 0
    found = [f"{count} of {kind}" for kind, count in (("NVIDIA", nvidia), ("AMD", amd)) if count]
    if found:
        return Finding(check="accelerators", state=State.OK, found=", ".join(found))
    return Finding(
        check="accelerators",
        state=State.NOTE,
        found="no device file of a GPU",
        remedy="In a container, pass the devices on (--gpus all); else embeddings stay on the CPU.",
    )


def _memory(config: CacheConfig | None) -> Finding:
    has = memory()
    found = f"{written_bytes(has.available_bytes)} of {written_bytes(has.total_bytes)} available"
    if has.total_bound != "this machine":
        found += f", bound by {has.total_bound}"
    wanted_bytes = 0 if config is None or config.host is None else config.host.max_size
    if wanted_bytes > has.available_bytes:
        return Finding(
            check="memory",
            state=State.BAD,
            found=f"{found}; host.max_size is {written_bytes(wanted_bytes)}",
            remedy=f"Lower host.max_size, or raise {has.bound}.",
        )
    return Finding(check="memory", state=State.OK, found=found)


def _page_locking(config: CacheConfig | None) -> Finding:
    limit_bytes = locked_memory_limit_bytes()
    if limit_bytes is None:
        return Finding(check="page_locking", state=State.OK, found="no limit")
    wanted_bytes = 0 if config is None or config.host is None else config.host.max_size
    found = f"a process may lock {written_bytes(limit_bytes)}"
    if config is not None and limit_bytes >= wanted_bytes:
        return Finding(check="page_locking", state=State.OK, found=found)
    return Finding(
        check="page_locking",
        state=State.NOTE,
        found=found,
        remedy="Raise the limit (ulimit -l, LimitMEMLOCK=infinity, --ulimit memlock=-1) where a "
        "driver counts page-locked memory against it.",
    )


def _numa() -> Finding:
    nodes = len(list(_NODES.glob("node[0-9]*")))
    return Finding(check="numa", state=State.OK, found=f"{max(1, nodes)} memory nodes")


def _huge_pages() -> Finding:
    try:
        setting = _SHMEM_HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        setting = ""
    if any(f"[{each}]" in setting for each in ("always", "within_size", "advise", "force")):
        return Finding(check="huge_pages", state=State.OK, found="the kernel gives them")
    return Finding(
        check="huge_pages",
        state=State.NOTE,
        found="the kernel gives none for shared memory",
        remedy=f"As root: echo advise > {_SHMEM_HUGE_PAGES}",
    )
