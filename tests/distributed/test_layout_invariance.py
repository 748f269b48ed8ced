"""The same weights and the same rows give the same numbers in every parallel layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from models import CONFIGS, reference_log_probs, write_model

WORKER = Path(__file__).parent / "workers" / "layout_worker.py"
WIDE = 1000  # tokens: all rows of a data-parallel rank in one micro-batch
NARROW = 30  # one or two rows


def case(
    model: str, tensor: int, pipeline: int, data: int, budget: int = WIDE, **more: Any
) -> dict[str, Any]:
    extras = "".join(f"-{name}{value}" for name, value in more.items())
    name = f"{model}-{tensor}{pipeline}{data}-{budget}{extras}"
    return {"name": name, "model": model, "tensor": tensor, "pipeline": pipeline, "budget": budget, **more}


SP = {"sequence_parallel": True}
VPP = {"virtual_pipeline": 2}
FULL = {"recompute": "full"}
CP = {"context": 2}
PLANS = {
    1: [case(model, 1, 1, 1) for model in CONFIGS]
    + [case("qwen2", 1, 1, 1, NARROW), case("qwen2", 1, 1, 1, WIDE, **FULL)],
    2: [
        case("qwen2", 2, 1, 1), case("qwen2", 2, 1, 1, NARROW, **SP), case("qwen2", 1, 2, 1, NARROW),
        case("qwen2", 1, 1, 2), case("qwen2", 1, 2, 1, NARROW, **VPP), case("llama", 2, 1, 1, **SP),
        case("llama", 1, 2, 1), case("qwen3", 2, 1, 1, **SP), case("qwen3", 1, 1, 2, NARROW),
        case("qwen2", 1, 1, 1, **CP), case("qwen3", 1, 1, 1, NARROW, **CP),
    ],
    4: [
        case("qwen2", 2, 2, 1), case("qwen2", 2, 2, 1, NARROW, **SP), case("qwen2", 1, 2, 2, NARROW),
        case("qwen2", 2, 1, 2, **SP), case("qwen2", 1, 2, 2, NARROW, **VPP),
        case("qwen2", 2, 2, 1, NARROW, **VPP, **SP, **FULL), case("llama", 2, 2, 1, NARROW, **SP),
        case("qwen3", 2, 2, 1, NARROW, **SP), case("qwen3", 1, 2, 2, **VPP),
        case("qwen2", 2, 1, 1, NARROW, **CP, **SP), case("qwen2", 1, 2, 1, NARROW, **CP, **FULL),
        case("llama", 1, 1, 2, **CP), case("llama", 1, 1, 1, NARROW, context=4),  # more than key-value heads
    ],
    8: [case("qwen2", 2, 2, 2, NARROW, **SP), case("llama", 2, 2, 2, NARROW)],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for family in CONFIGS:
        write_model(path, family)
    return path


@pytest.mark.parametrize("processes", PLANS)
def test_numbers_do_not_depend_on_the_layout(folder: Path, fork: Any, processes: int) -> None:
    plans = PLANS[processes]
    (folder / f"plan{processes}.json").write_text(json.dumps(plans))
    fork(WORKER, processes, folder, f"plan{processes}.json", timeout=300)
    worst: dict[str, float] = {}
    for entry in plans:
        found = torch.load(folder / f"{entry['name']}.pt", weights_only=False)
        expected = torch.load(folder / f"{case(entry['model'], 1, 1, 1)['name']}.pt", weights_only=False)
        for name, difference in differences(found, expected).items():
            worst[name] = max(worst.get(name, 0.0), difference)
            assert difference < TOLERANCES[name], f"{entry['name']}: {name} differs by {difference:.2e}"
    print(f"{processes} processes, largest differences:", {k: f"{v:.1e}" for k, v in worst.items()})


# Float32 sums in another order: rounding of 6e-8 of each term, grown by four layers and 200 tokens.
TOLERANCES = {"log_probs": 2e-5, "entropy": 2e-5, "values": 2e-5, "weights": 2e-5}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest absolute difference of each kind (relative, where a value exceeds 1)."""
    batch_wide = {
        name: float((found[name] - expected[name]).nan_to_num(nan=torch.inf).abs().max())
        for name in ("log_probs", "entropy")
    }
    assert found["values"].keys() == expected["values"].keys()
    values = [
        abs(found["values"][name] - value) / max(1.0, abs(value))
        for name, value in expected["values"].items()
    ]
    assert found["weights"].keys() == expected["weights"].keys()
    weights = [
        float((found["weights"][name] - value).nan_to_num(nan=torch.inf).abs().max())
        for name, value in expected["weights"].items()
    ]
    return {**batch_wide, "values": max(values), "weights": max(weights)}


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_are_those_of_transformers(folder: Path, family: str) -> None:
    saved = folder / f"{case(family, 1, 1, 1)['name']}.pt"
    if not saved.exists():
        pytest.fail("the single-process run left no result")
    found = torch.load(saved, weights_only=False)
    batch = torch.load(folder / family / "batch.pt", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    expected = reference_log_probs(
        model, batch.tokens, batch.lengths, batch.temperature, batch.support_sizes, batch.support
    )
    difference = (found["log_probs"] - expected)[batch.response_mask].abs().max()
    print(f"{family}: largest difference to transformers {difference:.1e}")
    assert difference < 2e-5
    weights = model.state_dict()
    moved = [float((value - weights[name]).abs().max()) for name, value in found["weights"].items()]
    assert min(moved) > 1e-4, "the step must move every weight"
    values = found["values"]
    assert 0.05 < values["policy/clip_fraction"] < 0.95, "the batch must reach the clipped part of the loss"
    assert values["grad_norm"] > 0.1, "the batch must reach the clipped part of the gradient"
