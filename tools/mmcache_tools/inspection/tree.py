"""`mmcache ls --tree`: the namespaces of a store as a tree with totals.

Owns: cutting names at their slashes, the sums of each node, the text and the JSON.
Does not own: which entries count (:mod:`.selection`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from mmcache_tools.inspection.rows import printable, written_bytes
from mmcache_tools.inspection.selection import SelectedEntry

__all__ = ["NamespaceTree"]


@dataclasses.dataclass(slots=True)
class NamespaceSums:
    """What one namespace holds, of what was selected."""

    entries: int = 0
    payload_bytes: int = 0
    charged_bytes: int = 0

    def add(self, entry: SelectedEntry) -> None:
        """Count an entry."""
        self.entries += 1
        self.payload_bytes += entry.payload_bytes
        self.charged_bytes += entry.charged_bytes


@dataclasses.dataclass(slots=True)
class _Node:
    name: str
    entries: int = 0
    payload_bytes: int = 0
    charged_bytes: int = 0
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)

    def add(self, sums: NamespaceSums) -> None:
        self.entries += sums.entries
        self.payload_bytes += sums.payload_bytes
        self.charged_bytes += sums.charged_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "entries": self.entries,
            "payload_bytes": self.payload_bytes,
            "charged_bytes": self.charged_bytes,
            "children": [child.as_dict() for child in self.by_weight()],
        }

    def by_weight(self) -> list[_Node]:
        return sorted(self.children.values(), key=lambda node: (-node.charged_bytes, node.name))


class NamespaceTree:
    """Sums by namespace; a name's parts, cut at its slashes, are the levels.

    Args:
        entries: What is summed up; gone through once, only the sums stay in memory.
    """

    def __init__(self, entries: Iterable[SelectedEntry]) -> None:
        sums: dict[str, NamespaceSums] = collections.defaultdict(NamespaceSums)
        for entry in entries:
            sums[entry.namespace].add(entry)
        self._root = _Node(name="")
        for namespace, of_one in sums.items():
            node = self._root
            node.add(of_one)
            for part in namespace.split("/"):
                node = node.children.setdefault(part, _Node(name=part))
                node.add(of_one)

    @property
    def entries(self) -> int:
        """Entries in all namespaces."""
        return self._root.entries

    def as_list(self) -> list[dict[str, Any]]:
        """The top level as JSON has it, the heaviest first."""
        return [node.as_dict() for node in self._root.by_weight()]

    def lines(self) -> Iterator[str]:
        """The tree as text."""
        for node in self._root.by_weight():
            yield from _lines(node, depth=0)


def _lines(node: _Node, *, depth: int) -> Iterator[str]:
    name = "  " * depth + printable(node.name)
    yield f"{node.entries:>9} entries  {written_bytes(node.charged_bytes):>9}  {name}"
    for child in node.by_weight():
        yield from _lines(child, depth=depth + 1)
