"""One play: calls on a cache, with copies, worker and clock that move between and during them.

Owns: the settings, the calls, what may happen at which point, and what must hold at each; making
a failing play small.
Does not own: how many are played, or what is tried on purpose (test_interleavings.py).

A play is made of calls and of choices, small numbers that are taken in turn wherever something may
happen; 0 is the latest moment: nothing happens, or a wait lasts until its end. A list of choices
that is used up goes on with zeros, so every prefix of a play is a play.

What must hold, whatever was chosen:

* The hot tier is that of a dictionary to which the same calls were made, and which was told of each
  look-up below whether it found the entry, and whether it then brought it up.
* An answer has the bytes that were last set under its key, or is a miss; what was freed or cleared
  is a miss. Bytes are looked at when the copies that bring them have ended, as a consumer would.
* ``current_size <= max_size``, victims whose copy has not ended and what is being promoted
  included, at every moment at which the cache asks the engine or waits for the worker.
* :func:`audit` after each call, :func:`audit_idle` at the end, and then every entry once more.

Where the room is ample, nothing dies and no time passes, each answer is the dictionary's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
from collections import OrderedDict

import numpy as np
import torch

from tiered_mmcache import EmbeddingResult, Tier, TieredMultimodalCache
from tiered_mmcache.config import CacheConfig
from tiered_mmcache.disk import protocol, recovery
from tiered_mmcache.disk.tables import Tables
from tiered_mmcache.entries.keys import encode_full_key
from tiered_mmcache.testing import (
    ManualCopyEngine,
    ManualThread,
    ManualTransfer,
    audit,
    audit_idle,
    poison_released,
)
from tiered_mmcache.testing.stepping import SteppedClient, SteppingWorkers

KIB = 1024
HOT_BYTES = 16 * KIB
SIZES = (0, 1000, 3000, 4096, 6000, 8000, 16_000, 20_000)  # the last is larger than the hot tier
KEYS = (1, 2, 3, "four", TieredMultimodalCache.combine_hashes([1, 2]))
ONLY_IN_MEMORY = frozenset([5])  # a key that no store can hold
READ_TIMEOUT_S = 2.0
_MOST_MOMENTS = 20_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a cache is made, and what may happen to it.

    Attributes:
        ample: Nothing needs to be dropped; no time passes and no worker dies.
        scale: How many times larger everything is; from 40 on, entries take several reads.
    """

    ample: bool
    scale: int = 1
    hot: dict = dataclasses.field(default_factory=dict)
    host: dict | None = None
    disk: dict | None = None

    @property
    def hot_bytes(self):
        return HOT_BYTES * self.scale

    def config(self, folder):
        sections = {
            "namespace": "model/interleavings",
            "hot": {"max_size": self.hot_bytes, "oversize": "spill", **self.hot},
        }
        if self.host is not None:
            sections["host"] = {"page_locked": "off", **self.host}
        if self.disk is not None:
            sections["disk"] = {
                "path": str(folder / "store"),
                "max_size": "64MiB",
                "write_buffer": "1MiB",
                "durability": "relaxed",
                "read_timeout": READ_TIMEOUT_S,
                **self.disk,
            }
        return CacheConfig.from_mapping(sections)


AHEAD = {"clean_ahead": 8 * KIB}
AMPLE = (
    Setting(ample=True, disk={}),
    Setting(ample=True, disk={"write": "through"}, hot=AHEAD),
    Setting(ample=True, host={"max_size": 16 * KIB}, disk={}, hot=AHEAD),
    Setting(ample=True, host={"max_size": 24 * KIB}, disk={"write": "through"}),
    Setting(ample=True, host={"max_size": "1MiB"}, hot=AHEAD),
    Setting(ample=True, host={"max_size": "1MiB"}, disk={"write": "on_second_hit"}),
)
TIGHT = (
    Setting(ample=False, host={"max_size": 12 * KIB}, hot={"clean_ahead": 14 * KIB}),
    Setting(ample=False, disk={"write_buffer": 20 * KIB}),
    Setting(ample=False, disk={"write_buffer": 28 * KIB, "write": "through"}, hot=AHEAD),
    Setting(ample=False, host={"max_size": 8 * KIB}, disk={"write_buffer": 16 * KIB}, hot=AHEAD),
    Setting(
        ample=False,
        host={"max_size": 24 * KIB, "demote_wait": 1.0},
        disk={"write_buffer": 12 * KIB, "write": "on_second_hit"},
    ),
    Setting(
        ample=False,
        host={"max_size": 16 * KIB, "demote_wait": 0.5},
        disk={"write_buffer": 24 * KIB, "max_size": 96 * KIB},
        hot=AHEAD,
    ),
)
LARGE = (
    Setting(ample=True, scale=40, disk={"write_buffer": "16MiB"}, hot={"clean_ahead": 320 * KIB}),
    Setting(
        ample=False,
        scale=40,
        host={"max_size": 800 * KIB},
        disk={"write_buffer": 640 * KIB},
        hot={"clean_ahead": 320 * KIB},
    ),
)
SETTINGS = AMPLE + TIGHT + LARGE


