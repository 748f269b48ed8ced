"""Actor, critic, reference and reward models in layouts of their own: the same numbers wherever they run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from megatron_rl.checkpoint.roles import _read_file
from megatron_rl.config.checkpoint_meta import fits_any_layout, read_meta
from megatron_rl.trainer.state import STATE_TYPES
from tests.readme_metrics import unwritten

FIRST = "num_layers_in_first_pipeline_stage"
COMPARED = (
    "policy/loss", "policy/grad_norm", "policy/entropy", "critic/loss", "critic/grad_norm", "critic/value",
    "critic/explained_variance", "reward/mean", "reward/component/preference", "reward/component/function",
)  # fmt: skip

OPTIMIZER = {"learning_rate": 1e-3, "epsilon": 1e-3}
"""With Adam's usual epsilon the first updates are the signs of gradients, and rounding decides near zero."""


def ppo(folder: Path, material: Path, **changes) -> Path:
    """Write a PPO run with critic, reference and a reward model that is trained first."""
    pairs = material / "pairs.jsonl"
    if not pairs.exists():
        records = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()][:400]
        lines = []
        for record in records:
            truth = str(record["ground_truth"])
            wrong = str((int(truth) + 3) % 90)
            lines.append(json.dumps({"prompt": record["prompt"], "chosen": truth, "rejected": wrong}))
        pairs.write_text("\n".join(lines) + "\n")
    optimizer = dict(OPTIMIZER)
    config = {
        "run_dir": str(folder / "run"),
        "steps": 3,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {
            "function": "megatron_rl.rewards.arithmetic:exact_match",
            "models": {
                "preference": {
                    "path": str(material / "model"),
                    "weight": 0.5,
                    "training": {"data": str(pairs), "steps": 4, "pairs_per_step": 8, "optimizer": optimizer},
                }
            },
        },
        "algorithm": {"name": "ppo", "kl": {"name": "reward", "coef": 0.05}},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 2, "optimizer_steps": 2},
        "actor": {"optimizer": optimizer},
        "critic": {"optimizer": optimizer, "warmup_steps": 1},
        "rollout": {"engine": "torch", "max_response_tokens": 6},
        "evaluation": {"at_start": False, "every": 100},
        "checkpoint": {"every": 2, "export": False},
    }
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_ppo_gives_the_same_numbers_colocated_and_apart(fork, material, tmp_path, resumes):
    alone = ppo(tmp_path / "alone", material)
    fork("megatron_rl", 1, "train", alone, module=True)
    offload = [
        f"{role}.offload=true" for role in ("actor", "critic", "reference", "reward.models.preference")
    ]
    fork("megatron_rl", 1, "train", alone, f"run_dir={tmp_path / 'offloaded/run'}", *offload, module=True)
    assert unwritten("a run with a critic", metrics(tmp_path / "alone")) == []
    assert unwritten("a run that offloads", metrics(tmp_path / "offloaded")) == []
    for away, there in zip(metrics(tmp_path / "offloaded"), metrics(tmp_path / "alone"), strict=True):
        assert away["offload/bytes_max"] > 0
        assert {name: away[name] for name in COMPARED if name in there} == {
            name: there[name] for name in COMPARED if name in there
        }, "offloading changed a number"

    apart = ppo(
        tmp_path / "apart",
        material,
        actor={
            "optimizer": OPTIMIZER,
            "layout": {"ranks": "0-3", "tensor": 2, "pipeline": 2},
            "megatron": {
                FIRST: 1,
                "num_layers_in_last_pipeline_stage": 1,
            },  # not for roles without a pipeline
        },
        critic={
            "optimizer": OPTIMIZER,
            "warmup_steps": 1,
            "layout": {"ranks": [4, 5], "tensor": 2},
        },
        reference={"layout": {"ranks": [1, 6], "pipeline": 2}, "megatron": {FIRST: 1}},
        rollout={"engine": "torch", "max_response_tokens": 6, "ranks": [2, 7]},
    )
    config = yaml.safe_load(apart.read_text())
    config["reward"]["models"]["preference"]["layout"] = {"ranks": [5, 6, 7, 0], "tensor": 2}
    apart.write_text(yaml.safe_dump(config))
    fork("megatron_rl", 8, "train", apart, module=True)

    expected, found = metrics(tmp_path / "alone"), metrics(tmp_path / "apart")
    assert [line["step"] for line in found] == [1, 2, 3]
    for mine, truth in zip(found, expected, strict=True):
        for name in COMPARED:
            if name.startswith("policy/") and truth["step"] == 1:
                assert name not in truth, "the critic warms up alone"
                continue
            assert mine[name] == pytest.approx(truth[name], rel=1e-4, abs=1e-5), (truth["step"], name)
    # A run continues with critic and trained reward model, on the layouts it had.
    if resumes:
        fork("megatron_rl", 8, "train", apart, "steps=4", module=True)
        assert [line["step"] for line in metrics(tmp_path / "apart")] == [1, 2, 3, 4]

    # The trained reward model is one that transformers reads, and it scores as ours does.
    trained, read = "run/reward_models/preference", AutoModelForSequenceClassification.from_pretrained
    model, same = read(tmp_path / "apart" / trained), read(tmp_path / "alone" / trained)
    assert model.score.weight.shape == (1, model.config.hidden_size)
    assert torch.allclose(model.score.weight, same.score.weight, atol=1e-5)


