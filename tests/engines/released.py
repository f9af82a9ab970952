"""A published release of SGLang, loaded in this process without installing what it needs.

Owns: which of its files are run as they are, and what stands in for everything else.
Does not own: fetching it (releases.py).

A whole SGLang needs a GPU's worth of packages. Of the modules listed in ``REAL`` the published
files themselves are executed. Any other module of SGLang, and packages that are not installed, are
stand-ins: modules whose every attribute is a class that can be called, subclassed and is false. Of
files that are too large to load, single functions are compiled from the published source.
"""

import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from unittest import mock

import releases
import torch

CACHE = "sglang.srt.mem_cache.multimodal_cache"
SCHEDULE = "sglang.srt.managers.mm_schedule"
UTILS = "sglang.srt.managers.mm_utils"
SCHEDULER = "sglang.srt.managers.scheduler"
ENCODER = "sglang.srt.disaggregation.encoder.server"
PROCESSOR = "sglang.srt.multimodal.processors.base_processor"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATE_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin"
REAL = {
    CACHE,
    SCHEDULE,
    UPDATER,
    UPDATE_MIXIN,
    "sglang.srt.environ",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.multimodal.evs",
    "sglang.srt.multimodal.evs.evs_core",
    "sglang.srt.multimodal.evs.evs_module",
    "sglang.srt.multimodal.evs.evs_processor",
}
# Where a release says which ranks run a batch together; the groups themselves are the test's.
GROUPS_OF_RANKS = {
    "sglang.srt.distributed.parallel_state": ["get_tp_group", "get_attn_tp_group"],
    "sglang.srt.layers.dp_attention": ["get_dp_tp_group", "get_attention_tp_group"],
}
STAND_INS = {"msgspec", "pybase64", "transformers", "triton", "zmq"}


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __bool__(cls):
        return False


class StandIn(metaclass=_Anything):
    """Something of SGLang that is not loaded."""

    def __init__(self, *args, **kwargs):
        self.__dict__.update(kwargs)

    def __init_subclass__(cls, **kwargs):
        pass

    def __class_getitem__(cls, item):
        return cls

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else StandIn()

    def __bool__(self):
        return False


def stand_in(name):
    return _Anything(name, (StandIn,), {})


@dataclasses.dataclass
class Item:
    """What the embedding path reads of SGLang's MultimodalDataItem."""

    hash: int
    offsets: list
    feature: object = None
    modality: str = "image"
    precomputed_embeddings: object = None
    model_specific_data: dict = dataclasses.field(default_factory=dict)
    pad_value: int = 7

    def __getattr__(self, name):
        if name.startswith("__") or name == "model_specific_data":
            raise AttributeError(name)
        try:
            return self.model_specific_data[name]
        except KeyError:
            raise AttributeError(name) from None

    def is_audio(self):
        return self.modality == "audio"

    def is_video(self):
        return self.modality == "video"

    def can_defer_cuda_ipc_feature_reconstruction(self):
        return False

    def acknowledge_deferred_cuda_ipc_feature(self, *args, **kwargs):
        pass


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, release):
        self.release = release

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "sglang":
            installed = top not in STAND_INS or top in self.release.installed
            return (
                None if installed else importlib.util.spec_from_loader(name, self, is_package=True)
            )
        file = self.release.file(name)
        if name == UTILS and self.release.file(SCHEDULE) is None:
            return importlib.util.spec_from_file_location(name, file)
        if name in REAL:
            if file is None:
                return None
            places = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=places
            )
        if name not in (SCHEDULER,) and not self.release.has(name):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        made, module.missing = {}, set()

        def attribute(name):
            if name.startswith("__") or name in module.missing:
                raise AttributeError(name)
            return made.setdefault(name, stand_in(name))

        module.__getattr__ = attribute
        self.release.furnish(module)


