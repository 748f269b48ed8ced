"""Training before reinforcement learning: supervised, on preferences, of reward models."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.sections.bounds import LARGE, MOST_ROWS, MOST_STEPS
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.setting import required, setting


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Train a reward model on preferences (Bradley-Terry) before the run's first step."""

    data: str = required(
        "Preferences: the prompt field, a chosen and a rejected response.", example="data/preferences.jsonl"
    )
    steps: int = required(
        "Optimizer steps of the training.",
        unit="steps",
        at_least=1,
        at_most=MOST_STEPS,
        example="200",
        advice="give 1 or more, or remove the section for a run without that training",
    )
    pairs_per_step: int = setting(
        32, "Pairs that an optimizer step takes.", unit="pairs", at_least=1, at_most=MOST_ROWS
    )
    chosen_field: str = setting("chosen", "Field of the preferred response.")
    rejected_field: str = setting("rejected", "Field of the other response.")
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(learning_rate=1e-5), "Optimizer of the training, started afresh."
    )


@dataclass(frozen=True)
class SftConfig:
    """Warm the actor up by supervised training before reinforcement learning; the loss is on responses."""

    data: str = required("Prompts and responses to imitate.", example="data/sft.jsonl")
    steps: int = required(
        "Optimizer steps of the training.",
        unit="steps",
        at_least=1,
        at_most=MOST_STEPS,
        example="200",
        advice="remove the sft section, or sft=null, for a run without warm-up",
    )
    rows_per_step: int = setting(
        64, "Rows that an optimizer step takes.", unit="rows", at_least=1, at_most=MOST_ROWS
    )
    response_field: str = setting("response", "Field of the response.")
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(learning_rate=1e-5), "Optimizer of the training, started afresh."
    )


@dataclass(frozen=True)
class PreferenceConfig(RewardTrainingConfig):
    """Train the actor on preferences (DPO) before reinforcement learning, after ``sft`` where there is one.

    The reference is the policy that this training starts from.
    """

    loss: str = setting("sigmoid", "Loss of a pair.", choices=("sigmoid", "robust", "hinge", "ipo", "simpo"))
    beta: float = setting(0.1, "Strength of the pull to the reference.", more_than=0, at_most=LARGE)
    label_smoothing: float = setting(
        0.0, "Assumed share of flipped labels (sigmoid, robust).", at_least=0, less_than=0.5
    )
    margin: float = setting(0.5, "SimPO's gamma.", at_least=0, at_most=LARGE)
    sft_coef: float = setting(
        0.0,
        "Weight of the chosen response's mean negative log-likelihood beside the loss.",
        at_least=0,
        at_most=LARGE,
    )
