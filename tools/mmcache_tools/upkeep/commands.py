"""The commands that change a store, as the command line knows them: arguments, options, help.

Owns: their signatures. Does not own: what they do; each imports its module when it runs.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mmcache_tools.inspection.commands import JsonOption, StoreArgument
from mmcache_tools.inspection.filters import Filters, filtering
from mmcache_tools.inspection.outcome import ended

__all__ = ["register"]

_PANEL = "Change a store"

KeysArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[STORE] KEY...",
        help="STORE is a store's folder or the YAML that names it; it may be left out where the "
        "environment names one. Each KEY is as for `mmcache show`.",
        show_default=False,
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option(help="In this namespace only.", show_default=False)
]


class FileFormat(str, Enum):
    """How entries are written to files."""

    SAFETENSORS = "safetensors"
    NPY = "npy"
    PT = "pt"


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    unknown = {"ignore_unknown_options": True}  # a combined hash is often negative
    app.command(name="rm", rich_help_panel=_PANEL, context_settings=unknown)(remove)
    app.command(name="prune", rich_help_panel=_PANEL)(prune)
    app.command(name="compact", rich_help_panel=_PANEL)(compact)
    app.command(name="copy", rich_help_panel=_PANEL)(copy)
    app.command(name="export", rich_help_panel=_PANEL, context_settings=unknown)(export)
    app.command(name="import", rich_help_panel=_PANEL)(import_)


def store_and_keys(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Part the STORE from the KEYs: the first argument is one when it is a file or folder.

    It has to be one where several are given and the environment names none.
    """
    from mmcache_tools.inspection.target import (
        is_there,
        names_a_store,
        store_is_in_the_environment,
    )

    options = [each for each in arguments if each.startswith("--")]
    if options:
        raise typer.BadParameter(f"there is no option {options[0]}")
    first, *others = arguments
    if others and (names_a_store(first) or not store_is_in_the_environment()):
        return first, others
    if not others and is_there(first):
        raise typer.BadParameter(f"{first} is a file or folder: name a KEY after it")
    return None, arguments


def remove(
    arguments: KeysArgument, namespace: NamespaceOption = None, as_json: JsonOption = False
) -> None:
    """Remove entries by KEY; a server that uses the store encodes them again.

    Ends with 1 when one is not there; the others are removed. Works on a store in use.

    Example: mmcache rm mmcache.yaml 5c3a91 "[11, 12]"
    """
    store, keys = store_and_keys(arguments)

    def work() -> int:
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.upkeep.removing import remove_entries

        return remove_entries(find_target(store), keys, namespace=namespace, as_json=as_json)

    ended(work)


@filtering
def prune(
    store: StoreArgument = None,
    *,
    filters: Filters,
    to_size: Annotated[
        str | None,
        typer.Option(
            help="Then evict the least recently used until the rest takes no more: 200GiB.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove entries that meet all given conditions, or the least recently used above a size.

    Works on a store in use, in short transactions. The file keeps its length, and its free pages
    are used again: `mmcache compact` gives them back to the file system.

    Example: mmcache prune mmcache.yaml --older-than 30d --dry-run
    """

    def work() -> int:
        from mmcache_tools.inspection.selection import read_size
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.upkeep.removing import Pruning, prune_store

        pruning = Pruning(
            selection=filters.selection(),
            to_size_bytes=read_size(to_size, option="--to-size"),
            dry_run=dry_run,
            as_json=as_json,
        )
        return prune_store(find_target(store), pruning)

    ended(work)


def compact(store: StoreArgument = None, as_json: JsonOption = False) -> None:
    """Rewrite a store's file without its free pages, and put it in the old one's place at once.

    Ends with 3 when a server has the store open. Needs room for a second file meanwhile.

    Example: mmcache compact mmcache.yaml
    """

    def work() -> int:
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.upkeep.compacting import compact_store

        return compact_store(find_target(store), as_json=as_json)

    ended(work)


def copy(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[STORE] DESTINATION",
            help="STORE is a store's folder or the YAML that names it; it may be left out where "
            "the environment names one. DESTINATION is a folder that is not there yet.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy a store to another place, also while a server uses it, in short transactions.

    Every digest is checked on the way. Ends with 1 when damaged entries were left out.

    Example: mmcache copy mmcache.yaml backup/store
    """
    if len(arguments) > 2:
        raise typer.BadParameter("give a STORE and one DESTINATION")

    def work() -> int:
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.upkeep.copying import copy_to

        *stores, destination = arguments
        target = find_target(stores[0] if stores else None)
        return copy_to(target, Path(destination), as_json=as_json)

    ended(work)


def export(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[STORE] [KEY...]",
            help="STORE is a store's folder or the YAML that names it; it may be left out where "
            "the environment names one. Each KEY is as for `mmcache show`.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The folder for the files; made if need be.")],
    to: Annotated[
        FileFormat, typer.Option(help="The files' format; pt loads torch.")
    ] = FileFormat.SAFETENSORS,
    every: Annotated[
        bool, typer.Option("--all", help="Every entry of the current generations.")
    ] = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write entries to files, one for each, once their bytes match their digests.

    `mmcache import` reads them back as the same entries. Ends with 1 when one was left out because
    it is damaged. Works on a store in use.

    Example: mmcache export mmcache.yaml 5c3a91 --to npy --out exported
    """
    if every and len(arguments) > 1:
        raise typer.BadParameter("give KEYs or --all")
    store, keys = (arguments[0], []) if every else store_and_keys(arguments)

    def work() -> int:
        from mmcache_tools.inspection.target import find_target
        from mmcache_tools.upkeep.exporting import Export, export_entries
        from mmcache_tools.upkeep.tensor_files import Format

        wanted = Export(
            keys=keys, namespace=namespace, to=Format(to.value), out=out, as_json=as_json
        )
        return export_entries(find_target(store), wanted)

    ended(work)


def import_(
    configuration: Annotated[
        Path, typer.Argument(metavar="YAML", help="The configuration whose store is filled.")
    ],
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files, or folders of files, to take in."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Fill a store from .safetensors, .npy and .pt files: warm before the first request.

    Files of `mmcache export` become the same entries, if they are of the configuration's namespace
    and their bytes match their digests. In other files a tensor's name, or the npy's, is the
    caller's key. Ends with 1 when something was refused.

    Example: mmcache import mmcache.yaml exported
    """

    def work() -> int:
        from mmcache_tools.upkeep.importing import import_files

        return import_files(configuration, sources, as_json=as_json)

    ended(work)
