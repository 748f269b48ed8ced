"""Sampling parameters that change over steps and within a response: trainer and engine agree, resumes too."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_older_weights import FROZEN, resumed, run
from test_roles import metrics

from tests.readme_metrics import unwritten

pytestmark = pytest.mark.starts_ranks

COMPARED = ("policy/loss", "reward/mean", "response/length", "mismatch/abs_diff")


def numbers(folder: Path, *names: str) -> list[dict[str, float | None]]:
    return [{name: line.get(name) for name in ("step", *COMPARED, *names)} for line in metrics(folder)]


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
