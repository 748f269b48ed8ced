"""Write the quickstart's inputs: a tiny Qwen2-shaped checkpoint with its tokenizer, and addition problems.

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

from megatron_rl.durable import seal_folder

PAD = "<pad>"
EOS = "<eos>"
BOS = "<bos>"
UNKNOWN = "<unk>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN)
CHARACTERS = "0123456789+-*/=,."
"""Characters of the problems, one token each. With the special tokens the vocabulary has 21 tokens, an odd
number that tensor parallelism 2 must pad."""


@dataclass(frozen=True)
class Size:
    """Sizes of the quickstart's model.

    Every head has at least 32 dimensions, which vLLM's CPU attention requires.
    """

    hidden: int
    """Hidden size."""
    layers: int
    """Transformer layers."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Key and value heads."""
    intermediate: int
    """Intermediate size of the MLPs."""


SIZES: Mapping[str, Size] = {
    "tiny": Size(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128),
    "small": Size(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=256),
    "medium": Size(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
}
HELD_OUT = 500
"""Number of problems in ``eval.jsonl``, half of them with a carry."""
FORGOTTEN_CARRY_FRACTION = 0.65
"""Fraction of the demonstrations with a carry in which the carry is forgotten, so that the sum is wrong.

Reinforcement learning can therefore improve the model after its supervised warm-up.
"""
DEMONSTRATIONS = 8
"""Number of demonstrations per problem. With a carry, each one is wrong with the probability
`FORGOTTEN_CARRY_FRACTION`."""


def write_inputs(directory: str | Path, size: str = "small", seed: int = 1) -> Path:
    """Write the model, its tokenizer and the problems into ``directory``; return the directory.

    A problem adds two two-digit numbers whose sum is below 100. Half of the problems have a carry. 500
    problems are held out in ``eval.jsonl``, and 2020 are in ``train.jsonl``. ``sft.jsonl`` has demonstrations
    and ``pairs.jsonl`` preferences for all problems that are not held out. ``sft_eval.jsonl`` has
    demonstrations for the held-out problems. Some demonstrations have a wrong sum: they forget the carry.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    # Every random number of the data comes from this generator, so the order of the draws must not change.
    generator = random.Random(seed)
    pairs: list[tuple[int, int]] = []
    for first in range(10, 90):
        for second in range(10, 100 - first):
            pairs.append((first, second))
    generator.shuffle(pairs)
    pairs_with_carry = [pair for pair in pairs if _has_carry(pair)]
    pairs_without_carry = [pair for pair in pairs if not _has_carry(pair)]

    # There are fewer pairs with a carry than without: train on equal numbers of both.
    eval_half = HELD_OUT // 2
    eval_pairs = pairs_with_carry[:eval_half] + pairs_without_carry[:eval_half]
    train_pairs = pairs_with_carry[eval_half:] + pairs_without_carry[eval_half : len(pairs_with_carry)]
    sft_pairs = pairs_with_carry[eval_half:] + pairs_without_carry[eval_half:]

    demonstrations: list[dict[str, str]] = []
    for _ in range(DEMONSTRATIONS):
        for pair in sft_pairs:
            forgets_carry = _has_carry(pair) and generator.random() < FORGOTTEN_CARRY_FRACTION
            demonstrations.append(_make_demonstration(pair, forgets_carry))

    # The model cannot predict which demonstrations forget the carry, so the number of these demonstrations
    # determines the lowest possible loss. Fix it: the loss is then comparable over seeds.
    num_wrong = round(FORGOTTEN_CARRY_FRACTION * eval_half)
    eval_demonstrations = [
        _make_demonstration(pair, index < num_wrong) for index, pair in enumerate(eval_pairs)
    ]

    _write_jsonl(directory / "eval.jsonl", (_make_problem(pair) for pair in eval_pairs))
    _write_jsonl(directory / "train.jsonl", (_make_problem(pair) for pair in train_pairs))
    _write_jsonl(directory / "sft.jsonl", demonstrations)
    _write_jsonl(directory / "sft_eval.jsonl", eval_demonstrations)
    _write_jsonl(directory / "pairs.jsonl", (_make_preference(pair, generator) for pair in sft_pairs))
    save_model(directory / "model", SIZES[size], seed)
    return directory


def _has_carry(pair: tuple[int, int]) -> bool:
    """Return whether the addition of a pair has a carry: the last digits sum to more than 9."""
    return pair[0] % 10 + pair[1] % 10 >= 10


def _make_problem(pair: tuple[int, int]) -> dict[str, str]:
    """Return a record of an addition problem with its ground truth."""
    first, second = pair
    return {"prompt": f"{first}+{second}=", "ground_truth": str(first + second), "task": "addition"}


def _make_demonstration(pair: tuple[int, int], forgets_carry: bool) -> dict[str, str]:
    """Return a record with the sum as response; the sum is 10 too small if ``forgets_carry`` is true."""
    first, second = pair
    response = first + second
    if forgets_carry:
        response -= 10
    return {"prompt": f"{first}+{second}=", "response": str(response)}


def _make_preference(pair: tuple[int, int], generator: random.Random) -> dict[str, str]:
    """Return a preference record: the correct sum is chosen, a plausible mistake is rejected."""
    total = sum(pair)
    if _has_carry(pair) and generator.random() < 0.5:
        error = -10
    else:
        error = generator.choice((-10, -2, -1, 1, 2, 10))
    return {"prompt": f"{pair[0]}+{pair[1]}=", "chosen": str(total), "rejected": str(total + error)}


def _write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records to a file, one JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def build_tokenizer():
    """Return a Qwen2 tokenizer with one token per character, which prepends <bos> to a text."""
    from tokenizers import processors
    from transformers import Qwen2Tokenizer

    # AutoTokenizer constructs a Qwen2Tokenizer for every Qwen2 model, and ignores the class in the files.
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL, *CHARACTERS))}
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
        single=f"{BOS} $A",
        special_tokens=[(BOS, vocabulary[BOS])],
    )
    return tokenizer


def save_model(path: str | Path, size: Size, seed: int) -> None:
    """Write a randomly initialised Qwen2 checkpoint (float32, safetensors) and its tokenizer to ``path``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # One small file needs no progress bar.
    disable_progress_bar()
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
        # About 1/sqrt(hidden): a narrow model then trains several times faster than from the usual 0.02.
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
    seal_folder(Path(path))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, and write the model and the problems into its directory."""
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.data.quickstart", description=__doc__)
    parser.add_argument("directory", help="where to write the model and the data")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="shape of the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights and of the problems' order")
    options = parser.parse_args(arguments)
    print(f"wrote {write_inputs(options.directory, options.size, options.seed)}")


if __name__ == "__main__":
    main()
