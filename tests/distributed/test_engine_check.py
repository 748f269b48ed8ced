"""An engine that computes with other weights than it was sent is refused before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_family_commands import workspace

STALE = Path(__file__).parent / "workers/stale_copy_train.py"
REFUSAL = "rollout engine and trainer compute different log-probs from the same weights"


@pytest.mark.parametrize(
    ("family", "copy"),
    [("qwen3-moe", "experts"), ("deepseek-v3", "experts"), ("llama", "output")],
)
def test_an_engine_with_stale_copies_of_weights_is_refused(
    fork: Any, material: Path, tmp_path: Path, family: str, copy: str
) -> None:
    workspace(tmp_path / "run", family, material)
    result = fork(STALE, 2, "train", tmp_path / "run/config.yaml", check=False, env={"STALE": copy})
    assert result.returncode == 2
    assert REFUSAL in result.output
    (mean,) = set(re.findall(r"got: +mean (\S+) and maximum", result.output))
    assert float(mean) > 1e-2
    assert not (tmp_path / "run/run/metrics.jsonl").exists()
