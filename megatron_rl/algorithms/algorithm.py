"""An algorithm: a frozen value composed of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_rl.algorithms.advantages.advantage import Advantage
from megatron_rl.algorithms.advantages.group import Grpo
from megatron_rl.algorithms.aggregation import Aggregation, TokenMean
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.filters import DynamicSampling, KeepEveryGroup
from megatron_rl.algorithms.kl import Kl, NoKl
from megatron_rl.algorithms.piece import Piece
from megatron_rl.algorithms.policy_losses.clipped import PpoClip
from megatron_rl.algorithms.policy_losses.policy_loss import PolicyLoss
from megatron_rl.algorithms.rewards import Imitation, Overlong, RewardShaping
from megatron_rl.algorithms.value_loss import ClippedValueLoss, ValueLoss
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Algorithm:
    """Compose an RL algorithm from pieces.

    Every piece can be replaced, and its settings changed, by the key of its name below ``algorithm`` in a
    run's configuration. Defaults are verl's where the field's frameworks differ.
    """

    name: str
    summary: str = ""
    advantage: Advantage = Grpo()
    policy_loss: PolicyLoss = PpoClip()
    aggregation: Aggregation = TokenMean()
    value_loss: ValueLoss = ClippedValueLoss()
    value_aggregation: Aggregation = TokenMean()
    kl: Kl = NoKl()
    correction: Correction = Correction()
    reward_shaping: RewardShaping = RewardShaping()
    overlong: Overlong = Overlong()
    imitation: Imitation = Imitation()
    dynamic_sampling: DynamicSampling = KeepEveryGroup()

    @property
    def needs_critic(self) -> bool:
        """Say whether a value model must be trained and queried."""
        return self.advantage.needs_critic

    @property
    def needs_reference(self) -> bool:
        """Say whether the reference policy's log-probs are used."""
        return self.kl.needs_reference

    @property
    def needs_greedy_baseline(self) -> bool:
        """Say whether `Scores.baseline_rewards` (reward of a greedy response per prompt) is used."""
        return self.advantage.needs_greedy_baseline

    @property
    def compares_samples(self) -> bool:
        """Say whether the samples of one prompt are each other's baseline."""
        return self.advantage.compares_samples

    def pieces(self) -> dict[str, Piece]:
        """Return the pieces by the name of their key."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Piece)}

    def within(self, max_response_tokens: int) -> Algorithm:
        """Return the algorithm for responses of at most so many tokens."""
        changed = {name: piece.within(max_response_tokens) for name, piece in self.pieces().items()}
        return replace(self, **changed)

    def problems(self) -> Iterator[UserError]:
        """Yield every mistake in the pieces' settings, and in what goes together."""
        for name, piece in self.pieces().items():
            yield from piece.problems(f"algorithm.{name}")
        if self.kl.in_reward and not self.advantage.reads_kl_penalty:
            yield UserError(
                f"{type(self.advantage).__name__} does not read the reward that a KL penalty is taken off",
                where="algorithm.kl",
                expected="a KL penalty in the loss, or none",
                got="a KL penalty in the reward",
                fix="write kl: loss",
            )
