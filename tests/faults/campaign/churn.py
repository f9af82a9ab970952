"""Write six times the budget while sizes shift from 0.5-2 MB to 16-32 MB and entries go at random.

The file stays within its bound, and writing does not get slower. The requests go straight to a
real worker, one at a time, so that nothing else is measured.
"""

import dataclasses
import random
import time

from tiered_mmcache.disk import protocol
from tiered_mmcache.disk.client import SpillClient, StoreSettings
from tiered_mmcache.entries.keys import encode_full_key, store_key
from tiered_mmcache.entries.record import EntryHeader
from tiered_mmcache.host.arena import Arena

from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import MIB, await_that, file_bytes, payload, quarantined, scan

_LARGEST_BYTES = 32 * MIB
_NAMESPACE = "faults/churn"
_READ_EVERY = 20


@dataclasses.dataclass
class _Held:
    token: int
    size: int


class _Churn:
    def __init__(self, folder, budget_bytes):
        self._folder = folder
        self._random = random.Random(7)
        self._arena = Arena(2 * _LARGEST_BYTES)
        (self._written_from,) = self._arena.reserve(_LARGEST_BYTES)
        (self._read_to,) = self._arena.reserve(_LARGEST_BYTES)
        settings = StoreSettings(
            path=str(folder),
            budget_bytes=budget_bytes,
            largest_entry_bytes=_LARGEST_BYTES,
            synchronous=False,
            namespace=_NAMESPACE,
        )
        self._client = SpillClient(settings, self._arena.fd)
        self._budget_bytes = budget_bytes
        self._held = {}
        self._next = 0
        self.puts = self.reads = self.hits = self.wrong = self.largest_file_bytes = 0
        await_that(lambda: self._client.poll() or self._client.is_ready)

    def phase(self, total_bytes, sizes):
        """Put that many bytes; (bytes per second of putting alone)."""
        done = 0
        put_s = 0.0
        while done < total_bytes:
            size = sizes(self._random, done / total_bytes)
            put_s += self._put(size)
            done += size
            self._take_some_away(size)
            if self.puts % _READ_EVERY == 0:
                self._read()
        return done / put_s

    def fill(self):
        while self._client.totals.used_bytes < self._budget_bytes - 4 * MIB:
            self._put(self._random.randrange(MIB // 2, 2 * MIB))

    def _put(self, size):
        key, self._next = self._next, self._next + 1
        self._held[key] = _Held(token=1, size=size)
        self._copy_in(payload(key, 1, size))
        began_s = time.monotonic()
        number = self._client.put(
            **self._names(key),
            header=_header(size),
            extents=[(self._written_from[0], _rounded(size))],
        )
        reply = self._reply(number)
        took_s = time.monotonic() - began_s
        assert isinstance(reply, protocol.Done), reply
        self.puts += 1
        self.largest_file_bytes = max(self.largest_file_bytes, file_bytes(self._folder))
        return took_s

    def _take_some_away(self, size):
        """Besides what the budget evicts, delete and use entries at random: holes everywhere."""
        for _ in range(self._random.randrange(3)):
            key = self._random.choice(list(self._held))
            if self._random.random() < 0.5:
                self._reply(self._client.delete(self._names(key)["store_key"]))
                del self._held[key]
            else:
                self._client.touch(self._names(key)["store_key"])

    def _read(self):
        key = self._random.choice(list(self._held)[-200:])
        held = self._held[key]
        self.reads += 1
        number = self._client.fill(
            **self._names(key),
            header=_header(held.size),
            extents=[(self._read_to[0], _rounded(held.size))],
        )
        reply = self._client.answer_to(number, 60.0)
        if isinstance(reply, protocol.Absent):
            del self._held[key]
            return
        assert isinstance(reply, protocol.Done), reply
        self.hits += 1
        (read,) = self._arena.slices([self._read_to], 0, held.size)
        self.wrong += read.numpy().tobytes() != payload(key, held.token, held.size).tobytes()

    def _copy_in(self, data):
        (target,) = self._arena.slices([self._written_from], 0, len(data))
        target.numpy()[:] = data

    def _reply(self, number):
        while True:
            for reply in self._client.poll():
                if reply.request == number:
                    return reply
            self._client.wait(1.0)

    def _names(self, key):
        full_key = encode_full_key(key)
        generation = self._client.generation
        key = store_key(namespace=_NAMESPACE, generation=generation, full_key=full_key)
        return {"store_key": key, "full_key": full_key}

    def close(self):
        self._client.close(30.0)
        self._arena.close()


def _header(size):
    return EntryHeader(
        class_tag="EmbeddingResult",
        dtype="uint8",
        item_bytes=1,
        shape=(size,),
        extras=b"",
        device_type="cpu",
    )


def _rounded(size):
    return -(-size // 4096) * 4096


def _between(least, most):
    return lambda generator, _: generator.randrange(least, most)


_SMALL = _between(MIB // 2, 2 * MIB)
_LARGE = _between(16 * MIB, _LARGEST_BYTES)


def _shifting(generator, share):
    """Small ones first, large ones last, more and more of them in between."""
    kind = _SMALL if generator.random() > share else _LARGE
    return kind(generator, share)


def _serve(connection, folder, budget_bytes):
    churn = _Churn(folder, budget_bytes)
    for _ in connection:
        churn.fill()
        quarter = 6 * budget_bytes // 4
        rates = [churn.phase(quarter, _SMALL)]
        rates += [churn.phase(quarter, _shifting) for _ in range(2)]
        rates += [churn.phase(quarter, _LARGE), churn.phase(quarter, _SMALL)]
        connection.send(
            {
                "rates": rates,
                "puts": churn.puts,
                "hits": churn.hits,
                "wrong": churn.wrong,
                "file_bytes": churn.largest_file_bytes,
            }
        )
    churn.close()


def run(folder, *, full):
    budget_bytes = (512 if full else 128) * MIB
    outcome = Outcome(campaign="churn")
    store = folder / "store"
    server = Child(_serve, store, budget_bytes, stderr=folder / "stderr.log")
    try:
        report = server.ask("churn", 600.0)
    except ChildFailedError as error:
        outcome.deaths += 1
        outcome.missed.append(str(error))
        return outcome
    outcome.expect(server.end(), "the server did not end cleanly")
    outcome.cases = report["puts"]
    outcome.wrong = report["wrong"]
    rates = report["rates"]
    most_bytes = 1.25 * budget_bytes + 4 * _LARGEST_BYTES
    outcome.missed += scan(store)[1][:3]
    outcome.expect(quarantined(store) == 0, "the store was set aside")
    outcome.expect(report["hits"] > 0, "nothing was ever served")
    outcome.figures.append(f"budget {budget_bytes // MIB} MiB, {report['hits']} answers checked")
    share = report["file_bytes"] / budget_bytes
    outcome.bound("largest file/budget:", share, f"<= {most_bytes / budget_bytes:.3g}")
    mib_s = ", ".join(f"{rate / MIB:.0f}" for rate in rates)
    outcome.figures.append(f"MiB/s put by quarter, then small again: {mib_s}")
    # At reduced size a quarter takes a fraction of a second: a busy machine shows in it.
    least = ">= 0.7" if full else ">= 0.3"
    outcome.bound("put rate last/first quarter:", rates[3] / rates[0], least)
    outcome.bound("small again/first quarter:", rates[4] / rates[0], least)
    return outcome
