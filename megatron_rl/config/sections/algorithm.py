"""The algorithm: which named one, and which of its pieces are others or set otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.setting import setting

PieceChoice = str | dict[str, Any] | None
_ITS_OWN = "the named algorithm's own"


@dataclass(frozen=True)
class AlgorithmConfig:
    """Choose a named algorithm, and replace or set its pieces.

    A piece is a name, the path of one of your own (``file.py:Name`` or ``module:Name``), or a section with
    ``name`` and its settings; without ``name`` the settings are of the algorithm's own piece.
    The tables of pieces below have the names, and the settings of each with their bounds.
    """

    VALUE_KEY: ClassVar[str] = "name"

    name: str = setting(
        "grpo",
        "A named algorithm, or the path of an Algorithm of your own.",
        also_called={"verl": "adv_estimator", "slime": "advantage_estimator"},
    )
    advantage: PieceChoice = setting(
        None,
        "How much better a response or a token is than expected.",
        unset=_ITS_OWN,
        also_called_below={
            "gamma": {"verl": "gamma"},
            "lam": {"verl": "lam", "OpenRLHF": "lambd"},
            "scale_by_std": {"verl": "norm_adv_by_std_in_grpo", "TRL": "scale_rewards"},
        },
    )
    policy_loss: PieceChoice = setting(
        None,
        "What each token costs the policy.",
        unset=_ITS_OWN,
        also_called={"verl": "policy_loss.loss_mode", "TRL": "importance_sampling_level"},
        also_called_below={
            "clip_high": {
                "verl": "clip_ratio_high",
                "NeMo-RL": "ratio_clip_max",
                "slime": "eps_clip_high",
                "TRL": "epsilon_high",
            },
            "clip_low": {
                "verl": "clip_ratio, clip_ratio_low",
                "NeMo-RL": "ratio_clip_min",
                "slime": "eps_clip",
            },
            "dual_clip": {"verl": "clip_ratio_c", "slime": "eps_clip_c"},
            "entropy_coef": {"verl": "entropy_coeff", "slime": "entropy_coef"},
        },
        conversion={
            "clip_ratio": "and clip_high",
            "eps_clip": "and clip_high",
            "importance_sampling_level": "sequence is `policy_loss: gspo` here",
        },
    )
    aggregation: PieceChoice = setting(
        None,
        "How the tokens' losses become one number.",
        unset=_ITS_OWN,
        also_called={"verl": "loss_agg_mode", "TRL": "loss_type"},
    )
    value_loss: PieceChoice = setting(None, "What each token costs the critic.", unset=_ITS_OWN)
    value_aggregation: PieceChoice = setting(
        None, "How the critic's losses become one number.", unset=_ITS_OWN
    )
    kl: PieceChoice = setting(
        None,
        "Where a KL penalty to the reference goes: none, loss or reward.",
        unset=_ITS_OWN,
        number_means="{name: loss, coef: VALUE}",
        also_called={"verl": "use_kl_loss"},
        also_called_below={
            "coef": {
                "verl": "kl_loss_coef, kl_coef",
                "NeMo-RL": "reference_policy_kl_penalty",
                "TRL": "beta",
                "OpenRLHF": "init_kl_coef",
            },
            "estimator": {"verl": "kl_loss_type", "NeMo-RL": "reference_policy_kl_type"},
        },
        conversion={"use_kl_loss": "none, loss or reward"},
    )
    correction: PieceChoice = setting(
        None,
        "Correction of the mismatch between rollout and trainer.",
        unset=_ITS_OWN,
        also_called={"slime": "use_tis", "OpenRLHF": "enable_vllm_is_correction"},
        conversion={"enable_vllm_is_correction": "true is `correction: token_tis` here"},
    )
    reward_shaping: PieceChoice = setting(None, "What is done to rewards before advantages.", unset=_ITS_OWN)
    overlong: PieceChoice = setting(None, "What happens to responses near the length limit.", unset=_ITS_OWN)
    imitation: PieceChoice = setting(None, "Imitation of good responses.", unset=_ITS_OWN)
    dynamic_sampling: PieceChoice = setting(
        None,
        "Whether groups that teach nothing are replaced: none or refill.",
        unset=_ITS_OWN,
        also_called={"OpenRLHF": "dynamic_filtering"},
        conversion="true is `dynamic_sampling: refill` here",
    )


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
FORMER_SETTINGS: Mapping[str, str] = {
    f"algorithm.settings.{former}": f"algorithm.{piece}" + (f".{name}" if name else "")
    for piece, names in _FORMER.items()
    for former, name in names.items()
}
"""Former keys of the algorithm, when it had one flat section of settings -> key now."""
