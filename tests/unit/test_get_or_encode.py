"""get_or_encode on threads and asyncio tasks, over every combination of tiers that needs no worker.

Owns: what is encoded, by whom, who waits, what is kept and what is counted. Does not own: real
disks (tests/integration/test_encode_cost.py) or random sequences (tests/model).

No test sleeps: an encoder that must be under way waits for an event, and a wait of another caller
says when it has begun.
"""

import asyncio
import contextlib
import contextvars
import gc
import os
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tiered_mmcache import CacheConfig, EmbeddingResult, TieredMultimodalCache
from tiered_mmcache.config import HostConfig, HotConfig
from tiered_mmcache.encoding.single_flight import Flight
from tiered_mmcache.testing import ManualClock, audit

SIZE = 1000
LIMIT_S = 30.0  # of waits that must end; reached only by a failing test


def result(key, size=SIZE):
    return EmbeddingResult(embedding=torch.full((size,), hash(key) % 251, dtype=torch.uint8))


def values(results):
    return [each.embedding[0].item() for each in results]


class Encoder:
    """Encodes at once, or when it is let; keeps what it was asked for."""

    def __init__(self, *, held=False, error=None, make=result):
        self.calls = []
        self.error = error
        self.make = make
        self.entered = threading.Event()
        self.let = threading.Event()
        if not held:
            self.let.set()

    def __call__(self, keys):
        self.calls.append(list(keys))
        self.entered.set()
        assert self.let.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return [self.make(key) for key in keys]


class AsyncEncoder(Encoder):
    async def __call__(self, keys):
        self.calls.append(list(keys))
        self.entered.set()
        while not self.let.is_set():
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [self.make(key) for key in keys]


@pytest.fixture(params=["hot", "host"])
def cache(request):
    config = CacheConfig(
        hot=HotConfig(max_size=4 * SIZE),
        host=HostConfig(max_size=64 * 1024) if request.param == "host" else None,
    )
    with TieredMultimodalCache(config=config) as made:
        yield made
        audit(made)
        assert len(made._encoding.flights) == 0
        assert made._costs._costs.keys() <= made.mm_cache.keys()
        assert made.drain()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def joined(monkeypatch):
    """Released each time a caller begins to wait for another's run."""
    semaphore = threading.Semaphore(0)
    wait, wait_async = Flight.wait, Flight.wait_async

    def announced(self, timeout_s):
        semaphore.release()
        return wait(self, timeout_s)

    async def announced_async(self, timeout_s):
        semaphore.release()
        return await wait_async(self, timeout_s)

    monkeypatch.setattr(Flight, "wait", announced)
    monkeypatch.setattr(Flight, "wait_async", announced_async)
    return semaphore


def await_joins(joined, count):
    for _ in range(count):
        assert joined.acquire(timeout=LIMIT_S)


async def until(condition):
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def encoding(cache, name):
    return cache.stats().encoding[name]


# One caller


def test_results_come_in_the_order_of_the_hashes_repetitions_included(cache):
    encode = Encoder()
    cache.set(2, result(2))
    results = cache.get_or_encode([3, 2, 1, 3], encode)
    assert values(results) == [3, 2, 1, 3]
    assert results[0] is results[3]
    assert encode.calls == [[3, 1]]
    assert values(cache.get_or_encode([1, 2, 3], encode)) == [1, 2, 3]
    assert encode.calls == [[3, 1]]


def test_what_is_returned_is_what_a_look_up_returns(cache):
    batch = torch.arange(4 * SIZE, dtype=torch.int32).to(torch.uint8).reshape(4, SIZE)

    def encode(keys):
        return [EmbeddingResult(embedding=batch[key]) for key in keys]

    for key, got in zip([2, 3], cache.get_or_encode([2, 3], encode), strict=True):
        assert got is cache.get_single(key)
        assert torch.equal(got.embedding, batch[key])
        assert got.embedding.untyped_storage().nbytes() == SIZE  # the batch is not kept alive


