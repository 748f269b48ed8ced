"""Training step of a tiny model in any layout, with the results gathered on all ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from megatron_rl.algorithms import Algorithm, get_algorithm
from megatron_rl.algorithms.aggregation import with_loss_weights
from megatron_rl.algorithms.objectives import policy_objective
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments
from megatron_rl.config.sections.models import LoraConfig, OptimizerConfig
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.peft import add_adapters
from megatron_rl.hf.weights import load_weights, source_boxes
from megatron_rl.megatron.lora import (
    adapter_boxes,
    adapter_parameters,
    policy_weights,
)
from megatron_rl.megatron.model import ParallelModel, build_model
from megatron_rl.megatron.optimizer import Optimizer, wrap_in_ddp
from megatron_rl.megatron.provider import Provider, load_provider
from megatron_rl.megatron.schedule import forward_backward, forward_only
from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch
from megatron_rl.weights.boxes import view_of

ALGORITHM = get_algorithm(
    "grpo",
    {
        "kl": {"name": "loss", "coef": 0.05},
        "policy_loss": {
            "entropy_coef": 0.01,
            "clip_low": 0.1,
            "clip_high": 0.1,
        },
    },
)
# Adam's first step with a small epsilon is the gradient's sign, which is rounding noise near zero.
# A large epsilon makes it a smooth function of the gradient.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    epsilon=1e-3,
    weight_decay=0.1,
    clip_grad=0.05,
    warmup_steps=3,
    decay="linear",
)


def load_case_provider(path: str | Path, case: dict[str, Any]) -> Provider | None:
    """Load the case's user-defined model code; return None for models that this package builds itself."""
    if "provider" not in case:
        return None

    module = "tests.model_providers"
    arguments, _ = checkpoint_arguments(path)
    return load_provider(f"{module}:{case['provider']}", f"{module}:NAMES", arguments)


def build(
    path: str | Path,
    case: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> ParallelModel:
    """Build the case's model over all ranks, with the weights of the HF checkpoint at ``path``."""
    # A case mixes degrees of the layout with other settings.
    degree_names = {field.name for field in fields(ParallelLayout)}
    degrees = {name: size for name, size in case.items() if name in degree_names}
    all_ranks = tuple(range(dist.get_world_size()))
    layout = ParallelLayout(all_ranks, **degrees)
    model = build_model(
        AutoConfig.from_pretrained(path),
        ParallelGroups(layout),
        dtype=dtype,
        recompute=case.get("recompute", "none"),
        overrides=case.get("settings"),
        trainable=trainable,
        provider=load_case_provider(path, case),
    )
    load_weights(model, path)
    if case.get("watched"):
        model.watch_routing()

    # Adapters are added after loading, since the checkpoint has none.
    if "lora" in case:
        add_adapters(model, LoraConfig(**case["lora"]), seed=1, trainable=trainable)
    return model


def build_optimizer(
    model: ParallelModel,
    ddp: dict[str, Any] | None = None,
    **changes: Any,
) -> Optimizer:
    """Wrap the model for training and return its optimizer, with ``changes`` of `OPTIMIZER`."""
    config = replace(OPTIMIZER, **changes)
    wrap_in_ddp(model, config.distributed, ddp)
    return Optimizer(model, config, steps=20)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective over all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def is_output_rank(model: ParallelModel) -> bool:
    """Return whether this rank returns the results of its shard. Other ranks have copies or none."""
    return dist.get_rank() in model.groups.layout.output_ranks()


def compute_log_probs(
    model: ParallelModel,
    batch: TrainBatch,
    budget: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropy [N] of the response tokens. Collective over all ranks."""
    local_outputs = forward_only(model, batch, budget, batch.response_mask)
    if not is_output_rank(model):
        local_outputs = []

    # Ranks return different rows; elements that no rank returns stay NaN.
    log_probs = torch.full((len(batch.tokens),), torch.nan)
    entropy = log_probs.clone()
    row_ends = batch.lengths.cumsum(0).tolist()
    for rank_outputs in gather(local_outputs):
        for micro_batch in rank_outputs:
            lengths = [int(batch.lengths[row]) for row in micro_batch.rows]
            log_probs_by_row, entropy_by_row = (output.split(lengths) for output in micro_batch.outputs[:2])
            for index, row in enumerate(micro_batch.rows):
                tokens = slice(row_ends[row] - lengths[index], row_ends[row])
                log_probs[tokens] = log_probs_by_row[index]
                entropy[tokens] = entropy_by_row[index]
    return log_probs, entropy


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    batch: TrainBatch,
    budget: int,
    algorithm: Algorithm = ALGORITHM,
) -> dict[str, float]:
    """Run one optimizer step and return its metrics, loss, gradient norm and learning rate.

    Collective over all ranks; results are equal.
    """
    batch = with_loss_weights(batch, algorithm)
    optimizer.zero_grad()

    def objective(
        rows: TrainBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
        **options: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        # Only the sum of the losses is read below; the weight just has to be positive.
        loss, metrics = policy_objective(algorithm, rows, log_probs, entropy, **options)
        return loss, metrics + Metrics.mean("loss", float(loss.detach()), 1e-30)

    _, metrics = forward_backward(model, batch, budget, batch.response_mask, objective)
    # Metrics are merged over output ranks alone, or copies would count twice.
    optimizer_metrics = optimizer.step().values()
    if not is_output_rank(model):
        metrics = Metrics()
    total = merge_metrics(gather(metrics))

    # Padding depends on the layout, and layouts are compared.
    values = {name: value for name, value in total.values().items() if not name.startswith("padding/")}
    loss_sum, _ = total.sums["loss"]
    values["loss"] = loss_sum
    return {**values, **optimizer_metrics}


def gathered_weights(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return the full weights of model and adapters under their HF names. Collective over all ranks."""
    parameters = policy_weights(model) | adapter_parameters(model)
    local_boxes = source_boxes(model)
    if model.adapters:
        local_boxes += adapter_boxes(model)
    # Arrays, since Megatron makes the unpickling of a tensor a guarded file load, half a millisecond each.
    local_regions = [
        (box, view_of(parameters[box.storage], box).detach().float().numpy()) for box in local_boxes
    ]

    regions = []
    for rank_regions in gather(local_regions):
        regions += rank_regions

    # The ends of all boxes give the shapes; an element that no box covers stays NaN.
    shapes: dict[str, list[int]] = {}
    for box, _ in regions:
        ends = [start + size for start, size in zip(box.start, box.size, strict=True)]
        shape = shapes.get(box.name, ends)
        shapes[box.name] = [max(pair) for pair in zip(ends, shape, strict=True)]

    weights = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for box, region in regions:
        slices = [slice(start, start + size) for start, size in zip(box.start, box.size, strict=True)]
        weights[box.name][tuple(slices)] = torch.from_numpy(region)
    return weights
