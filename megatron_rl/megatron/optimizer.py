"""Train a model: Megatron's DDP buffers, distributed optimizer, learning-rate schedule and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.megatron.host_optimizer import on_the_host
from megatron_rl.megatron.model import ParallelModel, of_experts
from megatron_rl.megatron.transformer_settings import optimizer_settings
from megatron_rl.metrics import Metrics


def wrap(model: ParallelModel, distributed: bool, ddp: Mapping[str, Any] | None = None) -> None:
    """Put the model's chunks into Megatron's DDP, in place: gradients accumulate in float32 buffers.

    With ``distributed`` the parameters move into buffers of the distributed optimizer, so views of
    parameters taken earlier go stale. ``ddp`` are the user's settings of Megatron's DDP: without them an
    accelerator reduces gradients while it computes others. Collective over the model's ranks.
    """
    chosen = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": not device.on_host(), **(ddp or {})}
    chosen.setdefault("overlap_param_gather", distributed and chosen["overlap_grad_reduce"])
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **chosen)
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if of_experts(name):
                # Megatron marks experts so only where they are cut by expert parallelism, and otherwise never
                # adds up what tensor-parallel ranks, each with tokens of its own, find for whole experts.
                setattr(parameter, "allreduce", False)
    with model.scope():
        model.wrapped = [
            DistributedDataParallel(
                model.transformer_config,
                settings,
                chunk,
                disable_bucketing=index > 0,
                pg_collection=model.groups.megatron,
            )
            for index, chunk in enumerate(model.chunks)
        ]
    if settings.overlap_grad_reduce:
        # Gradients are reduced with the last micro-batch, when they are whole.
        waits: list[Any] = [wrapped.no_sync for wrapped in model.wrapped]
        model.transformer_config.no_sync_func = waits if len(waits) > 1 else waits[0]


class Optimizer:
    """Step a model's weights and learning rate; the model must have been wrapped.

    ``steps`` is the planned number of optimizer steps, the length of the learning-rate schedule.
    Collective over the model's ranks.
    """

    def __init__(self, model: ParallelModel, config: OptimizerConfig, steps: int) -> None:
        self.model = model
        self.config = config
        floor = config.minimum_learning_rate
        floor = config.learning_rate if floor is None and config.decay == "constant" else floor or 0.0
        spec = model.spec.transformer_config
        settings = MegatronOptimizerConfig(
            lr=config.learning_rate,
            min_lr=floor,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad,
            bf16=spec.bf16,
            fp16=spec.fp16,
            params_dtype=spec.params_dtype,
            **optimizer_settings(config),
        )
        assert config.distributed or not config.offload, "checked before"
        with model.scope(), _gathering_over(model.groups.all), on_the_host(settings):
            self.megatron: Any = get_megatron_optimizer(
                settings, _chunks(model), use_gloo_process_groups=False,
                pg_collection=model.groups.megatron,
            )  # fmt: skip
        if hasattr(self.megatron, "chained_optimizers"):
            # Where experts alone learn, the part of all else is empty on all ranks: Megatron cannot save it.
            self.megatron.chained_optimizers = self.parts
        for part in self.parts:
            if part.init_state_fn is None:
                part.init_state_fn = _nothing  # of SGD; Megatron calls it when a checkpoint is read
        self.increment = 1
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.learning_rate,
            min_lr=floor,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(steps, config.warmup_steps + 1),
            lr_decay_style=config.decay,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @classmethod
    def adopted(cls, model: ParallelModel, megatron: Any, scheduler: Any, increment: int) -> Optimizer:
        """Return the optimizer of a training script, whose schedule counts ``increment`` a step."""
        optimizer = cls.__new__(cls)
        optimizer.model, optimizer.megatron = model, megatron
        optimizer.scheduler, optimizer.increment = scheduler, increment
        return optimizer

    @property
    def parts(self) -> list[Any]:
        """Return Megatron's optimizers inside this one, without empty ones."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [part for part in parts if getattr(part, "optimizer", None) is not None]

    def zero_grad(self) -> None:
        """Clear gradient buffers before a mini-batch."""
        for chunk in _chunks(self.model):
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def reload_parameters(self) -> None:
        """Take over weights that something else wrote into the model, such as an earlier optimizer."""
        with torch.no_grad():  # shards may be views of weights that have been written since
            self.megatron.reload_model_params()

    def step(self, more: bool = False) -> Metrics:
        """Clip, step the weights and the learning rate; a step with non-finite gradients raises.

        With ``more`` the next use of the weights is the forward pass of a further step, which may gather them
        itself. Returns ``grad_norm`` (before clipping) and ``learning_rate``.
        Collective over the model's ranks.
        """
        learning_rate = self.learning_rate
        with self.model.scope():
            outcome: Any = self.megatron.step()
            for wrapped in () if more else _chunks(self.model):
                if wrapped.use_forward_hook:
                    wrapped.start_param_sync(force_sync=True)
        successful, norm, _ = outcome
        norm = float(norm or 0.0)
        if not successful or not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}: a loss, a log-prob or a gradient was not finite; resume from "
                "the last checkpoint"
            )
        self.scheduler.step(self.increment)
        return Metrics.of({"grad_norm": norm, "learning_rate": learning_rate})

    @property
    def learning_rate(self) -> float:
        """Return the learning rate that the next step uses."""
        groups: Any = self.megatron.param_groups
        return float(groups[0]["lr"])


@contextmanager
def _gathering_over(group: Any) -> Iterator[None]:
    """Let Megatron compare its parameter groups over a role's ranks, where it would ask the whole world."""
    gather, size = dist.all_gather_object, dist.get_world_size

    def role_gather(gathered: list[Any], value: Any, group: Any = group) -> None:
        gather(gathered, value, group=group)

    def role_size(group: Any = group) -> int:
        return size(group)

    dist.all_gather_object, dist.get_world_size = role_gather, role_size
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size = gather, size


def _nothing(*_: Any) -> None:
    pass


def _chunks(model: ParallelModel) -> Any:
    """Return the wrapped chunks, whose Megatron types the model does not declare."""
    return model.wrapped
