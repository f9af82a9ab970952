"""Making memory ready ahead of need, with a thread and a lock that the test plays.

Owns: when the thread is started, what it does and when it ends; failures; the end.
Does not own: the runtime's calls (test_host_page_locking.py), the arena (test_host_arena.py).
"""

import gc
import os
import threading
import weakref

import pytest

from tiered_mmcache.configuration import machine
from tiered_mmcache.host import preparation as module
from tiered_mmcache.host.page_locking import NoPageLocking
from tiered_mmcache.host.preparation import Preparation, start_daemon
from tiered_mmcache.testing import ManualPageLocker, ManualThread

SEGMENT = 4096
BASE = 1 << 40
GIB = 1 << 30


@pytest.fixture
def room(monkeypatch):
    """A machine with a lot of memory; a test can take it away."""

    def set_room(available_bytes, bound="the memory of this machine"):
        found = machine.Memory(total_bytes=64 * GIB, available_bytes=available_bytes, bound=bound)
        monkeypatch.setattr(machine, "memory", lambda: found)

    set_room(40 * GIB)
    return set_room


@pytest.fixture
def thread():
    return ManualThread()


@pytest.fixture
def backed():
    return []


@pytest.fixture
def prepare(thread, backed, room):
    def make(segments=4, extra_bytes=0, **changes):
        arguments = {
            "address": BASE,
            "capacity_bytes": segments * SEGMENT + extra_bytes,
            "back": lambda start, length: backed.append((start, length)),
            "segment_bytes": SEGMENT,
            "start": thread,
        }
        return Preparation(**{**arguments, **changes})

    return make


def test_nothing_happens_before_it_begins(prepare, thread, backed):
    made = prepare()
    made.need(2 * SEGMENT)
    assert thread.starts == 0
    made.close(1.0)
    assert (thread.starts, thread.waited_s, backed) == (0, [], [])


def test_one_segment_ahead_of_what_was_used_is_ready_and_no_more(prepare, thread, backed):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    assert made.ready_bytes == 0  # nothing was waited for
    thread.run()
    assert made.ready_bytes == made.locked_bytes == made.preferred_bytes == SEGMENT
    made.need(0)
    assert thread.starts == 1
    made.need(1)
    thread.run()
    assert made.ready_bytes == 2 * SEGMENT
    assert thread.starts == 2  # it had ended
    made.need(SEGMENT)
    assert thread.starts == 2
    assert backed == [(0, SEGMENT), (SEGMENT, SEGMENT)]
    assert locker.locked == {BASE: SEGMENT, BASE + SEGMENT: SEGMENT}


def test_more_is_asked_of_a_thread_that_still_runs(prepare, thread):
    made = prepare()
    made.begin(ManualPageLocker())
    assert thread.step()
    made.need(SEGMENT)
    made.need(2 * SEGMENT)
    thread.run()
    assert thread.starts == 1
    assert made.ready_bytes == 3 * SEGMENT


def test_the_last_segment_may_be_shorter(prepare, thread, backed):
    made, locker = prepare(segments=1, extra_bytes=100), ManualPageLocker()
    made.begin(locker)
    made.need(SEGMENT + 100)
    thread.run()
    assert backed == [(0, SEGMENT), (SEGMENT, 100)]
    assert locker.locked[BASE + SEGMENT] == 100
    assert made.ready_bytes == SEGMENT + 100
    made.need(SEGMENT + 100)
    assert thread.starts == 1


def test_plain_memory_is_backed_and_not_locked(prepare, thread, backed):
    made = prepare()
    made.begin(NoPageLocking())
    thread.run()
    assert backed == [(0, SEGMENT)]
    assert (made.ready_bytes, made.locked_bytes, made.preferred_bytes) == (SEGMENT, 0, SEGMENT)


def test_a_device_that_comes_later_has_all_of_it_locked(prepare, thread):
    made, locker = prepare(), ManualPageLocker()
    made.begin(NoPageLocking())
    made.need(2 * SEGMENT)
    thread.step()
    made.begin(locker)
    thread.run()
    assert made.locked_bytes == made.ready_bytes == 3 * SEGMENT
    assert len(locker.locked) == 3


def test_a_device_that_comes_while_a_segment_is_backed_is_not_told_that_it_is_locked(
    prepare, thread
):
    locker = ManualPageLocker()
    first = [True]

    def back(start, length):
        if first.pop() if first else False:
            made.begin(locker)

    made = prepare(back=back)
    made.begin(NoPageLocking())
    thread.step()
    assert (made.ready_bytes, made.locked_bytes) == (0, 0)
    thread.run()
    assert locker.locked == {BASE: SEGMENT}
    assert made.locked_bytes == SEGMENT


# Failures


