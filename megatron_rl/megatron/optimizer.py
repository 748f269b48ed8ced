"""Optimization of a model: Megatron's DDP buffers, distributed optimizer, learning rate and clipping.

`HostOptimizer` is Adam in host memory: float32 weights and moments, updated by the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.distributed import device
from megatron_rl.megatron.model import ParallelModel, is_expert_parameter
from megatron_rl.megatron.transformer_settings import optimizer_settings
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.accelerator import DDP, AcceleratedRole, accelerator_defaults


def wrap_in_ddp(
    model: ParallelModel,
    distributed: bool,
    ddp: Mapping[str, Any] | None = None,
) -> None:
    """Wrap the model's chunks in Megatron's DDP, in place; gradients accumulate in float32 buffers.

    With ``distributed`` the parameters move into buffers of the distributed optimizer. Views that were
    created before the call then show stale values. ``ddp`` are the user's settings of Megatron's DDP; on an
    accelerator, the other settings have the defaults of `shapes.accelerator`. Collective over the model's
    ranks.
    """
    ddp_settings: dict[str, Any] = {"grad_reduce_in_fp32": True}
    if ddp is not None:
        ddp_settings.update(ddp)

    # Overlap the gather of weights only together with the reduction of gradients: Megatron gathers weights in
    # the forward pass only if gradients are reduced during the backward pass. On CPU nothing can overlap.
    overlaps_gather = distributed and ddp_settings.get("overlap_grad_reduce", not device.on_host())
    if not device.on_host():
        # `AcceleratedRole.distributed` determines only the default of overlap_param_gather.
        role = AcceleratedRole(
            model.spec.model.shape,
            model.groups.layout,
            fused=model.uses_transformer_engine,
            half_precision=model.transformer_config.params_dtype != torch.float32,
            distributed=overlaps_gather,
        )
        ddp_settings = accelerator_defaults(role, DDP, ddp_settings)
    ddp_settings.setdefault("overlap_param_gather", overlaps_gather)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, **ddp_settings)

    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if is_expert_parameter(name):
                # Megatron-Core 0.16.1 sets this attribute of experts only under expert parallelism. Without
                # it, gradients are reduced only over data-parallel ranks, as for dense weights. With
                # expert_tensor = 1, each tensor-parallel rank has complete experts and routes different
                # tokens to them: gradients must be reduced over these ranks, too.
                setattr(parameter, "allreduce", False)

    with model.scope():
        model.wrapped = [
            DistributedDataParallel(
                model.transformer_config,
                ddp_config,
                chunk,
                disable_bucketing=index > 0,
                pg_collection=model.groups.megatron,
            )
            for index, chunk in enumerate(model.chunks)
        ]

    if ddp_config.overlap_grad_reduce:
        # Schedules accumulate inside no_sync, so that gradients are reduced once, with the last micro-batch.
        no_sync_functions: list[Any] = [wrapped.no_sync for wrapped in model.wrapped]
        # Megatron's schedules expect a list of functions for interleaved chunks, or a single function.
        model.transformer_config.no_sync_func = no_sync_functions[0]
        if len(no_sync_functions) > 1:
            model.transformer_config.no_sync_func = no_sync_functions


class Optimizer:
    """Optimizer and learning-rate schedule of a wrapped model.

    ``steps`` is the planned number of optimizer steps, the length of the learning-rate schedule. The
    constructor is collective over the model's ranks.
    """

    def __init__(
        self,
        model: ParallelModel,
        config: OptimizerConfig,
        steps: int,
    ) -> None:
        self.model = model
        self.config = config

        # A constant schedule ends at the learning rate, not at Megatron's default of 0.
        minimum_rate = config.minimum_learning_rate or 0.0
        if config.minimum_learning_rate is None and config.decay == "constant":
            minimum_rate = config.learning_rate

        transformer_config = model.spec.transformer_config
        settings = MegatronOptimizerConfig(
            lr=config.learning_rate,
            min_lr=minimum_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad,
            bf16=transformer_config.bf16,
            fp16=transformer_config.fp16,
            params_dtype=transformer_config.params_dtype,
            **optimizer_settings(config),
        )
        assert config.distributed or not config.offload, "checked before"
        with model.scope(), _use_role_group(model.groups.all), _build_on_host(settings):
            self.megatron: Any = get_megatron_optimizer(
                settings,
                _wrapped_chunks(model),
                use_gloo_process_groups=False,
                pg_collection=model.groups.megatron,
            )

        if hasattr(self.megatron, "chained_optimizers"):
            # If only experts train, the optimizer of dense weights is empty on all ranks, and Megatron cannot
            # save it.
            self.megatron.chained_optimizers = self.sub_optimizers
        for optimizer in self.sub_optimizers:
            if optimizer.init_state_fn is None:
                # SGD has no state, but Megatron calls ``init_state_fn`` when a checkpoint is loaded.
                optimizer.init_state_fn = _no_initial_state

        # The schedule counts optimizer steps; the schedules of Megatron-LM's scripts count samples.
        self.increment = 1
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.learning_rate,
            min_lr=minimum_rate,
            lr_warmup_steps=config.warmup_steps,
            # Megatron requires more steps in total than in the warmup.
            lr_decay_steps=max(steps, config.warmup_steps + 1),
            lr_decay_style=config.decay,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @classmethod
    def from_script(
        cls,
        model: ParallelModel,
        megatron: Any,
        scheduler: Any,
        increment: int,
    ) -> Optimizer:
        """Wrap the optimizer of a training script, whose schedule advances by ``increment`` per step."""
        optimizer = cls.__new__(cls)
        optimizer.model = model
        optimizer.megatron = megatron
        optimizer.scheduler = scheduler
        optimizer.increment = increment
        return optimizer

    @property
    def sub_optimizers(self) -> list[Any]:
        """Return Megatron's single optimizer, or the optimizers of a chain, without empty optimizers."""
        optimizers = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return [optimizer for optimizer in optimizers if getattr(optimizer, "optimizer", None) is not None]

    def zero_grad(self) -> None:
        """Clear gradient buffers before a mini-batch."""
        for chunk in _wrapped_chunks(self.model):
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def reload_parameters(self) -> None:
        """Copy the model's weights to the optimizer's main weights, after other code has written them."""
        # Without no_grad this raises if main weights are views of the model's weights.
        with torch.no_grad():
            self.megatron.reload_model_params()

    def step(self, has_next: bool = False) -> Metrics:
        """Clip gradients, update the weights and advance the learning rate.

        ``has_next``: whether the forward pass of another optimizer step follows directly. With
        overlap_param_gather that forward pass gathers the updated weights; otherwise they are
        gathered here. Raises FloatingPointError for gradients that are not finite. Returns
        ``grad_norm`` (before clipping) and ``learning_rate``. Collective over the model's ranks.
        """
        # Read the rate of this step before the scheduler sets the next rate.
        learning_rate = self.learning_rate
        with self.model.scope():
            step_result: Any = self.megatron.step()
            # With overlap_param_gather the next forward pass gathers the updated shards. Weight sync and
            # checkpoints need them now.
            if not has_next:
                for wrapped in _wrapped_chunks(self.model):
                    if wrapped.use_forward_hook:
                        wrapped.start_param_sync(force_sync=True)

        # Raise rather than skip the step: the weights may already be wrong.
        successful, norm, _ = step_result
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
def _use_role_group(group: Any) -> Iterator[None]:
    """Make `all_gather_object` and `get_world_size` use the role's ``group`` by default inside the block.

    Megatron-Core 0.16.1 compares parameter groups over the world when it builds an optimizer. The ranks of
    other roles would not take part, and the job would hang.
    """
    world_all_gather_object = dist.all_gather_object
    world_get_world_size = dist.get_world_size

    def role_all_gather_object(
        object_list: list[Any],
        obj: Any,
        group: Any = group,
    ) -> None:
        world_all_gather_object(object_list, obj, group=group)

    def role_get_world_size(group: Any = group) -> int:
        return world_get_world_size(group)

    dist.all_gather_object = role_all_gather_object
    dist.get_world_size = role_get_world_size
    try:
        yield
    finally:
        dist.all_gather_object = world_all_gather_object
        dist.get_world_size = world_get_world_size


