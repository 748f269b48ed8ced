"""Filters of responses in whole runs: no scorer sees a removed response, wherever it was sampled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml
from test_partial_rollouts import APART, ROLLOUT
from test_roles import grpo, metrics

from tests.readme_metrics import unwritten

CODE = """
def keep(*, response, **_):
    return not response.startswith("7")

def score(*, response, tokens, **_):
    assert len(tokens["response"]) >= 4 and not response.startswith("7"), "a removed response was scored"
    return float(len(response) % 3 == 0)
"""


def run(folder: Path, material: Path, rollout: dict[str, Any], **changes: Any) -> Path:
    """Write a run with two filters."""
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    filters = {"min_tokens": 4, "function": f"{folder / 'code.py'}:keep"} | rollout.pop("filters", {})
    learning = {"optimizer": {"learning_rate": 1e-3}}
    file = grpo(folder, material, actor=learning, rollout=rollout | {"filters": filters}, **changes)
    config = yaml.safe_load(file.read_text())
    config["reward"]["function"] = f"{folder / 'code.py'}:score"
    file.write_text(yaml.safe_dump(config))
    return file


def table(folder: Path, step: int) -> pandas.DataFrame:
    return pandas.read_parquet(folder / f"run/rollouts/step_{step}.parquet")


def test_removed_responses_have_the_stated_reward_on_any_number_of_ranks(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    """A function rewards each group early, while others are sampled; filters come before it there, too."""
    filters = {"on_filtered": "reward", "filtered_reward": -1.0}
    found = {}
    for ranks in (1, 2):
        rollout = {"engine": "torch", "max_response_tokens": 16, "filters": dict(filters)}
        file = run(tmp_path / str(ranks), material, rollout)
        fork("megatron_rl", ranks, "train", file, "placement=colocate", "steps=3", module=True)
        found[ranks] = metrics(tmp_path / str(ranks))
        for step in (1, 2, 3):
            rows = table(tmp_path / str(ranks), step)
            removed = rows["failure"].notna()
            assert (rows["reward"][removed] == -1).all() and (rows["reward"][~removed] >= 0).all()
            assert rows["valid"].all() and set(rows["failure"][removed]) <= {
                "filtered: min_tokens", "filtered: function"
            }  # fmt: skip
    for mine, truth in zip(found[2], found[1], strict=True):
        assert truth["reward/invalid"] == 0
        for name in ("filtered/min_tokens", "filtered/function", "reward/mean", "policy/grad_norm"):
            assert mine[name] == pytest.approx(truth[name], rel=1e-5), name
        share = truth["filtered/min_tokens"] + truth["filtered/function"]
        assert truth["reward/saved/function"] == pytest.approx(share)
    assert all(any(line[f"filtered/{name}"] > 0 for line in found[1]) for name in ("min_tokens", "function"))
    assert unwritten("a run with filters", found[1]) == []


@pytest.mark.campaign
def test_dropped_responses_leave_their_group_and_a_resume_changes_nothing(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    """Over-sampled and continued responses, sampled ahead of the updates."""
    rollout = ROLLOUT | {"partial": True}
    ahead = {"steps_ahead": 1, "max_staleness": 2}
    whole = run(tmp_path / "whole", material, dict(rollout), asynchrony=ahead)
    fork("megatron_rl", 3, "train", whole, *APART, module=True)
    expected = metrics(tmp_path / "whole")
    assert all(line["reward/invalid"] == 0 for line in expected)
    assert sum(line["filtered/min_tokens"] for line in expected) > 0

    rows = table(tmp_path / "whole", 1)
    removed = rows["failure"].notna()
    assert (~rows["valid"][removed]).all() and rows["valid"][~removed].all() and removed.any()
    assert rows["reward"][removed].isna().all()

    parted = run(tmp_path / "parted", material, dict(rollout), asynchrony=ahead)
    shutil.copytree(tmp_path / "whole/run", tmp_path / "parted/run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"parted/run/checkpoints/step_{step}")
    fork("megatron_rl", 3, "train", parted, *APART, module=True)
    for mine, truth in zip(metrics(tmp_path / "parted"), expected, strict=True):
        for name in ("filtered/min_tokens", "filtered/function", "reward/mean", "policy/grad_norm"):
            assert mine[name] == truth[name], name


def test_removed_responses_are_sampled_again_on_any_number_of_ranks(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    """The first step has the same weights: rows that were kept at once are those of a run without."""
    tables = {}
    for name, ranks, refill in (("without", 1, 0), ("one", 1, 3), ("two", 2, 3)):
        rollout = {"engine": "torch", "max_response_tokens": 16, "filters": {"refill": refill}}
        file = run(tmp_path / name, material, rollout)
        fork("megatron_rl", ranks, "train", file, "placement=colocate", "steps=2", module=True)
        tables[name] = table(tmp_path / name, 1)

    removed = tables["without"]["failure"].notna()
    still_removed = tables["one"]["failure"].notna()
    assert removed.sum() > 0 and still_removed.sum() < removed.sum()
    assert not (still_removed & ~removed).any()
    kept = tables["without"]["response"][~removed]
    assert kept.equals(tables["one"]["response"][~removed])
    new = tables["one"][removed & ~still_removed]
    assert not new["response"].str.startswith("7").any() and (new["length"] >= 4).all()
    columns = ["prompt", "response", "group", "reward", "length"]
    assert tables["one"][columns].equals(tables["two"][columns])
    lines = metrics(tmp_path / "one")
    assert unwritten("a run that refills", lines) == []
    line = lines[0]
    assert removed.mean() <= line["filtered/refilled"] <= 3 * removed.mean()
