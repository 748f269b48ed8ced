"""Score a batch and take one step in each layout of a plan. ``layout_worker.py FOLDER PLAN``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithms import get_algorithm
from megatron_rl.distributed import device
from megatron_rl.megatron.lora import use_initial_policy

sys.path.insert(0, str(Path(__file__).parent))
import training


def main(folder: Path, plan: str) -> None:
    device.initialize(timeout=120)
    for case in json.loads((folder / plan).read_text()):
        algorithm = training.ALGORITHM
        if "algorithm" in case:
            algorithm = get_algorithm(case["algorithm"]["name"], case["algorithm"]["pieces"])
        batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
        model = training.build(folder / case["model"], case)
        # So large an epsilon makes Adam's step proportional to the gradient, so steps of layouts compare.
        settings = {
            "epsilon": 1e3,
            "learning_rate": 1e5,
            "warmup_steps": 0,
            "weight_decay": 0.0,
        }
        optimizer = training.optimizer_of(model, case.get("ddp"), **settings | case.get("optimizer", {}))

        before = training.gathered_weights(model)
        # Scores before the step, and the difference that the step makes to each weight.
        log_probs, entropy = training.scores(model, batch, case["budget"])
        for _ in range(case.get("updates", 1)):
            result = training.train_step(model, optimizer, batch, case["budget"], algorithm)

        after = training.gathered_weights(model)
        # The policy without its adapters is the reference model of a run with LoRA.
        initial = None
        if model.adapters is not None:
            with use_initial_policy(model):
                initial, _ = training.scores(model, batch, case["budget"])

        if device.rank() == 0:
            values = {
                "log_probs": log_probs,
                "entropy": entropy,
                "values": result,
                "initial": initial,
            }
            values["fused"] = model.uses_transformer_engine
            values["steps"] = {name: after[name] - weight for name, weight in before.items()}
            torch.save(values, folder / f"{case['name']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
