"""Checks of requests for `rollout_ranks`: aborted, interrupted, longer than a step, and updated in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engines import (
    SAMPLED,
    build,
    close_to,
    random_rows,
    responses,
    transformers_agree,
    write,
)
from transformers import AutoModelForCausalLM

from megatron_rl.config.sections.rollout import KEEP, RECOMPUTE
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.sampling import derive_row_seeds
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.types import FINISH_LENGTH
from tests.sampling import generate, make_prompts

HEATING = {"start": 0.6, "end": 1.4, "over": 12}
HEATED = SAMPLED._replace(temperature=0.6, last_temperature=1.4, temperature_tokens=12)


def check_long_prompts(path: Path) -> None:
    """Check prompts whose total length exceeds one vLLM step, so that a seeded request would be split."""
    engine = build(path, 1, load=True, max_model_len=1024)
    # 6 × 900 tokens are more than vLLM processes in one step here.
    rows = [
        torch.randint(0, 300, (900,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6)
    ]
    full = generate(engine, make_prompts(rows, SAMPLED), seed=5)

    single = generate(engine, make_prompts(rows[5:], SAMPLED), seed=5, rows=[5])
    close_to(full.rows([5]), single)
    transformers_agree(TorchEngine.from_hf(path), full)
    engine.close()


def check_requests(path: Path) -> None:
    """Check aborted and interrupted requests.

    An aborted request returns nothing and leaves the others unchanged; leaving the context ends open ones. An
    interrupted request returns its tokens so far, which the complete response starts with.
    """
    engine = build(path, 2, load=True)
    rows = random_rows(3, seed=4)
    full = generate(engine, make_prompts(rows, SAMPLED), seed=5)
    seeds = derive_row_seeds(5, range(3))
    requests = [
        GenerationRequest(n, row, SAMPLED, 20, seed)
        for n, (row, seed) in enumerate(zip(rows, seeds, strict=True))
    ]

    outputs: dict[int, list[int]] = {}
    with engine.sampling():
        for request in requests:
            engine.submit(request)

        for _ in range(3):
            assert engine.step() == []

        engine.abort(1)
        while len(outputs) < 2:
            outputs |= {output.number: list(output.tokens) for output in engine.step()}

        # The aborted request can be submitted again; it is interrupted before and after it has tokens.
        engine.submit(replace(requests[1], number=7))
        assert engine.interrupt() == []  # it has no token yet

        engine.submit(replace(requests[1], number=8))
        for _ in range(5):
            assert engine.step() == []

        (interrupted,) = engine.interrupt()
        assert engine.step() == []
        # Leaving the context ends this request.
        engine.submit(replace(requests[1], number=9))

    assert outputs == {n: responses(full)[n] for n in (0, 2)}
    assert (interrupted.number, interrupted.finish_reason) == (8, FINISH_LENGTH)

    count = len(interrupted.tokens)
    assert 0 < count <= 5 and list(interrupted.tokens) == responses(full)[1][:count]

    row = full.rows([1])
    expected = row.rollout_log_probs[row.response_mask][:count]
    torch.testing.assert_close(torch.tensor(interrupted.log_probs), expected, atol=1e-4, rtol=0)
    # No request of the block is still running, so the engine samples as before.
    repeated = generate(engine, make_prompts(rows, SAMPLED), seed=5)
    assert torch.equal(repeated.tokens, full.tokens)
    engine.close()


def check_updates_in_flight(path: Path) -> None:
    """Check that tokens after an update have the new weights' log-probs.

    With ``keep`` they follow from keys and values that older weights computed. Either way the temperature
    goes on where it was when the request was interrupted.
    """
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    for parameter in new.parameters():
        parameter.data.mul_(1.05)

    rows = random_rows(3, seed=4)
    seeds = derive_row_seeds(5, range(3))

    requests = [
        GenerationRequest(n, row, HEATED, 20, seed)
        for n, (row, seed) in enumerate(zip(rows, seeds, strict=True))
    ]
    for on_update in (RECOMPUTE, KEEP):
        engine = build(path, 2, on_update=on_update, temperature=HEATING)
        write(engine, path)
        engine.finish_update(1)

        with engine.sampling():
            for request in requests:
                engine.submit(request)
            for _ in range(5):
                assert engine.step() == []
            partial_tokens = {output.number: output.tokens for output in engine.interrupt()}

        assert set(engine.kept) == (set(seeds) if on_update == KEEP else set())

        # Two of the three sequences continue under new weights.
        write(engine, path, scale=1.05)
        engine.finish_update(2)
        with engine.sampling():
            for n, request in enumerate(requests[:2]):
                prefix = [*request.tokens, *partial_tokens[n]]
                engine.submit(
                    replace(
                        request,
                        number=n + 7,
                        tokens=prefix,
                        limit=15,
                        done=5,
                        turn_tokens=5,
                    )
                )

            outputs = engine.step()
            assert not engine.kept  # the third sequence is not requested any more
            while len(outputs) < 2:
                outputs += engine.step()

        for output in outputs:
            prefix = [
                *rows[output.number - 7],
                *partial_tokens[output.number - 7],
            ]
            tokens = list(output.tokens)
            assert len(tokens) == 15
            # Both references must differ, or the comparison could not tell the two behaviours apart.
            recomputed = log_probs(new, [*prefix, *tokens])[-15:]
            with_old_cache = log_probs(
                new,
                [prefix[-1], *tokens],
                old(torch.tensor([prefix[:-1]])).past_key_values,
            )
            assert float((recomputed - with_old_cache).abs().max()) > 1e-3
            expected = with_old_cache if on_update == KEEP else recomputed
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)

        # A new request must not read a prefix that older weights have cached.
        new_request = generate(engine, make_prompts(rows[:1], HEATED), seed=5)
        expected = log_probs(new, new_request.tokens.tolist())[-20:]
        torch.testing.assert_close(new_request.rollout_log_probs[-20:], expected, atol=1e-4, rtol=0)
        engine.close()


def log_probs(model: Any, tokens: list[int], cache: Any = None) -> torch.Tensor:
    """Return a transformers model's log-probs of all tokens but the first, continuing from ``cache``.

    The last token is the 20th of its turn, as in the checks above.
    """
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0, :-1].float()
    # vLLM reports log-probs at the temperature of sampling.
    share = ((torch.arange(len(logits)) - len(logits) + 20) / HEATING["over"]).clamp(0.0, 1.0)
    temperature = HEATING["start"] + (HEATING["end"] - HEATING["start"]) * share
    scaled = (logits / temperature[:, None]).log_softmax(1)
    return scaled.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
