"""Checkpoints of NVIDIA's ModelOpt: FP8, NVFP4, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import refusals, workspace  # noqa: F401
from test_gpt_oss import number
from test_hf_logits import build
from torch import Tensor

from megatron_rl.check.configuration import check_config
from megatron_rl.check.engine.arguments import sampling_arguments
from megatron_rl.cli.check_text import report_text
from megatron_rl.config.load import load
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.pretrained import read_config, read_pretrained
from megatron_rl.shapes.quantized import read_quantization
from tests.hf_models import as_modelopt, in_nvfp4, save_model

pytestmark = pytest.mark.usefixtures("functions_load_once")


def by_entry(packed: Tensor, scales: Tensor, second: Tensor) -> Tensor:
    """Compute each weight of a matrix in NVFP4 in float64, one by one."""
    rows, size = packed.shape
    weights = torch.empty(rows, size * 2, dtype=torch.float64)
    for row in range(rows):
        for column in range(size * 2):
            byte = int(packed[row, column // 2])
            half = byte >> 4 if column % 2 else byte & 15
            weights[row, column] = number(half) * float(scales[row, column // 16]) * float(second)
    return weights


def save_matrix(path: Path, **tensors: Tensor) -> CheckpointFiles:
    """Save the tensors of a matrix in NVFP4 and open them."""
    path.mkdir(exist_ok=True)
    save_file({f"layer.{name}": value for name, value in tensors.items()}, path / "model.safetensors")
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return CheckpointFiles(path)


def test_every_box_of_a_matrix_in_nvfp4_has_the_scales_of_its_own_blocks(tmp_path: Path) -> None:
    """A rank's slice begins and ends anywhere in a block, and in a byte."""
    torch.manual_seed(0)
    tensors = in_nvfp4(torch.randn(5, 48) * torch.logspace(-3, 3, 48))
    named = {f"weight{end}": value for end, value in tensors.items()}
    files = save_matrix(tmp_path, **named, input_scale=torch.ones(()), bias=torch.ones(5))
    assert files.shapes() == {"layer.weight": (5, 48), "layer.bias": (5,)}
    assert files.is_quantized("layer.weight") and not files.is_quantized("layer.bias")
    expected = by_entry(*tensors.values())
    for start in ((0, 0), (1, 15), (3, 16), (2, 31), (4, 1)):
        for size in ((5 - start[0], 48 - start[1]), (1, 2), (1, 1), (0, 0)):
            box = files.read("layer.weight", start, size)
            wanted = expected[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
            assert box.dtype == torch.float32
            torch.testing.assert_close(box.double(), wanted, rtol=2e-7, atol=0)


def test_nvfp4_is_dequantised_as_vllm_does() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    packed, scales, second = in_nvfp4(torch.randn(6, 64, generator=torch.Generator().manual_seed(1))).values()
    theirs = utils.dequantize_to_dtype(packed, scales, second, torch.float32, swizzle=False)
    torch.testing.assert_close(by_entry(packed, scales, second).float(), theirs)


@pytest.mark.parametrize("second", [None, torch.ones(2)])
def test_a_matrix_in_nvfp4_needs_the_scale_of_the_whole_tensor(tmp_path: Path, second: Any) -> None:
    packed, scales, _ = in_nvfp4(torch.randn(2, 32)).values()
    tensors = {"weight": packed, "weight_scale": scales}
    if second is not None:
        tensors["weight_scale_2"] = second
    files = save_matrix(tmp_path, **tensors)
    with pytest.raises(UserError, match=r"layer\.weight has no scale of the whole tensor"):
        files.read("layer.weight", (0, 0), (1, 1))


@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ("FP8", "modelopt weights of 8 bits with a scale per tensor or row"),
        ("NVFP4", "NVFP4 weights of 4 bits with a scale per 16 entries and one per tensor"),
    ],
)
def test_check_reads_both_descriptions(
    algorithm: str,
    line: str,
    in_config: bool,
    workspace: Path,  # noqa: F811
) -> None:
    save_model("qwen3", workspace / "model", hidden_size=128)
    as_modelopt(workspace / "model", algorithm, in_config=in_config)
    assert refusals(workspace / "model") == []
    report = check_config(load("config.yaml", (f"model.path={workspace / 'model'}",)), 4, patience=0)
    assert not report.errors, report.errors
    text = report_text(report, "config.yaml", verbose=True)
    cache = "kv_cache_scheme" if in_config else "kv_cache_quant_algo FP8"
    assert f"{line} (the cache's {cache} is ignored), read as float32; exports are float32 too" in text


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_engines_and_exports_see_no_quantisation(family: str, algorithm: str, tmp_path: Path) -> None:
    plain = save_model(family, tmp_path / "model", hidden_size=128)
    as_modelopt(tmp_path / "model", algorithm, in_config=False)
    files = CheckpointFiles(tmp_path / "model")
    described = read_pretrained(tmp_path / "model/config.json")
    assert files.shapes() == {name: described.tensor_shapes()[name] for name in files.shapes()}
    assert files.names() == set(described.tensor_shapes())

    # vLLM finds the file beside config.json too, unless it is given the key.
    arguments = sampling_arguments(described, float32_head=False, dtype="bfloat16", max_model_len=8)
    assert arguments["hf_overrides"]["quantization_config"] is None

    # The plain engine has weights near the ones before.
    engine = TorchEngine.from_hf(tmp_path / "model")
    for name, parameter in engine.parameters().items():
        before = plain.state_dict()[name]
        step = 16 if algorithm == "FP8" else 6
        assert (parameter - before).abs().max() <= before.abs().max() / step, name

    # So has the model, whose export in bfloat16 is that of any checkpoint.
    model = build(read_hf_config(tmp_path / "model"))
    load_weights(model, tmp_path / "model")
    export_model(model, tmp_path / "out", tmp_path / "model", dtype=torch.bfloat16)
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert "quantization_config" not in read_config(tmp_path / "out/config.json")
    out = CheckpointFiles(tmp_path / "out")
    assert out.names() == files.names()
    for name, shape in files.shapes().items():
        origin = (0,) * len(shape)
        expected = files.read(name, origin, shape).bfloat16()
        assert torch.equal(out.read(name, origin, shape), expected), name


