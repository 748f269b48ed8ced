"""A Megatron model as receiver of weights: a reference refreshed from the actor, or another layout of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_rl.parallel.hf.weights import Chunked, live_parameters, source_boxes
from megatron_rl.types import TensorBox


class MegatronTarget:
    """Let a `HybridEngine` write into a Megatron model as it writes into a generation engine."""

    def __init__(self, model: Chunked) -> None:
        self.weights_version = -1
        self.needs_weights = True
        self._model = model

    def boxes(self) -> list[TensorBox]:
        """Return where each part of the checkpoint's tensors lies in this rank's parameters."""
        return source_boxes(self._model)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's live parameters."""
        return live_parameters(self._model)

    def finish_update(self, version: int) -> None:
        """Note the version of the weights that have arrived."""
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None:
        """Do nothing: the model stays where it is."""

    def wake(self) -> None:
        """Do nothing: the model is always there."""
