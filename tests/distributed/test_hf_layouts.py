"""Import, log-probs and export of every family across tensor, pipeline, data and expert layouts."""

from __future__ import annotations

from pathlib import Path

from tests.hf_models import FAMILIES, save_model


def test_every_layout_loads_scores_and_exports(fork, tmp_path):
    for family in FAMILIES:
        save_model(family, tmp_path / family)
    script = Path(__file__).with_name("hf_layout_ranks.py")
    assert "all cases" in fork(script, 4, tmp_path, timeout=400).stdout
