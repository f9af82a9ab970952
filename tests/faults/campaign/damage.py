"""Damage the store's file at random, at rest or while it is open, and ask for everything.

Each case damages a copy of one small store in one way, and lets a cache serve from it: an answer
is right or a miss, the worker may die, the server may not. A case is seeded by its number.
"""

import os
import random
import shutil
import struct
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

from tiered_mmcache.disk import layout
from tiered_mmcache.testing import audit

from .children import Child, ChildFailedError
from .outcome import Outcome
from .subject import (
    ForkedWorker,
    SubprocessWorker,
    configuration,
    give_up_quickly,
    is_right,
    open_cache,
    restart_quickly,
    result,
)

_KEYS = range(24)
_SIZES = (0, 10, 500, 5000, 40_000, 270_000)
_PAGE = layout.PAGE_BYTES
# lmdb 0.9 mdb.c: MDB_page begins with its number, flags at 10; in a meta page, after the page
# header, magic, version, address and map size, comes the free list's MDB_db, its root at 40.
_HEAD = struct.Struct("<Q2xH")
_FREE_ROOT = struct.Struct("<Q")
_FREE_ROOT_AT = 16 + 24 + 40
_TRANSACTION_AT = 16 + 24 + 48 + 48 + 8
_BRANCH, _LEAF, _META = 0x01, 0x02, 0x08
_CASE_LIMIT_S = 60.0
_AT_ONCE = 4  # they wait for hung workers most of the time
_REAL_START_EVERY = 10  # the other cases fork their worker


def _size(key):
    return _SIZES[key % len(_SIZES)]


def _configuration(folder):
    return configuration(folder, write_buffer="4MiB", read_timeout="0.5s", close_timeout="2s")


def _make_template(folder):
    """A store that was closed in peace, after some coming and going."""
    gone = range(100, 110)
    for numbers, freed in (((*_KEYS, *gone), ()), ((), gone)):
        with open_cache(_configuration(folder)) as cache:
            for key in numbers:
                assert cache.set(key, result(key, 0, _size(key)))
            for key in freed:
                assert cache.free(key)
            assert cache.drain()


# Which pages there are


