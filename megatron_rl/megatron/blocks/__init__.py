"""Builders that make Megatron's modules for the blocks of `megatron_rl.shapes.blocks`.

Each module except `builder` defines a ``BUILDER`` for the block of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import UserError
from megatron_rl.megatron.blocks.builder import BlockBuilder, LayerOptions
from megatron_rl.shapes.blocks.block import FeedForward, Mixer
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

if TYPE_CHECKING:
    from megatron_rl.megatron.model_spec import ModelSpec

# A new block needs only a new module in this package: no list names the modules.
BUILDERS: dict[str, BlockBuilder[Any]] = {
    module.name: import_module(f"{__name__}.{module.name}").BUILDER
    for module in iter_modules(__path__)
    if module.name != "builder"
}
"""Builder of each mixer and each feed-forward, by the block's name."""


def prepare_blocks(shape: ModelShape, layout: ParallelLayout) -> None:
    """Patch Megatron's modules in this process as the blocks of a model require. Idempotent."""
    for sublayer in (*shape.mixers, *shape.feed_forwards):
        _find_builder(sublayer).prepare(shape, layout)


def place_blocks(layers: list[Any], shape: ModelShape, first_layer: int, options: LayerOptions) -> None:
    """Replace each layer's spec by a spec with the layer's own mixer and feed-forward, in place.

    ``layers`` are the specs of consecutive layers; ``first_layer`` is the index of ``layers[0]`` in the whole
    model.
    """
    for index, layer in enumerate(layers):
        # Two builders change the spec in turn: the mixer's, then the feed-forward's.
        for sublayer in shape.block(first_layer + index):
            layer = _find_builder(sublayer).layer_spec(layer, sublayer, options)
        layers[index] = layer


def finish_blocks(chunk: Any, spec: ModelSpec) -> None:
    """Run `BlockBuilder.finish` for each block of a GPTModel chunk, on the layers that have this block."""
    for sublayer, layers in _group_layers_by_sublayer(chunk.decoder.layers, spec.model.shape).items():
        _find_builder(sublayer).finish(layers, spec)


def _group_layers_by_sublayer(
    layers: Iterable[Any], shape: ModelShape
) -> dict[Mixer | FeedForward, list[Any]]:
    """Group the layers by their mixer, and again by their feed-forward.

    A mixer is a layer's attention or what replaces it. Each layer is in two groups of the result.
    """
    layers_by_sublayer: dict[Mixer | FeedForward, list[Any]] = {}
    for layer in layers:
        # Megatron numbers layers from 1, over the whole model.
        for sublayer in shape.block(layer.layer_number - 1):
            layers_by_sublayer.setdefault(sublayer, []).append(layer)
    return layers_by_sublayer


def _find_builder(sublayer: Mixer | FeedForward) -> BlockBuilder[Any]:
    """Return the builder of a mixer or feed-forward; raise UserError for a block without a builder."""
    # The planner supports more blocks than this package can build.
    if sublayer.name not in BUILDERS:
        raise UserError(
            f"the block {sublayer.name!r} has no Megatron module",
            where="model.path",
            expected=f"a model of blocks that can be built: {', '.join(sorted(BUILDERS))}",
            got=sublayer.name,
            fix="use another model, or add the block to megatron_rl/megatron/blocks",
        )

    return BUILDERS[sublayer.name]
