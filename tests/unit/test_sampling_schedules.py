"""Temperature and top-p that change over the tokens of a turn: engine and trainer against float64."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.megatron.log_probs import VocabularyShard, vocab_parallel_log_probs
from megatron_rl.megatron.logit_rules import token_temperatures
from megatron_rl.megatron.schedule import _select_support
from megatron_rl.rollout.collate import to_prompts, to_rollouts
from megatron_rl.rollout.engines.vllm import replay
from megatron_rl.rollout.engines.vllm.replay import accelerator_processor
from megatron_rl.rollout.sampling import has_schedule, sampling_at, truncates
from megatron_rl.rollout.types import GenerationRequest, Sequence, SequenceGroup
from megatron_rl.types import LogitRules, Rollouts, SamplingParameters
from tests.sampling import engine_of

VOCABULARY = 23
HEATED = SamplingParameters(temperature=0.4, last_temperature=1.7, temperature_tokens=5, top_k=9)
COOLED = SamplingParameters(temperature=1.6, last_temperature=0.5, temperature_tokens=4, min_p=0.01)
# The filter begins at the second token, and ends at the fifth.
BEGUN = SamplingParameters(temperature=0.8, top_p=1.0, last_top_p=0.6, top_p_tokens=3)
ENDED = SamplingParameters(top_p=0.7, last_top_p=1.0, top_p_tokens=4, repetition_penalty=1.3)
BOTH = SamplingParameters(
    temperature=1.5, last_temperature=0.7, temperature_tokens=6, top_p=0.95, last_top_p=0.5, top_p_tokens=3,
    min_response_tokens=2, stop_token_ids=(),
)  # fmt: skip
CONSTANT = SamplingParameters(temperature=0.7, top_p=0.9)
ROWS = (HEATED, COOLED, BEGUN, CONSTANT, ENDED, BOTH, SamplingParameters())
# Tokens of each request; observations come between the turns.
TURNS = ((7,), (3, 1, 4), (2, 6))
OBSERVED = (5, 11, 2)


def linear(start: float, end: float, length: int, index: int) -> float:
    """Return the value of a schedule by its definition."""
    if index >= length:
        return end if length else start
    return start + (end - start) * index / length


def embeddings() -> tuple[Tensor, Tensor]:
    """Return hidden state [V, 6] and output weight [V, 6] of each token, in float64."""
    generator = torch.Generator().manual_seed(0)
    states = 1.5 * torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64)
    return states, torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64)


def sampled() -> Rollouts:
    """Sample rows of several turns, each in several requests, from logits that the last token decides."""
    states, weight = embeddings()

    def last_logits(tokens: Tensor, lengths: Tensor) -> Tensor:
        return (states[tokens[lengths.cumsum(0) - 1]] @ weight.t()).float()

    engine = engine_of(last_logits)
    sequences = [Sequence(array("q", [row, 3]), sampling, 100 + row, 0) for row, sampling in enumerate(ROWS)]
    for parts in TURNS:
        turn_tokens = 0
        for limit in parts:
            with engine.sampling():
                for number, sequence in enumerate(sequences):
                    tokens = (sequence.prompt + sequence.tokens).tolist()
                    done = len(sequence.tokens)
                    request = GenerationRequest(
                        number, tokens, sequence.sampling, limit, sequence.seed, done, turn_tokens
                    )
                    engine.submit(request)
                for completion in engine.step():
                    sequences[completion.number].append_sampled(completion, 0)
            turn_tokens += limit
        for sequence in sequences:
            sequence.append_observed(OBSERVED)
    return to_rollouts([SequenceGroup(to_prompts([]), sequences)])


def brute_force(logits: Tensor, sampling: SamplingParameters, earlier: list[int], index: int):
    """Return log-probs [V] of the token with an index in its turn, and the tokens it was sampled from."""
    values = [float(value) for value in logits.detach()]
    changed = []
    for token in range(VOCABULARY):
        factor = 1.0
        if token in earlier:
            penalty = sampling.repetition_penalty
            factor = 1 / penalty if values[token] > 0 else penalty
        changed.append(logits[token] * factor)
    schedule = (sampling.temperature, sampling.last_temperature, sampling.temperature_tokens)
    scaled = torch.stack(changed) / linear(*schedule, index)

    probabilities = scaled.detach().softmax(0).tolist()
    left = [
        token for token in range(VOCABULARY) if probabilities[token] >= sampling.min_p * max(probabilities)
    ]
    left.sort(key=lambda token: -probabilities[token])
    left = left[: sampling.top_k or VOCABULARY]
    mass = linear(sampling.top_p, sampling.last_top_p, sampling.top_p_tokens, index)
    total = sum(probabilities[token] for token in left)
    nucleus = []
    while mass == 1 or sum(probabilities[token] for token in nucleus) < mass * total:
        if len(nucleus) == len(left):
            break
        nucleus.append(left[len(nucleus)])

    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[nucleus] = False
    return scaled.masked_fill(outside, -torch.inf).log_softmax(0), set(nucleus)


def expected(rollouts: Rollouts, states: Tensor, weight: Tensor):
    """Return the log-prob and the support of each sampled token, token by token."""
    log_probs = []
    supports = []
    start = 0
    for sampling, length in zip(ROWS, rollouts.lengths.tolist(), strict=True):
        tokens = rollouts.tokens[start : start + length].tolist()
        index = 2
        for parts in TURNS:
            for position in range(sum(parts)):
                logits = weight @ states[tokens[index - 1]]
                log_p, support = brute_force(logits, sampling, tokens[:index], position)
                log_probs.append(log_p[tokens[index]])
                supports.append(support)
                index += 1
            index += len(OBSERVED)
        start += length
    return torch.stack(log_probs), supports


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return sampled()


def test_engines_report_the_distribution_that_each_token_was_sampled_from(rollouts: Rollouts):
    log_probs, supports = expected(rollouts, *embeddings())
    mask = rollouts.response_mask
    torch.testing.assert_close(rollouts.rollout_log_probs[mask].double(), log_probs, atol=2e-6, rtol=0)

    assert rollouts.support_sizes is not None and rollouts.support is not None
    sizes = rollouts.support_sizes[mask].tolist()
    reported = [set(part.tolist()) or set(range(VOCABULARY)) for part in rollouts.support.split(sizes)]
    assert reported == supports
    assert not rollouts.support_sizes[~mask].any()


def test_trainer_has_the_values_and_gradients_of_the_same_distribution(rollouts: Rollouts):
    states, weight = (tensor.requires_grad_() for tensor in embeddings())
    selected = rollouts.response_mask.nonzero()[:, 0]
    assert rollouts.rules is not None
    of_rows = rollouts.temperature.repeat_interleave(rollouts.lengths)
    temperature = token_temperatures(of_rows, rollouts.lengths, rollouts.rules)[selected]
    wanted, _ = expected(rollouts, states, weight)
    # Without a penalty the trainer's tiles need no rules, which `test_logit_rules` compares.
    plain = torch.tensor([ROWS[row].repetition_penalty == 1 for row in range(len(ROWS))])
    plain = plain.repeat_interleave(rollouts.lengths)[selected]

    found, _ = vocab_parallel_log_probs(
        states[rollouts.tokens[selected - 1]],
        weight,
        rollouts.tokens[selected],
        temperature,
        VocabularyShard(0, VOCABULARY, SimpleNamespace(size=lambda: 1)),
        4,
        support=_select_support(rollouts, selected),
    )
    # Temperatures are float32, so they are equal to 1e-7.
    torch.testing.assert_close(found[plain], wanted[plain], rtol=0, atol=1e-6)
    mix = torch.linspace(-1, 1, len(selected), dtype=torch.float64) * plain
    mine = torch.autograd.grad((found * mix).sum(), (states, weight))
    theirs = torch.autograd.grad((wanted * mix).sum(), (states, weight))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_temperatures_begin_anew_with_each_turn_of_packed_rows():
    rules = LogitRules(HEATED, 2, turn_starts=(2, 9, 12))
    lengths = torch.tensor([14, 3])
    of_rows = torch.tensor([0.4, 0.9]).repeat_interleave(lengths)
    temperatures = token_temperatures(of_rows, lengths, [rules, LogitRules(SamplingParameters(), 1)])
    turn = [linear(0.4, 1.7, 5, position) for position in range(7)]
    wanted = [0.4, 0.4, *turn, *turn[:3], *turn[:2], 0.9, 0.9, 0.9]
    torch.testing.assert_close(temperatures, torch.tensor(wanted))
    assert len(token_temperatures(torch.empty(0), torch.empty(0, dtype=torch.int64), [])) == 0


@pytest.mark.parametrize("sampling", ROWS)
def test_a_greedy_response_has_no_schedule(sampling: SamplingParameters):
    greedy = sampling.with_greedy_decoding()
    assert not greedy.changes_over_tokens and sampling_at(greedy, 3) == greedy and not truncates(greedy)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_temperature_that_is_greedy_stays_so_beside_a_schedule(monkeypatch: Any, on_host: bool):
    """An evaluation set may have such a temperature and the top-p of its task."""
    monkeypatch.setattr(replay.device, "on_host", lambda: on_host)
    sampling = ENDED._replace(temperature=1e-6)
    parameters = SimpleNamespace(temperature=1e-6, extra_args=None)
    assert not has_schedule(sampling) and has_schedule(ENDED)
    assert replay.add_filters(parameters, GenerationRequest(0, [5], sampling, 4, seed=1)) is None
    assert parameters.extra_args is None
    # vLLM decodes greedily below 1e-5, and where the temperature must be positive by a top-k of 1.
    is_greedy = parameters.temperature < 1e-5
    if not on_host:
        is_greedy = parameters.top_k == 1
    assert is_greedy


def test_accelerators_have_the_position_of_each_slot():
    """A slot whose request is in the fourth token of its turn, and one whose prompt is not complete."""
    processor = accelerator_processor()(None, None)
    records: list[Any] = [(BOTH, 7), (HEATED, 6)]
    for slot, record in enumerate(records):
        assert processor.add_request(slot, SimpleNamespace(extra_args={"megatron_rl": record}))
    context = SimpleNamespace(
        idx_mapping_np=numpy.array([1, 2, 0]), seq_lens_upper_bound_np=numpy.array([4, 9, 10])
    )
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = processor.apply(logits.clone(), context)
    assert torch.equal(found[1], logits[1])
    for row, sampling, index in ((0, HEATED, 0), (2, BOTH, 3)):
        wanted, _ = brute_force(logits[row].double(), sampling, [], index)
        torch.testing.assert_close(found[row].double().log_softmax(0), wanted, atol=1e-6, rtol=0)

    # A slot is used again.
    assert not processor.add_request(1, SimpleNamespace(extra_args=None))
    assert torch.equal(processor.apply(logits.clone(), context)[0], logits[0])


@pytest.mark.parametrize(
    ("value", "is_truncated"),
    [
        (0.9, True),
        (1.0, False),
        ({"start": 1.0, "end": 1.0, "over": 4}, False),
        ({"start": {"start": 1.0, "end": 0.9, "steps": 2}, "end": 1.0, "over": 4}, True),
        ({}, False),
    ],
)
def test_a_run_replays_supports_if_any_token_is_filtered(value: Any, is_truncated: bool):
    assert RolloutConfig(top_p=value).truncates == is_truncated
    profiles = {"task": {"top_p": value}}
    assert RolloutConfig(sampling_profiles=profiles).truncates == is_truncated
