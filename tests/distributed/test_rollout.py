"""Real vLLM inside torchrun ranks: weights by boxes, sampling, seeds, replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

RANKS = Path(__file__).parent / "rollout_ranks.py"
SECONDS = 600.0
SHAPE: dict[str, Any] = {
    "vocab_size": 301,  # needs padding
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen2_tied": lambda: Qwen2Config(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"} | {"tie_word_embeddings": True}
    ),
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            made[family] = tmp_path_factory.mktemp(family)
            model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)  # transformers starts them at zero
            model.save_pretrained(made[family])
        return made[family]

    return make


def test_weights_by_boxes_are_vllms_own(fork: Any, checkpoint: Callable[[str], Path]):
    paths = [checkpoint(family) for family in FAMILIES]
    assert "all checks passed" in fork(RANKS, 2, "families", *paths, timeout=SECONDS).stdout


def test_weights_by_boxes_without_tensor_parallelism(fork: Any, checkpoint: Callable[[str], Path]):
    paths = [checkpoint(family) for family in ("qwen2_tied", "qwen3_moe")]
    assert "all checks passed" in fork(RANKS, 1, "families", *paths, timeout=SECONDS).stdout


def test_sampling_and_updates(fork: Any, checkpoint: Callable[[str], Path]):
    assert "all checks passed" in fork(RANKS, 2, "sampling", checkpoint("qwen2"), timeout=SECONDS).stdout


def test_replicas_in_any_order_and_on_some_ranks(fork: Any, checkpoint: Callable[[str], Path]):
    assert "all checks passed" in fork(RANKS, 4, "replicas", checkpoint("qwen2"), timeout=SECONDS).stdout
