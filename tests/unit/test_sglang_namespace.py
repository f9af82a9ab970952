"""What `namespace: auto` stands for: equal for the same model and settings, else different."""

import os
import sys
import types

import pytest

from tiered_mmcache.configuration.rules import usable_namespace
from tiered_mmcache.integrations.sglang.namespace import derived_namespace
from tiered_mmcache.integrations.sglang.weights import identity_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-VL"
    folder.mkdir()
    (folder / "config.json").write_text('{"vision_config": {"depth": 2}, "video_pruning_rate": 0}')
    (folder / "preprocessor_config.json").write_text('{"size": 224}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return folder


@pytest.fixture
def arguments(model):
    return types.SimpleNamespace(
        model_path=str(model), tokenizer_path=str(model), dtype="auto", quantization=None
    )


def name_of(arguments, release="0.5.23"):
    return derived_namespace(arguments, release)


def test_it_names_the_model_and_can_be_used(arguments):
    name = name_of(arguments)
    assert name.startswith("sglang/Tiny-VL@")
    assert usable_namespace(name) == name
    assert name_of(arguments) == name


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"mm_process_config": {"image": {"max_pixels": 1_000_000}}},
        {"disable_fast_image_processor": True},
        {"json_model_override_args": '{"video_pruning_rate": 0.5}'},
        {"keep_mm_feature_on_device": True},
        {"mm_feature_transport": "cuda_ipc"},
        {"weight_version": "step-100"},
        {"lora_target_modules": {"q_proj"}},
        {"mm_attention_backend": "fa3"},
    ],
)
def test_each_of_these_arguments_makes_another_namespace(arguments, changed):
    before = name_of(arguments)
    vars(arguments).update(changed)
    assert name_of(arguments) != before


def test_so_does_the_release(arguments):
    assert name_of(arguments) != name_of(arguments, "0.5.22")


@pytest.mark.parametrize(
    "variable", ["SGLANG_USE_CUDA_IPC_TRANSPORT", "SGLANG_IMAGE_MAX_PIXELS", "VIDEO_MAX_PIXELS"]
)
def test_so_do_variables_of_processors_and_hashes(arguments, monkeypatch, variable):
    before = name_of(arguments)
    monkeypatch.setenv(variable, "1")
    assert name_of(arguments) != before


def test_ports_sizes_and_other_variables_do_not(arguments, monkeypatch):
    before = name_of(arguments)
    arguments.port, arguments.mem_fraction_static = 30_000, 0.8
    monkeypatch.setenv("SGLANG_MM_FEATURE_CACHE_MB", "100")
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")
    assert name_of(arguments) == before


def test_sets_and_objects_do_not_depend_on_the_process(arguments):
    arguments.lora_target_modules = {"q_proj", "k_proj", "v_proj"}
    arguments.modelopt_quant = types.SimpleNamespace(kind="nvfp4", blocks=(16, 32))
    arguments.model_loader_extra_config = object()
    assert name_of(arguments) == name_of(arguments)
    one = name_of(arguments)
    arguments.modelopt_quant.kind = "mxfp4"
    assert name_of(arguments) != one


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"vision_config": {"depth": 3}}'),
        ("preprocessor_config.json", b'{"size": 448}'),
        ("model.safetensors", bytes(range(255, -1, -1)) * 1024),
        ("model-2.safetensors", b"more"),
    ],
)
def test_so_does_what_is_in_the_models_folder(arguments, model, file, content):
    before = name_of(arguments)
    (model / file).write_bytes(content)
    assert name_of(arguments) != before


def test_weights_of_the_same_size_written_anew_count_as_others(model):
    weights = model / "model.safetensors"
    before = identity_of(str(model), None)
    os.utime(weights, ns=(1, 1))
    assert identity_of(str(model), None) != before


def test_only_samples_of_weights_are_read(model, monkeypatch):
    weights = model / "model.safetensors"
    with weights.open("wb") as stream:
        stream.truncate(64 * 1024**3)  # reading it would take minutes
    assert identity_of(str(model), None)


def test_a_model_whose_files_cannot_be_read_cannot_be_identified(model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "gone")
    assert identity_of(str(model), None) is None


def test_hidden_files_do_not_matter(model):
    before = identity_of(str(model), None)
    (model / ".git").mkdir()
    (model / ".git" / "index").write_text("x")
    (model / ".lock").write_text("x")
    assert identity_of(str(model), None) == before


def test_a_snapshot_of_the_hub_is_its_commit(tmp_path, model):
    snapshot = tmp_path / "models--somebody--tiny" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    assert identity_of(str(snapshot), None) == COMMIT


def test_a_repository_of_the_hub_is_the_commit_in_the_hubs_cache(tmp_path, model, monkeypatch):
    snapshot = tmp_path / "models--somebody--tiny" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    asked = []

    def try_to_load_from_cache(repository, file, revision):
        asked.append((repository, file, revision))
        return str(snapshot / file)

    hub = types.SimpleNamespace(try_to_load_from_cache=try_to_load_from_cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert identity_of("somebody/tiny", "v1") == COMMIT
    assert asked == [("somebody/tiny", "config.json", "v1")]


@pytest.mark.parametrize("answer", [None, object()])
def test_a_repository_that_is_not_there_cannot_be_identified(monkeypatch, answer):
    hub = types.SimpleNamespace(try_to_load_from_cache=lambda *args, **kwargs: answer)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert identity_of("somebody/tiny", None) is None


def test_without_the_hubs_package_it_cannot_either(monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert identity_of("somebody/tiny", None) is None
    arguments.model_path = "somebody/tiny"
    assert name_of(arguments) is None


def test_a_processor_of_another_place_is_part_of_it(arguments, tmp_path):
    before = name_of(arguments)
    processor = tmp_path / "processor"
    processor.mkdir()
    arguments.tokenizer_path = str(processor)
    assert name_of(arguments) is None  # nothing there tells what it does
    (processor / "preprocessor_config.json").write_text("{}")
    assert name_of(arguments) not in (None, before)


def test_a_file_of_weights_is_a_model_too(model, arguments):
    arguments.model_path = str(model / "model.safetensors")
    assert name_of(arguments).startswith("sglang/model.safetensors@")


def test_without_a_model_there_is_none():
    assert name_of(types.SimpleNamespace()) is None


def test_strange_names_stay_printable(arguments, tmp_path, model):
    odd = tmp_path / "a model\twith spaces é"
    model.rename(odd)
    arguments.model_path = arguments.tokenizer_path = str(odd)
    name = name_of(arguments)
    assert usable_namespace(name) == name
    assert name.startswith("sglang/a_model_with_spaces__@")
