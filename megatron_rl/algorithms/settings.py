"""The settings of an algorithm as one flat frozen value; importable without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Piece = str | Callable[..., Any]
"""A piece of an algorithm: a name from `names`, ``module:function``, or the function itself."""


@dataclass(frozen=True)
class RolloutCorrection:
    """Say how the rollout-trainer mismatch is corrected; see `correction`.

    ``level`` of importance weights is none, token, sequence or geometric; ``threshold`` truncates them,
    ``band`` zeroes those outside. ``rejection`` maps a measure to its threshold or [low, high].
    """

    level: str = "none"
    threshold: float | None = 2.0
    band: tuple[float, float] | None = None
    batch_normalize: bool = False
    rejection: Mapping[str, Any] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Say whether it changes anything."""
        return self.level != "none" or bool(self.rejection)


@dataclass(frozen=True)
class Algorithm:
    """Compose an RL algorithm from pieces and numbers.

    ``advantage``, ``policy_loss`` and ``correction`` name pieces (see `names`), the rest are their
    settings; a piece ignores the settings it has no use for. Every field but ``name`` and ``summary`` can
    be overridden by ``algorithm.settings`` of a run's configuration. Defaults are verl's where the
    field's frameworks differ.
    """

    name: str
    summary: str = ""

    # --- pieces
    advantage: Piece = "grpo"
    policy_loss: Piece = "ppo_clip"
    aggregation: str = "token-mean"  # see `aggregation`
    value_aggregation: str = "token-mean"
    use_critic: bool = False  # for advantage functions of the user's own; gae and vapo imply it

    # --- reward, from raw to shaped: scale and shift, clip, normalise, smooth, overlong penalty
    reward_scale: float = 1.0
    reward_shift: float = 0.0
    reward_clip_low: float | None = None
    reward_clip_high: float | None = None
    reward_normalize: str = "none"  # none, batch, running
    reward_ema_decay: float = 0.99  # of the running mean and variance
    reward_smoothing: float = 0.0  # share of the running mean mixed into every reward
    max_response_tokens: int | None = None  # None: filled from the rollout's limit
    overlong_buffer: float | None = (
        None  # tokens before the limit where the penalty starts (below 1: a share)
    )
    overlong_penalty: float = 1.0
    overlong_filter: bool = False  # rows cut off by the limit take no part in the loss
    dynamic_sampling: bool = False  # the trainer refills groups whose raw rewards are all equal
    dynamic_sampling_max_rounds: int = 10

    # --- advantage
    std_epsilon: float = 1e-6
    gamma: float = 1.0
    gae_lambda: float = 1.0
    critic_lambda: float = 1.0  # vapo: the critic's own lambda
    length_adaptive_alpha: float = 0.05  # vapo: lambda = 1 - 1 / (alpha * length)
    whiten: bool = False
    advantage_clip: float | None = None
    component_weights: Mapping[str, float] = field(default_factory=dict)  # gdpo; empty: all with weight 1

    # --- policy loss
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip: float | None = 3.0  # bound of the loss where the advantage is negative; None: off
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    dppo_divergence: str = "tv"  # tv, kl
    dppo_ratio_cap: float = 20.0
    cov_fraction: float = 2e-4  # clip_cov and kl_cov: share of the mini-batch's tokens that is treated
    cov_low: float = 1.0
    cov_high: float = 5.0
    kl_cov_coef: float = 0.1  # the paper has 1
    opsm_delta: float | None = None  # off-policy sequence masking; None: off
    positive_nll_coef: float = 0.0  # vapo: imitation of good responses
    positive_nll_threshold: float = 0.0  # raw rewards above this are good
    entropy_coef: float = 0.0
    loss_scale_factor: float | None = None  # of seq-mean-token-sum-norm; None: max_response_tokens
    denominator: str = "participating"  # participating, all: whether masked-out tokens and rows count

    # --- KL to the reference policy
    kl_in: str = "none"  # none, loss, reward
    kl_estimator: str | None = None  # see `kl.kl_estimate`; None: k1 in the reward, k3 in the loss
    kl_coef: float = 0.001
    kl_controller: str = "fixed"  # fixed, adaptive
    kl_target: float = 0.1
    kl_horizon: float = 10000.0
    kl_coef_max: float | None = None  # the adaptive coefficient rises no higher

    # --- rollout-trainer mismatch; None means what the preset says
    correction: str = "none"  # a preset, see `names.CORRECTIONS`
    rollout_is: str | None = None  # none, token, sequence, geometric
    rollout_is_threshold: float | None = None  # weights are cut off here
    rollout_is_band: tuple[float, float] | None = None  # weights outside become 0
    rollout_is_batch_normalize: bool | None = None
    rollout_rs: Mapping[str, Any] | None = None  # rejection: measure -> threshold or [low, high]
    bypass: bool = False  # the rollout's own log-probs are the old policy

    # --- critic
    value_clip: float | None = 0.5
    value_loss_coef: float = 0.5

    @property
    def estimator(self) -> str:
        """Return the estimator of the KL divergence to the reference.

        In the reward k1 is the one whose policy gradient is that of the true KL; as a loss it has none.
        """
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def needs_critic(self) -> bool:
        """Say whether a value model must be trained and queried."""
        return self.use_critic or self.advantage in ("gae", "vapo")

    @property
    def needs_reference(self) -> bool:
        """Say whether the reference policy's log-probs are used."""
        return self.kl_in != "none"

    @property
    def needs_greedy_baseline(self) -> bool:
        """Say whether `Scores.baseline_rewards` (reward of a greedy response per prompt) is used."""
        return self.advantage == "remax"
