"""Workload of step_time.py, equal for all methods: model, prompts, reward and response lengths.

The weights are random, with one exception: the probability of ending a response is nearly the same at every
token, so that lengths are spread as in a trained model. One dimension of the residual stream is a
constant that no layer writes to, and only the end token's output row reads it. Unless stated otherwise the
mean length is about 0.4 of the limit, and about one response in ten reaches the limit.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD = "<pad>"
EOS = "<eos>"
BOS = "<bos>"
UNKNOWN = "<unk>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN)
DIGITS = "0123456789+="


@dataclass(frozen=True)
class Workload:
    """Model shape and batch. ``hidden`` 512 and 8 layers make 25.7M parameters.

    ``mean_share`` of the limit is the mean length of responses that no limit cuts.
    """

    prompts: int
    samples: int
    max_response_tokens: int
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1408
    vocabulary: int = 2048
    max_prompt_tokens: int = 32
    mean_share: float = 0.45

    @property
    def rows(self) -> int:
        """Return the samples of one step."""
        return self.prompts * self.samples

    @property
    def end_probability(self) -> float:
        """Return the probability of the end token at each position."""
        return 1.0 / (self.mean_share * self.max_response_tokens)


def digit_share(
    prompt: str,
    response: str,
    ground_truth: Any,
    metadata: Any = None,
) -> float:
    """Return the share of a response's characters that are the answer's last digit."""
    return response.count(str(ground_truth)[-1]) / max(len(response), 1)


def make(directory: Path, work: Workload, seed: int = 1) -> None:
    """Write ``model/`` (a Hugging Face checkpoint with tokenizer) and ``prompts.jsonl``."""
    generator = random.Random(seed)
    with (directory / "prompts.jsonl").open("w") as lines:
        for _ in range(max(64, work.prompts)):
            numbers = [generator.randint(0, 99) for _ in range(generator.randint(2, 8))]
            prompt = "+".join(map(str, numbers)) + "="
            lines.write(json.dumps({"prompt": prompt, "ground_truth": str(sum(numbers))}) + "\n")

    tokenizer = build_tokenizer(work.vocabulary)
    model = build_model(work, tokenizer, seed)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def build_tokenizer(vocabulary: int) -> Any:
    """Return a Qwen2 tokenizer: a token per character of a sum; the rest are words that no prompt uses."""
    from tokenizers import processors
    from transformers import Qwen2Tokenizer

    # A token per digit and sign: no merges, so that a prompt has as many tokens as characters.
    tokens = [*SPECIAL, *DIGITS]
    tokens += [f"w{number}" for number in range(vocabulary - len(tokens))]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        model_max_length=1024,
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def build_model(work: Workload, tokenizer: Any, seed: int) -> Any:
    """Return the transformers model in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        intermediate_size=work.intermediate,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=work.hidden**-0.5,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=SPECIAL.index(PAD),
        dtype="float32",
    )

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        # Dimension 0 of the residual stream: 1 from the embedding on, written to by no layer.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0

        # The end token's logit is that dimension alone; its strength is set against the other logits.
        model.lm_head.weight[:, 0] = 0.0
        end = model.lm_head.weight[SPECIAL.index(EOS)]
        end.zero_()
        tokens = torch.randint(len(SPECIAL), len(tokenizer), (32, 64))
        hidden = model.model(tokens).last_hidden_state[:, 8:].flatten(0, 1)
        other_logits = torch.logsumexp(model.lm_head(hidden)[:, len(SPECIAL) :], -1)
        end[0] = _strength(hidden[:, 0], other_logits, work.end_probability)
    return model


def _strength(
    constant: Any,
    other_logits: Any,
    probability: float,
) -> float:
    """Return the weight at which the end token has ``probability`` on average, by bisection."""
    import torch

    low = 0.0
    high = 10.0 * math.log(1e4) / float(constant.mean())
    # Sixty halvings reach the precision of a float.
    for _ in range(60):
        middle = (low + high) / 2
        if float(torch.sigmoid(middle * constant - other_logits).mean()) < probability:
            low = middle
        else:
            high = middle
    return middle


def configuration(
    work: Workload,
    directory: Path,
    run_dir: Path,
    steps: int,
    layout: dict[str, int],
) -> str:
    """Return the YAML of a megatron_rl run on this work, in float32 and with rollout tensor parallelism 1."""
    # No checkpoint, export or resumption: only steps are measured.
    tree = {
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "data": {"train": str(directory / "prompts.jsonl"), "max_prompt_tokens": work.max_prompt_tokens},
        "reward": {"function": f"{Path(__file__).resolve()}:digit_share"},
        "run_dir": str(run_dir),
        "steps": steps,
        "batch": {"prompts_per_step": work.prompts, "samples_per_prompt": work.samples},
        "actor": {"layout": layout, "optimizer": {"learning_rate": 1e-6}},
        "rollout": {"temperature": 1.0, "max_response_tokens": work.max_response_tokens},
        "checkpoint": {"every": steps + 1, "export": False, "resume": "never"},
    }

    # JSON is YAML.
    return json.dumps(tree, indent=1)


def lengths(work: Workload, seed: int) -> list[int]:
    """Return response lengths of one step, drawn as the model draws them."""
    generator = random.Random(seed)
    # Geometric lengths, from the logarithm of the probability that a response continues.
    keep = math.log1p(-work.end_probability)
    return [
        min(work.max_response_tokens, 1 + int(math.log(1.0 - generator.random()) / keep))
        for _ in range(work.rows)
    ]
