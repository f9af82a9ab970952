"""The releases of SGLang that the plug-in is tested against, as they were published.

Owns: downloading their wheels and unpacking the sources, into a folder that git ignores.
Does not own: what is run of them (released.py).

``python tests/engines/releases.py`` fetches what is missing, and fails where a wheel cannot be had.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ["0.5.6", "0.5.8", "0.5.10", "0.5.11", "0.5.12", "0.5.19", "0.5.22", "0.5.23"]
# What differs in how the cache is used; each test runs on these unless it says otherwise.
DIFFERENT = ["0.5.6", "0.5.8", "0.5.12", "0.5.19", "0.5.22", "0.5.23"]
TOO_OLD = "0.5.5"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "sglang"

# Wheels that hold compiled parts are built for one Python and one machine. Only sources are read.
_ANY_MACHINE = [
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=3.11",
    "--abi=cp311",
    "--platform=manylinux_2_34_x86_64",
    "--platform=any",
]


class CannotBeHadError(Exception):
    """A wheel could not be downloaded."""


def sources_of(version):
    """The folder with a release's sources; fetched if they are not there."""
    folder = FOLDER / version
    if not folder.exists():
        fetch(version, folder)
    return folder


def fetch(version, folder):
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        wheel = _download(version, Path(temporary))
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _is_wanted(name)]
            archive.extractall(unpacked, names)
        shutil.move(unpacked, folder)


def _is_wanted(name):
    """The serving runtime's sources, and what says which version this is."""
    runtime = name.startswith("sglang/srt/") or name.count("/") == 1
    return (runtime and name.endswith(".py")) or name.endswith(".dist-info/METADATA")


def _download(version, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *_ANY_MACHINE]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"sglang=={version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("sglang-*.whl"))
    if done.returncode != 0 or not wheels:
        raise CannotBeHadError(
            f"the wheel of sglang {version} cannot be had here, so the plug-in cannot be tested "
            f"against it:\n{done.stderr.strip()}"
        )
    return wheels[0]


def main():
    try:
        for version in [TOO_OLD, *VERSIONS]:
            sources_of(version)
    except CannotBeHadError as error:
        sys.exit(f"make test-sglang: {error}")
    print(f"sources of SGLang {', '.join(VERSIONS)} are in {FOLDER}")


if __name__ == "__main__":
    main()
