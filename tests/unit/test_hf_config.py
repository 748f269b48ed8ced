"""Settings derived from transformers configs, and configs that are refused with a reason."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.files import CheckpointFiles, divide_into_files
from megatron_rl.hf.weights import check_tensors
from megatron_rl.megatron.model_spec import describe_model, model_spec, read_hf_config, rotary_frequencies
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import FAMILIES, RESCALING_ROPE, config_of, make_model, save_model

FOUR = tuple(range(4))


def spec(family, sizes=None, overrides=None, **changes):
    layout = ParallelLayout(FOUR, **(sizes or {}))
    return model_spec(config_of(family, **changes), layout, torch.float32, overrides)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_transformers_saves(family, tmp_path):
    save_model(family, tmp_path)
    files = CheckpointFiles(tmp_path)
    described = describe_model(config_of(family))
    trained = {name: shape for name, shape in files.shapes().items() if not described.is_copied(name)}
    assert trained == described.tensor_shapes()
    assert files.names() == set(files.shapes())


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mistral", "mixtral", "qwen3-moe"])
def test_rotary_frequencies_are_those_of_transformers(family):
    model = make_model(family)
    frequencies, magnitude = rotary_frequencies(model.config)
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert magnitude == model.model.rotary_emb.attention_scaling


@pytest.mark.parametrize("published", [False, True])
def test_layers_with_a_window_have_rotary_angles_and_a_factor_of_their_own(published, tmp_path):
    """OLMo 3 is published with the keys of transformers 4: YaRN is that of full attention alone."""
    model = make_model("olmo3")
    config = model.config
    if published:
        values = config.to_dict()
        parameters = values.pop("rope_parameters")["full_attention"]
        values["rope_theta"] = parameters.pop("rope_theta")
        (tmp_path / "config.json").write_text(json.dumps({**values, "rope_scaling": parameters}))
        config = read_hf_config(tmp_path)

    rotary = model.model.rotary_emb
    frequencies, magnitude = rotary_frequencies(config)
    assert torch.equal(
        frequencies, torch.cat((rotary.sliding_attention_inv_freq, rotary.full_attention_inv_freq))
    )
    built = model_spec(config, ParallelLayout((0,)), torch.float32)
    assert magnitude == rotary.full_attention_attention_scaling > 1
    assert built.local_rotary_factor == rotary.sliding_attention_attention_scaling == 1


def test_vocabulary_is_padded_to_equal_parts():
    found = spec("qwen2", {"tensor": 2})
    assert (found.model.shape.vocab, found.gpt_kwargs["vocab_size"]) == (131, 132)
    assert found.gpt_kwargs["vocab_size"] == 132


def test_virtual_pipeline_gets_the_communication_that_is_right():
    config = spec("qwen2", {"pipeline": 2, "virtual_pipeline": 2}).transformer_config
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    freed = [
        role_settings(ParallelLayout((0, 1), pipeline=2, virtual_pipeline=chunks))[
            "deallocate_pipeline_outputs"
        ]
        for chunks in (1, 2)
    ]
    assert freed == [True, False], "interleaved stages free what they are still sending"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("qwen2", {"tensor": 2}, None, {"num_attention_heads": 6, "num_key_value_heads": 3}),
            "key-value heads",
        ),
        (("gemma3", {}, None, {"use_bidirectional_attention": True}), "use_bidirectional_attention"),
        (
            ("qwen2", {"tensor": 2}, None, {"num_attention_heads": 3, "num_key_value_heads": 3}),
            "attention heads",
        ),
        (("qwen2", {"pipeline": 4}, None, {"num_hidden_layers": 6}), "6 layers cannot be distributed over"),
        (("qwen2", {}, {"hidden_droput": 0.1}), "did you mean 'hidden_dropout'"),
        (("qwen2", {}, {"hidden_size": 8}), "cannot be overridden"),
        (("qwen2", {"expert": 2}), "without experts"),
        (("mixtral", {"expert": 4}, None, {"num_local_experts": 6}), "experts"),
        (("llama", {}, None, {"attention_bias": True}), "biases"),
        (("qwen3", {}, None, {"attention_bias": True}), "attention_bias"),
        (("llama", {}, None, {"hidden_act": "relu6"}), "activation"),
        (("deepseek-v3", {}, None, {"rope_parameters": RESCALING_ROPE}), "latent attention"),
        (("llama", {"pipeline": 2}, {"num_layers_in_first_pipeline_stage": 9}), "cannot be distributed over"),
        (("llama", {"pipeline": 4}, {"num_layers_in_first_pipeline_stage": 2}), "cannot be distributed over"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, words):
    family, sizes, overrides, changes = (*arguments, None, None, None)[:4]
    with pytest.raises(UserError, match=words):
        spec(family, sizes, overrides, **(changes or {}))


def test_unknown_architectures_name_the_known_ones():
    with pytest.raises(UserError, match=r"gpt2 is not supported(.|\n)*qwen3_moe"):
        model_spec(transformers.GPT2Config(), ParallelLayout(FOUR), torch.float32)


def test_scalings_that_depend_on_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UserError, match="dynamic"):
        spec("llama", rope_parameters=rope)


class Model:
    """Reference that a checkpoint is compared with."""

    def __init__(self, config):
        self.hf_config = config
        self.chunks = []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2")
    save_model("qwen2", path)
    return path


def damaged(checkpoint, tmp_path, change):
    """Copy a checkpoint with its tensors changed."""
    path = tmp_path / "damaged"
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return CheckpointFiles(path)


def test_missing_and_unexpected_tensors_are_named(checkpoint, tmp_path):
    def change(tensors):
        tensors["model.layers.9.extra"] = tensors.pop("model.layers.2.mlp.up_proj.weight")

    with pytest.raises(
        UserError, match=r"missing: model.layers.2.mlp.up_proj.weight(.|\n)*model.layers.9.extra"
    ):
        check_tensors(damaged(checkpoint, tmp_path, change), Model(config_of("qwen2")))


def test_a_missing_output_layer_hints_at_tying(checkpoint, tmp_path):
    with pytest.raises(UserError, match="tie_word_embeddings"):
        check_tensors(
            damaged(checkpoint, tmp_path, lambda tensors: tensors.pop("lm_head.weight")),
            Model(config_of("qwen2")),
        )


def test_another_models_shapes_are_refused(checkpoint):
    with pytest.raises(UserError, match=r"does not match its config\.json"):
        check_tensors(CheckpointFiles(checkpoint), Model(config_of("qwen2", intermediate_size=128)))


def test_a_tied_model_may_carry_its_output_layer(checkpoint, tmp_path):
    def equal(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    check_tensors(damaged(checkpoint, tmp_path, equal), Model(config_of("qwen2-tied")))


def test_a_tied_model_does_not_lose_an_output_layer_of_its_own(checkpoint):
    with pytest.raises(UserError, match="output layer of its own") as refused:
        check_tensors(CheckpointFiles(checkpoint), Model(config_of("qwen2-tied")))
    assert "set tie_word_embeddings to false" in str(refused.value.fix)


def test_files_beside_the_weights_are_not_the_models(checkpoint, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    names = CheckpointFiles(path).names()
    for other in ("adapter_model", "consolidated", "model.fp16"):
        save_file({f"{other}.weight": torch.zeros(2, 2)}, path / f"{other}.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"an older copy")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert CheckpointFiles(path).names() == names
    assert CheckpointFiles(path, "adapter_model.safetensors").names() == {"adapter_model.weight"}

    # Shards that no index names are the model's all the same, and what lies beside them is not.
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    assert CheckpointFiles(path).names() == names


def test_broken_directories_are_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="no safetensors"):
        CheckpointFiles(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"garbage, not tensors")
    with pytest.raises(UserError, match="cannot be read"):
        CheckpointFiles(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="missing model-00001-of-00002"):
        CheckpointFiles(tmp_path)
    for weight_map in (None, {}, [], {"a": "../model.safetensors"}, {"a": 1}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match="list of weight files cannot be read"):
            CheckpointFiles(tmp_path)


def test_files_are_filled_in_order():
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (5,)}
    dtypes = dict.fromkeys(shapes, torch.float32)
    files = divide_into_files(shapes, dtypes, 80)
    assert list(files.values()) == [["a", "b"], ["c"], ["d"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    assert divide_into_files(shapes, dtypes, 1000) == {"model.safetensors": ["a", "b", "c", "d"]}


def test_padded_and_duplicated_parts_fill_every_parameter():
    """The importer covers each parameter exactly, for every rank of a layout with padding and experts."""
    from megatron_rl.planning.reshard import megatron_boxes

    device.initialize()
    assert ParallelGroups(ParallelLayout((0,))).is_member
    layout = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2, expert=2, sequence_parallel=True)
    groups = megatron_boxes(config_of("qwen3-moe"), layout, torch.float32)
    assert {rank for group in groups for rank in group.ranks} == set(range(8))