def test_no_hashes_need_no_encoder(cache):
    encode = Encoder()
    assert cache.get_or_encode([], encode) == []
    assert encode.calls == []


def test_hits_of_every_tier_need_no_encoder(cache):
    encode = Encoder()
    cache.get_or_encode(range(6), encode)  # two of them leave the hot tier
    assert values(cache.get_or_encode(range(6), encode)) == list(range(6))
    again = [key for keys in encode.calls[1:] for key in keys]
    assert again == ([] if cache.config.host else [0, 1])


def test_more_than_the_hot_tier_holds_is_returned_whole(cache):
    keys = list(range(50))
    assert values(cache.get_or_encode(keys, Encoder())) == keys


def test_the_key_of_a_combination(cache):
    key = cache.combine_hashes([7, 8])
    (made,) = cache.get_or_encode([key], Encoder())
    assert cache.get([7, 8]) is made
    assert cache.get([8, 7]) is None
    assert cache.get_single(7) is None


def test_combinations_that_collide_stay_apart(cache):
    one, other = cache.combine_hashes([5]), cache.combine_hashes([5 + 2**61 - 1])
    plain = int(one)
    assert hash(one) == hash(other)
    made = iter(range(10))
    encode = Encoder(make=lambda key: result(next(made)))
    assert values(cache.get_or_encode([plain, one, other, plain], encode)) == [0, 1, 2, 0]


@pytest.mark.parametrize("hashes", [[None], [1, None], [TieredMultimodalCache.combine_hashes([])]])
def test_no_hash_is_refused(cache, hashes):
    encode = Encoder()
    with pytest.raises(ValueError, match="combine_hashes"):
        cache.get_or_encode(hashes, encode)
    assert encode.calls == []


def test_what_cannot_be_a_key_is_refused(cache):
    with pytest.raises(TypeError, match="unhashable"):
        cache.get_or_encode([[1]], Encoder())


def test_what_the_cache_refuses_is_returned(cache):
    encode = Encoder(make=lambda key: result(key, 100 * SIZE))
    assert values(cache.get_or_encode([1, 1], encode)) == [1, 1]
    assert not cache.has(1)
    assert values(cache.get_or_encode([1], encode)) == [1]
    assert encode.calls == [[1], [1]]


def test_what_the_device_has_no_memory_to_keep_is_returned(cache, monkeypatch):
    def no_memory(self, *args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TieredMultimodalCache, "_admit", no_memory)
    assert values(cache.get_or_encode([1], Encoder())) == [1]
    assert cache.stats().faults == {"admission": 1}


def test_a_closed_cache_encodes_and_keeps_nothing(cache):
    cache.close()
    assert values(cache.get_or_encode([1], Encoder())) == [1]
    assert len(cache) == 0


def test_a_value_that_was_set_meanwhile_stays(cache):
    def encode(keys):
        cache.set(1, result(200))
        return [result(key) for key in keys]

    assert values(cache.get_or_encode([1, 2], encode)) == [1, 2]
    assert values([cache.get_single(1)]) == [200]


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        ([], ValueError, "0 results for 2 hashes"),
        ([result(1)] * 3, ValueError, "3 results for 2 hashes"),
        (None, TypeError, "not NoneType"),
        (iter([result(1), result(2)]), TypeError, "a list of results"),
        ("ab", TypeError, "EmbeddingResults, not str"),
        ([torch.zeros(3)] * 2, TypeError, "EmbeddingResults, not Tensor"),
        ([EmbeddingResult(embedding=[1.0])] * 2, TypeError, "a tensor, not list"),
    ],
)
def test_what_no_encoder_may_return(cache, answer, error, match):
    with pytest.raises(error, match=match):
        cache.get_or_encode([1, 2], lambda keys: answer)
    assert len(cache) == 0
    assert encoding(cache, "encoder_failures") == 1
    assert encoding(cache, "encoded_items") == 0
    assert values(cache.get_or_encode([1, 2], Encoder())) == [1, 2]


