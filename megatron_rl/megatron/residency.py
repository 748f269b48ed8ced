"""Offloading of a role's weights, optimizer states and gradients to the host while other roles work.

Storages are emptied and refilled in place: only their bytes move, all tensors and views remain valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.metrics import Metrics


class ResidencyLevel(IntEnum):
    """Tensors of a model that a phase needs on the device. Each level includes the lower levels."""

    READ_WEIGHTS = 1
    """Weights, which the phase does not write: forward passes, export, weight sync."""
    WEIGHTS_AND_OPTIMIZER = 2
    """Weights and optimizer states, read or written: checkpoints."""
    TRAINING = 3
    """Weights, optimizer states and gradient buffers, which are zero at the start of a mini-batch."""


class Residency:
    """Residency of one model: its tensors are in host memory except inside `resident` blocks.

    A host copy is reused without another transfer if no phase has written the weights since they were copied.
    Without ``offload`` all tensors remain on the device. ``base`` is the residency of another model whose
    weights this model uses, too, or None. The shared weights are offloaded and loaded with that model, which
    is resident whenever this model is.
    """

    def __init__(
        self,
        model: ParallelModel | None,
        *,
        offload: bool,
        base: Residency | None = None,
    ) -> None:
        self.model = model
        self.offload = offload and model is not None
        self.base = base
        """Residency of the model whose weights this model shares, or None."""
        self.can_offload = self.offload or (base is not None and base.can_offload)
        """Whether any tensors of this model can be offloaded: by this object, or by ``base``, which offloads
        the weights that both models use."""
        self.optimizer: Optimizer | None = None

        self._active_levels: list[ResidencyLevel] = []
        """Levels of the `resident` contexts that are active now, the innermost last."""
        self._seconds = 0.0
        self._bytes = 0

        # Level -> storages that this level requires in addition to the storages of the lower levels.
        # Gradients are zero between mini-batches, so offloading them needs no copy of their values.
        self._storages_by_level = {
            ResidencyLevel.READ_WEIGHTS: _OffloadedStorages(self._weight_storages),
            ResidencyLevel.WEIGHTS_AND_OPTIMIZER: _OffloadedStorages(self._state_storages),
            ResidencyLevel.TRAINING: _OffloadedStorages(self._gradient_storages, preserves_values=False),
        }

    @contextmanager
    def resident(self, level: ResidencyLevel) -> Iterator[None]:
        """Keep the tensors of ``level`` (see `ResidencyLevel`) in device memory inside the block.

        The weights of the model of ``base`` are kept in device memory, too. Blocks may nest.
        """
        self._active_levels.append(level)
        self._move_storages()
        base: AbstractContextManager[None] = nullcontext()
        try:
            if self.base is not None:
                base = self.base.resident(ResidencyLevel.READ_WEIGHTS)
            with base:
                yield
        finally:
            self._active_levels.pop()
            self._move_storages()

    def offload_all(self) -> None:
        """Offload all tensors now, unless a `resident` block needs them or the model stays on the device."""
        self._move_storages()

    def _move_storages(self) -> None:
        """Load the storages that the active `resident` contexts require, and offload all other storages."""
        if not self.offload:
            return

        start_time = time.perf_counter()
        bytes_before = self._bytes
        highest_level = max(self._active_levels, default=0)
        required = []
        unused = []
        for level, storages in self._storages_by_level.items():
            if level <= highest_level:
                required.append(storages)
            else:
                unused.append(storages)

        # Start all copies to the host. On a level above READ_WEIGHTS the phase may write weights and states,
        # which makes their copies on the host stale.
        self._bytes += sum(storages.copy_to_host() for storages in unused)
        if highest_level > ResidencyLevel.READ_WEIGHTS:
            self._storages_by_level[ResidencyLevel.READ_WEIGHTS].stale = True
            self._storages_by_level[ResidencyLevel.WEIGHTS_AND_OPTIMIZER].stale = True

        # Copies are asynchronous: device memory may be freed only when they are complete.
        device.synchronize()
        was_freed = [storages.free_device_memory() for storages in unused]
        if any(was_freed):
            # Freed storages stay in the allocator's cache until they are returned to the driver.
            device.empty_cache()

        # Load the required storages, after their memory is free.
        self._bytes += sum(storages.load_to_device() for storages in required)
        if self._bytes > bytes_before:
            device.synchronize()
        self._seconds += time.perf_counter() - start_time

    def _weight_storages(self) -> dict[int, Any]:
        """Return the storages of the weights that are not shared with the base."""
        base_weights: set[int] = set()
        if self.base is not None:
            base_weights = {_storage_address(weight) for weight in _iterate_weights(self.base.model)}
        storages = _device_storages(_iterate_weights(self.model))
        return {key: storage for key, storage in storages.items() if key not in base_weights}

    def _state_storages(self) -> dict[int, Any]:
        """Return the storages of optimizer states.

        A float32 main weight may be a view of a model weight. The storage of such a main weight is omitted,
        since it is a storage of weights.
        """
        weights = {_storage_address(weight) for weight in _iterate_weights(self.model)}
        storages = _device_storages(_iterate_optimizer_states(self.optimizer))
        return {key: storage for key, storage in storages.items() if key not in weights}

    def _gradient_storages(self) -> dict[int, Any]:
        """Return the storages of the gradient buffers."""
        return _device_storages(_iterate_gradient_buffers(self.model))

    def metrics(self) -> Metrics:
        """Return the metrics of this rank's offloading and loading since the last call."""
        if not self.offload:
            return Metrics()

        metrics = Metrics({}, {"time/offload": self._seconds, "offload/bytes_max": float(self._bytes)})
        self._seconds = 0.0
        self._bytes = 0
        return metrics


