"""Every family of the one table, taken through everything that reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from config_workspace import TOKENS, write_workspace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.check.configuration import check_config
from megatron_rl.check.engine import arguments as engine_arguments
from megatron_rl.config.load import load
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.export import export_model
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.model import build_model
from megatron_rl.megatron.model_spec import describe_model, read_hf_config
from megatron_rl.planning.reshard import actor_layout, find_config, plan_offline
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.families import FAMILIES as TABLE
from megatron_rl.shapes.family import DEFAULTS, rotary_fraction
from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import family_of, read_json, read_pretrained
from megatron_rl.shapes.published import load_shape
from tests.hf_models import FAMILIES, as_kimi_k2, config_of, save_model, use_epsilon_of_config

pytestmark = pytest.mark.usefixtures("functions_load_once")

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"


def parameters(model) -> int:
    """Count the weights of a transformers model, tied ones once."""
    buffers = sum(value.numel() for name, value in model.named_buffers() if is_buffer(name))
    trained = [value for name, value in model.named_parameters() if ".indexer." not in name]
    return buffers + sum(parameter.numel() for parameter in trained)


def refusals(checkpoint: Path, *changes: str) -> list[str]:
    """Return what `check` has against a run of a checkpoint, in a workspace beside it."""
    overrides = (f"model.path={checkpoint}", "rollout.tensor=2", "rollout.engine=vllm", *changes)
    vocabulary = {text: number for number, text in enumerate(TOKENS)}
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    (checkpoint / "tokenizer_config.json").write_text("{}")
    report = check_config(load("config.yaml", overrides), 4, patience=0)
    return [str(error) for error in report.errors]


def refusals_with(checkpoint: Path, family: str, change: dict[str, Any]) -> list[str]:
    """Return what `check` has against a tiny model of a family whose config.json has other values."""
    save_model(family, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    return refusals(checkpoint)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    # vLLM's build for hosts has no attention kernels for the head sizes of these tiny models.
    monkeypatch.setattr(engine_arguments, "has_cpu_build", lambda: False)
    return tmp_path


def test_every_family_has_a_tiny_model() -> None:
    assert {config_of(family).model_type for family in FAMILIES} == set(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_consumer_takes_what_transformers_saves_and_what_is_exported(family, workspace: Path) -> None:
    saved, exported = workspace / "saved", workspace / "exported"
    reference = save_model(family, saved)
    count = parameters(reference)

    # check and the planner, from config.json alone
    assert not refusals(saved)
    described = read_pretrained(saved / "config.json")
    assert described.shape.parameters == count == load_shape(str(saved)).parameters
    assert described.shape.tensor_count == len(list(described.tensors()))
    assert sum(torch.Size(shape).numel() for shape in described.tensor_shapes().values()) == count
    assert described.shape == describe_model(reference.config).shape

    # importer and exporter
    device.initialize()
    model = build_model(reference.config, ParallelGroups(ParallelLayout((0,))), dtype=torch.float32)
    load_weights(model, saved)
    export_model(model, exported, saved)
    assert not refusals(exported)
    assert read_pretrained(exported / "config.json").shape == described.shape
    for key, value in described.engine_keys.items():
        assert read_json(exported / "config.json")[key] == value

    # reshard plans
    plan = plan_offline(
        reference.config, actor_layout({"pipeline": 2}), (0, 1), 2, torch.float32, ranks_per_node=2
    )
    assert sum(plan.needed.values()) >= 4 * count


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}])
def test_an_index_needs_no_metadata(metadata: dict[str, None], workspace: Path) -> None:
    saved = workspace / "saved"
    save_model("qwen3", saved)
    expected = TorchEngine.from_hf(saved).parameters()

    # Two files, as other programs split a checkpoint.
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    weight_map = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, saved / file)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **metadata}))

    assert not refusals(saved)
    for name, tensor in TorchEngine.from_hf(saved).parameters().items():
        assert torch.equal(tensor, expected[name]), name


def test_kimi_k2_is_read_as_deepseek_v3(workspace: Path) -> None:
    """Its layers are those, and transformers has no class of its model type."""
    saved = workspace / "saved"
    reference = save_model("moonlight", saved)
    described = read_pretrained(saved / "config.json")
    as_kimi_k2(saved)
    assert not refusals(saved)
    assert read_pretrained(saved / "config.json").shape == described.shape
    assert load_shape(str(saved)).parameters == parameters(reference)
    assert find_config(str(saved)).model_type == "deepseek_v3"

    # Without an architecture, the model type decides.
    config = {**read_json(saved / "config.json"), "architectures": None}
    assert family_of(config) is TABLE["deepseek_v3"]

    # The plain engine samples from the same weights, and an export is one that transformers loads.
    engine = TorchEngine.from_hf(saved)
    torch.testing.assert_close(
        engine.parameters()["model.layers.1.mlp.gate.weight"], reference.model.layers[1].mlp.gate.weight
    )
    device.initialize()
    model = build_model(read_hf_config(saved), ParallelGroups(ParallelLayout((0,))), dtype=torch.float32)
    load_weights(model, saved)
    export_model(model, workspace / "exported", saved)
    loaded = AutoModelForCausalLM.from_pretrained(workspace / "exported")
    use_epsilon_of_config(loaded)
    rows = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows).logits, reference(rows).logits, atol=1e-5, rtol=0)


def test_minimax_m2_is_read_as_it_is_published(workspace: Path) -> None:
    """With a number of rotary dimensions, the older keys of RoPE, and layers that predict further tokens."""
    saved = workspace / "saved"
    save_model("minimax-m2", saved)
    described = read_pretrained(saved / "config.json")
    config = read_json(saved / "config.json")
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rotary_dim": 16, "use_mtp": True, "num_mtp_modules": 3}
    config |= {"use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": [1, 1, 1, 1]}
    config |= {"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0}
    (saved / "config.json").write_text(json.dumps(config))
    assert not refusals(saved)
    published = read_pretrained(saved / "config.json")
    assert published.shape == described.shape
    assert published.engine_keys == described.engine_keys
    assert rotary_fraction(describe_model(read_hf_config(saved)).config) == 0.5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_type_list", [1, 0, 1, 1], "linear attention"),
        ("scoring_func", "softmax", "scoring_func"),
        ("use_qk_norm", False, "use_qk_norm"),
        ("num_experts_per_tok", 1, "single expert"),
    ],
)
def test_a_minimax_m2_that_would_be_computed_differently_is_refused(
    key: str, value: object, message: str, workspace: Path
) -> None:
    saved = workspace / "saved"
    save_model("minimax-m2", saved)
    config = read_json(saved / "config.json")
    (saved / "config.json").write_text(json.dumps({**config, key: value}))
    (error,) = refusals(saved)
    assert message in error and f"config.json: {key}" in error


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(
    family: str, change: dict[str, Any], key: str, workspace: Path
) -> None:
    (error,) = refusals_with(workspace / "saved", family, change)
    assert f"config.json: {key}" in error


@pytest.mark.parametrize("family", ["deepseek-v32", "glm-moe-dsa"])
def test_sparse_attention_is_trained_on_rows_where_it_is_dense(family: str, workspace: Path) -> None:
    """On a longer row the indexer leaves keys out, and `check` refuses it."""
    saved = workspace / "saved"
    reference = save_model(family, saved, index_topk=24)
    dense = AutoModelForCausalLM.from_config(
        read_hf_config(saved, for_engine=True), attn_implementation="eager"
    )
    names = [name for name in reference.state_dict() if ".indexer." not in name]
    dense.load_state_dict({name: reference.state_dict()[name] for name in names})
    use_epsilon_of_config(dense)
    rows = torch.arange(30)[None]
    with torch.no_grad():
        sparse_logits = reference(rows).logits[0]
        dense_logits = dense(rows).logits[0]
    torch.testing.assert_close(sparse_logits[:24], dense_logits[:24], atol=1e-5, rtol=0)
    assert float((sparse_logits[24:] - dense_logits[24:]).abs().max()) > 1e-3

    prompt = "data.max_prompt_tokens=8"
    assert not refusals(saved, prompt, "rollout.max_response_tokens=16")
    (error,) = refusals(saved, prompt, "rollout.max_response_tokens=17")
    assert "8 + 17 = 25" in error and "<= 24" in error and "index_topk" in error

    servers = ("rollout.engine=server", "rollout.server.urls=[http://localhost:8000]")
    assert any("indexer of sparse attention" in error for error in refusals(saved, *servers))


MADE_UP_DEFAULTS = {"qwen3_5_moe_text": {"intermediate_size"}, "gemma4_text": {"global_head_dim"}}
"""Keys that a model type does not have in transformers: no layer of the first is dense, and transformers
writes the size of each layer of the second."""


@pytest.mark.parametrize("family", TABLE)
def test_defaults_are_those_of_transformers(family) -> None:
    """A config.json may leave out what transformers fills in."""
    tiny = next(name for name in FAMILIES if config_of(name).model_type == family)
    whole = config_of(tiny).__class__().to_dict()
    normalise_config = TABLE[family].normalise_config(whole)
    aliases = {key: spelling for spelling, key in TABLE[family].aliases.items()}
    for key, value in (DEFAULTS | TABLE[family].defaults).items():
        made_up = key in MADE_UP_DEFAULTS.get(family, ())
        if value is not None and normalise_config.get(key) is not None and not made_up:
            told = whole.get(key, whole.get(aliases.get(key, key)))
            assert told == value, key


def test_a_model_with_text_inside_says_how_to_save_it(workspace: Path) -> None:
    """A multimodal model whose checkpoint is not known, with a language model that is."""
    config = {"architectures": ["MyOwnForConditionalGeneration"], "model_type": "my_own"}
    config["text_config"] = config_of("gemma3").to_dict()
    save_model("gemma3", workspace / "nested")
    (workspace / "nested/config.json").write_text(json.dumps(config))
    (error,) = refusals(workspace / "nested")
    assert "Gemma3ForCausalLM.from_pretrained" in error


def test_a_model_that_can_only_be_planned_says_what_it_needs(workspace: Path) -> None:
    save_model("qwen2", workspace / "gpt")
    config = json.loads((workspace / "gpt/config.json").read_text())
    config |= {"architectures": ["GPTForCausalLM"], "model_type": "gpt", "norm": "layernorm"}
    (workspace / "gpt/config.json").write_text(json.dumps(config))
    (error,) = refusals(workspace / "gpt")
    assert "LayerNorm" in error and "two matrices" in error


def test_a_model_of_an_unknown_family_says_which_keys_nothing_reads(workspace: Path) -> None:
    save_model("qwen2", workspace / "new")
    config = json.loads((workspace / "new/config.json").read_text())
    config |= {"architectures": ["NewForCausalLM"], "model_type": "new", "mamba_d_state": 16}
    config["layer_types"] = ["mamba", "full_attention"] * 2
    (workspace / "new/config.json").write_text(json.dumps(config))
    (error,) = refusals(workspace / "new")
    assert "which needs layers of type mamba" in error
    assert "this package does not read mamba_d_state\n" in error, error


def test_the_page_of_models_lists_the_table() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("# Models\n")[2]
    listed = re.sub(r"\s*\([^)]*\)", "", " ".join(section.split()).split(", from", 1)[0])
    assert set(re.split(", | and ", listed)) == {family.title for family in TABLE.values()}
