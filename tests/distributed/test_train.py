"""Complete runs through the command: they repeat, resume, survive invalid rewards, learn and fail clearly."""

from __future__ import annotations

import json
import math
import shutil
import socket
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from safetensors import safe_open

from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.metrics import read_metrics
from tests.readme_metrics import unwritten

# Measured on the machine; and a run that has just resumed must sync weights that an evaluation had synced.
MEASURED = ("time/", "throughput/", "memory/", "reshard/")


def _config(path: Path, material: Path, **changes) -> Path:
    config = {
        "run_dir": str(path / "run"),
        "steps": 4,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {
            "train": str(material / "train.jsonl"),
            "max_prompt_tokens": 8,
        },
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 4, "optimizer_steps": 2},
        "actor": {
            "layout": {"pipeline": 2},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1},
        },
        "rollout": {"tensor": 2, "max_response_tokens": 6},
        "evaluation": {
            "every": 2,
            "sets": {"held_out": {"data": str(material / "eval.jsonl"), "max_prompts": 32}},
        },
        "checkpoint": {"every": 2, "keep": 1},
        "sft": {"data": str(material / "sft.jsonl"), "steps": 3, "optimizer": {"learning_rate": 1e-3}},
        "algorithm": {"name": "grpo", "kl": {"name": "loss", "coef": 0.1}},
    }
    for name, value in changes.items():
        section = config.get(name)
        config[name] = (
            {**section, **value} if isinstance(section, dict) and isinstance(value, dict) else value
        )
    path.mkdir(parents=True, exist_ok=True)
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def _lines(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(MEASURED)}
        for line in lines
    }


def _weights(folder: Path) -> dict[str, bytes]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                found[name] = tensors.get_tensor(name).numpy().tobytes()
    return found


def test_resumed_run_equals_uninterrupted_run(fork, material, tmp_path):
    truncated = {
        "rollout": {
            "top_p": 0.9,
            "temperature": {"start": 1.1, "end": 0.8, "steps": 3},
            "repetition_penalty": 1.1,
            "sampling_profiles": {"other": {"top_k": 5}},
        },
        "evaluation": {"sets": _two_sets(tmp_path, material)},
        "checkpoint": {"best": "eval/sampled/lengths/of_text", "best_is": "lowest"},
    }
    whole = _config(tmp_path / "whole", material, **truncated)
    fork("megatron_rl", 2, "train", whole, module=True)
    parted = _config(tmp_path / "parted", material, **truncated)
    shards = ("checkpoint.optimizer_layout=same", "checkpoint.asynchronous=true")
    fork("megatron_rl", 2, "train", parted, "steps=2", "checkpoint.export=false", *shards, module=True)
    first = _lines(tmp_path / "parted/run")
    second = fork("megatron_rl", 2, "train", parted, *shards, module=True)
    assert "at step 2" in second.output
    assert "evaluator broken of sampled failed (exception): " in second.output

    written = read_metrics(tmp_path / "whole/run/metrics.jsonl")
    assert unwritten("a run with a warm-up", written) == []
    assert written[0]["reshard/bytes_received_max"] > 0, "the first evaluation has brought the weights"
    expected = _lines(tmp_path / "whole/run")
    assert sorted(expected) == [0, 1, 2, 3, 4]
    assert first == {step: expected[step] for step in (0, 1, 2)}, "the same seed gave other numbers"
    assert _lines(tmp_path / "parted/run") == expected
    lengths = {step: expected[step]["eval/sampled/lengths/of_text"] for step in (2, 4)}
    best = min(lengths, key=lambda step: lengths[step])
    for run in ("whole", "parted"):
        kept = {path.name for path in (tmp_path / run / "run/checkpoints").iterdir()}
        assert kept == {f"step_{best}", "step_4"}, "the newest, and the best"
    _check_sampled_set(expected[4])
    weights = _weights(tmp_path / "whole/run/hf")
    assert weights and _weights(tmp_path / "parted/run/hf") == weights
    differences = [line["mismatch/abs_diff"] for step, line in expected.items() if step]
    assert max(differences) < 1e-4
    # The reference is the model after the warm-up, also in the resumed run.
    assert abs(expected[1]["kl/ref"]) < 1e-6 < expected[4]["kl/ref"]
    assert expected[4]["policy/version"] > expected[1]["policy/version"]

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "whole/run/hf")
    _check_offline_commands(
        fork, whole, tmp_path / "whole/run", expected[4]["eval/held_out/accuracy"], weights
    )