@pytest.mark.parametrize(
    "algorithm", ["NVFP4_AWQ", "W4A16_AWQ", "W4A8_NVFP4_FP8", "MXFP8", "FP8_PB_WO", "MIXED_PRECISION"]
)
def test_other_algorithms_are_refused_by_name(algorithm: str, workspace: Path) -> None:  # noqa: F811
    details = {"quantization": {"quant_algo": algorithm}, "producer": {"name": "modelopt"}}
    with pytest.raises(UserError, match="quantised in a way that cannot be read") as refused:
        read_quantization({"quantization_config": {"quant_method": "modelopt", **details}}, "x/config.json")
    assert refused.value.where == "x/hf_quant_config.json: quantization"
    assert refused.value.got == f"quant_algo: {algorithm}" and refused.value.fix
    assert "NVFP4" in str(refused.value.expected)

    save_model("qwen3", workspace / "model")
    (workspace / "model/hf_quant_config.json").write_text(json.dumps(details))
    (error,) = refusals(workspace / "model")
    assert "hf_quant_config.json" in error and f"quant_algo: {algorithm}" in error


@pytest.mark.parametrize("in_config", [True, False])
def test_a_model_without_an_algorithm_is_not_quantised(in_config: bool, workspace: Path) -> None:  # noqa: F811
    save_model("qwen3", workspace / "model")
    details = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    if in_config:
        config = json.loads((workspace / "model/config.json").read_text())
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None}
        (workspace / "model/config.json").write_text(json.dumps(config))
    else:
        producer = {"producer": {"name": "modelopt"}}
        (workspace / "model/hf_quant_config.json").write_text(json.dumps(details | producer))
    assert refusals(workspace / "model") == []
    assert read_quantization(read_config(workspace / "model/config.json")) is None
    assert TorchEngine.from_hf(workspace / "model").boxes()

    # A cache with scales needs an engine that reads them, and no algorithm is no answer at all.
    for settings in ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, {}):
        with pytest.raises(UserError, match="quant_algo: None"):
            read_quantization({"quantization_config": {"quant_method": "modelopt", **settings}})


def test_config_json_has_precedence_over_the_file(tmp_path: Path) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    quantization = read_quantization(read_config(tmp_path / "config.json"))
    assert quantization is not None and quantization.method == "modelopt" and not quantization.cache


@pytest.mark.parametrize(
    ("end", "change", "expected"),
    [
        ("_scale_2", None, "no scale of the whole tensor"),
        ("_scale_2", lambda scale: torch.ones(3), "[3] for a weight of"),
        ("_scale", lambda scales: scales[:, :-1].contiguous(), "do not belong to their weight"),
        ("", lambda weight: weight.short(), "in I16"),
        ("pre_quant_scale", lambda _: torch.ones(4), "pre_quant_scale"),
    ],
)
def test_check_names_tensors_that_do_not_fit(
    end: str,
    change: Any,
    expected: str,
    workspace: Path,  # noqa: F811
) -> None:
    save_model("qwen3", workspace / "model", hidden_size=128)
    as_modelopt(workspace / "model", "NVFP4", in_config=True)
    file = workspace / "model/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj." + (f"weight{end}" if end.startswith("_") or not end else end)
    value = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(value)
    save_file(tensors, file, metadata={"format": "pt"})
    (error,) = refusals(workspace / "model")
    assert expected in error
