"""Workload of step_time.py and other benchmarks: model, prompts, reward and response lengths.

The weights are random, except that the end token has nearly the same probability at every position. So the
response lengths vary as with a trained model. For this, one dimension of the residual stream is a constant
that no layer changes, and only the output row of the end token reads it. By default, the mean length is about
0.4 of the limit, and about one response in ten reaches the limit.
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
    """Model shape and batch. The default model has 25.7M parameters."""

    prompts: int
    """Number of prompts of a step."""
    samples: int
    """Number of samples per prompt."""
    max_response_tokens: int
    """Limit of the response length."""
    hidden: int = 512
    """Hidden size."""
    layers: int = 8
    """Transformer layers."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int = 4
    """Key and value heads."""
    intermediate: int = 1408
    """Intermediate size of the MLPs."""
    vocabulary: int = 2048
    """Vocabulary size."""
    max_prompt_tokens: int = 32
    """Limit of the prompt length."""
    mean_share: float = 0.45
    """Mean length of responses without a limit, as a fraction of ``max_response_tokens``."""

    @property
    def rows(self) -> int:
        """Return the number of samples of a step."""
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
    """Return the reward: the fraction of a response's characters that are the ground truth's last digit."""
    return response.count(str(ground_truth)[-1]) / max(len(response), 1)


def write_workload(directory: Path, work: Workload, seed: int = 1) -> None:
    """Write ``model/`` (a Hugging Face checkpoint with tokenizer) and ``prompts.jsonl``."""
    generator = random.Random(seed)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(max(64, work.prompts)):
            numbers = [generator.randint(0, 99) for _ in range(generator.randint(2, 8))]
            prompt = "+".join(map(str, numbers)) + "="
            file.write(json.dumps({"prompt": prompt, "ground_truth": str(sum(numbers))}) + "\n")

    tokenizer = build_tokenizer(work.vocabulary)
    model = build_model(work, tokenizer, seed)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def build_tokenizer(vocabulary: int) -> Any:
    """Return a Qwen2 tokenizer with one token per character of a sum, and words that no prompt contains."""
    from tokenizers import processors
    from transformers import Qwen2Tokenizer

    # Without merges, a prompt has as many tokens as characters.
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
    """Build the transformers model in float32, with the end probability of the workload."""
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
        # Set dimension 0 of the residual stream to 1 in the embedding, and let no layer change it.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0

        # Let the logit of the end token depend only on this dimension, and choose the weight such that the
        # end token has its probability beside the other logits.
        model.lm_head.weight[:, 0] = 0.0
        end_row = model.lm_head.weight[SPECIAL.index(EOS)]
        end_row.zero_()
        tokens = torch.randint(len(SPECIAL), len(tokenizer), (32, 64))
        hidden = model.model(tokens).last_hidden_state[:, 8:].flatten(0, 1)
        other_logits = torch.logsumexp(model.lm_head(hidden)[:, len(SPECIAL) :], -1)
        end_row[0] = _find_end_weight(hidden[:, 0], other_logits, work.end_probability)
    return model


def _find_end_weight(
    constant: Any,
    other_logits: Any,
    probability: float,
) -> float:
    """Find the weight at which the end token has ``probability`` on average, by bisection.

    The logit of the end token is the weight times ``constant``. ``other_logits`` is the log-sum-exp of the
    other tokens' logits at each position.
    """
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
    """Return the configuration of a run on this workload as YAML, in float32 and with one GPU per engine."""
    # Only steps are measured, so the run writes no checkpoint and no export.
    settings = {
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

    # JSON is valid YAML.
    return json.dumps(settings, indent=1)


def lengths(work: Workload, seed: int) -> list[int]:
    """Draw the response lengths of a step from the distribution of the model's lengths."""
    generator = random.Random(seed)
    # With a constant end probability, lengths have a geometric distribution.
    log_continue_probability = math.log1p(-work.end_probability)
    return [
        min(work.max_response_tokens, 1 + int(math.log(1.0 - generator.random()) / log_continue_probability))
        for _ in range(work.rows)
    ]
