"""Algorithms as frozen values composed of pieces, and tables of named algorithms and pieces, without torch.

Each key of a configuration's ``algorithm`` section selects a piece: by its name in a table below, or by the
path of a user's piece, ``file.py:Name`` or ``module:Name``. A mapping also changes settings of the piece::

    algorithm:
      name: grpo                                        # GRPO's pieces, except for the keys below
      policy_loss: {name: my_loss.py:Raised, sharpness: 0.3}
      kl: {name: loss, coef: 0.01}
      advantage: {whiten: true}                         # no name: GRPO's estimator with this setting changed

An example of my_loss.py. A piece with settings is a class; a piece without settings can be a function::

    @dataclass(frozen=True)
    class Raised(PolicyLoss):
        sharpness: float = setting(1.0, "Power of the probability.", more_than=0)

        def token_loss(self, micro, log_probs):  # a loss per token [N]; means of the indicators are logged
            loss = -micro.advantages * (self.sharpness * log_probs).exp()
            return TokenLoss(loss, {"raised_fraction": micro.advantages > 0})

    def centred(inputs):  # an advantage: one value per row [B], for every response token of the row
        return broadcast_row_advantages(inputs, inputs.rewards - inputs.rewards[inputs.valid].mean())

    OWN = Algorithm("own", "Mine.", advantage=FunctionAdvantage(function=centred), policy_loss=Raised())

``algorithm.name: my_loss.py:OWN`` selects that complete algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_rl.algorithms.advantages import (
    Advantage,
    FunctionAdvantage,
    Gae,
    Gdpo,
    Gpg,
    Grpo,
    GrpoLeaveOneOut,
    GrpoPassAtK,
    NoRewards,
    Opo,
    OptimalTokenBaseline,
    Reinforce,
    Remax,
    Rloo,
    Vapo,
)
from megatron_rl.algorithms.aggregation import (
    Aggregation,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.kl import (
    Distillation,
    Kl,
    KlInLoss,
    KlInReward,
    NoDistillation,
    NoKl,
    ReverseKl,
    TopKDivergence,
)
from megatron_rl.algorithms.losses import (
    Cispo,
    ClipCov,
    ClippedValueLoss,
    Dppo,
    FunctionLoss,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PolicyLoss,
    PpoClip,
    Sapo,
    Topr,
    ValueLoss,
    Vespo,
)
from megatron_rl.algorithms.piece import Piece
from megatron_rl.algorithms.rewards import (
    DynamicSampling,
    Imitation,
    KeepEveryGroup,
    Overlong,
    RefillGroups,
    RewardShaping,
)
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Algorithm:
    """RL algorithm composed of pieces.

    Each piece is a field. The key of the same name in the configuration's ``algorithm`` section replaces the
    piece or changes its settings. Where frameworks have different defaults, the defaults are verl's.

    Example: ``Algorithm("mine", advantage=Rloo(), kl=KlInLoss(coef=0.01))``.
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
    distillation: Distillation = NoDistillation()
    dynamic_sampling: DynamicSampling = KeepEveryGroup()
    max_response_tokens: int | None = None
    """Length limit in tokens of responses without a limit in `Rollouts`; set by `within`."""

    @property
    def needs_critic(self) -> bool:
        """Whether a critic must be trained and evaluated."""
        return self.advantage.needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm reads the reference policy's log-probs."""
        return self.kl.needs_reference

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm reads a teacher's log-probs."""
        return self.distillation.needs_teacher

    @property
    def needs_rewards(self) -> bool:
        """Whether a reward or its components influence the training."""
        return self.advantage.learns_from_rewards

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether the algorithm reads `Scores.baseline_rewards` (reward of a greedy response per prompt)."""
        return self.advantage.needs_greedy_baseline

    @property
    def needs_squared_probs(self) -> bool:
        """Whether the algorithm reads `Scores.squared_probs` (sum of the squared probabilities per token)."""
        return self.advantage.needs_squared_probs

    @property
    def needs_scoring_pass(self) -> tuple[str, ...]:
        """Keys of the pieces that read the actor's log-probs of a batch before its loss."""
        return tuple(name for name, piece in self.pieces().items() if piece.needs_scoring_pass)

    def pieces(self) -> dict[str, Piece]:
        """Return the pieces that make up the algorithm, such as its policy loss: field name -> piece."""
        pieces: dict[str, Piece] = {}
        for algorithm_field in fields(self):
            field_value = getattr(self, algorithm_field.name)
            # The name, the summary and the length limit are fields, but not pieces.
            if isinstance(field_value, Piece):
                pieces[algorithm_field.name] = field_value
        return pieces

    def within(self, max_response_tokens: int) -> Algorithm:
        """Return a copy for a run whose responses have at most ``max_response_tokens`` tokens.

        A setting of a piece (a component of the algorithm, such as the aggregation) can default to this
        limit. If the user has not set it, the setting has the value ``max_response_tokens`` in the copy.
        """
        pieces = {
            name: piece.with_response_limit(max_response_tokens) for name, piece in self.pieces().items()
        }
        return replace(self, max_response_tokens=max_response_tokens, **pieces)

    def problems(self) -> Iterator[UserError]:
        """Yield every error in the settings of the algorithm's pieces, and in their combination.

        A piece is a component of the algorithm, such as its policy loss.
        """
        for name, piece in self.pieces().items():
            yield from piece.problems(f"algorithm.{name}")

        # The buffer of the overlong penalty must fit into the run's response limit. If the penalty's settings
        # contain another limit, the loop above has compared the buffer with that limit.
        if self.max_response_tokens is not None and self.overlong.limit is None:
            limits = {"rollout.max_response_tokens": self.max_response_tokens}
            yield from self.overlong.buffer_errors("algorithm.overlong", limits)

        if not self.advantage.reads_rewards:
            yield from self._ignored_reward_errors()

        # A policy loss with `follows_rollout` contains the importance ratio to the policy that sampled the
        # tokens. A correction weight is the same ratio, so the product would contain it twice. With
        # `correction.bypass`, such a loss has no correction weights.
        has_weights = self.correction.level != "none" and not self.correction.bypass
        if self.policy_loss.follows_rollout and has_weights:
            yield UserError(
                f"{type(self.policy_loss).__name__} already includes the full importance ratio to the "
                "sampling policy; a correction weight would apply it twice",
                where="algorithm.correction.level",
                expected="none with this loss",
                got=self.correction.level,
                fix="set algorithm.correction.level to none; correction.rejection can still be used",
            )

    def _ignored_reward_errors(self) -> Iterator[UserError]:
        """Yield an error for each configured change of the total reward, such as a KL penalty.

        The caller has checked that the advantage estimator does not read the total reward.
        """
        estimator = type(self.advantage).__name__

        # Raise errors instead of warnings: a change of the total reward would silently have no effect.
        if self.kl.in_reward:
            yield UserError(
                f"{estimator} does not read the reward that a KL penalty is subtracted from",
                where="algorithm.kl",
                expected="a KL penalty in the loss, or none",
                got="a KL penalty in the reward",
                fix="write kl: loss",
            )

        if self.overlong.buffer is not None:
            yield UserError(
                f"{estimator} does not read the reward that the overlong penalty is subtracted from",
                where="algorithm.overlong.buffer",
                expected="null: no penalty",
                got=f"{self.overlong.buffer:g}",
                fix="have the reward function return the penalty as a separate component",
            )

        if self.reward_shaping.changes_rewards:
            yield UserError(
                f"{estimator} does not read the total reward, which algorithm.reward_shaping changes",
                where="algorithm.reward_shaping",
                expected="no shaping",
                got="settings that change the reward",
                fix="leave it out; advantage.weights weigh the components, advantage.clip bounds the result",
            )


