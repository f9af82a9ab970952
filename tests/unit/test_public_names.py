"""The names of the package: each exported once, none at the price of loading torch.

Owns: the public names and what an import loads. Does not own: who may import whom (import-linter).
"""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import tiered_mmcache

PUBLIC = [
    "CacheConfig",
    "EmbeddingResult",
    "MultiModalStaticCache",
    "MultimodalCache",
    "TensorParallelMultimodalCache",
    "Tier",
    "TieredMultimodalCache",
    "load_config",
    "register_result_class",
]


def modules():
    """Every module of the package but those that need an engine."""
    for found in pkgutil.walk_packages(tiered_mmcache.__path__, "tiered_mmcache."):
        if not found.name.startswith("tiered_mmcache.integrations"):
            yield importlib.import_module(found.name)


def test_the_public_names():
    assert sorted(tiered_mmcache.__all__) == sorted(PUBLIC)
    assert len(set(tiered_mmcache.__all__)) == len(tiered_mmcache.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_what_its_module_defines(name):
    value = getattr(tiered_mmcache, name)
    defined_in = sys.modules[value.__module__]
    assert getattr(defined_in, name) is value
    assert value.__doc__
    homes = [m.__name__ for m in modules() if m.__name__ == value.__module__]
    assert homes == [value.__module__]


def test_no_two_public_names_are_one_thing():
    values = [getattr(tiered_mmcache, name) for name in PUBLIC]
    assert len({id(value) for value in values}) == len(values)


def test_each_module_exports_only_what_it_or_its_package_defines():
    for module in modules():
        own = (module.__name__, f"{module.__name__}.")
        for name in getattr(module, "__all__", ()):
            home = getattr(module, name).__module__
            assert home == own[0] or (hasattr(module, "__path__") and home.startswith(own[1]))


def test_names_are_found_by_dir_and_by_star():
    assert set(PUBLIC) <= set(dir(tiered_mmcache))
    namespace = {}
    exec("from tiered_mmcache import *", namespace)
    assert set(PUBLIC) <= set(namespace)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tiered_mmcache.nothing


WITHOUT_TORCH = [
    "tiered_mmcache",
    "tiered_mmcache.config",
    "tiered_mmcache.disk.client",
    "tiered_mmcache.disk.launch",
    "tiered_mmcache.disk.layout",
    "tiered_mmcache.disk.protocol",
    "tiered_mmcache.disk.recovery",
    "tiered_mmcache.disk.store",
    "tiered_mmcache.disk.worker",
    "tiered_mmcache.errors",
    "tiered_mmcache.entries.extras",
    "tiered_mmcache.host.extents",
    "tiered_mmcache.metrics.key_history",
    "tiered_mmcache.entries.keys",
    "tiered_mmcache.metrics.families",
    "tiered_mmcache.metrics.counters",
    "tiered_mmcache.metrics.openmetrics",
    "tiered_mmcache.prometheus",
    "tiered_mmcache.entries.record",
    "tiered_mmcache.metrics.remedies",
]

LOADED = """
import importlib, sys
heavy = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {"torch", "numpy"} & set(sys.modules)
    assert not loaded, f"{name} loads {loaded}"
from tiered_mmcache import CacheConfig, load_config
assert "torch" not in sys.modules, "the configuration loads torch"
"""


def test_what_works_without_torch_does_not_load_it():
    search_path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:] = {search_path!r}\n" + LOADED
    done = subprocess.run(
        [sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
