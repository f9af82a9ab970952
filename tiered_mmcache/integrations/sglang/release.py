"""Which SGLang is installed, and whether this package knows it.

Owns: the releases that are supported, and what differs between them.
Does not own: what is done about it (:mod:`.activation`). Imports neither SGLang nor torch.

Facts about releases were read in the released wheels; ``make test-sglang`` checks them against
these.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re

from tiered_mmcache.errors import UnsupportedEngineError

OLDEST = (0, 5, 6)
FIRST_WITH_RESULTS = (0, 5, 8)
FIRST_WITH_PLUGINS = (0, 5, 11)
NEWEST_TESTED = (0, 5, 23)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An installed release.

    Attributes:
        text: The version as the package says it.
        number: Its leading numbers.
    """

    text: str
    number: tuple[int, ...]

    @property
    def stores_raw_tensors(self) -> bool:
        """Whether the cache is given tensors instead of results (0.5.6 and 0.5.7)."""
        return self.number < FIRST_WITH_RESULTS

    @property
    def is_newer_than_tested(self) -> bool:
        """Whether this release came out after the newest that was tested."""
        return self.number > NEWEST_TESTED


def installed_release() -> Release:
    """The release that an import of ``sglang`` would load.

    Raises:
        UnsupportedEngineError: There is none, or one whose cache has another interface.
    """
    try:
        text = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedEngineError(
            engine="SGLang",
            version="",
            problem="it is not installed",
            remedy="Install it into this environment, or unset TIERED_MMCACHE_CONFIG.",
        ) from None
    return checked_release(text)


def checked_release(text: str) -> Release:
    """The release of that version.

    Raises:
        UnsupportedEngineError: Its cache has another interface.
    """
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", text)
    number = tuple(int(part) for part in match[1].split(".")) if match else ()
    if number < OLDEST:
        raise UnsupportedEngineError(
            engine="SGLang",
            version=text,
            problem="its multimodal cache has another interface",
            remedy="Upgrade SGLang to 0.5.6 or newer, or unset TIERED_MMCACHE_CONFIG.",
        )
    return Release(text=text, number=number)
