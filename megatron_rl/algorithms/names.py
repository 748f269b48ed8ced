"""Named algorithms and the pieces they are made of, by name; importable without torch.

A piece is a name that stands for ``module:function``. To add an algorithm, write the function and an
entry here, or name it in the configuration: ``algorithm.settings.policy_loss: mine:raised`` for one piece,
``algorithm.name: mine:OWN`` for an `Algorithm` of your own. A policy loss has the form
``(TrainBatch, log_probs, Algorithm) -> TokenLoss``, an advantage function ``(AdvantageInputs, Algorithm) ->
Advantages``. The file mine.py, in a folder on PYTHONPATH, may be::

    def raised(micro, log_probs, algorithm):  # a loss per token [N]; means of the indicators are logged
        return TokenLoss(-micro.advantages * log_probs.exp(), {"raised_fraction": micro.advantages > 0})

    def centred(inputs, algorithm):  # one advantage per row [B], for every response token of the row
        return outcome(inputs, inputs.rewards - inputs.rewards[inputs.valid].mean())

    OWN = Algorithm("own", "Mine.", advantage="mine:centred", policy_loss="mine:raised")

A micro-batch holds whole rows of a mini-batch, so a loss may sum over a row, not over more; what depends on
more belongs into the advantages.
"""

from __future__ import annotations

from megatron_rl.algorithms.settings import Algorithm, RolloutCorrection

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
IS_LEVELS = ("none", "token", "sequence", "geometric")
REJECTION_MEASURES = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
_KL_NAMES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var", "low_var_kl")
KL_ESTIMATORS = (*_KL_NAMES, *(f"{name}+" for name in _KL_NAMES))

_ADVANTAGES = "megatron_rl.algorithms.advantages.pieces"
_POLICY_LOSSES = "megatron_rl.algorithms.policy_losses.pieces"

ADVANTAGES: dict[str, str] = {
    name: f"{_ADVANTAGES}:{name}"
    for name in (
        "dr_grpo", "gae", "gdpo", "gpg", "grpo", "grpo_leave_one_out", "grpo_pass_at_k", "opo", "reinforce",
        "remax", "rloo", "vapo",
    )
}  # fmt: skip

POLICY_LOSSES: dict[str, str] = {
    name: f"{_POLICY_LOSSES}:{name}"
    for name in (
        "cispo", "clip_cov", "dppo", "gmpo", "gspo", "kl_cov", "policy_gradient", "ppo_clip", "sapo", "topr",
    )
}  # fmt: skip

CORRECTIONS: dict[str, RolloutCorrection] = {
    "none": RolloutCorrection(),
    "token_tis": RolloutCorrection(level="token"),
    "sequence_tis": RolloutCorrection(level="sequence"),
    "geometric_tis": RolloutCorrection(level="geometric"),
    "icepop": RolloutCorrection(level="token", band=(0.5, 5.0)),
    "mis": RolloutCorrection(level="sequence", rejection={"seq_sum_k1": (0.5, 2.0)}),
    "geometric": RolloutCorrection(rejection={"seq_mean_k1": (0.999, 1.001)}),
    "geometric_token_tis": RolloutCorrection(level="token", rejection={"seq_mean_k1": (0.999, 1.001)}),
    "k3": RolloutCorrection(rejection={"seq_mean_k3": 0.01}),
    "k3_token_tis": RolloutCorrection(level="token", rejection={"seq_mean_k3": 0.01}),
}
"""Presets of ``correction``; a setting ``rollout_*`` that is not null overrides its part."""