def test_a_resumed_run_skips_the_same_prompts_with_equal_rewards(fork, material, tmp_path):
    # An epoch of twelve prompts takes a step and a half: all steps but the first two draw by rewards.
    lines = [line for line in (material / "train.jsonl").read_text().splitlines() if len(line) < 99][:12]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    passed = [json.loads(line)["prompt"] for line in lines[:7]]
    score = f"return prompt in {passed} or float(len(response) % 3)"
    reward = f"def score(*, prompt, response, **_):\n    {score}\n"
    (tmp_path / "reward.py").write_text(reward)
    changes = {
        "data": {"train": str(tmp_path / "few.jsonl"), "uniform_share": 0.2},
        "reward": {"function": f"{tmp_path}/reward.py:score"},
        "steps": 6,
        "sft": None,
        "evaluation": None,
    }
    whole = _config(tmp_path / "whole", material, **changes)
    parted = _config(tmp_path / "parted", material, **changes)
    fork("megatron_rl", 2, "train", whole, "checkpoint.export=false", module=True)
    fork("megatron_rl", 2, "train", parted, "steps=4", "checkpoint.export=false", module=True)
    fork("megatron_rl", 2, "train", parted, "checkpoint.export=false", module=True)

    expected = _lines(tmp_path / "whole/run")
    assert _lines(tmp_path / "parted/run") == expected
    assert unwritten("a run that skips uniform prompts", expected.values()) == []
    steps = [line for step, line in expected.items() if step]
    assert max(line["curriculum/uniform"] for line in steps) >= 7 / 12
    assert steps[0]["curriculum/skipped"] == 0 < max(line["curriculum/skipped"] for line in steps)
    drawn = []
    for step in range(1, 7):
        table = pyarrow.parquet.read_table(tmp_path / f"whole/run/rollouts/step_{step}.parquet")
        drawn.append(sum(prompt in passed for prompt in table.column("prompt").to_pylist()) / 32)
    assert sum(drawn[-2:]) < sum(drawn[:2]), drawn


SOURCE_REWARDS = """
def ranked(group, metadata):
    # One call for all responses to a prompt: the shortest has the largest reward.
    return [{"reward": 1 / (1 + len(text)), "level": len(metadata)} for text in group]

def digits(response):
    if response.startswith("1"):
        raise ValueError("no ones")
    return sum(text.isdigit() for text in response)
"""


def _sources(folder: Path, material: Path) -> tuple[dict, Path]:
    """Return two sources with everything that a source may have of its own, and a model with a template."""
    # Three prompts make a window of the shares and a step takes eight: a run stops inside a window.
    lines = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()]
    kwargs = [{"thinks": False}, None, {}, {"thinks": True}, {"thinks": False}]
    few = [line | {"chat_template_kwargs": value} for line, value in zip(lines[:5], kwargs, strict=True)]
    few[1] |= {"task": "sums", "prompt": "7+8="}
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, few)))
    (folder / "rewards.py").write_text(SOURCE_REWARDS)

    shutil.copytree(material / "model", folder / "model")
    (folder / "model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '*' if thinks is defined and not thinks else '=' }}{% endif %}"
    )
    rewards = f"{folder}/rewards.py"
    many = {"path": str(material / "train.jsonl"), "weight": 2, "chat_template_kwargs": {"thinks": False}}
    few = {"path": str(folder / "few.jsonl"), "chat_template": True, "profile": "brief"}
    return {
        "many": many | {"reward": f"{rewards}:digits"},
        "few": few | {"reward": f"{rewards}:ranked"},
    }, folder / "model"


