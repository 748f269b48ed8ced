"""Builders of the blocks of `megatron_rl.shapes.blocks`, under the same names.

Each module of this package but `builder` defines one as ``BUILDER`` and has the name of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

BUILDERS: dict[str, BlockBuilder[Any]] = {
    module.name: import_module(f"{__name__}.{module.name}").BUILDER
    for module in iter_modules(__path__)
    if module.name != "builder"
}
"""Builder of each mixer and of each feed-forward by name."""


def prepare_blocks(shape: ModelShape, layout: ParallelLayout) -> None:
    """Adjust Megatron's modules to the blocks of a model, in this process. Idempotent."""
    for kind in (*shape.mixers, *shape.feed_forwards):
        _find_builder(kind).prepare(shape, layout)


def place_blocks(layers: list[Any], shape: ModelShape, first_layer: int, options: LayerOptions) -> None:
    """Replace the specs of consecutive ``layers`` by those of their blocks, in place.

    ``first_layer`` is the index of the first of them in the whole model.
    """
    for index, layer in enumerate(layers):
        for kind in shape.block(first_layer + index):
            layer = _find_builder(kind).layer_spec(layer, kind, options)
        layers[index] = layer


def finish_blocks(chunk: Any, spec: ModelSpec) -> None:
    """Run `BlockBuilder.finish` for each mixer and feed-forward of a GPTModel chunk, on its layers."""
    for kind, layers in _layers_by_kind(chunk.decoder.layers, spec.model.shape):
        _find_builder(kind).finish(layers, spec)


def _layers_by_kind(
    layers: Iterable[Any], shape: ModelShape
) -> Iterator[tuple[Mixer | FeedForward, list[Any]]]:
    """Yield each mixer and each feed-forward with the layers that have it."""
    by_kind: dict[Mixer | FeedForward, list[Any]] = {}
    for layer in layers:
        # Megatron numbers layers from 1, over the whole model.
        for kind in shape.block(layer.layer_number - 1):
            by_kind.setdefault(kind, []).append(layer)
    yield from by_kind.items()


def _find_builder(kind: Mixer | FeedForward) -> BlockBuilder[Any]:
    """Return the builder of a mixer or feed-forward; raise UserError for one that can only be planned."""
    if kind.name not in BUILDERS:
        raise UserError(
            f"the block {kind.name!r} has no Megatron module",
            where="model.path",
            expected=f"a model of blocks that can be built: {', '.join(sorted(BUILDERS))}",
            got=kind.name,
            fix="use another model, or add the block to megatron_rl/megatron/blocks",
        )
    return BUILDERS[kind.name]
