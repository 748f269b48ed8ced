"""Megatron weights in vLLM: bit-identical to vLLM's own load, least traffic, bounded staging, verified."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.hybrid_engine_ranks import CASES, SHAPE, family_path
from tests.hf_models import save_model


def test_engine_holds_the_trained_weights_in_every_pair_of_layouts(fork, tmp_path):
    for family, _, sizes, _, _ in CASES:
        changes = {**SHAPE, "num_hidden_layers": 6} if sizes.get("pipeline") == 3 else SHAPE
        path = tmp_path / family_path(family, sizes)
        if not path.exists():
            save_model(family, path, **changes)
    script = Path(__file__).with_name("hybrid_engine_ranks.py")
    assert "all cases passed" in fork(script, 4, tmp_path, timeout=500).stdout
