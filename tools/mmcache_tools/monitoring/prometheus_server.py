"""A Prometheus of one's own for some seconds: its binary, its start, its answers.

Owns: finding or fetching Debian's package, and running it on a free port of this machine.
Does not own: what it scrapes (:mod:`.played_server`), or what is asked (docs/monitoring).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[3] / "build" / "prometheus"
_LIMIT_S = 60.0
_STEP_S = 0.05
_NOT_READY = 503


class CannotBeHadError(Exception):
    """There is no Prometheus here, and Debian's package could not be fetched."""


def binary(name: str = "prometheus") -> Path:
    """The program ``prometheus`` or ``promtool``: the machine's own, else Debian's, fetched once.

    Raises:
        CannotBeHadError: There is neither.
    """
    installed = shutil.which(name)
    if installed is not None:
        return Path(installed)
    found = FOLDER / "usr" / "bin" / name
    if not found.exists():
        _fetch()
    return found


def _fetch() -> None:
    if shutil.which("apt-get") is None:
        raise CannotBeHadError("install Prometheus: there is no apt-get here to fetch Debian's")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        try:
            _run("apt-get", "download", "prometheus", folder=folder)
        except CannotBeHadError:  # this machine's list of packages is old, or not there yet
            _run("apt-get", "update", folder=folder)
            _run("apt-get", "download", "prometheus", folder=folder)
        (package,) = Path(folder).glob("prometheus_*.deb")
        _run("dpkg-deb", "--extract", str(package), "unpacked", folder=folder)
        shutil.move(str(Path(folder) / "unpacked"), FOLDER)


def _run(*command: str, folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBeHadError(
            f"install Prometheus: Debian's package cannot be fetched: {done.stderr.strip()}"
        )


class Prometheus:
    """A running one.

    Args:
        url: Where it is.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: object) -> Any:
        """The ``data`` of an answer of its HTTP API.

        Raises:
            OSError: It does not listen, or is not ready yet.
            ValueError: It did not understand; the message is its own.
        """
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310 - it is http
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == _NOT_READY:
                raise
            raise ValueError(json.load(error)["error"]) from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def query_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """The series of an expression from one time to another, in seconds since the epoch."""
        found: list[dict[str, Any]] = self.ask(
            "query_range", query=expression, start=start_s, end=end_s, step=step_s
        )["result"]
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Ask again and again until a condition holds.

        Raises:
            TimeoutError: It did not within a minute.
        """
        end_s = time.monotonic() + _LIMIT_S
        while True:
            with contextlib.suppress(OSError):  # not listening yet
                if condition():
                    return
            if time.monotonic() > end_s:
                raise TimeoutError(f"Prometheus: {what} did not come about")
            time.sleep(_STEP_S)


@contextlib.contextmanager
def running(configuration: Path, *targets: str, interval_s: int = 1) -> Iterator[Prometheus]:
    """Prometheus with a configuration file, scraping other targets, and more often.

    Args:
        configuration: As docs/monitoring/prometheus.yaml; its rule files lie beside it.
        targets: ``host:port`` of what it scrapes instead.
        interval_s: How often it scrapes, and evaluates its rules.

    Raises:
        CannotBeHadError: There is no Prometheus.
    """
    settings = yaml.safe_load(configuration.read_text(encoding="utf-8"))
    settings["global"] = {
        "scrape_interval": f"{interval_s}s",
        "evaluation_interval": f"{interval_s}s",
    }
    settings["rule_files"] = [str(configuration.parent / name) for name in settings["rule_files"]]
    for job in settings["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets)}]
    with tempfile.TemporaryDirectory(prefix="mmcache-prometheus-") as folder:
        file = Path(folder, "prometheus.yaml")
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        port = _free_port()
        command = [
            str(binary()),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            server.wait_for(lambda: bool(server.ask("targets")), "its start")
            yield server
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def main() -> None:
    """Fetch the programs if need be."""
    print(f"{binary()} and {binary('promtool')} can be run")


if __name__ == "__main__":
    main()
