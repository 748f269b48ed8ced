"""Evaluation: sets of held-out prompts, how they are sampled, and the metrics of each.

An evaluation set is like a small run without training. It uses the run's record fields and reward unless its
section overrides them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import ENDLESS, MANY, STEPS
from megatron_rl.config.sections.data import SYSTEM_PROMPT, TEMPLATE_KWARGS, override_field
from megatron_rl.config.setting import required, setting

# Advice for an interval of 0, which other projects read as "never".
NEVER = "a number above `steps` means never"

# Suffixes of the metrics that bound a 95 % interval.
INTERVALS = ("low", "high")

# Measures of how diverse the responses of a set are, see `trainer.answers`.
DIVERSITY = ("distinct_1", "distinct_2", "ngram_entropy", "repetition")


@dataclass(frozen=True)
class EvaluationSetConfig:
    """Evaluation set; ``NAME: path/to/data.jsonl`` is short for a set that sets only `data`.

    Its metrics are ``eval/NAME/accuracy`` and ``eval/NAME/reward``. With several samples there are also
    ``pass_at_K`` and ``majority_at_K`` for 2, 4, 8 ... and all samples. All of these metrics except the
    reward have a 95% interval over prompts, with the bounds ``_low`` and ``_high``. ``distinct_1``,
    ``distinct_2``, ``ngram_entropy`` and ``repetition`` measure how diverse the responses are.
    """

    data: str | tuple[str, ...] = required(
        "Held-out prompts: a data set with the fields of `data`, or with the fields named here.",
        example="data/eval.jsonl",
    )

    # Sets come from many sources, each with its own names for the fields of a record.
    prompt_field: str | None = override_field(
        "prompt_field",
        "Field of the prompt in this set.",
        also_called={"slime": "eval_input_key"},
    )
    ground_truth_field: str | None = override_field(
        "ground_truth_field",
        "Field of the reference answer that the reward reads, in this set.",
        also_called={"slime": "eval_label_key"},
    )
    task_field: str | None = override_field("task_field", "Field of the task's name in this set.")
    tools_field: str | None = override_field(
        "tools_field", "Field of the tools in this set.", also_called={"slime": "eval_tool_key"}
    )
    chat_template_kwargs_field: str | None = override_field(
        "chat_template_kwargs_field", "Field of the chat template's arguments in this set."
    )
    chat_template: bool | None = override_field(
        "chat_template", "Render the prompts of this set with the tokenizer's chat template."
    )
    system_prompt: str | None = setting(None, SYSTEM_PROMPT, unset="none")
    chat_template_kwargs: dict[str, Any] = setting({}, TEMPLATE_KWARGS)

    # Interval and sampling.
    every: int | None = setting(
        None, "Steps between evaluations of this set.", **STEPS, unset="evaluation.every", advice=NEVER
    )
    samples: int = setting(1, "Responses sampled to each prompt.", unit="rows", **MANY)
    # Greedy by default: one sample per prompt then has no sampling noise.
    temperature: float = setting(
        0.0, "Temperature of the responses; 0 is greedy.", at_least=0, at_most=100, advice="0 is greedy"
    )
    top_p: float | None = setting(
        None,
        "Probability mass that responses are sampled from.",
        unset="the sampling profile's",
        more_than=0,
        at_most=1,
    )
    max_prompts: int | None = setting(
        None,
        "Prompts that are evaluated, from the start of the data.",
        unit="prompts",
        unset="all",
        **ENDLESS,
    )
    reward: str | None = setting(
        None,
        "Reward function of this set in place of `reward`: module:function, or path/to/file.py:function.",
        unset="the reward of training",
    )
    # A failing evaluator is counted and not raised: a metric must not end a run that trains well.
    evaluators: dict[str, str] = setting(
        {},
        "Further functions by name, called as a reward function is. The mean of NAME's results is "
        "`eval/SET/NAME`, the mean of its components `eval/SET/NAME/COMPONENT`. Its failures are counted in "
        "`eval/SET/NAME_failed` and never stop the run.",
    )

    def sample_counts(self) -> tuple[int, ...]:
        """Return the values of K for which the metrics pass@K and majority@K are computed.

        Example:
            >>> EvaluationSetConfig("eval.jsonl", samples=6).sample_counts()
            (2, 4, 6)
        """
        if self.samples == 1:
            return ()

        # Powers of two, and all samples.
        powers = [2**power for power in range(1, self.samples.bit_length())]
        smaller_powers = [power for power in powers if power < self.samples]
        return (*smaller_powers, self.samples)

    def interval_metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that have a 95 % interval, without the prefix ``eval/NAME/``."""
        names = ["accuracy"]
        for metric in ("pass", "majority"):
            names.extend(f"{metric}_at_{count}" for count in self.sample_counts())

        return tuple(names)

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of the set's metrics, without the prefix ``eval/NAME/``.

        Metrics of its evaluators are not included.
        """
        interval_names = self.interval_metrics()

        # The reward and the diversity metrics have no interval.
        bound_names: list[str] = []
        for name in interval_names:
            bound_names.extend(f"{name}_{bound}" for bound in INTERVALS)
        return (*interval_names, *bound_names, "reward", "invalid", "response_length", *DIVERSITY)

    def user_functions(self) -> dict[str, str]:
        """Map the key of each user function (``reward``, ``evaluators.NAME``) to its import path."""
        functions: dict[str, str] = {}
        if self.reward is not None:
            functions["reward"] = self.reward
        for name, function in self.evaluators.items():
            functions[f"evaluators.{name}"] = function

        return functions


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation sets, their interval, and the condition for an early end of the run."""

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
        "Steps between evaluations of the sets without an `every` in their section.",
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
    # On, since the improvement of a run is the difference to its starting model.
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
        "Number of consecutive evaluations without a new best `checkpoint.best` after which the run ends.",
        unit="evaluations",
        unset="the run takes all its steps",
        **ENDLESS,
        also_called={"common": "early_stopping_patience"},
    )

    def steps_between(self, name: str) -> int:
        """Return the number of steps between two evaluations of the set ``name``."""
        return self.sets[name].every or self.every
