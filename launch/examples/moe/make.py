"""Write a tiny mixture of experts of random weights, with the tokenizer of another model.

python launch/examples/moe/make.py TOKENIZER_FROM DIRECTORY
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def make(source: Path, target: Path) -> None:
    """Write the model; 4 experts, 2 of them per token."""
    shape = json.loads((source / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue]
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.06,
        tie_word_embeddings=False,
        dtype="float32",
        **{name: shape[name] for name in names},
    )

    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).save_pretrained(target)

    # transformers' own name of the key; published checkpoints have the other.
    saved = json.loads((target / "config.json").read_text())
    if "num_local_experts" in saved:
        saved["num_experts"] = saved.pop("num_local_experts")
        (target / "config.json").write_text(json.dumps(saved, indent=2))
    for file in source.glob("*token*"):
        shutil.copy(file, target)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
