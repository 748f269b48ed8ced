"""`hybrid_engine.every`: responses of weights that are synced at every k-th version alone.

The oracle is a run that does not learn: what it samples is what the first weights sample, step for step.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas
import pytest
from test_roles import metrics, ppo

from megatron_rl.config.checkpoint_meta import read_meta
from tests.readme_metrics import unwritten

pytestmark = pytest.mark.starts_ranks

REWARD = "def score(*, response, **_):\n    return sum(character in '02468' for character in response) / 6\n"
LEARNING = {"optimizer": {"learning_rate": 3e-3}}
FROZEN = {"optimizer": {"learning_rate": 1e-30}}
COMPARED = (
    "policy/loss", "policy/grad_norm", "reward/mean", "mismatch/abs_diff", "rollout/version", "staleness/max",
    "eval/held_out/reward", "response/length",
)  # fmt: skip


def run(folder: Path, material: Path, **changes) -> Path:
    """Write a run of six steps whose evaluations differ from step to step."""
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "steps": 6,
        "placement": "colocate",
        "critic": None,
        "reward": {"function": f"{folder / 'reward.py'}:score", "models": {}},
        "algorithm": {"name": "grpo", "kl": "none", "correction": {"level": "token"}},
        "actor": LEARNING,
        "checkpoint": {"every": 1, "keep": 9},
        "evaluation": {
            "at_start": False,
            "every": 1,
            "sets": {"held_out": {"data": str(material / "train.jsonl")}},
        },
    }
    settings["evaluation"]["sets"]["held_out"]["max_prompts"] = 16
    return ppo(folder, material, **{**settings, **changes})


def numbers(folder: Path) -> list[dict[str, float | None]]:
    return [{name: line.get(name) for name in ("step", *COMPARED)} for line in metrics(folder)]


def responses(folder: Path, step: int) -> list[str]:
    return list(pandas.read_parquet(folder / f"run/rollouts/step_{step}.parquet")["response"])


def resumed(whole: Path, name: str, step: int, last: int) -> None:
    """Copy a run to where it had ended after ``step``."""
    folder = whole.parent / name
    shutil.copytree(whole / "run", folder / "run")
    for later in range(step + 1, last + 1):
        shutil.rmtree(folder / f"run/checkpoints/step_{later}")


def test_responses_are_of_the_last_sync_and_a_resume_between_two_changes_nothing(fork, material, tmp_path):
    frozen = run(tmp_path / "frozen", material, actor=FROZEN)
    fork("megatron_rl", 1, "train", frozen, module=True)
    every = {"hybrid_engine": {"every": 3}}
    whole = run(tmp_path / "whole", material, **every)
    fork("megatron_rl", 1, "train", whole, module=True)

    lines = metrics(tmp_path / "whole")
    assert [line["rollout/version"] for line in lines] == [0, 0, 0, 3, 3, 3]
    assert [line["staleness/max"] for line in lines] == [0, 1, 2, 0, 1, 2]
    assert unwritten("a run with older weights", lines) == []
    # Until the second sync the responses are those of the first weights, and afterwards of others.
    for step in (1, 2, 3):
        assert responses(tmp_path / "whole", step) == responses(tmp_path / "frozen", step)
    assert responses(tmp_path / "whole", 4) != responses(tmp_path / "frozen", 4)
    # The trainer computes with newer weights in between, and an evaluation samples from the newest.
    differences = [line["mismatch/abs_diff"] for line in lines]
    assert max(differences[0], differences[3]) < 1e-4 < min(differences[1:3] + differences[4:])

    # Only a checkpoint between two syncs has the older weights.
    parts = [read_meta(tmp_path / f"whole/run/checkpoints/step_{step}")["roles"] for step in range(1, 7)]
    assert ["rollout" in roles for roles in parts] == [True, True, False, True, True, False]
    for step in (2, 3, 4):
        again = run(tmp_path / f"after_{step}", material, **every)
        resumed(tmp_path / "whole", f"after_{step}", step, 6)
        fork("megatron_rl", 1, "train", again, module=True)
        assert numbers(tmp_path / f"after_{step}") == numbers(tmp_path / "whole")
        assert responses(tmp_path / f"after_{step}", 5) == responses(tmp_path / "whole", 5)

    never = run(tmp_path / "never", material, hybrid_engine={"every": 0})
    fork("megatron_rl", 1, "train", never, module=True)
    assert [line["staleness/max"] for line in metrics(tmp_path / "never")] == [0, 1, 2, 3, 4, 5]
    for step in range(1, 7):
        assert responses(tmp_path / "never", step) == responses(tmp_path / "frozen", step)


@pytest.mark.campaign
def test_ages_of_sampling_ahead_and_of_older_weights_add_up_and_the_resume_is_exact(fork, material, tmp_path):
    changes = {
        "hybrid_engine": {"every": 2},
        "asynchrony": {"steps_ahead": 1},
        "placement": "standalone",
        "actor": LEARNING | {"layout": {"ranks": [0, 1], "tensor": 2}},
        "rollout": {"engine": "torch", "max_response_tokens": 6, "ranks": [2]},
    }
    whole = run(tmp_path / "whole", material, **changes)
    fork("megatron_rl", 3, "train", whole, module=True)
    lines = metrics(tmp_path / "whole")
    assert [line["rollout/version"] for line in lines] == [0, 0, 2, 2, 4, 4]
    assert [line["staleness/max"] for line in lines] == [0, 1, 2, 1, 2, 1]

    again = run(tmp_path / "again", material, **changes)
    resumed(tmp_path / "whole", "again", 3, 6)
    fork("megatron_rl", 3, "train", again, module=True)
    assert numbers(tmp_path / "again") == numbers(tmp_path / "whole")