class Choices:
    """Small numbers, taken in turn; remembered, so that a play can be played again."""

    def __init__(self, numbers=(), rest=None):
        self._numbers = iter(numbers)
        self._rest = rest
        self.taken = []

    def pick(self, count):
        """A number below ``count``; 0 is the latest moment."""
        number = next(self._numbers, None)
        if number is None:
            number = 0 if self._rest is None else int(self._rest.random() * count)
        self.taken.append(number % count)
        return number % count


class KeptStore:
    """One open store for many plays, emptied between them; opening is not what is played."""

    def __init__(self, folder):
        self.folder = folder
        settings = recovery.OpenSettings(
            path=folder / "store",
            budget_bytes=64 * KIB * KIB,
            largest_entry_bytes=64 * KIB,
            synchronous=False,
        )
        self._opened = recovery.open_for_writing(settings)
        self._tables = Tables(self._opened.environment)
        with self._opened.environment.begin() as transaction:
            self._fresh = list(transaction.cursor(self._tables.meta))
        self._configs = {}

    def config(self, setting):
        number = id(setting)  # settings are made once
        if number not in self._configs:
            self._configs[number] = setting, setting.config(self.folder)
        return self._configs[number][1]

    def open(self, settings):
        return _StaysOpen(self._opened)

    def empty(self):
        tables = self._tables
        with self._opened.environment.begin(write=True) as transaction:
            for table in (tables.entries, tables.chunks, tables.recency, tables.meta):
                transaction.drop(table, delete=False)
            for key, value in self._fresh:
                transaction.put(key, value, db=tables.meta)

    def close(self):
        self._opened.close()


