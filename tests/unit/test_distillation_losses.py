"""Divergences over a teacher's most likely tokens: values, gradients, splits, and the head's outputs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ragged_batches import Batch
from torch import Tensor
from whole_steps import algorithm_of, policy, split, step

from megatron_rl.algorithms import (
    build_train_batch,
    get_algorithm,
    initial_state,
    minibatches,
    old_policy_metrics,
    policy_objective,
)
from megatron_rl.algorithms.kl import TopKDivergence
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.megatron import log_probs as head
from megatron_rl.megatron.log_probs import (
    Support,
    TopTokenGradients,
    TopTokens,
    VocabularyShard,
    make_support,
    vocab_parallel_log_probs,
    vocab_parallel_top_tokens,
)
from megatron_rl.metrics import Metrics

ALONE = SimpleNamespace(size=lambda: 1)
TOKENS, HIDDEN, VOCABULARY, PADDED = 11, 6, 13, 16
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
BATCH = Batch(
    [0, 0, 1, 1], [1.0, 0.0, 0.5, math.nan], [True, True, True, False],
    [[False, True, True], [True, True], [True, False, True, True], [True, True]], 4,
)  # fmt: skip


def head_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, targets and temperatures of a small head."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator, dtype=dtype)
    return states, weight, targets, temperature


def top_ids(targets: Tensor) -> Tensor:
    """Return distinct ids [n, 4] of which one is the target in every other row, and one is absent in some."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randperm(VOCABULARY, generator=generator)[:4] for _ in targets]
    ids = torch.stack(rows)
    for row in range(0, len(ids), 2):
        if targets[row] not in ids[row]:
            ids[row, 1] = targets[row]
    ids[3, 2] = -1
    return ids


def truncation(targets: Tensor) -> tuple[Support, Tensor]:
    """Return supports, one of all tokens and one of a single token, and the excluded tokens."""
    generator = torch.Generator().manual_seed(1)
    inside = torch.rand(TOKENS, VOCABULARY, generator=generator) < 0.4
    inside[5] = False
    inside[torch.arange(TOKENS), targets] = True
    sizes = inside.sum(1)
    sizes[3] = 0
    inside[3] = False
    support = make_support(sizes.int(), inside.nonzero()[:, 1].int())
    inside[3] = True
    return support, ~inside


