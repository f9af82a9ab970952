"""The documentation is true: its examples run, its configurations load, its links lead somewhere.

A ```python block runs in an empty folder that holds the file's own configuration, made small, as
mmcache.yaml. The blocks of one file run in order and share their names, as a reader would type
them. A block opened with ```python no-run is only compiled.
"""

import re
from pathlib import Path

import pytest
import yaml

from tiered_mmcache.config import (
    CacheConfig,
    DiskConfig,
    HostConfig,
    HotConfig,
    MetricsConfig,
    TraceConfig,
    load_config,
)

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
SECTIONS = {"namespace", "hot", "host", "disk"}
SMALL_HOT, SMALL_HOST, SMALL_DISK = "1MiB", "8MiB", "32MiB"

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _blocks(page, language):
    """Yield the line, the words after the language, and the text of each block."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start(3)), match[2].strip(), match[3]


def _configurations(page):
    for _, _, text in _blocks(page, "yaml"):
        mapping = yaml.safe_load(text)
        if isinstance(mapping, dict) and SECTIONS & mapping.keys():
            yield text, mapping


def _made_small(mapping, folder):
    """The same configuration for any machine: no device, a few MiB, a store in ``folder``."""
    small = {**mapping, "hot": {"max_size": SMALL_HOT, "device": "cpu"}}
    if "host" in mapping:
        small["host"] = {**mapping["host"], "max_size": SMALL_HOST, "prefetch": SMALL_HOST}
    if "disk" in mapping:
        place = {"path": str(folder / "store"), "max_size": SMALL_DISK, "write_buffer": SMALL_HOST}
        small["disk"] = {**mapping["disk"], **place}
    return small


def test_there_is_documentation():
    assert ROOT / "docs" / "configuration.md" in PAGES


@pages
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, mapping in list(_configurations(page))[:1]:
        file = tmp_path / "mmcache.yaml"
        file.write_text(yaml.safe_dump(_made_small(mapping, tmp_path)))
    names = {"__name__": "__main__"}
    for line, words, text in _blocks(page, "python"):
        code = compile("\n" * line + text, str(page), "exec")
        if words != "no-run":
            exec(code, names)


@pages
def test_configurations_load(page, tmp_path):
    for text, _ in _configurations(page):
        file = tmp_path / "mmcache.yaml"
        file.write_text(text)
        assert isinstance(load_config(file, check_machine=False), CacheConfig)


@pages
def test_relative_links_resolve(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{page.name}: {file.name} has no heading #{anchor}"


def _anchors(page):
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "section", [CacheConfig, HotConfig, HostConfig, DiskConfig, MetricsConfig, TraceConfig]
)
def test_every_key_of_the_configuration_is_documented(section):
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, field in section.model_fields.items():
        key = ".".join(part for part in (section.section, field.alias or name) if part)
        assert f"`{key}`" in text, f"docs/configuration.md does not mention {key}"
