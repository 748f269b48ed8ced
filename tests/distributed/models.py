"""Tiny random HF checkpoints, each with a batch that exercises every term of the loss."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_rl.types import TrainBatch, split_rows

# 67 is odd, so vocabulary shards are padded.
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SHAPE,
        head_dim=8,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
}


def write_model(folder: Path, family: str, seed: int = 0, **changes: object) -> Path:
    """Save a random model of ``family`` as HF checkpoint, with a batch in ``batch.pt``; return its folder."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)

    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    # Norm weights and biases start at 1 and 0, which would hide a mistake in their loading.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)

    path = folder / family
    model.save_pretrained(path)
    torch.save(
        make_batch(model, truncated=family == "llama"),
        path / "batch.pt",
    )
    return path


@torch.no_grad()
def make_batch(model: torch.nn.Module, rows: int = 12, truncated: bool = False) -> TrainBatch:
    """Return a batch of ``rows`` rows with 4 to 23 tokens.

    Old log-probs are close to the model's own, so that some tokens are clipped and some are not.
    ``truncated`` gives two of three response tokens a support: the sampled token and random others.
    """
    lengths = torch.randint(4, 24, (rows,))
    num_tokens = int(lengths.sum())
    tokens = torch.randint(0, 67, (num_tokens,))
    prompt_lengths = (lengths.float() * torch.rand(rows) * 0.6).long().clamp(min=1)
    row_masks = []
    for length, prompt_length in zip(lengths.tolist(), prompt_lengths.tolist(), strict=True):
        row_masks.append(torch.arange(length) >= prompt_length)
    mask = torch.cat(row_masks)

    # A temperature other than 1 shows whether it is applied.
    temperature = torch.full((rows,), 0.8)
    sizes = None
    support = None
    if truncated:
        positions = torch.arange(num_tokens)
        allowed = torch.rand(num_tokens, 67) < torch.rand(num_tokens, 1)
        allowed[positions, tokens] = True
        # Prompts, and every third token, have the whole vocabulary: their supports are empty.
        allowed[~mask | (positions % 3 == 0)] = False
        sizes = allowed.sum(1).int()
        support = allowed.nonzero()[:, 1].int()

    # Random differences from the exact log-probs give ratios on both sides of the clip range.
    exact = reference_log_probs(model, tokens, lengths, temperature, sizes, support)
    return TrainBatch(
        tokens=tokens,
        lengths=lengths,
        response_mask=mask,
        loss_weights=torch.zeros(num_tokens),
        temperature=temperature,
        advantages=torch.randn(num_tokens),
        old_log_probs=(exact + 0.2 * torch.randn(num_tokens)) * mask,
        ref_log_probs=(exact + 0.2 * torch.randn(num_tokens)) * mask,
        group=torch.arange(rows) // 4,
        support_sizes=sizes,
        support=support,
    )


@torch.no_grad()
def reference_log_probs(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    temperature: torch.Tensor,
    sizes: torch.Tensor | None = None,
    support: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return transformers' log-probs [N] in float32, computed row by row; 0 for each first token."""
    # Without a support every token is allowed; size 0 stands for the same.
    vocabulary = model.config.vocab_size
    allowed_tokens = torch.ones(len(tokens), vocabulary, dtype=torch.bool)
    if sizes is not None and support is not None:
        allowed_tokens = (sizes == 0)[:, None].repeat(1, vocabulary)
        positions = torch.repeat_interleave(torch.arange(len(tokens)), sizes)
        allowed_tokens[positions, support.long()] = True

    log_probs_by_row = []
    for row, row_temperature, allowed in zip(
        split_rows(tokens, lengths),
        temperature.tolist(),
        split_rows(allowed_tokens, lengths),
        strict=True,
    ):
        logits = model(row[None]).logits[0, :-1].float() / row_temperature
        logits = logits.masked_fill(~allowed[1:], -torch.inf)
        log_probs = torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
        log_probs_by_row.append(torch.cat((torch.zeros(1), log_probs)))
    return torch.cat(log_probs_by_row)