_TABLE = (
    Algorithm("grpo", "PPO clip with the group's mean and standard deviation as baseline and scale."),
    Algorithm(
        "dr_grpo",
        "GRPO without its biases: no division by standard deviation or by length.",
        advantage="dr_grpo",
        aggregation="seq-mean-token-sum-norm",
    ),
    Algorithm(
        "grpo_leave_one_out",
        "GRPO with mean and standard deviation of the group's other samples.",
        advantage="grpo_leave_one_out",
    ),
    Algorithm(
        "grpo_pass_at_k", "Reward only the best sample of a group, for pass@k.", advantage="grpo_pass_at_k"
    ),
    Algorithm(
        "dapo",
        "GRPO with clip-higher, token-mean loss, dynamic sampling and a soft overlong penalty.",
        clip_ratio_high=0.28,
        dual_clip=10.0,
        dynamic_sampling=True,
        overlong_buffer=0.2,
    ),
    Algorithm(
        "gspo",
        "GRPO clipped by the whole response's length-normalised ratio.",
        policy_loss="gspo",
        aggregation="seq-mean-token-mean",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        dual_clip=None,
    ),
    Algorithm(
        "cispo",
        "GRPO with clipped importance weights; every token keeps a gradient.",
        policy_loss="cispo",
        clip_ratio_low=1.0,
        clip_ratio_high=4.0,
        dual_clip=None,
    ),
    Algorithm(
        "sapo",
        "GRPO with a smooth gate in place of the clip.",
        policy_loss="sapo",
        aggregation="seq-mean-token-mean",
        dual_clip=None,
    ),
    Algorithm(
        "gmpo",
        "GRPO on the geometric mean of token ratios.",
        policy_loss="gmpo",
        aggregation="seq-mean-token-mean",
        clip_ratio_low=0.4,
        clip_ratio_high=0.4,
        dual_clip=None,
    ),
    Algorithm(
        "dppo",
        "GRPO with a trust region in probability (total variation or KL), not in ratio.",
        policy_loss="dppo",
        dual_clip=None,
    ),
    Algorithm(
        "clip_cov",
        "GRPO that skips a few tokens of high covariance, to keep entropy up.",
        policy_loss="clip_cov",
        dual_clip=None,
    ),
    Algorithm(
        "kl_cov",
        "GRPO that holds back the tokens of highest covariance, to keep entropy up.",
        policy_loss="kl_cov",
        dual_clip=None,
    ),
    Algorithm(
        "gdpo",
        "GRPO that normalises each reward component by itself, for several rewards.",
        advantage="gdpo",
        whiten=True,
    ),
    Algorithm("rloo", "PPO clip with the mean of the group's other samples as baseline.", advantage="rloo"),
    Algorithm(
        "opo",
        "Length-weighted optimal baseline, meant for one optimizer step per batch (exactly on policy).",
        advantage="opo",
    ),
    Algorithm(
        "gpg",
        "Policy gradient on centred rewards, made up for rows with reward 0.",
        advantage="gpg",
        policy_loss="policy_gradient",
    ),
    Algorithm(
        "topr",
        "Tapered off-policy REINFORCE: imitates good responses, importance-weights bad ones.",
        advantage="dr_grpo",
        policy_loss="topr",
        aggregation="seq-mean-token-sum",
        dual_clip=None,
    ),
    Algorithm(
        "reinforce",
        "Plain policy gradient on whitened returns.",
        advantage="reinforce",
        policy_loss="policy_gradient",
        whiten=True,
    ),
    Algorithm(
        "reinforce_pp",
        "REINFORCE++: PPO clip on returns whitened over the batch, KL penalty in the reward.",
        advantage="reinforce",
        whiten=True,
        kl_in="reward",
        kl_estimator="k1",
    ),
    Algorithm(
        "reinforce_pp_baseline",
        "REINFORCE++ with the group's mean as baseline and KL in the loss.",
        advantage="dr_grpo",
        whiten=True,
        kl_in="loss",
        kl_estimator="k2",
    ),
    Algorithm(
        "remax",
        "PPO clip on returns minus a greedy response's reward.",
        advantage="remax",
    ),
    Algorithm("ppo", "PPO with a critic and GAE.", advantage="gae", whiten=True),
    Algorithm(
        "vapo",
        "PPO with length-adaptive GAE, the critic's own lambda, clip-higher and imitation of good responses.",
        advantage="vapo",
        whiten=True,
        clip_ratio_high=0.28,
        positive_nll_coef=0.1,
    ),
)

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _TABLE}


def resolved_correction(algorithm: Algorithm) -> RolloutCorrection:
    """Return the preset named by ``correction`` with the ``rollout_*`` settings that are not null."""
    preset = CORRECTIONS[algorithm.correction]
    own = {
        "level": algorithm.rollout_is,
        "threshold": algorithm.rollout_is_threshold,
        "band": algorithm.rollout_is_band,
        "batch_normalize": algorithm.rollout_is_batch_normalize,
        "rejection": algorithm.rollout_rs,
    }
    values = {name: getattr(preset, name) if value is None else value for name, value in own.items()}
    return RolloutCorrection(**values)
