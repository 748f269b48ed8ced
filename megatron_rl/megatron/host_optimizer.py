"""Keep Adam's moments and the weights in float32 in host memory, and step there."""

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
    """Step a float32 copy in host memory of every parameter, of whatever type and wherever it is.

    Megatron's class copies what is on an accelerator, and takes float32 weights for those that need no
    copy: it then neither restores them nor takes them over when something else wrote the weights.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            # Groups are saved, and a checkpoint is to be read without the packages of these classes.
            group.pop("cpu_optimizer_cls", None)
            group.pop("gpu_optimizer_cls", None)

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        """Return the groups of the host and of the device, and the copies as Megatron looks them up."""
        if device.simulated():
            return [], [], {}, {}, {}  # the host's memory is not counted
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
        return groups, [], copies, {copy: parameter for parameter, copy in copies.items()}, dict(copies)

    def settle(self) -> None:
        """Step on from the state that was just restored."""
        self._sync_hdo_state_to_sub_optimizers()
        self._sync_sub_optimizers_state_to_hdo()


def set_states(part: Any, parameter: Any, states: Mapping[str, Tensor]) -> None:
    """Give a parameter of one of Megatron's distributed optimizers its share of some of its states."""
    current = part._get_main_param_and_optimizer_states(parameter)
    if isinstance(part.optimizer, HostOptimizer):
        # Megatron would keep what it is given, which may be slices of larger tensors.
        for name, value in states.items():
            current[name].copy_(value)
    else:
        moved = {name: value.to(current[name].device) for name, value in states.items()}
        # The class's method: a restore has put another in its place on the optimizer.
        type(part)._set_main_param_and_optimizer_states(part, parameter, {**current, **moved})


class _Whole(HostOptimizer):
    """Hold the parameters until the distributed optimizer shares them out: nothing is copied for them."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        return [], [], {}, {}, {}


@contextmanager
def on_the_host(settings: OptimizerConfig) -> Iterator[None]:
    """Have Megatron make `HostOptimizer` inside from ``settings`` that offload, whatever others do.

    No graph is recorded: shards of float32 weights are views of them, and PyTorch steps leaves alone.
    """
    if not settings.optimizer_cpu_offload:
        yield
        return
    # What Megatron derives for its precision-aware optimizer, which has no master weights on the device. Its
    # own derivation asks for the version of Transformer Engine, whose optimizer is not used here.
    settings.use_precision_aware_optimizer = settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    settings.store_param_remainders = False
    modules = (megatron_optimizer, _Whole), (distrib_optimizer, HostOptimizer)
    for module, optimizer_class in modules:
        setattr(module, "HybridDeviceOptimizer", optimizer_class)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, _ in modules:
            setattr(module, "HybridDeviceOptimizer", HybridDeviceOptimizer)