class Released:
    """One release in this process.

    Attributes:
        arguments: What the release's accessors answer for the server's arguments; None is unset.
        coordinator: What they answer for the ranks that run a batch together; None is unset.
    """

    def __init__(self, version):
        self.version = version
        self.number = tuple(int(part) for part in version.split("."))
        self.folder = releases.sources_of(version)
        self.installed = {name for name in STAND_INS if importlib.util.find_spec(name)}
        self.arguments = None
        self.coordinator = None

    def file(self, name):
        base = self.folder.joinpath(*name.split("."))
        places = [base.with_suffix(".py"), base / "__init__.py"]
        return next((place for place in places if place.exists()), None)

    def has(self, name):
        return self.file(name) is not None or self.folder.joinpath(*name.split(".")).is_dir()

    def furnish(self, module):
        """Give a stand-in what the real parts need of it."""
        if module.__name__ == "sglang.utils":
            module.logger = logging.getLogger("sglang")
        elif module.__name__ == "sglang.srt.managers.schedule_batch":
            module.MultimodalDataItem = Item
        elif module.__name__ == "sglang.srt.runtime_context":
            module.get_server_args = self.server_arguments
        elif module.__name__ == "sglang.srt.server_args":
            module.get_global_server_args = self.server_arguments
        elif module.__name__ == PROCESSOR:
            found = self.functions(
                PROCESSOR, "BaseMultimodalProcessor", ["get_mm_items_offset"], torch=torch
            )
            members = {name: staticmethod(function) for name, function in found.items()}
            module.BaseMultimodalProcessor = _Anything(
                "BaseMultimodalProcessor", (StandIn,), members
            )
        elif module.__name__ in GROUPS_OF_RANKS:
            for name in GROUPS_OF_RANKS[module.__name__]:
                if self.defines(module.__name__, name):
                    setattr(module, name, self.ranks_of_a_batch)
                else:
                    module.missing.add(name)
        elif module.__name__ == SCHEDULER:
            module.Scheduler = self.scheduler_class(module)

    def server_arguments(self):
        if self.arguments is None:
            raise ValueError("Global server args is not set yet!")
        return self.arguments

    def ranks_of_a_batch(self):
        assert self.coordinator is not None, "tensor model parallel group is not initialized"
        return self.coordinator

    def defines(self, name, function):
        """Whether the published module has a function."""
        file = self.file(name)
        return file is not None and f"\ndef {function}(" in file.read_text()

    # The real parts

    @property
    def path_module(self):
        """Where `get_embedding_and_mask` and the cache object are: they moved in 0.5.19."""
        return importlib.import_module(SCHEDULE if self.file(SCHEDULE) else UTILS)

    @property
    def cache_module(self):
        return importlib.import_module(CACHE)

    @property
    def updates_class(self):
        """The real class whose methods update weights."""
        if self.file(UPDATER):
            return importlib.import_module(UPDATER).SchedulerWeightUpdaterManager
        return importlib.import_module(UPDATE_MIXIN).SchedulerUpdateWeightsMixin

    def scheduler_class(self, module):
        """A scheduler with the published functions that the plug-in watches, and no others."""
        names = ["flush_cache", "record_weight_version_change", "load_lora_adapter"]
        bases = () if self.file(UPDATER) else (self.updates_class,)
        found = self.functions(SCHEDULER, "Scheduler", names)
        return type("Scheduler", bases, {"__module__": module.__name__, **found})

    def functions(self, name, owner, wanted, **given):
        """Functions of a class, compiled alone from the published source.

        What they use of their module pretends to be there, except what is given.
        """
        code, found = _compiled(self.file(name), owner, tuple(wanted))
        names = {"__builtins__": builtins, **given}
        for inner in [c for c in code.co_consts if isinstance(c, types.CodeType)]:
            for used in _names_in(inner):
                if used not in names and not hasattr(builtins, used):
                    names[used] = mock.MagicMock(name=used)
        exec(code, names)
        return {function: names[function] for function in found}


@functools.cache
def _compiled(file, owner, wanted):
    """Functions of a class without annotations and decorators; parsing is slow, so done once."""
    classes = [n for n in ast.parse(file.read_bytes()).body if isinstance(n, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == owner]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    chosen = [n for n in body if isinstance(n, kinds) and n.name in wanted]
    for node in chosen:
        node.decorator_list, node.returns = [], None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
    code = compile(ast.Module(body=chosen, type_ignores=[]), str(file), "exec")
    return code, [node.name for node in chosen]


def _names_in(code):
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names, *(name for one in inner for name in _names_in(one))}


@contextlib.contextmanager
def loaded(version):
    """A release that imports find, until the end of the block."""
    release = Released(version)
    finder = _Finder(release)
    before = list(sys.meta_path)
    known = set(sys.modules)
    # Before the finder of files, but behind one that waits for an import to change its outcome.
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), finder)
    sys.path.insert(0, str(release.folder))
    importlib.invalidate_caches()
    try:
        yield release
    finally:
        sys.meta_path[:] = before
        sys.path.remove(str(release.folder))
        for name in set(sys.modules) - known:
            if name.partition(".")[0] in {"sglang", *STAND_INS}:
                del sys.modules[name]
