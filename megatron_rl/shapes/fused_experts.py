"""Checkpoints that store all experts of a layer in one tensor, read and written as one tensor per expert.

Trainer and engine have one name per expert, such as ``experts.3.gate_proj.weight``. A `TensorLocation`
locates the expert's tensor in a stored tensor, whose format a `FusedExperts` describes. Reshard plans refer
to the experts' tensors: in a stored tensor with alternating rows of gate and up, each row would be a separate
box.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Shape = tuple[int, ...]

_STORED_NAME = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<matrix>gate_up_proj|down_proj)(?P<kind>_bias|_blocks|_scales|)$"
)
"""Pattern of the names of fused tensors: a matrix or bias of all routed experts of a layer, or the blocks or
scales of a matrix in mxfp4."""
BLOCKS = "_blocks"
"""End of the name of a matrix that is stored in mxfp4 (numbers of 4 bits)."""
SCALES = "_scales"
"""End of the name of the scales of a matrix in mxfp4."""
_DIMENSIONS = {"": 3, "_bias": 2, BLOCKS: 4}
"""End of the name of a stored tensor -> its number of dimensions."""
_EXPERT_NAME = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.(?P<kind>weight|bias)$"
)
"""Pattern of the name of a tensor of one routed expert."""


@dataclass(frozen=True)
class FusedExperts:
    """Storage format of routed experts: one tensor per matrix with all experts of a layer.

    Example: ``FusedExperts(transposed=True, interleaved=True)`` for gpt-oss. ``FusedExperts()`` is the format
    of transformers' weights in memory.
    """

    transposed: bool = False
    """Whether matrices are [experts, in, out] instead of [experts, out, in]. Biases are always [experts,
    out]."""
    interleaved: bool = False
    """Whether outputs of gate and up alternate; otherwise all gate outputs come before all up outputs."""


@dataclass(frozen=True)
class TensorLocation:
    """Location of a model's tensor in a checkpoint: a complete stored tensor, or rows of one expert.

    Example: for experts of width 32, ``TensorLocation("...experts.gate_up_proj", 3, 32, 64)`` is the up
    projection of expert 3. If the rows of gate and up alternate, it is
    ``TensorLocation("...experts.gate_up_proj", 3, 1, 64, step=2, transposed=True)``.
    """

    name: str
    """Name of the stored tensor."""
    expert: int | None = None
    """Index of the expert in the first dimension; None for the complete stored tensor."""
    begin: int = 0
    """First row."""
    end: int = 0
    """Row after the last row."""
    step: int = 1
    """Distance between two successive rows."""
    transposed: bool = False
    """Whether rows of the located tensor are columns of the stored tensor."""
    blocks: bool = False
    """Whether a row is stored in blocks of mxfp4, with two 4-bit numbers in each byte."""

    def shape(self, stored_shape: Shape) -> Shape:
        """Return the shape of the model's tensor at this location, given the shape of the stored tensor."""
        if self.expert is None:
            return stored_shape
        rows = len(range(self.begin, self.end, self.step))
        if self.transposed:
            return (rows, stored_shape[1])
        # Blocks of mxfp4 are stored as [experts, rows, blocks, bytes], with two 4-bit numbers in each byte.
        if self.blocks:
            return (rows, 2 * stored_shape[2] * stored_shape[3])
        return (rows, *stored_shape[2:])

    def select_part(self, stored_tensor: Any) -> Any:
        """Return the located rows of ``stored_tensor``, as a view."""
        if self.expert is None:
            return stored_tensor
        rows = stored_tensor[self.expert]
        if self.transposed:
            rows = rows.transpose(0, 1)
        return rows[self.begin : self.end : self.step]


def expert_location(name: str, shape: Shape, expert_format: FusedExperts) -> TensorLocation:
    """Return the location of a model's tensor, of this name and shape, in a checkpoint with fused experts.

    A tensor outside of routed experts is stored under its own name.

    >>> gpt_oss = FusedExperts(transposed=True, interleaved=True)
    >>> expert_location("model.layers.0.mlp.experts.3.up_proj.bias", (32,), gpt_oss)
    TensorLocation(name='model.layers.0.mlp.experts.gate_up_proj_bias', expert=3, begin=1, end=64, step=2, \
transposed=False, blocks=False)
    """
    match = _EXPERT_NAME.match(name)
    if match is None:
        return TensorLocation(name)

    # Rows of the tensor: gate and up share a stored tensor, as even and odd rows or as two halves.
    begin = 0
    end = shape[0]
    step = 1
    stored_name = "down_proj"
    if match["matrix"] != "down":
        stored_name = "gate_up_proj"
        is_up = match["matrix"] == "up"
        if expert_format.interleaved:
            begin = int(is_up)
            end = shape[0] * 2
            step = 2
        elif is_up:
            begin = shape[0]
            end = shape[0] * 2

    # Biases are never transposed.
    transposed = expert_format.transposed
    if match["kind"] == "bias":
        stored_name += "_bias"
        transposed = False
    name = match["experts"] + stored_name
    return TensorLocation(name, int(match["expert"]), begin, end, step, transposed)


