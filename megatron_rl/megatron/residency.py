"""Move what a role keeps on the device into host memory while other roles work there, and back in parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.metrics import Metrics


class Use(IntEnum):
    """Say what of a model must be on the device; each holds what those before it hold."""

    READ = 1
    """The weights, and nothing writes them: to score, to export, to bring them to an engine."""
    STATE = 2
    """Weights and optimizer states, to read or write: checkpoints."""
    LEARN = 3
    """Gradient buffers, too. They are zeros, as a mini-batch begins."""


class Residency:
    """Keep a model's weights and optimizer states in host memory except inside `resident` blocks.

    Storages are emptied and refilled in place, so every view of them stays valid; what the host still has of
    weights that nobody wrote is not copied again. With ``offload`` false nothing ever moves. Weights that
    are those of ``base`` move with it, and are there whenever the model is.
    """

    def __init__(self, model: ParallelModel | None, *, offload: bool, base: Residency | None = None) -> None:
        self.model, self.offload, self.base = model, offload and model is not None, base
        self.moves = self.offload or (base is not None and base.moves)
        """Whether anything that the model needs is ever away."""
        self.optimizer: Optimizer | None = None
        self._uses: list[Use] = []
        self._seconds = 0.0
        self._bytes = 0
        self._parts = {
            Use.READ: _Part(self._own),
            Use.STATE: _Part(self._states),
            Use.LEARN: _Part(lambda: _storages(_gradients(self.model)), kept=False),
        }

    @contextmanager
    def resident(self, use: Use) -> Iterator[None]:
        """Have what ``use`` names on the device inside the block; blocks may nest."""
        self._uses.append(use)
        self._move()
        try:
            with nullcontext() if self.base is None else self.base.resident(Use.READ):
                yield
        finally:
            self._uses.pop()
            self._move()

    def leave(self) -> None:
        """Move everything to host memory now, where the role offloads at all."""
        self._move()

    def _move(self) -> None:
        """Bring what the open blocks use, and put the rest away."""
        if not self.offload:
            return
        begun = time.perf_counter()
        use = max(self._uses, default=0)
        parts = self._parts
        before = self._bytes
        self._bytes += sum(part.put_away() for level, part in parts.items() if level > use)
        if use > Use.READ:
            parts[Use.READ].written = parts[Use.STATE].written = True
        device.synchronize()
        emptied = [part.empty() for level, part in parts.items() if level > use]
        if any(emptied):
            device.empty_cache()
        self._bytes += sum(part.bring() for level, part in parts.items() if level <= use)
        if self._bytes > before:
            device.synchronize()
        self._seconds += time.perf_counter() - begun

    def _own(self) -> dict[int, Any]:
        """Return the storages of the weights that are not the base's."""
        others = set() if self.base is None else {_identity(value) for value in _weights(self.base.model)}
        storages = _storages(_weights(self.model))
        return {key: storage for key, storage in storages.items() if key not in others}

    def _states(self) -> dict[int, Any]:
        """Return the optimizer's storages that are not the weights' own."""
        weights = {_identity(value) for value in _weights(self.model)}
        storages = _storages(_optimizer_states(self.optimizer))
        return {key: storage for key, storage in storages.items() if key not in weights}

    def metrics(self) -> Metrics:
        """Return the seconds and bytes that moving took on this rank since the last call."""
        if not self.offload:
            return Metrics()
        metrics = Metrics({}, {"time/offload": self._seconds, "offload/bytes_max": float(self._bytes)})
        self._seconds, self._bytes = 0.0, 0
        return metrics


class _Part:
    """Storages that come and go together; those that are not ``kept`` come back as zeros.

    ``written`` says that the host's copy, where there is one, is old.
    """

    def __init__(self, storages: Callable[[], dict[int, Any]], *, kept: bool = True) -> None:
        self.written = True
        self._storages, self._kept = storages, kept
        self._away: dict[int, tuple[Any, int]] = {}
        self._host: dict[int, Tensor] = {}

    def put_away(self) -> int:
        """Begin to copy what is on the device to the host; return the bytes."""
        if self._away:
            return 0
        self._away = {key: (storage, storage.nbytes()) for key, storage in self._storages().items()}
        if not self._kept:
            return 0
        copies, self._host, moved = self._host, {}, 0
        for key, (storage, size) in self._away.items():
            copy = copies.get(key)
            new = copy is None or len(copy) != size
            if copy is None or new:
                copy = device.host_buffer(size)
            self._host[key] = copy
            if new or self.written:
                copy.copy_(_bytes_of(storage), non_blocking=True)
                moved += size
        self.written = False
        return moved

    def empty(self) -> bool:
        """Free the device memory of what was put away; say whether there was any."""
        full = [storage for storage, _ in self._away.values() if storage.nbytes()]
        for storage in full:
            storage.resize_(0)
        return bool(full)

    def bring(self) -> int:
        """Begin to refill the storages where they are; return the bytes that are copied."""
        moved = 0
        for key, (storage, size) in self._away.items():
            storage.resize_(size)
            if self._kept:
                _bytes_of(storage).copy_(self._host[key], non_blocking=True)
                moved += size
            else:
                _bytes_of(storage).zero_()
        self._away = {}
        return moved


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tensors: Iterator[Tensor]) -> dict[int, Any]:
    """Return the distinct storages of tensors on the device, by identity; scalars stay where they are."""
    storages: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.device().type and tensor.numel() > 1 and storage.nbytes():
            storages.setdefault(_identity(tensor), storage)
    return storages


def _weights(model: Any) -> Iterator[Tensor]:
    for chunk in model.chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from chunk.buffers()


def _optimizer_states(optimizer: Optimizer | None) -> Iterator[Tensor]:
    for part in optimizer.parts if optimizer is not None else ():
        for group in part.optimizer.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(model: Any) -> Iterator[Tensor]:
    for wrapped in model.wrapped:
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(wrapped, name, [])
            for buffer in buffers if isinstance(buffers, list) else ():
                yield buffer.grad_data
