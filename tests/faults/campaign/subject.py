"""What the campaigns run against: caches on small stores, payloads that follow from their keys."""

import contextlib
import functools
import hashlib
import os
import select
import socket
import struct
import time
from pathlib import Path

import numpy as np
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache, tiered_cache
from tiered_mmcache.disk import client as client_module
from tiered_mmcache.disk import layout, worker
from tiered_mmcache.disk.audit import Audit
from tiered_mmcache.disk.client import SpillClient
from tiered_mmcache.disk.launch import SubprocessWorker
from tiered_mmcache.disk.reader import StoreReader

MIB = 1024 * 1024
LIMIT_S = 60.0
_HEAD = struct.Struct(">QQ")
HEAD_BYTES = _HEAD.size
torch.set_num_threads(1)


@functools.cache
def _noise():
    return np.random.default_rng(0).integers(0, 256, 40 * MIB, dtype=np.uint8)


def _number(*parts):
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def size_of(key, least, most):
    """A size that follows from the key."""
    return least + _number("size", key) % (most - least + 1)


def payload(key, token, size):
    """The bytes of a key at a revision or version, which lead the bytes as their head."""
    noise = _noise()
    start = _number(key, token) % (len(noise) - size)
    data = noise[start : start + size].copy()
    head = _HEAD.pack(key, token)[:size]
    data[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    return data


def result(key, token, size):
    return EmbeddingResult(embedding=torch.from_numpy(payload(key, token, size)))


def is_right(found, key, token, size):
    """Whether an answer is what was set, bit for bit."""
    held = found.embedding
    if held.dtype != torch.uint8 or tuple(held.shape) != (size,):
        return False
    return np.array_equal(held.numpy(), payload(key, token, size))


def token_in(found):
    """The token that an answer claims; -1 when it is too short to have one."""
    data = found.embedding.numpy().tobytes()[:HEAD_BYTES]
    return _HEAD.unpack(data)[1] if len(data) == HEAD_BYTES else -1


def configuration(folder, *, hot=4 * MIB, host=None, **disk):
    mapping = {
        "namespace": "faults/campaign",
        "hot": {"max_size": hot},
        "disk": {
            "path": str(folder),
            "max_size": "16MiB",
            "write_buffer": "8MiB",
            "durability": "relaxed",
            "read_timeout": "2s",
            "close_timeout": "10s",
            **disk,
        },
    }
    if host is not None:
        mapping["host"] = {"max_size": host}
    return CacheConfig.from_mapping(mapping)


def restart_quickly(first_s=0.0, longest_s=0.2):
    """Shorten the pauses between two starts of a worker, in this process."""
    client_module._FIRST_PAUSE_S = first_s
    client_module._LONGEST_PAUSE_S = longest_s


def give_up_quickly(silence_s=0.5, start_s=5.0, slow_end_s=1.0):
    """Shorten how long a silent worker is waited for, in this process."""
    client_module._SLOW_END_S = slow_end_s
    client_module._SILENCE_LIMIT_S = silence_s
    client_module._START_LIMIT_S = start_s
    tiered_cache._START_TIMEOUT_S = start_s


def open_cache(config, launcher=SubprocessWorker):
    def make_client(settings, arena_fd):
        return SpillClient(settings, arena_fd, launcher=launcher)

    return TieredMultimodalCache(config=config, make_client=make_client)


def worker_pid(cache):
    return cache._below.disk.client.pid


def ready_worker(cache):
    """The process number of a worker that has opened the store."""
    await_that(lambda: cache.drain(1.0) and cache._below.disk.client.is_ready)
    return worker_pid(cache)


def await_that(condition, limit_s=LIMIT_S, step_s=0.002):
    """Poll until a condition holds; seconds that it took."""
    began_s = time.monotonic()
    while not condition():
        took_s = time.monotonic() - began_s
        if took_s > limit_s:
            raise TimeoutError(f"{condition} did not come true within {limit_s} s")
        select.select([], [], [], step_s)
    return time.monotonic() - began_s


def scan(folder):
    """What is not as it must be in a store, as texts: every row, every digest, the totals."""
    with StoreReader.open(Path(folder)) as reader:
        judge = Audit(reader)
        findings = [f"{finding.cause.value}: {finding.detail}" for finding in judge.findings()]
        return judge.entries, findings


def quarantined(folder):
    return len(list(Path(folder).glob(".quarantine-*")))


def file_bytes(folder):
    return (Path(folder) / layout.DATA_FILE).stat().st_size


class ForkedWorker:
    """The worker's own code in a fork of this process: there in 10 ms instead of 150.

    Args:
        arena_fd: As for :class:`tiered_mmcache.disk.launch.SubprocessWorker`.
        first: Called in the worker before anything else.
    """

    def __init__(self, arena_fd, *, first=None):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = os.dup(arena_fd)  # forking closes the parent's arena in the child
        self._status = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                self.connection.close()
                os.setsid()
                if first is not None:
                    first()
                worker.main(theirs.detach(), inherited)
                status = 0
            os._exit(status)
        theirs.close()
        os.close(inherited)
        self._fd = os.pidfd_open(self.pid)

    def kill(self):
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)

    @property
    def exit_signal(self):
        status = self._status
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    def reap(self, timeout_s):
        if self._status is None and select.select([self._fd], [], [], timeout_s)[0]:
            self._status = os.waitpid(self.pid, 0)[1]
            os.close(self._fd)
        return self._status is not None
