"""gpt-oss: gradients, experts that are stored in one tensor of a layer, mxfp4, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import refusals, refusals_with, workspace  # noqa: F401
from test_hf_logits import build, logits
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.check.configuration import check_config
from megatron_rl.check.engine import arguments as engine_arguments
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.load import load
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights, source_boxes
from megatron_rl.megatron.model import live_parameters
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.accelerator import AcceleratedRole
from megatron_rl.shapes.fused_experts import FusedExperts, expert_location, expert_tensors, stored_shapes
from megatron_rl.shapes.layout import ParallelLayout, engine_problems, trainer_problems
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.published import shape_of
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import split_expert_boxes, view_of
from megatron_rl.weights.trace import CopyRecorder, TraceError
from tests.hf_models import in_four_bits, make_model, save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")

WINDOW = 8
FORM = FusedExperts(transposed=True, interleaved=True)
LENGTHS = (3, WINDOW, WINDOW + 1, 37)
"""Rows that are shorter than the window, of its length, and longer."""


def test_gradients_of_every_tensor_are_those_of_transformers(tmp_path: Path) -> None:
    reference = save_model("gpt-oss", tmp_path)
    model = build(reference.config)
    load_weights(model, tmp_path)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 131, (1, length), generator=generator) for length in LENGTHS]
    factors = [torch.randn(1, length, 131, generator=generator) for length in LENGTHS]

    (chunk,) = model.chunks
    with device.megatron_mode():
        hidden = chunk(torch.cat(rows, dim=1), None, None, packed_seq_params=model.pack(list(LENGTHS)))
        found = (hidden.flatten(0, 1) @ chunk.output_layer.weight.T)[:, :131]
        (found * torch.cat(factors, dim=1)[0]).sum().backward()
    expected = [reference(row).logits for row in rows]
    torch.testing.assert_close(found, torch.cat(expected, dim=1)[0], atol=1e-4, rtol=0)
    torch.stack(
        [(row * factor).sum() for row, factor in zip(expected, factors, strict=True)]
    ).sum().backward()

    wanted: dict[str, Tensor] = {}
    for stored, parameter in reference.named_parameters():
        for name, location in expert_tensors(stored, tuple(parameter.shape), FORM).items():
            assert parameter.grad is not None, name
            wanted[name] = location.select_part(parameter.grad)

    parameters = dict(chunk.named_parameters())
    seen: set[str] = set()
    for box in source_boxes(model):
        gradient = parameters[box.storage.split(".", 1)[1]].grad
        assert gradient is not None and wanted[box.name].any(), box.name
        part = wanted[box.name]
        for dim, (begin, count) in enumerate(zip(box.start, box.size, strict=True)):
            part = part.narrow(dim, begin, count)
        difference = (view_of(gradient, box) - part).norm() / part.norm()
        assert difference < 1e-4, (box.name, float(difference))
        seen.add(box.name)
    assert seen == set(wanted)


def pieces(shape: tuple[int, ...], form: FusedExperts) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield starts and sizes of boxes that begin and end with gate and with up, if these alternate."""
    rows = shape[-1] if form.transposed else shape[1]
    some = ((1, rows - 2), (2, 3), (3, 1)) if form.interleaved else ()
    for experts in ((0, 3), (1, 1)):
        for outputs in ((0, rows), *some):
            dims = [outputs] if len(shape) == 2 else [outputs, (1, 2)]
            if form.transposed:
                dims.reverse()
            begins, counts = zip(experts, *dims, strict=True)
            yield begins, counts


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("matrix", "shape"),
    [("gate_up_proj", (3, 5, 8)), ("gate_up_proj_bias", (3, 8)), ("down_proj", (3, 4, 6))],
)
def test_boxes_of_stored_tensors_are_those_of_each_expert(
    matrix: str, shape: tuple[int, ...], transposed: bool, interleaved: bool
) -> None:
    form = FusedExperts(transposed, interleaved)
    if not transposed and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])
    name = f"model.layers.0.mlp.experts.{matrix}"
    stored = torch.arange(torch.Size(shape).numel()).view(shape)
    locations = expert_tensors(name, shape, form)
    shapes = {own: location.shape(shape) for own, location in locations.items()}
    assert {own: expert_location(own, size, form) for own, size in shapes.items()} == locations
    assert stored_shapes(shapes, form) == {name: shape} and stored_shapes(shapes, None) == shapes
    for start, size in pieces(shape, form):
        box = stored[tuple(slice(b, b + c) for b, c in zip(start, size, strict=True))]
        storage = box.transpose(-1, -2).contiguous()
        stride = (storage.stride()[0], *reversed(storage.stride()[1:]))
        if len(shape) == 2:
            storage = box.contiguous()
            stride = tuple(storage.stride())
        found: list[int] = []
        for part in split_expert_boxes([TensorBox(name, start, size, 0, "w", 0, stride)], form):
            values = locations[part.name].select_part(stored)
            for dim, (begin, count) in enumerate(zip(part.start, part.size, strict=True)):
                values = values.narrow(dim, begin, count)
            assert torch.equal(view_of(storage, part), values), part
            found += values.flatten().tolist()
        assert sorted(found) == sorted(box.flatten().tolist())


