"""Models loaded from Hugging Face checkpoints compute what transformers computes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl import durable
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles, write_index
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.model import build_model
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import FAMILIES, make_model, save_model


def build(config, dtype=torch.float32):
    device.initialize()
    return build_model(config, ParallelGroups(ParallelLayout((0,))), dtype=dtype)


def logits(model, rows):
    """Return the logits [tokens, vocabulary] of rows of equal length."""
    packing = model.pack([rows.shape[1]] * rows.shape[0])
    with device.megatron_mode(), torch.no_grad():
        (chunk,) = model.chunks
        hidden = chunk(rows.reshape(1, -1), None, None, packed_seq_params=packing)
        weight = (
            chunk.shared_embedding_or_output_weight()
            if model.spec.model.shape.tied
            else chunk.output_layer.weight
        )
        values, cap = hidden.flatten(0, 1) @ weight.T, model.spec.model.config.get("final_logit_softcapping")
        return values if cap is None else cap * torch.tanh(values / cap)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, tmp_path):
    reference = save_model(family, tmp_path)
    model = build(reference.config)
    load_weights(model, tmp_path)
    rows = torch.randint(0, 131, (3, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(rows).logits.flatten(0, 1)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(model, rows)[:, :131], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe", "mixtral", "gpt-oss"])
def test_exported_checkpoint_is_the_loaded_one(family, tmp_path):
    save_model(family, tmp_path / "first")
    model = build(make_model(family).config)
    load_weights(model, tmp_path / "first")
    export_model(model, tmp_path / "second", tmp_path / "first", file_bytes=40_000, slice_bytes=5_000)
    first, second = CheckpointFiles(tmp_path / "first"), CheckpointFiles(tmp_path / "second")
    assert first.names() == second.names()
    digests = durable.read_digests(tmp_path / "second")
    assert digests is not None and set(digests) == set(durable.files_below(tmp_path / "second"))
    assert durable.describe_damaged_files(tmp_path / "second", digests, list(digests)) == []
    for name in first.names():
        shape = first.shape(name)
        assert torch.equal(
            first.read(name, [0] * len(shape), shape), second.read(name, [0] * len(shape), shape)
        )
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("family", "keys", "layer"),
    [
        ("deepseek-v3", {"num_nextn_predict_layers": 1}, "model.layers.4"),
        ("glm4-moe", {"num_nextn_predict_layers": 1}, "model.layers.4"),
        ("qwen3-next", {}, "mtp.layers.0"),
    ],
)
def test_layers_that_predict_further_tokens_are_exported_as_they_are(family, keys, layer, tmp_path):
    reference = save_model(family, tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text())
    (tmp_path / "first/config.json").write_text(json.dumps({**config, **keys}))
    further = {
        f"{layer}.eh_proj.weight": torch.randn(64, 128),
        f"{layer}.mlp.experts.1.up_proj.weight": torch.randn(32, 64).to(torch.bfloat16),
        f"{layer}.enorm.weight": torch.randn(64),
    }
    # Files beside a `model.safetensors` are not the model's: an index names both.
    weights = tmp_path / "first/model.safetensors"
    weights = weights.rename(weights.with_name("model-layers.safetensors"))
    names = CheckpointFiles(tmp_path / "first").names()
    save_file(further, tmp_path / "first/model-further.safetensors")
    files = {weights.name: sorted(names), "model-further.safetensors": sorted(further)}
    write_index(tmp_path / "first", files, total_bytes=0)

    model = build(type(reference.config).from_pretrained(tmp_path / "first"))
    load_weights(model, tmp_path / "first")
    export_model(model, tmp_path / "second", tmp_path / "first")
    second = CheckpointFiles(tmp_path / "second")
    assert second.names() == CheckpointFiles(tmp_path / "first").names() >= set(further)
    for name, value in further.items():
        again = second.read(name, [0] * value.dim(), value.shape)
        assert again.dtype == value.dtype and torch.equal(again, value)
    again = type(reference).from_pretrained(tmp_path / "second")
    assert torch.equal(again.lm_head.weight, reference.lm_head.weight)


def test_export_converts_to_the_asked_dtype(tmp_path):
    reference = save_model("qwen2", tmp_path / "first")
    model = build(reference.config)
    load_weights(model, tmp_path / "first")
    export_model(model, tmp_path / "half", dtype=torch.bfloat16)
    again = type(reference).from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16
    for name, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16()), name
