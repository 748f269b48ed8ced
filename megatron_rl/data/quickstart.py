"""Make the quickstart's material: a tiny Qwen2-shaped checkpoint with its tokenizer, and addition problems.

``python -m megatron_rl.data.quickstart DIRECTORY`` writes ``model/``, ``train.jsonl``, ``eval.jsonl``,
``sft.jsonl``, ``sft_eval.jsonl`` and ``pairs.jsonl``. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.durable import seal

SPECIAL = PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
CHARACTERS = "0123456789+-*/=,."
"""With the four special tokens 21 in all: a vocabulary that no tensor-parallel size divides."""


@dataclass(frozen=True)
class Size:
    """Set the model's shape; every head has at least 32 dimensions, which vLLM's CPU attention needs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128),
    "small": Size(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=256),
    "medium": Size(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
}
HELD_OUT = 500
CARELESS = 0.65
"""How often a demonstration drops the carry. The rewards know the right sums; demonstrations do not."""
DEMONSTRATIONS = 8
"""How many a problem has, each careless or not by itself, so that none is worth learning by heart."""


def make(directory: str | Path, size: str = "small", seed: int = 1) -> Path:
    """Write the model, its tokenizer and the problems into ``directory`` and return it.

    The problems are two-digit numbers whose sum is below 100, half of them with a carry: 500 are held out in
    ``eval.jsonl``, 2020 are in ``train.jsonl``. Demonstrations and preferences are of all problems that are
    not held out, ``sft_eval.jsonl`` has demonstrations of those that are.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(seed)
    pairs = [(left, right) for left in range(10, 90) for right in range(10, 100 - left)]
    random_.shuffle(pairs)
    carrying, plain = (
        [pair for pair in pairs if _carries(pair)],
        [pair for pair in pairs if not _carries(pair)],
    )
    half, both = HELD_OUT // 2, len(carrying)
    held_out, others = carrying[:half] + plain[:half], carrying[half:] + plain[half:]
    train = carrying[half:] + plain[half:both]
    demonstrations = [
        _demonstration(pair, _carries(pair) and random_.random() < CARELESS)
        for _ in range(DEMONSTRATIONS)
        for pair in others
    ]
    # Exactly the usual share of those that carry, so that no seed's least loss is another's.
    careless = round(CARELESS * half)
    unseen = [_demonstration(pair, index < careless) for index, pair in enumerate(held_out)]
    _write_lines(directory / "eval.jsonl", (_problem(pair) for pair in held_out))
    _write_lines(directory / "train.jsonl", (_problem(pair) for pair in train))
    _write_lines(directory / "sft.jsonl", demonstrations)
    _write_lines(directory / "sft_eval.jsonl", unseen)
    _write_lines(directory / "pairs.jsonl", (_preference(pair, random_) for pair in others))
    save_model(directory / "model", SIZES[size], seed)
    return directory


def _carries(pair: tuple[int, int]) -> bool:
    return pair[0] % 10 + pair[1] % 10 >= 10


def _problem(pair: tuple[int, int]) -> dict[str, str]:
    left, right = pair
    return {"prompt": f"{left}+{right}=", "ground_truth": str(left + right), "task": "addition"}


def _demonstration(pair: tuple[int, int], careless: bool) -> dict[str, str]:
    left, right = pair
    return {"prompt": f"{left}+{right}=", "response": str(left + right - 10 * careless)}


def _preference(pair: tuple[int, int], random_: random.Random) -> dict[str, str]:
    """Prefer the right sum to one of the mistakes that a careless model makes."""
    right = sum(pair)
    careless = _carries(pair) and random_.random() < 0.5
    wrong = right + (-10 if careless else random_.choice((-10, -2, -1, 1, 2, 10)))
    return {"prompt": f"{pair[0]}+{pair[1]}=", "chosen": str(right), "rejected": str(wrong)}


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def build_tokenizer():
    """Return a Qwen2 tokenizer with one token per character; it puts <bos> before a text."""
    from tokenizers import processors
    from transformers import Qwen2Tokenizer

    # A Qwen2Tokenizer, because AutoTokenizer makes one for every Qwen2 model whatever the files say.
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        model_max_length=256,
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return tokenizer


def save_model(path: str | Path, size: Size, seed: int) -> None:
    """Write a randomly initialised Qwen2 checkpoint (float32, safetensors) and its tokenizer to ``path``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        # About 1/sqrt(hidden): so narrow a model learns several times faster than from the usual 0.02.
        initializer_range=round(0.7 / size.hidden**0.5, 3),
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    seal(Path(path))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the material."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.data.quickstart", description=__doc__)
    parser.add_argument("directory", help="where to write the model and the data")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="shape of the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the problems' order")
    options = parser.parse_args(arguments)
    print(f"wrote {make(options.directory, options.size, options.seed)}")


if __name__ == "__main__":
    main()
