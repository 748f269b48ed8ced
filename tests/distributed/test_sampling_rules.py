"""Sampling parameters that change over steps and within a response: trainer and engine agree, resumes too."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from test_older_weights import FROZEN, resumed, run
from test_roles import metrics

from tests.readme_metrics import unwritten

pytestmark = pytest.mark.starts_ranks

COMPARED = ("policy/loss", "reward/mean", "response/length", "mismatch/abs_diff")


def numbers(folder: Path, *names: str) -> list[dict[str, float | None]]:
    return [{name: line.get(name) for name in ("step", *COMPARED, *names)} for line in metrics(folder)]


@pytest.mark.campaign
def test_carried_responses_keep_the_temperature_of_their_first_step(fork, material, tmp_path):
    changes = {
        "placement": "standalone",
        "actor": FROZEN | {"layout": {"ranks": [0]}},
        "rollout": {
            "engine": "torch",
            "ranks": [1, 2],
            "temperature": {"start": 1.4, "end": 0.6, "steps": 4},
            "oversample": 0.5,
            "partial": True,
            "round_tokens": 2,
            "max_response_tokens": 12,
        },
        "asynchrony": {"steps_ahead": 1},
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork("megatron_rl", 3, "train", whole, module=True)
    lines = metrics(tmp_path / "whole")
    assert unwritten("a run whose temperature changes", lines) == []

    # Rows of earlier steps raise the mean above the temperature of the step that draws prompts.
    schedule = [1.4, 1.2, 1.0, 0.8, 0.6, 0.6]
    temperatures = [line["rollout/temperature"] for line in lines]
    assert temperatures[0] == pytest.approx(1.4) and temperatures[-1] < 0.9
    assert any(mean > value + 1e-3 for mean, value in zip(temperatures, schedule, strict=True))
    # At another temperature than that of the draw, log-probs would differ by tenths.
    assert max(line["mismatch/abs_diff"] for line in lines) < 1e-4

    again = run(tmp_path / "again", material, **changes)
    resumed(tmp_path / "whole", "again", 3, 6)
    fork("megatron_rl", 3, "train", again, module=True)
    names = ("rollout/temperature",)
    assert numbers(tmp_path / "again", *names) == numbers(tmp_path / "whole", *names)


TALK = """
from megatron_rl import Environment

class Talk(Environment):
    async def run(self, episode):
        await episode.generate(limit=2 + episode.seed % 3)
        episode.observe("1+")
        await episode.generate()
"""
# The first token of a turn is all but greedy, and the fourth all but uniform.
HEATED = {"temperature": {"start": {"start": 0.01, "end": 0.02, "steps": 4}, "end": 5.0, "over": 3}}
NARROW = {
    "temperature": {"start": 1.3, "end": 0.7, "over": 4},
    "top_p": {"start": 0.6, "end": 1.0, "over": 5},
}


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_schedules_over_tokens_go_on_in_later_steps_and_after_a_resume(fork, material, tmp_path, turns):
    (tmp_path / "talk.py").write_text(TALK)
    records = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record["task"] = ("hot", "narrow")[number % 2]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, records)) + "\n")

    rollout = {
        "engine": "torch",
        "ranks": [1, 2],
        "oversample": 0.5,
        "partial": True,
        "round_tokens": 2,
        "max_response_tokens": 24,
        "min_response_tokens": 3,
        # Short responses of many lengths: others go on in the next step.
        "stop": ["1", "2", "3"],
        "sampling_profiles": {"hot": HEATED, "narrow": NARROW},
    }
    if turns == 2:
        rollout["environment"] = {"name": f"{tmp_path / 'talk.py'}:Talk"}
    changes = {
        "placement": "standalone",
        "data": {"train": str(data)},
        "actor": FROZEN | {"layout": {"ranks": [0]}},
        "rollout": rollout,
        "asynchrony": {"steps_ahead": 1},
        "steps": 4,
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork("megatron_rl", 3, "train", whole, module=True)
    lines = metrics(tmp_path / "whole")
    assert max(line["mismatch/abs_diff"] for line in lines) < 1e-4
    assert any(line["rollout/partial_fraction"] > 0 for line in lines)

    again = run(tmp_path / "again", material, **changes)
    resumed(tmp_path / "whole", "again", 2, 4)
    fork("megatron_rl", 3, "train", again, module=True)
    # Environments answer in any order, so that sums of a batch differ in their last digits.
    pairs = zip(numbers(tmp_path / "again"), numbers(tmp_path / "whole"), strict=True)
    for found, expected in pairs:
        for name in ("policy/loss", "reward/mean", "response/length"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), (found["step"], name)

    # Samples of a hot prompt begin alike, and go on differently.
    tasks = {record["prompt"]: record["task"] for record in records}
    table = pandas.concat(
        pandas.read_parquet(tmp_path / f"whole/run/rollouts/step_{step}.parquet") for step in range(1, 5)
    )
    alike = {}
    for task in ("hot", "narrow"):
        rows = table[table["prompt"].map(tasks.get) == task]
        groups = [list(group["response"]) for _, group in rows.groupby(["step", "prompt"])]
        assert len({text for texts in groups for text in texts}) > len(groups)
        alike[task] = sum(len({text[:1] for text in texts}) == 1 for texts in groups) / len(groups)
    assert alike["hot"] > 0.7 and alike["hot"] > alike["narrow"] + 0.2, alike
