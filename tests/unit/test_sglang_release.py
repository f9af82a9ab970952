"""Which releases of SGLang are supported."""

import importlib.metadata

import pytest

from tiered_mmcache.errors import UnsupportedEngineError
from tiered_mmcache.integrations import sglang
from tiered_mmcache.integrations.sglang.release import checked_release, installed_release


@pytest.mark.parametrize(
    ("text", "raw", "newer"),
    [
        ("0.5.6", True, False),
        ("0.5.7.post1", True, False),
        ("0.5.8", False, False),
        ("0.5.12.post1", False, False),
        ("0.5.23", False, False),
        ("0.5.24.dev3+g0a1b2c3", False, True),
        ("1!0.6.0", False, True),
    ],
)
def test_supported_releases(text, raw, newer):
    release = checked_release(text)
    assert release.text == text
    assert release.stores_raw_tensors is raw
    assert release.is_newer_than_tested is newer


@pytest.mark.parametrize("text", ["0.5.5", "0.5.5.post3", "0.4.10", "0.1", "unknown"])
def test_unsupported_releases_are_refused_by_name(text):
    with pytest.raises(UnsupportedEngineError) as refused:
        checked_release(text)
    assert refused.value.engine == "SGLang"
    assert refused.value.version == text
    assert str(refused.value).startswith(f"SGLang {text}: ")
    assert "Upgrade" in refused.value.remedy


@pytest.fixture
def _no_sglang(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


@pytest.mark.usefixtures("_no_sglang")
def test_a_missing_sglang_is_told():
    with pytest.raises(UnsupportedEngineError, match="SGLang: it is not installed"):
        installed_release()


@pytest.mark.usefixtures("_no_sglang")
def test_install_without_sglang_raises_and_register_logs(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", str(tmp_path / "mmcache.yaml"))
    with pytest.raises(UnsupportedEngineError):
        sglang.install()
    sglang.register()
    (record,) = caplog.records
    assert "is not active" in record.getMessage()
    assert "it is not installed" in record.getMessage()


@pytest.mark.usefixtures("_no_sglang")
def test_without_the_variable_neither_does_anything(monkeypatch, caplog):
    monkeypatch.delenv("TIERED_MMCACHE_CONFIG", raising=False)
    sglang.install()
    sglang.register()
    assert not caplog.records


def test_an_unexpected_error_is_logged_and_not_raised(monkeypatch, caplog):
    def broken(name):
        raise RuntimeError("metadata cannot be read")

    monkeypatch.setenv("TIERED_MMCACHE_CONFIG", "mmcache.yaml")
    monkeypatch.setattr(importlib.metadata, "version", broken)
    sglang.register()
    (record,) = caplog.records
    assert "metadata cannot be read" in record.exc_text
