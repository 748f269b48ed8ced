"""Stages before reinforcement learning: supervised training, DPO on preferences, training of reward models.

Each stage reads records with one or two responses, and each response is one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.sections.bounds import LARGE, MANY, MAX_STEPS, MAX_TOKENS, POSITIVE, STEPS
from megatron_rl.config.sections.data import override_field
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.setting import required, setting


@dataclass(frozen=True)
class StageConfig:
    """Settings of every stage: its data, its length, its evaluation, and its optimizer."""

    VALUE_KEY: ClassVar[str] = "data"

    # Name of a record, "row" or "pair": the subclass has the key `rows_per_step` or `pairs_per_step`.
    UNIT: ClassVar[str]

    # Settings that name the fields of responses. Each response of a record is one row.
    RESPONSES: ClassVar[tuple[str, ...]]

    data: str | tuple[str, ...] = required(
        "Records to train on: each has the prompt field and one field for each response.",
        example="data/responses.jsonl",
    )

    # Data sets of stages usually have other field names than the prompts of reinforcement learning.
    prompt_field: str | None = override_field(
        "prompt_field", "Field of the prompt in `data` and `held_out` of the stage."
    )
    tools_field: str | None = override_field(
        "tools_field", "Field of the tools in `data` and `held_out` of the stage."
    )
    chat_template_kwargs_field: str | None = override_field(
        "chat_template_kwargs_field",
        "Field of the chat template's arguments in `data` and `held_out` of the stage.",
    )
    chat_template: bool | None = override_field(
        "chat_template", "Render the prompts of the stage with the tokenizer's chat template."
    )

    # Length: `steps` or `epochs`, of which `check` requires exactly one.
    steps: int | None = setting(
        None,
        "Optimizer steps of the stage.",
        **STEPS,
        unset="as many as `epochs` take",
        advice="give 1 or more, or remove the section for a run without that training",
    )
    epochs: float | None = setting(
        None,
        "Passes over the data, in place of `steps`. The last step may have fewer records.",
        unset="as many as `steps` take",
        more_than=0,
        at_most=MAX_STEPS,
    )

    # Evaluation on held-out records.
    held_out: str | tuple[str, ...] | None = setting(
        None,
        "Records on which the loss is only evaluated, before the first step and after the last.",
        unset="nothing is evaluated on other data",
    )
    evaluate_every: int | None = setting(
        None, "Steps between further evaluations on `held_out`.", **STEPS, unset="none"
    )
    until_loss: float | None = setting(
        None,
        "Target of the loss on `held_out`. The stage ends at the first evaluation at or below it, and the "
        "job stops with an error if `steps` or `epochs` do not reach it.",
        unset="the stage takes all its steps, independently of the loss",
        **POSITIVE,
    )
    checkpoint_every: int | None = setting(
        None,
        "Steps between checkpoints, from which an interrupted stage resumes.",
        **STEPS,
        unset="checkpoint.every",
    )
    # Two tokens at least: a prompt and a response.
    max_row_tokens: int | None = setting(
        None,
        "Largest length of prompt and response together; `data.over_long` applies to longer rows.",
        unit="tokens",
        unset="data.max_prompt_tokens + rollout.max_response_tokens",
        at_least=2,
        at_most=MAX_TOKENS,
    )
    # Ten times the learning rate of reinforcement learning, as is usual for supervised training.
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(learning_rate=1e-5), "Optimizer of the stage, with a new state."
    )

    @property
    def records_per_step(self) -> int:
        """Return the number of records (rows or pairs) per optimizer step."""
        return getattr(self, f"{self.UNIT}s_per_step")

    @property
    def every_turn(self) -> bool:
        """Return whether the stage trains on every assistant turn of a conversation, not only the last."""
        return False


@dataclass(frozen=True)
class SftConfig(StageConfig):
    """Supervised training of the actor on given responses; only response tokens enter the loss."""

    UNIT = "row"
    RESPONSES = ("response_field",)

    rows_per_step: int = setting(64, "Rows of an optimizer step.", unit="rows", **MANY)
    response_field: str = setting("response", "Field of the response.")
    turns: str = setting(
        "every",
        "Turns that are trained on in a conversation whose last message is the response: every turn of the "
        "assistant, or the last one.",
        choices=("every", "last"),
    )

    @property
    def every_turn(self) -> bool:
        """Return whether the stage trains on every assistant turn of a conversation, not only the last."""
        return self.turns == "every"


@dataclass(frozen=True)
class PairsConfig(StageConfig):
    """Training of a reward model on preferences (Bradley-Terry) before reinforcement learning."""

    UNIT = "pair"
    RESPONSES = ("chosen_field", "rejected_field")

    pairs_per_step: int = setting(32, "Pairs of an optimizer step.", unit="pairs", **MANY)
    chosen_field: str = setting("chosen", "Field of the preferred response.")
    rejected_field: str = setting("rejected", "Field of the other response.")


@dataclass(frozen=True)
class PreferenceConfig(PairsConfig):
    """Training of the actor on preferences (DPO) before reinforcement learning, after ``sft`` if that is set.

    The reference is the policy that this training starts from.
    """

    loss: str = setting(
        "sigmoid",
        "Loss of a pair; a function of your own gets a `PreferencePairs` and returns one number per pair.",
        choices=("sigmoid", "robust", "hinge", "ipo", "simpo"),
        allows_path=True,
    )
    # SimPO divides log-probs by the length, so its beta has a different scale than DPO's.
    beta: float | None = setting(
        None, "Strength of the pull to the reference.", unset="0.1, and 2.0 with simpo", **POSITIVE
    )
    # With half of the labels flipped, a pair has no information: the robust loss divides by 1 - 2 x
    # smoothing.
    label_smoothing: float = setting(
        0.0, "Assumed share of flipped labels (sigmoid, robust).", at_least=0, less_than=0.5
    )
    margin: float = setting(0.5, "SimPO's gamma.", at_least=0, at_most=LARGE)
    sft_coef: float = setting(
        0.0,
        "Weight of the mean negative log-likelihood of the chosen response, which is added to the loss.",
        at_least=0,
        at_most=LARGE,
    )
