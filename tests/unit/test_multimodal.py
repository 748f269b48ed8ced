"""The language models of multimodal checkpoints: read, computed, and exported with the other parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import refusals, workspace  # noqa: F401
from test_hf_logits import build, logits

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.model import live_parameters
from megatron_rl.megatron.model_spec import describe_model, read_hf_config
from megatron_rl.shapes.multimodal import is_outside_language_model
from megatron_rl.shapes.pretrained import parse_pretrained, read_pretrained
from megatron_rl.shapes.published import shape_of
from tests.hf_models import MULTIMODAL, save_multimodal, transpose_experts

pytestmark = pytest.mark.usefixtures("functions_load_once")

GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "patch_size": 14},
}
"""Gemma 3 of 4B as it is published: most of the language model's values are transformers' defaults."""
QWEN_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vocab_size": 152064,
}
"""Qwen2.5-VL of 7B as it is published: no nested config of the language model."""


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder by their stored names."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_multimodal_checkpoint_is_trained_as_its_language_model(name: str, tmp_path: Path) -> None:
    reference = save_multimodal(name, tmp_path / "first")
    hf_config = read_hf_config(tmp_path / "first")
    model = build(hf_config)
    assert read_pretrained(tmp_path / "first/config.json").shape == describe_model(hf_config).shape
    load_weights(model, tmp_path / "first")

    rows = torch.randint(0, 120, (3, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(rows).logits.flatten(0, 1)
        assert expected.std() > 0.3
        torch.testing.assert_close(logits(model, rows)[:, :131], expected, atol=1e-4, rtol=0)

        # The export has one trained tensor that differs, and everything else bit for bit.
        changed = next(iter(live_parameters(model).values()))
        changed += 1.0
    export_model(model, tmp_path / "second", tmp_path / "first", file_bytes=200_000, slice_bytes=5_000)
    before, after = (stored_tensors(tmp_path / folder) for folder in ("first", "second"))
    assert before.keys() == after.keys()
    different = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(different) == 1 and not any(is_outside_language_model(key) for key in different)
    assert any(is_outside_language_model(key) for key in before)

    loaded, told = type(reference).from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        expected = loaded(rows).logits.flatten(0, 1)
        torch.testing.assert_close(logits(model, rows)[:, :131], expected, atol=1e-4, rtol=0)


def test_weights_of_another_type_than_the_vision_tower_are_exported_so(tmp_path: Path) -> None:
    save_multimodal("qwen3-vl", tmp_path / "first")
    model = build(read_hf_config(tmp_path / "first"))
    load_weights(model, tmp_path / "first")
    export_model(model, tmp_path / "second", tmp_path / "first", dtype=torch.bfloat16)
    dtypes = {
        is_outside_language_model(key): value.dtype
        for key, value in stored_tensors(tmp_path / "second").items()
    }
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    config = json.loads((tmp_path / "second/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]


def test_experts_in_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    """The published Qwen3.5-MoE checkpoints store the experts of a layer in two tensors."""
    save_multimodal("qwen3-5-moe-vision", tmp_path / "single")
    tensors = load_file(tmp_path / "single/model.safetensors")
    fused = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in range(4):
        experts = f"model.language_model.layers.{layer}.mlp.experts."

        def stacked(matrix: str, experts: str = experts) -> torch.Tensor:
            return torch.stack([tensors[f"{experts}{index}.{matrix}.weight"] for index in range(4)])

        fused[f"{experts}gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], dim=1)
        fused[f"{experts}down_proj"] = stacked("down_proj")
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "fused/config.json").write_text((tmp_path / "single/config.json").read_text())

    expected, found = CheckpointFiles(tmp_path / "single"), CheckpointFiles(tmp_path / "fused")
    assert (
        found.names() == expected.names()
        and found.names_outside_language_model() == expected.names_outside_language_model()
    )
    for key, shape in expected.shapes().items():
        assert found.shape(key) == shape
        # A slice of rows that does not begin with the first one.
        start = [min(3, size - 1) for size in shape]
        size = [size - begin for size, begin in zip(shape, start, strict=True)]
        assert torch.equal(found.read(key, start, size), expected.read(key, start, size)), key

    # The export has them one by one, as transformers saves them.
    model = build(read_hf_config(tmp_path / "fused"))
    load_weights(model, tmp_path / "fused")
    export_model(model, tmp_path / "out", tmp_path / "fused")
    out = stored_tensors(tmp_path / "out")
    assert out.keys() == tensors.keys() and all(torch.equal(out[key], tensors[key]) for key in out)


def test_transposed_experts_are_read_as_those_that_are_not(tmp_path: Path) -> None:
    """Qwen3-VL-MoE is published with the first, and saved by transformers with the second."""
    for folder in ("published", "saved"):
        save_multimodal("qwen3-vl-moe", tmp_path / folder)
    transpose_experts(tmp_path / "saved/model.safetensors")
    published, saved = (CheckpointFiles(tmp_path / folder) for folder in ("published", "saved"))
    assert published.names() == saved.names()
    for key, shape in published.shapes().items():
        assert saved.shape(key) == shape
        start = [min(3, size - 1) for size in shape]
        size = [size - begin for size, begin in zip(shape, start, strict=True)]
        assert torch.equal(published.read(key, start, size), saved.read(key, start, size)), key

    # The export is as the published one, which vLLM reads too.
    model = build(read_hf_config(tmp_path / "saved"))
    load_weights(model, tmp_path / "saved")
    export_model(model, tmp_path / "out", tmp_path / "saved", slice_bytes=5_000)
    out, expected = (stored_tensors(tmp_path / folder) for folder in ("out", "published"))
    assert out.keys() == expected.keys() and all(torch.equal(out[key], expected[key]) for key in out)


def test_published_configurations_have_their_sizes() -> None:
    gemma = parse_pretrained(GEMMA_4B)
    assert gemma.is_multimodal and gemma.shape.tied and gemma.config["eos_token_id"] == [1, 106]
    assert (gemma.shape.heads, gemma.shape.kv_heads, gemma.shape.head_dim) == (8, 4, 256)
    # 4.3B with the vision tower.
    assert round(gemma.shape.parameters / 1e9, 2) == 3.88
    assert len(gemma.shape.sliding_layers) == 34 - 34 // 6

    qwen = parse_pretrained(QWEN_7B)
    assert qwen.is_multimodal and qwen.shape.qkv_bias and not qwen.shape.sliding_layers
    # As Qwen2.5 of 7B.
    assert round(qwen.shape.parameters / 1e9, 2) == 7.62
    assert qwen.config["rope_scaling"] == {"type": "default"}
    assert shape_of(QWEN_7B).parameters == qwen.shape.parameters


def test_published_configurations_are_those_of_transformers(tmp_path: Path) -> None:
    """What is read from the file and from the class that fills in defaults is the same."""
    for config in (GEMMA_4B, QWEN_7B):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert describe_model(read_hf_config(tmp_path)).shape == parse_pretrained(config).shape


def checked(name: str, folder: Path, *overrides: str) -> Any:
    """Return the report of `check` of a run of a multimodal checkpoint, in the workspace of the test."""
    save_multimodal(name, folder / "saved")
    assert not refusals(folder / "saved")  # writes the tokenizer's files
    return check_config(load("config.yaml", (f"model.path={folder / 'saved'}", *overrides)), 4, patience=0)


def test_check_reads_the_language_model_and_its_weights(workspace: Path) -> None:  # noqa: F811
    report = checked("gemma3-vision", workspace)
    assert not report.errors and report.models["actor"] == workspace / "saved/config.json"
    # A tensor of the language model is missing; one of the vision tower may be.
    file = workspace / "saved/model.safetensors"
    tensors = load_file(file)
    for key in ("language_model.model.norm.weight", "vision_tower.post_layernorm.bias"):
        del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    (error,) = refusals(workspace / "saved")
    assert "missing 1" in error and "model.norm.weight" in error


def test_servers_of_the_whole_model_are_refused(workspace: Path) -> None:  # noqa: F811
    servers = ("rollout.engine=server", "rollout.server.urls=[http://localhost:8000]")
    report = checked("qwen3-vl", workspace, *servers)
    (error,) = [error for error in report.errors if error.where.startswith("rollout.engine")]
    assert "Qwen3ForCausalLM.from_pretrained" in str(error)


def test_a_multimodal_model_of_an_unknown_kind_is_refused(workspace: Path) -> None:  # noqa: F811
    save_multimodal("qwen3-vl", workspace / "saved")
    file = workspace / "saved/config.json"
    config = json.loads(file.read_text()) | {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
    }
    file.write_text(json.dumps(config))
    (error,) = refusals(workspace / "saved")
    assert "LlavaForConditionalGeneration is not supported" in error
