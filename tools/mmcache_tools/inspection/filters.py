"""The options that say which entries are meant, for every command that takes a part of a store.

Owns: their names and help, once for all commands. Does not own: what they mean (:mod:`.selection`,
imported when a command runs).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from mmcache_tools.inspection.selection import Selection

__all__ = ["Filters", "filtering"]


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The options as they were given; :meth:`selection` says what they mean."""

    namespace: Annotated[str | None, _option("Only entries of this namespace.")] = None
    class_tag: Annotated[str | None, _option("Only entries of this class.", "--class")] = None
    prefix: Annotated[
        str | None,
        _option("Only entries whose store key, or caller's key as printed, begins so."),
    ] = None
    older_than: Annotated[
        str | None, _option("Only entries stored so long ago: 12h, 7d.", "--older-than")
    ] = None
    newer_than: Annotated[
        str | None, _option("Only entries stored no longer ago than: 12h, 7d.", "--newer-than")
    ] = None
    larger_than: Annotated[
        str | None, _option("Only embeddings of at least that size: 64KiB.", "--larger-than")
    ] = None
    smaller_than: Annotated[
        str | None, _option("Only embeddings of at most that size: 64KiB.", "--smaller-than")
    ] = None

    def selection(self) -> Selection:
        """The conditions.

        Raises:
            UsageError: A span of time or a size is none.
        """
        from mmcache_tools.inspection.selection import Selection, read_size, read_span

        return Selection(
            namespace=self.namespace,
            class_tag=self.class_tag,
            prefix=self.prefix,
            older_than_s=read_span(self.older_than, option="--older-than"),
            newer_than_s=read_span(self.newer_than, option="--newer-than"),
            larger_than_bytes=read_size(self.larger_than, option="--larger-than"),
            smaller_than_bytes=read_size(self.smaller_than, option="--smaller-than"),
        )


def filtering(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Filters` in the place of its parameter ``filters``."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in Filters.__slots__}
        command(**given, filters=Filters(**chosen))

    own = get_type_hints(command, include_extras=True)
    theirs = get_type_hints(Filters, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        if each.name == "filters":
            options = (
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
                for name in Filters.__slots__
            )
            parameters += options
        else:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    hints = own | theirs
    described = [each.replace(annotation=hints[each.name]) for each in parameters]
    with_options.__annotations__ = {each.name: each.annotation for each in described}
    with_options.__signature__ = inspect.Signature(described)  # type: ignore[attr-defined]
    del with_options.__wrapped__
    return with_options
