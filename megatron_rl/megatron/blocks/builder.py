"""Interface of builders, which make Megatron's modules for the blocks of `megatron_rl.shapes.blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.shapes.blocks.block import FeedForward, Mixer
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec

# Class of `megatron_rl.shapes.blocks` that describes the mixer or feed-forward.
Sublayer = TypeVar("Sublayer", bound=Mixer | FeedForward)


class LayerOptions(NamedTuple):
    """Inputs of `BlockBuilder.layer_spec` that are equal for all layers of a pipeline stage."""

    config: TransformerConfig
    """Megatron's configuration of the model."""
    tensor_group: Any
    """Tensor-parallel process group."""
    fused: bool
    """Whether the layers are Transformer Engine's."""


class BlockBuilder(Generic[Sublayer]):
    """Builder of one class of mixer or feed-forward; without overrides it builds Megatron's own layer.

    The methods are called in this order: `prepare`, `layer_spec`, `finish`.
    """

    def prepare(self, shape: ModelShape, layout: ParallelLayout) -> None:
        """Patch Megatron's modules in this process, before the TransformerConfig is created. Idempotent."""

    def layer_spec(self, layer: Any, sublayer: Sublayer, options: LayerOptions) -> Any:
        """Return the spec of a Megatron layer with the module for ``sublayer``, its mixer or feed-forward.

        ``layer`` is the ModuleSpec so far. The default returns it unchanged, which selects Megatron's own
        module. An override may return a modified copy. It may modify ``layer`` itself only if it modifies the
        specs of all layers in the same way, since layers may share one spec.
        """
        return layer

    def finish(self, layers: Sequence[Any], spec: ModelSpec) -> None:
        """Modify the built ``layers`` that have this block, for features without a setting in Megatron."""