def test_a_run_ended_before_its_first_checkpoint_keeps_its_trained_reward_model(fork, material, tmp_path):
    def config(name: str) -> Path:
        warm_up = {"data": str(material / "sft.jsonl"), "steps": 3, "optimizer": OPTIMIZER}
        file = ppo(tmp_path / name, material, steps=1, sft=warm_up)
        written = yaml.safe_load(file.read_text())
        written["reward"]["models"]["preference"]["path"] = None  # starts from the model after the warm-up
        file.write_text(yaml.safe_dump(written))
        return file

    fork("megatron_rl", 1, "train", config("whole"), module=True)
    ended = config("ended")
    refused = ["mismatch.warn=1e-30", "mismatch.stop=1e-29"]
    first = fork("megatron_rl", 1, "train", ended, *refused, module=True, check=False)
    assert "MismatchError" in first.output and not list((tmp_path / "ended/run/checkpoints").iterdir())
    damaged = config("damaged")
    shutil.copytree(tmp_path / "ended/run", tmp_path / "damaged/run")
    flip(tmp_path / "damaged/run/reward_models/preference/model.safetensors")
    anew = {name: fork("megatron_rl", 1, "train", file, module=True).output
            for name, file in (("ended", ended), ("damaged", damaged))}  # fmt: skip
    runs = ("whole", "ended", "damaged")
    judged = {name: metrics(tmp_path / name)[0]["reward/component/preference"] for name in runs}
    assert judged["whole"] == judged["ended"] == judged["damaged"]
    samples = pandas.read_parquet(tmp_path / "whole/run/rollouts/step_1.parquet")
    assert samples["component/preference"].mean() == pytest.approx(judged["whole"])
    named = "reward.models.preference.training: its model is damaged: model.safetensors has different content"
    assert named in anew["damaged"] and "damaged" not in anew["ended"].replace(str(tmp_path), "")
    assert (tmp_path / "damaged/run/reward_models/preference.1").is_dir()

    # From its first checkpoint on a run goes on beside the very models that it has learned beside.
    flip(tmp_path / "ended/run/stages/sft/hf/model.safetensors")
    refused = fork("megatron_rl", 1, "train", ended, "steps=2", module=True, check=False)
    assert refused.returncode and "the model folder is damaged" in refused.output
    assert "sft: " in refused.output and "model.safetensors has different content" in refused.output


