"""The bookkeeping of flights, alone: what ends, what is voided, what leads back.

Owns: sequences of calls on one thread. Does not own: threads and tasks (test_get_or_encode.py).
"""

import contextlib

import pytest

from tiered_mmcache import TieredMultimodalCache
from tiered_mmcache.encoding.single_flight import Leader, SingleFlight, _leads_to, identity_of


def leader(name, *waits_for):
    return Leader(name, None, list(waits_for))


def test_what_leads_where():
    last = leader("last")
    left, right = leader("left", last), leader("right", last)
    first = leader("first", left, right)
    assert _leads_to(first, (last,))
    assert _leads_to(last, (last,))
    assert not _leads_to(last, (first,))
    assert not _leads_to(first, (leader("stranger"),))
    last.waits_for.append(left)  # a circle that does not concern the stranger
    assert not _leads_to(first, (leader("stranger"),))


def test_a_flight_is_joined_until_it_ends():
    flights = SingleFlight()
    own, others = flights.claim([1, 2], alone=False)
    assert ([flight.key for flight in own], others) == ([1, 2], [])
    more, joined = flights.claim([2, 3], alone=False)
    assert [flight.key for flight in more] == [3]
    assert joined == [own[1]]
    flights.end(own[1], answer="two")
    assert (own[1].answer, own[1].ended.done()) == ("two", True)
    assert flights.claim([2], alone=False)[1] == []


def test_a_flight_ends_once():
    flights = SingleFlight()
    (flight,), _ = flights.claim([1], alone=False)
    flights.end(flight, answer="first")
    flights.end(flight, error=ValueError())
    assert (flight.answer, flight.error) == ("first", None)


@pytest.mark.parametrize("end", ["return", "error", "interrupt"])
def test_what_a_leader_leaves_is_ended(end):
    flights = SingleFlight()
    own, _ = flights.claim([1, 2, 3], alone=False)
    kept = list(own)
    raised = {"error": ValueError("no"), "interrupt": KeyboardInterrupt()}.get(end)
    with contextlib.suppress(ValueError, KeyboardInterrupt), flights.leading(own):
        flights.end(own[0], answer="one")
        if raised is not None:
            raise raised
    assert own == []
    assert len(flights) == 0
    assert [flight.answer for flight in kept] == ["one", None, None]
    left = [flight.error for flight in kept[1:]]
    assert left == ([raised] * 2 if end == "error" else [None] * 2)


def test_what_is_voided_cannot_be_joined_and_knows_it():
    flights = SingleFlight()
    (one, two), _ = flights.claim([1, 2], alone=False)
    flights.void(1)
    assert (one.voided, two.voided) == (True, False)
    (again,), others = flights.claim([1, 2], alone=False)
    assert others == [two]
    flights.end(one, answer="old")
    assert flights.claim([1], alone=False)[1] == [again]  # its end closed nobody else's
    flights.void_all()
    assert (two.voided, again.voided) == (True, True)
    assert flights.claim([1, 2], alone=False)[1] == []


def test_who_leads_alone_replaces_whom_newcomers_join():
    flights = SingleFlight()
    (first,), _ = flights.claim([1], alone=False)
    (second,), others = flights.claim([1], alone=True)
    assert others == []
    assert flights.claim([1], alone=False)[1] == [second]
    flights.void(1)
    assert first.voided
    assert second.voided


def test_a_combination_is_no_plain_number():
    key = TieredMultimodalCache.combine_hashes([1, 2])
    assert key == int(key)
    assert identity_of(key) != identity_of(int(key))
    assert identity_of(key) == identity_of(TieredMultimodalCache.combine_hashes([1, 2]))
    assert identity_of("text") == "text"