class _StaysOpen:
    def __init__(self, opened):
        self.environment = opened.environment
        self.is_in_place = opened.is_in_place
        self.cover_last_page = opened.cover_last_page

    def close(self, *, cleanly=True):
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call on the cache: its name, its keys, and the bytes of what is set."""

    name: str
    keys: tuple = ()
    size: int = 0


def calls_of(pick, count, setting):
    """Calls, mostly look-ups and sets; a third of the time on a store that holds something."""
    keys = KEYS if setting.ample else (*KEYS, ONLY_IN_MEMORY)
    calls = []
    if setting.disk is not None and not pick(3):
        calls = [Call("set", (key,), SIZES[4 + pick(2)] * setting.scale) for key in KEYS[:4]]
        calls.append(Call("drain"))
    return calls + [_call_of(pick, keys, setting) for _ in range(count)]


def _call_of(pick, keys, setting):
    kind = pick(20)
    key = keys[pick(len(keys))]
    if kind < 8:
        return Call("set", (key,), SIZES[pick(len(SIZES))] * setting.scale)
    if kind < 13:
        return Call("get", (key,))
    if kind < 15:
        return Call(("get_many", "prefetch")[kind - 13], (key, keys[pick(len(keys))]))
    if kind < 17:
        return Call("free", (key,))
    if kind < 18:
        return Call("has", (key,))
    if kind == 18:
        return Call("drain") if setting.ample else Call("capture")
    return Call("clear") if pick(2) else Call("drain")


def bytes_of(serial, size):
    """What is set the ``serial``-th time: no two alike, where they have eight bytes."""
    return (serial.to_bytes(2, "big") * (size // 2 + 1))[:size]


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    """Bytes that a consumer looks at when the last copy that brings them has ended."""

    held: np.ndarray  # over the tensor's memory, without holding the tensor
    known: tuple
    last: ManualTransfer | None

    def arrived(self):
        return self.last is None or self.last.ended

    def is_right(self):
        return self.held.tobytes() == bytes_of(*self.known)


class Play:
    """A cache between a manual copy engine and a stepping worker, beside its dictionary.

    Args:
        setting: How the cache is made.
        store: Where its disk tier is.
        choices: When what happens; None for everything at once.
    """

    def __init__(self, setting, store, choices):
        self.setting = setting
        self.choices = choices
        self.now_s = 1000.0
        self.serial = 0
        self.moments = 0
        self.finishing = False
        self.watched = False
        self.problem = None
        self.reads = []
        self.looked = []
        self.promoting_bytes = 0
        self.hot = OrderedDict()  # key -> (serial, size), as the hot tier must be
        self.truth = {}  # key -> (serial, size), as last set
        self.engine = ManualCopyEngine()
        self.given = {}  # request -> message
        self.history = {}  # full key -> every (serial, size) ever set under it
        self.captured = False
        self.workers = SteppingWorkers(store.open)
        self.workers.on_store = self.check_stored
        self.cache = TieredMultimodalCache(
            config=store.config(setting),
            engine=self.engine,
            make_client=self._make_client,
            clock=lambda: self.now_s,
        )
        below = self.below = self.cache._below
        below.arena._start = ManualThread()  # memory is never made ready: extents stay the same
        self._watch_memory(below.arena)
        poison_released(self.cache, self.engine)
        self._watch_look_ups(below.promoter)
        self.engine.on_call = self.moment
        self.watched = True

    def _make_client(self, settings, arena_fd):
        return SteppedClient(
            settings,
            arena_fd,
            workers=self.workers,
            clock=lambda: self.now_s,
            on_wait=self.wait,
        )

    def _watch_memory(self, arena):
        """What the worker was given, and has not answered, is not given to anybody else."""
        if self.below.disk is None:
            return
        client, given = self.below.disk.client, self.given
        submit, release = client._submit, arena.release

        def watched_submit(number, message):
            given[number] = message
            return submit(number, message)

        def watched_release(runs):
            asked = [given[number] for number in client.unanswered]
            held = [run for message in asked for run in getattr(message, "extents", ())]
            self.must(not _overlap(runs, held), "memory was given back under the worker")
            release(runs)

        client._submit, arena.release = watched_submit, watched_release

    def _watch_look_ups(self, promoter):
        find, restore = promoter.find, promoter.restore

        def watched_find(key):
            found = find(key)
            self.looked.append(None if found is None else found.entry.header.payload_bytes)
            return found

        def watched_restore(found):
            self.promoting_bytes = self.looked[-1]
            result = restore(found)
            self.promoting_bytes = 0
            return result

        promoter.find, promoter.restore = watched_find, watched_restore

    # What happens meanwhile

    def moment(self):
        """The cache is in the middle of something: what can be seen now must hold now."""
        self.check_now()
        if self.choices is None or self.finishing:
            self.everything_at_once()
        elif self.choices.pick(4) == 3:
            self.event()

    def wait(self, timeout_s):
        """The cache waits for the worker."""
        self.check_now()
        happens = 0
        if self.choices is not None and not self.finishing and self.watched:
            happens = self.choices.pick(3 if self.setting.ample else 6)
        if happens > 2 and (self.is_reading() or self.choices.pick(8) == 7):
            self.give_up_waiting(happens, timeout_s)
        elif happens:
            self.event()
        elif not self.until_it_speaks():
            worker = self.workers.latest
            if worker is not None:
                worker.hangs = False
            self.now_s += timeout_s + 0.001

    def give_up_waiting(self, happens, timeout_s):
        """No answer in time, or never, from a worker that may be in the middle of a read."""
        for _ in range(self.choices.pick(4)):
            self.workers.step()
        worker = self.workers.latest
        if happens == 5 and worker is not None:
            worker.die()
            return
        self.now_s += timeout_s + 0.001
        if happens == 4 and worker is not None:
            worker.hangs = True
            self.now_s += 11.0

    def is_reading(self):
        unanswered = self.below.disk.client.unanswered
        return any(isinstance(self.given[number], protocol.Fill) for number in unanswered)

    def until_it_speaks(self):
        """Let the worker work until the server has something to read; False when it has not."""
        worker = self.workers.latest
        while worker is not None and worker.step():
            if not worker.alive or select.select([worker.connection], [], [], 0)[0]:
                return True
        return False

    def event(self):
        """One thing that may happen at any time."""
        kinds = 6 if self.setting.ample else 9
        kind = self.choices.pick(kinds)
        if kind < 2:
            self.engine.complete(self.choices.pick(4))
        elif kind == 2:
            self.engine.synchronize()
        elif kind < 5:
            self.workers.step()
        elif kind == 5:
            self.workers.step(write_first=True)
        elif kind == 6:
            self.now_s += (0.001, READ_TIMEOUT_S, 11.0, 70.0)[self.choices.pick(4)]
        elif kind == 7 and self.workers.latest is not None:
            self.end_worker(self.workers.latest)

    def end_worker(self, worker):
        how = self.choices.pick(4)
        if how == 1:
            worker.die()
        elif how == 2:
            worker.hangs = True

    def everything_at_once(self):
        while self.engine.pending:
            self.engine.complete()
        while self.workers.step():
            pass

    # The calls

    def run(self, calls):
        """Make all calls, then see to the end; the answers."""
        with self._closing():
            answers = []
            for call in calls:
                while self.choices is not None and self.choices.pick(3):
                    self.event()
                answers.append(getattr(self, call.name)(*call.keys, *_sizes(call)))
                self.check()
                if call.name != "capture":
                    self.engine.captures = False
                answers.append([(key, *known) for key, known in self.hot.items()])
            self.finish()
        return answers

    @contextlib.contextmanager
    def _closing(self):
        try:
            yield
        finally:
            self.finishing = True
            self.engine.captures = False
            self.engine.on_call = lambda: None
            try:
                self.cache.close(timeout_s=1.0)
            finally:
                for worker in self.workers.workers:
                    worker.die()
                    worker.connection.close()

    def finish(self):
        self.finishing = True
        self.engine.captures = False
        for worker in self.workers.workers:
            worker.hangs = False
        assert self.cache.drain()
        audit_idle(self.cache)
        for key in (*KEYS, ONLY_IN_MEMORY):
            self.get(key)
            self.check()
        assert self.cache.drain()
        self.engine.synchronize()
        self.check()
        assert not self.reads
        audit_idle(self.cache)

    def set(self, key, size):
        self.serial += 1
        known = (self.serial, size)
        buffer = bytearray(bytes_of(*known))
        tensor = torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0).byte()
        self.history.setdefault(encode_full_key(key), set()).add(known)
        admitted = self.cache.set(key, EmbeddingResult(embedding=tensor))
        if key in self.hot:
            assert admitted
            self.hot.move_to_end(key)
        elif size <= self.setting.hot_bytes:
            assert admitted
            self.truth[key] = known
            self._admit(key, known)
        elif admitted:
            self.truth[key] = known
        else:
            self.truth.pop(key, None)
        return admitted

    def get(self, key):
        self.looked.clear()
        result = self.cache.get_single(key)
        assert key not in self.hot or result is self.cache.mm_cache[key]
        return self.got(key, result)

    def get_many(self, *keys):
        self.looked.clear()
        results = self.cache.get_many(keys)
        return [self.got(key, result) for key, result in zip(keys, results, strict=True)]

    def prefetch(self, *keys):
        self.cache.prefetch(keys)

    def got(self, key, result):
        """Compare one answer, and follow it in the dictionary."""
        if key in self.hot:
            self.hot.move_to_end(key)
            self.expect(result, self.hot[key])
            return self.hot[key]
        found_bytes = self.looked.pop(0)
        if result is None:
            if found_bytes is not None and found_bytes <= self.setting.hot_bytes:
                self._make_room(found_bytes)
            assert not self.setting.ample or key not in self.truth, f"{key!r} was forgotten"
            return None
        assert found_bytes is not None
        assert key in self.truth, f"{key!r} came back"
        known = self.truth[key]
        self.expect(result, known)
        if self.choices is not None and self.choices.pick(2):
            self.engine.synchronize()  # the caller uses it at once
        if known[1] <= self.setting.hot_bytes:
            self._admit(key, known)
        return known

    def free(self, key):
        was_known = self.cache.free(key)
        assert not was_known or key in self.truth
        if self.setting.ample:
            assert was_known is (key in self.truth)
        self.hot.pop(key, None)
        self.truth.pop(key, None)
        return was_known

    def has(self, key):
        tier = self.cache.locate(key)
        assert (tier is Tier.HOT) is (key in self.hot)
        assert tier is None or key in self.truth
        if self.setting.ample:
            assert (tier is not None) is (key in self.truth)
        return tier is not None

    def clear(self):
        self.cache.clear()
        self.hot.clear()
        self.truth.clear()

    def drain(self):
        self.cache.drain(timeout_s=5.0)

    def capture(self):
        """The caller captures a graph during the next call."""
        self.captured = True
        self.engine.captures = True

    # What must hold

    def check(self):
        assert self.problem is None, self.problem
        cache = self.cache
        audit(cache)
        assert list(cache.mm_cache) == list(self.hot), (list(cache.mm_cache), list(self.hot))
        self.must(*self.device_bound())
        for key, result in cache.mm_cache.items():
            self.expect(result, self.hot[key])
        arriving = [read for read in self.reads if not read.arrived()]
        for read in self.reads:
            assert not read.arrived() or read.is_right(), f"wrong bytes of {read.known}"
        self.reads = arriving

    def expect(self, result, known):
        """These bytes, as soon as the copies that bring them have ended."""
        start = result.embedding.data_ptr()
        brings = [
            transfer
            for transfer in self.engine.pending
            if transfer.is_promotion and 0 <= transfer.target[0].data_ptr() - start <= known[1]
        ]
        self.reads.append(
            _Read(result.embedding.detach().numpy(), known, brings[-1] if brings else None)
        )

    def check_now(self):
        """In the middle of a call, where the cache survives whatever is raised."""
        self.moments += 1
        if not self.watched:
            return
        self.must(self.moments < _MOST_MOMENTS, "the cache makes no progress")
        self.must(*self.device_bound())

    def must(self, holds, told):
        """Note what does not hold: the cache survives whatever is raised inside of it."""
        if not holds:
            self.problem = self.problem or told
            raise AssertionError(told)

    def check_stored(self, message, payload):
        """What the store is about to hold was once set under its key, whatever comes after."""
        known = self.history.get(message.full_key, ())
        self.must(any(payload == bytes_of(*each) for each in known), "other bytes were stored")

    def device_bound(self):
        """The device's memory: hot entries, victims still being copied, what is promoted.

        Whether it is within ``max_size``, and what it is made of. Victims of a set in a capture
        are the exception: their copies cannot be waited for.
        """
        cache = self.cache
        hot = {result.embedding.data_ptr() for result in cache.mm_cache.values()}
        leaving = sum(
            transfer.source[0].numel()
            for transfer in self.engine.pending
            if not transfer.is_promotion
            and transfer.source[0].data_ptr() not in hot
            and transfer.source[0].numel() <= cache.max_size
        )
        promoted = self.promoting_bytes if self.promoting_bytes <= cache.max_size else 0
        held = cache.current_size + (0 if self.captured else leaving + promoted)
        told = f"{cache.current_size} bytes, {leaving} leaving, {promoted} coming"
        return held <= cache.max_size, told

    def _admit(self, key, known):
        self._make_room(known[1])
        self.hot[key] = known

    def _make_room(self, size):
        while (
            self.hot
            and sum(known[1] for known in self.hot.values()) + size > self.setting.hot_bytes
        ):
            self.hot.popitem(last=False)


def _sizes(call):
    return (call.size,) if call.name == "set" else ()


def _overlap(runs, others):
    return any(
        run[0] < other[0] + other[1] and other[0] < run[0] + run[1]
        for run in runs
        for other in others
    )


def play(setting, store, calls, choices):
    """Play once on an empty store; the answers, and what the hot tier held after each call."""
    store.empty()
    return Play(setting, store, choices).run(calls)


def made_small(setting, store, calls, numbers):
    """The fewest calls and choices, found by leaving them out, with which a play still fails."""

    def fails(some_calls, some_numbers):
        try:
            play(setting, store, some_calls, Choices(some_numbers))
        except AssertionError:
            return True
        return False

    if not fails(calls, numbers):
        return calls, numbers
    calls = next(calls[:end] for end in range(len(calls) + 1) if fails(calls[:end], numbers))
    for index in reversed(range(len(calls))):
        fewer = calls[:index] + calls[index + 1 :]
        calls = fewer if fails(fewer, numbers) else calls
    while numbers and fails(calls, numbers[: len(numbers) // 2]):
        numbers = numbers[: len(numbers) // 2]
    while numbers and fails(calls, numbers[:-1]):
        numbers = numbers[:-1]
    for index, number in enumerate(numbers):
        later = [*numbers[:index], 0, *numbers[index + 1 :]]
        numbers = later if number and fails(calls, later) else numbers
    return calls, numbers
