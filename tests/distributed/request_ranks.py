"""What `rollout_ranks` checks of requests: aborted, interrupted, too long for a step, under new weights."""

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
from megatron_rl.rollout.sampling import row_seeds
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.types import FINISH_LENGTH
from tests.sampling import generate, make_prompts


def check_long_prompts(path: Path) -> None:
    """Prompts of more tokens together than vLLM takes in one step, of which a seeded one would be cut."""
    engine = build(path, 1, load=True, max_model_len=1024)
    rows = [
        torch.randint(0, 300, (900,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6)
    ]
    whole = generate(engine, make_prompts(rows, SAMPLED), seed=5)

    alone = generate(engine, make_prompts(rows[5:], SAMPLED), seed=5, rows=[5])
    close_to(whole.rows([5]), alone)
    transformers_agree(TorchEngine.from_hf(path), whole)
    engine.close()


def check_requests(path: Path) -> None:
    """An aborted request is not answered and leaves the others as they are; a context ends what is open.

    An interrupted one is answered with what there is, which the whole answer begins with.
    """
    engine = build(path, 2, load=True)
    rows = random_rows(3, seed=4)
    whole = generate(engine, make_prompts(rows, SAMPLED), seed=5)
    seeds = row_seeds(5, range(3))
    requests = [
        GenerationRequest(n, row, SAMPLED, 20, seed)
        for n, (row, seed) in enumerate(zip(rows, seeds, strict=True))
    ]

    answers: dict[int, list[int]] = {}
    with engine.sampling():
        for request in requests:
            engine.submit(request)

        for _ in range(3):
            assert engine.step() == []

        engine.abort(1)
        while len(answers) < 2:
            answers |= {answer.number: list(answer.tokens) for answer in engine.step()}

        engine.submit(replace(requests[1], number=7))
        assert engine.interrupt() == []  # without a token yet

        engine.submit(replace(requests[1], number=8))
        for _ in range(5):
            assert engine.step() == []

        (cut,) = engine.interrupt()
        assert engine.step() == []
        engine.submit(replace(requests[1], number=9))

    assert answers == {n: responses(whole)[n] for n in (0, 2)}
    assert (cut.number, cut.finish_reason) == (8, FINISH_LENGTH)

    count = len(cut.tokens)
    assert 0 < count <= 5 and list(cut.tokens) == responses(whole)[1][:count]

    row = whole.rows([1])
    expected = row.rollout_log_probs[row.response_mask][:count]
    torch.testing.assert_close(torch.tensor(cut.log_probs), expected, atol=1e-4, rtol=0)
    again = generate(engine, make_prompts(rows, SAMPLED), seed=5)  # nothing was left running
    assert torch.equal(again.tokens, whole.tokens)
    engine.close()


def check_updates_in_flight(path: Path) -> None:
    """Log-probs after an update are the new weights' own; with ``keep`` from older keys and values."""
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    for parameter in new.parameters():
        parameter.data.mul_(1.05)

    rows = random_rows(3, seed=4)
    seeds = row_seeds(5, range(3))

    requests = [
        GenerationRequest(n, row, SAMPLED, 20, seed)
        for n, (row, seed) in enumerate(zip(rows, seeds, strict=True))
    ]
    for on_update in (RECOMPUTE, KEEP):
        engine = build(path, 2, on_update=on_update)
        write(engine, path)
        engine.finish_update(1)

        with engine.sampling():
            for request in requests:
                engine.submit(request)
            for _ in range(5):
                assert engine.step() == []
            parts = {answer.number: answer.tokens for answer in engine.interrupt()}

        assert set(engine.kept) == (set(seeds) if on_update == KEEP else set())

        write(engine, path, scale=1.05)
        engine.finish_update(2)
        with engine.sampling():
            for n, request in enumerate(requests[:2]):
                text = [*request.tokens, *parts[n]]
                engine.submit(
                    replace(
                        request,
                        number=n + 7,
                        tokens=text,
                        limit=15,
                        done=5,
                    )
                )

            answers = engine.step()
            assert not engine.kept  # the third is not asked for any more
            while len(answers) < 2:
                answers += engine.step()

        for answer in answers:
            text = [*rows[answer.number - 7], *parts[answer.number - 7]]
            tokens = list(answer.tokens)
            assert len(tokens) == 15
            anew = log_probs(new, [*text, *tokens])[-15:]
            kept = log_probs(new, [text[-1], *tokens], old(torch.tensor([text[:-1]])).past_key_values)
            assert float((anew - kept).abs().max()) > 1e-3
            expected = kept if on_update == KEEP else anew
            torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)

        fresh = generate(engine, make_prompts(rows[:1], SAMPLED), seed=5)  # reads no older weights' prefix
        expected = log_probs(new, fresh.tokens.tolist())[-20:]
        torch.testing.assert_close(fresh.rollout_log_probs[-20:], expected, atol=1e-4, rtol=0)
        engine.close()


def log_probs(model: Any, tokens: list[int], cache: Any = None) -> torch.Tensor:
    """Return what a model of transformers says of all tokens but the first, behind what ``cache`` has."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), past_key_values=cache).logits[0, :-1].float()
    scaled = (logits / SAMPLED.temperature).log_softmax(1)
    return scaled.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
