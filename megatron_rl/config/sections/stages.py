"""Training before reinforcement learning: supervised, on preferences, of reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.sections.bounds import LARGE, MANY, MOST_STEPS, MOST_TOKENS, POSITIVE, STEPS
from megatron_rl.config.sections.data import own_field
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.setting import required, setting


@dataclass(frozen=True)
class StageConfig:
    """Set what every stage has: its data, how long it takes, what it is measured on, and its optimizer."""

    VALUE_KEY: ClassVar[str] = "data"

    data: str | tuple[str, ...] = required(
        "Records to learn from: the prompt field and one for each response.", example="data/responses.jsonl"
    )
    prompt_field: str | None = own_field(
        "prompt_field", "Field of the prompt in `data` and `held_out` of the stage."
    )
    tools_field: str | None = own_field(
        "tools_field", "Field of the tools in `data` and `held_out` of the stage."
    )
    chat_template: bool | None = own_field(
        "chat_template", "Put the prompts of the stage through the tokenizer's chat template."
    )
    steps: int | None = setting(
        None,
        "Optimizer steps of the stage.",
        **STEPS,
        unset="as many as `epochs` take",
        advice="give 1 or more, or remove the section for a run without that training",
    )
    epochs: float | None = setting(
        None,
        "Passes over the data, in place of `steps`; the last step may have fewer records.",
        unset="as many as `steps` take",
        more_than=0,
        at_most=MOST_STEPS,
    )
    held_out: str | tuple[str, ...] | None = setting(
        None,
        "Records that the loss is only measured on: before the first step and after the last.",
        unset="nothing is measured on other data",
    )
    evaluate_every: int | None = setting(
        None, "Steps between further measurements on `held_out`.", **STEPS, unset="none"
    )
    until_loss: float | None = setting(
        None,
        "Loss on `held_out` that is good enough: the stage ends at the first measurement at or below it, and "
        "the job stops where `steps` or `epochs` do not reach it.",
        unset="the stage takes all its steps, whatever the loss",
        **POSITIVE,
    )
    checkpoint_every: int | None = setting(
        None,
        "Steps between checkpoints, from which a stage that was interrupted goes on.",
        **STEPS,
        unset="checkpoint.every",
    )
    max_row_tokens: int | None = setting(
        None,
        "Longest prompt and response together; data.over_long says what happens to longer ones.",
        unit="tokens",
        unset="data.max_prompt_tokens + rollout.max_response_tokens",
        at_least=2,
        at_most=MOST_TOKENS,
    )
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(learning_rate=1e-5), "Optimizer of the stage, started afresh."
    )

    UNIT: ClassVar[str]
    """What a record is called."""
    RESPONSES: ClassVar[tuple[str, ...]]
    """The settings that name the fields of responses; a record has a row for each."""

    @property
    def per_step(self) -> int:
        """Return the number of records that a step learns from."""
        return getattr(self, f"{self.UNIT}s_per_step")

    @property
    def every_turn(self) -> bool:
        """Say whether a conversation that ends with its response teaches all turns of the assistant."""
        return False


@dataclass(frozen=True)
class SftConfig(StageConfig):
    """Train the actor on given responses before reinforcement learning; the loss is on their tokens."""

    rows_per_step: int = setting(64, "Rows that an optimizer step takes.", unit="rows", **MANY)
    response_field: str = setting("response", "Field of the response.")
    turns: str = setting(
        "every",
        "What is learned of a conversation whose last message is the response: every turn of the assistant, "
        "or the last.",
        choices=("every", "last"),
    )

    UNIT = "row"
    RESPONSES = ("response_field",)

    @property
    def every_turn(self) -> bool:
        """Say whether a conversation that ends with its response teaches all turns of the assistant."""
        return self.turns == "every"


@dataclass(frozen=True)
class PairsConfig(StageConfig):
    """Train a reward model on preferences (Bradley-Terry) before reinforcement learning."""

    pairs_per_step: int = setting(32, "Pairs that an optimizer step takes.", unit="pairs", **MANY)
    chosen_field: str = setting("chosen", "Field of the preferred response.")
    rejected_field: str = setting("rejected", "Field of the other response.")

    UNIT = "pair"
    RESPONSES = ("chosen_field", "rejected_field")


@dataclass(frozen=True)
class PreferenceConfig(PairsConfig):
    """Train the actor on preferences (DPO) before reinforcement learning, after ``sft`` where there is one.

    The reference is the policy that this training starts from.
    """

    loss: str = setting("sigmoid", "Loss of a pair.", choices=("sigmoid", "robust", "hinge", "ipo", "simpo"))
    beta: float | None = setting(
        None, "Strength of the pull to the reference.", unset="0.1, and 2.0 with simpo", **POSITIVE
    )
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
