"""Compare the saved activations of tensor-parallel ranks with the memory model's prediction."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import saved_activation_bytes
from tests.saved_tensors import layer_bytes

# Both ways to shard experts, and latent attention.
CASES = [
    ("qwen2", ParallelLayout((0, 1), tensor=2, sequence_parallel=True)),
    ("qwen2", ParallelLayout((0, 1), tensor=2)),
    (
        "mixtral",
        ParallelLayout((0, 1), tensor=2, expert=2, sequence_parallel=True),
    ),
    (
        "mixtral",
        ParallelLayout(
            (0, 1),
            tensor=2,
            expert_tensor=2,
            sequence_parallel=True,
        ),
    ),
    (
        "deepseek-v3",
        ParallelLayout(
            (0, 1),
            tensor=2,
            expert=2,
            sequence_parallel=True,
        ),
    ),
]


def main() -> None:
    device.initialize()
    for family, layout in CASES:
        groups = ParallelGroups(layout)
        for recompute in ("none", "selective", "full"):
            saved, shape = layer_bytes(family, groups, torch.float32, recompute)
            total = torch.tensor([saved])
            # Ranks get different numbers of routed tokens; the memory model predicts their mean.
            dist.all_reduce(total)
            mean = float(total) / layout.size

            predicted = saved_activation_bytes(
                shape,
                shape.block(0),
                2,
                layout.expert_tensor,
                layout.token_shards,
                recompute,
                4,
                fused=False,
            )
            assert abs(predicted / mean - 1) < 0.1, (
                family,
                layout,
                recompute,
                predicted,
                mean,
            )

    if device.rank() == 0:
        # The test waits for this line, which shows that no case was left out.
        print("all cases")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
