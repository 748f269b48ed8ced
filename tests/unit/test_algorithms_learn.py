"""Every named algorithm raises the reward of a small policy: the signs and scales are right end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms import (
    ALGORITHMS,
    build_train_batch,
    get_algorithm,
    initial_state,
    minibatches,
    next_state,
    policy_objective,
    value_objective,
)
from megatron_rl.algorithms.algorithm import CORRECTIONS
from megatron_rl.types import FINISH_STOP, Rollouts, Scores

VOCABULARY, LONGEST, PROMPTS, SAMPLES = 4, 4, 8, 6


class TabularPolicy:
    """A softmax over the vocabulary for each position, and a value for each position."""

    def __init__(self) -> None:
        self.logits = torch.zeros(LONGEST, VOCABULARY, requires_grad=True)
        self.values = torch.zeros(LONGEST, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits, self.values], lr=0.05)

    def log_probs(self, tokens: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-prob and entropy per token."""
        table = self.logits.log_softmax(-1)[places]
        return table.gather(1, tokens[:, None]).squeeze(1), -(table.exp() * table).sum(-1)


def sample(policy: TabularPolicy, draw: torch.Generator) -> tuple[Rollouts, Scores, torch.Tensor]:
    """Sample responses of varying length; the reward is the share of tokens equal to 1."""
    rows = PROMPTS * SAMPLES
    lengths = torch.randint(2, LONGEST + 1, (rows,), generator=draw)
    places = torch.cat([torch.arange(n) for n in lengths.tolist()])
    probabilities = policy.logits.detach().softmax(-1)[places]
    tokens = torch.multinomial(probabilities, 1, generator=draw).squeeze(1)
    with torch.no_grad():
        log_probs, _ = policy.log_probs(tokens, places)
    rewards = torch.stack([(part == 1).float().mean() for part in torch.split(tokens, lengths.tolist())])
    rollouts = Rollouts(
        tokens=tokens,
        lengths=lengths,
        response_mask=torch.ones(len(tokens), dtype=torch.bool),
        rollout_log_probs=log_probs + 0.01 * torch.randn(len(tokens), generator=draw),
        group=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        finish_reason=torch.full((rows,), FINISH_STOP),
        policy_version=torch.zeros(rows, dtype=torch.long),
        temperature=torch.ones(rows),
    )
    scores = Scores(
        rewards=rewards,
        valid=torch.rand(rows, generator=draw) > 0.05,
        components={"share": rewards},
        old_log_probs=log_probs,
        ref_log_probs=torch.full((len(tokens),), -1.386),
        values=policy.values.detach()[places],
        baseline_rewards=torch.full((rows,), float(rewards.mean())),
        baseline_lengths=torch.full((rows,), LONGEST),
        squared_probs=probabilities.square().sum(1),
        # A teacher that prefers the token that is rewarded.
        teacher_log_probs=torch.where(tokens == 1, 0.7, 0.1).log(),
    )
    return rollouts, scores, places


def train(name: str, pieces: dict, steps: int = 12) -> tuple[float, float]:
    """Return the mean reward of the first and of the last step."""
    algorithm = get_algorithm(name, pieces, max_response_tokens=LONGEST)
    policy, draw, state = TabularPolicy(), torch.Generator().manual_seed(1), initial_state(algorithm)
    rewards = []
    for step in range(steps):
        rollouts, scores, places = sample(policy, draw)
        rewards.append(float(scores.rewards.mean()))
        batch, _ = build_train_batch(rollouts, scores, algorithm, state)
        batch = replace(
            batch, tokens=torch.arange(len(places))
        )  # so that a mini-batch's tokens say where they lie
        for minibatch in minibatches(batch, algorithm, 2, 1, seed=step):
            here = places[minibatch.tokens]
            log_probs, entropy = policy.log_probs(rollouts.tokens[minibatch.tokens], here)
            loss, _ = policy_objective(algorithm, minibatch, log_probs, entropy, state)
            loss = loss + value_objective(algorithm, minibatch, policy.values[here])[0]
            policy.optimizer.zero_grad()
            loss.backward()
            policy.optimizer.step()
        state = next_state(algorithm, state, rollouts, scores)
    return rewards[0], rewards[-1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_reward_rises(name):
    # Responses here are as long as they are by chance, so a penalty on length would only be noise.
    first, last = train(name, {"overlong": {"buffer": None}})
    assert first < 0.35
    assert last > first + 0.15


@pytest.mark.parametrize("pieces", [
    *({"correction": name} for name in CORRECTIONS),
    {"correction": {"bypass": True}},
    {"correction": {"name": "token_tis", "bypass": True}, "policy_loss": "policy_gradient"},
    {"kl": {"name": "loss", "controller": "adaptive", "estimator": "k3+"}},
    {"kl": "reward", "policy_loss": {"entropy_coef": 0.001}},
    {"reward_shaping": {"normalize": "running", "smoothing": 0.1}, "policy_loss": {"opsm_delta": 0.1}},
    {"policy_loss": {"name": "dppo", "divergence": "kl", "clip_low": 0.05, "clip_high": 0.05}},
], ids=str)  # fmt: skip
def test_reward_rises_with(pieces):
    first, last = train("grpo", pieces)
    assert last > first + 0.15
