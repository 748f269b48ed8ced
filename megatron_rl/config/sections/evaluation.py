"""Evaluation: sets of held-out prompts, how each is answered and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.sections.bounds import ENDLESS, MANY, STEPS
from megatron_rl.config.sections.data import own_field
from megatron_rl.config.setting import required, setting

NEVER = "a number above `steps` means never"
INTERVALS = ("low", "high")


@dataclass(frozen=True)
class EvaluationSetConfig:
    """Describe one evaluation set; ``NAME: path/to/data.jsonl`` is short for one with nothing but data.

    Its metrics are ``eval/NAME/accuracy`` and ``reward``, and with several samples ``pass_at_K`` and
    ``majority_at_K`` for 2, 4, 8 ... and all samples. They have ``_low`` and ``_high`` beside them, a 95%
    interval over prompts. ``distinct_1``, ``distinct_2``, ``ngram_entropy`` and ``repetition`` say how
    diverse the answers are.
    """

    data: str | tuple[str, ...] = required(
        "Prompts that are answered: a data set with the fields of `data`, or its own.",
        example="data/eval.jsonl",
    )
    prompt_field: str | None = own_field(
        "prompt_field",
        "Field of the prompt in this set.",
        also_called={"slime": "eval_input_key"},
    )
    ground_truth_field: str | None = own_field(
        "ground_truth_field",
        "Field of what the reward compares with, in this set.",
        also_called={"slime": "eval_label_key"},
    )
    task_field: str | None = own_field("task_field", "Field of the task's name in this set.")
    tools_field: str | None = own_field(
        "tools_field", "Field of the tools in this set.", also_called={"slime": "eval_tool_key"}
    )
    chat_template: bool | None = own_field(
        "chat_template", "Put the prompts of this set through the tokenizer's chat template."
    )
    every: int | None = setting(
        None, "Steps between evaluations of this set.", **STEPS, unset="evaluation.every", advice=NEVER
    )
    samples: int = setting(1, "Answers to each prompt.", unit="rows", **MANY)
    temperature: float = setting(
        0.0, "Temperature of answers; 0 is greedy.", at_least=0, at_most=100, advice="0 is greedy"
    )
    top_p: float | None = setting(
        None,
        "Share of the probability that answers are sampled from.",
        unset="the sampling profile's",
        more_than=0,
        at_most=1,
    )
    max_prompts: int | None = setting(
        None, "Prompts that are answered, from the start of the data.", unit="prompts", unset="all", **ENDLESS
    )
    reward: str | None = setting(
        None,
        "Reward function that judges this set instead of `reward`: module:function, or "
        "path/to/file.py:function.",
        unset="what judges in training",
    )
    evaluators: dict[str, str] = setting(
        {},
        "Further functions by name, called as a reward function is: the mean of what NAME says is "
        "`eval/SET/NAME`, of its components `eval/SET/NAME/COMPONENT`. What one fails on is counted in "
        "`eval/SET/NAME_failed`, and stops nothing.",
    )

    def draws(self) -> tuple[int, ...]:
        """Return the numbers of samples K that pass@K and majority@K are measured for."""
        powers = [2**power for power in range(1, self.samples.bit_length()) if 2**power < self.samples]
        return (*powers, self.samples) if self.samples > 1 else ()

    def estimates(self) -> tuple[str, ...]:
        """Return the metrics that have an interval."""
        of_draws = (f"{name}_at_{count}" for name in ("pass", "majority") for count in self.draws())
        return ("accuracy", *of_draws)

    def metrics(self) -> tuple[str, ...]:
        """Return the names of all that is measured besides what evaluators say."""
        bounds = (f"{name}_{end}" for name in self.estimates() for end in INTERVALS)
        rest = ("reward", "invalid", "response_length", *DIVERSITY)
        return (*self.estimates(), *bounds, *rest)

    def functions(self) -> dict[str, str]:
        """Return the functions that judge this set alone, by the setting that names each."""
        rewards = {} if self.reward is None else {"reward": self.reward}
        return rewards | {f"evaluators.{name}": function for name, function in self.evaluators.items()}


DIVERSITY = ("distinct_1", "distinct_2", "ngram_entropy", "repetition")
"""How diverse answers are, see `diversity`."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Set what is evaluated, how often, and when a run has got good enough."""

    VALUE_KEY: ClassVar[str] = "every"

    sets: dict[str, EvaluationSetConfig] = setting(
        {},
        "Sets of held-out prompts by name.",
        also_called={
            "verl": "val_files, val_kwargs.temperature, val_kwargs.top_p, val_kwargs.n",
            "NeMo-RL": "val_data_path, max_val_samples",
            "slime": "eval_prompt_data, n_samples_per_eval_prompt",
            "AReaL": "valid_dataset.path",
            "OpenRLHF": "eval_dataset, eval_n_samples_per_prompt, eval_temperature",
            "ms-swift": "val_dataset",
            "common": "eval_data, eval_files, validation_data, data.val, data.validation, "
            "register_evaluator, evaluators",
        },
        conversion="ours has a name for each set: NAME.data, NAME.samples, NAME.evaluators ...",
    )
    every: int = setting(
        10,
        "Steps between evaluations, for sets that do not say it themselves.",
        **STEPS,
        advice=NEVER,
        also_called={
            "verl": "test_freq",
            "NeMo-RL": "val_period",
            "slime": "eval_interval",
            "TRL": "eval_steps",
            "common": "eval_every, eval_freq, val_every",
        },
    )
    at_start: bool = setting(
        True,
        "Evaluate before the first step.",
        also_called={
            "verl": "val_before_train",
            "NeMo-RL": "val_at_start",
            "transformers": "eval_on_start",
            "common": "eval_before_train",
            "slime": "skip_eval_before_train",
        },
        their_values={"skip_eval_before_train": {True: False, False: True}},
    )
    patience: int | None = setting(
        None,
        "Measurements of `checkpoint.best` running that are no better than the best, after which the run "
        "ends.",
        unit="evaluations",
        unset="the run takes all its steps",
        **ENDLESS,
        also_called={"common": "early_stopping_patience"},
    )

    def interval(self, name: str) -> int:
        """Return the steps between evaluations of a set."""
        return self.sets[name].every or self.every
