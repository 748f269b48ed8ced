"""Move what a role keeps on the device into host memory while other roles work there, and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.checkpoint_tensors import parts_of
from megatron_rl.parallel.model import ParallelModel
from megatron_rl.parallel.optimizer import Optimizer


class Residency:
    """Keep a model's weights and optimizer states in host memory except inside `resident` blocks.

    Storages are emptied and refilled in place, so every view of them stays valid; gradient buffers are
    emptied and come back as zeros, as a mini-batch begins. With ``offload`` false nothing ever moves.
    """

    def __init__(self, model: ParallelModel | None, *, offload: bool) -> None:
        self.model, self.offload = model, offload and model is not None
        self.optimizer: Optimizer | None = None
        self._inside = 0
        self._away: list[tuple[Any, Tensor | None, int]] = []
        self._host: dict[int, Tensor] = {}
        self._seconds = 0.0
        self._bytes = 0

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Have everything on the device inside the block; blocks may nest."""
        if self.offload and not self._inside:
            self._return()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self.offload and not self._inside:
                self.leave()

    def leave(self) -> None:
        """Move everything to host memory now, where the role offloads at all."""
        if not self.offload or self._away:
            return
        begun = time.perf_counter()
        kept = _storages(_states(self.model, self.optimizer))
        dropped = _storages(_gradients(self.model))
        for key, storage in {**kept, **dropped}.items():
            size = storage.nbytes()
            host = None
            if key not in dropped:
                host = self._host_buffer(key, size)
                host.copy_(_bytes_of(storage), non_blocking=True)
                self._bytes += size
            self._away.append((storage, host, size))
        device.synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        device.empty_cache()
        self._seconds += time.perf_counter() - begun

    def _return(self) -> None:
        begun = time.perf_counter()
        for storage, host, size in self._away:
            storage.resize_(size)
            if host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(host, non_blocking=True)
                self._bytes += size
        device.synchronize()
        self._away.clear()
        self._seconds += time.perf_counter() - begun

    def _host_buffer(self, key: int, size: int) -> Tensor:
        if key not in self._host or len(self._host[key]) != size:
            self._host[key] = torch.empty(size, dtype=torch.uint8, pin_memory=not device.on_host())
        return self._host[key]

    def metrics(self) -> Metrics:
        """Return the seconds and bytes that moving took on this rank since the last call."""
        if not self.offload:
            return Metrics()
        found = Metrics({}, {"time/offload": self._seconds, "offload/bytes_max": float(self._bytes)})
        self._seconds, self._bytes = 0.0, 0
        return found


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterator[Tensor]) -> dict[int, Any]:
    """Return the distinct storages of tensors on the device, by identity; scalars stay where they are."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.device().type and tensor.numel() > 1 and storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return found


def _states(model: Any, optimizer: Optimizer | None) -> Iterator[Tensor]:
    for chunk in model.chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from chunk.buffers()
    for part in parts_of(optimizer) if optimizer is not None else ():
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(model: Any) -> Iterator[Tensor]:
    for wrapped in model.wrapped:
        for name in ("buffers", "expert_parallel_buffers"):
            found = getattr(wrapped, name, [])
            for buffer in found if isinstance(found, list) else ():
                yield buffer.grad_data