def stored_shapes(shapes: Mapping[str, Shape], expert_format: FusedExperts | None) -> dict[str, Shape]:
    """Convert the shapes of a model's tensors to the shapes of the stored tensors, in order.

    ``shapes`` has one tensor per expert; the result has one tensor for all experts of a layer (see
    `expert_location`). Without ``expert_format`` the checkpoint has one tensor per expert, and shapes are
    unchanged.
    """
    if expert_format is None:
        return dict(shapes)

    shape_by_stored_name: dict[str, Shape] = {}
    for name, shape in shapes.items():
        location = expert_location(name, shape, expert_format)
        if location.expert is None:
            shape_by_stored_name[name] = shape
            continue

        # Several tensors of ``shapes`` share a stored tensor. The last of these tensors determines the stored
        # shape: it belongs to the expert with the highest index, and in gate_up_proj the rows of up_proj end
        # after the rows of gate_proj.
        expert_count = location.expert + 1
        if location.transposed:
            shape_by_stored_name[location.name] = (expert_count, shape[1], location.end)
        else:
            shape_by_stored_name[location.name] = (expert_count, location.end, *shape[1:])
    return shape_by_stored_name


def expert_tensors(stored_name: str, shape: Shape, expert_format: FusedExperts) -> dict[str, TensorLocation]:
    """Return the model's tensors that a stored tensor contains: name -> location in the stored tensor.

    ``stored_name`` and ``shape`` describe the stored tensor. A tensor outside of routed experts is stored
    under its own name. A matrix in mxfp4 is stored as [experts, out, blocks of a row, bytes of a block]. Its
    scales are not a tensor of the model.

    >>> list(expert_tensors("model.layers.0.mlp.experts.down_proj", (2, 64, 32), FusedExperts()))
    ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight']
    """
    match = _STORED_NAME.match(stored_name)
    if match is not None and match["kind"] == SCALES:
        return {}
    if match is None or len(shape) != _DIMENSIONS[match["kind"]]:
        return {stored_name: TensorLocation(stored_name)}

    # The stored tensor contains the weights or the biases of one or two matrices of each expert.
    matrices = ("down_proj",)
    if match["matrix"] == "gate_up_proj":
        matrices = ("gate_proj", "up_proj")
    parameter = "weight"
    if match["kind"] == "_bias":
        parameter = "bias"

    # Blocks of mxfp4 are never transposed.
    is_blocks = match["kind"] == BLOCKS
    if is_blocks:
        expert_format = replace(expert_format, transposed=False)
    num_outputs = shape[1]
    if expert_format.transposed and parameter == "weight":
        num_outputs = shape[2]

    locations: dict[str, TensorLocation] = {}
    for expert in range(shape[0]):
        for matrix in matrices:
            name = f"{match['experts']}{expert}.{matrix}.{parameter}"
            location = expert_location(name, (num_outputs // len(matrices),), expert_format)
            locations[name] = replace(location, name=stored_name, blocks=is_blocks)
    return locations


def locate_tensors(
    stored_names: Mapping[str, str],
    shape_of: Callable[[str], Shape],
    expert_format: FusedExperts | None,
    hidden: int,
) -> dict[str, TensorLocation]:
    """Return the location of each tensor of a model in its checkpoint.

    ``stored_names`` maps names without the prefix of a multimodal checkpoint to stored names. ``shape_of``
    returns the shape of a stored tensor. ``expert_format`` is the family's storage format of experts.
    With None the format is detected from the shapes of fused tensors and from ``hidden``, the width of the
    model.

    >>> names = {"model.norm.weight": "model.language_model.norm.weight"}
    >>> shapes = {"model.language_model.norm.weight": (8,)}
    >>> locate_tensors(names, shapes.__getitem__, None, 8)["model.norm.weight"].name
    'model.language_model.norm.weight'
    """
    locations: dict[str, TensorLocation] = {}
    fused_names: list[str] = []
    for name, stored_name in stored_names.items():
        if _STORED_NAME.match(name):
            fused_names.append(name)
        else:
            locations[name] = TensorLocation(stored_name)

    if expert_format is None:
        fused_shapes = {name: shape_of(stored_names[name]) for name in fused_names}
        expert_format = _detect_expert_format(fused_shapes, hidden)
    for name in fused_names:
        stored_name = stored_names[name]
        for tensor_name, location in expert_tensors(name, shape_of(stored_name), expert_format).items():
            locations[tensor_name] = replace(location, name=stored_name)
    return locations


def _detect_expert_format(shapes: Mapping[str, Shape], hidden: int) -> FusedExperts:
    """Detect from the shapes of fused tensors whether a checkpoint stores the matrices of experts transposed.

    Shapes do not show whether the rows of gate and up are interleaved: they are assumed to be concatenated.
    ``shapes``: name of a fused tensor -> its shape. ``hidden``: width of the model.
    """
    for name, shape in shapes.items():
        # Skip tensors other than a matrix per expert. Also skip square matrices, whose shape does not show a
        # transposition; if gate and up together are square, down is not.
        if len(shape) != 3 or shape[1] == shape[2]:
            continue

        # Outputs of down, and inputs of gate and up, have the width of the model.
        hidden_dim = 2
        if name.endswith("down_proj"):
            hidden_dim = 1
        return FusedExperts(transposed=shape[hidden_dim] != hidden)
    return FusedExperts()
