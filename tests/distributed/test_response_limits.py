"""`rollout.max_response_tokens` as a table and as `auto`: limits computed again from a run's samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas
import pytest
from test_older_weights import resumed, run
from test_roles import metrics

from tests.readme_metrics import unwritten

pytestmark = pytest.mark.starts_ranks

AUTO = {"quantile": 0.25, "margin": 1.1, "at_least": 2, "at_most": 48, "responses": 16, "window": 40}
ROLLOUT = {"engine": "torch", "max_response_tokens": "auto", "auto_limit": AUTO}
COMPARED = ("response/limit/addition", "response/truncated_fraction/addition", "policy/loss", "reward/mean")


def samples(folder: Path, step: int) -> pandas.DataFrame:
    return pandas.read_parquet(folder / f"run/rollouts/step_{step}.parquet")


def numbers(folder: Path) -> list[dict[str, float | None]]:
    return [{name: line.get(name) for name in ("step", *COMPARED)} for line in metrics(folder)]


def expected_limit(lengths: list[int]) -> int:
    if len(lengths) < AUTO["responses"]:
        return AUTO["at_most"]
    latest = sorted(lengths[-AUTO["window"] :])
    length = latest[math.ceil(len(latest) / 4) - 1]
    return min(max(math.ceil(length * 1.1), AUTO["at_least"]), AUTO["at_most"])


def test_limits_follow_the_lengths_of_earlier_steps_on_any_ranks_and_after_a_resume(fork, material, tmp_path):
    whole = run(tmp_path / "whole", material, rollout=ROLLOUT)
    fork("megatron_rl", 1, "train", whole, module=True)
    lines = metrics(tmp_path / "whole")
    assert unwritten("a run with limits of its own", lines) == []
    lengths: list[int] = []
    limits = []
    for line in lines:
        table = samples(tmp_path / "whole", line["step"])
        limits.append(expected_limit(lengths))
        assert line["response/limit/addition"] == limits[-1]
        cut = table["finish_reason"] == 1
        assert set(table["length"][cut]) <= {limits[-1]} and table["length"].max() <= limits[-1]
        assert line["response/truncated_fraction/addition"] == pytest.approx(cut.mean())
        lengths += table["length"].tolist()
    assert limits[0] == AUTO["at_most"] and min(limits) < AUTO["at_most"], "the limit never moved"

    again = run(tmp_path / "again", material, rollout=ROLLOUT)
    resumed(tmp_path / "whole", "again", 3, 6)
    fork("megatron_rl", 1, "train", again, module=True)
    assert numbers(tmp_path / "again") == numbers(tmp_path / "whole")

    two = run(tmp_path / "two", material, rollout=ROLLOUT)
    fork("megatron_rl", 2, "train", two, module=True)
    for mine, truth in zip(numbers(tmp_path / "two"), numbers(tmp_path / "whole"), strict=True):
        assert mine == pytest.approx(truth, rel=1e-4, abs=1e-6)


@pytest.mark.campaign
def test_limits_follow_responses_that_are_carried_and_sampled_ahead(fork, material, tmp_path):
    changes = {
        "placement": "standalone",
        "actor": {"optimizer": {"learning_rate": 1e-3}, "layout": {"ranks": [0]}},
        "rollout": ROLLOUT | {"ranks": [1, 2], "oversample": 0.5, "partial": True, "round_tokens": 2},
        "asynchrony": {"steps_ahead": 1},
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork("megatron_rl", 3, "train", whole, module=True)
    again = run(tmp_path / "again", material, **changes)
    resumed(tmp_path / "whole", "again", 3, 6)
    fork("megatron_rl", 3, "train", again, module=True)
    assert numbers(tmp_path / "again") == numbers(tmp_path / "whole")
    assert len({line["response/limit/addition"] for line in metrics(tmp_path / "whole")}) > 1


def test_a_table_limits_the_responses_of_steps_and_evaluations(fork, material, tmp_path):
    """Prompts of five and of seven tokens have limits of their own; a task's table replaces the rollout's."""
    prompts = [("1+2=", "addition"), ("11+22=", "addition"), ("3+4=", "short"), ("33+44=", "short")]
    data = tmp_path / "mixed.jsonl"
    records = [{"prompt": text, "ground_truth": "1", "task": task} for text, task in prompts]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    rollout = {
        "engine": "torch",
        "max_response_tokens": {5: 3, "more": 8},
        "sampling_profiles": {"short": {"max_response_tokens": {5: 1, "more": 2}}},
    }
    file = run(tmp_path / "table", material, rollout=rollout, data={"train": str(data)}, steps=2)
    fork("megatron_rl", 1, "train", file, module=True)
    limits = {"1+2=": 3, "11+22=": 8, "3+4=": 1, "33+44=": 2}
    for step in (1, 2):
        table = samples(tmp_path / "table", step)
        assert set(table["prompt"]) == set(limits)
        for prompt, length, reason in zip(
            table["prompt"], table["length"], table["finish_reason"], strict=True
        ):
            assert length == limits[prompt] if reason == 1 else length <= limits[prompt]
    (line, _) = metrics(tmp_path / "table")
    assert line["response/limit/short"] == 1.5 and line["response/limit/addition"] == 5.5
