"""The interface of builders, which make Megatron's modules for the blocks of `megatron_rl.shapes.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.shapes.blocks.block import FeedForward, Mixer
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec

Kind = TypeVar("Kind", bound=Mixer | FeedForward)


class LayerOptions(NamedTuple):
    """Properties of a model's layers, the same for all layers of a pipeline stage, that builders read."""

    config: TransformerConfig
    """Megatron's configuration of the model."""
    tensor_group: Any
    """Tensor-parallel process group."""
    fused: bool
    """Whether the layers are Transformer Engine's."""


class BlockBuilder(Generic[Kind]):
    """Builder of one kind of mixer or feed-forward; without overrides it builds Megatron's own layer."""

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Adjust Megatron's modules in this process, before its configuration is made. Idempotent."""

    def layer_spec(self, layer: Any, kind: Kind, options: LayerOptions) -> Any:
        """Return Megatron's ``layer`` spec with the module of this block; layers may share one spec."""
        return layer

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Modify the built layers that have this block where Megatron's settings cannot express a feature."""
