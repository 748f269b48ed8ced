"""Offloading of a role's weights, optimizer states and gradients to the host while other roles work.

Storages are emptied and refilled in place: tensors and views keep their identity, only their bytes move.
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


class Use(IntEnum):
    """Parts of a model that a phase needs on the device. Each level includes the parts of lower levels."""

    READ = 1
    """Weights, which the phase does not write: forward passes, export, weight sync."""
    STATE = 2
    """Weights and optimizer states, read or written: checkpoints."""
    LEARN = 3
    """Weights, optimizer states and gradient buffers, which are zero at the start of a mini-batch."""


class Residency:
    """Residency of one model: its parts are in host memory except inside `resident` blocks.

    Host copies of weights that no phase has written are reused, not copied again. Without ``offload`` all
    parts remain on the device. Weights shared with the model of ``base`` move with that model, which is
    resident whenever this one is.
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
        self.moves = self.offload or (base is not None and base.moves)
        """Whether any part of the model may be in host memory."""
        self.optimizer: Optimizer | None = None

        self._uses: list[Use] = []
        """Uses of the open `resident` blocks."""
        self._seconds = 0.0
        self._bytes = 0

        # The storages that each level adds to the lower levels.
        self._levels = {
            Use.READ: _OffloadedStorages(self._weight_storages),
            Use.STATE: _OffloadedStorages(self._state_storages),
            # Gradients are zero between mini-batches: nothing to copy.
            Use.LEARN: _OffloadedStorages(
                lambda: _device_storages(_iterate_gradient_buffers(self.model)), copies=False
            ),
        }

    @contextmanager
    def resident(self, use: Use) -> Iterator[None]:
        """Keep the parts of the model that ``use`` includes on the device inside the block.

        Blocks may nest.
        """
        self._uses.append(use)
        self._move_parts()
        base: AbstractContextManager[None] = nullcontext()
        try:
            if self.base is not None:
                base = self.base.resident(Use.READ)
            with base:
                yield
        finally:
            self._uses.pop()
            self._move_parts()

    def offload_all(self) -> None:
        """Move all parts to host memory now, if this model is offloaded."""
        self._move_parts()

    def _move_parts(self) -> None:
        """Load the parts that the open blocks use, and offload the others."""
        if not self.offload:
            return

        start_time = time.perf_counter()
        bytes_before = self._bytes
        use = max(self._uses, default=0)
        required = [storages for level, storages in self._levels.items() if level <= use]
        unused = [storages for level, storages in self._levels.items() if level > use]

        # Start all copies to the host. Inside a block of STATE or LEARN weights and states may be written, so
        # the host's copies are stale from here on.
        self._bytes += sum(storages.copy_to_host() for storages in unused)
        if use > Use.READ:
            self._levels[Use.READ].stale = True
            self._levels[Use.STATE].stale = True

        # Copies are asynchronous: device memory may be freed only when they are complete.
        device.synchronize()
        freed = [storages.free_device_memory() for storages in unused]
        if any(freed):
            # Freed storages stay in the allocator's cache until they are returned to the driver.
            device.empty_cache()

        # Load what is required, after the memory for it is free.
        self._bytes += sum(storages.load_to_device() for storages in required)
        if self._bytes > bytes_before:
            device.synchronize()
        self._seconds += time.perf_counter() - start_time

    def _weight_storages(self) -> dict[int, Any]:
        """Return the storages of the weights that are not shared with the base."""
        base_weights: set[int] = set()
        if self.base is not None:
            base_weights = {_storage_address(value) for value in _iterate_weights(self.base.model)}
        storages = _device_storages(_iterate_weights(self.model))
        return {key: storage for key, storage in storages.items() if key not in base_weights}

    def _state_storages(self) -> dict[int, Any]:
        """Return the storages of optimizer states, except for weights that float32 main weights alias."""
        weights = {_storage_address(value) for value in _iterate_weights(self.model)}
        storages = _device_storages(_iterate_optimizer_states(self.optimizer))
        return {key: storage for key, storage in storages.items() if key not in weights}

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

    Without ``copies`` their contents are dropped, and they are loaded as zeros. ``stale``: the contents may
    have changed since they were copied to the host.
    """

    def __init__(
        self,
        storages: Callable[[], dict[int, Any]],
        *,
        copies: bool = True,
    ) -> None:
        self.stale = True
        self._storages = storages
        self._copies = copies
        self._offloaded: dict[int, tuple[Any, int]] = {}
        """Storages in host memory by identity, with their sizes in bytes; empty while they are on the
        device."""
        self._host: dict[int, Tensor] = {}
        """Host buffers by the identity of their storage; they outlive loading, for reuse."""

    def copy_to_host(self) -> int:
        """Start to copy the storages to the host, unless they are offloaded; return the bytes copied."""
        if self._offloaded:
            return 0

        self._offloaded = {key: (storage, storage.nbytes()) for key, storage in self._storages().items()}
        if not self._copies:
            return 0

        copied_bytes = 0
        buffers: dict[int, Tensor] = {}
        for key, (storage, size) in self._offloaded.items():
            # Page-locked memory is slow to allocate: reuse the buffer of the last copy.
            buffer = self._host.get(key)
            is_new = False
            if buffer is None or len(buffer) != size:
                buffer = device.allocate_host_buffer(size)
                is_new = True
            buffers[key] = buffer

            # If the storage has not changed since, the buffer already contains its values.
            if is_new or self.stale:
                buffer.copy_(_view_as_bytes(storage), non_blocking=True)
                copied_bytes += size

        # Buffers of storages that no longer exist are dropped here.
        self._host = buffers
        self.stale = False
        return copied_bytes

    def free_device_memory(self) -> bool:
        """Free the device memory of the offloaded storages; return whether there was any."""
        storages = [storage for storage, _ in self._offloaded.values() if storage.nbytes()]
        for storage in storages:
            storage.resize_(0)
        return bool(storages)

    def load_to_device(self) -> int:
        """Start to refill the storages in place; return the bytes copied."""
        copied_bytes = 0
        for key, (storage, size) in self._offloaded.items():
            storage.resize_(size)
            if self._copies:
                _view_as_bytes(storage).copy_(self._host[key], non_blocking=True)
                copied_bytes += size
            else:
                _view_as_bytes(storage).zero_()
        self._offloaded = {}
        return copied_bytes


def _view_as_bytes(storage: Any) -> Tensor:
    """Return a view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object, equal for all views and also for an empty storage."""
    return tensor.untyped_storage()._cdata


def _device_storages(tensors: Iterator[Tensor]) -> dict[int, Any]:
    """Return the storages of the tensors on the device by their `_storage_address`.

    Empty storages and those of scalars are left out.
    """
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
    """Yield main weights and moments of all of Megatron's optimizers."""
    if optimizer is None:
        return

    for megatron_optimizer in optimizer.sub_optimizers:
        for group in megatron_optimizer.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in megatron_optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _iterate_gradient_buffers(model: Any) -> Iterator[Tensor]:
    """Yield the gradient buffers of Megatron's DDP; a chunk that is not wrapped has none."""
    for wrapped in model.wrapped:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(wrapped, name, [])
            # An unwrapped module's ``buffers`` is a method.
            if isinstance(buffers, list):
                for buffer in buffers:
                    yield buffer.grad_data
