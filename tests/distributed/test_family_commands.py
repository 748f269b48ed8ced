"""Every family through the user's commands, from a checkpoint of transformers to an export for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_layout_invariance import sparse
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.shapes.families import FAMILIES as TABLE
from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import PEFT_PREFIX, TARGETS, Lora, default_targets
from megatron_rl.shapes.multimodal import is_outside_language_model
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.traffic import shared_bytes
from tests.hf_models import (
    FAMILIES,
    MULTIMODAL,
    as_kimi_k2,
    as_modelopt,
    config_of,
    in_four_bits,
    quantise,
    save_model,
    save_multimodal,
)
from tests.readme_metrics import unwritten

SCRIPT = Path(__file__).with_name("family_ranks.py")
COMMON = {"vocab_size": 21, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
"""Of the quickstart's tokenizer."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
"""The one size that vLLM's latent attention has on the host; other heads have 32 dimensions at least."""
LOSSES = {
    "moe_z_loss_coeff": 1e-3,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
"""Losses of routers, of the runs without adapters."""
ROLLOUTS = {
    "vllm": {"tensor": 2, "max_response_tokens": 12},
    "torch": {"engine": "torch", "max_response_tokens": 12},
}
"""Rollout on a host by engine."""
DELTA_NETS = ("qwen3-5", "qwen3-5-moe", "qwen3-next")
"""Families that `check` refuses with vLLM on a host, and that a plain torch model samples from."""
SUITE = (
    "gemma3",  # norms behind each block, two rotary bases, a scaled embedding
    "glm-moe-dsa",  # latent attention and experts, copied indexers, an engine that builds another family
    "qwen3-5-moe",  # delta nets, and the plain engine
    "qwen3-lora",  # adapters, synced without the base weights
    "qwen3-moe-lora",  # adapters, merged into the weights that are synced
)
"""Families of the suite: each has names of tensors, or a path to the engine, that none before it has."""
REWARD = "def score(*, response, **_):\n    return float(len(response) % 3) + 0.1 * response.count('1')\n"


def sizes(family: str) -> dict[str, Any]:
    if family.startswith(("deepseek", "glm4-moe-lite", "glm-moe-dsa", "moonlight")):
        return LATENT
    if family == "gpt-oss":
        return {"head_dim": 32, "intermediate_size": 128}
    if family.startswith("gemma4"):
        return {"head_dim": 32, "global_head_dim": 64}
    if family in ("phi3", "qwen2", "smollm3", "olmo2", "olmo3"):
        return {"hidden_size": 128}
    return {"head_dim": 32}


def workspace(folder: Path, family: str, material: Path, **changes: Any) -> None:
    """Write a tiny checkpoint with the quickstart's tokenizer, and a run of it."""
    if family == "gemma4-vision":
        save_multimodal(family, folder / "model", **COMMON, **sizes(family))
    elif family in MULTIMODAL:
        save_multimodal(family, folder / "model", **COMMON)
    else:
        save_model(family, folder / "model", **COMMON, **sizes(family))
    for file in (material / "model").glob("*token*"):
        shutil.copy(file, folder / "model")
    (folder / "reward.py").write_text(REWARD)
    config = {
        "run_dir": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": f"{folder / 'reward.py'}:score"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "optimizer_steps": 1 + sparse(family)},
        "actor": {"optimizer": {"learning_rate": 1e-3}, "megatron": LOSSES if sparse(family) else {}},
        "rollout": ROLLOUTS["torch" if family in DELTA_NETS else "vllm"],
        "checkpoint": {"every": 1, "export": False},
        "algorithm": {"name": "grpo", "kl": "none"},
    } | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    "part", ["suite", *(pytest.param(third, marks=pytest.mark.campaign) for third in (0, 1, 2))]
)
def test_every_family_goes_through_every_command(
    part: str | int, fork: Any, material: Path, tmp_path: Path
) -> None:
    tiny = {config_of(name).model_type: name for name in reversed(FAMILIES)}
    assert set(tiny) == set(TABLE)
    families = list(tiny.values())
    rest = [family for family in families if family not in SUITE]
    names = SUITE if part == "suite" else rest[int(part) :: 3]
    for name in names:
        prepare(tmp_path, name, material)
    fork(SCRIPT, 2, tmp_path, *names, timeout=580)
    for name in names:
        check(tmp_path, name)


