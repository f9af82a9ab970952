"""A chat-like load: conversations about pictures, several at a time, with returns.

Owns: which requests come in which order; a seed decides it entirely. Does not own: the pictures,
the cache, or torch: this is plain data.

Each item (a picture, or an ordered combination of pictures) is talked about in at least two
conversations: one when it is new, and one later, when others have been looked at in between.
Some come back soon, some late, so that all tiers have something to serve. A few conversations go
on at a time, and each sends several questions about its item.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["REQUESTS_PER_ITEM", "Item", "Request", "Workload", "count_of_pictures", "plan"]

REQUESTS_PER_ITEM = 5
_MAX_ITEMS = 72  # what the pictures suffice for
_COMBINATION_SHARE = 4  # one item in four is a combination
_MAX_COMBINATION_TOKENS = 1000  # about 5 MB, so that a small hot tier can hold any item
_CONVERSATIONS_AT_A_TIME = 3
_QUESTIONS = (
    "What is this?",
    "Describe the colours.",
    "What is in the background?",
    "Is there any text?",
    "How many things can you count?",
    "Where might this have been taken?",
)
_COMBINATION_QUESTIONS = (
    "What do these have in common?",
    "What differs between them?",
    "Which one is brighter?",
    "Put them into one sentence.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is encoded and cached as one: a picture, or an ordered combination of pictures."""

    pictures: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people."""
        return " + ".join(self.pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question about one item."""

    conversation: int
    item: Item
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All requests, in order, and the distinct items in them."""

    items: tuple[Item, ...]
    requests: tuple[Request, ...]


@dataclass(slots=True, kw_only=True)
class _Conversation:
    item: Item
    starts: float  # in openings of items
    questions: int


def count_of_pictures(requests: int) -> int:
    """How many pictures a load of that many requests talks about."""
    items = _count_of_items(requests)
    return items - items // _COMBINATION_SHARE


def _count_of_items(requests: int) -> int:
    return min(requests // REQUESTS_PER_ITEM, _MAX_ITEMS)


def plan(tokens: Mapping[str, int], *, requests: int, seed: int) -> Workload:
    """Lay out a load.

    Args:
        tokens: The pictures and the tokens of each; :func:`count_of_pictures` says how many.
        requests: How many to lay out, at least :data:`REQUESTS_PER_ITEM` for each item.
        seed: The same seed gives the same load.
    """
    rng = random.Random(seed)
    combinations = _count_of_items(requests) - len(tokens)
    items = [Item(pictures=(name,)) for name in tokens]
    items += _combinations(tokens, combinations, rng)
    if requests < REQUESTS_PER_ITEM * len(items):
        raise ValueError(f"{len(items)} items need {REQUESTS_PER_ITEM * len(items)} requests")
    rng.shuffle(items)
    conversations = _conversations(items, requests, rng)
    return Workload(items=tuple(items), requests=tuple(_interleave(conversations, rng)))


def _combinations(tokens: Mapping[str, int], count: int, rng: random.Random) -> list[Item]:
    """Distinct combinations of two or three; the second is the first one in reverse order."""
    found: list[Item] = []
    while len(found) < count:
        pictures = tuple(rng.sample(list(tokens), rng.choice((2, 2, 3))))
        if len(found) == 1:
            pictures = found[0].pictures[::-1]
        item = Item(pictures=pictures)
        if item not in found and sum(tokens[name] for name in pictures) <= _MAX_COMBINATION_TOKENS:
            found.append(item)
    return found


def _conversations(items: list[Item], requests: int, rng: random.Random) -> list[_Conversation]:
    """An opening and a return for each item, and what is left over spread as more questions."""
    found = []
    for position, item in enumerate(items):
        found.append(_Conversation(item=item, starts=position, questions=2))
        later = position + _pause(len(items), rng)
        found.append(_Conversation(item=item, starts=later, questions=1))
    for _ in range(requests - sum(each.questions for each in found)):
        if rng.random() < 0.5:
            rng.choice(found).questions += 1
        else:
            position = rng.randrange(len(items))
            later = position + _pause(len(items), rng)
            found.append(_Conversation(item=items[position], starts=later, questions=1))
    return sorted(found, key=lambda each: each.starts)


def _pause(items: int, rng: random.Random) -> float:
    """How many other items are opened before one comes back: a few, or a good part of all."""
    return rng.uniform(1.5, 6.5) if rng.random() < 0.5 else rng.uniform(0.4, 1.0) * items + 1.5


def _interleave(conversations: list[_Conversation], rng: random.Random) -> list[Request]:
    """Take turns between the conversations that are going on."""
    waiting = list(enumerate(conversations))
    going_on: list[tuple[int, _Conversation]] = []
    found: list[Request] = []
    while waiting or going_on:
        while waiting and len(going_on) < _CONVERSATIONS_AT_A_TIME:
            going_on.append(waiting.pop(0))
        number, conversation = rng.choice(going_on)
        found.append(_request(number, conversation.item, rng))
        conversation.questions -= 1
        if conversation.questions == 0:
            going_on.remove((number, conversation))
    return found


def _request(conversation: int, item: Item, rng: random.Random) -> Request:
    questions = _QUESTIONS if len(item.pictures) == 1 else _COMBINATION_QUESTIONS
    return Request(conversation=conversation, item=item, question=rng.choice(questions))
