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
        if not self.advantage.reads_rewards:
            yield from self._unread()
        if (
            self.policy_loss.follows_rollout
            and self.correction.level != "none"
            and not self.correction.bypass
        ):
            yield UserError(
                f"{type(self.policy_loss).__name__} holds the whole ratio to the policy that sampled, which "
                "weights of a correction would count again",
                where="algorithm.correction.level",
                expected="none with this loss",
                got=self.correction.level,
                fix="write correction: {level: none}; a rejection may stay",
            )

    def _unread(self) -> Iterator[UserError]:
        """Yield what changes the whole reward, beside an advantage that reads the reward's components."""
        name = type(self.advantage).__name__
        if self.kl.in_reward:
            yield UserError(
                f"{name} does not read the reward that a KL penalty is taken off",
                where="algorithm.kl",
                expected="a KL penalty in the loss, or none",
                got="a KL penalty in the reward",
                fix="write kl: loss",
            )
        if self.overlong.buffer is not None:
            yield UserError(
                f"{name} does not read the reward that the overlong penalty is taken off",
                where="algorithm.overlong.buffer",
                expected="null: no penalty",
                got=f"{self.overlong.buffer:g}",
                fix="have the reward function return the penalty as a component of its own",
            )
        if self.reward_shaping.changes:
            yield UserError(
                f"{name} does not read the reward that is shaped, and scales each component by itself",
                where="algorithm.reward_shaping",
                expected="no shaping",
                got="settings that change the reward",
                fix="leave it out; advantage.weights weigh the components, advantage.clip bounds the result",
            )