def _pages(data):
    """Page numbers by what they hold: meta, structure, free list, payload."""
    kinds = {"meta": [0, 1], "structure": [], "free": [], "payload": []}
    free = _free_list(data)
    for number in range(2, len(data) // _PAGE):
        stated, flags = _HEAD.unpack_from(data, number * _PAGE)
        if number in free:
            kinds["free"].append(number)
        elif stated == number and flags in (_BRANCH, _LEAF):
            kinds["structure"].append(number)
        else:
            kinds["payload"].append(number)
    return kinds


def _free_list(data):
    newest = max((0, 1), key=lambda meta: data[meta * _PAGE + _TRANSACTION_AT])
    root = _FREE_ROOT.unpack_from(data, newest * _PAGE + _FREE_ROOT_AT)[0]
    return {root}


def _some_page(generator, data):
    pages = [numbers for numbers in _pages(data).values() if numbers]
    return generator.choice(generator.choice(pages))


# Kinds of damage: each changes the bytes and says where


def _flip_bits(generator, data):
    places = []
    for _ in range(generator.choice([1, 1, 2, 8, 64])):
        place = _some_page(generator, data) * _PAGE + generator.randrange(_PAGE)
        data[place] ^= 1 << generator.randrange(8)
        places.append(place)
    return f"bits flipped at {places}"


def _truncate(generator, data):
    size = generator.choice([generator.randrange(len(data)), _some_page(generator, data) * _PAGE])
    del data[size:]
    return f"truncated to {size}"


def _zero(generator, data):
    start = _some_page(generator, data) * _PAGE + generator.choice([0, generator.randrange(_PAGE)])
    size = min(generator.choice([8, 512, _PAGE, 4 * _PAGE, 40 * _PAGE]), len(data) - start)
    data[start : start + size] = bytes(size)
    return f"{size} bytes zeroed at {start}"


def _swap(generator, data):
    first, second = (_some_page(generator, data) * _PAGE for _ in range(2))
    one, other = data[first : first + _PAGE], data[second : second + _PAGE]
    data[first : first + _PAGE], data[second : second + _PAGE] = other, one
    return f"pages swapped at {first} and {second}"


def _overwrite(generator, data):
    start = _some_page(generator, data) * _PAGE
    size = min(generator.choice([16, _PAGE]), len(data) - start)
    data[start : start + size] = generator.randbytes(size)
    return f"{size} random bytes at {start}"


_AT_REST = [_flip_bits, _flip_bits, _truncate, _zero, _swap, _overwrite]
_WHILE_OPEN = ["replace", "truncate", "write"]
_KINDS = {damage.__name__.strip("_") for damage in _AT_REST} | {
    f"open_{way}" for way in _WHILE_OPEN
}


def _damage_at_rest(generator, file, data):
    damaged = bytearray(data)
    damage = generator.choice(_AT_REST)
    case = damage(generator, damaged)
    file.write_bytes(damaged)
    return damage.__name__.strip("_"), case


def _damage_open(generator, file, data):
    """Damage the file under an open store: in place, by truncation, or put another one there."""
    way = generator.choice(_WHILE_OPEN)
    damaged = bytearray(data)
    if way == "truncate":
        case = _truncate(generator, damaged)
        os.truncate(file, len(damaged))
    else:
        case = generator.choice([_flip_bits, _zero, _swap, _overwrite])(generator, damaged)
        if way == "write":
            with file.open("r+b") as open_file:
                open_file.write(damaged)
        else:
            other = file.with_name("other.mdb")
            other.write_bytes(damaged)
            other.chmod(0o600)
            other.rename(file)
    return f"open_{way}", case


# One case, in the server


def _serve_from(folder, data, number):
    """(hits, wrong answers, kind of damage, what was done) of one case."""
    generator = random.Random(number)
    launcher = SubprocessWorker if number % _REAL_START_EVERY == 0 else ForkedWorker
    while_open = number % 4 == 3
    file = folder / layout.DATA_FILE
    folder.mkdir(mode=0o700)
    file.touch(mode=0o600)
    if while_open:
        file.write_bytes(data)
    else:
        kind, case = _damage_at_rest(generator, file, data)
    with open_cache(_configuration(folder), launcher) as cache:
        if while_open:
            for key in generator.sample(_KEYS, 6):
                cache.get_single(key)
                cache.mm_cache.clear()  # so that it is read again
                cache.current_size = 0
            kind, case = _damage_open(generator, file, data)
        hits = wrong = 0
        for key in generator.sample(_KEYS, len(_KEYS)):
            found = cache.get_single(key)
            audit(cache)
            if found is not None:
                hits += 1
                wrong += not is_right(found, key, 0, _size(key))
        wrong += not cache.set("new", result(3, 1, 5000))
        wrong += not is_right(cache.get_single("new"), 3, 1, 5000)
        audit(cache)
    shutil.rmtree(folder)
    return hits, wrong, kind, case


def _serve(connection, folder, data):
    restart_quickly()
    give_up_quickly(start_s=2.0)
    for number in connection:
        connection.send(_serve_from(folder / f"case-{number}", data, number))


def run(folder, *, full):
    cases = 2000 if full else 100
    outcome = Outcome(campaign="damage")
    template = folder / "template"
    _make_template(template)
    data = (template / layout.DATA_FILE).read_bytes()
    pages = {kind: len(numbers) for kind, numbers in _pages(data).items()}
    servers = [_Server(folder, data) for _ in range(_AT_ONCE)]
    hits = 0
    asked_by_kind, missed_by_kind = Counter(), Counter()
    remaining = iter(range(cases))
    for server in servers:
        server.try_next(remaining)
    while busy := [server for server in servers if server.number is not None]:
        for server in _that_answer(busy):
            outcome.cases += 1
            try:
                served, wrong, kind, case = server.answer()
            except ChildFailedError as error:
                outcome.deaths += 1
                outcome.missed.append(f"case {server.number}: {error}")
            else:
                hits += served
                outcome.wrong += wrong
                asked_by_kind[kind] += len(_KEYS)
                missed_by_kind[kind] += len(_KEYS) - served
                outcome.expect(not wrong, f"case {server.number}, {kind}: {case}")
            server.try_next(remaining)
    for server in servers:
        server.end()
    asked = cases * len(_KEYS)
    outcome.figures += [
        f"{hits:,} of {asked:,} look-ups served right, the others misses",
        f"a quarter of the cases while open; pages {pages}",
    ]
    outcome.expect(asked_by_kind.keys() == _KINDS, f"kinds tried {sorted(asked_by_kind)}")
    for kind, asked_of_kind in asked_by_kind.items():
        missed = missed_by_kind[kind]
        outcome.expect(missed < asked_of_kind, f"{kind} was never survived")
        met = missed > 0 or kind == "open_replace"  # the file that is open stays whole
        outcome.expect(met, f"{kind} was never met")
    return outcome


def _that_answer(servers):
    """Those with an answer, or the first of all when none had one in time."""
    ready = wait([each for server in servers for each in server.waited_for], _CASE_LIMIT_S)
    answering = [server for server in servers if set(server.waited_for) & set(ready)]
    return answering or servers[:1]


class _Server:
    """A server, and another one when it failed."""

    def __init__(self, folder, data):
        self.number = None  # of the case that it tries
        self._start = lambda: Child(_serve, Path(folder), data, stderr=folder / "stderr.log")
        self._server = self._start()

    @property
    def waited_for(self):
        return [self._server.connection, self._server.process.sentinel]

    def try_next(self, numbers):
        self.number = next(numbers, None)
        if self.number is not None:
            self._server.tell(self.number)

    def answer(self):
        try:
            return self._server.answer(1.0)
        except ChildFailedError:
            self._server = self._start()
            raise

    def end(self):
        self._server.end()