def test_what_the_runtime_refuses_is_told_once_and_the_rest_is_only_backed(prepare, thread, backed):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    thread.run()
    locker.fails = "raise the limit"
    made.need(3 * SEGMENT)
    thread.run()
    assert made.take_failure() == "raise the limit"
    assert made.take_failure() is None
    assert made.locked_bytes == made.preferred_bytes == SEGMENT
    assert made.ready_bytes == 4 * SEGMENT
    assert [start // SEGMENT for start, _ in backed] == [0, 1, 1, 2, 3]


def test_an_error_that_nobody_expected_ends_locking_and_not_the_thread(prepare, thread):
    class Broken(ManualPageLocker):
        def lock(self, address, size_bytes):
            raise ZeroDivisionError("odd")

    made = prepare()
    made.begin(Broken())
    thread.run()
    assert made.take_failure() == "odd"
    assert made.ready_bytes == SEGMENT


@pytest.mark.parametrize("locker", [ManualPageLocker(), NoPageLocking()], ids=["locked", "plain"])
def test_memory_that_others_need_is_left_alone(prepare, thread, backed, room, locker):
    room(GIB + SEGMENT - 1, "the control group's /sys/fs/cgroup/memory.max")
    made = prepare()
    made.begin(locker)
    thread.run()
    assert backed == []
    made.need(SEGMENT)
    assert thread.starts == 1  # it is not tried again
    failure = made.take_failure()
    if isinstance(locker, NoPageLocking):
        assert failure is None  # plain memory is used as ever
    else:
        assert "1.0GiB are available" in failure
        assert "/sys/fs/cgroup/memory.max: raise that, or lower host.max_size" in failure


def test_exactly_enough_room_is_enough(prepare, thread, room, backed):
    room(GIB + SEGMENT)
    made = prepare()
    made.begin(NoPageLocking())
    thread.run()
    assert backed == [(0, SEGMENT)]


def test_no_memory_to_back_it_with(prepare, thread):
    def back(start, length):
        raise OSError(28, "No space left on device")

    made, locker = prepare(back=back), ManualPageLocker()
    made.begin(locker)
    thread.run()
    assert "No space left" in made.take_failure()
    assert (made.ready_bytes, locker.locked) == (0, {})


def test_without_another_thread_memory_stays_plain(prepare, thread):
    thread.none_left = True
    made = prepare()
    made.begin(ManualPageLocker())
    thread.none_left = False
    made.need(SEGMENT)
    assert thread.starts == 0
    assert made.take_failure() is None


# The end


def closed(made, thread):
    """Close as with a thread that runs meanwhile."""
    join = thread.join
    thread.join = lambda timeout: (join(timeout), thread.run())
    made.close(3.0)


def test_everything_is_unlocked_at_the_end(prepare, thread):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    made.need(2 * SEGMENT)
    thread.run()
    assert len(locker.locked) == 3
    closed(made, thread)
    assert locker.locked == {}
    assert made.locked_bytes == 0
    assert thread.waited_s == [3.0]
    made.begin(locker)
    made.need(4 * SEGMENT)
    thread.run()
    assert locker.locked == {}


def test_a_thread_that_is_late_unlocks_by_itself(prepare, thread):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    made.need(2 * SEGMENT)
    thread.step()
    made.close(3.0)  # its step takes longer than that
    assert thread.waited_s == [3.0]
    assert len(locker.locked) == 1
    thread.run()
    assert locker.locked == {}


def test_a_segment_that_is_locked_during_the_end_is_unlocked(prepare, thread):
    locker = ManualPageLocker()

    def back(start, length):
        made.close(0.0)

    made = prepare(back=back)
    made.begin(locker)
    assert thread.step()
    assert locker.locked == {BASE: SEGMENT}
    thread.run()
    assert locker.locked == {}


def test_an_arena_may_be_collected_as_garbage_on_the_helper_thread(prepare):
    """Wherever it is: within a step, and while the step holds its lock."""
    locker = ManualPageLocker()

    def back(start, length):
        with made._guard:
            made.close(0.0)

    made = prepare(back=back, start=start_daemon)
    made.begin(locker)
    thread = made._thread
    thread.join(60)
    assert not thread.is_alive()
    assert locker.locked == {}


def test_without_another_thread_it_is_unlocked_at_once(prepare, thread):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    thread.run()
    thread.none_left = True
    made.close(3.0)
    assert locker.locked == {}


def test_a_forked_child_leaves_the_locks_of_its_parent_alone(prepare, thread, monkeypatch):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    thread.run()
    with monkeypatch.context() as child:
        child.setattr(module.os, "getpid", lambda: os.getppid())
        child.setattr(made, "_guard", None)  # the parent's thread may have held it for ever
        made.close(3.0)
        made.halt(3.0)
    assert locker.locked == {BASE: SEGMENT}
    assert thread.waited_s == []


def test_at_exit_the_thread_is_waited_for_and_nothing_unlocked(prepare, thread):
    made, locker = prepare(), ManualPageLocker()
    made.begin(locker)
    made.need(3 * SEGMENT)
    thread.step()
    module._halt_all()
    assert thread.waited_s == [module._EXIT_TIMEOUT_S]
    thread.run()
    assert made.ready_bytes == SEGMENT
    assert locker.locked == {BASE: SEGMENT}


def test_nothing_keeps_a_preparation_alive_that_is_done(prepare, thread):
    made = prepare()
    made.begin(NoPageLocking())
    thread.run()
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None


# The real thread


def test_the_real_thread_is_a_daemon_that_ends_by_itself():
    steps = [True, True, False]
    found = []

    def step():
        found.append(threading.current_thread())
        return steps.pop(0)

    thread = start_daemon(step)
    thread.join(60)
    assert not thread.is_alive()
    assert len(found) == 3
    assert found[0] is thread
    assert thread.daemon


def test_the_real_thread_makes_memory_ready(prepare, backed):
    made, locker = prepare(start=start_daemon), ManualPageLocker()
    made.begin(locker)
    made.need(3 * SEGMENT)
    while made._running:
        made._thread.join(60)
    assert made.ready_bytes == 4 * SEGMENT
    assert len(locker.locked) == 4
    made.close(60)
    assert locker.locked == {}
