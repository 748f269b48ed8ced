"""Gradients of experts, tensor by tensor: the same in every layout, however experts and tensors are cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.hf_models import save_model

sys.path.insert(0, str(Path(__file__).parent))
from models import make_batch

SCRIPT = Path(__file__).with_name("expert_gradient_ranks.py")
LAYOUTS = [
    {"tensor": 2},  # each tensor rank sends its own tokens to whole experts
    {"tensor": 2, "expert_tensor": 2},
    {"tensor": 2, "expert": 2},
    {"expert": 2},
]


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_every_tensor_of_a_step_is_the_same_in_every_layout(fork, tmp_path, family) -> None:
    model = save_model(family, tmp_path)
    torch.manual_seed(3)
    torch.save(make_batch(model), tmp_path / "batch.pt")
    fork(SCRIPT, 1, tmp_path, json.dumps([{}]))
    fork(SCRIPT, 2, tmp_path, json.dumps(LAYOUTS))
    alone = torch.load(tmp_path / "alone.pt", weights_only=True)
    assert any("experts" in name for name in alone["weights"])
    for sizes in LAYOUTS:
        name = "x".join(f"{key}{size}" for key, size in sizes.items())
        cut = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert cut["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5), name
        for tensor, value in alone["weights"].items():
            where = f"{name}: {tensor}"
            torch.testing.assert_close(cut["weights"][tensor], value, atol=2e-5, rtol=0, msg=where)
