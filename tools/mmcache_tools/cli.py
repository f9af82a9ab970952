"""The commands, their options and their help.

Owns: the command line. Does not own: what a command does. Each one imports its module when it
runs, so that `mmcache --help` and the inspection commands never load torch, and start at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmcache_tools.configuring import commands as configuring
from mmcache_tools.inspection import commands as inspection
from mmcache_tools.inspection.outcome import (
    UsageError,
    ended,
    ended_or_explained,
    ready_for_output,
)
from mmcache_tools.plain_values import convert_plainly
from mmcache_tools.sizing import commands as sizing
from mmcache_tools.upkeep import commands as upkeep
from mmcache_tools.watching import commands as watching
from mmcache_tools.workload.options import Kind

__all__ = ["app", "main"]

app = typer.Typer(
    name="mmcache",
    help="Look into a store of multimodal embeddings, and see the cache do its job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


# Inspection: ls, show, stats, verify.

inspection.register(app)


# Upkeep: rm, prune, compact, copy, export, import.

upkeep.register(app)


# Sizing: plan, trace.

sizing.register(app)


# Watching: top.

watching.register(app)


# Configuration: config check, config schema, config init.

configuring.register(app)


# The machine.


@app.command(rich_help_panel="Configure")
def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[YAML]", help="A configuration to check on this machine."),
    ] = None,
    speed: Annotated[
        bool, typer.Option(help="Measure the store's disk, with 64 MiB in at most 4 s.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check this machine for the cache: memory, limits, disk, software, and a configuration.

    Names each finding with its remedy, and changes nothing. Ends with 1 when something does not
    work as configured.

    Example: mmcache doctor mmcache.yaml
    """

    def work() -> int:
        from mmcache_tools.doctor.command import examine

        return examine(file, measure=speed, as_json=as_json)

    ended(work)


# A running server.


@app.command(rich_help_panel="Watch a server")
def metrics(
    place: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="The folder of metrics, or the YAML whose `metrics.folder` names it; may be left "
            "out where the environment names a YAML.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve them to Prometheus; 0 takes any.", show_default=False
        ),
    ] = None,
    address: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
) -> None:
    """Print the metrics of all processes of a server together, or serve them on one port.

    Reads the files that the caches keep. Needs the `prometheus` extra.

    Example: mmcache metrics mmcache.yaml
    """

    def work() -> int:
        try:
            from mmcache_tools.exporting.command import export
        except ModuleNotFoundError as error:
            message = f"metrics needs {error.name}: pip install 'tiered-mmcache[prometheus]'"
            raise UsageError(message) from None
        return export(place, port=port, address=address)

    ended(work)


# The main job.