def test_a_resumed_run_of_two_sources_equals_an_uninterrupted_one(fork, material, tmp_path):
    sources, model = _sources(tmp_path, material)
    changes = {
        "model": {"path": str(model)},
        "data": {
            "train": None,
            "max_prompt_tokens": 16,
            "sources": sources,
            "weights": {3: {"many": 1, "few": 1}},
        },
        "reward": {"function": None},
        "rollout": {
            "sampling_profiles": {"brief": {"max_response_tokens": 2}, "sums": {"max_response_tokens": 1}}
        },
        "sft": None,
        "evaluation": None,
    }
    whole = _config(tmp_path / "whole", material, **changes)
    parted = _config(tmp_path / "parted", material, **changes)
    fork("megatron_rl", 2, "train", whole, "checkpoint.export=false", module=True)
    fork("megatron_rl", 2, "train", parted, "steps=2", "checkpoint.export=false", module=True)
    fork("megatron_rl", 2, "train", parted, "checkpoint.export=false", module=True)

    expected = _lines(tmp_path / "whole/run")
    assert _lines(tmp_path / "parted/run") == expected
    counts = [
        (line["data/prompts/many"], line["data/prompts/few"]) for step, line in expected.items() if step
    ]
    assert counts == [(5, 3), (6, 2), (5, 3), (4, 4)]
    assert [line["data/epoch/few"] for step, line in expected.items() if step] == [0, 0, 1, 2]

    written = read_metrics(tmp_path / "whole/run/metrics.jsonl")
    assert unwritten("a run of several sources", written) == []

    # The mean reward of a source is that of its stored samples.
    marks = set()
    for step in (1, 2, 3, 4):
        rows = _check_source_samples(tmp_path / f"whole/run/rollouts/step_{step}.parquet")
        for name in sources:
            rewards = [row["reward"] for row in rows if row["source"] == name]
            assert len(rewards) == 4 * expected[step][f"data/prompts/{name}"]
            rewards = [reward for reward in rewards if not math.isnan(reward)]
            assert expected[step][f"reward/mean/{name}"] == pytest.approx(sum(rewards) / len(rewards))
        marks |= {row["prompt"][-1] for row in rows if row["source"] == "few"}
    assert marks == {"*", "="}, "records with arguments and without"


