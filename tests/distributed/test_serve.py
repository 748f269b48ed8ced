"""`serve` and `bench-serve` as a user calls them, with vLLM's own server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.conftest import Launcher

RANKS = Path(__file__).with_name("serve_ranks.py")


def test_a_model_is_served_and_loaded(fork: Launcher, material: Path, tmp_path: Path) -> None:
    out = tmp_path / "tables.md"
    launch = fork(RANKS, 1, material / "model", out)
    completion = re.search(r"completion: (.*)", launch.stdout)
    assert completion and json.loads(completion[1])["choices"], launch.output

    rows = [line for line in out.read_text().splitlines() if line.startswith("| 2 |")]
    assert len(rows) == 2 and out.read_text() in launch.stdout

    # Rows that are too long for the server are its answer, not a table of zeros.
    assert re.findall(r"exit code: (\d+)", launch.stdout) == ["0", "2"]
    assert "1 of 1 requests failed" in launch.stderr
