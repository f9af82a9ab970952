"""``mmcache metrics``: the merged metrics as text, or behind one port.

Owns: printing, serving until told to end, and what is said when neither can be done.
Does not own: the merging (:mod:`.folder`).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest

from mmcache_tools.exporting.folder import MetricsFolder
from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE, ExitCode, UsageError, complain
from tiered_mmcache.config import load_config


def export(place: Path | None, *, port: int | None, address: str) -> int:
    """Print the metrics of all processes, or serve them until a signal ends it.

    Args:
        place: The folder, or the YAML whose ``metrics.folder`` names it; None for the YAML that
            the environment names.
        port: Where to serve; 0 for any that is free; None to print once.
        address: The interface to listen on.

    Raises:
        ConfigError: The YAML cannot be used.
        UsageError: No folder is named.
    """
    folder = _folder(place)
    registry = CollectorRegistry()
    registry.register(MetricsFolder(folder))
    try:
        text = generate_latest(registry)  # type: ignore[no-untyped-call]
    except OSError as error:
        complain(f"the folder of metrics {folder} cannot be read: {error.strerror}. {_REMEDY}")
        return ExitCode.CANNOT_OPEN
    if port is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return ExitCode.FINE
    return _serve(registry, folder, port, address)


_REMEDY = (
    "It is made with the first file: start a server whose YAML has metrics.folder, or name "
    "another folder."
)


def _folder(place: Path | None) -> Path:
    named = place if place is not None else os.environ.get(ENVIRONMENT_VARIABLE)
    if named is None:
        raise UsageError(f"name a folder or a YAML, or set {ENVIRONMENT_VARIABLE}")
    path = Path(named)
    if path.is_dir() or path.suffix not in (".yaml", ".yml"):
        return path
    config = load_config(path)
    if config.metrics is None:
        raise UsageError(f"{path} has no metrics.folder: its processes write no files")
    return config.metrics.folder


def _serve(registry: CollectorRegistry, folder: Path, port: int, address: str) -> int:
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        complain(f"port {port} of {address} cannot be had: {error.strerror}. Name another --port.")
        return ExitCode.CANNOT_OPEN

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    print(f"metrics of {folder} at http://{address}:{server.server_port}/metrics", flush=True)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        server.shutdown()
        server.server_close()
        thread.join()
    return ExitCode.FINE
