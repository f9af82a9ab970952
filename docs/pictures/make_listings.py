"""Makes ls.svg and stats.svg: the commands as a terminal of 100 columns shows them.

Run as ``python docs/pictures/make_listings.py [WIDTH [light]] [FOLDER]`` with the package installed.
"""

import os
import pty
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

from tiered_mmcache.disk.changes import BeginGeneration, PutEntry
from tiered_mmcache.disk.recovery import OpenSettings, open_for_writing
from tiered_mmcache.disk.store import Store
from tiered_mmcache.entries.keys import (
    combine_hashes,
    encode_full_key,
    generation_of_version,
    store_key,
)
from tiered_mmcache.entries.record import EntryHeader

QWEN = "Qwen/Qwen2.5-VL-7B-Instruct@main/bf16"
WHISPER = "openai/whisper-large-v3@main/fp16"
BUDGET_BYTES = 2**30
CONFIGURATION = """namespace: {namespace}
hot: {{max_size: 64MiB, device: cpu}}
disk: {{path: {path}, max_size: 1GiB}}
"""
COMMANDS = {
    "ls": ["ls", "mmcache.yaml", "--limit", "16"],
    "tree": ["ls", "mmcache.yaml", "--tree"],
    "stats": ["stats", "mmcache.yaml"],
    "show": ["show", "mmcache.yaml", "image-7.png"],
    "verify": ["verify", "mmcache.yaml"],
}


def fill(folder):
    """A day in the life of a server that sees images, videos and speech."""
    chance = random.Random(7)
    settings = OpenSettings(
        path=folder, budget_bytes=BUDGET_BYTES, largest_entry_bytes=2**26, synchronous=False
    )
    opened = open_for_writing(settings)
    store = Store(opened.environment, budget_bytes=BUDGET_BYTES)
    now_s = time.time()
    ages_s = sorted((chance.expovariate(1 / 20_000) for _ in range(120)), reverse=True)
    for number, age_s in enumerate(ages_s):
        version = None if number < 20 else "2"
        with mock.patch("tiered_mmcache.disk.changes.time.time", lambda: now_s - age_s):
            _put(store, number, version, chance)
    opened.close()


def _put(store, number, version, chance):
    namespace = WHISPER if number % 9 == 4 else QWEN
    generation = generation_of_version(version)
    if number in (0, 4, 20, 22):
        store.apply([BeginGeneration(namespace=namespace, generation=generation)])
    tokens = 1500 if namespace == WHISPER else chance.choice((256, 529, 529, 1024, 2691))
    width = 1280 if namespace == WHISPER else 3584
    hashes = [chance.getrandbits(64) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    key = hashes[0] if len(hashes) == 1 else combine_hashes(hashes)
    if number % 11 == 7:
        key = f"image-{number}.png"
    full_key = encode_full_key(key)
    header = EntryHeader(
        class_tag="EmbeddingResult" if len(hashes) < 3 else "VideoEmbeddingResult",
        dtype="float16" if namespace == WHISPER else "bfloat16",
        item_bytes=2,
        shape=(tokens, width),
        extras=b"",
        device_type="cuda",
        cost_s=tokens / 2691 * 0.167 * chance.uniform(0.9, 1.2),
    )
    data = chance.randbytes(header.payload_bytes)
    put = PutEntry(
        store_key=store_key(namespace=namespace, generation=generation, full_key=full_key),
        full_key=full_key,
        namespace=namespace,
        generation=generation,
        header=header,
        parts=[memoryview(data)],
    )
    store.apply([put])


def on_terminal(arguments, folder, width):
    """What a command prints on a terminal of that width, its control sequences included."""
    master, slave = pty.openpty()
    size = {"COLUMNS": str(width), "LINES": "50", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "mmcache_tools", *arguments]
    with subprocess.Popen(
        command, stdout=slave, stderr=slave, cwd=folder, env={**os.environ, **size}
    ):
        os.close(slave)
        printed = b""
        while True:
            try:
                block = os.read(master, 65536)
            except OSError:  # how Linux says that nobody writes any more
                break
            printed += block
    os.close(master)
    return printed.decode().replace("\r\n", "\n")


def picture(name, printed, width, *, light):
    """The picture of a terminal."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True)
        console.print(Text(f"$ mmcache {' '.join(COMMANDS[name])}"), highlight=False)
        console.print(Text.from_ansi(printed), highlight=False)
    theme = DEFAULT_TERMINAL_THEME if light else MONOKAI
    return console.export_svg(title="mmcache", theme=theme, unique_id=name)


def main(width=100, light=False, out=Path(__file__).parent, names=("ls", "stats")):
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "store")
        yaml = CONFIGURATION.format(namespace=QWEN, path=f"{folder}/store")
        (Path(folder) / "mmcache.yaml").write_text(yaml)
        for name in names:
            printed = on_terminal(COMMANDS[name], folder, width)
            printed = printed.replace(f"{folder}/store", "/var/cache/tiered-mmcache")
            (out / f"{name}.svg").write_text(picture(name, printed, width, light=light))
            if len(names) > 2:
                print(printed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(int(sys.argv[1]), "light" in sys.argv, Path(sys.argv[-1]), tuple(COMMANDS))
    else:
        main()