def test_the_wrong_kind_of_encoder_is_refused(cache):
    with pytest.raises(TypeError, match="aget_or_encode"):
        cache.get_or_encode([1], AsyncEncoder())
    with pytest.raises(TypeError, match="awaitable"):
        asyncio.run(cache.aget_or_encode([1], Encoder()))


def test_an_encoder_that_raises_caches_nothing_and_is_tried_again(cache):
    error = OSError("the encoder is at fault")
    with pytest.raises(OSError, match="at fault") as caught:
        cache.get_or_encode([1, 2], Encoder(error=error))
    assert caught.value is error
    assert len(cache) == 0
    assert values(cache.get_or_encode([1, 2], Encoder())) == [1, 2]
    counted = cache.stats().encoding
    assert (counted["encoder_runs"], counted["encoder_failures"]) == (2, 1)
    assert counted["encoded_items"] == 2


def test_an_error_keeps_nothing_of_its_run_alive(cache, threads, joined):
    """Device memory above all: the frames of a failed run may hold the batch."""
    held = []

    def encode(keys):
        pixels = torch.zeros(1000)
        held.append(weakref.ref(pixels))
        assert joined.acquire(timeout=LIMIT_S)
        raise ValueError("no")

    def ask():
        with contextlib.suppress(ValueError):
            cache.get_or_encode([1], encode)

    gc.collect()
    gc.disable()
    try:
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(LIMIT_S)
        assert [ref() for ref in held] == [None]
    finally:
        gc.enable()


# Several threads


def test_however_many_ask_at_once_one_encodes(cache, threads):
    encode = Encoder()
    barrier = threading.Barrier(16)

    def ask(number):
        barrier.wait(LIMIT_S)
        keys = [1, 2, 3] if number % 2 else [3, 2, 1]
        return values(cache.get_or_encode(keys, encode)) == keys

    assert all(threads.map(ask, range(16)))
    assert sorted(key for keys in encode.calls for key in keys) == [1, 2, 3]


def test_each_encodes_what_the_others_do_not(cache, threads, joined):
    first, second = Encoder(held=True), Encoder()
    one = threads.submit(cache.get_or_encode, [1, 2], first)
    assert first.entered.wait(LIMIT_S)
    other = threads.submit(cache.get_or_encode, [3, 2, 1], second)
    await_joins(joined, 1)
    assert second.calls == [[3]]
    assert cache.has(3)  # kept before the wait
    first.let.set()
    assert values(one.result(LIMIT_S)) == [1, 2]
    assert values(other.result(LIMIT_S)) == [3, 2, 1]
    assert other.result()[1] is one.result()[1]
    assert encoding(cache, "single_flight_waits") == 2
    assert encoding(cache, "encoder_runs") == 2


@pytest.mark.parametrize("cache", ["host"], indirect=True)
def test_a_hit_below_is_not_held_up_by_the_encoder(cache, threads):
    """Whoever leads for a hit and a miss answers the hit before it encodes."""
    cache.get_or_encode(range(6), Encoder())  # 0 and 1 are in host memory
    encode = Encoder(held=True)
    leader = threads.submit(cache.get_or_encode, [0, 99], encode)
    assert encode.entered.wait(LIMIT_S)
    assert values(cache.get_or_encode([0], Encoder(error=AssertionError()))) == [0]
    encode.let.set()
    assert values(leader.result(LIMIT_S)) == [0, 99]


def test_nobody_needs_the_lock_while_an_encoder_runs(cache, threads):
    encode = Encoder(held=True)
    leader = threads.submit(cache.get_or_encode, [1], encode)
    assert encode.entered.wait(LIMIT_S)

    def use():
        cache.set(2, result(2))
        cache.free(3)
        return values(cache.get_or_encode([2, 4], Encoder()))

    assert threads.submit(use).result(LIMIT_S) == [2, 4]
    assert not leader.done()
    encode.let.set()
    leader.result(LIMIT_S)


