"""Checkpoints with weights of 8 bits: what is read from them, and what no part of a run gets to see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_of_others
from config_workspace import SHAPE, write_model, write_workspace
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.check.configuration import check_config
from megatron_rl.check.engine.arguments import sampling_arguments
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.load import load
from megatron_rl.errors import UserError
from megatron_rl.hf.files import CheckpointFiles, copy_tensors
from megatron_rl.hf.weights import compute_fingerprint
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.pretrained import parse_pretrained, read_pretrained
from megatron_rl.shapes.quantized import Quantization, read_quantization
from megatron_rl.weights.boxes import view_of
from tests.hf_models import BLOCKS, in_eight_bits, quantise, save_model

PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def compressed(**changes: Any) -> dict[str, Any]:
    """Return a compressed-tensors' quantization_config, with ``changes`` of its weights."""
    return {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}}


def save(path: Path, config: dict[str, Any], **tensors: Tensor) -> CheckpointFiles:
    """Save the tensors of a layer with a quantization_config and open them."""
    save_file({f"layer.{name}": value for name, value in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return CheckpointFiles(path)


def by_entry(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply every entry with the scale of its block, one by one in float64."""
    product = weight.double()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            product[row, column] *= scales[row // block[0], column // block[1]].double()
    return product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_box_has_the_scales_of_its_own_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    """A rank's slice begins and ends anywhere in a block."""
    torch.manual_seed(0)
    block = (4, 6)
    weight, scales = in_eight_bits(torch.randn(11, 14) * torch.logspace(-3, 3, 14), block)
    scales = scales.to(dtype)
    config = BLOCKS | {"weight_block_size": list(block)}
    files = save(tmp_path, config, weight=weight, weight_scale_inv=scales, bias=torch.ones(11))
    assert files.shapes() == {"layer.weight": (11, 14), "layer.bias": (11,)}
    expected = by_entry(weight, scales, block)
    for first in range(12):
        for second in range(15):
            for rows, columns in ((11 - first, 14 - second), (min(3, 11 - first), min(5, 14 - second))):
                box = files.read("layer.weight", (first, second), (rows, columns))
                assert box.dtype == torch.float32
                wanted = expected[first : first + rows, second : second + columns]
                torch.testing.assert_close(box.double(), wanted, rtol=1e-7, atol=0)


def read(files: CheckpointFiles) -> Tensor:
    shape = files.shape("layer.weight")
    return files.read("layer.weight", (0,) * len(shape), shape)


@pytest.mark.parametrize(
    ("config", "name", "scales"),
    [
        (PER_TENSOR, "weight_scale", torch.tensor(0.25)),
        (PER_TENSOR, "weight_scale", torch.tensor([0.25])),
        (BLOCKS | {"weight_block_size": None}, "weight_scale_inv", torch.tensor(0.25)),
        (compressed(strategy="tensor"), "weight_scale", torch.tensor([0.25])),
        (compressed(), "weight_scale", torch.linspace(0.1, 2, 8)[:, None]),
        (compressed(strategy="block", block_structure=[4, 3]), "weight_scale", torch.rand(2, 2)),
    ],
)  # fmt: skip
def test_scales_of_tensors_rows_and_blocks_are_those_of_compressed_tensors(
    tmp_path: Path, config: dict[str, Any], name: str, scales: Tensor
) -> None:
    weight = torch.randn(8, 6).to(torch.float8_e4m3fn)
    unused = {"input_scale": torch.ones(1), "k_scale": torch.ones(1)}
    files = save(tmp_path, config, weight=weight, **{name: scales}, **unused)
    assert files.names() == {"layer.weight"}
    assert torch.equal(read(files), dequantize_of_others(weight, scales))


def test_scales_of_stacked_experts_and_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    weight = torch.randn(3, 5, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.25, 2, 8])
    assert torch.equal(
        read(save(tmp_path, PER_TENSOR, weight=weight, weight_scale=scales)),
        weight.float() * scales[:, None, None],
    )
    exponents = scales[:, None, None].to(torch.float8_e8m0fnu)
    config = BLOCKS | {"weight_block_size": [8, 8]}
    assert torch.equal(
        read(save(tmp_path, config, weight=weight, weight_scale_inv=exponents)),
        weight.float() * scales[:, None, None],
    )


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    weight = torch.zeros(8, 6, dtype=torch.float8_e4m3fn)
    files = save(tmp_path, compressed(), weight=weight, weight_scale=torch.ones(6))
    with pytest.raises(UserError, match=r"scales layer\.weight_scale do not belong"):
        read(files)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method: gptq"),
        ({"quant_method": "mxfp4"}, "quant_method: mxfp4"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt: e5m2"),
        (BLOCKS | {"weight_block_size": [128]}, "[128]"),
        (BLOCKS | {"weight_block_size": [128, 0]}, "[128, 0]"),
        (compressed(type="int"), "'int'"),
        (compressed(num_bits=4), "4"),
        (compressed(strategy="group"), "'group'"),
        (compressed(strategy="block", block_structure=None), "None"),
        (COMPRESSED, "no config_groups"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config"),
        ("fp8", "'fp8'"),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused(config: Any, got: str) -> None:
    with pytest.raises(UserError, match="quantised in a way that cannot be read") as refused:
        read_quantization({"quantization_config": config})
    assert got in str(refused.value.got)
    assert (refused.value.where or "").startswith("config.json: quantization_config")


def test_the_older_key_of_compressed_tensors_is_read_too() -> None:
    assert read_quantization({}) is read_quantization({"quantization_config": None}) is None
    assert read_quantization({"compression_config": compressed()}) == Quantization("compressed-tensors")


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_engines_and_exports_see_no_quantisation(family: str, tmp_path: Path) -> None:
    plain = save_model(family, tmp_path / "model")
    changes = {"weight_block_size": [32, 32]}
    quantise(tmp_path / "model", BLOCKS | changes)
    files = CheckpointFiles(tmp_path / "model")
    assert files.names() == set(read_pretrained(tmp_path / "model/config.json").tensor_shapes())

    # The config that models are built from, exports are written with, and vLLM is given.
    assert "quantization_config" not in read_hf_config(tmp_path / "model").to_dict()
    arguments = sampling_arguments(
        read_pretrained(tmp_path / "model/config.json"), float32_head=False, dtype="bfloat16", max_model_len=8
    )
    assert arguments["hf_overrides"]["quantization_config"] is None

    # The plain engine has the weights that the trainer reads, and they are near the ones before.
    engine = TorchEngine.from_hf(tmp_path / "model")
    boxes = {box.name: box for box in engine.boxes()}
    assert set(boxes) == files.names()
    for name, box in boxes.items():
        view = view_of(engine.parameters()[box.storage], box)
        assert torch.equal(view, files.read(name, box.start, box.size)), name
    for name, parameter in engine.parameters().items():
        before = plain.state_dict()[name]
        assert (parameter - before).abs().max() <= before.abs().max() / 16, name


def test_copies_are_in_the_dtype_of_the_export(tmp_path: Path) -> None:
    weight, scales = in_eight_bits(torch.randn(9, 7), (4, 4))
    config = BLOCKS | {"weight_block_size": [4, 4]}
    norm = torch.rand(9)
    files = save(tmp_path, config, weight=weight, weight_scale_inv=scales, norm=norm)
    count = copy_tensors(tmp_path, tmp_path / "copy", ["layer.weight", "layer.norm"], torch.bfloat16)
    copied = load_file(tmp_path / "copy")
    assert count == 9 * 7 * 2 + 9 * 4 and set(copied) == {"layer.weight", "layer.norm"}
    assert torch.equal(copied["layer.weight"], read(files).bfloat16())
    assert torch.equal(copied["layer.norm"], norm)


def test_a_fingerprint_is_that_of_the_weights_that_are_read(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    before = compute_fingerprint(tmp_path, torch.bfloat16)
    quantise(tmp_path)
    assert compute_fingerprint(tmp_path, torch.bfloat16) != before
    files = CheckpointFiles(tmp_path)
    dense = {name: files.read(name, (0,) * len(shape), shape) for name, shape in files.shapes().items()}
    quantised = compute_fingerprint(tmp_path, torch.bfloat16)

    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(dense, tmp_path / "model.safetensors")
    assert compute_fingerprint(tmp_path, torch.bfloat16) == quantised


def write_quantised(path: Path, change: Callable[[dict[str, Tensor]], object], config: Any = BLOCKS) -> None:
    """Write a model folder with quantised projections, after ``change`` of its tensors."""
    write_model(path)
    stored: dict[str, Tensor] = {}
    for name, shape in parse_pretrained(SHAPE).tensor_shapes().items():
        stored[name] = torch.zeros(shape, dtype=torch.bfloat16)
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"] = in_eight_bits(torch.ones(shape), (128, 128))
    change(stored)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": config}))


PROJECTION = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: None, None),
        (lambda stored: stored.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}), None),
        (
            lambda stored: stored.update({f"{PROJECTION}_scale_inv": torch.ones(3, 1)}),
            f"the scales {PROJECTION}_scale_inv do not belong",
        ),
        (lambda stored: stored.pop(f"{PROJECTION}_scale_inv"), "quantised in a way that cannot be read"),
        (
            lambda stored: stored.update({PROJECTION: torch.zeros(128, 384, dtype=torch.int8)}),
            "quantised in a way that cannot be read",
        ),
        (
            lambda stored: stored.update({PROJECTION: torch.zeros(128, 384)}),
            "the weights do not belong to the model",
        ),
    ],
)  # fmt: skip
def test_check_reads_the_headers_of_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str | None
) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "quantised", change)
    overrides = ["model.path=quantised", "model.dtype=bfloat16"]
    report = check_config(load("config.yaml", overrides), None)
    if message is not None:
        (error,) = report.errors
        assert message in error.message and error.where and error.fix
        return
    assert not report.errors, report.errors
    line = "quantised: fp8 weights of 8 bits with a scale per 128 x 128 entries, read as bfloat16"
    assert f"{line}; exports are bfloat16 too" in report_text(report, "config.yaml", verbose=True)


def test_weights_of_eight_bits_need_a_quantization_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_quantised(tmp_path / "quantised", lambda stored: None, None)
    (error,) = check_config(load("config.yaml", ["model.path=quantised"]), None).errors
    assert "cannot be read" in error.message and "quantization_config" in str(error.expected)
