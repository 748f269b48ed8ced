"""The pure parts of sampling, shared by all engines: seeds, filters and draws."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import leaves_out
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, SamplingParameters

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""
LOWEST_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this, as in vLLM, where smaller ones overflow."""
_MASK = 2**64 - 1


def _mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def row_seeds(seed: int, rows: Sequence[int]) -> list[int]:
    """Return one independent seed in [0, 2**63) for each position in the global batch."""
    start = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    return [_mix(start + (row + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 1 for row in rows]


def part_seed(seed: int, done: int) -> int:
    """Return the seed of what follows the first ``done`` tokens of a row.

    For engines that start a request's random stream anew: the row's own seed would draw the
    first tokens' numbers again.
    """
    return seed if done == 0 else row_seeds(seed, [done])[0]


def vllm_parameters(sampling: SamplingParameters, limit: int, seed: int) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams that ask for up to ``limit`` tokens, without filters.

    Those that are vLLM's defaults are stated: a server may have others.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": limit,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": seed,
        "ignore_eos": True,  # only the row's own stop tokens end it
        "logprobs": 0,  # the sampled token's alone
        "detokenize": False,
    }


def vllm_filters(sampling: SamplingParameters) -> dict[str, float]:
    """Return the fields of vLLM's SamplingParams by which vLLM itself filters, without saying what is left.

    That will do for answers that nobody learns from, such as those to an evaluation set.
    """
    if not truncates(sampling):
        return {}
    return {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}


def vllm_finish(tokens: Sequence[int], log_probs: Sequence[float], reason: str | None) -> int:
    """Return as what an answer counts that vLLM ended for its ``reason``.

    It has failed where the log-prob of a token is missing or not finite: what is sampled from broken logits
    is no answer of the policy.
    """
    if not len(tokens) or len(log_probs) != len(tokens) or not isfinite(sum(log_probs)):
        return FINISH_FAILED
    return {"stop": FINISH_STOP, "length": FINISH_LENGTH}.get(reason or "", FINISH_FAILED)


def is_greedy(sampling: SamplingParameters) -> bool:
    """Say whether these parameters mean taking the most likely token."""
    return sampling.temperature < GREEDY_BELOW


def truncates(sampling: SamplingParameters) -> bool:
    """Say whether these parameters draw from some of the tokens only."""
    return not is_greedy(sampling) and leaves_out(sampling.top_p, sampling.top_k, sampling.min_p)


def log_prob_temperature(sampling: SamplingParameters) -> float:
    """Return the temperature at which reported log-probs hold: 1 for greedy decoding."""
    return 1.0 if is_greedy(sampling) else max(sampling.temperature, LOWEST_TEMPERATURE)


def filters(sampling: Sequence[SamplingParameters], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return top-k, top-p and min-p of each row, [B] each, as `filtered_logits` takes them."""
    active = [s if truncates(s) else SamplingParameters() for s in sampling]
    return (
        torch.tensor([s.top_k for s in active], dtype=torch.int64, device=device),
        torch.tensor([s.top_p for s in active], dtype=torch.float32, device=device),
        torch.tensor([s.min_p for s in active], dtype=torch.float32, device=device),
    )


def filtered_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Divide by the temperature and remove the tokens below min-p, then outside top-k, then outside top-p.

    ``logits`` [B, V] of any float type; ``temperature``, ``top_p`` and ``min_p`` [B] float32, ``top_k`` [B]
    int64 with 0 for no limit. Returns [B, V] float32 with -inf at removed tokens; at least one token stays.
    ``min_p`` is a share of the largest probability. Ties at the k-th value stay, and the smallest set with
    mass of at least top-p is kept, as in vLLM.
    """
    logits = logits.float() / temperature[:, None]
    vocabulary = logits.shape[1]
    if bool((min_p > 0).any()):
        least = logits.amax(dim=1) + min_p.log()
        logits = logits.masked_fill(logits < least[:, None], -torch.inf)
    limited = (top_k > 0) & (top_k < vocabulary)
    nucleus = top_p < 1
    if not bool((limited | nucleus).any()):
        return logits
    ordered, order = logits.sort(dim=1)
    if bool(limited.any()):
        kept = torch.where(limited, top_k, vocabulary)
        threshold = ordered.gather(1, (vocabulary - kept)[:, None])
        ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    if bool(nucleus.any()):
        below = ordered.softmax(dim=1).cumsum(dim=1)
        dropped = (below <= 1 - top_p[:, None]) & nucleus[:, None]
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def draw(logits: Tensor, greedy: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw one token per row of filtered ``logits`` [B, V]: [B] int64.

    ``greedy`` [B] bool takes the most likely token instead. Row i consumes exactly one draw of
    ``generators[i]`` (on the CPU), so its stream does not depend on the other rows.
    """
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)
    target = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return torch.where(greedy, logits.argmax(dim=1), sampled)
