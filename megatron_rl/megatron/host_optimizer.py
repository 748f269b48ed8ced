"""Adam in host memory: float32 weights and moments, updated by the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megatron_rl.distributed import device


class HostOptimizer(HybridDeviceOptimizer):
    """HybridDeviceOptimizer with a float32 host copy of every parameter, of any dtype and on any device.

    Megatron's class copies only parameters on an accelerator, and updates float32 weights in place: it then
    neither restores them from a checkpoint nor reloads them after something else wrote the weights.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            # Groups are saved, and a checkpoint must be readable without the packages of these classes.
            group.pop("cpu_optimizer_cls", None)
            group.pop("gpu_optimizer_cls", None)

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        """Return the groups of host and device, and Megatron's maps between parameters and copies."""
        if device.simulated():
            # A simulation does not count the host's memory.
            return [], [], {}, {}, {}

        copies = {
            parameter: torch.empty(
                parameter.shape, dtype=torch.float32, device=device.host(), pin_memory=self.pin_cpu_params
            ).copy_(parameter.detach())
            for group in self.param_groups
            for parameter in group["params"]
        }
        groups = [
            {**group, "params": [copies[parameter] for parameter in group["params"]]}
            for group in self.param_groups
            if group["params"]
        ]
        parameters_by_copy = {copy: parameter for parameter, copy in copies.items()}
        return groups, [], copies, parameters_by_copy, dict(copies)

    def settle(self) -> None:
        """Copy the state that a checkpoint has just restored to the optimizers of host and device."""
        self._sync_hdo_state_to_sub_optimizers()
        self._sync_sub_optimizers_state_to_hdo()


def set_states(sub_optimizer: Any, parameter: Any, states: Mapping[str, Tensor]) -> None:
    """Set some states of a parameter's shard in one of Megatron's distributed optimizers."""
    current = sub_optimizer._get_main_param_and_optimizer_states(parameter)
    if isinstance(sub_optimizer.optimizer, HostOptimizer):
        # Copied: Megatron would keep the tensors, which may be slices of larger ones.
        for name, value in states.items():
            current[name].copy_(value)
    else:
        device_states = {name: value.to(current[name].device) for name, value in states.items()}
        # The class's method, because a restore replaces the instance's.
        type(sub_optimizer)._set_main_param_and_optimizer_states(
            sub_optimizer, parameter, {**current, **device_states}
        )


class _UnshardedParameters(HostOptimizer):
    """Placeholder until the distributed optimizer shards the parameters: copies none of them."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        return [], [], {}, {}, {}


@contextmanager
def on_the_host(settings: OptimizerConfig) -> Iterator[None]:
    """Make Megatron build `HostOptimizer` inside the block, if ``settings`` offload the optimizer.

    Without autograd: shards of float32 weights are views, and PyTorch's optimizers accept leaves alone.
    """
    if not settings.optimizer_cpu_offload:
        yield
        return
    # What Megatron derives for its precision-aware optimizer, which has no master weights on the device. Its
    # own derivation asks for the version of Transformer Engine, whose optimizer is not used here.
    settings.use_precision_aware_optimizer = True
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False

    modules = (megatron_optimizer, _UnshardedParameters), (distrib_optimizer, HostOptimizer)
    for module, optimizer_class in modules:
        setattr(module, "HybridDeviceOptimizer", optimizer_class)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, _ in modules:
            setattr(module, "HybridDeviceOptimizer", HybridDeviceOptimizer)
