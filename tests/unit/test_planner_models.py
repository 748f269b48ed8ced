"""Model shapes: parameter totals of published checkpoints, and reading of a config.json."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from megatron_rl.errors import UserError
from megatron_rl.shapes.published import is_base_model, load_presets, load_shape, published_repo, shape_of

ROOT = Path(__file__).resolve().parents[2]

# Totals as the checkpoints themselves have them (safetensors index or model card).
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_total_equals_the_published_checkpoint(name: str, total: int) -> None:
    assert load_shape(name).parameters == total


@pytest.mark.parametrize("name", sorted(load_presets()))
def test_preset_states_its_own_totals(name: str) -> None:
    preset, shape = load_presets()[name], load_shape(name)
    assert shape.parameters == preset["parameters_total"]
    if "parameters_active" in preset:
        assert shape.active_parameters == preset["parameters_active"]


def test_presets_of_base_models_name_the_instruct_model_of_their_shape() -> None:
    repos = {name: published_repo(name) for name in load_presets()}
    assert {name for name, repo in repos.items() if repo and is_base_model(repo)} == set()
    bases = (
        "meta-llama/Llama-2-7b-hf",
        "google/gemma-2-9b",
        "mistralai/Mistral-7B-v0.1",
        "x/llama-3.1-8b@v1",
    )
    assert [is_base_model(base) for base in bases] == [True] * 4
    assert not is_base_model("Qwen/Qwen2.5-7B"), "a base model with a chat template"

    # Organisation and size are those of the base model, whose config.json the preset has.
    presets = {name: preset for name, preset in load_presets().items() if "instruct" in preset}
    for name, preset in presets.items():
        base_words, words = (
            re.findall(r"[a-z]+(?=/)|\b\d+(?:x\d+)?b\b", repo.lower())
            for repo in (preset["source"].partition(" of ")[2], preset["instruct"])
        )
        assert len(words) == 2 and base_words[:2] == words, name
    # Of Mistral 7B, v0.3 has another vocabulary than v0.1 and v0.2.
    assert load_shape("mistral-7b").vocab == 32000 and repos["mistral-7b"] == (
        "mistralai/Mistral-7B-Instruct-v0.2"
    )

    # Of a packaged config.json the shape equals that of the preset, except for the number of positions.
    for name, folder in {
        "llama-3-70b": "Llama-3.1-70B-Instruct",
        "llama-3.1-405b": "Llama-3.1-405B-Instruct",
    }.items():
        shape = load_shape(str(ROOT / "configs/models" / folder))
        preset = load_shape(name)
        assert replace(shape, name=name, max_positions=preset.max_positions) == preset


def test_cache_bytes_per_token() -> None:
    assert load_shape("llama-3-70b").kv_bytes_per_gpu(1) == 327_680
    assert load_shape("llama-3-70b").kv_bytes_per_gpu(16) == 327_680 / 8  # eight heads, then copies
    assert load_shape("llama-3.1-8b").kv_bytes_per_gpu(1) == 131_072
    assert load_shape("deepseek-v3").kv_bytes_per_gpu(8) == 70_272  # latent cache does not divide


def test_tensor_count_equals_the_checkpoint_index() -> None:
    assert load_shape("llama-3.1-8b").tensor_count == 291
    assert load_shape("llama-2-70b").tensor_count == 723


def test_config_json_of_a_directory_and_nested_text_config(tmp_path) -> None:
    config = dict(load_presets()["qwen3-8b"]["config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_shape(str(tmp_path)).parameters == PUBLISHED["qwen3-8b"]
    assert load_shape({"text_config": config}).parameters == PUBLISHED["qwen3-8b"]
    assert load_shape("Qwen/Qwen3-8B").parameters == PUBLISHED["qwen3-8b"]
    # A checkpoint that lies there is itself, whatever published model has its name.
    named = tmp_path / "qwen3-8b"
    named.mkdir()
    (named / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert load_shape(str(named)).layers == 2


def test_real_config_without_the_presets_additions() -> None:
    config = {k: v for k, v in load_presets()["qwen2-7b"]["config"].items() if k != "attention_bias"}
    assert shape_of(config).parameters == PUBLISHED["qwen2-7b"]
    config = {k: v for k, v in load_presets()["qwen3-30b-a3b"]["config"].items() if k != "qk_norm"}
    assert shape_of(config).parameters == PUBLISHED["qwen3-30b-a3b"]
    config = {k: v for k, v in load_presets()["deepseek-v3"]["config"].items() if k != "router_bias"}
    assert shape_of(config).parameters == PUBLISHED["deepseek-v3"]


def test_delta_nets_are_read_from_the_types_of_layers_that_transformers_writes() -> None:
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=8).to_dict()
    shape = shape_of(config)
    assert shape.linear_layers == (0, 1, 2, 4, 5, 6) and shape.output_gate
    # As older versions write it.
    del config["layer_types"]
    assert shape_of({**config, "full_attention_interval": 4}).linear_layers == shape.linear_layers


def test_unknown_model_and_missing_field() -> None:
    with pytest.raises(UserError, match="did you mean qwen3-32b"):
        load_shape("qwen3-32")
    with pytest.raises(UserError, match="hidden_size"):
        shape_of({"num_hidden_layers": 2})