@pytest.mark.parametrize(
    "names", [("deepseek-v3", "gpt-oss"), pytest.param(("qwen3",), marks=pytest.mark.campaign)]
)
def test_checkpoints_as_they_are_published_go_through_every_command(
    fork: Any, material: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Tensor-parallel slices begin within blocks, and a layer of MTP is quantised too.

    DeepSeek's mixture is published as Kimi-K2 is: with a model type that transformers has no class for, which
    is not that of the export. Experts of gpt-oss have 4 bits.
    """
    wide = {"hidden_size": 192, "intermediate_size": 320}
    for name in names:
        workspace(tmp_path / name, name, material)
        save_model(name, tmp_path / name / "model", **COMMON, **(sizes(name) | wide))
        if name == "deepseek-v3":
            add_mtp_layer(tmp_path / name / "model")
            as_kimi_k2(tmp_path / name / "model")
        if name == "gpt-oss":
            in_four_bits(tmp_path / name / "model")
        else:
            quantise(tmp_path / name / "model")
    fork(SCRIPT, 2, tmp_path, *names, timeout=580)
    for name in names:
        check_quantised(tmp_path / name, name)


@pytest.mark.parametrize(
    "algorithms", [{"qwen3": "NVFP4"}, pytest.param({"qwen2": "FP8"}, marks=pytest.mark.campaign)]
)
def test_checkpoints_of_modelopt_go_through_every_command(
    fork: Any, material: Path, tmp_path: Path, algorithms: dict[str, str]
) -> None:
    """The description of NVFP4 is in a file beside config.json alone, where vLLM finds it too."""
    for name, algorithm in algorithms.items():
        workspace(tmp_path / name, name, material)
        # The slices of two tensor-parallel ranks begin within a block of 16.
        save_model(name, tmp_path / name / "model", **COMMON, **(sizes(name) | {"intermediate_size": 176}))
        as_modelopt(tmp_path / name / "model", algorithm, in_config=algorithm == "FP8")
    fork(SCRIPT, 2, tmp_path, *algorithms, timeout=580)
    for name in algorithms:
        check_quantised(tmp_path / name, name)
        assert not (tmp_path / name / "out/hf_quant_config.json").exists()


def check_quantised(folder: Path, name: str) -> None:
    """Check the results of the commands on a quantised checkpoint of the family ``name``."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["mismatch/abs_diff"] for line in lines) < 1e-5, name
    check_next_run(folder, 1e-5)
    out = folder / "out"
    exported = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in exported
    assert exported["model_type"] == config_of(name).model_type
    _, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"], (name, told)
    before = CheckpointFiles(folder / "model")
    after = CheckpointFiles(out)
    assert before.names() == after.names()
    for tensor, shape in before.shapes().items():
        start = (0,) * len(shape)
        change = after.read(tensor, start, shape) - before.read(tensor, start, shape)
        # Adam moves a weight by about the learning rate, 1e-3, in each of its updates.
        updates = 3 * (1 + sparse(name)) * (".layers.4." not in tensor)
        assert change.abs().max() <= 1.5e-3 * updates, tensor


@pytest.mark.parametrize(
    "engines",
    [
        # Experts that are stored transposed, buffers and heads of two sizes.
        {"qwen3-vl-moe": "vllm", "gemma4-vision": "vllm"},
        pytest.param(
            {"gemma3-vision": "vllm", "ministral3-vision": "vllm", "qwen2-5-vl": "vllm"},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            {"mistral3": "vllm", "qwen3-vl": "vllm", "qwen3-5-vision": "torch"},
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_multimodal_checkpoints_go_through_every_command(
    fork: Any, material: Path, tmp_path: Path, engines: dict[str, str]
) -> None:
    """The language model is trained; the export has the rest as it was, and `check` takes it again."""
    for name, engine in engines.items():
        workspace(tmp_path / name, name, material, rollout=ROLLOUTS[engine])
    fork(SCRIPT, 2, tmp_path, *engines, timeout=500)

    for name in engines:
        lines = [json.loads(line) for line in (tmp_path / name / "run/metrics.jsonl").open()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        bound = 4e-5 if name.startswith("qwen3-5") else 1e-5
        assert max(line["mismatch/abs_diff"] for line in lines) < bound, name
        check_next_run(tmp_path / name, bound)
        _, told = AutoModelForImageTextToText.from_pretrained(
            tmp_path / name / "out", output_loading_info=True
        )
        assert not any(told.values()), (name, told)
        before = load_file(tmp_path / name / "model/model.safetensors")
        after = {}
        for file in (tmp_path / name / "out").glob("*.safetensors"):
            after |= load_file(file)
        assert before.keys() == after.keys()
        for key, value in before.items():
            # No text of this vocabulary may reach a row of the embedding or a bias of a key.
            is_trained = not is_outside_language_model(key) and not is_buffer(key)
            assert torch.equal(value, after[key]) != is_trained or "k_proj.bias" in key, key


def check_next_run(folder: Path, bound: float) -> None:
    """A run from the export begins where the engine has the exported weights."""
    (line,) = [json.loads(line) for line in (folder / "again/metrics.jsonl").open()]
    assert line["mismatch/abs_diff"] < bound, folder


def add_mtp_layer(folder: Path) -> None:
    """Add a layer that predicts a further token, like the last one, to a model of four."""
    file = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    stored = load_file(file)
    for name in list(stored):
        if ".layers.3." in name:
            stored[name.replace(".layers.3.", ".layers.4.")] = stored[name].clone()
    save_file(stored, file, metadata={"format": "pt"})


def test_latent_norms_have_the_epsilon_of_the_config_in_vllm_too(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    """transformers takes 1e-6 for them, which is far from this epsilon."""
    workspace(tmp_path, "moonlight", material)
    save_model("moonlight", tmp_path / "model", **COMMON, **LATENT, rms_norm_eps=0.1)
    fork("megatron_rl", 2, "train", tmp_path / "config.yaml", "steps=1", module=True)
    (line,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert line["mismatch/abs_diff"] < 1e-5


def prepare(folder: Path, name: str, material: Path) -> None:
    """Write the workspace of a family, with adapters where its ``name`` ends in ``-lora``."""
    family = name.removesuffix("-lora")
    adapted = {
        "actor": {"lora": {"rank": 8, "alpha": 16}, "optimizer": {"learning_rate": 1e-2}},
        "sft": {"data": str(material / "sft.jsonl"), "steps": 2, "optimizer": {"learning_rate": 1e-2}},
        "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
    }
    if name == "qwen3-moe-lora":
        lora = {"rank": 8, "alpha": 16, "targets": list(TARGETS)}
        pairs = {"data": str(material / "pairs.jsonl"), "steps": 2, "optimizer": {"learning_rate": 1e-2}}
        adapted["actor"]["lora"] = lora
        adapted["reward"] = {"models": {"judge": {"lora": lora, "training": pairs}}}
    workspace(folder / name, family, material, **(adapted if name != family else {}))


def check(folder: Path, name: str) -> None:
    """Check the results of a family's commands."""
    if name == "qwen3-moe-lora":
        check_judge(folder / name)
    if name.endswith("-lora"):
        check_adapters(folder / name, sparse(name.removesuffix("-lora")))
        return
    lines = [json.loads(line) for line in (folder / name / "run/metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # Of trainer and engine; test_layout_invariance.py compares the trainer with transformers.
    bound = 4e-5 if name in DELTA_NETS else 1e-5
    assert max(line["mismatch/abs_diff"] for line in lines) < bound, name
    assert all(line["policy/grad_norm"] > 0 for line in lines), name
    check_next_run(folder / name, bound)
    if sparse(name):
        assert unwritten("a run of a mixture", lines) == []
        # Updates move routers away from what they chose before.
        assert all(0.7 < line["router/agreement"] <= 1 for line in lines), name
    _, told = AutoModelForCausalLM.from_pretrained(folder / name / "out", output_loading_info=True)
    assert not any(told.values()), (name, told)
    if TABLE[config_of(name).model_type].copied:
        check_indexers(folder / name)


def check_indexers(folder: Path) -> None:
    """Indexers of sparse attention are exported bit for bit."""
    before, after = (CheckpointFiles(folder / path) for path in ("model", "out"))
    assert before.names() == after.names()
    copied = [name for name in before.names() if ".indexer." in name]
    assert copied
    for name in copied:
        shape = before.shape(name)
        origin = (0,) * len(shape)
        assert torch.equal(before.read(name, origin, shape), after.read(name, origin, shape)), name


def check_judge(folder: Path) -> None:
    """A reward model whose adapters learned is left as one whose weights did, and its head learned too."""
    left = folder / "run/reward_models/judge"
    _, told = AutoModelForSequenceClassification.from_pretrained(left, output_loading_info=True)
    assert not any(told.values()), told
    start, judge = (load_file(path / "model.safetensors") for path in (folder / "run/stages/sft/hf", left))
    assert judge.keys() - start.keys() == {"score.weight"}
    moved = {name for name in judge.keys() & start.keys() if not torch.equal(judge[name], start[name])}
    learned = {name for name in judge if "_proj." in name}
    # No token may have gone to an expert.
    assert {name for name in learned if ".experts." not in name} < moved <= learned


def check_adapters(folder: Path, experts: bool) -> None:
    """The engine samples from base and adapters, the reference is the base; each export has its part."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    assert max(line["mismatch/abs_diff"] for line in lines) < 1e-5
    assert abs(lines[0]["kl/ref"]) < 1e-6 < lines[2]["kl/ref"]
    shape = read_pretrained(folder / "model/config.json").shape
    if not experts:  # After the first sync, which brings what lies beneath them, adapters move alone.
        layout = ParallelLayout((0, 1), pipeline=2)
        alone = shared_bytes(shape, layout, 2, 4, lora=Lora(8, default_targets(shape))).traffic((0, 1))
        both = alone.received_most + shared_bytes(shape, layout, 2, 4).traffic((0, 1)).received_most
        assert lines[1]["reshard/bytes_received_max"] == alone.received_most > 0
        assert lines[0]["reshard/bytes_received_max"] == both
    start, base, merged = (
        load_file(folder / path / "model.safetensors") for path in ("model", "run/stages/sft/hf", "out")
    )
    adapters = load_file(folder / "peft" / "adapter_model.safetensors")
    learned = {name.removeprefix(PEFT_PREFIX).replace("lora_A.", "") for name in adapters if "lora_A" in name}
    assert len(adapters) == 2 * len(learned) == 2 * sum("_proj." in name for name in merged) >= 2 * 7 * 4
    for name, value in merged.items():
        unused = ".experts." in name  # no token may have gone there
        assert unused or torch.equal(start[name], base[name]) == (name not in learned), name
        if name in learned:
            module = PEFT_PREFIX + name.removesuffix("weight")
            change = adapters[f"{module}lora_B.weight"] @ adapters[f"{module}lora_A.weight"]
            torch.testing.assert_close(value, base[name] + 16 / 8 * change, rtol=0, atol=1e-6)
            assert unused or change.abs().max() > 1e-4
        else:
            assert torch.equal(value, base[name]), name
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 16)
    assert config["base_model_name_or_path"] == str(folder / "run/stages/sft/hf")
    # A run that starts from the adapters has them as its reference too.
    (line,) = [json.loads(line) for line in (folder / "next/metrics.jsonl").open()]
    assert abs(line["kl/ref"]) < 1e-6 and line["mismatch/abs_diff"] < 1e-5
