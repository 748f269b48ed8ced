"""What the ranks of test_expert_gradients.py run: a training step on experts in a layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from megatron_rl.parallel import device
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.weights import load_weights
from megatron_rl.parallel.model import build_model
from megatron_rl.shapes.layout import ParallelLayout

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import training


def main(folder: Path, layouts: list[dict[str, int]]) -> None:
    """Write ``NUMBER.pt`` for each layout: the stepped weights of every tensor and the gradient norm."""
    device.initialize()
    batch = torch.load(folder / "batch.pt", weights_only=False)
    for number, sizes in enumerate(layouts):
        ranks = tuple(range(device.world_size()))
        layout = ParallelLayout(ranks, sequence_parallel=sizes.get("tensor", 1) > 1, **sizes)
        model = build_model(AutoConfig.from_pretrained(folder), ParallelGroups(layout), dtype=torch.float32)
        load_weights(model, folder)
        # So large an epsilon makes Adam's step proportional to the gradient.
        plain = {"epsilon": 1e3, "learning_rate": 1e3, "warmup_steps": 0, "clip_grad": 1e9}
        optimizer = training.optimizer_of(model, **plain)
        step = training.train_step(model, optimizer, batch, 256)
        weights = training.gathered_weights(model)
        if device.rank() == 0:
            name = f"{'x'.join(f'{key}{size}' for key, size in sizes.items()) or 'alone'}.pt"
            torch.save({"weights": weights, "grad_norm": step["grad_norm"]}, folder / name)
        print(number, sizes, step["grad_norm"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
