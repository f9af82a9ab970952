"""The inspection commands as the command line knows them: arguments, options, help.

Owns: their signatures. Does not own: what they do; each imports its module when it runs.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from mmcache_tools.inspection.filters import Filters, filtering
from mmcache_tools.inspection.outcome import ENVIRONMENT_VARIABLE, UsageError, ended

__all__ = ["Order", "register"]

_PANEL = "Look into a store"
_STORE_HELP = (
    f"A store's folder, or the YAML that names it. [default: what {ENVIRONMENT_VARIABLE} says]"
)

StoreArgument = Annotated[
    str | None, typer.Argument(metavar="[STORE]", help=_STORE_HELP, show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Order(str, Enum):
    """In which order entries are listed."""

    RECENCY = "recency"
    SIZE = "size"
    AGE = "age"
    KEY = "key"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(name="ls", rich_help_panel=_PANEL)(list_entries)
    # A combined hash is often negative: -5 must not be taken for options.
    unknown = {"ignore_unknown_options": True}
    app.command(name="show", rich_help_panel=_PANEL, context_settings=unknown)(show)
    app.command(name="stats", rich_help_panel=_PANEL)(stats)
    app.command(name="verify", rich_help_panel=_PANEL)(verify)


@filtering
def list_entries(
    store: StoreArgument = None,
    *,
    limit: Annotated[
        int | None, typer.Option(min=1, help="List no more than so many.", show_default=False)
    ] = None,
    filters: Filters,
    sort: Annotated[
        Order,
        typer.Option(help="Most recently used, largest or oldest first, or by the caller's key."),
    ] = Order.RECENCY,
    tree: Annotated[
        bool, typer.Option("--tree", help="A tree of namespaces with totals, not entries.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List what a store holds: key, size, age, cost, dtype, shape, class and namespace.

    Works on a store in use. Ends with 1 when a record is damaged, which is then left out.

    Example: mmcache ls mmcache.yaml --sort size --limit 20
    """

    def work() -> int:
        from mmcache_tools.inspection.listing import Listing, list_store
        from mmcache_tools.inspection.target import find_target

        listing = Listing(
            limit=limit,
            selection=filters.selection(),
            order=sort.value,
            tree=tree,
            as_json=as_json,
        )
        return list_store(find_target(store), listing)

    ended(work)


def show(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[STORE] KEY",
            help=f"{_STORE_HELP} KEY is the store key in hex or its first digits (4 or more), "
            "or the caller's key as `mmcache ls` prints it.",
            show_default=False,
        ),
    ],
    namespace: Annotated[
        str | None, typer.Option(help="Look in this namespace only.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one entry: every field of its record, its digests checked, its values summed up.

    Ends with 1 when there is no such entry, or when its bytes do not match their digests.

    Example: mmcache show mmcache.yaml 5c3a91
    """
    options = [each for each in arguments if each.startswith("--")]
    if options:
        raise typer.BadParameter(f"there is no option {options[0]}")
    if len(arguments) > 2:
        raise typer.BadParameter("give a STORE and one KEY, quoted when it has spaces")

    def work() -> int:
        from mmcache_tools.inspection.showing import show_entry
        from mmcache_tools.inspection.target import find_target, is_there

        *stores, key = arguments
        if not stores and is_there(key):
            raise UsageError(f"{key} is a file or folder: name a KEY after it.")
        target = find_target(stores[0] if stores else None)
        return show_entry(target, key, namespace=namespace, as_json=as_json)

    ended(work)


def stats(store: StoreArgument = None, as_json: JsonOption = False) -> None:
    """Sum up a store: bytes against budget and file, namespaces, sizes, ages, who reads it.

    Ends with 1 when a record is damaged, which is then counted apart.

    Example: mmcache stats mmcache.yaml
    """

    def work() -> int:
        from mmcache_tools.inspection.statistics import sum_up
        from mmcache_tools.inspection.target import find_target

        return sum_up(find_target(store), as_json=as_json)

    ended(work)


def verify(
    store: StoreArgument = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Afterwards, drop what is bad from the store.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a whole store: structure, totals against a full count, every digest.

    Works on a store in use, where totals are compared only if nothing is written meanwhile. Ends
    with 1 when anything is wrong, and names each store key and cause, also when it was dropped by
    --repair. Without that nothing is changed.

    Example: mmcache verify mmcache.yaml
    """

    def work() -> int:
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.inspection.verifying import verify_store

        return verify_store(find_target(store), as_json=as_json, repair=repair)

    ended(work)