def test_a_source_that_a_loader_sets_to_zero_fills_no_box() -> None:
    """vLLM's loader of gpt-oss does so on ranks after the first, with biases that are summed over ranks."""
    sources = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(2, 3, device="meta")}
    targets = {"v": torch.empty(2, 3, device="meta"), "w": torch.empty(2, 3, device="meta")}
    recorder = CopyRecorder(sources, targets, rank=0)
    with recorder:
        sources["a"].zero_()
        targets["v"].copy_(sources["a"])
        targets["w"].copy_(sources["b"])
        with pytest.raises(TraceError, match="a part of 'b'"):
            sources["b"][0].zero_()
    assert recorder.zeroed == {"v"}
    assert [(box.name, box.storage) for box in recorder.boxes] == [("b", "w")]


def number(bits: int) -> float:
    """Return the value of a number of 4 bits: sign, exponent of two bits with a bias of 1, mantissa."""
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def by_entry(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute each weight of a matrix in mxfp4, [rows, columns] float64, one by one."""
    rows, groups, size = blocks.shape
    weights = torch.empty(rows, groups * size * 2, dtype=torch.float64)
    for row in range(rows):
        for column in range(weights.shape[1]):
            group, place = divmod(column, 32)
            byte = int(blocks[row, group, place // 2])
            half = byte >> 4 if place % 2 else byte & 15
            weights[row, column] = number(half) * 2.0 ** (int(scales[row, group]) - 127)
    return weights


def test_every_box_of_a_matrix_in_four_bits_is_that_of_its_authors(tmp_path: Path) -> None:
    """A rank's slice begins and ends anywhere in a block."""
    save_model("gpt-oss", tmp_path, num_hidden_layers=1)
    in_four_bits(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    prefix = "model.layers.0.mlp.experts."
    assert not [name for name in files.names() if name.endswith(("_blocks", "_scales"))]

    for matrix, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks, scales = (stored[f"{prefix}{matrix}{end}"] for end in ("_blocks", "_scales"))
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        for index, name in enumerate(names):
            expected = by_entry(blocks[1, index :: len(names)], scales[1, index :: len(names)])
            tensor = f"{prefix}1.{name}.weight"
            assert files.is_quantized(tensor) and files.shape(tensor) == tuple(expected.shape)
            assert torch.equal(expected, theirs[1, index :: len(names)].double())
            rows, columns = expected.shape
            for start in ((0, 0), (1, 31), (3, 32), (2, 17)):
                for size in ((rows - start[0], columns - start[1]), (2, 3), (1, 16), (0, 0)):
                    box = files.read(tensor, start, size)
                    wanted = expected[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
                    assert box.dtype == torch.float32 and torch.equal(box.double(), wanted)


def test_four_bits_are_trained_as_transformers_reads_them_and_exported_in_the_models_dtype(
    tmp_path: Path,
) -> None:
    save_model("gpt-oss", tmp_path / "first")
    in_four_bits(tmp_path / "first")
    # transformers makes the experts bfloat16, whatever dtype is asked for.
    reference: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "first",
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
    ).float()
    model = build(read_hf_config(tmp_path / "first"))
    load_weights(model, tmp_path / "first")
    rows = torch.randint(0, 131, (3, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(rows).logits.flatten(0, 1)
    torch.testing.assert_close(logits(model, rows)[:, :131], expected, atol=1e-4, rtol=0)

    # The plain engine has the same weights.
    engine = TorchEngine.from_hf(tmp_path / "first")
    weights = dict(reference.named_parameters())
    for name, parameter in engine.parameters().items():
        assert torch.equal(parameter, weights[name].data), name

    # Values of 4 bits and their scales are exact in bfloat16.
    export_model(model, tmp_path / "second", tmp_path / "first", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "second/config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "second", dtype="auto", output_loading_info=True
    )
    assert not any(told.values()), told
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.float(), weights[name].bfloat16().float()), name
        exact = torch.equal(parameter.float(), weights[name])
        assert exact or not name.endswith("experts.down_proj"), name


def test_check_says_that_four_bits_are_read(workspace: Path) -> None:  # noqa: F811
    save_model("gpt-oss", workspace / "four")
    in_four_bits(workspace / "four")
    assert refusals(workspace / "four") == []
    overrides = (
        f"model.path={workspace / 'four'}",
        "rollout.engine=torch",
        "rollout.tensor=1",
        "model.dtype=bfloat16",
    )
    report = check_config(load("config.yaml", overrides), 4, patience=0)
    line = "mxfp4 weights of 4 bits with a scale per 32 entries, read as bfloat16; exports are bfloat16 too"
    assert line in report_text(report, "config.yaml", verbose=True)


@pytest.mark.parametrize(
    ("end", "change", "expected"),
    [
        ("_scales", None, "no scales"),
        ("_scales", lambda scales: scales[:, :-1].contiguous(), "with scales [4, 191, 2]"),
        ("_blocks", lambda blocks: blocks.short(), "in I16"),
    ],
)
def test_blocks_without_their_scales_are_named(
    end: str,
    change: Any,
    expected: str,
    workspace: Path,  # noqa: F811
) -> None:
    save_model("gpt-oss", workspace / "four")
    in_four_bits(workspace / "four")
    file = workspace / "four/model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.mlp.experts.gate_up_proj{end}"
    tensors[name] = tensors.pop(name) if change is None else change(tensors[name])
    if change is None:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    (error,) = refusals(workspace / "four")
    assert "gate_up_proj_blocks" in error and expected in error
    if change is None:
        with pytest.raises(UserError, match="no scales"):
            CheckpointFiles(workspace / "four").read(
                "model.layers.0.mlp.experts.0.up_proj.weight", (0, 0), (1, 1)
            )


def test_four_bits_need_a_quantization_config(workspace: Path) -> None:  # noqa: F811
    save_model("gpt-oss", workspace / "four")
    in_four_bits(workspace / "four")
    config = json.loads((workspace / "four/config.json").read_text())
    del config["quantization_config"]
    (workspace / "four/config.json").write_text(json.dumps(config))
    (error,) = refusals(workspace / "four")
    assert "proj_blocks in U8" in error


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"swiglu_limit": 5.0}, "swiglu_limit"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"attention_bias": False}, "attention_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "YaRN"),
    ],
)
def test_values_that_the_engine_would_compute_differently_are_refused(
    change: dict[str, Any],
    expected: str,
    workspace: Path,  # noqa: F811
) -> None:
    errors = refusals_with(workspace / "other", "gpt-oss", change)
    assert any(expected in error for error in errors), errors


