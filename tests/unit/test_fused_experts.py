"""Checkpoints of text-only models that store all experts of a layer in one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import refusals, workspace  # noqa: F401
from torch import Tensor

from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.shapes.families import FAMILIES as TABLE
from megatron_rl.shapes.fused_experts import FusedExperts, expert_location, stored_shapes
from megatron_rl.shapes.multimodal import MULTIMODAL
from tests.hf_models import save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")


def fuse(file: Path, form: FusedExperts) -> None:
    """Store the experts of a checkpoint's layers in one tensor each."""
    tensors = load_file(file)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fused: dict[str, Tensor] = {}
    for name, shape in stored_shapes(shapes, form).items():
        fused[name] = torch.empty(shape)
    for name, tensor in tensors.items():
        location = expert_location(name, shapes[name], form)
        location.select_part(fused[location.name]).copy_(tensor)
    assert len(fused) < len(tensors)
    save_file(fused, file, metadata={"format": "pt"})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3-moe", {}),
        ("deepseek-v3", {}),
        # Square matrices, of gate and up together or of down.
        ("qwen3-moe", {"hidden_size": 64, "moe_intermediate_size": 32}),
        ("qwen3-moe", {"hidden_size": 64, "moe_intermediate_size": 64}),
    ],
)
def test_experts_in_one_tensor_are_read_in_any_family(
    family: str,
    sizes: dict[str, int],
    transposed: bool,
    workspace: Path,  # noqa: F811
) -> None:
    for folder in ("single", "fused"):
        save_model(family, workspace / folder, **sizes)
    fuse(workspace / "fused/model.safetensors", FusedExperts(transposed))
    assert refusals(workspace / "fused") == []

    single, fused = (CheckpointFiles(workspace / folder) for folder in ("single", "fused"))
    assert fused.shapes() == {name: single.shape(name) for name in fused.shapes()}
    assert fused.names() == single.names()
    for name, shape in single.shapes().items():
        # A slice of rows that does not begin with the first one.
        start = [min(3, size - 1) for size in shape]
        size = [size - begin for size, begin in zip(shape, start, strict=True)]
        assert torch.equal(fused.read(name, start, size), single.read(name, start, size)), name


def test_a_tensor_of_all_experts_without_their_dimension_is_named(workspace: Path) -> None:  # noqa: F811
    save_model("qwen3-moe", workspace / "fused")
    file = workspace / "fused/model.safetensors"
    fuse(file, FusedExperts())
    tensors = load_file(file)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][0].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    (error,) = refusals(workspace / "fused")
    assert "missing" in error and f"unexpected {name}" in error


def test_the_form_of_each_family_is_data() -> None:
    forms = {family.model_type: family.fused_experts for family in TABLE.values() if family.fused_experts}
    assert forms == {"gpt_oss": FusedExperts(transposed=True, interleaved=True)}
    kinds = {kind.model_type: kind.fused_experts for kind in MULTIMODAL.values() if kind.fused_experts}
    assert kinds == {"qwen3_vl_moe": FusedExperts(transposed=True)}
