"""`mmcache import`: a store filled from files before the first request.

Owns: which key and namespace a tensor gets, and what is refused. Does not own: the files' contents
(:mod:`.tensor_files`) or writing (:mod:`tiered_mmcache.disk.store`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmcache_tools.inspection.lookup import readings
from mmcache_tools.inspection.outcome import ExitCode, UsageError, complain
from mmcache_tools.inspection.rows import print_json, written_bytes
from mmcache_tools.upkeep.tensor_files import FileTensor, digests_of, read_file
from tiered_mmcache.config import DiskConfig, Durability, load_config
from tiered_mmcache.disk.changes import Outcome, PutEntry
from tiered_mmcache.disk.recovery import BATCH_BYTES, OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.keys import encode_full_key, generation_of_version, store_key
from tiered_mmcache.entries.record import EntryHeader, decode_header, encode_header
from tiered_mmcache.errors import RecordError

__all__ = ["import_files"]

_ENDINGS = (".safetensors", ".npy", ".pt")
_CLASS_TAG = "EmbeddingResult"  # plain EmbeddingResult, for files of other programs


@dataclasses.dataclass(slots=True)
class _Imported:
    entries: int = 0
    payload_bytes: int = 0
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def import_files(configuration: Path, sources: Sequence[Path], *, as_json: bool) -> int:
    """Store the tensors of the files under the configuration's namespace; the exit code.

    Raises:
        UsageError: A source is not there or holds no tensors.
        ConfigError: The configuration has no disk tier or cannot be used.
    """
    config = load_config(configuration, check_machine=False)
    if config.disk is None or config.namespace is None:
        raise UsageError(f"{configuration} has no disk section, so there is no store to fill.")
    files = [file for source in sources for file in _files(source)]
    imported = _Imported()
    opened = open_for_writing(_settings(config.disk, files))
    try:
        store = Store(opened.environment, budget_bytes=config.disk.max_size)
        for batch in _batches(store, config.namespace, files, imported):
            _store(store, batch, imported)
        opened.cover_last_page()
    finally:
        opened.close()
    _print(config.disk, imported, as_json=as_json)
    return ExitCode.FOUND if imported.refused else ExitCode.FINE


def _print(disk: DiskConfig, imported: _Imported, *, as_json: bool) -> None:
    if as_json:
        refused = [{"tensor": name, "reason": reason} for name, reason in imported.refused]
        print_json(
            {
                "command": "import",
                "store": str(disk.path),
                "entries": imported.entries,
                "payload_bytes": imported.payload_bytes,
                "refused": refused,
            }
        )
        return
    print(f"{imported.entries} entries stored, {written_bytes(imported.payload_bytes)}")
    for name, reason in imported.refused:
        complain(f"{name}: {reason}.")


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        found = sorted(each for each in source.iterdir() if each.suffix in _ENDINGS)
    else:
        found = [source] if source.is_file() else []
    if not found:
        raise UsageError(f"{source} is no file, and no folder with {', '.join(_ENDINGS)} files.")
    return found


def _settings(disk: DiskConfig, files: Sequence[Path]) -> OpenSettings:
    """As the server opens it, so that the map has the same size."""
    largest_bytes = max((file.stat().st_size for file in files), default=0)
    return OpenSettings(
        path=disk.path,
        budget_bytes=disk.max_size,
        largest_entry_bytes=largest_bytes,
        synchronous=disk.durability is Durability.ORDERED,
        allow_network=disk.allow_network_file_system,
        keep_quarantined=disk.keep_quarantined,
    )


def _batches(
    store: Store, namespace: str, files: Sequence[Path], imported: _Imported
) -> Iterator[list[tuple[str, PutEntry]]]:
    """What one transaction stores; names are for people."""
    batch: list[tuple[str, PutEntry]] = []
    for file in files:
        for tensor in read_file(file):
            name = f"{file}: {tensor.name}"
            try:
                batch.append((name, _change(store, namespace, tensor)))
            except _RefusedError as error:
                imported.refused.append((name, str(error)))
        if sum(change.header.payload_bytes for _, change in batch) >= BATCH_BYTES // 2:
            yield batch
            batch = []
    yield batch


def _store(store: Store, batch: Sequence[tuple[str, PutEntry]], imported: _Imported) -> None:
    outcomes = store.apply([change for _, change in batch])
    for (name, change), outcome in zip(batch, outcomes, strict=True):
        if outcome is Outcome.TOO_LARGE:
            imported.refused.append((name, "it is larger than disk.max_size"))
            continue
        imported.entries += 1
        imported.payload_bytes += change.header.payload_bytes


class _RefusedError(Exception):
    """A tensor that is not stored; the message says why."""


def _change(store: Store, namespace: str, tensor: FileTensor) -> PutEntry:
    header, full_key = _described(namespace, tensor)
    generation = store.current_generation(namespace) or generation_of_version(None)
    return PutEntry(
        store_key=store_key(namespace=namespace, generation=generation, full_key=full_key),
        full_key=full_key,
        namespace=namespace,
        generation=generation,
        header=header,
        parts=[memoryview(tensor.data)] if tensor.data else [],
    )


def _described(namespace: str, tensor: FileTensor) -> tuple[EntryHeader, bytes]:
    about = tensor.about or {}
    full_key = _key_from_name(tensor.name)
    try:
        if tensor.about is not None:
            full_key = bytes.fromhex(about["full_key"])
            _check_origin(namespace, tensor)
        header = EntryHeader(
            class_tag=about.get("class_tag", _CLASS_TAG),
            dtype=tensor.dtype,
            item_bytes=tensor.item_bytes,
            shape=tensor.shape,
            extras=bytes.fromhex(about.get("extras", "")),
            device_type=about.get("device_type", "cpu"),
            cost_s=float(about.get("cost_s", 0.0)),
        )
        header = decode_header(encode_header(header))
    except (KeyError, TypeError, ValueError, RecordError) as error:
        raise _RefusedError(f"what stands beside it cannot be used: {error}") from None
    if header.payload_bytes != len(tensor.data):
        raise _RefusedError("its bytes are not those of its shape")
    return header, full_key


def _check_origin(namespace: str, tensor: FileTensor) -> None:
    """Refuse what would be a wrong embedding: another model's, or bytes that have changed."""
    assert tensor.about is not None
    theirs = tensor.about["namespace"]
    if theirs != namespace:
        raise _RefusedError(f"it is of the namespace {theirs!r}, the store is for {namespace!r}")
    if tensor.about["digests"] != digests_of(tensor.data):
        raise _RefusedError("its bytes are not those that were exported")


def _key_from_name(name: str) -> bytes:
    """The key that a name means when read as `mmcache ls` prints keys."""
    keys: Iterator[bytes] = filter(None, map(encode_full_key, reversed(list(readings(name)))))
    full_key = next(keys, None)
    if full_key is None:
        raise _RefusedError("its name is no key")
    return full_key