def _check_source_samples(path: Path) -> list[dict]:
    """Check that each stored sample has the reward, the limit and the prompt of its source; return them."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows:
        response = row["response"]
        if row["source"] == "few":
            assert row["reward"] == pytest.approx(1 / (1 + len(response))) and row["component/level"] >= 1
            limit = 1 if row["prompt"] == "7+8==" else 2
            assert len(response) <= limit and row["prompt"][-1] in "*="
        else:
            failed = response.startswith("1")
            assert math.isnan(row["reward"]) if failed else row["reward"] == sum(map(str.isdigit, response))
            assert ("no ones" in (row["failure"] or "")) is failed
            assert row["prompt"].endswith("*") and math.isnan(row["component/level"])
    return rows


def test_sources_have_their_rewards_with_an_environment_and_sampling_ahead(fork, material, tmp_path):
    sources, model = _sources(tmp_path, material)
    (tmp_path / "env.py").write_text(
        "from megatron_rl import Environment\n"
        "class Twice(Environment):\n"
        "    async def run(self, episode):\n"
        "        await episode.generate(limit=2)\n"
        "        episode.observe('1+2')\n"
        "        await episode.generate(limit=2)\n"
    )
    (tmp_path / "rewards.py").write_text(
        "def digits(response, turns):\n"
        "    return {'reward': len(response), 'opened': turns[1]['content'].endswith('*')}\n"
        "def ranked(group, turns):\n"
        "    return [{'reward': len(one), 'opened': one[1]['content'].endswith('*')} for one in turns]\n"
    )
    config = _config(
        tmp_path,
        material,
        model={"path": str(model)},
        data={"train": None, "max_prompt_tokens": 16, "sources": sources},
        reward={"function": None},
        rollout={
            "tensor": 1,
            "max_response_tokens": 24,
            "environment": {"name": f"{tmp_path}/env.py:Twice"},
            "sampling_profiles": {"brief": {"temperature": 0.5}},
        },
        actor={"layout": {}},
        placement="standalone",
        asynchrony={"steps_ahead": 1},
        steps=3,
        sft=None,
        evaluation=None,
        checkpoint={"every": 100, "export": False},
    )
    fork("megatron_rl", 2, "train", config, module=True)
    for step in (1, 2, 3):
        rows = pyarrow.parquet.read_table(tmp_path / f"run/rollouts/step_{step}.parquet").to_pylist()
        assert {row["source"] for row in rows} == {"many", "few"}
        for row in rows:
            # The observation opens the next turn as the prompt of the record does.
            if not math.isnan(row["reward"]):
                assert row["component/opened"] == row["prompt"].endswith("*"), row
        assert any(row["component/opened"] == 0 for row in rows)


def _two_sets(folder: Path, material: Path) -> dict[str, dict]:
    """Return an evaluation set as usual, and one with samples, a reward and evaluators of its own."""
    judges = folder / "judges.py"
    judges.write_text(
        "def reward(prompt, response, ground_truth, metadata): return float(len(response) % 2)\n"
        "def lengths(prompt, group, ground_truth, metadata):\n"
        "    return [{'reward': len(group), 'of_text': len(text)} for text in group]\n"
        "def broken(prompt, response, ground_truth, metadata): raise KeyError('style')\n"
    )
    data = str(material / "eval.jsonl")
    named = {name: f"{judges}:{name}" for name in ("lengths", "broken")}
    sampled = {"data": data, "max_prompts": 8, "samples": 4, "temperature": 1.0, "top_p": 0.95}
    return {
        "held_out": {"data": data, "max_prompts": 32},
        "sampled": {**sampled, "reward": f"{judges}:reward", "evaluators": named},
    }


def _check_sampled_set(values):
    metrics = {name.removeprefix("eval/sampled/"): value for name, value in values.items()}
    odd = metrics["accuracy"]
    assert odd == metrics["reward"] and metrics["lengths"] == 4
    assert odd <= metrics["pass_at_2"] <= metrics["pass_at_4"] and 0 <= metrics["majority_at_4"] <= 1
    assert metrics["accuracy_low"] <= odd <= metrics["accuracy_high"]
    assert metrics["broken_failed"] == 1 and "broken" not in metrics, (
        "a failure is counted, and stops nothing"
    )
    assert {*EvaluationSetConfig("x", samples=4).metric_names()} <= {*metrics}


def _check_offline_commands(fork, config, run, accuracy, weights):
    """Check that `eval` and `export` of the last checkpoint give the results of the run itself."""
    models = (run / "checkpoints/step_4", run / "hf")
    result = fork("megatron_rl", 2, "eval", config, "--checkpoint", *models, "steps=1", module=True)
    (line,) = [line for line in result.output.splitlines() if line.startswith("eval/held_out/accuracy ")]
    assert line.split()[1::2] == [f"{accuracy:.4f}"] * 2, result.output
    fork("megatron_rl", 1, "export", run / "checkpoints/step_4", "--out", run / "again", module=True)
    assert _weights(run / "again") == weights


def test_failed_rewards_are_counted_and_never_zero(fork, material, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\n"
        "def judge(prompt, response, ground_truth, metadata):\n"
        "    kind = int(ground_truth) % 4\n"
        "    if kind == 1: raise ValueError('cannot judge this')\n"
        "    if kind == 0: return float('nan')\n"
        "    if kind == 2 and int(ground_truth) % 3 == 0: time.sleep(60)\n"
        "    return {'reward': 5.0, 'rewards': -7.0, 'valid': 0.0, 'rows': 3.0, 'function': 2.0}\n"
    )
    config = _config(
        tmp_path,
        material,
        steps=1,
        reward={"function": f"{reward}:judge", "timeout": 0.5},
        actor={"layout": {}},
        rollout={"tensor": 1},
        sft=None,
        evaluation={"every": 100, "at_start": False},
        checkpoint={"every": 100, "export": False},
    )
    result = fork("megatron_rl", 1, "train", config, module=True)
    line = _lines(tmp_path / "run")[1]
    assert unwritten("a run whose rewards fail", [line]) == []
    assert 0 < line["reward/valid_fraction"] < 1
    assert line["reward/invalid"] == pytest.approx(1 - line["reward/valid_fraction"])
    assert line["reward/invalid_exception"] > 0 and line["reward/invalid_not_finite"] > 0
    assert line["reward/mean"] == 5.0, "a failed reward or a component entered the mean"
    components = {name: line[f"reward/component/{name}"] for name in ("rewards", "valid", "rows", "function")}
    assert components == {"rewards": -7.0, "valid": 0.0, "rows": 3.0, "function": 2.0}
    assert "cannot judge this" in result.output


@pytest.mark.parametrize("server", ["http", "judge"])
def test_a_run_whose_rewards_all_fail_stops_and_says_why(fork, material, tmp_path, server):
    environment = tmp_path / "talk.py"
    environment.write_text(
        "from megatron_rl import Environment\n"
        "class Talk(Environment):\n"
        "    async def run(self, episode):\n"
        "        await episode.generate(limit=2)\n"
        "        if episode.seed % 4 == 0: raise KeyError('no such tool')\n"
        "        episode.observe('1+')\n"
        "        await episode.generate()\n"
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = {"url": f"http://127.0.0.1:{nobody.getsockname()[1]}", "retries": 1, "backoff": 0.01}
        judge = {**dead, "model": "m"}
        servers = {"judge": judge} if server == "judge" else {"http": dead, "judge": judge}
        lines = _fails_entirely(fork, material, tmp_path, f"{environment}:Talk", servers)
    asked = 1 - lines[1]["environment/failed"]
    # Requests that are under way when it opens end their tries.
    assert 0 < lines[1][f"reward/{server}/requests"] < 2 * asked, "a circuit that is open sends nothing more"
    if server == "judge":
        assert unwritten("a run with a judge", lines.values()) == []
    else:
        assert unwritten("a run with an environment and a server", lines.values()) == []
        # What the first server could not reward is not sent to the judge.
        assert lines[1]["reward/saved/judge"] == pytest.approx(asked)
        assert "reward/judge/requests" not in lines[1]


def _fails_entirely(fork, material, tmp_path, environment, servers):
    changes = {
        "reward": {"function": None, "invalid_steps": 2, **servers},
        "rollout": {
            "tensor": 1,
            "engine": "torch",
            "max_response_tokens": 8,
            "environment": {"name": environment},
        },
    }
    config = _config(tmp_path, material, sft=None, evaluation={"at_start": False}, **changes)
    result = fork("megatron_rl", 2, "train", config, module=True, check=False)
    assert result.returncode != 0
    assert "rewards fail in 100% of the samples, in 2 consecutive steps" in result.output
    assert (
        "most often: circuit_open" in result.output and "nothing is sent to it for a while" in result.output
    )
    lines = _lines(tmp_path / "run")
    assert sorted(lines) == [1, 2] and all(line["reward/valid_fraction"] == 0 for line in lines.values())
    assert lines[1]["environment/turns"] > 1 and 0 < lines[1]["environment/failed_exception"] < 0.6
    return lines


def test_a_failure_names_rank_role_and_phase_and_ends_the_job(forked_torchrun, material, tmp_path):
    config = _config(tmp_path, material, sft=None, mismatch={"warn": 1e-30, "stop": 1e-29})
    code, output = forked_torchrun("megatron_rl", "train", config, timeout=240)
    assert code == 1
    assert "actor: tensor 0, pipeline" in output
    assert "failed in phase 'learn' of step 1: MismatchError" in output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bach": {"prompts_per_step": 1}}, "did you mean `batch`?"),
        ({"actor": {"layout": {"tensor": 3}}}, "actor.layout"),
        ({"model": {"path": "/nowhere", "dtype": "float32"}}, "model.path"),
    ],
)
def test_bad_input_stops_every_rank_at_once(forked_torchrun, material, tmp_path, changes, words):
    config = _config(tmp_path, material, **changes)
    code, output = forked_torchrun("megatron_rl", "train", config, timeout=60)
    assert code != 0
    assert words in output and "fix:" in output
    assert not (tmp_path / "run/metrics.jsonl").exists()
