"""Algorithm of a run: its name, and replacements or settings of its pieces, such as the policy loss.

An algorithm is a set of pieces (advantage, policy loss, aggregation, ...), and a configuration can change
each piece without the others. The settings of a piece are the fields of its class in
`megatron_rl.algorithms`, and are not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.setting import REMOVED, setting

# A name or path, a section with settings, or None for the algorithm's own piece.
PieceChoice = str | dict[str, Any] | None

_ITS_OWN = "the named algorithm's own"


@dataclass(frozen=True)
class AlgorithmConfig:
    """Algorithm by name, with replacements and settings of its pieces.

    A piece is a name, the import path of a class of your own (``file.py:Name`` or ``module:Name``), or a
    section with ``name`` and the settings of the piece. Without ``name``, the settings apply to the
    algorithm's default piece. The tables below list the pieces by name, with the settings of each piece and
    their bounds.
    """

    VALUE_KEY: ClassVar[str] = "name"

    # GRPO needs no critic, so it is the run with the fewest models.
    name: str = setting(
        "grpo",
        "A named algorithm, or the path of an Algorithm of your own.",
        also_called={
            "verl": "adv_estimator",
            "slime": "advantage_estimator",
            "ms-swift": "rlhf_type",
            "NeMo-RL": "adv_estimator.name",
            "common": "algo, algorithm_name",
        },
        their_values={
            "adv_estimator": {
                "gae": "ppo",
                "reinforce_plus_plus": "reinforce_pp",
                "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
                "grpo_passk": "grpo_pass_at_k",
                "optimal_token_baseline": "otb",
            },
            "advantage_estimator": {
                "gae": "ppo",
                "reinforce_plus_plus": "reinforce_pp",
                "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
                "grpo_passk": "grpo_pass_at_k",
            },
            "adv_estimator.name": {"gae": "ppo", "reinforce_plus_plus": "reinforce_pp"},
        },
    )
    # Pieces of the policy's objective.
    advantage: PieceChoice = setting(
        None,
        "Advantage estimator: how much better a response or a token is than expected.",
        unset=_ITS_OWN,
        also_called_below={
            "gamma": {"verl": "gamma", "common": "discount_factor"},
            "lam": {"verl": "lam", "OpenRLHF": "lambd", "NeMo-RL": "gae_lambda"},
            "scale_by_std": {
                "verl": "norm_adv_by_std_in_grpo, norm_adv_by_std",
                "TRL": "scale_rewards",
                "NeMo-RL": "normalize_rewards",
                "OpenRLHF": "no_advantage_std_norm",
                "slime": "disable_grpo_std_normalization",
            },
            "whiten": {"slime": "normalize_advantages", "ROLL": "whiten_advantages"},
            "clip": {"ROLL": "advantage_clip"},
        },
        their_values={
            "no_advantage_std_norm": {True: False, False: True},
            "disable_grpo_std_normalization": {True: False, False: True},
            "scale_rewards": {"group": True, "none": False},
        },
    )
    policy_loss: PieceChoice = setting(
        None,
        "Loss of each token for the policy.",
        unset=_ITS_OWN,
        also_called={
            "verl": "policy_loss.loss_mode",
            "TRL": "importance_sampling_level",
            "OpenRLHF": "policy_loss_type",
        },
        also_called_below={
            "clip_high": {
                "verl": "clip_ratio_high",
                "NeMo-RL": "ratio_clip_max",
                "slime": "eps_clip_high",
                "TRL": "epsilon_high",
                "common": "clip_high, cliprange_high",
                "Megatron-LM": "grpo_clamp_eps_upper",
                "ROLL": "pg_clip_high",
                "AReaL": "eps_clip_higher",
            },
            "clip_low": {
                "verl": "clip_ratio, clip_ratio_low",
                "NeMo-RL": "ratio_clip_min",
                "slime": "eps_clip",
                "common": "clip_low, cliprange_low, clip_range, cliprange, clip_eps, epsilon_low",
                "TRL": "epsilon",
                "Megatron-LM": "grpo_clamp_eps_lower",
                "ROLL": "pg_clip, pg_clip_low",
                "OpenRLHF": "eps_clip_low_high",
            },
            "dual_clip": {
                "verl": "clip_ratio_c",
                "slime": "eps_clip_c",
                "NeMo-RL": "ratio_clip_c",
                "AReaL": "c_clip",
                "OpenRLHF": "dual_clip",
            },
            "entropy_coef": {
                "verl": "entropy_coeff",
                "slime": "entropy_coef",
                "OpenRLHF": "entropy_loss_coef",
                "Megatron-LM": "grpo_entropy_term_weight",
                "common": "ent_coef",
            },
        },
        conversion={
            "clip_ratio": "and clip_high",
            "eps_clip": "and clip_high",
            "importance_sampling_level": "sequence is `policy_loss: gspo` here",
            "clip_range": "and clip_high",
            "cliprange": "and clip_high",
            "clip_eps": "and clip_high",
            "epsilon": "and clip_high",
            "pg_clip": "and clip_high",
            "eps_clip_low_high": "two numbers there: clip_low and clip_high here",
        },
        their_values={
            "policy_loss.loss_mode": {"vanilla": "ppo_clip"},
            "importance_sampling_level": {"sequence": "gspo", "token": "ppo_clip"},
            "policy_loss_type": {"ppo": "ppo_clip"},
        },
    )
    aggregation: PieceChoice = setting(
        None,
        "Aggregation of the tokens' losses into one number.",
        unset=_ITS_OWN,
        also_called={
            "verl": "loss_agg_mode",
            "TRL": "loss_type",
            "NeMo-RL": "token_level_loss",
            "slime": "calculate_per_token_loss",
        },
        conversion={
            "loss_type": "one of token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum and "
            "seq-mean-token-sum-norm"
        },
        their_values={
            "token_level_loss": {True: "token-mean", False: "seq-mean-token-mean"},
            "calculate_per_token_loss": {True: "token-mean", False: "seq-mean-token-mean"},
            "loss_type": {
                "grpo": "seq-mean-token-mean",
                "bnpo": "token-mean",
                "dapo": "token-mean",
                "dr_grpo": "seq-mean-token-sum-norm",
            },
        },
    )
    # Pieces of the critic's objective.
    value_loss: PieceChoice = setting(
        None,
        "Loss of each token for the critic.",
        unset=_ITS_OWN,
        also_called_below={
            "clip": {"verl": "cliprange_value", "slime": "value_clip"},
            "coef": {"common": "vf_coef, value_loss_coef"},
        },
    )
    value_aggregation: PieceChoice = setting(
        None, "Aggregation of the critic's losses into one number.", unset=_ITS_OWN
    )
    # A bare number is a coefficient: in most projects the penalty is in the loss.
    kl: PieceChoice = setting(
        None,
        "KL penalty to the reference policy: none, in the loss (loss), or in the reward (reward).",
        unset=_ITS_OWN,
        section_for_number="{name: loss, coef: VALUE}",
        also_called={"verl": "use_kl_loss, use_kl_in_reward"},
        also_called_below={
            "loss: coef": {
                "verl": "kl_loss_coef",
                "NeMo-RL": "reference_policy_kl_penalty",
                "TRL": "beta",
                "Megatron-LM": "grpo_kl_beta",
                "common": "kl_beta, kl_weight, kl_penalty_coef",
            },
            "reward: coef": {"verl": "kl_coef", "OpenRLHF": "init_kl_coef"},
            "loss: estimator": {
                "verl": "kl_loss_type",
                "NeMo-RL": "reference_policy_kl_type",
                "OpenRLHF": "kl_estimator",
            },
            "reward: estimator": {"verl": "kl_penalty"},
            "reward: controller": {"verl": "kl_ctrl.type, kl_ctrl_type"},
            "reward: target": {"verl": "kl_ctrl.target_kl, target_kl", "OpenRLHF": "kl_target"},
            "reward: horizon": {"verl": "kl_ctrl.horizon, kl_horizon"},
            "reward: coef_max": {"common": "kl_coef_max"},
        },
        conversion={
            "kl_coef_max": "with controller: adaptive, whose coefficient it bounds",
            "kl_ctrl.target_kl": "with controller: adaptive",
            "target_kl": "with controller: adaptive",
            "kl_target": "with controller: adaptive",
        },
        their_values={
            "use_kl_loss": {True: "loss", False: REMOVED},
            "use_kl_in_reward": {True: "reward", False: REMOVED},
            "beta": {0: REMOVED},
            "kl_loss_coef": {0: REMOVED},
            "kl_coef": {0: REMOVED},
            "init_kl_coef": {0: REMOVED},
            "reference_policy_kl_penalty": {0: REMOVED},
            "grpo_kl_beta": {0: REMOVED},
        },
    )
    # Without a correction, differences between the kernels of engine and trainer bias the gradient.
    correction: PieceChoice = setting(
        None,
        "Correction of the mismatch between the log-probs of rollout and trainer.",
        unset=_ITS_OWN,
        also_called={
            "slime": "use_tis",
            "OpenRLHF": "enable_vllm_is_correction",
            "NeMo-RL": "use_importance_sampling_correction",
            "TRL": "vllm_importance_sampling_correction",
        },
        also_called_below={
            "threshold": {
                "verl": "rollout_is_threshold, tis_imp_ratio_cap",
                "slime": "tis_clip",
                "NeMo-RL": "truncated_importance_sampling_ratio",
                "TRL": "vllm_importance_sampling_cap",
            },
            "bypass": {"verl": "bypass_mode", "slime": "use_rollout_logprobs"},
            "level": {"verl": "rollout_is"},
            "rejection": {"verl": "rollout_rs"},
        },
        conversion={
            "enable_vllm_is_correction": "true is `correction: token_tis` here",
            "rollout_rs": "ours maps each measure to its threshold, such as {seq_mean_k1: [0.999, 1.001]}",
        },
        their_values={
            "use_tis": {True: "token_tis", False: REMOVED},
            "enable_vllm_is_correction": {True: "token_tis", False: REMOVED},
            "use_importance_sampling_correction": {True: "token_tis", False: REMOVED},
            "vllm_importance_sampling_correction": {True: "token_tis", False: REMOVED},
        },
    )
    # Pieces that change rewards and rows.
    reward_shaping: PieceChoice = setting(
        None,
        "Transformation of rewards before advantages are computed.",
        unset=_ITS_OWN,
        also_called_below={
            "clip_low": {"OpenRLHF": "reward_clip_range", "ROLL": "reward_clip"},
            "normalize": {"OpenRLHF": "normalize_reward"},
            "scale": {"AReaL": "reward_scaling", "common": "reward_scale"},
            "shift": {"AReaL": "reward_bias"},
        },
        conversion={
            "reward_clip_range": "two numbers there: clip_low and clip_high here",
            "reward_clip": "clip_low: -x and clip_high: x here",
        },
        their_values={"normalize_reward": {True: "running", False: REMOVED}},
    )
    overlong: PieceChoice = setting(
        None,
        "Penalty or exclusion of responses near the length limit.",
        unset=_ITS_OWN,
        also_called_below={
            "buffer": {
                "verl": "overlong_buffer.len",
                "NeMo-RL": "overlong_buffer_length",
                "OpenRLHF": "overlong_buffer_len",
                "AReaL": "overlong_tokens",
            },
            "penalty": {
                "verl": "overlong_buffer.penalty_factor",
                "NeMo-RL": "overlong_buffer_penalty",
                "OpenRLHF": "overlong_penalty_factor",
            },
            "filter": {
                "NeMo-RL": "overlong_filtering",
                "TRL": "mask_truncated_completions",
                "ms-swift": "overlong_filter",
            },
        },
    )
    imitation: PieceChoice = setting(None, "Additional imitation loss on good responses.", unset=_ITS_OWN)
    distillation: PieceChoice = setting(
        None,
        "Objective of a teacher: none, the reverse KL on the actor's samples as a term in the advantages "
        "(reverse_kl), or a divergence over the teacher's most likely tokens as a loss (top_k).",
        unset=_ITS_OWN,
        also_called={"slime": "use_opd", "verl": "distillation.enabled", "common": "distillation"},
        also_called_below={
            "reverse_kl: coef": {"slime": "opd_kl_coef", "prime-rl": "teacher_tau"},
            "top_k: k": {"verl": "distillation_loss.topk", "NeMo-RL": "topk_logits_k"},
        },
        their_values={
            "use_opd": {True: "reverse_kl", False: REMOVED},
            "distillation.enabled": {True: "reverse_kl", False: REMOVED},
        },
    )
    dynamic_sampling: PieceChoice = setting(
        None,
        "Replacement of groups whose rewards are all equal, which have no gradient: none or refill.",
        unset=_ITS_OWN,
        also_called={
            "OpenRLHF": "dynamic_filtering",
            "verl": "filter_groups.enable",
            "NeMo-RL": "use_dynamic_sampling",
            "ms-swift": "dynamic_sample",
        },
        also_called_below={
            "refill: max_rounds": {
                "verl": "max_num_gen_batches",
                "NeMo-RL": "dynamic_sampling_max_gen_batches",
                "ms-swift": "max_resample_times",
            }
        },
        their_values={
            "dynamic_filtering": {True: "refill", False: REMOVED},
            "filter_groups.enable": {True: "refill", False: REMOVED},
            "use_dynamic_sampling": {True: "refill", False: REMOVED},
            "dynamic_sample": {True: "refill", False: REMOVED},
        },
    )


# Piece -> former name in `algorithm.settings` -> name in the piece, empty for the piece itself. `resume`
# reads configurations of older runs, which contain the former names.
_FORMER: Mapping[str, Mapping[str, str]] = {
    "advantage": {
        "advantage": "",
        "use_critic": "",
        "std_epsilon": "epsilon",
        "gamma": "gamma",
        "gae_lambda": "lam",
        "critic_lambda": "critic_lambda",
        "length_adaptive_alpha": "alpha",
        "whiten": "whiten",
        "advantage_clip": "clip",
        "component_weights": "weights",
    },
    "policy_loss": {
        "policy_loss": "",
        "clip_ratio_low": "clip_low",
        "clip_ratio_high": "clip_high",
        "dual_clip": "dual_clip",
        "sapo_temperature_positive": "temperature_positive",
        "sapo_temperature_negative": "temperature_negative",
        "dppo_divergence": "divergence",
        "dppo_ratio_cap": "ratio_cap",
        "cov_fraction": "fraction",
        "cov_low": "covariance_low",
        "cov_high": "covariance_high",
        "kl_cov_coef": "coef",
        "opsm_delta": "opsm_delta",
        "entropy_coef": "entropy_coef",
    },
    "aggregation": {"aggregation": "", "loss_scale_factor": "scale_factor", "denominator": "denominator"},
    "value_loss": {"value_clip": "clip", "value_loss_coef": "coef"},
    "value_aggregation": {"value_aggregation": ""},
    "kl": {
        "kl_in": "",
        "kl_estimator": "estimator",
        "kl_coef": "coef",
        "kl_controller": "controller",
        "kl_target": "target",
        "kl_horizon": "horizon",
        "kl_coef_max": "coef_max",
    },
    "correction": {
        "correction": "",
        "rollout_is": "level",
        "rollout_is_threshold": "threshold",
        "rollout_is_band": "band",
        "rollout_is_batch_normalize": "batch_normalize",
        "rollout_rs": "rejection",
        "bypass": "bypass",
    },
    "reward_shaping": {
        "reward_scale": "scale",
        "reward_shift": "shift",
        "reward_clip_low": "clip_low",
        "reward_clip_high": "clip_high",
        "reward_normalize": "normalize",
        "reward_ema_decay": "ema_decay",
        "reward_smoothing": "smoothing",
    },
    "overlong": {
        "max_response_tokens": "limit",
        "overlong_buffer": "buffer",
        "overlong_penalty": "penalty",
        "overlong_filter": "filter",
    },
    "imitation": {"positive_nll_coef": "coef", "positive_nll_threshold": "threshold"},
    "dynamic_sampling": {"dynamic_sampling": "", "dynamic_sampling_max_rounds": "max_rounds"},
}


def _former_settings() -> Iterator[tuple[str, str]]:
    """Yield (former key, current key) for every name in `_FORMER`."""
    for piece, names in _FORMER.items():
        for former_name, name in names.items():
            current_key = f"algorithm.{piece}"
            if name:
                current_key += f".{name}"

            yield f"algorithm.settings.{former_name}", current_key


FORMER_SETTINGS: Mapping[str, str] = dict(_former_settings())
"""Former key, below `algorithm.settings` -> current key."""
