"""Data sets and the fields of a record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import TOKENS
from megatron_rl.config.setting import setting


@dataclass(frozen=True)
class DataConfig:
    """Name the data sets and the fields of a record.

    A data set is a .jsonl or .parquet file or a directory saved by Hugging Face ``datasets``; or several
    files whose records follow one another: a folder of shards, a pattern such as ``data/train-*.parquet``, or
    a list. A field within another is named with a dot: ``reward_model.ground_truth``. What is said of fields
    here holds for every data set that does not say it itself, as ``evaluation.sets.NAME.prompt_field``.
    """

    VALUE_KEY: ClassVar[str] = "train"

    train: str | tuple[str, ...] | None = setting(
        None,
        "Prompts to learn from: a file, a folder of shards, a pattern, or a list of these.",
        jobs=("train",),
        unset="no reinforcement learning",
        example="data/train.jsonl",
        also_called={
            "verl": "train_files",
            "NeMo-RL": "train_data_path",
            "slime": "prompt_data",
            "common": "train_data, train_file, data.path, data_path, dataset_path, dataset_name, dataset",
            "AReaL": "train_dataset.path",
        },
    )
    prompt_field: str = setting(
        "prompt",
        "Field of the prompt: text, or a list of messages.",
        also_called={"verl": "prompt_key", "slime": "input_key"},
    )
    ground_truth_field: str = setting(
        "ground_truth",
        "Field of what the reward compares with; required of a record where something may read it.",
        also_called={"slime": "label_key", "common": "answer_key, ground_truth_key"},
    )
    task_field: str = setting(
        "task",
        "Field of the task's name, which chooses a sampling profile.",
        also_called={"verl": "reward_fn_key", "common": "data_source_key"},
    )
    tools_field: str | None = setting(
        None,
        "Field of the tools that the chat template tells the model of: a list, as transformers takes it, or "
        "JSON text of one.",
        unset="none",
        also_called={"slime": "tool_key"},
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
        **TOKENS,
        also_called={
            "verl": "max_prompt_length, rollout.prompt_length",
            "NeMo-RL": "max_input_seq_length",
            "slime": "rollout_max_prompt_len",
            "OpenRLHF": "prompt_max_len, max_prompt_len",
            "common": "max_prompt_tokens",
            "ROLL": "prompt_length",
        },
    )
    over_long: str = setting(
        "drop",
        "What happens to longer prompts: they are left out and counted, or are an error.",
        choices=("drop", "error"),
        also_called={"verl": "filter_overlong_prompts, truncation"},
        conversion=dict.fromkeys(("filter_overlong_prompts",), "drop or error")
        | {"truncation": "drop or error: prompts are never cut"},
        their_values={
            "filter_overlong_prompts": {True: "drop", False: "error"},
            "truncation": {"error": "error"},
        },
    )
    shuffle: bool = setting(
        True,
        "Take prompts in a random order, another in each epoch.",
        also_called={"slime": "rollout_shuffle", "TRL": "shuffle_dataset"},
    )

    def setting_of(self, name: str) -> str:
        """Return the setting that names a field of this data set."""
        return f"data.{name}"

    @property
    def asked(self) -> dict[str, str]:
        """Return the field of what is asked, with the setting that names it."""
        return {self.prompt_field: self.setting_of("prompt_field")}

    @property
    def of_prompts(self) -> tuple[str | None, ...]:
        """Return the fields that are read of a record beside its responses, None for one that is not."""
        return self.prompt_field, self.ground_truth_field, self.task_field, self.tools_field

    @property
    def judged(self) -> dict[str, str]:
        """Return the fields that a response is judged by, with the settings that name them."""
        return {**self.asked, self.ground_truth_field: self.setting_of("ground_truth_field")}


@dataclass(frozen=True)
class OwnFields(DataConfig):
    """Say of one data set what ``data`` says, with what the data set states itself below ``stated_in``."""

    stated_in: str = "data"

    def setting_of(self, name: str) -> str:
        """Return the setting that names a field of this data set."""
        return f"{self.stated_in}.{name}"


def fields_of(data: DataConfig, section: Any, where: str) -> OwnFields:
    """Return what holds for a data set that ``section``, at the path ``where``, describes.

    Each of `FIELDS` that the section has and that is not None replaces that of ``data``.
    """
    values = {item.name: getattr(data, item.name) for item in fields(DataConfig)}
    own = {name: getattr(section, name, None) for name in FIELDS}
    return OwnFields(
        **values | {name: value for name, value in own.items() if value is not None}, stated_in=where
    )


FIELDS = ("prompt_field", "ground_truth_field", "task_field", "tools_field", "chat_template")
"""Settings of ``data`` that a data set may state for itself."""


def own_field(name: str, meaning: str, **says: Any) -> Any:
    """Return the dataclass field by which a data set states one of `FIELDS` itself."""
    return setting(None, meaning, unset=f"data.{name}", **says)