def test_an_encoder_that_raises_releases_all_with_the_same_error(cache, threads, joined):
    encode = Encoder(held=True, error=OSError("the encoder is at fault"))
    others = Encoder()
    leader = threads.submit(cache.get_or_encode, [1, 2], encode)
    assert encode.entered.wait(LIMIT_S)
    waiters = [threads.submit(cache.get_or_encode, [key], others) for key in (1, 2, 1)]
    await_joins(joined, 3)
    encode.let.set()
    assert all(each.exception(LIMIT_S) is encode.error for each in [leader, *waiters])
    assert len(cache) == 0
    assert values(cache.get_or_encode([1, 2], others)) == [1, 2]
    assert others.calls == [[1, 2]]


def test_what_the_cache_refuses_is_returned_to_all_who_asked(cache, threads, joined):
    encode = Encoder(held=True, make=lambda key: result(key, 100 * SIZE))
    leader = threads.submit(cache.get_or_encode, [1], encode)
    assert encode.entered.wait(LIMIT_S)
    never = Encoder(error=AssertionError())
    waiters = [threads.submit(cache.get_or_encode, [1], never) for _ in range(3)]
    await_joins(joined, 3)
    encode.let.set()
    (made,) = leader.result(LIMIT_S)
    assert all(each.result(LIMIT_S)[0] is made for each in waiters)
    assert not cache.has(1)


@pytest.mark.parametrize("answer", [[], [1]])
def test_what_no_encoder_may_return_releases_all(cache, threads, joined, answer):
    encode = Encoder(held=True, make=None)

    def wrong(keys):
        encode.entered.set()
        assert encode.let.wait(LIMIT_S)
        return answer

    leader = threads.submit(cache.get_or_encode, [1], wrong)
    assert encode.entered.wait(LIMIT_S)
    waiter = threads.submit(cache.get_or_encode, [1], Encoder())
    await_joins(joined, 1)
    encode.let.set()
    assert isinstance(leader.exception(LIMIT_S), (TypeError, ValueError))
    assert waiter.exception(LIMIT_S) is leader.exception()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupted_leader_concerns_itself_alone(cache, joined, end):
    first, second = Encoder(held=True, error=end()), Encoder()
    outcomes = []

    def lead():
        with pytest.raises(end):
            cache.get_or_encode([1, 2], first)
        outcomes.append("interrupted")

    def ask():
        outcomes.append(values(cache.get_or_encode([2], second)))

    asking = [threading.Thread(target=lead), *(threading.Thread(target=ask) for _ in range(2))]
    asking[0].start()
    assert first.entered.wait(LIMIT_S)
    for thread in asking[1:]:
        thread.start()
    await_joins(joined, 2)
    first.let.set()
    for thread in asking:
        thread.join(LIMIT_S)
    assert sorted(outcomes, key=str) == [[2], [2], "interrupted"]
    assert second.calls == [[2]]
    assert not cache.has(1)


def test_who_waited_long_enough_encodes_itself(cache, threads):
    hung, own = Encoder(held=True), Encoder(make=lambda key: result(key + 100))
    leader = threads.submit(cache.get_or_encode, [1], hung)
    assert hung.entered.wait(LIMIT_S)
    assert values(cache.get_or_encode([1], own, timeout_s=0)) == [101]
    assert values(cache.get_or_encode([1], own, timeout_s=0)) == [101]  # a hit
    assert encoding(cache, "single_flight_waits") == 0
    cache.free(1)
    assert values(cache.get_or_encode([1], own, timeout_s=0.001)) == [101]
    hung.let.set()
    assert values(leader.result(LIMIT_S)) == [1]
    assert values([cache.get_single(1)]) == [101]
    assert own.calls == [[1], [1]]


def test_a_wait_in_vain_is_counted(cache, threads):
    hung, own = Encoder(held=True), Encoder()
    leader = threads.submit(cache.get_or_encode, [1, 2], hung)
    assert hung.entered.wait(LIMIT_S)
    assert values(cache.get_or_encode([1, 2], own, timeout_s=0.001)) == [1, 2]
    assert own.calls == [[1, 2]]
    assert encoding(cache, "single_flight_timeouts") == 2
    hung.let.set()
    leader.result(LIMIT_S)


