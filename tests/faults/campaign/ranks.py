"""Ranks that make the same random calls, while reads fail, workers die and memory is short.

First four ranks that agree: every answer and every hot tier is compared, call by call. Then the
same calls with each rank deciding for itself, which has to show differences. Then groups of which
a rank is killed, or stopped, or makes a call differently: all others are told, in time.
"""

import os
import random
import signal
import time

from .children import Child, ChildFailedError
from .one_rank import Orders, serve
from .outcome import Outcome

_SIZE = 4
_LIMIT_S = 2.0
_SLACK_S = 3.0
_REASONS = ("disk_fault", "disk_down", "read_timeout", "other_rank")
_MISSTEPS = ["skip", "twice", "another key", "another call"]


class _Ranks:
    """The processes of one group."""

    def __init__(self, folder, outcome, *, size=_SIZE, odd=None, **orders):
        folder.mkdir()
        self._outcome = outcome
        log = folder.parent / "stderr.log"
        self.children = []
        for rank in range(size):
            misstep = odd[1] if odd is not None and odd[0] == rank else None
            told = Orders(rank=rank, size=size, misstep=misstep, **orders)
            self.children.append(Child(serve, folder, told, stderr=log))
        for child in self.children:
            child.answer()
        for child in self.children:
            child.tell("go")

    def hear(self, children=None):
        """What each rank saw, call by call, and its last report; None for one that failed."""
        children = self.children if children is None else children
        seen = {child: [] for child in children}
        last = {}
        open_ones = list(children)
        while open_ones:
            for child in list(open_ones):
                try:
                    report = child.answer()
                except ChildFailedError as error:
                    self._outcome.deaths += 1
                    self._outcome.missed.append(str(error)[-600:])
                    report = {"seen": [], "ended": None, "wrong": 0}
                seen[child] += report["seen"]
                if "ended" in report:
                    last[child] = report
                    open_ones.remove(child)
        return [seen[child] for child in children], [last[child] for child in children]

    def end(self):
        for child in self.children:
            child.process.join(20.0)
            if child.process.exitcode is None:
                self._outcome.missed.append("a rank did not end")
                child.kill()


def _differences(seen):
    """Calls after which not all ranks had the same answer and the same hot tier."""
    return sum(len(set(views)) > 1 for views in zip(*seen, strict=False))


def run(folder, *, full):
    outcome = Outcome(campaign="ranks")
    _agree(folder / "together", outcome, calls=100_000 if full else 2_000)
    _decide_alone(folder / "alone", outcome, calls=1_000 if full else 500)
    _lose_a_rank(folder, outcome, cycles=24 if full else 2)
    _misstep(folder, outcome, cycles=40 if full else 2)
    return outcome


def _agree(folder, outcome, calls):
    ranks = _Ranks(folder, outcome, calls=calls, seed=1)
    seen, last = ranks.hear()
    ranks.end()
    differences = _differences(seen)
    outcome.cases += calls
    outcome.wrong += differences + sum(report["wrong"] for report in last)
    errors = [report["ended"]["text"] for report in last if report["ended"] is not None]
    outcome.missed += errors[:1]
    if outcome.deaths or errors:
        return
    outcome.expect(all(len(views) == calls for views in seen), "not all calls were made")
    leader, hits = last[0], last[0]["hits"]
    short = sum(report["faults"].get("promotion", 0) for report in last[1:])
    outcome.expect(hits["below"] > 0, "nothing was served from below")
    outcome.expect(all(report["hits"] == hits for report in last), "the ranks count hits apart")
    outcome.expect(short > 0, "no rank was ever short of memory")
    outcome.expect(leader["kills"] > 0, "no worker was killed")
    for reason in _REASONS if calls >= 100_000 else ("disk_fault",):
        outcome.expect(leader["misses"].get(reason, 0) > 0, f"there was no miss by {reason}")
    outcome.figures += [
        f"4 ranks, {calls:,} calls: {differences} differences of answers or hot tiers",
        f"{hits['hot']:,} hits in the hot tier, {hits['below']:,} below",
        f"{leader['kills']} workers killed, {sum(leader['faults'].values())} faults at the leader",
        f"{short} times no memory elsewhere",
        f"{leader['steps']:,} messages",
    ]


def _decide_alone(folder, outcome, calls):
    ranks = _Ranks(folder, outcome, calls=calls, seed=1, together=False)
    seen, last = ranks.hear()
    ranks.end()
    differences = _differences(seen)
    outcome.wrong += sum(report["wrong"] for report in last)
    outcome.expect(differences > 0, "ranks that decide alone never differed: nothing is tried")
    outcome.figures.append(f"control, each deciding alone: {differences:,} of {calls:,} differ")


def _lose_a_rank(folder, outcome, cycles):
    dice = random.Random(5)
    longest_s = 0.0
    for cycle in range(cycles):
        outcome.cases += 1
        ranks = _Ranks(
            folder / f"lost-{cycle}",
            outcome,
            calls=10_000_000,
            seed=cycle,
            faulty=False,
            limit_s=_LIMIT_S,
        )
        lost = ranks.children[cycle // 2 % _SIZE]
        time.sleep(dice.uniform(0.05, 0.4))  # the stimulus
        stopped = bool(cycle % 2)
        began_s = time.monotonic()
        os.kill(lost.process.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        others = [child for child in ranks.children if child is not lost]
        _, last = ranks.hear(others)
        if stopped:
            os.kill(lost.process.pid, signal.SIGCONT)
            last += ranks.hear([lost])[1]
        ended = [report["ended"] for report in last]
        outcome.wrong += sum(report["wrong"] for report in last)
        if any(each is None or not each["refuses"] for each in ended):
            outcome.missed.append(f"a rank went on without its group: {ended}"[:300])
        told = [each for each in ended[: len(others)] if each is not None]
        longest_s = max([longest_s, *(each["at_s"] - began_s for each in told)])
        ranks.end()
    outcome.figures.append(f"a rank killed or stopped in {cycles} groups")
    outcome.bound("s until all others were told:", longest_s, f"<= {_LIMIT_S + _SLACK_S}")


def _misstep(folder, outcome, cycles):
    dice = random.Random(7)
    noticed = 0
    for cycle in range(cycles):
        outcome.cases += 1
        at, how = dice.randrange(100, 300), _MISSTEPS[cycle % len(_MISSTEPS)]
        odd = dice.randrange(_SIZE), (at, how)
        ranks = _Ranks(
            folder / f"misstep-{cycle}",
            outcome,
            calls=800,
            seed=100 + cycle,
            faulty=False,
            odd=odd,
        )
        seen, last = ranks.hear()
        ranks.end()
        ended = [report["ended"] for report in last]
        outcome.wrong += sum(report["wrong"] for report in last)
        if all(each is not None and each["refuses"] for each in ended):
            noticed += 1
        elif any(each is not None for each in ended) or _differences(
            [views[at + 1 :] for views in seen]
        ):
            outcome.missed.append(f"call {at} with {how}: {ended}"[:300])
    outcome.expect(noticed > 0, "no misstep was noticed")
    outcome.figures.append(
        f"{noticed} of {cycles} missteps ended the group, the others had no effect"
    )
