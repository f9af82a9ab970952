"""What the ranks of a group tell each other: fixed-size messages, and the bytes of tensors.

Owns: the messages, their comparison, and the state of being out of the group.
Does not own: what the ranks do with what they are told (:mod:`.agreement`).

Every message goes from each rank to each, in one all-gather of a fixed size. It says where its
sender is: the number of the step, the kind of call, a digest of the key and of what its hot tier
holds. All of these have to be equal, so every rank sees at the same step who is elsewhere. The
leader's message also carries its answer. Since a step is the same collective with the same size
whatever the call, a rank that makes another call is met with an error and not with a wrong tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import struct
from collections.abc import Iterator

import torch
import torch.distributed as dist

from tiered_mmcache.errors import GroupError, GroupLostError, GroupOutOfStepError

LEADER = 0
NO_KEY = bytes(16)  # of steps that are about no key
MESSAGE_BYTES = 512
_MAGIC = b"tmc1"
# Magic, kind, success, number, key, state of the hot tier, hot hits, detail, length of the answer.
_HEAD = struct.Struct("<4sBB2xQ16sQQQI")
MOST_WORDS_BYTES = MESSAGE_BYTES - _HEAD.size
_MOST_ANSWER_BYTES = 16 * 1024 * 1024


class Kind(enum.IntEnum):
    """What the ranks do together."""

    JOIN = 1
    SETTINGS = 2
    FIND = 3
    TAKE = 4
    LOCATE = 5
    SET = 6
    KEEP_BELOW = 7
    FREE = 8
    PREFETCH = 9
    ENCODE = 10
    VOTE = 11


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where a rank is; equal on all ranks that are in step.

    Attributes:
        kind: The call, or the part of one.
        key: 16 bytes that stand for what it is about.
        state: 64 bits that stand for all changes to the hot tier so far.
        hot_hits: Look-ups that the hot tier has answered so far.
        detail: 64 bits that stand for further arguments.
    """

    kind: Kind
    key: bytes
    state: int
    hot_hits: int
    detail: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a step came to; equal on all ranks.

    Attributes:
        failed: The ranks that could not do their part.
        answer: What the leader said.
    """

    failed: list[int]
    answer: bytes


class RankExchange:
    """One rank's part in the messages of its group. Calls must not overlap.

    Args:
        group: Carries messages, and tensors of the CPU. It needs a backend for CPU tensors, such
            as gloo: a miss must not wait for a device.
        device_group: Carries tensors of other devices, among the same ranks in the same order;
            ``group`` when None.

    Attributes:
        rank: This process's rank in the group; 0 leads.
        size: The number of ranks.
        steps: Steps taken.
        shared_bytes: Bytes of tensors that were shared.

    Raises:
        TypeError: The process is in no such group.
        ValueError: The groups do not fit, or ``group`` does not carry CPU tensors.
    """

    def __init__(
        self, group: dist.ProcessGroup, device_group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = _usable(group, "group")
        self._device_group = (
            group if device_group is None else _usable(device_group, "device_group")
        )
        self.rank = group.rank()
        self.size = group.size()
        self.steps = 0
        self.shared_bytes = 0
        self._failure: str | None = None
        places = {(member.rank(), member.size()) for member in (group, self._device_group)}
        if len(places) > 1:
            raise ValueError("device_group has to have the ranks of group, in the same order")
        if not _carries(group, torch.device("cpu")):
            raise ValueError(
                "group has no backend for CPU tensors: pass "
                "group=torch.distributed.new_group(backend='gloo') and device_group=the other one"
            )

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that has the lower tiers."""
        return self.rank == LEADER

    @property
    def failure(self) -> str | None:
        """Why this rank is out of the group for good; None while it is in."""
        return self._failure

    def check(self) -> None:
        """Raise while this rank is out of the group.

        Raises:
            GroupLostError: It is.
        """
        if self._failure is not None:
            raise GroupLostError(
                self.rank, f"out of its group since an earlier call ({self._failure})"
            )

    def leave(self, why: str) -> None:
        """Take no further step: what this rank holds may not be what the others hold."""
        if self._failure is None:
            self._failure = why

    def close(self) -> None:
        """Let go of the groups; no step may follow.

        A gloo group that outlives ``destroy_process_group`` can abort the process at its exit
        ("terminate called without an active exception"; 10 of 25 times with torch 2.13).
        """
        self.__dict__.pop("_group", None)
        self.__dict__.pop("_device_group", None)

    def carries(self, device: torch.device) -> bool:
        """Whether tensors of a device can be shared."""
        return _carries(self._group_for(device), device)

    def meet(self, step: Step, *, ok: bool = True, answer: bytes = b"") -> Meeting:
        """Take a step with all ranks; returns when every rank has come to it.

        Args:
            step: Where this rank is.
            ok: Whether it could do its part.
            answer: What the leader says; what others give here is not sent.

        Raises:
            GroupOutOfStepError: A rank is elsewhere.
            GroupLostError: The collective failed, as when a rank has died or did not come in time.
        """
        self.check()
        with self._leaving_on_error(step.kind.name.lower()):
            return self._meet(step, ok=ok, answer=answer if self.leads else b"")

    def introduce(self, words: bytes) -> list[bytes]:
        """Take a step in which every rank speaks.

        Args:
            words: What this rank says, at most :data:`MOST_WORDS_BYTES`.

        Returns:
            What each rank said, in the order of the ranks.

        Raises:
            GroupOutOfStepError: A rank is elsewhere.
            GroupLostError: As for :meth:`meet`.
            ValueError: There are too many words.
        """
        self.check()
        if len(words) > MOST_WORDS_BYTES:
            raise ValueError(f"{len(words)} bytes are more than a message carries")
        step = Step(kind=Kind.JOIN, key=NO_KEY, state=0, hot_hits=0)
        with self._leaving_on_error("introduction"):
            heads, texts = self._gather(self._message(step, ok=True, answer=words))
            self._compare(heads)
        return [text[: head[-1]] for head, text in zip(heads, texts, strict=True)]

    def share(self, payload: torch.Tensor) -> None:
        """Send the leader's bytes to all ranks.

        Args:
            payload: One-dimensional, contiguous ``uint8``, of the same length on every rank. The
                others' is overwritten, in the order of the current stream.

        Raises:
            GroupLostError: As for :meth:`meet`.
        """
        self.check()
        if payload.numel() == 0:
            return
        with self._leaving_on_error("sharing a tensor"):
            _broadcast(self._group_for(payload.device), payload)
        self.shared_bytes += payload.numel()

    @contextlib.contextmanager
    def _leaving_on_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.leave(str(error) or type(error).__name__)
            if isinstance(error, GroupError) or not isinstance(error, Exception):
                raise
            raise self._lost(what, error) from error

    def _meet(self, step: Step, *, ok: bool, answer: bytes) -> Meeting:
        heads, texts = self._gather(self._message(step, ok=ok, answer=answer))
        self._compare(heads)
        failed = [rank for rank, head in enumerate(heads) if not head[2]]
        length = heads[LEADER][-1]
        if length <= MOST_WORDS_BYTES:
            return Meeting(failed=failed, answer=texts[LEADER][:length])
        return Meeting(failed=failed, answer=self._long_answer(length, answer))

    def _compare(self, heads: list[tuple[int, ...]]) -> None:
        own = heads[self.rank]
        elsewhere = [rank for rank, head in enumerate(heads) if _place(head) != _place(own)]
        if elsewhere:
            raise GroupOutOfStepError(
                self.rank, elsewhere, _difference(own, self.rank, heads[elsewhere[0]], elsewhere[0])
            )

    def _message(self, step: Step, *, ok: bool, answer: bytes) -> bytes:
        self.steps += 1
        head = _HEAD.pack(
            _MAGIC,
            step.kind,
            ok,
            self.steps,
            step.key,
            step.state,
            step.hot_hits,
            step.detail,
            len(answer),
        )
        inline = answer if len(answer) <= MOST_WORDS_BYTES else b""
        return (head + inline).ljust(MESSAGE_BYTES, b"\0")

    def _gather(self, message: bytes) -> tuple[list[tuple[int, ...]], list[bytes]]:
        """Every rank's head, and what follows it."""
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        everyone = [torch.empty(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(self.size)]
        self._group.allgather([everyone], [own]).wait()
        texts = [received.numpy().tobytes() for received in everyone]
        heads = [_HEAD.unpack_from(text) for text in texts]
        return heads, [text[_HEAD.size :] for text in texts]

    def _long_answer(self, length: int, answer: bytes) -> bytes:
        if length > _MOST_ANSWER_BYTES:  # the leader's word: never allocate whatever it says
            raise ValueError(f"an answer of {length} bytes is too long")
        text = bytearray(answer) if self.leads else bytearray(length)
        payload = torch.frombuffer(text, dtype=torch.uint8)
        _broadcast(self._group, payload)
        return payload.numpy().tobytes()

    def _group_for(self, device: torch.device) -> dist.ProcessGroup:
        return self._group if device.type == "cpu" else self._device_group

    def _lost(self, what: str, error: Exception) -> GroupLostError:
        return GroupLostError(
            self.rank,
            f"its group of {self.size} failed in step {self.steps} ({what}), as when a rank has "
            f"died: {error}. End all ranks, and start them again",
        )


def _usable(group: object, name: str) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):  # new_group gives others than members a number
        raise TypeError(
            f"{name} has to be a group of torch.distributed that this process is in, not {group!r}"
        )
    return group


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def _broadcast(group: dist.ProcessGroup, payload: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = LEADER
    group.broadcast([payload], options).wait()


def _place(head: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a message that has to be equal on all ranks: all but success and answer."""
    return (*head[:2], *head[3:8])


def _difference(own: tuple[int, ...], rank: int, other: tuple[int, ...], other_rank: int) -> str:
    """In words, the first thing that tells two messages apart."""
    if own[0] != other[0]:
        return (
            f"what rank {other_rank} sent is no message of this cache: give the cache its own group"
        )
    here, there = _call(own), _call(other)
    if here != there:
        return (
            f"it was at {here}, rank {other_rank} at {there}: all ranks have to make the same "
            "calls in the same order"
        )
    if own[1] == Kind.SETTINGS:
        what = "were given different values for hot.max_size, namespace or hot.oversize"
    elif own[4] != other[4]:
        what = "asked for different keys"
    elif own[5:7] != other[5:7]:
        what = "had different calls before: their hot tiers are not the same"
    else:
        what = "gave different arguments, such as tensors of other shapes"
    return f"at {here} it and rank {other_rank} {what}"


def _call(head: tuple[int, ...]) -> str:
    known = {kind.value: kind.name.lower() for kind in Kind}
    return f"{known.get(head[1], f'call {head[1]}')}, step {head[3]}"
