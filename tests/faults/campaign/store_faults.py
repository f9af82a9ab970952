"""Whatever can happen to a store from outside, and to the disk below it.

Each case: the cache goes on with misses, counts the cause, says it in one log line at most, and
uses the store when the cause is gone, without being made anew.
"""

import contextlib
import logging
import time
from collections import Counter

from tiered_mmcache import Tier

from . import failing_disk_cases, mounts, store_cases
from .children import Child, ChildFailedError
from .outcome import Outcome
from .store_cases import SIZE
from .subject import (
    await_that,
    configuration,
    give_up_quickly,
    is_right,
    open_cache,
    ready_worker,
    restart_quickly,
    result,
)

_CASES = [*store_cases.CASES, *failing_disk_cases.CASES]


class _Lines(logging.Handler):
    """Counts the fault lines by cause."""

    def __init__(self):
        super().__init__()
        self.causes = Counter()

    def emit(self, record):
        if record.msg.startswith("fault "):
            self.causes[record.args[0]] += 1


# In the server


def _try(case, lines, calls):
    """What came of one case."""
    config = configuration(case.store, hot=2 * SIZE, **case.options)
    if not case.while_open:
        case.begin()
    with open_cache(config, case.launcher) as cache:
        case.cache = cache
        if case.while_open:
            for key in range(6):
                cache.set(key, result(key, 0, SIZE))
            ready_worker(cache)
            case.begin()
        before = Counter(cache.stats().faults) if case.while_open else Counter()
        wrong, longest_s = _live_with_it(cache, case, before, calls)
        counted = Counter(cache.stats().faults) - before
        misses = cache.stats().misses
        began_s = time.monotonic()
        case.end()
        await_that(lambda: _uses_its_store(cache))
        back_s = time.monotonic() - began_s
        for key in range(20):
            found = cache.get_single(key)
            wrong += found is not None and not is_right(found, key, 0, SIZE)
    return {
        "wrong": wrong,
        "late_s": longest_s - cache._below.disk.read_timeout_s,
        "faults": dict(counted),
        "misses": misses,
        "most_lines": max(lines.causes.values(), default=0),
        "back_s": back_s,
    }


def _live_with_it(cache, case, before, least_calls):
    """Calls until the cause is counted, and some more: (wrong answers, longest get)."""
    wrong = 0
    longest_s = 0.0
    deadline_s = time.monotonic() + 20.0
    calls = 0
    while calls < least_calls or not _told(case, Counter(cache.stats().faults) - before):
        if time.monotonic() > deadline_s:
            break
        key = calls % 20
        cache.set(key, result(key, 0, SIZE))
        cache.drain(0.005)
        began_s = time.monotonic()
        found = cache.get_single((key + 7) % 20)
        longest_s = max(longest_s, time.monotonic() - began_s)
        wrong += found is not None and not is_right(found, (key + 7) % 20, 0, SIZE)
        calls += 1
    return wrong, longest_s


def _told(case, counted):
    return not case.causes or any(counted[cause] for cause in case.causes)


def _uses_its_store(cache):
    for key in range(20):
        cache.set(key, result(key, 0, SIZE))
    cache.drain(0.5)
    return any(cache.locate(key) is Tier.DISK for key in range(20))


def _serve(connection, folder, private):
    if private:
        mounts.in_private_namespace()
    restart_quickly(0.01, 0.2)
    give_up_quickly(start_s=5.0, slow_end_s=0.1)
    log = logging.getLogger("tiered_mmcache")
    for number, round_number, calls in connection:
        place = folder / f"{number}-{round_number}"
        place.mkdir()
        lines = _Lines()
        log.addHandler(lines)
        with contextlib.closing(_CASES[number](place)) as case:
            connection.send(_try(case, lines, calls))
        log.removeHandler(lines)


def run(folder, *, full):
    outcome = Outcome(campaign="store faults")
    private = mounts.why_not() is None
    server = Child(_serve, folder, private, stderr=folder / "stderr.log")
    late_s = back_s = 0.0
    most_lines = 0
    counted = Counter()
    for number, case in enumerate(_CASES):
        why_not = case.why_not()
        if why_not:
            outcome.not_run.append(f"{case.__name__}: {why_not}")
            continue
        for round_number in range(3 if full else 1):
            outcome.cases += 1
            try:
                report = server.ask((number, round_number, 200 if full else 40))
            except ChildFailedError as error:
                outcome.deaths += 1
                outcome.missed.append(f"{case.__name__}: {error}")
                server = Child(_serve, folder, private, stderr=folder / "stderr.log")
                break
            outcome.wrong += report["wrong"]
            late_s = max(late_s, report["late_s"])
            back_s = max(back_s, report["back_s"])
            most_lines = max(most_lines, report["most_lines"])
            counted.update(report["faults"])
            told = _told(case, Counter(report["faults"]))
            outcome.expect(told, f"{case.__name__}: counted {report['faults']}")
            outcome.expect(report["misses"] > 0, f"{case.__name__}: never a miss")
            outcome.expect(case.causes or not report["faults"], f"{case.__name__}: faults")
    server.end()
    outcome.figures.append(f"causes counted {dict(counted)}")
    outcome.bound("most log lines of one cause in a case:", most_lines, "<= 1")
    slack_s = 0.1 if full else 2.0  # beside other programs a call may be held up by them
    outcome.bound("s, longest get beyond disk.read_timeout:", late_s, f"<= {slack_s}")
    outcome.bound("s from the end of the cause to the next use of the store:", back_s, "<= 10")
    return outcome
