"""Gemma 4: gradients, sizes of each layer, buffers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_families import refusals, refusals_with, workspace  # noqa: F401
from test_hf_logits import build

from megatron_rl.check.engine import arguments as engine_arguments
from megatron_rl.distributed import device
from megatron_rl.hf.export import export_model
from megatron_rl.hf.weights import load_weights, source_boxes
from megatron_rl.megatron.model import live_parameters
from megatron_rl.shapes.layout import ParallelLayout, engine_problems, trainer_problems
from megatron_rl.shapes.memory import rollout_parameters
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.published import load_presets, shape_of
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import view_of
from megatron_rl.weights.transfer import _Segment
from tests.hf_models import config_of, save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")

WINDOW = 8
LENGTHS = (3, WINDOW, WINDOW + 1, 37)
"""Rows that are shorter than the window, of its length, and longer."""
PUBLISHED = dict(load_presets()["gemma-4-31b"]["config"])
"""Sizes as published checkpoints of 31B write them."""
UNEVEN = {"head_dim": 32, "num_key_value_heads": 3}
"""Sizes of a layer with full attention and four query heads."""


def test_gradients_of_every_tensor_are_those_of_transformers(tmp_path: Path) -> None:
    reference = save_model("gemma4", tmp_path)
    model = build(reference.config)
    load_weights(model, tmp_path)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 131, (1, length), generator=generator) for length in LENGTHS]
    factors = [torch.randn(1, length, 131, generator=generator) for length in LENGTHS]

    (chunk,) = model.chunks
    cap = reference.config.final_logit_softcapping
    with device.megatron_mode():
        hidden = chunk(torch.cat(rows, dim=1), None, None, packed_seq_params=model.pack(list(LENGTHS)))
        logits = hidden.flatten(0, 1) @ chunk.shared_embedding_or_output_weight().T
        found = cap * torch.tanh(logits / cap)[:, :131]
        (found * torch.cat(factors, dim=1)[0]).sum().backward()
    expected = [reference(row).logits for row in rows]
    torch.testing.assert_close(found, torch.cat(expected, dim=1)[0], atol=1e-4, rtol=0)
    products = [(row * factor).sum() for row, factor in zip(expected, factors, strict=True)]
    torch.stack(products).sum().backward()

    parameters = dict(chunk.named_parameters())
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    seen: set[str] = set()
    for box in source_boxes(model):
        if box.name.endswith("layer_scalar"):
            continue
        gradient = parameters[box.storage.split(".", 1)[1]].grad
        part = wanted[box.name]
        assert gradient is not None and part is not None and part.any(), box.name
        for dim, (begin, count) in enumerate(zip(box.start, box.size, strict=True)):
            part = part.narrow(dim, begin, count)
        difference = (view_of(gradient, box) - part).norm() / part.norm()
        assert difference < 1e-4, (box.name, float(difference))
        seen.add(box.name)
    assert seen == set(wanted) - {"lm_head.weight"}


def test_scalars_of_layers_are_buffers_that_exports_have_bit_for_bit(tmp_path: Path) -> None:
    save_model("gemma4", tmp_path / "first")
    model = build(config_of("gemma4"))
    load_weights(model, tmp_path / "first")
    scalars = {name: value for name, value in live_parameters(model).items() if "layer_scalar" in name}
    (chunk,) = model.chunks
    assert len(scalars) == 4
    assert not any("layer_scalar" in name for name, _ in chunk.named_parameters())

    export_model(model, tmp_path / "second", tmp_path / "first")
    first = load_file(tmp_path / "first/model.safetensors")
    second = load_file(tmp_path / "second/model.safetensors")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_tensor_of_one_element_is_sent_as_its_bytes() -> None:
    """The stride of its only dimension is 0 in a box, as that of every dimension of size 1."""
    scalar = torch.tensor([3.0])
    view = view_of(scalar, TensorBox("layer_scalar", (0,), (1,), 0, "0", 0, (0,)))
    stored = _Segment((view,), torch.float32, 0).unstaged_bytes()
    assert stored is not None and stored.tolist() == scalar.view(torch.uint8).tolist()


def test_a_layer_is_described_with_its_own_heads(tmp_path: Path) -> None:
    """As transformers writes them by layer, and as they are published."""
    save_model("gemma4", tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in stored and "global_head_dim" not in stored
    by_layer = read_pretrained(tmp_path / "config.json").shape
    published = {key: value for key, value in stored.items() if key != "per_layer_config"}
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert shape_of(published, by_layer.name) == by_layer

    local, full = (by_layer.block(layer).mixer for layer in (0, 1))
    assert (local.key_size(by_layer), local.key_value_heads(by_layer)) == (16, 2)
    assert (full.key_size(by_layer), full.key_value_heads(by_layer)) == (32, 1)
    # A key and a value of each key-value head, in two layers of each kind.
    assert by_layer.kv_elements == 2 * 2 * (16 * 2 + 32 * 1)
    assert by_layer.kv_bytes_per_gpu(2, 1) == 2 * 2 * (16 + 32)


def test_parameters_of_the_published_sizes() -> None:
    shape = shape_of(PUBLISHED, "gemma-4-31b")
    assert round(shape.parameters / 1e9, 1) == 30.7
    assert shape.sliding_layers[:6] == (0, 1, 2, 3, 4, 6)
    # Global layers have no projection to values, so vLLM stores their keys twice.
    assert rollout_parameters(shape, 1) > shape.parameters


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size_per_layer_input": 16}, "per-layer embeddings"),
        ({"num_kv_shared_layers": 2}, "keys and values of an earlier layer"),
        ({"enable_moe_block": True, "num_experts": 4}, "layers with both an MLP and experts"),
        ({"num_experts": 4}, "layers with both an MLP and experts"),
        (
            {"per_layer_config": {"1": UNEVEN, "3": UNEVEN}},
            "key-value heads of a layer do not divide its query heads",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"per_layer_config": {"1": {"intermediate_size": 32}}}, "differ in intermediate_size"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "heads of different sizes"),
    ],
)
def test_other_models_of_the_family_are_refused_by_name(
    change: dict[str, Any],
    expected: str,
    workspace: Path,  # noqa: F811
) -> None:
    errors = refusals_with(workspace / "other", "gemma4", change)
    assert any(expected in error for error in errors), errors


def test_layouts_ask_every_kind_of_layer() -> None:
    shape = shape_of({**PUBLISHED, "num_attention_heads": 48, "num_global_key_value_heads": 3}, "odd")
    for problems in (trainer_problems, engine_problems):
        (error,) = problems(shape, ParallelLayout(tuple(range(4)), tensor=4))
        assert "3 key-value heads" in str(error)
    # Ranks share a key-value head of the layers with fewer of them.
    shape = shape_of(PUBLISHED, "even")
    assert trainer_problems(shape, ParallelLayout(tuple(range(8)), tensor=8)) == []


def test_check_asks_for_kernels_of_both_sizes_of_heads(
    workspace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model("gemma4", workspace / "model", head_dim=32, global_head_dim=48)
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: True)
    (error,) = refusals(workspace / "model")
    assert "a head size of 48" in error
