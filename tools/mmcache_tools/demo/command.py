"""The walk through the main job, from loading the encoder to the second process's result.

Owns: the order of the steps and what is printed between them. Does not own: the steps.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mmcache_tools.demo.images import DemoImage, choose_names, load_images
from mmcache_tools.demo.workload import Workload, count_of_pictures, plan
from tiered_mmcache.errors import ConfigError

__all__ = ["NAMESPACE", "DemoOptions", "run_demo"]

#: What makes the demo's embeddings interchangeable: model, weights and dtype.
NAMESPACE = "efficientnet-lite0@57934424/float32/mmcache-demo"
_PACKAGES = ("efficientnet_lite", "skimage", "sklearn", "PIL")
_EXIT_CHECK_FAILED = 1
_EXIT_CANNOT_RUN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says; sizes as the configuration takes them."""

    store: Path
    requests: int
    hot: str
    host: str
    disk: str
    seed: int
    as_json: bool

    def cache_config(self, device: str) -> dict[str, Any]:
        """The cache's configuration as plain values, the same in both processes."""
        return {
            "namespace": NAMESPACE,
            "hot": {"max_size": self.hot, "device": device},
            "host": {"max_size": self.host},
            "disk": {"path": str(self.store.absolute()), "max_size": self.disk},
        }


def run_demo(options: DemoOptions) -> int:
    """Run everything and print it.

    Returns:
        The exit status: 0, 1 when a check failed, or 2 when the demo could not run at all.
    """
    console = Console(stderr=options.as_json)
    try:
        result = _play_both(options, console)
    except ConfigError as error:
        return _cannot_run(str(error))
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(_PACKAGES):
            raise
        return _cannot_run(f"{error}. Install what it needs: pip install 'tiered-mmcache[demo]'")
    if options.as_json:
        print(json.dumps(result, indent=2))
    return 0 if result["ok"] else _EXIT_CHECK_FAILED


def _cannot_run(why: str) -> int:
    Console(stderr=True, soft_wrap=True).print(f"mmcache demo cannot run: {why}", markup=False)
    return _EXIT_CANNOT_RUN


def _play_both(options: DemoOptions, console: Console) -> dict[str, Any]:
    from mmcache_tools.demo.report import as_dict, tables
    from mmcache_tools.demo.second import SecondProcessError, start

    with _step(console, "processing the pictures"):
        images = load_images(choose_names(count_of_pictures(options.requests), seed=options.seed))
    load = plan(
        {name: image.tokens for name, image in images.items()},
        requests=options.requests,
        seed=options.seed,
    )
    first, handover = _play_first(options, console, images, load)
    try:
        with _step(console, "second process: the same items from the same store"):
            second = start(handover)
    except SecondProcessError as error:
        console.print(f"FAILED: the second process gave no result: {error}", markup=False)
        return {"ok": False, "failures": [f"the second process gave no result: {error}"]}
    next_line = shlex.join(["mmcache", "ls", str(options.store)])
    result = {**as_dict(first, second), "store": str(options.store), "next": next_line}
    console.print(*tables(first, second), sep="\n")
    _print_end(console, result)
    return result


def _play_first(
    options: DemoOptions, console: Console, images: Mapping[str, DemoImage], load: Workload
) -> tuple[Any, Any]:
    from mmcache_tools.demo.encoder import Encoder, leave_one_core
    from mmcache_tools.demo.report import summarise
    from mmcache_tools.demo.second import Handover, HandoverItem
    from mmcache_tools.demo.session import Session
    from tiered_mmcache import CacheConfig, TieredMultimodalCache

    with _step(console, "loading the encoder, EfficientNet-Lite0"):
        leave_one_core()
        encoder = Encoder()
    plain = options.cache_config(str(encoder.device))
    with TieredMultimodalCache(config=CacheConfig.from_mapping(plain)) as cache:
        cache.clear()  # an earlier demo may have left its entries in this store
        session = Session(
            cache=cache, encode=encoder.encode, images=images, clock=time.perf_counter
        )
        _serve_all(console, session, load)
    accounts = session.accounts
    items = tuple(
        HandoverItem(
            pictures=item.pictures,
            mm_hashes=tuple(session.hashes(item)),
            digest=account.digest,
        )
        for item, account in accounts.items()
    )
    first = summarise(list(accounts.values()), hits_s=session.hits_s)
    return first, Handover(config=plain, items=items)


def _serve_all(console: Console, session: Any, load: Workload) -> None:
    from mmcache_tools.demo.report import progress

    counts = {"hot": 0, "host": 0, "disk": 0, "encoder": 0}
    with progress(console) as bar:
        task = bar.add_task("serving", total=len(load.requests), served="")
        for request in load.requests:
            counts[session.serve(request.item).value] += 1
            served = "  ".join(f"{name} {count}" for name, count in counts.items())
            bar.update(task, advance=1, served=served)


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    started_s = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"{what}: {time.perf_counter() - started_s:.1f} s", highlight=False)


def _print_end(console: Console, result: Mapping[str, Any]) -> None:
    for text in result["failures"]:
        console.print(f"FAILED: {text}", style="bold red", markup=False, soft_wrap=True)
    if result["ok"]:
        console.print("Every item was encoded once; every hit had the encoder's bits.")
    console.print(f"The store is in {result['store']}. Next: {result['next']}", soft_wrap=True)