def test_who_takes_over_from_one_that_hangs_is_joined(cache, threads, joined):
    hung, second = Encoder(held=True), Encoder(held=True)
    leader = threads.submit(cache.get_or_encode, [1], hung)
    assert hung.entered.wait(LIMIT_S)
    successor = threads.submit(cache.get_or_encode, [1], second, timeout_s=0)
    assert second.entered.wait(LIMIT_S)
    third = threads.submit(cache.get_or_encode, [1], Encoder(), timeout_s=None)
    await_joins(joined, 1)
    second.let.set()
    assert third.result(LIMIT_S)[0] is successor.result(LIMIT_S)[0]
    assert not leader.done()
    hung.let.set()
    leader.result(LIMIT_S)


# Frees and clears during a run


@pytest.mark.parametrize("drop", ["free", "clear"])
def test_a_run_that_began_before_it_keeps_nothing(cache, threads, joined, drop):
    old, new = Encoder(held=True), Encoder(make=lambda key: result(key + 100))
    leader = threads.submit(cache.get_or_encode, [1, 2], old)
    assert old.entered.wait(LIMIT_S)
    waiter = threads.submit(cache.get_or_encode, [1], new)
    await_joins(joined, 1)
    known = cache.free(1) if drop == "free" else cache.clear()
    assert not known
    old.let.set()
    assert values(leader.result(LIMIT_S)) == [1, 2]
    assert values(waiter.result(LIMIT_S)) == [1]
    assert not cache.has(1)
    assert cache.has(2) is (drop == "free")
    assert values(cache.get_or_encode([1], new)) == [101]


@pytest.mark.parametrize("drop", ["free", "clear"])
def test_who_asks_after_it_gets_a_run_of_its_own(cache, threads, drop):
    old, new = Encoder(held=True), Encoder(make=lambda key: result(key + 100))
    leader = threads.submit(cache.get_or_encode, [1], old)
    assert old.entered.wait(LIMIT_S)
    cache.free(1) if drop == "free" else cache.clear("v2")
    assert values(cache.get_or_encode([1], new)) == [101]
    old.let.set()
    assert values(leader.result(LIMIT_S)) == [1]
    assert values([cache.get_single(1)]) == [101]


def test_a_run_that_was_given_up_on_cannot_outlive_a_free(cache, threads):
    hung, own = Encoder(held=True), Encoder()
    leader = threads.submit(cache.get_or_encode, [1], hung)
    assert hung.entered.wait(LIMIT_S)
    cache.get_or_encode([1], own, timeout_s=0)  # now this one's flight was the one to join
    cache.free(1)
    hung.let.set()
    leader.result(LIMIT_S)
    assert not cache.has(1)


def test_freeing_by_number_voids_a_combination(cache):
    key = cache.combine_hashes([7, 8])

    def encode(keys):
        cache.free(int(key))
        return [result(each) for each in keys]

    cache.get_or_encode([key, 1], encode)
    assert not cache.has(key)
    assert cache.has(1)


# An encoder that asks


def test_an_encoder_may_ask_for_other_entries(cache):
    inner = Encoder()

    def encode(keys):
        cache.get_or_encode([10, 11], inner)
        return [result(key) for key in keys]

    assert values(cache.get_or_encode([1], encode)) == [1]
    assert inner.calls == [[10, 11]]


def test_an_encoder_may_not_ask_for_what_it_encodes(cache):
    def encode(keys):
        return cache.get_or_encode(keys, Encoder())

    with pytest.raises(RuntimeError, match=r"the encoder for 1 asks .* 'MainThread'"):
        cache.get_or_encode([1, 2], encode)
    assert values(cache.get_or_encode([1, 2], Encoder())) == [1, 2]


def test_nor_may_one_that_its_encoder_calls(cache):
    def inner(keys):
        return cache.get_or_encode([1], Encoder())

    def encode(keys):
        return cache.get_or_encode([2], inner)

    with pytest.raises(RuntimeError, match="the encoder for 1"):
        cache.get_or_encode([1], encode)


