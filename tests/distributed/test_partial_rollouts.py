"""Over-sampling with carried and with discarded responses: the same numbers wherever and whenever it runs.

And the open order, whose numbers differ, but in which no prompt is lost.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pandas
import pytest
import yaml
from test_roles import grpo, metrics

from megatron_rl.checkpoint.roles import _read_file
from megatron_rl.trainer.state import STATE_TYPES
from tests.readme_metrics import unwritten

DELAYED = Path(__file__).parent / "workers/delayed_train.py"
ROLLOUT = {"engine": "torch", "max_response_tokens": 32, "oversample": 0.75, "round_tokens": 4}
REWARD = "def score(*, response, **_):\n    return float(len(response) % 3 == 0)\n"
LEARNING = {"optimizer": {"learning_rate": 1e-3}}
APART = ("rollout.ranks=[1,2]", "actor.layout.ranks=[0]", "steps=5", "checkpoint.keep=9")
COMPARED = (
    "reward/mean", "policy/loss", "policy/grad_norm", "policy/entropy", "response/length",
    "rollout/rounds", "rollout/carried", "rollout/carried_tokens", "rollout/partial_fraction",
    "rollout/discarded_prompts", "staleness/mean", "staleness/max", "staleness/token_mean",
    "sampling/prompts", "sampling/missing_groups",
)  # fmt: skip


def run(folder: Path, material: Path, **changes) -> Path:
    """Write a run whose rewards differ within most groups."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    file = grpo(folder, material, **changes)
    config = yaml.safe_load(file.read_text())
    config["reward"]["function"] = f"{folder / 'reward.py'}:score"
    file.write_text(yaml.safe_dump(config))
    return file


def numbers(folder: Path) -> list[dict[str, float | None]]:
    return [{name: line.get(name) for name in ("step", *COMPARED)} for line in metrics(folder)]


