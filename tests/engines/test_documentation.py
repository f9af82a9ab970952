"""docs/sglang.md is true: its commands run inside a release, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import releases
from conftest import on, versions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
CHECK = "tiered_mmcache.integrations.sglang"


def run(*command, version, **variables):
    """A command in a fresh process that finds a release, and this package."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TIERED_", "SGLANG_"))}
    environment["PYTHONPATH"] = str(releases.sources_of(version))
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def yaml_of_the_page(tmp_path):
    """The page's configuration, with sizes and a folder that this machine has."""
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    text = re.sub(r"^ {3}", "", text, flags=re.MULTILINE)
    for written, small in [("32GiB", "32MiB"), ("500GiB", "64MiB"), ("/var/cache", str(tmp_path))]:
        assert written in text
        text = text.replace(written, small)
    file = tmp_path / "mmcache.yaml"
    file.write_text(text)
    return file


def test_the_check_prints_what_the_page_says(yaml_of_the_page, tmp_path):
    said = re.search(rf"\$ python -m {CHECK}\n(.*?)```", PAGE, re.DOTALL)[1]
    said = [line.strip() for line in said.splitlines() if line.strip()]
    code, printed = run("-m", CHECK, version="0.5.23", TIERED_MMCACHE_CONFIG=str(yaml_of_the_page))
    assert code == 0, printed
    printed = printed.replace("32.0MiB", "32.0GiB").replace("64.0MiB", "500.0GiB")
    assert printed.replace(str(tmp_path), "/var/cache").splitlines() == said


@pytest.mark.parametrize(
    ("version", "variables", "words"),
    [
        (releases.TOO_OLD, {}, "SGLang 0.5.5: its multimodal cache has another interface"),
        ("0.5.23", {"TIERED_MMCACHE_CONFIG": ""}, "TIERED_MMCACHE_CONFIG is not set"),
        ("0.5.23", {"TIERED_MMCACHE_CONFIG": "/nowhere.yaml"}, "/nowhere.yaml"),
        ("0.5.23", {"SGLANG_PLUGINS": "another, one"}, "add tiered_mmcache to it"),
    ],
)
def test_the_check_says_what_is_not_in_order(yaml_of_the_page, version, variables, words):
    variables = {"TIERED_MMCACHE_CONFIG": str(yaml_of_the_page), **variables}
    code, printed = run("-m", CHECK, version=version, **variables)
    assert code == 1
    assert words in printed


def test_the_check_names_install_for_releases_without_plug_ins(yaml_of_the_page):
    code, printed = run("-m", CHECK, version="0.5.10", TIERED_MMCACHE_CONFIG=str(yaml_of_the_page))
    assert code == 0
    assert "SGLang 0.5.10 is supported, through install()" in printed


def test_the_pth_file_of_the_page_installs(yaml_of_the_page, tmp_path):
    (line,) = re.findall(r"^import tiered_mmcache\.integrations\.sglang as plugin.*$", PAGE, re.M)
    site = tmp_path / "site"
    site.mkdir()
    (site / "tiered_mmcache_sglang.pth").write_text(line + "\n")
    program = f"""
import site, sys
site.addsitedir({str(site)!r})
assert "torch" not in sys.modules and "sglang" not in sys.modules
sys.path.insert(0, {str(Path(__file__).parent)!r})
import released
with released.loaded("0.5.10") as release:
    print(release.path_module.MultiModalStaticCache.__module__)
"""
    code, printed = run(
        "-c", program, version="0.5.10", TIERED_MMCACHE_CONFIG=str(yaml_of_the_page)
    )
    assert code == 0, printed
    assert printed.strip() == "tiered_mmcache.integrations.sglang.cache"


def test_every_release_that_is_tested_stands_in_the_table():
    table = re.search(r"## Releases\n(.*?)\n`make", PAGE, re.DOTALL)[1]
    tested = " ".join(row.split("|")[3] for row in table.strip().splitlines()[2:])
    assert re.findall(r"0\.5\.\d+", tested) == [releases.TOO_OLD, *releases.VERSIONS]


def test_a_wheel_that_cannot_be_had_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(releases.CannotBeHadError, match=r"sglang 0\.5\.23 cannot be had here"):
        releases.fetch("0.5.23", tmp_path / "sources")
    assert not (tmp_path / "sources").exists()


@on("0.5.11", *versions("0.5.12"))
def test_the_plug_in_is_found_in_every_release_that_has_plug_ins(release):
    from sglang.srt.plugins import load_plugins_by_group

    assert "tiered_mmcache" in load_plugins_by_group("sglang.srt.plugins")


@on("0.5.6", "0.5.8", "0.5.10")
def test_the_other_releases_have_none(release):
    assert release.file("sglang.srt.plugins") is None
