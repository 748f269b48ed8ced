"""Adapters: the same in every layout, the function PEFT defines, and full training at full rank."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from models import make_batch, reference_log_probs
from safetensors.torch import load_file, save_file
from test_layout_invariance import FULL, NARROW, SELECTIVE, SP, VPP, WIDE, WORKER, differences
from transformers import AutoModelForCausalLM

from megatron_rl.megatron.model_spec import describe_model, read_hf_config
from megatron_rl.shapes.lora import MLP, PEFT_PREFIX, TARGETS, AdaptedModel, make_adapted_model
from tests.hf_models import save_model

RANK, ALPHA = 4, 8.0
LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"tensor": 2, "pipeline": 2, **SP}, {"tensor": 4}, {"pipeline": 2, **VPP, "budget": NARROW},
        {"tensor": 2, "context": 2, **SP}, {**FULL}, {"tensor": 2, **SP, **FULL, "budget": NARROW},
    ),
    "qwen2-tied": ({"pipeline": 2, **SELECTIVE}, {"tensor": 2}),
    "phi3": ({"tensor": 2, **SP},),
    "gemma2": ({"tensor": 2, **SP},),
    "gemma4": ({"tensor": 4, **SP},),  # ranks share key-value heads, some of which are values too
    "qwen3-moe": (
        {"tensor": 2, **SP}, {"tensor": 2, "expert": 2, "expert_tensor": 2, **SP, **FULL},
        {"pipeline": 2, "expert": 2, **VPP, "budget": NARROW},
    ),
    "mixtral": ({"tensor": 4, "expert": 2, "expert_tensor": 2, **SP},),
    "deepseek-v3": (
        {"tensor": 2, "expert": 2, "pipeline": 2, **SP, **FULL}, {"tensor": 2, "expert_tensor": 2, **SP},
    ),
}  # fmt: skip
SUITE = (
    *("llama-0", "llama-2", "llama-5"),  # every parallel size, and recomputed blocks with adapters
    "qwen2-tied-0",  # an output layer without adapters beside its tied embedding
    "phi3-0",  # fused projections
    *("qwen3-moe-1", "deepseek-v3-0"),  # adapters of experts and of the router, of latent attention
)
"""Cases of the suite: family and index in `LAYOUTS`. The others are campaign tests."""
EVERYWHERE = {
    "qwen3-moe": TARGETS, "mixtral": MLP, "deepseek-v3": ("linear_proj", *MLP), "adapted-moe": TARGETS
}  # fmt: skip
"""The layers with adapters of models with experts, who have none by default."""
FULL_RANK = 96
"""No linear layer of the tiny models has more inputs."""


def described(path: Path, rank: int) -> AdaptedModel:
    return make_adapted_model(describe_model(read_hf_config(path)), rank, ALPHA, EVERYWHERE.get(path.name))


def write_adapter(path: Path, target: Path, rank: int, full: bool = False) -> dict[str, torch.Tensor]:
    """Write adapters in PEFT's format: random ones, or of ``full`` rank with a zero difference."""
    torch.manual_seed(5)
    tensors = {}
    for name, shape in described(path, rank).tensor_shapes().items():
        tensors[name] = torch.randn(shape) * 0.1
        if full:
            tensors[name] = torch.eye(*shape) if "lora_A" in name else torch.zeros(shape)
    target.mkdir()
    save_file(
        {PEFT_PREFIX + name: value for name, value in tensors.items()}, target / "adapter_model.safetensors"
    )
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models, batches, adapters, and the cases on one rank and on four."""
    path = tmp_path_factory.mktemp("lora")
    cases: dict[int, list[dict[str, Any]]] = {1: [], 4: []}
    for family, layouts in LAYOUTS.items():
        model = save_model(family, path / family)
        torch.manual_seed(3)
        torch.save(make_batch(model), path / family / "batch.pt")
        write_adapter(path / family, path / family / "adapter", RANK)
        lora = {"rank": RANK, "alpha": ALPHA, "path": str(path / family / "adapter")}
        lora["targets"] = EVERYWHERE.get(family)
        common = {"model": family, "budget": WIDE, "lora": lora}
        cases[1].append({**common, "name": f"{family}-alone"})
        cases[4] += [{**common, **layout, "name": f"{family}-{n}"} for n, layout in enumerate(layouts)]
    write_adapter(path / "llama", path / "llama" / "whole", FULL_RANK, full=True)
    plain = {"model": "llama", "budget": WIDE, "optimizer": {"clip_grad": 0.0}}
    whole = {"rank": FULL_RANK, "path": str(path / "llama" / "whole")}
    cases[1] += [{**plain, "name": "everything"}, {**plain, "name": "full-rank", "lora": whole}]
    cases[4] += [{**plain, "tensor": 2, "name": "new", "lora": {"rank": RANK}}]
    plans = {
        "alone": cases[1],
        "suite": [case for case in cases[4] if case["name"] in (*SUITE, "new")],
        "campaign": [case for case in cases[4] if case["name"] not in (*SUITE, "new")],
    }
    for name, plan in plans.items():
        (path / f"{name}.json").write_text(json.dumps(plan))
    return path


def read(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("part", ["suite", pytest.param("campaign", marks=pytest.mark.campaign)])
def test_every_layout_takes_the_same_step(folder: Path, fork: Any, part: str) -> None:
    fork(WORKER, 1, folder, "alone.json", timeout=500)
    fork(WORKER, 4, folder, f"{part}.json", timeout=500)
    cases = [case for case in json.loads((folder / f"{part}.json").read_text()) if case["name"] != "new"]
    wrong = [words for case in cases for words in differences(folder, case)]
    assert not wrong, "\n".join(wrong)

    for family in LAYOUTS:
        steps = read(folder, f"{family}-alone")["steps"]
        modules = described(folder / family, RANK).modules()
        for name, step in steps.items():
            learns = "lora" in name or (name.split(".")[-2] in modules and name.endswith(".weight"))
            assert bool(step.any()) == learns, name


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_policy_is_the_one_that_peft_defines(folder: Path, family: str, tmp_path: Path) -> None:
    """W + alpha / rank * B A, tensor by tensor, in transformers; and the reference stays that policy."""
    tensors = load_file(folder / family / "adapter" / "adapter_model.safetensors")
    weights = load_file(folder / family / "model.safetensors")
    for name, down in tensors.items():
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            weights[name.removeprefix(PEFT_PREFIX).replace("lora_A.", "")] += ALPHA / RANK * up @ down
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    copy(folder / family / "config.json", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    batch = torch.load(folder / family / "batch.pt", weights_only=False)
    expected = reference_log_probs(model, batch.tokens, batch.lengths, batch.temperature)
    found = read(folder, f"{family}-alone")
    assert (found["log_probs"] - expected)[batch.response_mask].abs().max() < 5e-5
    assert (found["initial"] - found["log_probs"])[batch.response_mask].abs().max() < 2e-5


def test_new_adapters_change_nothing(folder: Path) -> None:
    new, base = read(folder, "new"), read(folder, "everything")
    for name in ("log_probs", "initial"):
        assert (new[name] - base["log_probs"]).nan_to_num().abs().max() < 2e-5
    moved = {name for name, step in new["steps"].items() if step.any()}
    assert {name for name in new["steps"] if "lora_B" in name} <= moved
    assert not any("lora_A" in name for name in moved), "B is zero, so A has no gradient"


def test_adapters_of_full_rank_take_the_step_of_full_training(folder: Path) -> None:
    """With A the identity and B zero the gradient of B is the weight's, and so is Adam's step."""
    full, everything = read(folder, "full-rank"), read(folder, "everything")
    assert (full["log_probs"] - everything["log_probs"]).nan_to_num().abs().max() < 2e-5
    compared = [name for name in everything["steps"] if "_proj." in name]
    assert len(compared) == 7 * 4
    for name in compared:
        step = everything["steps"][name]
        assert float((full["steps"][name] - step).norm() / step.norm()) < 1e-4, name
