"""Data sets and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.sections.bounds import MOST_ROWS, MOST_STEPS, MOST_TOKENS
from megatron_rl.config.setting import setting

_NEVER = "a number above `steps` means never"


@dataclass(frozen=True)
class DataConfig:
    """Name the data sets and the fields of a record.

    A data set is a .jsonl or .parquet file or a directory saved by Hugging Face ``datasets``.
    """

    train: str | None = setting(
        None,
        "Prompts to learn from.",
        jobs=("train",),
        unset="no reinforcement learning",
        example="data/train.jsonl",
        also_called={"verl": "train_files", "NeMo-RL": "train_data_path", "slime": "prompt_data"},
    )
    eval: str | None = setting(
        None,
        "Prompts to evaluate on.",
        unset="no evaluation",
        also_called={"verl": "val_files", "NeMo-RL": "val_data_path", "slime": "eval_prompt_data"},
    )
    prompt_field: str = setting(
        "prompt",
        "Field of the prompt: text, or a list of messages.",
        also_called={"verl": "prompt_key", "slime": "input_key"},
    )
    ground_truth_field: str = setting(
        "ground_truth", "Field of what the reward compares with.", also_called={"slime": "label_key"}
    )
    task_field: str = setting(
        "task",
        "Field of the task's name, for sampling profiles and metrics.",
        also_called={"verl": "reward_fn_key"},
    )
    chat_template: bool | None = setting(
        None,
        "Put prompts through the tokenizer's chat template.",
        unset="when the prompt field holds a list of messages",
        also_called={"slime": "apply_chat_template"},
    )
    max_prompt_tokens: int = setting(
        1024,
        "Longest prompt.",
        unit="tokens",
        at_least=1,
        at_most=MOST_TOKENS,
        also_called={
            "verl": "max_prompt_length",
            "NeMo-RL": "max_input_seq_length",
            "slime": "rollout_max_prompt_len",
            "OpenRLHF": "prompt_max_len",
            "common": "max_prompt_tokens",
        },
    )
    over_long: str = setting(
        "drop",
        "What happens to longer prompts: they are left out and counted, or are an error.",
        choices=("drop", "error"),
        also_called={"verl": "filter_overlong_prompts"},
        conversion="drop or error",
    )
    shuffle: bool = setting(True, "Take prompts in a random order, another in each epoch.")


@dataclass(frozen=True)
class EvaluationConfig:
    """Set how often and how the evaluation set is answered."""

    every: int = setting(
        10,
        "Steps between evaluations.",
        unit="steps",
        at_least=1,
        at_most=MOST_STEPS,
        advice=_NEVER,
        also_called={
            "verl": "test_freq",
            "NeMo-RL": "val_period",
            "slime": "eval_interval",
            "TRL": "eval_steps",
        },
    )
    at_start: bool = setting(
        True,
        "Evaluate before the first step.",
        also_called={"verl": "val_before_train", "NeMo-RL": "val_at_start"},
    )
    temperature: float = setting(
        0.0,
        "Temperature of answers; 0 is greedy.",
        at_least=0,
        at_most=100,
        advice="0 is greedy",
        also_called={"verl": "val_kwargs.temperature"},
    )
    samples: int = setting(
        1,
        "Answers to each prompt.",
        unit="rows",
        at_least=1,
        at_most=MOST_ROWS,
        also_called={"verl": "val_kwargs.n", "slime": "n_samples_per_eval_prompt"},
    )
    max_prompts: int | None = setting(
        None,
        "Prompts that are answered.",
        unit="prompts",
        unset="all of data.eval",
        at_least=1,
        at_most=MOST_STEPS,
        also_called={"NeMo-RL": "max_val_samples"},
    )
