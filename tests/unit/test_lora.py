"""Adapters of a model in one process: files of PEFT out and in, what check refuses, and their checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megatron_rl.check.model.adapters import CHECKPOINT_LAYERS, check_adapted_model
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.roles import TrainedRole
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_adapters, export_model
from megatron_rl.hf.peft import add_adapters, record_base_checksum
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.lora import adapter_parameters, merge_adapters, remove_adapters, without_adapters
from megatron_rl.megatron.model import ParallelModel, build_model
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import MLP, PEFT_PREFIX, TARGETS, Lora, adapter_parameter_count
from tests.hf_models import config_of, save_model

LORA = LoraConfig(rank=3, alpha=6.0, targets=("linear_qkv", "linear_fc2"))
EVERYWHERE = replace(LORA, targets=TARGETS)


def build(path: Path, lora: LoraConfig) -> ParallelModel:
    device.initialize()
    config = AutoConfig.from_pretrained(path)
    model = build_model(config, ParallelGroups(ParallelLayout((0,))), dtype=torch.float32)
    load_weights(model, path)
    add_adapters(model, lora, seed=7, trainable=True)
    return model


def learn(model: ParallelModel) -> None:
    torch.manual_seed(2)
    for value in adapter_parameters(model).values():
        value.normal_(std=0.1)


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_what_peft_is_given_is_what_comes_back(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "base", num_hidden_layers=2)
    model = build(tmp_path / "base", LORA)
    learn(model)
    export_adapters(model, tmp_path / "peft", tmp_path / "base", dropout=0.1)
    told = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    modules = ["down_proj", *(["qkv_proj"] if family == "phi3" else ["k_proj", "q_proj", "v_proj"])]
    assert told["target_modules"] == modules
    assert (told["r"], told["lora_alpha"], told["lora_dropout"], told["bias"]) == (3, 6, 0.1, "none")
    place = {"down_proj": "mlp", **dict.fromkeys(modules[1:], "self_attn")}
    names = {
        f"base_model.model.model.layers.{layer}.{place[module]}.{module}.lora_{factor}.weight"
        for layer in range(2)
        for module in modules
        for factor in "AB"
    }
    assert tensors.keys() == names
    described = describe_model(model.hf_config)
    back = LoraConfig(rank=3, alpha=6.0, targets=LORA.targets, path=str(tmp_path / "peft"))
    assert list(check_adapted_model(back, described)) == []
    again = adapter_parameters(build(tmp_path / "base", back))
    assert all(torch.equal(value, again[name]) for name, value in adapter_parameters(model).items())
    # The whole model that is exported has them added in, as has one whose base takes them over.
    export_model(model, tmp_path / "merged")
    base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    for name, value in merged.items():
        up = tensors.get(f"base_model.model.{name.removesuffix('weight')}lora_B.weight")
        down = tensors.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight")
        change = torch.zeros(()) if up is None or down is None else 2.0 * up @ down
        torch.testing.assert_close(value, base[name] + change, rtol=0, atol=1e-6)
    merge_adapters(model, seed=7)
    export_model(model, tmp_path / "folded")
    folded = load_file(tmp_path / "folded/model.safetensors")
    assert all(torch.equal(folded[name], value) for name, value in merged.items())


@pytest.mark.parametrize(("family", "expert"), [("qwen3-moe", "up_proj"), ("mixtral", "w3")])
def test_every_expert_has_an_adapter_of_its_own(family: str, expert: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "base", num_hidden_layers=2)
    model = build(tmp_path / "base", EVERYWHERE)
    learn(model)
    described = describe_model(model.hf_config)
    counted = adapter_parameter_count(
        described.shape, ParallelLayout((0,)), (0, 1), Lora.for_model(described.shape, 3, TARGETS)
    )
    parameters = adapter_parameters(model)
    assert counted[1] == sum(value.numel() for name, value in parameters.items() if ".experts." in name) > 0
    assert sum(counted) == sum(value.numel() for value in parameters.values())
    export_adapters(model, tmp_path / "peft", tmp_path / "base")
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    end = f"{expert}.lora_B.weight"
    ups = [value for name, value in tensors.items() if ".experts." in name and name.endswith(end)]
    assert len(ups) == described.shape.moe_layers * described.shape.experts > 0
    assert len({tuple(up.flatten().tolist()) for up in ups}) == len(ups)
    back = replace(EVERYWHERE, path=str(tmp_path / "peft"))
    assert list(check_adapted_model(back, described)) == []
    again = adapter_parameters(build(tmp_path / "base", back))
    assert all(torch.equal(value, again[name]) for name, value in parameters.items())
    export_model(model, tmp_path / "merged")
    with without_adapters(model):
        export_model(model, tmp_path / "without")
    assert all(torch.equal(value, adapter_parameters(model)[name]) for name, value in parameters.items())
    merge_adapters(model, seed=7)
    remove_adapters(model)
    export_model(model, tmp_path / "folded")
    base, merged, without, folded = (
        load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged", "without", "folded")
    )
    for name, value in merged.items():
        module = PEFT_PREFIX + name.removesuffix("weight")
        if f"{module}lora_B.weight" in tensors:
            change = tensors.pop(f"{module}lora_B.weight") @ tensors.pop(f"{module}lora_A.weight")
            torch.testing.assert_close(value, base[name] + 2.0 * change, rtol=0, atol=1e-6)
        assert torch.equal(folded[name], value) and torch.equal(without[name], value)
    assert not tensors, "the checkpoint has no such weights"


def test_adapters_of_experts_in_one_tensor_are_not_passed_over(tmp_path: Path) -> None:
    """As PEFT has them of transformers' models; nothing would take them, and the run would start anew."""
    name = f"{PEFT_PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight"
    save_file({name: torch.zeros(12, 64)}, tmp_path / "adapter_model.safetensors")
    told = {"r": 3, "lora_alpha": 6, "target_modules": []}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    back = replace(EVERYWHERE, path=str(tmp_path))
    (error,) = check_adapted_model(back, describe_model(config_of("qwen3-moe")))
    assert "base_layer" in str(error.got) and "down_proj.lora_B" in str(error.expected)