def test_delays_and_a_resume_change_nothing_and_the_bound_holds(fork, material, tmp_path):
    changes = {
        "actor": LEARNING,
        "rollout": ROLLOUT | {"partial": True},
        "asynchrony": {"steps_ahead": 1, "max_staleness": 2},
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork("megatron_rl", 3, "train", whole, *APART, module=True)
    expected = metrics(tmp_path / "whole")
    assert max(line["staleness/max"] for line in expected) == 2
    assert any(line["rollout/partial_fraction"] > 0 for line in expected)
    assert all(line["rollout/carried"] == 6 for line in expected)
    assert unwritten("a run that carries responses", expected) == []
    parted = run(tmp_path / "parted", material, **changes)
    shutil.copytree(tmp_path / "whole/run", tmp_path / "parted/run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"parted/run/checkpoints/step_{step}")
    fork(DELAYED, 3, "train", parted, *APART)
    assert numbers(tmp_path / "parted") == numbers(tmp_path / "whole")
    # As many are carried as a step wants: where these have ended, no replica begins the others.
    changes["rollout"] |= {"oversample": 1.0, "max_in_flight": 2}
    fork("megatron_rl", 3, "train", run(tmp_path / "idle", material, **changes), *APART, module=True)
    idle = metrics(tmp_path / "idle")
    assert [line["rollout/carried"] + line["rollout/not_begun"] for line in idle] == [8] * 5
    assert any(line["rollout/not_begun"] for line in idle)


TALK = """
import asyncio, random
from megatron_rl import Environment

class Talk(Environment):
    async def run(self, episode):
        await asyncio.sleep(random.random() * 0.05)  # which episode ends first differs from run to run
        await episode.generate(limit=1 + episode.seed % 7)
        episode.observe("1+")
        await episode.generate()
"""


def test_replicas_that_draw_groups_change_nothing_and_discarded_prompts_come_again(fork, material, tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    rollout = ROLLOUT | {"top_p": 0.9, "min_p": 0.01, "environment": {"name": f"{tmp_path / 'talk.py'}:Talk"}}
    found, tables = {}, {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        # One group at a time: all but the first of each replica come from the queue.
        queue = {} if ranks == 1 else {"max_in_flight": 2}
        frozen = {"optimizer": {"learning_rate": 1e-30}}
        file = run(folder, material, actor=frozen, rollout=rollout | queue)
        fork("megatron_rl", ranks, "train", file, "placement=colocate", "steps=2", module=True)
        found[ranks] = metrics(folder)
        tables[ranks] = [pandas.read_parquet(folder / f"run/rollouts/step_{step}.parquet") for step in (1, 2)]
    assert unwritten("a run that discards responses", found[1]) == []
    for ranks in (2, 4):
        for mine, truth in zip(found[ranks], found[1], strict=True):
            for name in ("reward/mean", "rollout/rounds", "response/length", "rollout/discarded_tokens"):
                assert mine[name] == pytest.approx(truth[name], rel=1e-6), (truth["step"], name)
            assert truth["rollout/discarded_prompts"] == 6 and "staleness/max" not in truth
            assert mine["mismatch/abs_diff"] < 1e-4, (
                "log-probs are not over the tokens that were sampled from"
            )
        for mine, truth in zip(tables[ranks], tables[1], strict=True):
            assert len(truth) == 16
            assert mine[["prompt", "response", "conversation"]].equals(
                truth[["prompt", "response", "conversation"]]
            )
    source = [json.loads(line)["prompt"] for line in (material / "train.jsonl").read_text().splitlines()]
    assert all(prompt in source for table in tables[1] for prompt in table["prompt"])


def test_the_open_order_loses_no_prompt_and_learns_from_none_twice(fork, material, tmp_path):
    """Groups that are complete first by the clock, before and after a resume, of prompts that all differ."""
    texts = [f"{first}+{second}=" for first in range(10, 20) for second in range(10, 15)]
    data = tmp_path / "distinct.jsonl"
    data.write_text("".join(json.dumps({"prompt": text, "ground_truth": "1"}) + "\n" for text in texts))
    changes = {
        "actor": LEARNING,
        "data": {"train": str(data)},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        # One group at a time: the plain engine answers all that it has at once.
        "rollout": ROLLOUT | {"partial": True, "oversample": 1.0, "order": "open", "max_in_flight": 2},
        "asynchrony": {"steps_ahead": 1, "max_staleness": 3},
        "checkpoint": {"every": 1},
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork(DELAYED, 3, "train", whole, *APART)
    resumed = run(tmp_path / "resumed", material, **changes)
    shutil.copytree(tmp_path / "whole/run", tmp_path / "resumed/run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"resumed/run/checkpoints/step_{step}")
    fork(DELAYED, 3, "train", resumed, *APART)
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        lines = metrics(folder)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert unwritten("a run in the open order", lines) == []
        assert all(line["staleness/max"] <= 3 for line in lines)
        assert any(line["rollout/carried"] + line["rollout/not_begun"] > 0 for line in lines)
        for step in (3, 5):
            state = _read_file(folder / f"run/checkpoints/step_{step}/state.pt", STATE_TYPES)["state"]
            started, waiting = state["rollouts"]["started"], state["rollouts"]["waiting"]
            kept = [batch["prompts"] for batch in state["queue"]]
            kept += [] if started is None else [started["prompts"]]
            kept += [] if waiting is None else [waiting]
            tables = [
                pandas.read_parquet(folder / f"run/rollouts/step_{n}.parquet") for n in range(1, step + 1)
            ]
            assert all(len(table) >= 8 for table in tables)
            learned = [text for table in tables for text in table["prompt"][::2]]
            prompts = [*learned, *(text for batch in kept for text in batch.prompts)]
            assert len(set(prompts)) == len(prompts) == state["prompts"]["position"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_batch_with_nothing_left_to_learn_from_ends_the_run_in_either_order(
    fork, material, tmp_path, ahead
):
    """Every response is truncated after its first token, and truncated responses are not in the loss."""
    settings = ("algorithm.overlong.filter=true", "rollout.max_response_tokens=1", "steps=8")
    few = ("batch.prompts_per_step=2", "batch.samples_per_prompt=2")
    file = run(tmp_path / "cut", material, actor=LEARNING, asynchrony={"steps_ahead": ahead})
    done = fork("megatron_rl", 2, "train", file, *settings, *few, module=True, check=False)
    assert done.returncode != 0
    assert "no token of this step's responses is left to train on" in done.output
    assert "algorithm.overlong.filter" in done.output


def test_dynamic_sampling_ahead_of_the_learner_samples_as_many_prompts_as_teach_enough(
    fork, material, tmp_path
):
    file = run(
        tmp_path / "dapo",
        material,
        actor=LEARNING,
        rollout=ROLLOUT | {"partial": True},
        asynchrony={"steps_ahead": 1},
    )
    dapo = ("algorithm.name=dapo", "batch.prompts_per_step=4")
    fork("megatron_rl", 2, "train", file, *dapo, module=True)
    found = metrics(tmp_path / "dapo")
    # Nothing was known when the first two batches were sampled; then the share of the last learned one.
    assert [line["sampling/prompts"] for line in found[:2]] == [4, 4]
    for before, later in zip(found, found[2:], strict=False):
        share = (before["sampling/informative_fraction"] * before["sampling/prompts"] + 0.5) / (
            before["sampling/prompts"] + 0.5
        )
        assert later["sampling/prompts"] >= min(math.ceil(4 / share), 16)  # more where groups must not wait
    assert all(line["staleness/max"] <= 3 for line in found)
