"""Stages before reinforcement learning: killed anywhere and started again they give the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megatron_rl.cli.main import main as command

WORKER = Path(__file__).parent / "workers" / "killed_train.py"
STAGES = "megatron_rl.trainer.stages"
UPDATE = "megatron_rl.roles.model_role:ModelRole.update"
MEASURED = ("time/", "throughput/", "memory/", "reshard/", "rows/")
OPTIMIZER = {"learning_rate": 1e-3, "warmup_steps": 2, "decay": "cosine", "minimum_learning_rate": 1e-5}
SFT, DPO, REWARD = 6, 5, 4
"""Steps of the three stages."""


def write(folder: Path, material: Path) -> Path:
    """Write a run of all three stages, whose checkpoints lie in the middle of epochs, and two more steps."""
    folder.mkdir(parents=True)
    for name, count in (("sft", 40), ("pairs", 30)):
        lines = (material / f"{name}.jsonl").read_text().splitlines()
        (folder / f"{name}.jsonl").write_text("\n".join(lines[:count]) + "\n")
        (folder / f"{name}_held_out.jsonl").write_text("\n".join(lines[count : count + 10]) + "\n")

    def stage(name: str, **settings: Any) -> dict[str, Any]:
        data = {"data": str(folder / f"{name}.jsonl"), "held_out": str(folder / f"{name}_held_out.jsonl")}
        return {**data, "optimizer": OPTIMIZER, "checkpoint_every": 2, "max_row_tokens": 14, **settings}

    config = {
        "run_dir": str(folder / "run"),
        "steps": 2,
        "model": {"path": str(material / "model"), "dtype": "bfloat16"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "sft": stage("sft", epochs=2.25, rows_per_step=16, evaluate_every=2),
        "preference": stage("pairs", steps=DPO, pairs_per_step=8, beta=0.5),
        "reward": {"models": {"judge": {"training": stage("pairs", steps=REWARD, pairs_per_step=8)}}},
        "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_microbatch": 64},
        "actor": {"optimizer": OPTIMIZER, "layout": {"pipeline": 2}},
        "rollout": {"engine": "torch", "max_response_tokens": 6},
        "evaluation": {"at_start": False, "every": 100},
        "checkpoint": {"every": 100},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(MEASURED)}
        for line in (run / f"{name}.jsonl").read_text().splitlines()
    ]


def weights(folder: Path) -> dict[str, bytes]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = content.get_tensor(name).float().numpy().tobytes()
    assert tensors, folder
    return tensors


def assert_same_runs(run: Path, expected: Path, names: dict[str, int]) -> None:
    """Compare logs and models; ``names`` has the stages and the number of their last step."""
    for name, last in names.items():
        found = lines(run, name)
        assert [line["step"] for line in found] == list(range(0 if name != "metrics" else 1, last + 1))
        assert found == lines(expected, name), name
    models = [path.parent.relative_to(expected) for path in expected.rglob("config.json")]
    assert models
    for model in models:
        assert weights(run / model) == weights(expected / model), model


BESIDE = ("checkpoint.asynchronous=true", "checkpoint.optimizer_layout=same")
KILLS = [
    ("in the middle of sft", UPDATE, 4, 0, False),
    ("while a checkpoint of sft is written", "megatron_rl.checkpoint.roles:plan_tensor_write", 1, 1, False),
    ("when sft has left its model", f"{STAGES}:export", 1, 1, True),
    ("in the middle of preference", UPDATE, 4, 1, False),
    ("when preference has left its model", f"{STAGES}:export", 1, 0, True),
    ("in the middle of reward-model training", UPDATE, 4, 0, False),
    ("before the reward model is left", f"{STAGES}:export", 1, 1, False),
    ("in the first step of reinforcement learning", UPDATE, 1, 0, False),
]


SUITE_KILLS = [KILLS[index] for index in (1, 2, 6, 7)]
"""While a checkpoint is written, between stages, before a model is left, and after the stages."""


def whole_run(fork: Any, material: Path) -> Path:
    """Return the folder of a run that nothing interrupts, made once."""
    folder = material / "whole"
    if not folder.exists():
        fork("megatron_rl", 2, "train", write(folder, material), module=True)
    return folder / "run"


@pytest.mark.parametrize("kills", [SUITE_KILLS, pytest.param(KILLS, marks=pytest.mark.campaign)])
def test_a_run_killed_anywhere_in_its_stages_gives_the_same_bits(fork, material, tmp_path, kills):
    whole = whole_run(fork, material)
    killed = write(tmp_path / "killed", material)
    for words, place, call, rank, after in kills:
        env = {"KILL_AT": place, "KILL_CALL": str(call), "KILL_RANK": str(rank)}
        env |= {"KILL_AFTER": "1"} if after else {}
        launch = fork(WORKER, 2, "train", killed, *BESIDE, env=env, check=False)
        assert launch.returncode, f"not killed {words}"
        assert not (tmp_path / "killed/run/hf").exists(), words
    fork("megatron_rl", 2, "train", killed, module=True)
    steps = {"sft": SFT, "dpo": DPO, "reward_judge": REWARD, "metrics": 2}
    assert_same_runs(tmp_path / "killed/run", whole, steps)

    sft = lines(whole, "sft")
    measured = [line["step"] for line in sft if "sft/held_out_loss" in line]
    assert measured == [0, 2, 4, 6] and sft[0]["sft/held_out_loss"] > sft[-1]["sft/held_out_loss"]
    assert not list((whole / "stages").glob("*/checkpoints"))
    # A folder that has ended repeats nothing.
    again = fork("megatron_rl", 2, "train", killed, "steps=3", module=True)
    assert "resumed from" in again.output and "supervised warm-up" not in again.output


def test_a_stage_ends_when_it_is_good_enough_and_stops_the_job_when_it_is_not(fork, material, tmp_path):
    whole = whole_run(fork, material)
    measured = [line["sft/held_out_loss"] for line in lines(whole, "sft") if "sft/held_out_loss" in line]
    config = yaml.safe_load((whole.parent / "config.yaml").read_text())
    run = tmp_path / "run"
    config |= {"run_dir": str(run), "sft": config["sft"] | {"until_loss": measured[-1] - 0.01}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    short = fork("megatron_rl", 2, "train", file, module=True, check=False)
    assert (
        short.returncode
        and "did not reach its target loss" in short.output
        and "sft.until_loss" in short.output
    )
    assert lines(run, "sft") == lines(whole, "sft") and not (run / "metrics.jsonl").exists()
    # Given a bar that it meets it goes on from its last step, and takes no further one.
    more = [f"sft.until_loss={measured[-1] + 1e-4}", "sft.epochs=9"]
    again = fork("megatron_rl", 2, "train", file, *more, module=True)
    assert f"target reached after {SFT} of" in again.output and len(lines(run, "metrics")) == 2
    # Met on the way, it ends there.
    job = write_job(tmp_path / "job", whole, material / "model", sft=config["sft"])
    fork("megatron_rl", 2, "sft", job, f"sft.until_loss={measured[1] + 1e-4}", module=True)
    assert lines(tmp_path / "job/run", "sft") == lines(whole, "sft")[:3], "steps 0 to 2"


def write_job(folder: Path, whole: Path, model: Path, **stage: Any) -> Path:
    """Write a job of one stage of the whole run: no prompts, no rollout, no reward that judges."""
    folder.mkdir()
    config = yaml.safe_load((whole.parent / "config.yaml").read_text())
    kept = {name: config[name] for name in ("batch", "actor", "checkpoint")}
    kept |= {"run_dir": str(folder / "run"), "data": {"max_prompt_tokens": 8}}
    kept |= {"model": {"path": str(model), "dtype": "bfloat16"}, **stage}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(kept))
    return file


def test_stages_as_jobs_of_their_own_give_what_they_give_in_a_run(fork, material, tmp_path, capsys):
    whole = whole_run(fork, material)
    config = yaml.safe_load((whole.parent / "config.yaml").read_text())
    sft = write_job(tmp_path / "sft", whole, material / "model", sft=config["sft"])
    kill = {"KILL_AT": UPDATE, "KILL_CALL": "4", "KILL_RANK": "1"}
    assert fork(WORKER, 2, "sft", sft, BESIDE[1], env=kill, check=False).returncode
    # Shards of the optimizer have an index, by which another layout reads them.
    assert command(["check", str(sft), "--for", "sft", "--world-size", "2", "actor.layout.pipeline=1"]) == 0
    assert "shards of another layout" not in capsys.readouterr().out
    for_megatron = tmp_path / "megatron"
    again = fork("megatron_rl", 2, "sft", sft, f"checkpoint.megatron={for_megatron}", module=True)
    assert "rewritten for any layout" in again.output
    assert (for_megatron / f"iter_{SFT:07d}").is_dir()
    assert lines(tmp_path / "sft/run", "sft") == lines(whole, "sft")
    assert command(["report", str(tmp_path / "sft/run")]) == 0
    assert "held-out loss" in (tmp_path / "sft/run/report.html").read_text()
    trained = tmp_path / "sft/run/hf"
    assert weights(trained) == weights(whole / "stages/sft/hf")

    # The next stage begins with what was written for Megatron-LM.
    prefer = write_job(tmp_path / "prefer", whole, trained, preference=config["preference"])
    begun = yaml.safe_load(prefer.read_text())
    begun["model"] = {"megatron": str(for_megatron), "hf_path": str(trained), "dtype": "bfloat16"}
    prefer.write_text(yaml.safe_dump(begun))
    fork("megatron_rl", 2, "prefer", prefer, module=True)
    assert lines(tmp_path / "prefer/run", "dpo") == lines(whole, "dpo")
    assert weights(tmp_path / "prefer/run/hf") == weights(whole / "stages/dpo/hf")

    start = tmp_path / "prefer/run/hf"
    judge = write_job(tmp_path / "judge", whole, start, reward=config["reward"])
    fork("megatron_rl", 2, "reward-model", judge, module=True)
    assert lines(tmp_path / "judge/run", "reward_judge") == lines(whole, "reward_judge")
    scorer = tmp_path / "judge/run/reward_models/judge"
    assert weights(scorer) == weights(whole / "reward_models/judge")

    AutoModelForCausalLM.from_pretrained(start)
    assert AutoModelForSequenceClassification.from_pretrained(scorer).config.num_labels == 1
    # A run starts from what the jobs have left, with the numbers of the run that did it all itself.
    config |= {"run_dir": str(tmp_path / "run"), "sft": None, "preference": None}
    config["model"]["path"] = str(start)
    config["reward"] = {"models": {"judge": {"path": str(scorer)}}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    fork("megatron_rl", 2, "train", tmp_path / "train.yaml", module=True)
    assert weights(tmp_path / "run/hf") == weights(whole / "hf")
    assert "complete since an earlier job" in fork("megatron_rl", 2, "sft", sft, module=True).output
