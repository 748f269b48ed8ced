"""Seeds, filters and random draws: pure functions of sampling that all engines share.

A sequence has one seed. Its tokens are a function of the prompt, the seed and the weights: they do not
depend on the batch or the replica. After an interruption, the torch engine continues the sequence's random
stream. vLLM starts a new stream for each request, so the request that continues the sequence needs a new
seed: `derive_continuation_seed` derives it from the sequence's seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import filters_tokens
from megatron_rl.config.sections.schedules import LOWEST_TEMPERATURE, LinearSchedule
from megatron_rl.types import BANNED, FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, SamplingParameters

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding, as in vLLM."""

_UINT64_MASK = 2**64 - 1
"""Largest unsigned integer of 64 bits: SplitMix64 computes modulo 2**64."""


def _hash_splitmix64(value: int) -> int:
    """Hash a 64-bit integer with the output function of the random generator SplitMix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64_MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _UINT64_MASK
    return value ^ (value >> 31)


def derive_row_seeds(seed: int, rows: Sequence[int]) -> list[int]:
    """Derive an independent seed in [0, 2**63) from ``seed`` for each row number in ``rows``.

    The seeds are outputs of the generator SplitMix64, which can compute output n without the earlier outputs.
    """
    # The constant is SplitMix64's increment, 2**64 divided by the golden ratio.
    increment = 0x9E3779B97F4A7C15
    start = _hash_splitmix64((seed + increment) & _UINT64_MASK)
    states = [(start + (row + 1) * increment) & _UINT64_MASK for row in rows]
    # Shift to 63 bits: checkpoints store seeds as int64.
    return [_hash_splitmix64(state) >> 1 for state in states]


def derive_continuation_seed(seed: int, num_sampled: int) -> int:
    """Derive the seed of a request that continues a sequence after ``num_sampled`` sampled tokens.

    Engines that start a new random stream for each request need this seed. With the sequence's own seed, the
    continuation would repeat the random draws of the sequence's first tokens.
    """
    if num_sampled == 0:
        return seed
    return derive_row_seeds(seed, [num_sampled])[0]


def make_vllm_parameters(
    sampling: SamplingParameters,
    max_tokens: int,
    seed: int,
    response_tokens: int = 0,
) -> dict[str, Any]:
    """Make the fields of vLLM's SamplingParams for a request of at most ``max_tokens`` tokens.

    The fields disable vLLM's own top-p, top-k and min-p; see `make_vllm_filters` for fields that set them.
    ``response_tokens`` is the number of response tokens so far, which vLLM counts as part of the prompt.
    Fields with vLLM's default value are included, since a server may have other defaults.
    """
    # vLLM rejects a minimum that exceeds the request's limit.
    missing_tokens = max(0, sampling.min_response_tokens - response_tokens)
    min_tokens = min(missing_tokens, max_tokens)

    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logit_bias": dict(sampling.logit_bias) or None,
        "min_tokens": min_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": seed,
        # Only the stop tokens of the run end a sequence.
        "ignore_eos": True,
        # Return the log-prob of the sampled token only.
        "logprobs": 0,
        "detokenize": False,
    }


def make_vllm_filters(sampling: SamplingParameters) -> dict[str, float]:
    """Make the fields of vLLM's SamplingParams for vLLM's own top-p, top-k and min-p filters.

    vLLM's own filters do not return which tokens passed them (the support), but training needs the support.
    So these fields are used only for responses that are not trained on, such as responses in an evaluation.
    """
    if not has_filters(sampling):
        return {}
    return {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}


def make_vllm_stop_fields(sampling: SamplingParameters) -> dict[str, Any]:
    """Make the fields of vLLM's SamplingParams with which a server ends a response at a stop text.

    The server searches only the text of one request, not of the whole turn, so the client must still search
    the response with `StopTextFinder`.
    """
    if not sampling.stop_texts:
        return {}
    return {
        "stop": list(sampling.stop_texts),
        "include_stop_str_in_output": True,
        "detokenize": True,
        "skip_special_tokens": False,
    }


def map_vllm_finish_reason(
    tokens: Sequence[int],
    log_probs: Sequence[float],
    finish_reason: str | None,
) -> int:
    """Map vLLM's finish reason to a ``FINISH_*`` code, given the sampled tokens and their log-probs.

    A response with a missing or non-finite log-prob has failed: its logits were invalid, so its tokens are
    not samples of the policy.
    """
    if not len(tokens) or len(log_probs) != len(tokens):
        return FINISH_FAILED
    # The sum is finite only if every log-prob is finite.
    if not isfinite(sum(log_probs)):
        return FINISH_FAILED
    codes = {"stop": FINISH_STOP, "length": FINISH_LENGTH}
    return codes.get(finish_reason or "", FINISH_FAILED)


def resolve_schedules(sampling: SamplingParameters, position: int) -> SamplingParameters:
    """Replace the schedules that change temperature and top-p over tokens by their values for one token.

    ``position`` is the number of tokens that the policy has sampled before this token in its turn.
    """
    if not sampling.changes_over_tokens:
        return sampling

    temperature = LinearSchedule(sampling.temperature, sampling.last_temperature, sampling.temperature_tokens)
    top_p = LinearSchedule(sampling.top_p, sampling.last_top_p, sampling.top_p_tokens)

    # A schedule over 0 tokens means a constant value.
    if sampling.temperature_tokens:
        sampling = sampling._replace(temperature=temperature.value_at(position), temperature_tokens=0)
    if sampling.top_p_tokens:
        sampling = sampling._replace(top_p=top_p.value_at(position), top_p_tokens=0)
    return sampling


def is_greedy(sampling: SamplingParameters) -> bool:
    """Return whether decoding is greedy: the most likely token is selected instead of a random one."""
    return sampling.temperature < GREEDY_BELOW


def has_schedule(sampling: SamplingParameters) -> bool:
    """Return whether temperature or top-p changes from token to token; false for greedy decoding."""
    # Greedy decoding depends on neither.
    return sampling.changes_over_tokens and not is_greedy(sampling)


def has_filters(sampling: SamplingParameters) -> bool:
    """Return whether top-p, top-k or min-p filters restrict the sampling of any token."""
    # Filters never remove the most likely token, so they have no effect on greedy decoding.
    if is_greedy(sampling):
        return False

    top_p = sampling.top_p
    if sampling.top_p_tokens:
        top_p = min(top_p, sampling.last_top_p)
    return filters_tokens(top_p, sampling.top_k, sampling.min_p)


def extract_support_ids(mask: Tensor, sampling: SamplingParameters) -> list[int]:
    """Extract the support of one draw: the token ids that passed the filters; [] without filters.

    ``mask`` [V] is True for the tokens that passed. ``sampling`` has the constant parameters of this draw
    (see `resolve_schedules`), since a filter may begin or end within a turn.
    """
    if not has_filters(sampling):
        return []
    return mask.nonzero()[:, 0].tolist()


def resolve_log_prob_temperature(sampling: SamplingParameters) -> float:
    """Return the temperature at which engines compute log-probs: 1 for greedy decoding.

    If a schedule changes the temperature over tokens, this is the temperature of a turn's first token; see
    `resolve_schedules` for later tokens.
    """
    if is_greedy(sampling):
        return 1.0
    return max(sampling.temperature, LOWEST_TEMPERATURE)


def apply_logit_rules(
    logits: Tensor,
    sampling: Sequence[SamplingParameters],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> Tensor:
    """Apply each row's biases, bans and penalties to its logits [B, V]; return the new logits [B, V].

    Call it before temperature and filters are applied. ``sampling`` has the sampling parameters of each row.
    ``prompts`` has the prompt token ids of each row, and ``responses`` has its response token ids so far.
    Returns ``logits`` itself if no row has a rule. As in vLLM, biases and bans are applied before the
    penalties, and the repetition penalty also counts tokens of the prompt.
    """
    if not any(parameters.has_rules for parameters in sampling):
        return logits

    logits = logits.float().clone()
    for row, parameters in enumerate(sampling):
        for token, bias in parameters.logit_bias:
            logits[row, token] += bias
        if len(responses[row]) < parameters.min_response_tokens:
            logits[row, list(parameters.stop_token_ids)] += BANNED
        if parameters.no_repeat_ngram_size:
            row_tokens = torch.tensor([*prompts[row], *responses[row]], device=logits.device)
            ban_repeated_ngrams(logits[row], row_tokens, parameters.no_repeat_ngram_size)
        if parameters.has_penalties:
            _apply_penalties(logits[row], parameters, prompts[row], responses[row])
    return logits


def ban_repeated_ngrams(logits: Tensor, tokens: Tensor, ngram_size: int) -> None:
    """Ban the tokens that would repeat an n-gram of the row; changes the row's ``logits`` [V] in place.

    ``tokens``: all tokens of the row so far, prompt included. ``ngram_size``: n. Equivalent to
    `NoRepeatNGramLogitsProcessor` of transformers.
    """
    if len(tokens) < ngram_size:
        return

    ngrams = tokens.unfold(0, ngram_size, 1)
    last_tokens = tokens[len(tokens) - ngram_size + 1 :]

    # Each n-gram adds to the logit of its last token: `BANNED` if its first n - 1 tokens equal the row's last
    # n - 1 tokens, otherwise 0. Indexing only the matching n-grams would synchronize with the device.
    is_match = (ngrams[:, :-1] == last_tokens).all(dim=1)
    logits.index_add_(0, ngrams[:, -1].long(), is_match.to(logits.dtype) * BANNED)


def _apply_penalties(
    logits: Tensor,
    sampling: SamplingParameters,
    prompt: Sequence[int],
    response: Sequence[int],
) -> None:
    """Apply the repetition, frequency and presence penalties to the logits [V] of one row, in place."""
    # The repetition penalty lowers the logit of every token that occurs in the prompt or response.
    tokens = torch.tensor([*prompt, *response], dtype=torch.int64, device=logits.device)
    token_ids = tokens.unique()
    token_logits = logits[token_ids]
    penalty = sampling.repetition_penalty
    logits[token_ids] = torch.where(token_logits > 0, token_logits / penalty, token_logits * penalty)

    # The other penalties count tokens of the response only.
    response_tokens = tokens[len(prompt) :]
    token_counts = torch.bincount(response_tokens, minlength=len(logits))
    logits -= sampling.frequency_penalty * token_counts + sampling.presence_penalty * (token_counts > 0)


def make_filter_tensors(
    sampling: Sequence[SamplingParameters],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the tensors top-k, top-p and min-p, [B] each, for `scale_and_filter_logits`."""
    # Rows without filters get the default parameters, which remove no tokens.
    row_filters = [parameters if has_filters(parameters) else SamplingParameters() for parameters in sampling]
    top_k = [parameters.top_k for parameters in row_filters]
    top_p = [parameters.top_p for parameters in row_filters]
    min_p = [parameters.min_p for parameters in row_filters]

    return (
        torch.tensor(top_k, dtype=torch.int64, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
    )


def apply_temperature_and_filters(logits: Tensor, sampling: Sequence[SamplingParameters]) -> Tensor:
    """Apply each row's temperature and filters to its logits [B, V]; return the new logits [B, V] float32.

    Removed tokens have the logit -inf. ``sampling`` has the parameters of each row, with constant temperature
    and filters, see `resolve_schedules`.
    """
    temperatures = [resolve_log_prob_temperature(parameters) for parameters in sampling]
    temperature = torch.tensor(temperatures, device=logits.device)
    top_k, top_p, min_p = make_filter_tensors(sampling, logits.device)
    return scale_and_filter_logits(logits, temperature, top_k, top_p, min_p)


def scale_and_filter_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Divide logits by the temperature and remove tokens below min-p, outside top-k, then outside top-p.

    ``logits`` [B, V] of any float type; ``temperature``, ``top_p`` and ``min_p`` [B] float32, ``top_k`` [B]
    int64 with 0 for no limit. Returns [B, V] float32 with -inf for removed tokens; at least one remains.

    The filters are defined as in vLLM: ``min_p`` is a fraction of the largest probability. Tokens with the
    same logit as the k-th token are retained. The nucleus is the smallest set of tokens whose total
    probability is at least top-p.
    """
    logits = logits.float() / temperature[:, None]
    vocabulary_size = logits.shape[1]

    # min-p: a token remains if p >= min_p * p_max, which is a lower bound of its logit.
    if bool((min_p > 0).any()):
        lowest_logit = logits.amax(dim=1) + min_p.log()
        logits = logits.masked_fill(logits < lowest_logit[:, None], -torch.inf)

    has_top_k = (top_k > 0) & (top_k < vocabulary_size)
    has_top_p = top_p < 1
    if not bool((has_top_k | has_top_p).any()):
        return logits

    # Top-k and top-p need the logits in ascending order.
    sorted_logits, sorted_ids = logits.sort(dim=1)
    if bool(has_top_k.any()):
        k = torch.where(has_top_k, top_k, vocabulary_size)
        threshold = sorted_logits.gather(1, (vocabulary_size - k)[:, None])
        sorted_logits = sorted_logits.masked_fill(sorted_logits < threshold, -torch.inf)

    # A token is outside the nucleus if its probability, and those of all less likely tokens, sum to at most
    # 1 - p.
    if bool(has_top_p.any()):
        tail_mass = sorted_logits.softmax(dim=1).cumsum(dim=1)
        is_tail = (tail_mass <= 1 - top_p[:, None]) & has_top_p[:, None]
        # The most likely token remains, even if rounding puts it into the tail.
        is_tail[:, -1] = False
        sorted_logits = sorted_logits.masked_fill(is_tail, -torch.inf)

    # Restore the order of the vocabulary.
    return torch.empty_like(logits).scatter_(1, sorted_ids, sorted_logits)


def draw_tokens(
    logits: Tensor,
    is_greedy_row: Tensor,
    generators: Sequence[torch.Generator],
) -> Tensor:
    """Draw one token per row of filtered ``logits`` [B, V]; return the token ids, [B] int64.

    Where ``is_greedy_row`` [B] bool is true, the most likely token is selected instead. In either case, one
    number is drawn from ``generators[i]`` (on the CPU) for row i, so the random stream of a row does not
    depend on other rows.
    """
    # Sample by inverting the cumulative distribution, in float64: near 1, the probability of a rare token is
    # smaller than the distance between two float32 numbers.
    draws = []
    for generator in generators:
        draws.append(torch.rand((), generator=generator, dtype=torch.float64))
    uniform = torch.stack(draws).to(logits.device)
    cumulative = logits.double().softmax(dim=1).cumsum(dim=1)

    # Scale by the total probability, which is not exactly 1 after rounding. A removed token has an empty
    # interval, and with `right=True` it is never drawn. If a target rounds up to the total, its index is
    # beyond the last token, so clamp the index.
    target = uniform[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, target, right=True)[:, 0]
    sampled = sampled.clamp(max=logits.shape[1] - 1)
    return torch.where(is_greedy_row, logits.argmax(dim=1), sampled)