def dense_outputs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    ids: Tensor,
    cap: float | None = None,
    outside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy and probabilities of the buckets [n, k + 1] from all logits."""
    logits = states @ weight[:VOCABULARY].T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / temperature[:, None]
    if outside is not None:
        logits = logits.masked_fill(outside, -torch.inf)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)

    chosen = torch.zeros(len(ids), VOCABULARY + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(ids < 0, VOCABULARY, ids), True)
    columns = torch.where(ids < 0, 0, p.gather(1, ids.clamp(min=0)))
    rest = torch.where(chosen[:, :VOCABULARY], 0, p).sum(1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy, torch.cat((columns, rest[:, None]), dim=1)


def mixed_loss(log_probs: Tensor, entropy: Tensor, buckets: Tensor) -> Tensor:
    """Return a loss that has another gradient for each of the outputs."""
    count = len(log_probs)
    slopes = torch.linspace(-1, 1, count, dtype=buckets.dtype)
    factors = torch.randn(buckets.shape, generator=torch.Generator().manual_seed(3), dtype=buckets.dtype)
    return (log_probs * slopes + entropy * slopes.flip(0)).sum() + (buckets * factors).sum()


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_buckets_equal_the_dense_softmax_in_values_and_gradients(
    chunk: int, cap: float | None, truncated: bool
) -> None:
    states, weight, targets, temperature = head_case()
    ids = top_ids(targets)
    support, outside = truncation(targets) if truncated else (None, None)
    shard = VocabularyShard(0, VOCABULARY, ALONE, cap)
    *scalars, log_buckets = vocab_parallel_log_probs(
        states, weight, targets, temperature, shard, chunk, support=support, top_ids=ids
    )
    *expected_scalars, expected = dense_outputs(states, weight, targets, temperature, ids, cap, outside)
    for actual, reference in zip((*scalars, log_buckets.exp()), (*expected_scalars, expected), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-12)

    # Of probabilities: an excluded token has no log-prob.
    actual = torch.autograd.grad(mixed_loss(*scalars, log_buckets.exp()), (states, weight))
    reference = torch.autograd.grad(mixed_loss(*expected_scalars, expected), (states, weight))
    for one, other in zip(actual, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert actual[1].isfinite().all()


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_buckets_of_vocabulary_shards_combine_to_the_whole(parts: int) -> None:
    """Statistics and gradients of each shard of the weight, without a process group."""
    states, weight, targets, temperature = head_case()
    ids = top_ids(targets)
    expected = dense_outputs(states, weight, targets, temperature, ids)
    rows = PADDED // parts
    shards = [VocabularyShard(part * rows, VOCABULARY, ALONE) for part in range(parts)]
    pieces = [weight[shard.start : shard.start + rows].detach() for shard in shards]
    stats = [
        head.softmax_statistics(states.detach(), piece, targets, temperature, shard, 4, top_ids=ids)
        for shard, piece in zip(shards, pieces, strict=True)
    ]
    log_normaliser, *scalars, log_buckets = head._compute_top_token_outputs(torch.stack(stats), targets, ids)
    for actual, reference in zip((*scalars, log_buckets.exp()), expected, strict=True):
        torch.testing.assert_close(actual, reference.detach(), rtol=1e-11, atol=1e-12)

    leaves = [tensor.detach().requires_grad_() for tensor in (*scalars, log_buckets)]
    slopes = torch.autograd.grad(mixed_loss(*leaves[:2], leaves[2].exp()), leaves)
    buckets = TopTokenGradients(ids, log_buckets, slopes[2])
    gradients = [
        head._compute_gradients(
            states.detach(), piece, targets, temperature, log_normaliser, scalars[1], *slopes[:2], shard, 4,
            top_tokens=buckets,
        )
        for shard, piece in zip(shards, pieces, strict=True)
    ]  # fmt: skip
    states_gradient, weight_gradient = torch.autograd.grad(mixed_loss(*expected), (states, weight))
    torch.testing.assert_close(sum(one for one, _ in gradients), states_gradient, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        torch.cat([other for _, other in gradients if other is not None]),
        weight_gradient,
        rtol=1e-9,
        atol=1e-11,
    )


@pytest.mark.parametrize("scale", [1.0, 8.0, 30.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences_of_confident_models_are_those_of_float64(divergence: str, scale: float) -> None:
    """In float32, where one minus the sum of the buckets would have no digit of the last one."""
    states, weight, targets, temperature = head_case(torch.float32)
    teacher_states = states.detach() * scale + 0.1
    ids = vocab_parallel_top_tokens(
        teacher_states, weight.detach(), VocabularyShard(0, VOCABULARY, ALONE), TopTokens(4, VOCABULARY)
    )
    piece = TopKDivergence(divergence=divergence, k=4, beta=0.3)
    results = []
    for dtype in (torch.float32, torch.float64):
        actor = (states.detach().to(dtype) * scale).requires_grad_()
        arguments = (weight.detach().to(dtype), targets, temperature.to(dtype))
        shard = VocabularyShard(0, VOCABULARY, ALONE)
        *_, teacher = vocab_parallel_log_probs(teacher_states.to(dtype), *arguments, shard, top_ids=ids)
        *_, student = vocab_parallel_log_probs(actor, *arguments, shard, top_ids=ids)
        if dtype == torch.float64:
            log_p, log_q = (
                dense_outputs(tensor, *arguments, ids)[2].log() for tensor in (teacher_states.double(), actor)
            )
            student, teacher = log_q, log_p
        loss = piece.token_loss(student, teacher)
        (gradient,) = torch.autograd.grad(loss.sum(), actor)
        results.append((loss.detach().double(), gradient.double()))
    # Logits of this scale are rounded by as much.
    tolerance = 2e-6 * max(scale, 5.0)
    for single, double in zip(*results, strict=True):
        assert float((single - double).norm()) < tolerance * max(1.0, float(double.norm()))


def test_most_likely_tokens_are_those_of_the_dense_softmax() -> None:
    """Of the actor's vocabulary, in any number of shards and chunks."""
    states, weight, *_ = (tensor.detach() for tensor in head_case())
    for vocabulary in (VOCABULARY, 9):
        expected = (states @ weight[:vocabulary].T).topk(5, dim=1).indices
        for chunk in (1, 4, 100):
            found = vocab_parallel_top_tokens(
                states, weight, VocabularyShard(0, VOCABULARY, ALONE), TopTokens(5, vocabulary), chunk
            )
            assert found.equal(expected)


def test_no_token_keeps_the_graph_of_the_buckets() -> None:
    states, weight, *_ = head_case()
    *_, buckets = vocab_parallel_log_probs(
        states[:0],
        weight,
        torch.zeros(0, dtype=torch.long),
        torch.ones(0),
        VocabularyShard(0, VOCABULARY, ALONE),
        top_ids=torch.zeros((0, 4), dtype=torch.long),
    )
    assert buckets.shape == (0, 5) and buckets.requires_grad
    assert all(not gradient.any() for gradient in torch.autograd.grad(buckets.sum(), (states, weight)))


