"""The kinds of workload by name.

Owns: the names, apart from what makes them so that the command line starts quickly.
"""

from __future__ import annotations

from enum import Enum


class Kind(str, Enum):
    """What a workload is made of."""

    SERVICE = "service"
    CONVERSATION = "conversation"
    ZIPF = "zipf"
    UNIQUE = "unique"