# Named pieces of each kind. A name in a configuration is one of these keys or the path of a user's piece.
ADVANTAGES: dict[str, Advantage] = {
    "dr_grpo": Grpo(scale_by_std=False),
    "gae": Gae(),
    "gdpo": Gdpo(),
    "gpg": Gpg(),
    "grpo": Grpo(),
    "grpo_leave_one_out": GrpoLeaveOneOut(),
    "grpo_pass_at_k": GrpoPassAtK(),
    "none": NoRewards(),
    "opo": Opo(),
    "otb": OptimalTokenBaseline(),
    "reinforce": Reinforce(),
    "remax": Remax(),
    "rloo": Rloo(),
    "vapo": Vapo(),
}
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "cispo": Cispo(),
    "clip_cov": ClipCov(),
    "dppo": Dppo(),
    "gmpo": Gmpo(),
    "gspo": Gspo(),
    "kl_cov": KlCov(),
    "policy_gradient": PolicyGradient(),
    "ppo_clip": PpoClip(),
    "sapo": Sapo(),
    "topr": Topr(),
    "vespo": Vespo(),
}
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": TokenMean(),
    "token-sum": TokenSum(),
    "seq-mean-token-sum": SeqMeanTokenSum(),
    "seq-mean-token-sum-norm": SeqMeanTokenSumNorm(),
    "seq-mean-token-mean": SeqMeanTokenMean(),
}
CORRECTIONS: dict[str, Correction] = {
    "none": Correction(),
    "token_tis": Correction(level="token"),
    "sequence_tis": Correction(level="sequence"),
    "geometric_tis": Correction(level="geometric"),
    "icepop": Correction(level="token", band=(0.5, 5.0)),
    "mis": Correction(level="sequence", rejection={"seq_sum_k1": (0.5, 2.0)}),
    "geometric": Correction(rejection={"seq_mean_k1": (0.999, 1.001)}),
    "geometric_token_tis": Correction(level="token", rejection={"seq_mean_k1": (0.999, 1.001)}),
    "k3": Correction(rejection={"seq_mean_k3": 0.01}),
    "k3_token_tis": Correction(level="token", rejection={"seq_mean_k3": 0.01}),
}


