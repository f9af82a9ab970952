"""The environments of the systems: one folder each, made from released packages, pinned.

Owns: making them, and saying why one cannot be made. Does not own: what runs in them
(:mod:`.process`).

An environment holds the peer's own package and the little that its one module needs. torch and
what else is large come from the environment that this command runs in: every system is measured
with the same torch. Packages are installed without what they depend on, which for an inference
server would be gigabytes; of large wheels only the parts named here are unpacked.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import mmcache_tools

_INSTALL_S = 600.0
_OURS = "tiered-mmcache"


class CannotRunError(Exception):
    """A system cannot be measured here; the message says why, and what was tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a system needs.

    Attributes:
        name: The folder's name.
        packages: Installed whole, without what they depend on.
        parts: Pinned wheel to the beginnings of the names that are unpacked of it.
    """

    name: str
    packages: tuple[str, ...] = ()
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def tried(self) -> str:
        """What is installed, for the reader of a failure."""
        return ", ".join([*self.packages, *(f"parts of {wheel}" for wheel, _ in self.parts)])


OURS = Environment(name="ours")
DISKCACHE = Environment(name="diskcache", packages=("diskcache==5.6.3",))
SGLANG = Environment(
    name="sglang",
    parts=(
        (
            "sglang==0.5.23",
            ("sglang/srt/mem_cache/multimodal_cache.py", "sglang-0.5.23.dist-info/METADATA"),
        ),
    ),
)
_EC = "vllm/distributed/ec_transfer/ec_connector/"
VLLM = Environment(
    name="vllm",
    packages=("safetensors==0.8.0",),
    parts=(
        (
            "vllm==0.33.0",
            (
                f"{_EC}base.py",
                f"{_EC}example_connector.py",
                f"{_EC}cpu/ec_shared_region.py",
                f"{_EC}cpu/scheduler/embedding_cache.py",
                "vllm-0.33.0.dist-info/METADATA",
            ),
        ),
    ),
)
DYNAMO = Environment(
    name="dynamo",
    parts=(
        (
            "ai-dynamo==1.6.1",
            (
                "dynamo/common/memory/multimodal_embedding_cache_manager.py",
                "ai_dynamo-1.6.1.dist-info/METADATA",
            ),
        ),
    ),
)
# What the engine's modules import, found one by one: its whole tree has CUDA's libraries.
LMCACHE = Environment(
    name="lmcache",
    packages=(
        "lmcache==0.5.6",
        "aiofile==3.12.3",
        "aiohappyeyeballs==2.7.1",
        "aiohttp==3.14.5",
        "aiosignal==1.4.0",
        "attrs==26.1.0",
        "cachetools==8.0.2",
        "caio==0.12.10",
        "certifi==2026.10.19.post1",
        "cryptography==50.0.2",
        "frozenlist==1.8.0",
        "h11==0.16.0",
        "httpcore2==2.16.2",
        "httpx2==2.16.2",
        "huggingface_hub==2.4.0",
        "idna==3.20",
        "llvmlite==0.50.0",
        "msgspec==0.23.0",
        "multidict==7.2.1",
        "numba==0.68.1",
        "propcache==0.5.4",
        "py-cpuinfo==9.0.0",
        "pyzmq==27.3.0",
        "regex==2026.11.19",
        "requests==2.34.2",
        "tqdm==4.70.1",
        "transformers==5.24.0",
        "truststore==0.10.5",
        "urllib3==2.8.0",
        "yarl==1.25.1",
    ),
)


def interpreter(environment: Environment, root: Path) -> Path:
    """The Python of an environment, which is made if it is not there.

    Raises:
        CannotRunError: It cannot be made.
    """
    folder = root / environment.name
    stamp = folder / "made-of"
    wanted = f"{sys.version} {environment!r}"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _make(environment, folder)
        stamp.write_text(wanted, encoding="utf-8")
    _find_ours(folder)
    return folder / "bin" / "python"


def _make(environment: Environment, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], environment)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    if environment.packages:
        into = [*pip, "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
        _run([*into, *environment.packages], environment)
    for wheel, beginnings in environment.parts:
        with tempfile.TemporaryDirectory() as downloads:
            download = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", downloads]
            _run([*download, wheel], environment)
            (file,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.startswith(beginnings)]
                archive.extractall(_packages_of(folder), names)


def _run(command: list[str], environment: Environment) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise CannotRunError(f"{environment.tried}: no answer in {_INSTALL_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise CannotRunError(f"{environment.tried} cannot be installed: {last}")


def _find_ours(folder: Path) -> None:
    """Let it import these tools, and torch, behind all that it has itself."""
    sources = Path(mmcache_tools.__file__).resolve().parents[1]
    lines = [str(sources), str(sources.parent)]
    lines += [f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"]
    (_packages_of(folder) / "zz-ours.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _packages_of(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def environment_variables() -> dict[str, str]:
    """What a child sees: nothing that would lead it into this process's packages first."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TIERED_MMCACHE_CONFIG"}
    return {name: value for name, value in os.environ.items() if name not in dropped}
