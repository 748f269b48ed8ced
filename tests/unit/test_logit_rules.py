"""Rules on logits: the trainer's tiles and the torch engine against token by token in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from megatron_rl.config.sections.response_limits import ResponseLimit
from megatron_rl.config.sections.rollout import RolloutConfig, rule_errors
from megatron_rl.megatron import log_probs as module
from megatron_rl.megatron.log_probs import VocabularyShard, make_support, vocab_parallel_log_probs
from megatron_rl.megatron.logit_rules import build_row_rules, find_repeated_ngrams
from megatron_rl.rollout.engines.vllm.rules import make_accelerator_processor_class
from megatron_rl.rollout.sampling import apply_logit_rules, ban_repeated_ngrams, make_vllm_parameters
from megatron_rl.types import BANNED, LogitRules, SamplingParameters

ALONE = SimpleNamespace(size=lambda: 1)
VOCABULARY = 13
BIASED = SamplingParameters(logit_bias=((2, 1.5), (7, -0.75), (12, BANNED)))
LONG = SamplingParameters(stop_token_ids=(3, 11), min_response_tokens=3)
BOTH = SamplingParameters(logit_bias=((0, -2.0), (3, 0.5)), stop_token_ids=(3,), min_response_tokens=2)
REPEATED = SamplingParameters(repetition_penalty=1.7)
ENCOURAGED = SamplingParameters(repetition_penalty=0.6, presence_penalty=-0.4, logit_bias=((6, -3.0),))
COUNTED = SamplingParameters(presence_penalty=0.7, frequency_penalty=0.3, logit_bias=((1, BANNED),))
TWICE = SamplingParameters(no_repeat_ngram_size=2, repetition_penalty=1.2)
THRICE = SamplingParameters(no_repeat_ngram_size=3, logit_bias=((3, BANNED), (9, 0.5)))
LONGER = SamplingParameters(no_repeat_ngram_size=40)
# Prompt, response and rules of each row of one micro-batch.
ROWS = (
    ([4, 7, 4], [7, 2, 7, 7, 3], BIASED),
    ([1, 1], [5, 6, 5, 3], None),
    ([9, 3], [9, 9, 8, 11], LONG),
    ([6], [6, 6, 1, 0, 3, 3], BOTH),
    ([10, 2, 2], [2, 5, 5, 12, 5], REPEATED),
    ([6, 0], [4, 6, 6, 4], ENCOURAGED),
    ([8], [8, 8, 8, 0, 9, 0], COUNTED),
    ([5, 1, 5], [2, 5, 3, 5, 5, 0, 5, 6], TWICE),
    ([1, 2, 3, 1, 2], [4, 1, 2, 0, 0, 0, 1, 2], THRICE),
    ([3], [4, 3, 4], LONGER),
)


def brute_force(
    logits: Tensor, prompt: list[int], before: list[int], rules: SamplingParameters | None
) -> Tensor:
    """Return the logits [V] after the tokens ``before`` of a response, with the rules, token by token."""
    if rules is None:
        return logits

    changed = [logits[token] for token in range(len(logits))]
    excluded = torch.zeros(len(logits), dtype=torch.bool)
    for token, bias in rules.logit_bias:
        if bias == BANNED:
            excluded[token] = True
        else:
            changed[token] = changed[token] + bias
    for token in rules.stop_token_ids:
        if len(before) < rules.min_response_tokens:
            excluded[token] = True

    size = rules.no_repeat_ngram_size
    row = [*prompt, *before]
    for first in range(len(row) - size + 1 if size else 0):
        if row[first : first + size - 1] == row[len(row) - size + 1 :]:
            excluded[row[first + size - 1]] = True

    for token in set(prompt) | set(before):
        penalty = rules.repetition_penalty
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token in before:
        changed[token] = changed[token] - rules.frequency_penalty
    for token in set(before):
        changed[token] = changed[token] - rules.presence_penalty
    return torch.stack(changed).masked_fill(excluded, -torch.inf)


def micro_batch():
    """Return states, weight, targets, temperature, the selected tokens' rules, and (row, index) of each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response, _ in ROWS])
    tokens = torch.tensor([token for prompt, response, _ in ROWS for token in prompt + response])

    selected = []
    places = []
    position = 0
    for row, (prompt, response, _) in enumerate(ROWS):
        for index in range(len(response)):
            selected.append(position + len(prompt) + index)
            places.append((row, index))
        position += len(prompt) + len(response)

    positions = torch.tensor(selected)
    rules = [None if rule is None else LogitRules(rule, len(prompt)) for prompt, _, rule in ROWS]
    count = len(places)
    states = torch.randn(count, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    temperature = 0.5 + torch.rand(count, generator=generator, dtype=torch.float64)
    row_rules = build_row_rules(rules, lengths, tokens, positions)
    return states, weight, tokens[positions], temperature, row_rules, places


def expected(states, weight, targets, temperature, places, cap=None, outside=None):
    """Return log-probs and entropies of the selected tokens by `brute_force`."""
    log_probs = []
    entropies = []
    for item, (row, index) in enumerate(places):
        prompt, response, rules = ROWS[row]
        logits = weight[:VOCABULARY] @ states[item]
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = brute_force(logits, prompt, response[:index], rules) / temperature[item]
        if outside is not None:
            logits = logits.masked_fill(outside[item], -torch.inf)
        log_p = logits.log_softmax(0)
        log_probs.append(log_p[targets[item]])
        entropies.append(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("truncated", [False, True])
def test_values_and_gradients_equal_brute_force(chunk, cap, truncated):
    states, weight, targets, temperature, rules, places = micro_batch()
    support = None
    outside = None
    if truncated:
        inside = torch.rand(len(targets), VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.5
        inside[torch.arange(len(targets)), targets] = True
        support = make_support(inside.sum(1).int(), inside.nonzero()[:, 1].int())
        outside = ~inside

    shard = VocabularyShard(0, VOCABULARY, ALONE, cap)
    found = vocab_parallel_log_probs(
        states, weight, targets, temperature, shard, chunk, support=support, rules=rules
    )
    wanted = expected(states, weight, targets, temperature, places, cap, outside)

    mix = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        one = torch.autograd.grad((mine * mix).sum(), (states, weight), retain_graph=True)
        other = torch.autograd.grad((theirs * mix).sum(), (states, weight), retain_graph=True)
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_shards_of_the_vocabulary_combine_to_the_whole(parts):
    states, weight, targets, temperature, rules, places = micro_batch()
    rows = len(weight) // parts
    stats = []
    for part in range(parts):
        shard = VocabularyShard(part * rows, VOCABULARY, ALONE)
        local = weight[part * rows : (part + 1) * rows].detach()
        stats.append(
            module.softmax_statistics(states.detach(), local, targets, temperature, shard, 4, rules=rules)
        )
    normaliser, found, entropy = module._compute_outputs(torch.stack(stats))
    wanted = expected(states, weight, targets, temperature, places)
    torch.testing.assert_close(found, wanted[0].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, wanted[1].detach(), rtol=1e-12, atol=1e-12)

    # The sum of the shards' gradients is that of the whole.
    ones = torch.ones(len(targets), dtype=torch.float64)
    gradients = []
    for part in range(parts):
        shard = VocabularyShard(part * rows, VOCABULARY, ALONE)
        local = weight[part * rows : (part + 1) * rows].detach()
        arguments = (states.detach(), local, targets, temperature, normaliser, entropy, ones, ones * 0.3)
        gradients.append(module._compute_gradients(*arguments, shard=shard, chunk_tokens=4, rules=rules))
    hidden, head = torch.autograd.grad((wanted[0] + 0.3 * wanted[1]).sum(), (states, weight))
    torch.testing.assert_close(sum(part[0] for part in gradients), hidden, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in gradients]), head, rtol=1e-10, atol=1e-12)


def test_rules_of_tokens_that_are_not_selected_are_skipped():
    complete = micro_batch()
    some = [1, 3, 4, 9, 12, 16, 21, 23, 24, 27, 30, 33]
    rules = [None if rule is None else LogitRules(rule, len(prompt)) for prompt, _, rule in ROWS]
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response, _ in ROWS])
    starts = (lengths.cumsum(0) - lengths).tolist()
    tokens = torch.tensor([token for prompt, response, _ in ROWS for token in prompt + response])
    places = [complete[5][item] for item in some]
    selected = torch.tensor([starts[row] + len(ROWS[row][0]) + index for row, index in places])

    weight = complete[1]
    states, targets, temperature = (complete[field][some] for field in (0, 2, 3))
    shard = VocabularyShard(0, VOCABULARY, ALONE)
    row_rules = build_row_rules(rules, lengths, tokens, selected)
    found = vocab_parallel_log_probs(states, weight, targets, temperature, shard, 2, rules=row_rules)
    wanted = expected(states, weight, targets, temperature, places)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bans_equal_those_of_transformers(size):
    processor = NoRepeatNGramLogitsProcessor(size)
    tokens = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(size))
    pairs = find_repeated_ngrams(tokens, torch.arange(40), size)
    for position in range(40):
        begun = tokens[:position]
        scores = processor(begun[None], torch.zeros(1, 3))[0] if position else torch.zeros(3)
        mine = torch.zeros(3)
        ban_repeated_ngrams(mine, begun, size)
        banned = pairs.tokens[pairs.selected_index == position]
        expected = set(scores.isneginf().nonzero()[:, 0].tolist())
        assert set(banned.tolist()) == expected == set((mine < 0).nonzero()[:, 0].tolist())


