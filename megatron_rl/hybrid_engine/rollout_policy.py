"""Rollout policy: weights to sample from, which may be older than the model's (`hybrid_engine.every`).

The idea: an engine cannot preserve weights, since it may drop them while asleep, be restarted, or be new in a
resumed run. Between two periodic syncs the actor's ranks therefore retain a copy of the last synced weights
in host memory. To sync these weights again, the ranks swap the copy with the model's weights in place, and
swap both back after the sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from megatron_rl.distributed.device import host
from megatron_rl.megatron.lora import adapter_parameters
from megatron_rl.megatron.model import ChunkedModel, live_parameters
from megatron_rl.shapes.layer_weights import is_buffer


class RolloutPolicy:
    """Version of the weights to sample responses from, and a copy of these weights if the model is newer.

    Methods that read or write weights need the model's weights in device memory. No method is collective.

    ``model``: the trained model, or None on ranks without it.
    ``every``: number of versions between two periodic syncs; with 0 the first version is used forever.
    ``version``: version of the last periodic sync, or None before the first.
    """

    def __init__(self, model: ChunkedModel | None, every: int) -> None:
        self.every = every
        self.version: int | None = None
        self._model = model
        self._copy: dict[str, Tensor] = {}

    def version_at(self, model_version: int) -> int:
        """Return the version of the weights to sample from while the model has ``model_version``.

        Example:
            >>> policy = RolloutPolicy(None, every=3)
            >>> policy.version_at(1)
            1
            >>> policy.capture_weights(1)
            >>> [policy.version_at(version) for version in (1, 2, 3, 4)]
            [1, 1, 1, 4]
        """
        if self.version is None or self.every == 1:
            return model_version
        is_sync_due = self.every > 0 and model_version - self.version >= self.every
        if is_sync_due:
            return model_version
        return self.version

    def capture_weights(self, version: int) -> None:
        """Make the model's current weights the rollout policy; ``version`` is their version.

        The weights are copied to the host unless every version is synced (``every`` is 1).
        """
        self.version = version
        # With a sync at every version the model is never newer than the engine, so no copy is needed.
        if self.every != 1 and self._model is not None:
            self._copy = {
                name: weight.to(host(), copy=True) for name, weight in self._get_trained_weights().items()
            }

    @contextmanager
    def swap_into_model(self) -> Iterator[None]:
        """Swap the copied weights into the model inside the block, and swap them back afterwards."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    def use_version(self, version: int, model_version: int) -> AbstractContextManager[None]:
        """Return a context in which the model, now at ``model_version``, has the weights of ``version``."""
        if version == model_version:
            return nullcontext()
        return self.swap_into_model()

    @torch.no_grad()
    def _swap_weights(self) -> None:
        """Swap the copy with the model's weights, in place."""
        # Swap one tensor at a time, so that the swap needs extra memory only for the largest weight.
        for name, weight in self._get_trained_weights().items():
            copied_weight = self._copy[name]
            self._copy[name] = weight.to(host(), copy=True)
            weight.copy_(copied_weight)

    def _get_trained_weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name; with adapters these are the adapters and the buffers."""
        if self._model is None:
            return {}
        weights = live_parameters(self._model)
        if getattr(self._model, "adapters", None) is None:
            return weights
        buffers = {name: weight for name, weight in weights.items() if is_buffer(name)}
        return buffers | adapter_parameters(self._model)
