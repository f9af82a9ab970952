"""`mmcache config`: its commands as the command line knows them.

Owns: their signatures. Does not own: what they do; each imports its module when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache_tools.inspection.commands import JsonOption
from mmcache_tools.inspection.outcome import ended

__all__ = ["register"]

_HELP = """Check a configuration, describe it for editors, or begin one.

Example: mmcache config check mmcache.yaml
"""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    group = typer.Typer(name="config", help=_HELP, no_args_is_help=True)
    group.command(name="check")(check)
    group.command(name="schema")(schema)
    group.command(name="init")(init)
    app.add_typer(group, rich_help_panel="Configure")


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file.")],
    as_json: JsonOption = False,
) -> None:
    """Read a configuration as a server would on this machine, and say what it comes to.

    Ends with 1 when something in it cannot be used, and with 3 when it cannot be read.

    Example: mmcache config check mmcache.yaml
    """

    def work() -> int:
        from mmcache_tools.configuring.checking import check_file

        return check_file(file, as_json=as_json)

    ended(work)


def schema() -> None:
    """Print a JSON schema, with which editors complete and check the YAML.

    Example: mmcache config schema
    """

    def work() -> int:
        from mmcache_tools.configuring.schema import configuration_schema
        from mmcache_tools.inspection.rows import print_json

        print_json(configuration_schema())
        return 0

    ended(work)


def init(
    out: Annotated[
        Path | None,
        typer.Option(help="Write to this file, which must not be there yet.", show_default=False),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="What makes embeddings interchangeable.")
    ] = "organisation/model@revision/dtype",
    store: Annotated[
        Path, typer.Option(help="The folder of the store; its disk is measured.")
    ] = Path("/var/cache/tiered-mmcache"),
) -> None:
    """Write a commented configuration whose sizes fit this machine; asks nothing.

    Example: mmcache config init --namespace Qwen/Qwen2.5-VL-7B-Instruct@main/bf16 --out new.yaml
    """

    def work() -> int:
        from mmcache_tools.configuring.starting import write_configuration

        return write_configuration(out, namespace=namespace, store=store)

    ended(work)