def test_two_encoders_may_not_ask_for_each_others_entries(cache, threads, joined):
    barrier = threading.Barrier(2)

    def ask(own, other):
        def encode(keys):
            barrier.wait(LIMIT_S)
            return cache.get_or_encode([other], Encoder(error=AssertionError("never needed")))

        return cache.get_or_encode([own], encode, timeout_s=None)

    one, other = threads.submit(ask, 1, 2), threads.submit(ask, 2, 1)
    errors = {str(one.exception(LIMIT_S)), str(other.exception(LIMIT_S))}
    assert any("both would wait for ever" in error for error in errors)
    assert values(cache.get_or_encode([1, 2], Encoder())) == [1, 2]


def test_a_circle_of_two_caches_is_refused_too(threads):
    with TieredMultimodalCache(10 * SIZE) as left, TieredMultimodalCache(10 * SIZE) as right:
        barrier = threading.Barrier(2)

        def ask(cache, other):
            def encode(keys):
                barrier.wait(LIMIT_S)
                return other.get_or_encode(keys, Encoder())

            return cache.get_or_encode([1], encode, timeout_s=None)

        asked = [threads.submit(ask, left, right), threads.submit(ask, right, left)]
        assert any(isinstance(each.exception(LIMIT_S), RuntimeError) for each in asked)


# Asyncio


def test_tasks_that_ask_at_once_encode_once(cache):
    encode = AsyncEncoder()

    async def main():
        asked = [cache.aget_or_encode([n % 3, 7], encode) for n in range(12)]
        return [values(each) for each in await asyncio.gather(*asked)]

    assert asyncio.run(main()) == [[n % 3, 7] for n in range(12)]
    assert sorted(key for keys in encode.calls for key in keys) == [0, 1, 2, 7]


def test_tasks_and_threads_wait_for_each_other(cache, threads, joined):
    in_thread, in_task = Encoder(held=True), AsyncEncoder(held=True)

    async def main():
        one = threads.submit(cache.get_or_encode, [1], in_thread)
        await until(in_thread.entered.is_set)
        task = asyncio.ensure_future(cache.aget_or_encode([2, 1], in_task))
        await until(in_task.entered.is_set)
        two = threads.submit(cache.get_or_encode, [2], Encoder())
        await until(lambda: joined.acquire(blocking=False))
        assert not task.done()
        in_task.let.set()
        await until(two.done)
        await until(lambda: joined.acquire(blocking=False))  # now the task waits for the thread
        assert not task.done()
        in_thread.let.set()
        return values(await task), values(one.result(LIMIT_S)), values(two.result(LIMIT_S))

    assert asyncio.run(main()) == ([2, 1], [1], [2])
    assert in_task.calls == [[2]]
    assert in_thread.calls == [[1]]


def test_a_task_in_another_loop_waits_too(cache, threads, joined):
    encode = AsyncEncoder(held=True)

    def ask(encoder):
        return values(asyncio.run(cache.aget_or_encode([1], encoder)))

    one = threads.submit(ask, encode)
    assert encode.entered.wait(LIMIT_S)
    other = threads.submit(ask, AsyncEncoder(error=AssertionError()))
    await_joins(joined, 1)
    encode.let.set()
    assert one.result(LIMIT_S) == other.result(LIMIT_S) == [1]


def test_an_error_reaches_every_task(cache, joined):
    encode = AsyncEncoder(held=True, error=OSError("at fault"))

    async def main():
        tasks = [asyncio.ensure_future(cache.aget_or_encode([1], encode)) for _ in range(3)]
        await until(lambda: joined._value == 2)
        encode.let.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert asyncio.run(main()) == [encode.error] * 3
    assert encode.calls == [[1]]