@app.command()
def demo(
    store: Annotated[
        Path, typer.Option(help="Folder of the disk tier; made if need be, and left behind.")
    ] = Path("mmcache-demo"),
    requests: Annotated[
        int, typer.Option(min=20, help="Chat requests to play; one item for every five.")
    ] = 300,
    hot: Annotated[str, typer.Option(help="Size of the hot tier (device memory).")] = "8MiB",
    host: Annotated[str, typer.Option(help="Size of the host tier (host memory).")] = "24MiB",
    disk: Annotated[str, typer.Option(help="Size of the disk tier (LMDB store).")] = "512MiB",
    seed: Annotated[int, typer.Option(help="Which of the possible loads to play.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Play a chat over real images: each is encoded once, then served from hot, host or disk.

    Loads a trained EfficientNet-Lite0 and the pictures of scikit-image and scikit-learn, and
    checks that every embedding served has the bits that the encoder made. Then a second process
    opens the same store and serves every item from disk, without the encoder. Ends with 1, and
    says why, when any of this fails.

    Example: mmcache demo --store /tmp/mmcache-demo --requests 400 --hot 6MiB
    """
    from mmcache_tools.demo.command import DemoOptions, run_demo

    options = DemoOptions(
        store=store, requests=requests, hot=hot, host=host, disk=disk, seed=seed, as_json=as_json
    )
    raise typer.Exit(run_demo(options))


@app.command()
def bench(
    quick: Annotated[bool, typer.Option(help="Fewer rounds: half a minute, not minutes.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Moves of a GPU's tensors instead.")] = False,
    entries: Annotated[
        int | None,
        typer.Option(
            min=2_000, help="Small entries in the large store; 1,000,000, with --quick 20,000."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure the cache beside memcpy, the static cache, safetensors and diskcache, as ratios.

    Needs the `bench` extra, and 4 KB for each of the entries in the folder for temporary files,
    which `TMPDIR` names. Ends with 1 when a bound that the project sets itself is missed: quote
    ratios, not times, and repeat on a quiet machine.

    Example: mmcache bench --quick
    """
    try:
        from mmcache_tools.bench.command import run, run_on_device
    except ModuleNotFoundError as error:
        print(f"mmcache: bench needs {error.name}: pip install '.[bench]'", file=sys.stderr)
        raise typer.Exit(2) from None

    if gpu:
        raise typer.Exit(run_on_device(quick=quick, as_json=as_json))
    raise typer.Exit(run(quick=quick, as_json=as_json, entries=entries))


@app.command()
def compare(
    quick: Annotated[
        bool, typer.Option(help="Few systems, one size, one trace: under three minutes.")
    ] = False,
    system: Annotated[
        list[str] | None, typer.Option(help="Only this one, by its short name; again for more.")
    ] = None,
    environments: Annotated[
        Path, typer.Option(help="Where the systems' environments are, or are made.")
    ] = Path("build/peers"),
    page: Annotated[
        Path | None, typer.Option(help="Write the result as a page, its charts beside it.")
    ] = None,
    servegen: Annotated[
        Path | None, typer.Option(help="ServeGen's folder: plays a service, with --popularity.")
    ] = None,
    popularity: Annotated[
        Path | None, typer.Option(help="Lines of sequence, key, bytes; plain or xz.")
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(help="Mooncake's trace: plays conversations.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure this cache and what one would pick in its place, side by side on this machine.

    Downloads the others' released packages, pinned, into an environment for each. Ends with 1
    when a bound that the project sets itself is missed.

    Example: mmcache compare --quick
    """

    def work() -> int:
        from mmcache_tools.peers.command import CompareOptions
        from mmcache_tools.peers.command import compare as run

        options = CompareOptions(
            quick=quick,
            systems=tuple(system or ()),
            environments=environments,
            page=page,
            as_json=as_json,
            servegen=servegen,
            popularity=popularity,
            conversations=conversations,
        )
        return run(options)

    ended(work)


@app.command()
def workload(  # noqa: PLR0917 - each is an option
    kind: Annotated[Kind, typer.Argument(help="What the requests are like; see docs/cli.md.")],
    out: Annotated[Path | None, typer.Option(help="A new file for the trace; else stdout.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="At most so many requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Which of the possible traces.")] = 0,
    keys: Annotated[int, typer.Option(min=1, help="`zipf`: different images.")] = 1000,
    alpha: Annotated[float, typer.Option(min=0, help="`zipf`: the exponent.")] = 1.0,
    repeated: Annotated[
        float, typer.Option(min=0, max=1, help="`unique`: share of images shown before.")
    ] = 0.02,
    servegen: Annotated[
        Path | None, typer.Option(help="`service`: ServeGen's folder with chunk-*-trace.csv.")
    ] = None,
    popularity: Annotated[
        Path | None, typer.Option(help="`service`: lines of sequence, key, bytes; plain or xz.")
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(help="`conversation`: Mooncake's trace, JSON lines.")
    ] = None,
    start_s: Annotated[
        float, typer.Option(min=0, help="`service`: from which second of the day on.")
    ] = 0.0,
) -> None:
    """Write a trace of requests for images, to play against a cache: time, key, bytes, and more.

    The same options give the same trace.

    Example: mmcache workload zipf --requests 1000 --out zipf.csv
    """

    def work() -> int:
        from mmcache_tools.workload.command import WorkloadOptions, write_workload

        options = WorkloadOptions(
            kind=kind,
            requests=requests,
            seed=seed,
            keys=keys,
            alpha=alpha,
            repeated=repeated,
            description=servegen,
            popularity=popularity,
            turns=conversations,
            start_s=start_s,
        )
        return write_workload(options, out)

    ended(work)


def main() -> None:
    """Run the command line as `mmcache`, also when started with `python -m`."""
    ready_for_output()
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        app.rich_markup_mode = None  # plain help in a pipe, and nothing of rich is loaded
    command = typer.main.get_command(app)
    convert_plainly(command)
    sys.exit(ended_or_explained(lambda: command(prog_name="mmcache", args=sys.argv[1:])))