@dataclass(frozen=True)
class PieceKind:
    """Kind of algorithm piece, such as advantage estimators or policy losses: one key of ``algorithm``.

    Example: ``KINDS["kl"].named["loss"]`` is `KlInLoss`; a user's subclass of `Kl` overrides its
    ``estimate(log_probs, ref_log_probs)``.
    """

    base: type[Piece]
    """Base class of the kind's pieces."""
    named: Mapping[str, Piece]
    """Name in a configuration -> piece with its default settings."""
    method: str
    """Name of the method with the equation, which a user's piece must have."""
    arguments: tuple[str, ...]
    """Names of the arguments of ``method``, in the order of the call."""
    make_from_function: Callable[[Any], Piece] | None = None
    """Constructor of a piece from a user's function; None if the kind accepts only classes."""


_WEIGHT_ARGUMENTS = ("mask", "lengths", "counts")
KINDS: dict[str, PieceKind] = {
    "advantage": PieceKind(
        base=Advantage,
        named=ADVANTAGES,
        method="estimate",
        arguments=("inputs",),
        make_from_function=lambda function: FunctionAdvantage(function=function),
    ),
    "policy_loss": PieceKind(
        base=PolicyLoss,
        named=POLICY_LOSSES,
        method="token_loss",
        arguments=("micro", "log_probs"),
        make_from_function=lambda function: FunctionLoss(function=function),
    ),
    "aggregation": PieceKind(
        base=Aggregation,
        named=AGGREGATIONS,
        method="weights",
        arguments=_WEIGHT_ARGUMENTS,
    ),
    "value_loss": PieceKind(
        base=ValueLoss,
        named={"clipped": ClippedValueLoss()},
        method="token_loss",
        arguments=("values", "old_values", "returns"),
    ),
    "value_aggregation": PieceKind(
        base=Aggregation,
        named=AGGREGATIONS,
        method="weights",
        arguments=_WEIGHT_ARGUMENTS,
    ),
    "kl": PieceKind(
        base=Kl,
        named={"none": NoKl(), "loss": KlInLoss(), "reward": KlInReward()},
        method="estimate",
        arguments=("log_probs", "ref_log_probs"),
    ),
    "correction": PieceKind(
        base=Correction,
        named=CORRECTIONS,
        method="correct",
        arguments=("log_probs", "rollout_log_probs", "mask", "lengths"),
    ),
    "reward_shaping": PieceKind(
        base=RewardShaping,
        named={"standard": RewardShaping()},
        method="shape",
        arguments=("values", "rewards", "valid", "moments"),
    ),
    "overlong": PieceKind(
        base=Overlong,
        named={"soft": Overlong()},
        method="punish",
        arguments=("rewards", "valid", "response_lengths", "limits"),
    ),
    "imitation": PieceKind(
        base=Imitation,
        named={"good_responses": Imitation()},
        method="marks",
        arguments=("rewards", "valid", "mask", "lengths"),
    ),
    "distillation": PieceKind(
        base=Distillation,
        named={"none": NoDistillation(), "reverse_kl": ReverseKl(), "top_k": TopKDivergence()},
        method="estimate",
        arguments=("log_probs", "teacher_log_probs"),
    ),
    "dynamic_sampling": PieceKind(
        base=DynamicSampling,
        named={"none": KeepEveryGroup(), "refill": RefillGroups()},
        method="further_rounds",
        arguments=(),
    ),
}
"""Kind of each key of a configuration's ``algorithm`` section except ``name``."""

