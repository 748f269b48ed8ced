"""The live weights of a vLLM model in this process, as storage that a `HybridEngine` fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hf.files import checkpoint_shapes
from megatron_rl.rollout.engines.vllm import setup, weights
from megatron_rl.rollout.engines.vllm.packed import PackedModules, refresh_derived, without_wrappers
from megatron_rl.types import TensorBox


class LiveWeights:
    """Say where a vLLM model's weights lie, and take them into use once they are written.

    ``model`` is one rank's module inside vLLM; ``checkpoint`` a Hugging Face directory, or the shapes of its
    tensors; ``reset_cache`` drops cached prefixes of older weights and says whether it could. ``loaded`` says
    that vLLM has read the checkpoint itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        checkpoint: str | Path | weights.Shapes,
        rank: int,
        reset_cache: Callable[[], bool] = lambda: True,
        loaded: bool = False,
    ) -> None:
        self.weights_version = 0 if loaded else -1
        self.needs_weights = not loaded
        self._model, self._checkpoint, self._rank = model, checkpoint, rank
        self._reset_cache = reset_cache
        with without_wrappers(model):
            self._packed = PackedModules(model)
            self._parameters = weights.model_parameters(model) | self._packed.parameters()
        self._map: weights.WeightMap | None = None

    @classmethod
    def of(cls, llm: Any) -> LiveWeights:
        """Return the weights of a user's own ``vllm.LLM`` that runs in this process.

        Requests in flight are kept through an update: they go on with the new weights, from a cache that
        is computed anew. Raises UserError where `prepare_vllm` was not called before vLLM was imported.
        """
        model = live_model(llm)
        check_writable(model)
        return cls(
            model,
            llm.llm_engine.model_config.model,
            device.rank(),
            lambda: llm.reset_prefix_cache(reset_running_requests=True),
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of this rank's weights by vLLM's parameter name.

        It is the live storage, except where vLLM packs weights (see `PackedModules`).
        """
        return self._parameters

    def boxes(self) -> list[TensorBox]:
        """Return where vLLM's own loader puts every Hugging Face box on this rank (traced once).

        Raises CoverageError unless every element is filled exactly once.
        """
        return list(self.map().boxes)

    def map(self) -> weights.WeightMap:
        """Return the traced map, made at the first call."""
        if self._map is None:
            shapes = self._checkpoint
            if not isinstance(shapes, Mapping):
                shapes = checkpoint_shapes(shapes)
            with self._packed.unpacked(), without_wrappers(self._model):
                self._map = weights.trace_weights(self._model, self._parameters, shapes, self._rank)
        return self._map

    def finish_update(self, version: int) -> None:
        """Take the written weights into use as ``version``; cached prefixes of older ones are dropped.

        Raises RuntimeError when the cache could not be dropped, because requests are still running.
        """
        weights.clear_padding(self._parameters, self.map().padding)
        self._packed.pack()
        refresh_derived(self._model, next(iter(self._parameters.values())).dtype)
        if not self._reset_cache():
            raise RuntimeError(f"version {version} was not taken into use: requests are still running")
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None:
        """Do nothing: when a user's own engine sleeps is the user's choice."""

    def wake(self) -> None:
        """Do nothing: see `sleep`."""


def live_model(llm: Any) -> torch.nn.Module:
    """Return the model object inside an engine of this process."""
    return model_runner(llm).get_model()


def model_runner(llm: Any) -> Any:
    """Return what runs the model inside an engine of this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def check_writable(model: torch.nn.Module) -> None:
    """Raise UserError where vLLM has packed plain weights into copies that no write reaches."""
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if device.on_host() and (empty or not setup.weights_are_writable()):
        raise UserError(
            "vLLM has packed this model's weights, so that they cannot be written in place",
            where="the vLLM engine",
            expected="weight_transfer.register() before vllm is imported, or its worker extension",
            got=f"{empty[0]} is empty" if empty else "an engine built without it",
        )