def brute_force(divergence: str, beta: float, p: list[float], q: list[float]) -> float:
    """Return a divergence of two distributions, term by term."""

    def kl(first: list[float], second: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)

    if divergence == "forward_kl":
        return kl(p, q)
    if divergence == "reverse_kl":
        return kl(q, p)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergence_is_its_equation(divergence: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64) * 2
    teacher, actor = logits.log_softmax(-1)
    teacher[2, 1] = -1e30  # a token that a filter of sampling excludes
    actor[2, 1] = -1e30
    for beta in (0.1, 0.5, 0.9):
        found = TopKDivergence(divergence=divergence, beta=beta).token_loss(actor, teacher)
        for row in range(7):
            distributions = (teacher[row].exp().tolist(), actor[row].exp().tolist())
            assert float(found[row]) == pytest.approx(
                brute_force(divergence, beta, *distributions), abs=1e-12
            )
    # A distribution diverges from no other as little as from itself.
    itself = TopKDivergence(divergence=divergence).token_loss(teacher, teacher)
    assert float(itself.abs().max()) < 1e-12


def test_the_reduction_to_buckets_is_at_most_the_whole_divergence() -> None:
    generator = torch.Generator().manual_seed(6)
    teacher, actor = torch.randn(2, 40, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    order = teacher.argsort(dim=1, descending=True)
    teacher, actor = teacher.gather(1, order), actor.gather(1, order)
    for divergence in DIVERGENCES:
        losses = []
        for k in (1, 4, 8):
            reduced = [
                torch.cat((values[:, :k], values[:, k:].logsumexp(1, keepdim=True)), dim=1)
                for values in (actor, teacher)
            ]
            losses.append(TopKDivergence(divergence=divergence, k=k).token_loss(*reduced))
        assert (losses[0] <= losses[1] + 1e-12).all() and (losses[1] <= losses[2] + 1e-12).all()


def distilled_step(algorithm_name: str, **pieces: object) -> tuple:
    """Return algorithm, mini-batch, metrics of the batch and the actor's log-probs of the buckets."""
    rollouts, scores = step(BATCH)
    generator = torch.Generator().manual_seed(8)
    teacher, actor = torch.randn(2, BATCH.tokens, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    scores = replace(
        scores,
        teacher_top_ids=torch.zeros((BATCH.tokens, 3), dtype=torch.int32),
        teacher_top_log_probs=teacher.float(),
    )
    algorithm = algorithm_of(algorithm_name, **pieces)
    batch, _ = build_train_batch(rollouts, replace(scores, old_log_probs=None), algorithm)
    metrics = old_policy_metrics(rollouts, scores, algorithm, initial_state(algorithm))
    (minibatch,) = minibatches(batch, algorithm, 1, 1, seed=0)
    # The batch without its failed row: the tokens number the rows of the tables.
    return algorithm, minibatch, metrics, actor.requires_grad_()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_loss_is_added_to_that_of_rewards_with_its_coefficient(divergence: str) -> None:
    piece = {"name": "top_k", "k": 3, "divergence": divergence, "coef": 0.7}
    algorithm, minibatch, metrics, actor = distilled_step("grpo", distillation=piece)
    plain = algorithm_of("grpo")
    log_probs, entropy = (values[minibatch.tokens] for values in policy(BATCH))
    loss, found = policy_objective(
        algorithm, minibatch, log_probs, entropy, top_log_probs=actor[minibatch.tokens]
    )
    without, _ = policy_objective(plain, minibatch, log_probs, entropy)

    expected = 0.0
    weights = minibatch.loss_weights.tolist()
    assert minibatch.teacher_top_log_probs is not None
    for token, weight in enumerate(weights):
        p = minibatch.teacher_top_log_probs[token].double().exp().tolist()
        q = actor[minibatch.tokens[token]].exp().tolist()
        expected += weight * brute_force(divergence, 0.5, p, q)
    assert float((loss - without).detach()) == pytest.approx(0.7 * expected, rel=1e-6)
    assert found.values()["distillation/loss"] == pytest.approx(expected, rel=1e-6)
    mask = minibatch.response_mask
    rest = float(actor[minibatch.tokens][mask][:, -1].exp().mean())
    assert found.values()["distillation/actor_rest"] == pytest.approx(rest)
    # The k1 estimate is of the sampled tokens, for any kind of distillation.
    assert metrics.values()["kl/teacher"] == pytest.approx(
        float((step(BATCH)[1].old_log_probs - step(BATCH)[1].teacher_log_probs)[
            BATCH.mask & torch.repeat_interleave(torch.tensor(BATCH.valid), BATCH.lengths)
        ].double().mean())
    )  # fmt: skip


def test_any_split_into_micro_batches_gives_the_same_gradient() -> None:
    piece = {"name": "top_k", "k": 3, "divergence": "jsd"}
    algorithm, minibatch, _, actor = distilled_step("distillation", distillation=piece)
    results = []
    for micros in ([minibatch], split(minibatch, 1), split(minibatch, 2)):
        total, metrics = torch.zeros((), dtype=torch.float64), Metrics()
        log_probs, entropy = policy(BATCH)
        for micro in micros:
            loss, found = policy_objective(
                algorithm,
                micro,
                log_probs[micro.tokens],
                entropy[micro.tokens],
                top_log_probs=actor[micro.tokens],
            )
            total, metrics = total + loss, metrics + found
        results.append((*torch.autograd.grad(total, actor), metrics.values()))
    gradient, values = results[0]
    assert gradient.abs().sum() > 0
    # Tokens outside the mask have no gradient.
    outside = torch.ones(BATCH.tokens, dtype=torch.bool)
    outside[minibatch.tokens[minibatch.response_mask]] = False
    assert not gradient[outside].any()
    for other_gradient, other_values in results[1:]:
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12)
        assert other_values == pytest.approx(values, rel=1e-6, abs=1e-6)


def test_the_loss_alone_needs_no_scoring_pass() -> None:
    """Its advantages are 0, and the metric of the sampled tokens follows with the update."""
    alone = algorithm_of("distillation", distillation={"name": "top_k", "k": 3})
    assert alone.needs_scoring_pass == () and alone.needs_teacher and not alone.needs_rewards
    assert alone.distillation.top_tokens == 3
    assert algorithm_of("distillation").distillation.top_tokens == 0


def test_a_batch_without_the_columns_is_refused() -> None:
    algorithm, minibatch, _, actor = distilled_step("distillation", distillation={"name": "top_k", "k": 3})
    log_probs, entropy = (values[minibatch.tokens] for values in policy(BATCH))
    with pytest.raises(ValueError, match="most likely tokens"):
        policy_objective(algorithm, minibatch, log_probs, entropy)
    with pytest.raises(ValueError, match="teacher_top_log_probs"):
        policy_objective(
            algorithm,
            replace(minibatch, teacher_top_log_probs=None),
            log_probs,
            entropy,
            top_log_probs=actor[minibatch.tokens],
        )


def test_settings_out_of_bounds_are_refused() -> None:
    for settings, path, expected in (
        ({"k": 0}, "k", "1"),
        ({"divergence": "total_variation"}, "divergence", "forward_kl"),
        ({"divergence": "jsd", "beta": 1.0}, "beta", "less than 1"),
        ({"coef": -1.0}, "coef", "0"),
    ):
        with pytest.raises(UserErrors) as raised:
            get_algorithm("distillation", {"distillation": {"name": "top_k", **settings}})
        (error,) = raised.value.errors
        assert error.where == f"algorithm.distillation.{path}"
        assert expected in str(error)


OWN = '''
from dataclasses import dataclass

from megatron_rl.algorithms.kl import TopKDivergence
from megatron_rl.config.setting import setting


@dataclass(frozen=True)
class TotalVariation(TopKDivergence):
    """Half the sum of absolute differences."""

    power: float = setting(1.0, "Power of the distance.", more_than=0)

    def token_loss(self, log_probs, teacher_log_probs):
        distance = (log_probs.exp() - teacher_log_probs.exp()).abs().sum(-1) / 2
        return distance**self.power


@dataclass(frozen=True)
class Scalar(TopKDivergence):
    def token_loss(self, log_probs, teacher_log_probs):
        return log_probs.sum()
'''


def test_a_users_own_divergence_by_path(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    piece = {"name": f"{file}:TotalVariation", "k": 3, "power": 2.0}
    algorithm, minibatch, _, actor = distilled_step("distillation", distillation=piece)
    log_probs, entropy = (values[minibatch.tokens] for values in policy(BATCH))
    buckets = actor[minibatch.tokens]
    loss, _ = policy_objective(algorithm, minibatch, log_probs, entropy, top_log_probs=buckets)
    assert minibatch.teacher_top_log_probs is not None
    distance = (buckets.exp() - minibatch.teacher_top_log_probs.exp()).abs().sum(1) / 2
    torch.testing.assert_close(loss, (minibatch.loss_weights * distance**2).sum())

    scalar = algorithm_of("distillation", distillation={"name": f"{file}:Scalar", "k": 3})
    with pytest.raises(UserError, match=r"Scalar\.token_loss"):
        policy_objective(scalar, minibatch, log_probs, entropy, top_log_probs=buckets)
