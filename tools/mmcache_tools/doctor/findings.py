"""What a check of the doctor comes to.

Owns: the states and the fields. Does not own: the checks.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

__all__ = ["Finding", "State"]


class State(str, Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # works, and could be better
    BAD = "bad"  # does not work as configured


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What, as a stable label.
        state: How it is.
        found: What was found, in words.
        remedy: What to do about it; None when there is nothing to do.
    """

    check: str
    state: State
    found: str
    remedy: str | None = None
