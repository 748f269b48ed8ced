"""Compare computed activation shapes of pipeline stages with the shapes that Megatron exchanges."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.megatron import schedule
from megatron_rl.megatron.model import build_model
from megatron_rl.megatron.optimizer import wrap_in_ddp
from megatron_rl.megatron.schedule import PipelineExchange
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from tests.hf_models import config_of

LAYOUTS = (
    {"pipeline": 4},
    {"pipeline": 4, "virtual_pipeline": 2},
    {
        "pipeline": 2,
        "virtual_pipeline": 4,
        "tensor": 2,
        "sequence_parallel": True,
    },
)
ROWS = (1, 16)
"""One row leaves stages idle; 16 rows fill the pipeline."""
num_comparisons = 0
"""Shapes that this rank has compared."""


class ComparingExchange(PipelineExchange):
    """Exchange that also runs Megatron's own exchange of shapes, and compares the results."""

    def _communicate_shapes(self, *tensors: Any) -> tuple[Any, Any]:
        global num_comparisons
        computed_shapes = super()._communicate_shapes(*tensors)
        exchanged_shapes = P2PCommunicator._communicate_shapes(self, *tensors)
        for computed, exchanged in zip(computed_shapes, exchanged_shapes, strict=True):
            # None: this stage has no neighbour in that direction.
            if computed is not None:
                assert list(computed) == list(exchanged), (computed_shapes, exchanged_shapes)
                num_comparisons += 1
        return computed_shapes


def make_batch(num_rows: int) -> TrainBatch:
    """Return rows of random lengths, equal on every rank."""
    generator = torch.Generator().manual_seed(num_rows)
    lengths = torch.randint(2, 40, (num_rows,), generator=generator)
    num_tokens = int(lengths.sum())

    return TrainBatch(
        tokens=torch.randint(0, 131, (num_tokens,), generator=generator),
        lengths=lengths,
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        loss_weights=torch.full((num_tokens,), 1 / num_tokens),
        temperature=torch.ones(num_rows),
    )


def main() -> None:
    device.initialize(timeout=60)
    setattr(schedule, "PipelineExchange", ComparingExchange)
    # Eight layers give every stage of the virtual pipeline one.
    config = config_of("qwen2")
    config.num_hidden_layers = 8

    for sizes in LAYOUTS:
        layout = ParallelLayout(tuple(range(dist.get_world_size())), **sizes)
        groups = ParallelGroups(layout)
        dist.barrier(groups.pipeline)  # NCCL requires all members in a group's first call
        model = build_model(config, groups, dtype=torch.float32)
        # Gradients need Megatron's data-parallel wrapper.
        wrap_in_ddp(model, True, None)

        for num_rows in ROWS:
            batch = make_batch(num_rows)
            schedule.forward_only(model, batch, 48, batch.response_mask)
            schedule.forward_backward(
                model,
                batch,
                48,
                batch.response_mask,
                lambda _, log_probs, __: (log_probs.sum(), Metrics()),
            )

    # Every rank has to have compared shapes, or the check would be empty on it.
    counts = torch.tensor([num_comparisons])
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print("compared", int(counts), file=sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
