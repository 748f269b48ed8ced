"""Data sets and the fields of a record.

``data`` names the record fields of all data sets, and the section of a data set can override each of
`FIELDS`. `fields_of` merges the two, and retains the path of each setting for errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from megatron_rl.config.sections.bounds import SHARE, TOKENS
from megatron_rl.config.setting import required, setting
from megatron_rl.errors import UserError


def override_field(name: str, meaning: str, **attributes: Any) -> Any:
    """Return a dataclass field: the setting of one data set that overrides the setting ``name`` of ``data``.

    Its default None means the value in ``data``. ``attributes`` are further fields of `Setting`.
    """
    return setting(None, meaning, unset=f"data.{name}", **attributes)


# Meanings of two keys that the sources of training prompts and the evaluation sets share.
SYSTEM_PROMPT = "System message before the messages of each prompt, which the chat template then renders."
TEMPLATE_KWARGS = (
    "Arguments of the chat template, such as enable_thinking: false; those of a record replace them."
)

# Arguments that the renderer itself passes to the chat template: a user's values would have no effect.
_RESERVED_TEMPLATE_KWARGS = ("messages", "tools", "documents", "add_generation_prompt")


class PromptTemplate(NamedTuple):
    """System message and chat-template arguments that a data set adds to each of its prompts."""

    system_prompt: str | None = None
    """Content of a system message before the prompt's messages; None for no system message."""
    kwargs: Mapping[str, Any] = {}
    """Arguments of the chat template by name."""


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of training prompts, and the share of the prompts that it provides.

    A record that does not name a task has the name of its source as its task. A sampling profile with the
    name of a task applies to all records of the task. `profile` sets the sampling profile for the records of
    this source, except for records whose own task has a profile.
    """

    path: str | tuple[str, ...] = required(
        "Prompts of this source: a file, a folder of shards, a pattern, or a list of these.",
        example="data/math.jsonl",
    )
    weight: float = setting(
        1.0,
        "Share of this source in the prompts, relative to the weights of the others.",
        more_than=0,
        at_most=1e9,
    )
    # Sources have different origins, and so different names for the fields of a record.
    prompt_field: str | None = override_field("prompt_field", "Field of the prompt in this source.")
    ground_truth_field: str | None = override_field(
        "ground_truth_field", "Field of the reference answer that the reward reads, in this source."
    )
    task_field: str | None = override_field("task_field", "Field of the task's name in this source.")
    tools_field: str | None = override_field("tools_field", "Field of the tools in this source.")
    chat_template_kwargs_field: str | None = override_field(
        "chat_template_kwargs_field", "Field of the chat template's arguments in this source."
    )
    chat_template: bool | None = override_field(
        "chat_template", "Render the prompts of this source with the tokenizer's chat template."
    )
    system_prompt: str | None = setting(None, SYSTEM_PROMPT, unset="none")
    chat_template_kwargs: dict[str, Any] = setting(
        {}, TEMPLATE_KWARGS, also_called={"verl": "apply_chat_template_kwargs"}
    )
    reward: str | None = setting(
        None,
        "Reward function of the rows of this source in place of `reward.function`: module:function, or "
        "path/to/file.py:function. All other settings of `reward` apply to it too.",
        unset="reward.function",
    )
    profile: str | None = setting(
        None,
        "Sampling profile of this source: a name of `rollout.sampling_profiles`, or `file.py:NAME` of one "
        "that `megatron_rl.sampling_profile` registers there.",
        unset="the profile of the record's task",
    )


@dataclass(frozen=True)
class DataConfig:
    """Data set of prompts, and the names of a record's fields.

    A data set is a .jsonl or .parquet file or a directory saved by Hugging Face ``datasets``. It may also be
    several files whose records follow one another: a folder of shards, a pattern such as
    ``data/train-*.parquet``, or a list. A field inside another one is named with a dot:
    ``reward_model.ground_truth``. The fields named here apply to every data set, unless its section overrides
    them, such as ``evaluation.sets.NAME.prompt_field``.
    """

    VALUE_KEY: ClassVar[str] = "train"

    train: str | tuple[str, ...] | None = setting(
        None,
        "Prompts to train on: a file, a folder of shards, a pattern, or a list of these; on the Hugging Face "
        "Hub as hf://datasets/ORG/NAME/PATH.",
        jobs=("train",),
        alternative_key="sources",
        unset="no reinforcement learning, unless there are data.sources",
        example="data/train.jsonl",
        also_called={
            "verl": "train_files",
            "NeMo-RL": "train_data_path",
            "slime": "prompt_data",
            "common": "train_data, train_file, data.path, data_path, dataset_path, dataset_name, dataset",
            "AReaL": "train_dataset.path",
        },
    )
    sources: dict[str, SourceConfig] = setting(
        {},
        "Sources of training prompts by name, in place of `data.train`. Each has its share of the prompts "
        "by weight, and its own metrics.",
    )
    weights: dict[str, dict[str, float]] = setting(
        {},
        "Weights of the sources after a number of steps, such as {0: {easy: 1}, 200: {easy: 1, hard: 1}}; "
        "a source that is not named gives no prompts. Before the first number, the sources' own `weight` "
        "applies.",
    )
    prompt_field: str = setting(
        "prompt",
        "Field of the prompt: text, or a list of messages.",
        also_called={"verl": "prompt_key", "slime": "input_key"},
    )
    # `check` requires this field only in data sets whose reward may read it.
    ground_truth_field: str = setting(
        "ground_truth",
        "Field of the reference answer. A record needs it if its reward may read it.",
        also_called={"slime": "label_key", "common": "answer_key, ground_truth_key"},
    )
    task_field: str = setting(
        "task",
        "Field of the task's name, which chooses a sampling profile.",
        also_called={"verl": "reward_fn_key", "common": "data_source_key"},
    )
    tools_field: str | None = setting(
        None,
        "Field of the tools that the chat template describes to the model: a list as transformers takes it, "
        "or JSON text of one.",
        unset="none",
        also_called={"slime": "tool_key"},
    )
    # Read by default, as in TRL: no data set is known to use this name for something else.
    chat_template_kwargs_field: str | None = setting(
        "chat_template_kwargs",
        "Field of the chat template's arguments for one record, such as {enable_thinking: false}: a mapping, "
        "or JSON text of one; null reads none. They replace equal names in `chat_template_kwargs` of the "
        "data set.",
    )
    # Unset by default, not true: text in the prompt field is often a formatted prompt already.
    chat_template: bool | None = setting(
        None,
        "Render prompts with the tokenizer's chat template.",
        unset="true if the prompt field is a list of messages",
        also_called={"slime": "apply_chat_template"},
    )
    max_prompt_tokens: int = setting(
        1024,
        "Largest length of a prompt.",
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
    # There is no choice that truncates prompts, since half a question has another answer.
    over_long: str = setting(
        "drop",
        "Longer prompts are left out and counted (drop), or are an error.",
        choices=("drop", "error"),
        also_called={"verl": "filter_overlong_prompts, truncation"},
        conversion={
            "filter_overlong_prompts": "drop or error",
            "truncation": "drop or error: prompts are never cut",
        },
        their_values={
            "filter_overlong_prompts": {True: "drop", False: "error"},
            "truncation": {"error": "error"},
        },
    )
    shuffle: bool = setting(
        True,
        "Take prompts in a random order, a new one in each epoch.",
        also_called={"slime": "rollout_shuffle", "TRL": "shuffle_dataset"},
    )
    uniform_share: float = setting(
        1.0,
        "Share of the prompts whose last responses had equal rewards, such as all passed or all failed, that "
        "an epoch draws. The others wait for a later epoch.",
        **SHARE,
        advice="0.25 draws such a prompt in every fourth epoch; 1 draws every prompt in each",
    )

    def setting_of(self, name: str) -> str:
        """Return the path of the setting ``name`` of this data set, such as ``data.prompt_field``."""
        return f"data.{name}"

    @property
    def has_prompts(self) -> bool:
        """Return whether the configuration sets prompts for reinforcement learning: `train` or `sources`."""
        return self.train is not None or bool(self.sources)

    @property
    def source_rewards(self) -> dict[str, str]:
        """Map the name of each source with its own reward function to the function's import path."""
        return {name: source.reward for name, source in self.sources.items() if source.reward is not None}

    @property
    def prompt_template(self) -> PromptTemplate:
        """Return an empty template: only sources and evaluation sets add anything to their prompts."""
        return PromptTemplate()

    @property
    def prompt_fields(self) -> dict[str, str]:
        """Map the record field of the prompt to the path of the setting that names the field."""
        return {self.prompt_field: self.setting_of("prompt_field")}

    @property
    def record_fields(self) -> tuple[str | None, ...]:
        """Return the names of the record fields for prompts and rewards, with None for each unset name."""
        names = (self.prompt_field, self.ground_truth_field, self.task_field, self.tools_field)
        return *names, self.chat_template_kwargs_field

    @property
    def reward_fields(self) -> dict[str, str]:
        """Map each record field that a reward reads to the path of the setting that names the field."""
        return {**self.prompt_fields, self.ground_truth_field: self.setting_of("ground_truth_field")}


