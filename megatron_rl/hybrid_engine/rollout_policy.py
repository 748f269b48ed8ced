"""Rollout policy: weights to sample from, which may be older than the model's (`hybrid_engine.every`).

The one idea: an engine cannot preserve weights: it may drop them while asleep, be restarted, or be new in a
resumed run. So between two periodic syncs the ranks of the actor keep a copy of the weights of the last one
in host memory, and a sync from the copy is a usual sync: the copy is exchanged with the model's weights, in
place, and exchanged back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from megatron_rl.distributed.device import host
from megatron_rl.megatron.lora import adapter_parameters
from megatron_rl.megatron.model import Chunked, live_parameters


class RolloutPolicy:
    """Version of the weights that responses are sampled from, and a copy of them beside a newer model.

    All methods need the model's weights in device memory, and none is collective.

    ``model``: the trained model, None on ranks without it.
    ``every``: versions from one sync to the next; 0 samples from the first version forever.
    ``version``: version of the last periodic sync, None before the first.
    """

    def __init__(self, model: Chunked | None, every: int) -> None:
        self.every = every
        self.version: int | None = None
        self._model = model
        self._copy: dict[str, Tensor] = {}

    def version_at(self, version: int) -> int:
        """Return the version to sample from while the model has ``version``.

        Example:
            >>> policy = RolloutPolicy(None, every=3)
            >>> policy.version_at(1)
            1
            >>> policy.capture(1)
            >>> [policy.version_at(version) for version in (1, 2, 3, 4)]
            [1, 1, 1, 4]
        """
        if self.version is None or self.every == 1:
            return version
        is_due = self.every > 0 and version - self.version >= self.every
        if is_due:
            return version
        return self.version

    def capture(self, version: int) -> None:
        """Make the model's current weights, of ``version``, the rollout policy."""
        self.version = version
        # With a sync at every version the model is never newer than the engine.
        if self.every != 1 and self._model is not None:
            self._copy = {name: weight.to(host(), copy=True) for name, weight in self._weights().items()}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange the copy with the model's weights inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def weights_of(self, version: int, newest: int) -> AbstractContextManager[None]:
        """Return a context in which the model, at version ``newest``, has the weights of ``version``."""
        if version == newest:
            return nullcontext()
        return self.in_model()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One tensor at a time: the exchange needs memory for the largest weight only.
        for name, weight in self._weights().items():
            copy = self._copy[name]
            self._copy[name] = weight.to(host(), copy=True)
            weight.copy_(copy)

    def _weights(self) -> dict[str, Tensor]:
        """Return the trained weights; with adapters, the adapters and the bias buffers of experts."""
        if self._model is None:
            return {}
        weights = live_parameters(self._model)
        if getattr(self._model, "adapters", None) is None:
            return weights
        buffers = {name: weight for name, weight in weights.items() if name.endswith(".expert_bias")}
        return buffers | adapter_parameters(self._model)