def test_an_iteration_error_reaches_threads_and_tasks(cache, threads, joined):
    """StopIteration cannot travel through a future or a coroutine as it is."""
    encode = Encoder(held=True, error=StopIteration("empty"))

    async def main():
        leader = threads.submit(cache.get_or_encode, [1], encode)
        await until(encode.entered.is_set)
        task = asyncio.ensure_future(cache.aget_or_encode([1], AsyncEncoder()))
        await until(lambda: joined.acquire(blocking=False))
        encode.let.set()
        with pytest.raises(RuntimeError) as caught:
            await task
        return leader.exception(LIMIT_S), caught.value.__cause__

    assert asyncio.run(main()) == (encode.error, encode.error)


def test_a_cancelled_leader_cancels_nobody_else(cache, joined):
    first, second = AsyncEncoder(held=True), AsyncEncoder()

    async def main():
        leader = asyncio.ensure_future(cache.aget_or_encode([1, 2], first))
        await until(first.entered.is_set)
        waiters = [asyncio.ensure_future(cache.aget_or_encode([2], second)) for _ in range(3)]
        await until(lambda: joined._value == 3)
        leader.cancel()
        answers = [values(each) for each in await asyncio.gather(*waiters)]
        return leader.cancelled(), answers

    assert asyncio.run(main()) == (True, [[2]] * 3)
    assert second.calls == [[2]]
    assert not cache.has(1)


