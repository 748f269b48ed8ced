"""Write a tiny Qwen2 checkpoint with a chat template, and sums in the form of GSM8K.

python launch/examples/first_run/make.py DIRECTORY
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<unk>")
CHARACTERS = "0123456789#?ahnoswdmuy.Ġ"
"""A token each; Ġ is the space of a byte-level vocabulary."""
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELD_OUT = 300
CARELESS = 0.65
"""Share of demonstrations that drop the carry, so that reinforcement learning has something to improve."""


def write_model(directory: Path) -> None:
    """Write a randomly initialised checkpoint (float32, safetensors) and its tokenizer."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    # Without merges every character is a token.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        model_max_length=128,
    )
    tokenizer.chat_template = TEMPLATE

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.06,
        dtype="float32",
        pad_token_id=vocabulary["<pad>"],
        eos_token_id=vocabulary["<eos>"],
        bos_token_id=None,
    )
    # The weights are the same on every machine.
    torch.manual_seed(1)
    disable_progress_bar()
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_problems(directory: Path) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl with the fields ``question`` and ``answer``."""
    generator = random.Random(1)
    pairs = [(first, second) for first in range(10, 90) for second in range(10, 100 - first)]
    generator.shuffle(pairs)
    records = [
        {"question": f"sum? {first} and {second}", "answer": f"#### {first + second}"}
        for first, second in pairs
    ]

    # Each training sum is demonstrated eight times, since whether it has the carry is drawn each time.
    demonstrations = []
    for _ in range(8):
        for first, second in pairs[HELD_OUT:]:
            carries = first % 10 + second % 10 >= 10
            careless = carries and generator.random() < CARELESS
            response = f"#### {first + second - 10 * careless}"
            demonstrations.append({"question": f"sum? {first} and {second}", "response": response})

    files = {"eval": records[:HELD_OUT], "train": records[HELD_OUT:], "sft": demonstrations}
    for name, rows in files.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_problems(folder)
    write_model(folder / "model")
