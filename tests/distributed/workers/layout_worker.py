"""Compute log-probs of a batch and train a step on it, in each layout of a plan.

    layout_worker.py FOLDER PLAN

``PLAN`` is a JSON file in ``FOLDER`` with a list of cases; the results of a case go to ``FOLDER/NAME.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.algorithms import get_algorithm
from megatron_rl.distributed import device
from megatron_rl.megatron.lora import use_initial_policy

sys.path.insert(0, str(Path(__file__).parent))
import training

# So large an epsilon makes Adam's step proportional to the gradient, so that steps of layouts compare.
OPTIMIZER = {
    "epsilon": 1e3,
    "learning_rate": 1e5,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probs of the case's batch, the metrics of a step and each weight's change."""
    algorithm = training.ALGORITHM
    if "algorithm" in case:
        algorithm = get_algorithm(case["algorithm"]["name"], case["algorithm"]["pieces"])

    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    model = training.build(folder / case["model"], case)
    config_values = {**OPTIMIZER, **case.get("optimizer", {})}
    optimizer = training.build_optimizer(model, case.get("ddp"), **config_values)

    # Log-probs are computed before the step, and the weights before and after it.
    weights_before = training.gathered_weights(model)
    log_probs, entropy = training.compute_log_probs(model, batch, case["budget"])
    for _ in range(case.get("updates", 1)):
        metrics = training.train_step(model, optimizer, batch, case["budget"], algorithm)
    weights_after = training.gathered_weights(model)

    # The policy without its adapters is the reference model of a run with LoRA.
    initial_log_probs = None
    if model.adapters is not None:
        with use_initial_policy(model):
            initial_log_probs, _ = training.compute_log_probs(model, batch, case["budget"])

    weight_changes = {name: weights_after[name] - weight for name, weight in weights_before.items()}
    return {
        "log_probs": log_probs,
        "entropy": entropy,
        "values": metrics,
        "initial": initial_log_probs,
        "fused": model.uses_transformer_engine,
        "steps": weight_changes,
    }


def main(folder: Path, plan: str) -> None:
    device.initialize(timeout=120)
    cases = json.loads((folder / plan).read_text())
    for case in cases:
        # Every rank takes part in a case; the results are equal, so one rank writes them.
        result = run_case(folder, case)
        if device.rank() == 0:
            torch.save(result, folder / f"{case['name']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
