"""Whether LoRA adapters reach the encoder."""

import json
import types

import pytest

from tiered_mmcache.integrations.sglang.adapters import adapter_paths, reach_the_encoder

LANGUAGE = [
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "base_model.model.language_model.model.layers.11.mlp.up_proj.lora_B.weight",
    "base_model.model.lm_head.lora_A.weight",
]


def adapter(folder, *names):
    folder.mkdir()
    header = {name: {"dtype": "F32"} for name in names} | {"__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return str(folder)


def test_adapters_of_the_language_model_do_not(tmp_path):
    paths = [adapter(tmp_path / str(n), name) for n, name in enumerate(LANGUAGE)]
    assert reach_the_encoder(paths) is None
    assert reach_the_encoder([]) is None


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.visual.blocks.0.attn.qkv.lora_A.weight",
        "base_model.model.vision_tower.encoder.layers.3.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.vision_expert.q_proj.lora_A.weight",
        "base_model.model.multi_modal_projector.linear_1.lora_A.weight",
        "base_model.model.audio_tower.layers.0.fc1.lora_A.weight",
        "base_model.model.something_else.weight",
    ],
)
def test_what_is_not_surely_the_language_model_does(tmp_path, name):
    path = adapter(tmp_path / "one", *LANGUAGE, name)
    fine = adapter(tmp_path / "two", *LANGUAGE)
    assert reach_the_encoder([fine, path]) == path


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"not json"])
def test_what_cannot_be_read_may(tmp_path, content):
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert reach_the_encoder([str(tmp_path)]) == str(tmp_path)


def test_a_folder_without_weights_or_a_name_of_the_hub_may(tmp_path):
    assert reach_the_encoder([str(tmp_path)]) == str(tmp_path)
    assert reach_the_encoder(["somebody/some-adapter"]) == "somebody/some-adapter"


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        (None, []),
        ([], []),
        (["/a", "name=/b"], ["/a", "/b"]),
        ({"one": "/a"}, ["/a"]),
        ([{"lora_name": "one", "lora_path": "/a"}], ["/a"]),
        ([types.SimpleNamespace(lora_path="/a")], ["/a"]),
    ],
)
def test_every_way_in_which_sglang_holds_the_paths(given, paths):
    assert adapter_paths(types.SimpleNamespace(lora_paths=given)) == paths
    assert adapter_paths(None) == []