def test_accelerators_ban_the_tokens_of_each_slot():
    """Two slots in another order than the rows, one of them without a rule after it had one."""
    state = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=torch.tensor([[4, 5, 4, 0], [1, 1, 1, 9]])))
    processor = make_accelerator_processor_class()(None, state)
    ruled, free = SimpleNamespace(extra_args={"megatron_rl_ngram_size": 2}), SimpleNamespace(extra_args=None)
    assert [processor.add_request(slot, ruled) for slot in (0, 1)] == [True, True]
    lengths = numpy.array([3, 3])
    context = SimpleNamespace(idx_mapping_np=numpy.array([1, 0]), seq_lens_upper_bound_np=lengths)
    banned = (processor.apply(torch.zeros(2, 8), context) < 0).nonzero().tolist()
    assert banned == [[0, 1], [1, 5]]
    assert not processor.add_request(1, free)
    assert (processor.apply(torch.zeros(2, 8), context) < 0).nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_torch_engine_samples_from_the_same_logits(row):
    prompt, response, rules = ROWS[row]
    rules = rules or SamplingParameters()
    for index in range(len(response)):
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        found = apply_logit_rules(logits[None].float(), [rules], [prompt], [response[:index]])[0]
        wanted = brute_force(logits, prompt, response[:index], rules)
        torch.testing.assert_close(found.log_softmax(0).double().exp(), wanted.log_softmax(0).exp())


def test_a_continuation_has_the_rest_of_the_minimum():
    sampling = SamplingParameters(min_response_tokens=10)
    minima = [
        make_vllm_parameters(sampling, max_tokens=8, seed=1, response_tokens=count)["min_tokens"]
        for count in (0, 4, 9, 12)
    ]
    assert minima == [8, 6, 1, 0], "vLLM refuses a minimum above the limit of a request"


@pytest.mark.parametrize(("limits", "smallest"), [("auto", 16), ({"64": 32, "more": 256}, 32), (24, 24)])
def test_a_minimum_is_compared_with_the_smallest_limit(limits: ResponseLimit, smallest: int) -> None:
    assert not list(rule_errors(RolloutConfig(max_response_tokens=limits, min_response_tokens=smallest)))
    rollout = RolloutConfig(max_response_tokens=limits, min_response_tokens=smallest + 1)
    assert [error.expected for error in rule_errors(rollout)] == [
        f"at most {smallest}, the smallest limit of max_response_tokens"
    ]