def flip(file: Path) -> None:
    """Change a bit of a file of tensors behind its header: it stays a file of finite numbers."""
    content = bytearray(file.read_bytes())
    content[3 * len(content) // 4] ^= 1
    file.write_bytes(content)


def grpo(folder: Path, material: Path, **changes) -> Path:
    """Write a GRPO run whose rollout has ranks of its own."""
    return ppo(
        folder,
        material,
        steps=4,
        reward={"function": "megatron_rl.rewards.arithmetic:exact_match", "models": {}},
        algorithm={"name": "grpo", "kl": "none"},
        critic=None,
        placement="standalone",
        **changes,
    )


def test_sampling_ahead_is_stale_by_the_bound_and_loses_nothing_in_a_resume(fork, material, tmp_path):
    frozen = {"optimizer": {"learning_rate": 1e-30}}
    for name, ahead in (("now", 0), ("ahead", 2)):
        file = grpo(tmp_path / name, material, actor=frozen, asynchrony={"steps_ahead": ahead})
        fork("megatron_rl", 2, "train", file, module=True)
    now, ahead = metrics(tmp_path / "now"), metrics(tmp_path / "ahead")
    # Without learning the order of calls makes no difference.
    for name in ("reward/mean", "policy/grad_norm", "policy/entropy", "rollout/response_length"):
        assert [line.get(name) for line in ahead] == [line.get(name) for line in now], name
    assert [line["staleness/max"] for line in ahead] == [0, 1, 2, 2]
    assert all(line["staleness/max"] <= 2 for line in ahead)
    assert unwritten("a run that samples ahead", ahead) == []
    # Only ranks that learn gather metrics, and the bytes arrive on the others.
    received = {line["reshard/bytes_received_max"] for line in (*now, *ahead)}
    assert len(received) == 1 and received.pop() > 0

    answered = {"data": str(material / "eval.jsonl"), "max_prompts": 32, "samples": 2, "temperature": 1.0}
    learns = {
        "actor": {"optimizer": {"learning_rate": 1e-2}},
        "asynchrony": {"steps_ahead": 1},
        "evaluation": {"every": 1, "sets": {"held_out": answered}},
    }
    (tmp_path / "odd.py").write_text("def score(*, response, **_):\n    return float(len(response) % 2)\n")
    # The actor's data-parallel ranks share a checkpoint's reading, in which the rollout's rank has no part.
    teaches = (
        f"reward.function={tmp_path / 'odd.py'}:score",
        "actor.layout.ranks=[0,1]",
        "rollout.ranks=[2]",
    )
    whole = grpo(tmp_path / "whole", material, **learns)
    # What may keep a checkpoint is waited for; else the answers come beside the next step, and are the same.
    fork("megatron_rl", 3, "train", whole, *teaches, "checkpoint.best=eval/held_out/reward", module=True)
    parted = grpo(tmp_path / "parted", material, **learns)
    shards = (*teaches, "checkpoint.optimizer_layout=same", "checkpoint.asynchronous=true")
    fork("megatron_rl", 3, "train", parted, "checkpoint.keep=9", *shards, module=True)
    assert [line["staleness/max"] for line in metrics(tmp_path / "parted")] == [0, 1, 1, 1]
    kept = (tmp_path / "parted/run/checkpoints").iterdir()
    kept = {path.name: fits_any_layout(read_meta(path)) for path in kept}
    assert set(kept) == {"step_2", "step_4"} and all(kept.values()), "any layout reads shards by their index"
    state = _read_file(tmp_path / "parted/run/checkpoints/step_2/state.pt", STATE_TYPES)["state"]
    assert state["held"]["sets"] == ("held_out",), "it is answered beside step 3"
    shutil.rmtree(tmp_path / "parted/run/checkpoints/step_4")
    again = fork("megatron_rl", 3, "train", parted, *teaches, module=True)
    assert "step 2: its checkpoint is rewritten for any layout" in again.output
    expected, found = metrics(tmp_path / "whole"), metrics(tmp_path / "parted")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    answers = [name for name in expected[0] if name.startswith("eval/")]
    said = {tuple(line[name] for name in answers) for line in expected}
    assert len(said) == 4, "each step's weights answer in their own way"
    for name in (*answers, "reward/mean", "policy/loss", "policy/grad_norm", "policy/entropy", "mismatch/kl"):
        assert [line.get(name) for line in found] == [line.get(name) for line in expected], name


def test_the_optimal_token_baseline_is_the_same_in_every_layout(fork, material, tmp_path):
    """The scoring pass returns the sum of squared probabilities over vocabulary shards and context ranks."""
    (tmp_path / "odd.py").write_text("def score(*, response, **_):\n    return float(len(response) % 2)\n")
    actor = {"optimizer": OPTIMIZER}
    names = ("policy/loss", "policy/grad_norm", "advantage/std", "advantage/abs_max", "reward/mean")
    layouts = {"alone": (1, {}), "cut": (4, {"tensor": 2, "context": 2})}
    found = {}
    for name, (ranks, layout) in layouts.items():
        file = grpo(tmp_path / name, material, actor={**actor, "layout": layout})
        options = ("algorithm.name=otb", f"reward.function={tmp_path / 'odd.py'}:score", "placement=colocate")
        fork("megatron_rl", ranks, "train", file, *options, module=True)
        found[name] = metrics(tmp_path / name)
    for mine, truth in zip(found["cut"], found["alone"], strict=True):
        assert truth["advantage/std"] > 0
        for name in names:
            assert mine[name] == pytest.approx(truth[name], rel=1e-3, abs=1e-5), name