def test_a_cancelled_waiter_cancels_nobody_else(cache, joined):
    encode = AsyncEncoder(held=True)

    async def main():
        leader = asyncio.ensure_future(cache.aget_or_encode([1], encode))
        await until(encode.entered.is_set)
        gone, patient = (
            asyncio.ensure_future(cache.aget_or_encode([1], AsyncEncoder())) for _ in range(2)
        )
        await until(lambda: joined._value == 2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        encode.let.set()
        return values(await leader), values(await patient)

    assert asyncio.run(main()) == ([1], [1])
    assert encode.calls == [[1]]


def test_a_loop_that_ends_while_a_task_waits_harms_nobody(cache, threads, joined, caplog):
    encode = Encoder(held=True)
    leader = threads.submit(cache.get_or_encode, [1], encode)
    assert encode.entered.wait(LIMIT_S)

    async def main():
        asyncio.ensure_future(cache.aget_or_encode([1], AsyncEncoder()))  # noqa: RUF006
        await until(lambda: joined.acquire(blocking=False))

    asyncio.run(main())
    encode.let.set()
    assert values(leader.result(LIMIT_S)) == [1]
    assert caplog.records == []


def test_a_task_that_waited_long_enough_encodes_itself(cache, threads):
    hung, own = Encoder(held=True), AsyncEncoder()
    leader = threads.submit(cache.get_or_encode, [1], hung)
    assert hung.entered.wait(LIMIT_S)
    got = asyncio.run(cache.aget_or_encode([1], own, timeout_s=0.001))
    assert values(got) == [1]
    assert encoding(cache, "single_flight_timeouts") == 1
    hung.let.set()
    leader.result(LIMIT_S)


def test_a_task_may_not_ask_for_what_it_encodes(cache):
    async def encode(keys):
        return await cache.aget_or_encode(keys, AsyncEncoder())

    async def by_a_child(keys):
        child = asyncio.ensure_future(cache.aget_or_encode(keys, AsyncEncoder()))
        return await child

    async def by_a_thread(keys):
        return await asyncio.to_thread(cache.get_or_encode, keys, Encoder())

    async def main(encode):
        asyncio.current_task().set_name("request 5")
        return await cache.aget_or_encode([1], encode)

    for each in (encode, by_a_child, by_a_thread):
        with pytest.raises(RuntimeError, match=r"the encoder for 1 asks .* task 'request 5'"):
            asyncio.run(main(each))
    assert values(cache.get_or_encode([1], Encoder())) == [1]


def test_a_blocking_call_may_not_wait_for_a_task_of_its_own_loop(cache):
    encode = AsyncEncoder(held=True)

    async def main():
        leader = asyncio.ensure_future(cache.aget_or_encode([1], encode))
        await until(encode.entered.is_set)
        with pytest.raises(RuntimeError, match="await aget_or_encode"):
            cache.get_or_encode([1], Encoder())
        assert values(cache.get_or_encode([2], Encoder())) == [2]
        encode.let.set()
        return values(await leader)

    assert asyncio.run(main()) == [1]


def test_a_coroutine_that_is_never_finished_releases_who_waits(cache, threads, joined):
    encode = AsyncEncoder(held=True)
    coroutine = cache.aget_or_encode([1], encode)
    contextvars.copy_context().run(_step, coroutine)
    waiter = threads.submit(cache.get_or_encode, [1], Encoder())
    await_joins(joined, 1)
    coroutine.close()  # in another context than it began in
    assert values(waiter.result(LIMIT_S)) == [1]


def _step(coroutine):
    coroutine.send(None)


# Costs and counters


def clock_of(cache):
    cache._encoding._clock = ManualClock()
    return cache._encoding._clock


def test_costs_follow_the_entries_of_the_hot_tier(cache):
    clock = clock_of(cache)

    def encode(keys):
        clock.now_s += 3.0
        return [result(key, SIZE * (1 + key)) for key in keys]

    cache.get_or_encode([0, 1], encode)
    assert (cache._costs.seconds(0), cache._costs.seconds(1)) == (1.0, 2.0)
    cache.get_or_encode([0, 1], encode)
    counted = cache.stats().encoding
    assert (counted["encode_seconds"], counted["saved_seconds"]) == (3.0, 3.0)
    cache.set(2, result(2, 4 * SIZE))  # both leave
    assert len(cache._costs) == 0
    if cache.config.host is not None:
        cache.get_single(1)
        assert cache._costs.seconds(1) == 2.0
        assert encoding(cache, "saved_seconds") == 5.0
    cache.clear()
    assert len(cache._costs) == 0


def test_a_freed_entry_has_no_cost(cache):
    clock = clock_of(cache)

    def encode(keys):
        clock.now_s += 3.0
        return [result(key) for key in keys]

    cache.get_or_encode([1], encode)
    cache.free(1)
    cache.set(1, result(1))
    assert cache._costs.seconds(1) == 0.0


def test_an_entry_that_is_too_large_takes_its_cost_to_host_memory():
    config = CacheConfig(
        hot=HotConfig(max_size=SIZE, oversize="spill"), host=HostConfig(max_size=64 * 1024)
    )
    with TieredMultimodalCache(config=config) as cache:
        clock = clock_of(cache)

        def encode(keys):
            clock.now_s += 3.0
            return [result(key, 5 * SIZE) for key in keys]

        assert values(cache.get_or_encode([1], encode)) == [1]
        assert cache._below.host.find(1).header.cost_s == 3.0
        assert len(cache._costs) == 0
        assert values(cache.get_or_encode([1], encode)) == [1]
        assert encoding(cache, "saved_seconds") == 3.0
        assert encoding(cache, "encoder_runs") == 1
        audit(cache)


def test_a_miss_is_counted_once_and_a_wait_is_no_miss(cache, threads, joined):
    encode = Encoder(held=True)
    leader = threads.submit(cache.get_or_encode, [1], encode)
    assert encode.entered.wait(LIMIT_S)
    waiter = threads.submit(cache.get_or_encode, [1], Encoder())
    await_joins(joined, 1)
    encode.let.set()
    leader.result(LIMIT_S), waiter.result(LIMIT_S)
    stats = cache.stats()
    assert (stats.misses, stats.hot["hits"]) == (1, 0)
    cache.get_or_encode([1], encode)
    assert cache.stats().hot["hits"] == 1


def test_a_forked_child_does_not_wait_for_its_parents_run(threads):
    with TieredMultimodalCache(10 * SIZE) as cache:
        encode = Encoder(held=True)
        leader = threads.submit(cache.get_or_encode, [1], encode)
        assert encode.entered.wait(LIMIT_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
            pid = os.fork()
        if pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = 0 if values(cache.get_or_encode([1], Encoder())) == [1] else 2
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        encode.let.set()
        leader.result(LIMIT_S)
