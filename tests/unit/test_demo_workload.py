"""The demo's load: what a chat looks like to a cache."""

import pytest

from mmcache_tools.demo.workload import Item, count_of_pictures, plan

TOKENS = {f"picture-{number}": 49 + 147 * (number % 2) for number in range(45)}


@pytest.fixture(params=range(5))
def load(request):
    return plan(TOKENS, requests=300, seed=request.param)


@pytest.mark.parametrize("requests", [20, 40, 200, 301, 5_000])
def test_has_exactly_as_many_requests_as_asked_for(requests):
    tokens = dict.fromkeys(map(str, range(count_of_pictures(requests))), 49)
    assert len(plan(tokens, requests=requests, seed=1).requests) == requests


def test_the_seed_decides_the_load():
    loads = [plan(TOKENS, requests=300, seed=seed) for seed in (3, 3, 4)]
    assert loads[0] == loads[1]
    assert loads[0] != loads[2]


def test_every_item_is_asked_about_several_times(load):
    assert len(load.items) == len(set(load.items)) == 60
    for item in load.items:
        assert sum(request.item == item for request in load.requests) >= 3


def test_every_item_comes_back_in_a_later_conversation(load):
    for item in load.items:
        assert len({each.conversation for each in load.requests if each.item == item}) >= 2


def test_most_items_return_after_others(load):
    returning = 0
    for item in load.items:
        places = [place for place, each in enumerate(load.requests) if each.item == item]
        between = load.requests[places[0] : places[-1]]
        returning += len({each.item for each in between}) > 3
    assert returning > 0.8 * len(load.items)


def test_conversations_follow_up_and_overlap(load):
    conversations = [request.conversation for request in load.requests]
    assert len(set(conversations)) < len(conversations)
    assert conversations != sorted(conversations)


def test_a_conversation_stays_with_its_item(load):
    item_of = {}
    for request in load.requests:
        assert item_of.setdefault(request.conversation, request.item) == request.item
        assert request.question


def test_one_item_in_four_is_a_combination_and_one_of_them_also_in_reverse(load):
    combinations = [item for item in load.items if len(item.pictures) > 1]
    assert len(combinations) == 15
    assert any(Item(pictures=item.pictures[::-1]) in load.items for item in combinations)
    assert all(sum(TOKENS[name] for name in item.pictures) <= 1000 for item in combinations)


def test_too_many_pictures_for_the_requests_are_refused():
    with pytest.raises(ValueError, match="need"):
        plan(TOKENS, requests=40, seed=0)


def test_an_item_has_a_name_for_people():
    assert Item(pictures=("cat", "dog")).name == "cat + dog"
