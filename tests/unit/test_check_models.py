"""Model folders that transformers, vLLM or the trainer would refuse are clear errors of the check."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_workspace import SHAPE, TOKENS, write_model, write_safetensors, write_workspace
from safetensors.torch import load_file, save_file

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.load import load
from megatron_rl.data.tokenizing import load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import require_finite
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.shapes.pretrained import parse_pretrained
from megatron_rl.user_code import find_module
from tests.hf_models import save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")

CONFIG_VALUES = [
    ({"model_type": "qwen9"}, "model_type", "qwen2, as Qwen2ForCausalLM has"),
    ({"model_type": "llama"}, "model_type", "qwen2, as Qwen2ForCausalLM has"),
    ({"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers (4) entries"),
    ({"layer_types": ["full_attention"] * 3 + ["none"]}, "layer_types", "entries among full_attention"),
    ({"layer_types": "full_attention"}, "layer_types", "list[str]"),
    ({"rope_parameters": [1]}, "rope_parameters", ""),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters", "default, linear, llama3, yarn"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta", "a positive number"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta", "a positive number"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "a positive number"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.original_max_position_embeddings", ""),
    ({"rope_scaling": {"full_attention": 3}}, "rope_scaling", "an object for each kind of layer"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps", "float"),
    ({"rms_norm_eps": 1}, "rms_norm_eps", "float"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps", "a number from 0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "bool"),
    ({"hidden_act": ["silu"]}, "hidden_act", "str"),
    ({"hidden_act": "swish"}, "hidden_act", "silu, gelu"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads (4)"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads", "a divisor of hidden_size"),
    ({"head_dim": 31}, "head_dim", "an even size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers", "at most 10000"),
    ({"dtype": "int8"}, "dtype", "one of float32"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "fp8 with weight_block_size"),
    ({"pad_token_id": 21}, "pad_token_id", "below vocab_size (21)"),
    ({"eos_token_id": [1, 99]}, "eos_token_id", "below vocab_size (21)"),
    ({"id2label": ["a"]}, "id2label", "an object"),
    ({"architectures": ["Qwen2ForSequenceClassification"]}, "model.path", "Qwen2ForCausalLM"),
]  # fmt: skip

BPE = {"type": "BPE", "merges": []}
ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    return root


@pytest.fixture
def model(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(workspace)
    write_model(tmp_path / "model")
    yield tmp_path / "model"


def check(model: Path, *overrides: str) -> CheckReport:
    return check_config(load("config.yaml", [f"model.path={model}", *overrides]), None)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"model_type": "qwen2_with_code"}, "code that comes with the checkpoint"),
        ({"model_type": "llama"}, "or the architecture of llama"),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}, "use a checkpoint of one of these"),
        ({"architectures": ["Qwen2ForCausalLn"]}, "if Qwen2ForCausalLM is intended"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "else the checkpoint cannot be used here"),
    ],
)
def test_a_fix_of_a_models_config_is_a_step_that_helps(
    model: Path, changes: dict[str, object], fix: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    (error,) = check(model).errors
    assert fix in (error.fix or ""), error
    assert "again" not in (error.fix or "")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


def one_error(model: Path, *overrides: str) -> UserError:
    errors = check(model, *overrides).errors
    assert len(errors) == 1, "\n".join(map(str, errors))
    assert all((errors[0].where, errors[0].expected, errors[0].got, errors[0].fix)), errors[0]
    return errors[0]


@pytest.mark.parametrize(("values", "key", "expected"), CONFIG_VALUES, ids=lambda value: str(value)[:40])
def test_values_of_config_json(model: Path, values: dict[str, Any], key: str, expected: str) -> None:
    change(model / "config.json", **values)
    if "architectures" in values:
        write_safetensors(model / "model.safetensors", parse_pretrained({**SHAPE, **values}).tensor_shapes())
    named = [error for error in check(model).errors if (error.where or "").split(" (")[0].endswith(key)]
    assert len(named) == 1, check(model).errors
    assert expected in str(named[0].expected) and named[0].got and named[0].fix


def test_code_of_the_model_is_named_and_not_run(model: Path) -> None:
    change(model / "config.json", auto_map={"AutoConfig": "own.Config"})
    report = check(model)
    assert not report.errors and "no part of a run executes" in report.warnings[0].message


def test_code_of_the_tokenizer_is_named_and_not_run(model: Path) -> None:
    """transformers would ask at a terminal, and refuses where it has no tokenizer of that name."""
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (model / "tokenization_kimi.py").write_text("raise SystemExit('was run')\n")
    settings = {"tokenizer_class": "TikTokenTokenizer", "auto_map": code}
    change(model / "tokenizer_config.json", **settings)
    change(model / "config.json", model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    named = [warning for warning in check(model).warnings if "tokenizer comes with" in warning.message]
    assert "TikTokenTokenizer" in named[0].got
    with pytest.raises(UserError, match="cannot be loaded") as refused:
        load_tokenizer(model)
    assert "auto_map" in refused.value.fix

    # Without it transformers reads tokenizer.json.
    change(model / "tokenizer_config.json", auto_map={})
    assert load_tokenizer(model).get_vocab()


def shards(model: Path) -> dict[str, tuple[int, ...]]:
    return parse_pretrained(SHAPE).tensor_shapes()


def without_a_tensor(model: Path) -> None:
    shapes = shards(model)
    del shapes["lm_head.weight"]
    write_safetensors(model / "model.safetensors", shapes)


def with_another_shape(model: Path) -> None:
    write_safetensors(model / "model.safetensors", {**shards(model), "model.norm.weight": (64,)})


def with_an_adapter(model: Path) -> None:
    write_safetensors(model / "model.safetensors", {**shards(model), "lora_A.weight": (8, 8)})


def in_eight_bits(model: Path) -> None:
    write_safetensors(model / "model.safetensors", shards(model), "I8")


def with_an_index_of_other_tensors(model: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / shard)
    places = {**dict.fromkeys(shards(model), shard), "gone.weight": shard}
    change(model / "model.safetensors.index.json", weight_map=places)


def with_an_index_of_other_folders(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "model.safetensors")
    change(model / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message", "fix"),
    [
        (without_a_tensor, "the weights do not belong to the model", "set tie_word_embeddings"),
        (with_another_shape, "the shape of the tensor model.norm.weight", "config.json that belongs"),
        (with_an_adapter, "the weights do not belong to the model", "saved from this architecture"),
        (in_eight_bits, "the weights are quantised", "use the original checkpoint"),
        (with_an_index_of_other_tensors, "tensors that the files do not contain", "index and weight files"),
        (with_an_index_of_other_folders, "list of weight files cannot be read", "copy the file again"),
    ],
)  # fmt: skip
def test_weights(model: Path, damage: Callable[[Path], None], message: str, fix: str) -> None:
    damage(model)
    error = one_error(model)
    assert message in error.message and fix in (error.fix or "")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "model.safetensors"])
def test_json_that_is_nested_too_deeply_is_one_error_of_its_file(model: Path, file: str) -> None:
    nested = b"[" * 100_000
    header_length = len(nested).to_bytes(8, "little") if file.endswith("safetensors") else b""
    (model / file).write_bytes(header_length + nested)
    error = one_error(model)
    assert file in (error.where or "") and "recursion" in (error.got or "")


def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    command = str(one_error(model).fix).removeprefix("convert the .bin files: ")

    save_model("qwen2", model / "pickled")
    torch.save(load_file(model / "pickled/model.safetensors"), model / "pickled/pytorch_model.bin")
    (model / "pickled/model.safetensors").unlink()
    (python, option, code, folder) = shlex.split(command)
    assert (python, option, folder) == ("python", "-c", str(model))
    monkeypatch.setattr("sys.argv", ["-c", str(model / "pickled")])
    exec(code, {})
    pickled = torch.load(model / "pickled/pytorch_model.bin")
    written = load_file(model / "pickled/model.safetensors")
    assert written.keys() == pickled.keys()
    assert all(torch.equal(written[name], pickled[name]) for name in pickled)


def test_files_beside_the_weights_are_not_the_models(model: Path) -> None:
    for other in ("adapter_model", "consolidated", "consolidated-00001-of-00002"):
        write_safetensors(model / f"{other}.safetensors", {"base_model.lora_A.weight": (2, 2)})
    stale = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    change(model / "model.safetensors.index.json", weight_map=stale)
    (model / "pytorch_model.bin").write_bytes(b"an older copy")
    assert not check(model).errors


@pytest.mark.parametrize(("values", "fine"), [(b"\1", False), (b"\0", True)])
def test_an_output_layer_beside_a_tied_embedding_equals_it(model: Path, values: bytes, fine: bool) -> None:
    change(model / "config.json", tie_word_embeddings=True)
    shapes = parse_pretrained({**SHAPE, "tie_word_embeddings": True}).tensor_shapes()
    # The output layer comes last, and so do its bytes: all others are zero.
    write_safetensors(
        model / "model.safetensors", {**shapes, "lm_head.weight": shapes["model.embed_tokens.weight"]}
    )
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(values)
    if fine:
        assert not check(model).errors
    else:
        error = one_error(model)
        assert "an output layer of its own" in error.message
        assert f"set tie_word_embeddings to false in {model / 'config.json'}" in str(error.fix)
        change(model / "config.json", tie_word_embeddings=False)
        assert not check(model).errors


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("generation_config.json", {"eos_token_id": 21}, "ends responses at an id that is not a token"),
        ("generation_config.json", {"eos_token_id": [1, "x"]}, "ends responses at an id that is not a token"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "which the tokenizer does not have"),
        ("tokenizer_config.json", {"eos_token": {"content": 5}}, "which the tokenizer does not have"),
        ("tokenizer.json", {"model": {**BPE, "vocab": {"a": 30, "<eos>": 1}}}, "more tokens than"),
        ("tokenizer.json", {"model": {**BPE, "vocab": {"a": "b"}}}, "tokenizer.json cannot be read"),
        ("tokenizer.json", {"model": {**BPE, "type": "another"}}, "tokenizer.json cannot be read"),
        ("tokenizer.json", {"model": None}, "tokenizer.json cannot be read"),
        ("tokenizer.json", {"added_tokens": [{**ADDED, "content": "<x>", "id": 21}]}, "more tokens than"),
    ],
)  # fmt: skip
def test_tokenizer_and_generation_config(
    model: Path, file: str, values: dict[str, Any], message: str
) -> None:
    change(model / file, **values)
    assert message in str(one_error(model))


def test_control_tokens_beyond_the_embedding_are_common(model: Path) -> None:
    image = {**ADDED, "content": "<image>", "id": len(TOKENS), "special": True}
    change(model / "tokenizer.json", added_tokens=[image])
    assert not check(model).errors


def test_stop_texts_of_a_profile_can_be_part_of_a_response(model: Path) -> None:
    assert not check(model, 'rollout.stop=["1"]').errors
    error = one_error(model, 'rollout.sampling_profiles={sums: {stop: ["12"]}}')
    assert error.where is not None and error.where.startswith("rollout.sampling_profiles.sums.stop")


def test_a_judge_has_a_head_and_a_policy_has_none(model: Path) -> None:
    error = one_error(model, f"reward.models.judge.path={model}")
    assert "is a policy, which has no reward head" in error.message
    assert error.where is not None and error.where.startswith("reward.models.judge.path")


def test_transformers_refusal_names_the_file(model: Path) -> None:
    change(model / "config.json", layer_types=["full_attention"])
    with pytest.raises(UserError, match=r"(?s)transformers refuses.*config\.json.*layer_types"):
        read_hf_config(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float) -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    weight[2, 1] = value
    save_file({"layer.weight": weight}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    require_finite(files.read("layer.weight", (0, 0), (2, 4)), "layer.weight", files)
    with pytest.raises(UserError, match=r"layer\.weight has values that are not numbers"):
        require_finite(files.read("layer.weight", (1, 0), (2, 4)), "layer.weight", files)


def test_a_package_that_is_edited_where_it_lies_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    file, missing = find_module("megatron_rl.rewards.arithmetic")
    assert missing is None and file is not None and file.name == "arithmetic.py"