class _OffloadedStorages:
    """Storages that are offloaded and loaded together.

    ``storages`` is a function that returns the storages on the device by address. With
    ``preserves_values`` the values are copied to host memory. Otherwise the values are dropped, and are zero
    after loading. ``stale``: whether the values may have changed since they were last copied to the host.
    """

    def __init__(
        self,
        storages: Callable[[], dict[int, Any]],
        *,
        preserves_values: bool = True,
    ) -> None:
        self.stale = True
        """Whether the values in ``_host_buffers`` may be older than the values on the device."""
        self._storages = storages
        self._preserves_values = preserves_values
        self._offloaded: dict[int, tuple[Any, int]] = {}
        """Address of a storage -> (storage, size in bytes) while the storages are offloaded; otherwise empty.
        An offloaded storage has size 0 until it is loaded."""
        self._host_buffers: dict[int, Tensor] = {}
        """Address of a storage -> host buffer with its values. Buffers are retained after loading: they are
        reused by the next offload."""

    def copy_to_host(self) -> int:
        """Start to copy the storages to the host, unless they are offloaded; return the bytes copied."""
        if self._offloaded:
            return 0

        self._offloaded = {key: (storage, storage.nbytes()) for key, storage in self._storages().items()}
        if not self._preserves_values:
            return 0

        copied_bytes = 0
        buffers: dict[int, Tensor] = {}
        for key, (storage, size) in self._offloaded.items():
            # Page-locked memory is slow to allocate: reuse the buffer of the last copy.
            buffer = self._host_buffers.get(key)
            is_new = False
            if buffer is None or len(buffer) != size:
                buffer = device.allocate_host_buffer(size)
                is_new = True
            buffers[key] = buffer

            # If the storage has not changed since the last copy, the buffer already contains its values.
            if is_new or self.stale:
                buffer.copy_(_view_as_bytes(storage), non_blocking=True)
                copied_bytes += size

        # Buffers of storages that no longer exist are dropped here.
        self._host_buffers = buffers
        self.stale = False
        return copied_bytes

    def free_device_memory(self) -> bool:
        """Free the device memory of the offloaded storages; return whether any memory was freed."""
        storages = [storage for storage, _ in self._offloaded.values() if storage.nbytes()]
        for storage in storages:
            storage.resize_(0)
        return bool(storages)

    def load_to_device(self) -> int:
        """Start to refill the storages in place; return the bytes copied."""
        copied_bytes = 0
        for key, (storage, size) in self._offloaded.items():
            storage.resize_(size)
            if self._preserves_values:
                _view_as_bytes(storage).copy_(self._host_buffers[key], non_blocking=True)
                copied_bytes += size
            else:
                _view_as_bytes(storage).zero_()
        self._offloaded = {}
        return copied_bytes


def _view_as_bytes(storage: Any) -> Tensor:
    """Return a view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, which is equal for all views of a storage.

    Unlike the address of the data, it stays the same while the storage is empty.
    """
    return tensor.untyped_storage()._cdata


def _device_storages(tensors: Iterator[Tensor]) -> dict[int, Any]:
    """Return the storages of tensors on the device by `_storage_address`; skip scalars and empty storages."""
    storages: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == device.device().type
        if on_device and tensor.numel() > 1 and storage.nbytes():
            storages.setdefault(_storage_address(tensor), storage)
    return storages


def _iterate_weights(model: Any) -> Iterator[Tensor]:
    """Yield the parameters and buffers of all chunks of a model."""
    for chunk in model.chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from chunk.buffers()


def _iterate_optimizer_states(optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the main weights and moments of all of Megatron's optimizers."""
    if optimizer is None:
        return

    for megatron_optimizer in optimizer.sub_optimizers:
        for group in megatron_optimizer.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in megatron_optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _iterate_gradient_buffers(model: Any) -> Iterator[Tensor]:
    """Yield the gradient buffers of all chunks that are wrapped in Megatron's DDP."""
    for wrapped in model.wrapped:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(wrapped, name, [])
            # An unwrapped module's ``buffers`` is a method.
            if isinstance(buffers, list):
                for buffer in buffers:
                    yield buffer.grad_data
