"""The routers' own losses are means over a whole mini-batch, in every layout and number of micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_layout_invariance import FULL, NARROW, SP, VPP, case, differences, make_batch, run
from transformers import AutoModelForCausalLM

from megatron_rl.types import split_rows
from tests.hf_models import save_model

Z, BALANCE = 0.3, 0.7
LOSSES = {
    "moe_z_loss_coeff": Z,
    "moe_aux_loss_coeff": BALANCE,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
WATCHED = {"watched": True, "optimizer": {"clip_grad": 1e9}}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"budget": NARROW}, {"tensor": 2, **SP, "budget": NARROW}, {"context": 2, "expert": 4},
    {"tensor": 2, "expert": 2, "pipeline": 2, **SP, **FULL}, {"tensor": 2, "context": 2, **SP, **FULL},
    {"expert": 2, "pipeline": 2, **VPP, "budget": NARROW}, {"tensor": 2, "expert_tensor": 2, **SP},
)  # fmt: skip
FAMILIES = ("qwen3-moe", "deepseek-v3")
"""Routers with softmax, and with sigmoid, groups and dense layers."""

CASES = [
    {**case(family, **layout), **WATCHED, "settings": LOSSES} for layout in LAYOUTS for family in FAMILIES
]
# Every kind of parallelism, and each router in two layouts.
SUITE = [entry for number, entry in enumerate(CASES) if number in (4, 7, 10, 13)]


@pytest.mark.parametrize(
    "cases",
    [SUITE, pytest.param([entry for entry in CASES if entry not in SUITE], marks=pytest.mark.campaign)],
)
def test_router_losses_are_means_over_the_whole_mini_batch(
    fork: Any, tmp_path: Path, cases: list[dict[str, Any]]
) -> None:
    alone = []
    for family in FAMILIES:
        model = save_model(family, tmp_path / family)
        torch.manual_seed(3)
        torch.save(make_batch(model), tmp_path / family / "batch.pt")
        alone.append({**case(family), **WATCHED, "settings": LOSSES})
    run(fork, tmp_path, 1, [*alone, {**case("qwen3-moe"), **WATCHED, "name": "without"}])
    compare_with_equations(tmp_path)

    run(fork, tmp_path, 4, cases)
    wrong = [line for entry in cases for line in differences(tmp_path, entry)]
    assert not wrong, "\n".join(wrong)


def compare_with_equations(folder: Path) -> None:
    """Compute the losses in float64, token by token, from the inputs of transformers' routers."""
    batch = torch.load(folder / "qwen3-moe/batch.pt", weights_only=False)
    # Of transformers' implementations of experts only the eager one computes in float64.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "qwen3-moe", dtype=torch.float64, experts_implementation="eager"
    )
    inputs: list[torch.Tensor] = []
    sparse_layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for layer in sparse_layers:
        layer.mlp.register_forward_pre_hook(lambda _, values: inputs.append(values[0][0]))

    topk, experts = model.config.num_experts_per_tok, model.config.num_experts
    z_terms, balance_terms = [], []
    for row in split_rows(batch.tokens, batch.lengths):
        inputs.clear()
        model(row[None])
        for layer, hidden in zip(sparse_layers, inputs, strict=True):
            logits = hidden @ layer.mlp.gate.weight.T
            z_terms += [token.exp().sum().log() ** 2 for token in logits]
            chosen = logits.topk(topk).indices.flatten().tolist()
            shares = [chosen.count(expert) / (topk * len(row)) for expert in range(experts)]
            means = logits.softmax(-1).mean(0)
            products = [share * mean for share, mean in zip(shares, means, strict=True)]
            balance_terms.append(experts * sum(products))

    layers = len(sparse_layers)
    z_mean = sum(z_terms) / len(z_terms)
    balance_mean = sum(balance_terms) / len(balance_terms)
    (Z * layers * z_mean + BALANCE * layers * balance_mean).backward()

    found = torch.load(folder / "qwen3-moe-alone.pt", weights_only=False)
    without = torch.load(folder / "without.pt", weights_only=False)
    assert found["values"]["router/z_loss"] == pytest.approx(float(z_mean), rel=1e-5)
    assert found["values"]["router/seq_aux_loss"] == pytest.approx(float(balance_mean), rel=1e-5)
    assert not {"router/z_loss", "router/seq_aux_loss"} & without["values"].keys()

    # Adam's first step with the worker's epsilon of 1e3 and rate of 1e5 is -100 times the gradient.
    compared = []
    for name, parameter in model.named_parameters():
        if name in found["steps"] and parameter.grad is not None and parameter.grad.norm() > 1e-6:
            gradient = (without["steps"][name] - found["steps"][name]) / 100
            error = (gradient.double() - parameter.grad).norm() / parameter.grad.norm()
            assert error < 2e-3, (name, float(error))
            compared.append(name)
    assert sum(name.endswith("mlp.gate.weight") for name in compared) == layers
    assert "model.embed_tokens.weight" in compared and len(compared) > 6 * layers
