"""Checkpoints that store all experts of a layer in one tensor, read and written as one tensor per expert.

Everything that trains or samples names the experts' tensors one by one, ``experts.3.gate_proj.weight``. A
`TensorLocation` locates such a tensor in the stored ones, which have the form of a `FusedExperts`. Boxes are
those of the experts' tensors, since alternating rows of a stored tensor would be a box each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Shape = tuple[int, ...]

_STORED = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<matrix>gate_up_proj|down_proj)(?P<kind>_bias|_blocks|_scales|)$"
)
"""Pattern of the name of a stored matrix or bias of all routed experts of a layer, or of its 4-bit blocks or
scales."""
BLOCKS = "_blocks"
"""End of the name of a matrix that is stored in mxfp4 (numbers of 4 bits)."""
SCALES = "_scales"
"""End of the name of the scales of a matrix in mxfp4."""
_DIMENSIONS = {"": 3, "_bias": 2, BLOCKS: 4}
"""Kind of a stored tensor by the end of its name -> number of its dimensions."""
_EXPERT = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.(?P<kind>weight|bias)$"
)
"""Pattern of the name of a tensor of one routed expert."""


@dataclass(frozen=True)
class FusedExperts:
    """Form of checkpoints that store each matrix of a layer's routed experts in one tensor.

    Example: ``FusedExperts(transposed=True, interleaved=True)`` for gpt-oss. ``FusedExperts()`` is the form
    in which transformers has the weights in memory.
    """

    transposed: bool = False
    """Whether matrices are [experts, in, out] instead of [experts, out, in]. Biases are always [experts,
    out]."""
    interleaved: bool = False
    """Whether outputs of gate and up alternate; otherwise all outputs of the gate come before those of up."""


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
    """Row after the last row of the part."""
    step: int = 1
    """Distance of two neighbouring rows of the part."""
    transposed: bool = False
    """Whether the part is transposed: its rows are columns of the stored tensor."""
    blocks: bool = False
    """Whether a row is stored in blocks of bytes, with two numbers of 4 bits in each (mxfp4)."""

    def shape(self, stored_shape: Shape) -> Shape:
        """Return the shape of the located part of a stored tensor with the shape ``stored_shape``."""
        if self.expert is None:
            return stored_shape
        rows = len(range(self.begin, self.end, self.step))
        if self.transposed:
            return (rows, stored_shape[1])
        if self.blocks:
            return (rows, 2 * stored_shape[2] * stored_shape[3])
        return (rows, *stored_shape[2:])

    def select_part(self, stored_tensor: Any) -> Any:
        """Return the located part of ``stored_tensor``, as a view."""
        if self.expert is None:
            return stored_tensor
        rows = stored_tensor[self.expert]
        if self.transposed:
            rows = rows.transpose(0, 1)
        return rows[self.begin : self.end : self.step]


def expert_location(name: str, shape: Shape, form: FusedExperts) -> TensorLocation:
    """Return the location at which a checkpoint stores the tensor of this ``name`` and ``shape``.

    A tensor outside of routed experts is stored as it is.

    >>> form = FusedExperts(transposed=True, interleaved=True)
    >>> expert_location("model.layers.0.mlp.experts.3.up_proj.bias", (32,), form)
    TensorLocation(name='model.layers.0.mlp.experts.gate_up_proj_bias', expert=3, begin=1, end=64, step=2, \
transposed=False, blocks=False)
    """
    match = _EXPERT.match(name)
    if match is None:
        return TensorLocation(name)

    begin = 0
    end = shape[0]
    step = 1
    stored_name = "down_proj"
    if match["matrix"] != "down":
        stored_name = "gate_up_proj"
        is_up = match["matrix"] == "up"
        if form.interleaved:
            begin = int(is_up)
            end = shape[0] * 2
            step = 2
        elif is_up:
            begin = shape[0]
            end = shape[0] * 2

    transposed = form.transposed
    if match["kind"] == "bias":
        stored_name += "_bias"
        transposed = False
    name = match["experts"] + stored_name
    return TensorLocation(name, int(match["expert"]), begin, end, step, transposed)


def stored_shapes(shapes: Mapping[str, Shape], form: FusedExperts | None) -> dict[str, Shape]:
    """Return the shapes of the tensors that a checkpoint stores, in order, from those of the model's tensors.

    ``shapes`` have an entry per expert; in the result all experts of a layer are one tensor (see
    `expert_location`). ``form`` is None for a checkpoint with a tensor per expert, whose shapes are equal.
    """
    if form is None:
        return dict(shapes)

    shape_by_stored_name: dict[str, Shape] = {}
    for name, shape in shapes.items():
        location = expert_location(name, shape, form)
        if location.expert is None:
            shape_by_stored_name[name] = shape
            continue

        # The last expert has the highest index, and up ends after gate.
        expert_count = location.expert + 1
        if location.transposed:
            shape_by_stored_name[location.name] = (expert_count, shape[1], location.end)
        else:
            shape_by_stored_name[location.name] = (expert_count, location.end, *shape[1:])
    return shape_by_stored_name


def expert_tensors(stored_name: str, shape: Shape, form: FusedExperts) -> dict[str, TensorLocation]:
    """Return the tensors of the model that a stored tensor contains: name -> location in the stored one.

    ``stored_name`` and ``shape`` are those of the stored tensor. A tensor outside of routed experts is stored
    as it is. A matrix in mxfp4 is stored as [experts, out, blocks of a row, bytes of a block]. Its scales are
    not a tensor of the model.

    >>> list(expert_tensors("model.layers.0.mlp.experts.down_proj", (2, 64, 32), FusedExperts()))
    ['model.layers.0.mlp.experts.0.down_proj.weight', 'model.layers.0.mlp.experts.1.down_proj.weight']
    """
    match = _STORED.match(stored_name)
    if match is not None and match["kind"] == SCALES:
        return {}
    if match is None or len(shape) != _DIMENSIONS[match["kind"]]:
        return {stored_name: TensorLocation(stored_name)}

    matrices = ("down_proj",)
    if match["matrix"] == "gate_up_proj":
        matrices = ("gate_proj", "up_proj")
    kind = "weight"
    if match["kind"] == "_bias":
        kind = "bias"
    is_blocks = match["kind"] == BLOCKS
    if is_blocks:
        form = replace(form, transposed=False)
    outputs = shape[1]
    if form.transposed and kind == "weight":
        outputs = shape[2]

    locations: dict[str, TensorLocation] = {}
    for expert in range(shape[0]):
        for matrix in matrices:
            name = f"{match['experts']}{expert}.{matrix}.{kind}"
            location = expert_location(name, (outputs // len(matrices),), form)
            locations[name] = replace(location, name=stored_name, blocks=is_blocks)
    return locations


def locate_tensors(
    stored_names: Mapping[str, str],
    shape_of: Callable[[str], Shape],
    form: FusedExperts | None,
    hidden: int,
) -> dict[str, TensorLocation]:
    """Return the location of each tensor of a model in the tensors of its checkpoint.

    ``stored_names`` maps the names of tensors, without the prefix of a multimodal checkpoint, to their stored
    names, and ``shape_of`` returns the shape of a stored one. ``form`` is the form in which the family's
    checkpoints store experts. If it is None, it is detected from the shapes of tensors with all experts and
    from ``hidden``, the width of the model.

    >>> names = {"model.norm.weight": "model.language_model.norm.weight"}
    >>> shapes = {"model.language_model.norm.weight": (8,)}
    >>> locate_tensors(names, shapes.__getitem__, None, 8)["model.norm.weight"].name
    'model.language_model.norm.weight'
    """
    locations: dict[str, TensorLocation] = {}
    fused_names: list[str] = []
    for name, stored_name in stored_names.items():
        if _STORED.match(name):
            fused_names.append(name)
        else:
            locations[name] = TensorLocation(stored_name)

    if form is None:
        form = _detect_form({name: shape_of(stored_names[name]) for name in fused_names}, hidden)
    for name in fused_names:
        stored_name = stored_names[name]
        for tensor_name, location in expert_tensors(name, shape_of(stored_name), form).items():
            locations[tensor_name] = replace(location, name=stored_name)
    return locations


def _detect_form(shapes: Mapping[str, Shape], hidden: int) -> FusedExperts:
    """Return the form in which a checkpoint stores experts, detected from the shapes of their matrices.

    The shapes show whether matrices are transposed; outputs of gate and up are assumed not to alternate.
    ``shapes``: name of a tensor with all experts -> its shape. ``hidden``: width of the model.
    """
    for name, shape in shapes.items():
        # A square matrix does not show whether it is transposed. The layer's other matrix does, since it is
        # half or twice as wide.
        if len(shape) != 3 or shape[1] == shape[2]:
            continue

        # Outputs of down, and inputs of gate and up, have the width of the model.
        hidden_dim = 2
        if name.endswith("down_proj"):
            hidden_dim = 1
        return FusedExperts(transposed=shape[hidden_dim] != hidden)
    return FusedExperts()