# Named algorithms. A piece that is not listed is the default of `Algorithm`, which is GRPO's.
_TABLE = (
    Algorithm("grpo", "PPO clip with the group's mean and standard deviation as baseline and scale."),
    Algorithm(
        "dr_grpo",
        "GRPO without its biases: no division by standard deviation or by length.",
        advantage=Grpo(scale_by_std=False),
        aggregation=SeqMeanTokenSumNorm(),
    ),
    Algorithm(
        "grpo_leave_one_out",
        "GRPO with mean and standard deviation of the group's other samples.",
        advantage=GrpoLeaveOneOut(),
    ),
    Algorithm(
        "grpo_pass_at_k", "Reward only the best sample of a group, for pass@k.", advantage=GrpoPassAtK()
    ),
    Algorithm(
        "dapo",
        "GRPO with clip-higher, token-mean loss, dynamic sampling and a soft overlong penalty.",
        policy_loss=PpoClip(clip_high=0.28, dual_clip=10.0),
        overlong=Overlong(buffer=0.2),
        dynamic_sampling=RefillGroups(),
    ),
    Algorithm(
        "gspo",
        "GRPO clipped by the response's length-normalised ratio.",
        policy_loss=Gspo(),
        aggregation=SeqMeanTokenMean(),
    ),
    Algorithm(
        "cispo",
        "GRPO with clipped importance weights; every token keeps a gradient.",
        policy_loss=Cispo(),
    ),
    Algorithm(
        "sapo",
        "GRPO with a smooth gate in place of the clip.",
        policy_loss=Sapo(),
        aggregation=SeqMeanTokenMean(),
    ),
    Algorithm(
        "gmpo",
        "GRPO on the geometric mean of token ratios.",
        policy_loss=Gmpo(),
        aggregation=SeqMeanTokenMean(),
    ),
    Algorithm(
        "dppo",
        "GRPO with a trust region in probability (total variation or KL), not in ratio.",
        policy_loss=Dppo(),
    ),
    Algorithm(
        "clip_cov",
        "GRPO without loss on a few tokens of high covariance, to preserve entropy.",
        policy_loss=ClipCov(),
    ),
    Algorithm(
        "kl_cov",
        "GRPO with a KL penalty on the tokens of highest covariance, to preserve entropy.",
        policy_loss=KlCov(),
    ),
    Algorithm(
        "gdpo",
        "GRPO that normalises each reward component separately, for several rewards.",
        advantage=Gdpo(whiten=True),
    ),
    Algorithm("rloo", "PPO clip with the mean of the group's other samples as baseline.", advantage=Rloo()),
    Algorithm(
        "opo",
        "Length-weighted optimal baseline, meant for one optimizer step per batch (exactly on policy).",
        advantage=Opo(),
    ),
    Algorithm(
        "otb",
        "Baseline of least variance at each position of the group's responses, weighted by uncertainty.",
        advantage=OptimalTokenBaseline(),
    ),
    Algorithm(
        "gpg",
        "Policy gradient on centred rewards, scaled up to compensate for rows with reward 0.",
        advantage=Gpg(),
        policy_loss=PolicyGradient(),
    ),
    Algorithm(
        "topr",
        "Tapered off-policy REINFORCE: imitates good responses, importance-weights bad ones.",
        advantage=Grpo(scale_by_std=False),
        policy_loss=Topr(),
        aggregation=SeqMeanTokenSum(),
    ),
    Algorithm(
        "vespo",
        "GRPO with a smooth weight of the response's full importance ratio in place of the clip.",
        policy_loss=Vespo(),
    ),
    Algorithm(
        "reinforce",
        "Plain policy gradient on whitened returns.",
        advantage=Reinforce(whiten=True),
        policy_loss=PolicyGradient(),
    ),
    Algorithm(
        "reinforce_pp",
        "REINFORCE++: PPO clip on returns whitened over the batch, KL penalty in the reward.",
        advantage=Reinforce(whiten=True),
        kl=KlInReward(),
    ),
    Algorithm(
        "reinforce_pp_baseline",
        "REINFORCE++ with the group's mean as baseline and KL in the loss.",
        advantage=Grpo(scale_by_std=False, whiten=True),
        kl=KlInLoss(estimator="k2"),
    ),
    Algorithm("remax", "PPO clip on returns minus a greedy response's reward.", advantage=Remax()),
    Algorithm("ppo", "PPO with a critic and GAE.", advantage=Gae(whiten=True)),
    Algorithm(
        "vapo",
        "PPO with length-adaptive GAE, the critic's own lambda, clip-higher and imitation of good responses.",
        advantage=Vapo(whiten=True),
        policy_loss=PpoClip(clip_high=0.28),
        imitation=Imitation(coef=0.1),
    ),
    Algorithm(
        "distillation",
        "On-policy distillation: the reverse KL to a teacher on the actor's own samples, without rewards.",
        advantage=NoRewards(),
        distillation=ReverseKl(),
    ),
)

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _TABLE}
