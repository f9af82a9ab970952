"""Which weights and processor settings lie under a model's path.

Owns: telling two states of a model apart by its files, without reading all of them.
Does not own: what else makes embeddings interchangeable (:mod:`.namespace`).

A revision of the hub names contents, so it is taken where there is one. Any other folder is told by
its small files as a whole and, of each file of weights, name, size, time of change and four samples
of 16 KiB. A copy of a folder has other times and counts as another model: with a namespace of your
own in the YAML the copies share.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_REVISION = re.compile(r"[0-9a-f]{40}")
_SETTINGS = {".json", ".jinja", ".model", ".py", ".txt", ".yaml", ".yml"}
_LARGEST_SETTINGS_BYTES = 1024 * 1024
_SAMPLES = 4
_SAMPLE_BYTES = 16 * 1024


def identity_of(model_path: str, revision: str | None) -> str | None:
    """What tells this state of a model from any other, or None when that cannot be known.

    Args:
        model_path: A folder, a file of weights, or a repository of the Hugging Face hub.
        revision: Which state of the repository; None is its main branch.
    """
    path = Path(model_path).expanduser()
    if not path.exists():
        snapshot = _cached_snapshot(model_path, revision)
        if snapshot is None:
            return None
        path = snapshot
    commit = _commit_in(path)
    if commit is not None:
        return commit
    try:
        return _digest(path)
    except OSError:  # a file that cannot be read, or that has just gone
        return None


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """The folder of a repository in the hub's cache, where the server has just loaded it from."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except Exception:  # noqa: BLE001 - not installed, or no name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def _commit_in(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds: ``…/snapshots/<commit>``."""
    is_snapshot = folder.parent.name == "snapshots" and _REVISION.fullmatch(folder.name)
    return folder.name if is_snapshot else None


def _digest(path: Path) -> str | None:
    files = sorted(_files(path))
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        for part in _parts(file, file.name if path.is_file() else str(file.relative_to(path))):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


def _parts(file: Path, name: str) -> Iterator[bytes]:
    state = file.stat()
    yield name.encode("utf-8", "surrogateescape")
    yield str(state.st_size).encode()
    if file.suffix in _SETTINGS and state.st_size <= _LARGEST_SETTINGS_BYTES:
        yield file.read_bytes()
        return
    yield str(state.st_mtime_ns).encode()
    with file.open("rb") as stream:
        for sample in range(_SAMPLES):
            stream.seek(max(0, state.st_size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)
