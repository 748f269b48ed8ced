"""Write a model of realistic size with random weights, prompts, and a configuration for one GPU.

    python benchmarks/random_model.py FOLDER [--shape 1.5B]
    python benchmarks/throughput.py FOLDER/run.yaml

Nothing is downloaded. The shapes are Qwen2.5's. The weights are drawn in bfloat16, on a GPU if there
is one. A model with random weights hardly ever ends a response, so nearly all responses reach the limit.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM
from workload import BOS, EOS, PAD, SPECIAL, build_tokenizer

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
    },
    "3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "intermediate_size": 11008,
    },
}
PROMPTS = 512
"""Number of training prompts."""


def write_model(folder: Path, shape: str) -> float:
    """Write a checkpoint and its tokenizer; return the number of parameters in billions."""
    # The vocabulary has as many tokens as Qwen2.5's. The texts of the tokens do not matter.
    tokenizer = build_tokenizer(VOCABULARY)

    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(PAD),
        dtype="bfloat16",
    )

    # Draw the weights in bfloat16, on the GPU if there is one.
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(accelerator):
        model = Qwen2ForCausalLM(config)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def write_prompts(path: Path) -> None:
    """Write prompts of 64 to 250 digits."""
    # A fixed seed: every run measures the same prompts.
    generator = random.Random(1)
    with path.open("w") as lines:
        for _ in range(PROMPTS):
            digits = "".join(generator.choices("0123456789", k=generator.randint(64, 250)))
            lines.write(json.dumps({"prompt": f"{digits}=", "ground_truth": digits[-1]}) + "\n")


def configuration(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run on one GPU: 64 prompts with 8 samples of 512 tokens each."""
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": 256},
        "reward": {"function": f"{Path(__file__).resolve().with_name('workload.py')}:digit_share"},
        "run_dir": str(folder / "run"),
        "steps": 4,
        "world_size": 1,
        "batch": {
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "optimizer_steps": 2,
            "tokens_per_microbatch": 8192,
        },
        # Trainer and engine share the GPU.
        "actor": {"offload": True, "recompute": "none"},
        "rollout": {"max_response_tokens": 512, "memory_fraction": 0.5},
    }


def main() -> None:
    """Write model, prompts and configuration into the folder of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    options = parser.parse_args()

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    billions = write_model(folder / "model", options.shape)
    write_prompts(folder / "prompts.jsonl")
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration(folder)))
    print(f"{billions:.2f}B parameters; next: python benchmarks/throughput.py {folder / 'run.yaml'}")


if __name__ == "__main__":
    main()