def _no_initial_state(*_: Any) -> None:
    """Do nothing, in place of the initialisation of optimizer states: SGD has no states."""


def _wrapped_chunks(model: ParallelModel) -> Any:
    """Return the wrapped chunks with the type Any, since their declared type lacks the methods of DDP."""
    return model.wrapped


# --- The optimizer in host memory


class HostOptimizer(HybridDeviceOptimizer):
    """HybridDeviceOptimizer with a float32 host copy of every parameter, of any dtype and on any device.

    Megatron's class copies only parameters on an accelerator, and updates float32 weights in place. It does
    not restore such weights from a checkpoint, and does not reload them after other code has written them.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            # Checkpoints contain the parameter groups. Without these classes they can be read in an
            # environment that lacks the classes' packages.
            group.pop("cpu_optimizer_cls", None)
            group.pop("gpu_optimizer_cls", None)

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        """Return parameter groups on the CPU and on the device, and maps between parameters and CPU copies.

        Replaces a method of Megatron and returns five values, as that method does. The list of parameter
        groups on the device is empty, because every parameter is updated on the CPU.
        """
        if device.is_simulated():
            # A simulated rank measures only device memory, so it needs no copies on the host.
            return [], [], {}, {}, {}

        copies: dict[Any, Tensor] = {}
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                host_copy = torch.empty(
                    parameter.shape,
                    dtype=torch.float32,
                    device=device.host(),
                    pin_memory=self.pin_cpu_params,
                )
                copies[parameter] = host_copy.copy_(parameter.detach())
            if group["params"]:
                host_group = dict(group)
                host_group["params"] = [copies[parameter] for parameter in group["params"]]
                groups.append(host_group)

        # Megatron expects three maps: parameters to CPU copies, CPU copies to parameters, and parameters to
        # float32 copies. Here every CPU copy is a float32 copy.
        parameters_by_copy = {copy: parameter for parameter, copy in copies.items()}
        return groups, [], copies, parameters_by_copy, dict(copies)

    def copy_restored_state(self) -> None:
        """Pass the state that was just restored from a checkpoint to the optimizers of host and device."""
        self._sync_hdo_state_to_sub_optimizers()
        self._sync_sub_optimizers_state_to_hdo()


def set_states(
    sub_optimizer: Any,
    parameter: Any,
    states: Mapping[str, Tensor],
) -> None:
    """Set the named optimizer states of this rank's shard of a parameter; other states stay unchanged.

    ``sub_optimizer`` is one of Megatron's distributed optimizers.
    """
    current_states = sub_optimizer._get_main_param_and_optimizer_states(parameter)
    if isinstance(sub_optimizer.optimizer, HostOptimizer):
        # Copy the values: Megatron would store the tensors themselves, which may be slices of larger tensors.
        for name, value in states.items():
            current_states[name].copy_(value)
        return

    # Call the class's method, because a restore replaces the method of the instance.
    new_states = dict(current_states)
    for name, value in states.items():
        new_states[name] = value.to(current_states[name].device)
    type(sub_optimizer)._set_main_param_and_optimizer_states(sub_optimizer, parameter, new_states)


class _UnshardedHostOptimizer(HostOptimizer):
    """Placeholder for the optimizer over complete parameters, which Megatron builds first.

    It copies no parameter to the host, since Megatron then replaces it by an optimizer over this rank's
    shards.
    """

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        """Return no groups and no copies."""
        return [], [], {}, {}, {}


@contextmanager
def _build_on_host(settings: MegatronOptimizerConfig) -> Iterator[None]:
    """Make Megatron build `HostOptimizer` inside the block, if ``settings`` offload the optimizer.

    Autograd is disabled: shards of float32 weights are views, and PyTorch's optimizers accept only leaf
    tensors.
    """
    if not settings.optimizer_cpu_offload:
        yield
        return

    # Set the values that Megatron derives for its precision-aware optimizer, which has no master weights on
    # the device. The derivation itself requires Transformer Engine, whose optimizer is not used here.
    settings.use_precision_aware_optimizer = True
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False

    # Megatron builds the optimizer twice: over complete parameters, then over this rank's shards.
    replacements = {megatron_optimizer: _UnshardedHostOptimizer, distrib_optimizer: HostOptimizer}
    for module, optimizer_class in replacements.items():
        setattr(module, "HybridDeviceOptimizer", optimizer_class)
    try:
        with torch.no_grad():
            yield
    finally:
        for module in replacements:
            setattr(module, "HybridDeviceOptimizer", HybridDeviceOptimizer)
