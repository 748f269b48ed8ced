"""Checkpoints that store all experts of a layer in one tensor, read and written as one tensor per expert.

Everything that trains or samples names the experts' tensors one by one, ``experts.3.gate_proj.weight``. A
`TensorLocation` locates such a tensor in the stored ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Shape = tuple[int, ...]

_STORED = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<matrix>gate_up_proj|down_proj)(?P<kind>_bias|_blocks|_scales|)$"
)
"""Name of one matrix, or bias, of all routed experts of a layer; of blocks and scales in 4 bits."""
BLOCKS = "_blocks"
"""End of the name of a matrix in mxfp4."""
SCALES = "_scales"
"""End of the name of its scales."""
_EXPERT = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.(?P<kind>weight|bias)$"
)
"""Name of one expert's tensor."""


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor of the model in a checkpoint: a complete stored tensor, or a part of one.

    Example: with experts of width 32 the up projection of expert 3 is
    ``TensorLocation("...experts.gate_up_proj", 3, 32, 64)``, or with alternating rows of gate and up
    ``TensorLocation("...experts.gate_up_proj", 3, 1, 64, step=2, transposed=True)``.
    """

    name: str
    """Name of the stored tensor."""
    expert: int | None = None
    """Index in its first dimension; None for a tensor that is not divided by experts."""
    begin: int = 0
    """First row of the part."""
    end: int = 0
    """Row after the part."""
    step: int = 1
    """Distance of two neighbouring rows of the part."""
    transposed: bool = False
    """The part is transposed: its rows are columns of the stored tensor."""
    blocks: bool = False
    """A row is stored in blocks of bytes, with two numbers of 4 bits in each (mxfp4)."""

    def shape(self, stored: Shape) -> Shape:
        """Return the shape of the part of a tensor of the shape ``stored``."""
        if self.expert is None:
            return stored
        rows = len(range(self.begin, self.end, self.step))
        if self.transposed:
            return (rows, stored[1])
        if self.blocks:
            return (rows, 2 * stored[2] * stored[3])
        return (rows, *stored[2:])

    def part(self, stored: Any) -> Any:
        """Return the part of a stored tensor, as a view."""
        if self.expert is None:
            return stored
        rows = stored[self.expert]
        if self.transposed:
            rows = rows.transpose(0, 1)
        return rows[self.begin : self.end : self.step]


def transposed_location(name: str, shape: Shape, interleaved: bool = True) -> TensorLocation:
    """Return the location at which one expert's tensor of this ``name`` and ``shape`` is stored.

    A matrix is stored as [experts, in, out]: with alternating outputs of gate and up if ``interleaved``, as
    gpt-oss has them, otherwise with all outputs of gate first, as Qwen3-VL-MoE has them.

    >>> transposed_location("model.layers.0.mlp.experts.3.up_proj.bias", (32,))
    TensorLocation(name='model.layers.0.mlp.experts.gate_up_proj_bias', expert=3, begin=1, end=64, step=2, \
transposed=False, blocks=False)
    """
    match = _EXPERT.match(name)
    if match is None:
        return TensorLocation(name)

    begin = 0
    end = shape[0]
    step = 1
    stored = "down_proj"
    if match["matrix"] != "down":
        stored = "gate_up_proj"
        is_up = match["matrix"] == "up"
        if interleaved:
            begin = int(is_up)
            end = shape[0] * 2
            step = 2
        elif is_up:
            begin = shape[0]
            end = shape[0] * 2

    transposed = match["kind"] == "weight"
    if not transposed:
        stored += "_bias"
    name = match["experts"] + stored
    return TensorLocation(name, int(match["expert"]), begin, end, step, transposed)


def stored_shapes(shapes: Mapping[str, Shape], interleaved: bool = True) -> dict[str, Shape]:
    """Return the shapes of the stored tensors (`transposed_location`) for those of ``shapes``, in order."""
    stored: dict[str, Shape] = {}
    for name, shape in shapes.items():
        location = transposed_location(name, shape, interleaved)
        if location.expert is None:
            stored[name] = shape
            continue

        # The last expert has the highest index.
        experts = location.expert + 1
        if location.transposed:
            stored[location.name] = (experts, shape[1], location.end)
        else:
            stored[location.name] = (experts, location.end)
    return stored


def expert_tensors(stored: str, shape: Shape, interleaved: bool = True) -> dict[str, TensorLocation]:
    """Return the tensors of the model in a stored one (`transposed_location`), with the location of each.

    A matrix in mxfp4 is stored as [experts, out, blocks of a row, bytes of a block]. Its scales are not
    a tensor of the model.

    >>> list(expert_tensors("model.layers.0.mlp.experts.down_proj", (2, 32, 64)))
    ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight']
    """
    match = _STORED.match(stored)
    if match is None:
        return {stored: TensorLocation(stored)}

    matrices = ("down_proj",)
    if match["matrix"] == "gate_up_proj":
        matrices = ("gate_proj", "up_proj")
    if match["kind"] == SCALES:
        return {}
    kind = "weight"
    if match["kind"] == "_bias":
        kind = "bias"
    blocks = match["kind"] == BLOCKS
    outputs = shape[1] if blocks else shape[-1]
    locations: dict[str, TensorLocation] = {}
    for expert in range(shape[0]):
        for matrix in matrices:
            name = f"{match['experts']}{expert}.{matrix}.{kind}"
            location = transposed_location(name, (outputs // len(matrices),), interleaved)
            if blocks:
                location = replace(location, name=stored, transposed=False, blocks=True)
            locations[name] = location
    return locations