@dataclass(frozen=True)
class SetFields(DataConfig):
    """Settings of ``data`` for one data set, with the overrides of the data set's section."""

    section_path: str = "data"
    """Path of the section that overrides the names."""

    own_template: PromptTemplate = field(default_factory=PromptTemplate)
    """System message and chat-template arguments in the section."""

    @property
    def prompt_template(self) -> PromptTemplate:
        """Return the system message and chat-template arguments of the data set."""
        return self.own_template

    def setting_of(self, name: str) -> str:
        """Return the path of the setting ``name`` of this data set, such as ``sft.prompt_field``."""
        return f"{self.section_path}.{name}"


# Settings of ``data`` that a data set may override.
FIELDS = (
    "prompt_field",
    "ground_truth_field",
    "task_field",
    "tools_field",
    "chat_template_kwargs_field",
    "chat_template",
)


def fields_of(data: DataConfig, section: Any, path: str) -> SetFields:
    """Return the settings of ``data`` for one data set, with the overrides of the data set's section.

    ``section`` is the data set's section at the configuration path ``path``. Each setting in `FIELDS` that
    the section sets replaces the value in ``data``.
    """
    values = {item.name: getattr(data, item.name) for item in fields(DataConfig)}
    for name in FIELDS:
        value = getattr(section, name, None)
        if value is not None:
            values[name] = value

    # The section of a training stage, such as `sft`, has no system message and no chat-template arguments.
    template = PromptTemplate(
        getattr(section, "system_prompt", None), getattr(section, "chat_template_kwargs", {})
    )

    # Both settings require a chat template, so they turn it on: text becomes a user message.
    if values["chat_template"] is None and (template.system_prompt is not None or template.kwargs):
        values["chat_template"] = True
    return SetFields(**values, section_path=path, own_template=template)


def reserved_kwargs_error(kwargs: Mapping[str, Any], where: str, container: str) -> UserError | None:
    """Return the error if ``kwargs`` contains reserved arguments of the chat template, or None.

    The renderer itself passes the reserved arguments, such as the prompt's ``messages`` and ``tools``.
    ``container`` is the configuration key or the record field that contains ``kwargs``, for the fix.
    """
    reserved_names = [name for name in _RESERVED_TEMPLATE_KWARGS if name in kwargs]
    if not reserved_names:
        return None

    return UserError(
        "arguments of the chat template that the prompt itself sets",
        where=where,
        expected="other arguments of the template, such as enable_thinking",
        got=", ".join(reserved_names),
        fix=f"remove {reserved_names[0]} from {container}",
    )