def test_layouts_that_megatron_and_vllm_do_not_have_are_refused(tmp_path: Path) -> None:
    make_model("gpt-oss").config.save_pretrained(tmp_path)
    shape = read_pretrained(tmp_path / "config.json").shape
    sharded = ParallelLayout((0, 1), tensor=2, expert_tensor=2)
    assert any("experts with biases" in str(error) for error in trainer_problems(shape, sharded))
    (error,) = engine_problems(shape, ParallelLayout((0, 1, 2, 3), tensor=4))
    assert "at most 2" in str(error)
    assert engine_problems(shape, ParallelLayout((0, 1), tensor=2)) == []


def test_check_names_what_vllm_lacks_on_a_host_and_adapters(
    workspace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model("gpt-oss", workspace / "model", head_dim=32)
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: True)
    (error,) = refusals(workspace / "model")
    assert "multiples of 32" in error and "64 and 48" in error
    overrides = (f"model.path={workspace / 'model'}", "rollout.engine=torch", "actor.lora.rank=8")
    report = check_config(load("config.yaml", overrides), 4, patience=0)
    assert any("cannot have adapters" in str(error) for error in report.errors), report.errors


def test_parameters_of_the_published_sizes() -> None:
    """The totals of the models' card (arXiv 2508.10925, table 1)."""
    published = {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
    }
    rope = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0}
    common = published | {"num_attention_heads": 64, "num_key_value_heads": 8, "rope_parameters": rope}
    small = shape_of(common | {"num_hidden_layers": 24, "num_local_experts": 32}, "gpt-oss-20b")
    large = shape_of(common | {"num_hidden_layers": 36, "num_local_experts": 128}, "gpt-oss-120b")
    assert round(small.parameters / 1e9, 2) == 20.91 and round(large.parameters / 1e9, 2) == 116.83


def test_sinks_are_parameters_under_megatrons_name_and_need_torchs_attention() -> None:
    model = build(make_model("gpt-oss").config)
    sinks = [name for name in live_parameters(model) if name.endswith("core_attention.softmax_offset")]
    assert len(sinks) == 4

    # Transformer Engine's kernels take the same heads of a model without sinks.
    shape = model.spec.model.shape
    with_sinks = AcceleratedRole(shape, ParallelLayout((0,)), fused=True, half_precision=True)
    without = replace(with_sinks, shape=replace(shape, sinks=False))
    assert (with_sinks.attention_kernel, without.attention_kernel) == ("torch", "fused")