def test_a_damaged_adapter_is_refused_before_training(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path / "base", num_hidden_layers=2)
    model = build(tmp_path / "base", LORA)
    export_adapters(model, tmp_path / "peft", tmp_path / "base")
    described = describe_model(model.hf_config)
    lora = replace(LORA, path=str(tmp_path / "peft"))
    assert not list(check_adapted_model(lora, described))

    file = tmp_path / "peft/adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (error,) = check_adapted_model(lora, described)
    assert error.where == "actor.lora.path"
    assert "adapter_model.safetensors" in str(error.got)


def test_a_checkpoint_holds_the_adapters_alone(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base", num_hidden_layers=2)
    model = build(tmp_path / "base", LORA)
    learn(model)
    state = {"step": 1, "seed": 1}
    checkpoint.save_checkpoint(tmp_path / "step_1", {"actor": TrainedRole(model, None)}, state)
    other = build(tmp_path / "base", LORA)
    checkpoint.load_actor_weights(tmp_path / "step_1", other)
    loaded = adapter_parameters(other)
    assert all(torch.equal(value, loaded[name]) for name, value in adapter_parameters(model).items())
    stored = sum(file.stat().st_size for file in (tmp_path / "step_1/actor").iterdir())
    assert stored < (tmp_path / "base/model.safetensors").stat().st_size / 4


def test_adapters_stay_with_the_weights_they_were_trained_on(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "base", num_hidden_layers=2)
    save_model("llama", tmp_path / "other", seed=1, num_hidden_layers=2)
    model, other = (build(tmp_path / name, LORA) for name in ("base", "other"))
    export_model(model, tmp_path / "split", file_bytes=100_000)
    record_base_checksum(model, tmp_path / "base")
    checkpoint.save_checkpoint(
        tmp_path / "step_1", {"actor": TrainedRole(model, None)}, {"step": 1, "seed": 1}
    )
    record_base_checksum(model, tmp_path / "split")
    checkpoint.load_actor_weights(tmp_path / "step_1", model)
    record_base_checksum(other, tmp_path / "other")
    with pytest.raises(UserError, match="another base") as caught:
        checkpoint.load_actor_weights(tmp_path / "step_1", other)
    assert "model.path" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("family", "lora", "stored", "message"),
    [
        ("qwen2", {"rank": 8}, {"r": 4, "lora_alpha": 8}, "has another rank"),
        ("qwen2", {"rank": 4}, {"r": 4, "lora_alpha": 8}, "has another alpha"),
        ("qwen2", {"targets": ("linear_qkv",)}, {"target_modules": ["o_proj"]}, "also adapts other layers"),
        ("qwen2", {}, {"use_dora": True}, "uses PEFT's use_dora"),
        ("qwen2", {}, {"alpha_pattern": {"q_proj": 4}}, "uses PEFT's alpha_pattern"),
        ("qwen3-moe", {"targets": MLP, "sync": "adapter"}, {}, "experts cannot be synced separately"),
        ("qwen2", {}, {"target_parameters": ["mlp.experts.gate_up_proj"]}, "uses PEFT's target_parameters"),
        ("deepseek-v3", {"targets": ("linear_qkv",)}, {}, "latent attention has no such layer"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    family: str, lora: dict[str, Any], stored: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rank = lora.get("rank", 32)
    good = {"r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(good | stored))
    described = describe_model(config_of(family))
    (error,) = check_adapted_model(LoraConfig(**lora, path=str(tmp_path)), described)
    assert all((error.where, error.expected, error.got, error.fix))
    with pytest.raises(type(error), match=message):
        raise error


def test_names_of_other_projects_lead_to_the_layer_that_holds_them() -> None:
    weights = describe_model(config_of("qwen2")).weights(0)
    layers = {
        source.name.split(".")[-2]: weight.name.split(".")[-2]
        for weight in weights
        for source in weight.sources
        if weight.name.split(".")[-2] in TARGETS and "norm" not in source.name
    }
    assert layers == CHECKPOINT_LAYERS
