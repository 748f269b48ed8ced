"""Checks of requests for `rollout_ranks`: aborted, interrupted, longer than a step, and updated in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engines import (
    SAMPLED,
    build_engine,
    check_against_transformers,
    check_close,
    check_equal_rollouts,
    random_prompts,
    response_tokens,
    write_weights,
)
from transformers import AutoModelForCausalLM

from megatron_rl.config.sections.rollout import KEEP, RECOMPUTE
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.sampling import derive_row_seeds
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_LENGTH, SamplingParameters
from tests.sampling import generate, make_prompts

MAX_RESPONSE_TOKENS = 20
HEATING = {"start": 0.6, "end": 1.4, "over": 12}
HEATED = SAMPLED._replace(
    temperature=0.6,
    last_temperature=1.4,
    temperature_tokens=12,
)
"""Sampling whose temperature rises over the first 12 tokens, as `HEATING` configures it."""

TOKENS_BEFORE_UPDATE = 5
UPDATE_SCALE = 1.05
"""Factor of all weights in an update."""


def make_requests(
    prompts: list[list[int]],
    sampling: SamplingParameters,
    seed: int,
) -> list[GenerationRequest]:
    """Return one request per prompt, numbered and seeded as `generate` does."""
    seeds = derive_row_seeds(seed, range(len(prompts)))
    return [
        GenerationRequest(number, tokens, sampling, MAX_RESPONSE_TOKENS, row_seed)
        for number, (tokens, row_seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def check_long_prompts(path: Path) -> None:
    """Check prompts whose total length exceeds one vLLM step, so that a seeded request would be split."""
    engine = build_engine(path, 1, load=True, max_model_len=1024)
    # 6 × 900 tokens are more than vLLM processes in one step here.
    prompts = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        prompts.append(torch.randint(0, 300, (900,), generator=generator).tolist())
    rollouts = generate(engine, make_prompts(prompts, SAMPLED), seed=5)

    last_alone = generate(engine, make_prompts(prompts[5:], SAMPLED), seed=5, rows=[5])
    check_equal_rollouts(rollouts.rows([5]), last_alone)
    check_against_transformers(TorchEngine.from_hf(path), rollouts)
    engine.close()


def check_requests(path: Path) -> None:
    """Check aborted and interrupted requests.

    An aborted request returns nothing and leaves the other requests unchanged; leaving the context ends open
    requests. An interrupted request returns its tokens so far, with which the complete response starts.
    """
    engine = build_engine(path, 2, load=True)
    prompts = random_prompts(3, seed=4)
    expected = generate(engine, make_prompts(prompts, SAMPLED), seed=5)
    requests = make_requests(prompts, SAMPLED, seed=5)

    tokens_by_number: dict[int, list[int]] = {}
    with engine.sampling():
        for request in requests:
            engine.submit(request)
        for _ in range(3):
            assert engine.step() == []

        engine.abort(1)
        while len(tokens_by_number) < 2:
            for completion in engine.step():
                tokens_by_number[completion.number] = list(completion.tokens)

        # The aborted request can be submitted again; an interruption before its first token returns nothing.
        engine.submit(replace(requests[1], number=7))
        assert engine.interrupt() == []

        # After its first tokens an interruption returns them.
        engine.submit(replace(requests[1], number=8))
        for _ in range(5):
            assert engine.step() == []
        (interrupted,) = engine.interrupt()
        assert engine.step() == []

        # Leaving the context ends this request.
        engine.submit(replace(requests[1], number=9))

    expected_tokens = response_tokens(expected)
    assert tokens_by_number == {
        0: expected_tokens[0],
        2: expected_tokens[2],
    }
    check_interrupted(
        interrupted,
        expected.rows([1]).rollout_log_probs,
        expected_tokens[1],
    )

    # No request of the context is still running, so the engine samples as before.
    repeated = generate(engine, make_prompts(prompts, SAMPLED), seed=5)
    assert torch.equal(repeated.tokens, expected.tokens)
    engine.close()


def check_interrupted(
    interrupted: Completion,
    expected_log_probs: torch.Tensor,
    expected_tokens: list[int],
) -> None:
    """Check that an interrupted request returns the first tokens of the complete response."""
    assert interrupted.number == 8
    assert interrupted.finish_reason == FINISH_LENGTH

    num_tokens = len(interrupted.tokens)
    assert 0 < num_tokens <= 5
    assert list(interrupted.tokens) == expected_tokens[:num_tokens]

    # Log-probs of a row start with its prompt.
    response_log_probs = expected_log_probs[-len(expected_tokens) :]
    check_close(
        torch.tensor(interrupted.log_probs),
        response_log_probs[:num_tokens],
    )


def check_updates_in_flight(path: Path) -> None:
    """Check that tokens after an update have the new weights' log-probs.

    With ``keep`` they depend on keys and values that older weights computed. In both cases the temperature
    continues from the token at which the request was interrupted.
    """
    old_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    new_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for parameter in new_model.parameters():
        parameter.data.mul_(UPDATE_SCALE)

    prompts = random_prompts(3, seed=4)
    requests = make_requests(prompts, HEATED, seed=5)
    for on_update in (RECOMPUTE, KEEP):
        engine = build_engine(path, 2, on_update=on_update, temperature=HEATING)
        write_weights(engine, path)
        engine.finish_update(1)

        prefixes = interrupt_after_first_tokens(engine, requests)
        kept_seeds = set()
        if on_update == KEEP:
            kept_seeds = {request.seed for request in requests}
        assert set(engine.kept) == kept_seeds

        # Two of the three sequences continue under new weights.
        write_weights(engine, path, scale=UPDATE_SCALE)
        engine.finish_update(2)
        completions = continue_requests(engine, requests[:2], prefixes)
        for completion, prefix in zip(completions, prefixes, strict=False):
            tokens = list(completion.tokens)
            recomputed = compute_log_probs(new_model, [*prefix, *tokens])[-len(tokens) :]
            old_cache = old_model(torch.tensor([prefix[:-1]])).past_key_values
            with_old_cache = compute_log_probs(new_model, [prefix[-1], *tokens], old_cache)

            # Both references must differ, or the comparison could not tell the two behaviours apart.
            assert float((recomputed - with_old_cache).abs().max()) > 1e-3
            expected = recomputed
            if on_update == KEEP:
                expected = with_old_cache
            check_close(torch.tensor(completion.log_probs), expected)

        # A new request must not read a prefix that older weights have cached.
        rollouts = generate(engine, make_prompts(prompts[:1], HEATED), seed=5)
        expected = compute_log_probs(new_model, rollouts.tokens.tolist())
        check_close(
            rollouts.rollout_log_probs[-MAX_RESPONSE_TOKENS:],
            expected[-MAX_RESPONSE_TOKENS:],
        )
        engine.close()


def interrupt_after_first_tokens(
    engine: VllmEngine,
    requests: list[GenerationRequest],
) -> list[list[int]]:
    """Sample `TOKENS_BEFORE_UPDATE` tokens for each request; return the prompts with these tokens."""
    with engine.sampling():
        for request in requests:
            engine.submit(request)
        for _ in range(TOKENS_BEFORE_UPDATE):
            assert engine.step() == []
        completions = engine.interrupt()

    tokens_by_number = {completion.number: completion.tokens for completion in completions}
    return [[*request.tokens, *tokens_by_number[request.number]] for request in requests]


def continue_requests(
    engine: VllmEngine,
    requests: list[GenerationRequest],
    prefixes: list[list[int]],
) -> list[Completion]:
    """Continue interrupted requests to their limits; return the completions in the order of ``requests``."""
    num_remaining = MAX_RESPONSE_TOKENS - TOKENS_BEFORE_UPDATE
    with engine.sampling():
        for request, prefix in zip(requests, prefixes, strict=False):
            # A continued request has a new number and the seed of the interrupted one.
            continued = replace(
                request,
                number=request.number + 7,
                tokens=prefix,
                limit=num_remaining,
                done=TOKENS_BEFORE_UPDATE,
                turn_tokens=TOKENS_BEFORE_UPDATE,
            )
            engine.submit(continued)

        completions = engine.step()
        # The cache of the third sequence is dropped, since no request continues it.
        assert not engine.kept
        while len(completions) < len(requests):
            completions += engine.step()

    assert all(len(completion.tokens) == num_remaining for completion in completions)
    return sorted(completions, key=lambda completion: completion.number)


def compute_log_probs(model: Any, tokens: list[int], cache: Any = None) -> torch.Tensor:
    """Return a transformers model's log-probs of all tokens but the first, continuing from ``cache``.

    The last token is the 20th of its turn, as in the checks above.
    """
    with torch.no_grad():
        output = model(torch.tensor([tokens]), past_key_values=cache)
    logits = output.logits[0, :-1].float()

    # vLLM reports log-probs at the temperature of sampling, which rises with the position in the turn.
    turn_positions = torch.arange(len(logits)) - len(logits) + MAX_RESPONSE_TOKENS
    progress = (turn_positions / HEATING["over"]).clamp(0.0, 1.0)
    temperatures = HEATING["start"] + (HEATING["end"] - HEATING["start"]) * progress

    log_probs = (logits / temperatures[:, None]).log_softmax(1)
    next_tokens = torch.tensor(tokens[1:])
    return log_probs.gather(1, next_tokens[:, None])[:, 0]
