"""Rules on everything that a run reads and writes: models, data, functions, run folder, checkpoints.

`check_inputs` calls the rules of `model`, `data`, `rewards` and `engine` in the order in which they need each
other's results: the model first, since data needs its tokenizer and chat template.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.callbacks import callback_errors
from megatron_rl.check.data import DataPreview, DataSet, ReadBudget, TokenCounter, check_data
from megatron_rl.check.engine.arguments import check_tool_parser
from megatron_rl.check.engine.servers import check_engine_servers, engine_model_mismatch_errors
from megatron_rl.check.files import FileFindings
from megatron_rl.check.model.config import check_model_config
from megatron_rl.check.model.megatron_lm import provider_errors
from megatron_rl.check.model.tokenizer import (
    biased_token_errors,
    check_tokenizer,
    has_chat_template,
    read_chat_templates,
    read_token_ids,
    stop_errors,
)
from megatron_rl.check.model.weights import check_weights
from megatron_rl.check.resume import resume_errors
from megatron_rl.check.rewards import (
    best_metric_errors,
    check_enforcement,
    check_limits,
    check_not_redacted,
    check_reward,
    check_servers,
    check_teacher_server,
    evaluation_set_errors,
    filter_errors,
    function_loading_errors,
    sandbox_limits,
    unresponsive_server_warnings,
    unresponsive_teacher_warnings,
)
from megatron_rl.check.stages import repeated_record_warnings
from megatron_rl.config.derive import longest_row
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.load import flatten
from megatron_rl.config.roles import (
    TASK_TEACHERS,
    TEACHER,
    VOCABULARY,
    explicit_model_paths,
    role_of,
    role_sections,
    spec_at,
)
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.config.sections.data import DataConfig, SourceConfig, fields_of
from megatron_rl.config.sections.rewards import RewardModelConfig
from megatron_rl.config.stage_plan import StagePlan, stage_plans, starting_model
from megatron_rl.data.forms import RecordReader, prompt_consumers, template_source
from megatron_rl.data.messages import mixed_templates_error
from megatron_rl.data.rendered_text import require_multi_turn_template
from megatron_rl.environments.host import environment_errors
from megatron_rl.errors import UserError, range_error
from megatron_rl.rewards.code import read_tests
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel, download_command, read_pretrained
from megatron_rl.shapes.published import read_trainable

_PATH_SETTINGS = ("path", "megatron", "hf_path", "train", "data", "held_out", "run_dir", "resume")
"""Last names of the keys whose value is a path."""

_MODEL_FILES = "a directory with config.json, *.safetensors and tokenizer files"

_ACTOR_PATH = "model.path"


@dataclass
class Inputs:
    """Inputs of a run and the findings about them, filled in by `check_inputs`.

    Attributes:
        config: The configuration.
        files: Findings about files.
        is_valid: Function that returns whether all values at, below and above the given keys are valid.
        shipped_models: Folder with NAME/config.json, for models that are not on this machine.
        before_run: Whether this is a check before the run, not the check at the start of a run. Data, servers
            and kernel limits are only checked before the run: the run reads all data, connects to the servers
            and reports unenforced limits itself.
        errors: Errors of the inputs, except for errors of files, which are in ``files``.
        warnings: Warnings of the inputs.
        shape: Shape of the actor's model, or None if not available.
        shapes: Role -> shape of its model, for roles with a separate model, not the actor's.
        roles_without_shape: Roles with a separate model that is not available.
        models: Role -> config.json of its model, where one is available.
        preview: Records of the training data.
        derived_templates: Key of an unset ``chat_template`` -> the value derived from the first record.
        uses_template: Key of a data set -> whether its prompts are rendered with the chat template.
        token_counter: Counter of the tokens of records; None at the start of a run.
        read_budget: Budget of bytes for data sets that are read completely.
    """

    config: RunConfig
    files: FileFindings
    is_valid: Callable[..., bool]
    shipped_models: Path | None
    before_run: bool = True
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    shape: ModelShape | None = None
    shapes: dict[str, ModelShape] = field(default_factory=dict)
    roles_without_shape: set[str] = field(default_factory=set)
    models: dict[str, Path] = field(default_factory=dict)
    preview: DataPreview | None = None
    derived_templates: dict[str, bool] = field(default_factory=dict[str, bool])
    uses_template: dict[str, bool] = field(default_factory=dict[str, bool])
    token_counter: TokenCounter | None = None
    read_budget: ReadBudget = field(default_factory=ReadBudget)

    def __post_init__(self) -> None:
        if not self.before_run:
            self.read_budget.remaining = 0
        elif self.is_valid(_ACTOR_PATH):
            self.token_counter = TokenCounter(Path(self.config.model.path))

    @cached_property
    def template(self) -> str | None:
        """Return the source of the actor's chat template, or None if not available."""
        path = Path(self.config.model.path)
        if not self.is_valid(_ACTOR_PATH) or not path.is_dir():
            return None
        return template_source(read_chat_templates(path))


def check_path_lengths(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for paths that are too long for the file system.

    For example, the value may be the text of a prompt instead of the path of a file with prompts. Later rules
    do not open these paths.
    """
    for key, config_value in flatten(config).items():
        if key.rpartition(".")[2] not in _PATH_SETTINGS:
            continue
        paths = config_value if isinstance(config_value, tuple) else (config_value,)
        for path in paths:
            if not isinstance(path, str):
                continue
            try:
                os.lstat(path)
            except OSError as error:  # other errors are reported by the rule that reads the file
                if error.errno == errno.ENAMETOOLONG:
                    got = f"{path[:60]}... ({len(path):,} characters)"
                    yield range_error(key, got, "a path that this system accepts", fix=f"correct {key}")


def check_inputs(inputs: Inputs) -> None:
    """Check every input of the run, and add findings, shapes and previews to ``inputs``."""
    config = inputs.config

    _check_models(inputs)
    _check_data(inputs)

    # `checkpoint.best` names a metric of an evaluation set.
    if inputs.is_valid("evaluation", "checkpoint"):
        inputs.errors.extend(best_metric_errors(config))

    if config.job == TRAIN and inputs.is_valid("callbacks"):
        inputs.errors.extend(callback_errors(config.callbacks))
    source_rewards = [f"data.sources.{name}.reward" for name in config.data.sources]
    if config.job == TRAIN and inputs.is_valid("reward", *source_rewards):
        _check_reward(inputs)
        if inputs.before_run and inputs.is_valid("evaluation.sets"):
            inputs.errors.extend(function_loading_errors(config))

    # Sandboxed code, the environment, and redacted secrets that were copied from a run folder.
    _check_sandbox_limits(inputs)
    _check_environment(inputs)
    inputs.errors.extend(check_not_redacted("rollout.vllm", config.rollout.vllm))

    # The run folder, and the checkpoint to resume from.
    if inputs.is_valid("run_dir"):
        inputs.errors.extend(_run_dir_errors(Path(config.run_dir)))
    if config.job == TRAIN and inputs.is_valid("checkpoint.resume", "run_dir", _ACTOR_PATH):
        inputs.errors.extend(resume_errors(config))


def _check_models(inputs: Inputs) -> None:
    """Check the actor's model, its provider, and the models of other roles."""
    config = inputs.config
    if inputs.is_valid(_ACTOR_PATH):
        inputs.shape = _check_model(inputs, config.model.path, _ACTOR_PATH)
        sampling_keys = [
            "rollout.stop",
            "rollout.banned_tokens",
            "rollout.logit_bias",
            "rollout.sampling_profiles",
        ]
        if config.job == TRAIN and inputs.is_valid(*sampling_keys):
            inputs.errors.extend(stop_errors(Path(config.model.path), config.rollout))
            inputs.errors.extend(biased_token_errors(Path(config.model.path), config.rollout))

    actor_model = None
    if inputs.shape is not None:
        actor_model = read_pretrained(inputs.models["actor"])
        if config.job == TRAIN:
            inputs.errors.extend(engine_model_mismatch_errors(config.rollout, actor_model, config.model.path))
    inputs.errors.extend(provider_errors(config.model, actor_model))

    for section, path in explicit_model_paths(config).items():
        # The user chooses the name of a reward model: NAME in `reward.models.NAME`. If NAME is invalid, the
        # error has the key `reward.models.NAME`, so test this key.
        key = f"{section}.path"
        if spec_at(section).named:
            key = section
        if inputs.is_valid(key):
            _check_role_model(inputs, path, section)


def _check_data(inputs: Inputs) -> None:
    """Check the records of training, of evaluation sets and of stages."""
    config = inputs.config
    max_prompt_tokens = config.data.max_prompt_tokens

    # Training data.
    field_keys = ("data.prompt_field", "data.ground_truth_field")
    consumers = prompt_consumers(config)
    if config.data.train is not None and inputs.is_valid(*field_keys, "data.train"):
        reader = RecordReader(config.data, "data.train", consumers=consumers, template=inputs.template)
        inputs.preview = _check_data_set(inputs, DataSet(config.data.train, reader, max_prompt_tokens))

    # Sources inherit unset fields from `data`. Reading their records needs valid values of all their settings
    # except `reward` and `profile`.
    read_settings = {source_field.name for source_field in fields(SourceConfig)} - {"reward", "profile"}
    for name, source in config.data.sources.items():
        key = f"data.sources.{name}"
        source_keys = [f"{key}.{setting}" for setting in read_settings]
        if inputs.is_valid(*field_keys, *source_keys):
            data = fields_of(config.data, source, key)
            consumers = prompt_consumers(config, source=name)
            reader = RecordReader(data, f"{key}.path", consumers=consumers, template=inputs.template)
            _check_data_set(inputs, DataSet(source.path, reader, max_prompt_tokens))
    inputs.errors.extend(_source_template_errors(inputs))

    # Evaluation sets inherit unset fields from `data` too.
    for name, evaluation_set in config.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if inputs.is_valid(*field_keys, key):
            data = fields_of(config.data, evaluation_set, key)
            consumers = prompt_consumers(config, name)
            reader = RecordReader(data, f"{key}.data", consumers=consumers, template=inputs.template)
            _check_data_set(inputs, DataSet(evaluation_set.data, reader, max_prompt_tokens))
            inputs.errors.extend(evaluation_set_errors(name, evaluation_set))
    if config.rollout.environment is not None:
        inputs.errors.extend(_mixed_template_errors(inputs))

    # Stages; then close the process that rendered the templates of all data sets.
    for plan in stage_plans(config):
        _check_stage_data(inputs, plan)
    if inputs.token_counter is not None:
        inputs.token_counter.close()


def _check_reward(inputs: Inputs) -> None:
    """Check the reward functions and servers; before a run, also send a request to each server."""
    reward = inputs.config.reward
    errors = [*check_reward(inputs.config), *check_servers(reward), *filter_errors(inputs.config)]
    if inputs.config.teacher_server is not None:
        errors += check_teacher_server(inputs.config.teacher_server)

    # `reward.code` runs the tests in the ground truth: try to parse the tests of the first record.
    first_record = inputs.preview.first if inputs.preview else None
    if reward.code is not None and first_record is not None:
        try:
            read_tests(first_record.get(inputs.config.data.ground_truth_field))
        except ValueError as error:
            errors.append(
                UserError(
                    "the ground truth of the first record contains no tests",
                    where="reward.code",
                    expected="a list of {stdin, stdout}, {call, returns} or 'assert f(x) == y'",
                    got=str(error),
                    fix="correct the data, or set data.ground_truth_field to the field with the tests",
                )
            )
    inputs.errors.extend(errors)
    if errors or not inputs.before_run or inputs.files.allow_missing:
        return

    # Contact reward servers and the engine's servers in parallel, so that all share one timeout.
    rollout = inputs.config.rollout
    urls: tuple[str, ...] = ()
    health_path = None
    if not rollout.capabilities.in_process and not list(check_engine_servers(rollout)):
        urls = rollout.server.urls
        health_path = ENGINES[rollout.engine].health_path
    inputs.warnings.extend(unresponsive_server_warnings(reward, urls, health_path))
    if inputs.config.teacher_server is not None:
        inputs.warnings.extend(unresponsive_teacher_warnings(inputs.config.teacher_server))


def _check_sandbox_limits(inputs: Inputs) -> None:
    """Check the limits of sandboxed code, and warn about limits that the kernel does not enforce."""
    limits_by_key: dict[str, LimitsConfig] = {}
    for key, limits in sandbox_limits(inputs.config).items():
        if inputs.is_valid(key):
            limits_by_key[key] = limits

    errors: list[UserError] = []
    for key, limits in limits_by_key.items():
        errors.extend(check_limits(key, limits, inputs.files))
    inputs.errors.extend(errors)

    # Warn only before a run, and only if files must exist. During the run, each sandboxed process reports the
    # limits that the kernel does not enforce.
    if inputs.before_run and not inputs.files.allow_missing and not errors:
        inputs.warnings.extend(check_enforcement(limits_by_key))


def _check_environment(inputs: Inputs) -> None:
    """Check that the environment can be loaded, and that vLLM has the tool-call parser that it names."""
    environment = inputs.config.rollout.environment
    if inputs.config.job != TRAIN or environment is None or not inputs.is_valid("rollout.environment"):
        return
    # A redacted value, copied from the configuration in a run folder, cannot be used to load the environment.
    redaction_errors = check_not_redacted("rollout.environment", environment.settings)
    inputs.errors.extend(redaction_errors or environment_errors(environment))
    inputs.errors.extend(check_tool_parser(environment.tool_parser))


def _check_stage_data(inputs: Inputs, plan: StagePlan) -> None:
    """Check the data sets of a stage, whose records contain the prompt and each response."""
    # Record field of each response -> the key that names the field; a preference pair has two responses.
    settings = plan.settings
    key_by_field = {getattr(settings, name): f"{plan.where}.{name}" for name in settings.RESPONSES}
    response_keys = [f"{plan.where}.{name}" for name in settings.RESPONSES]
    for name in ("data", "held_out"):
        path = getattr(settings, name)
        key = f"{plan.where}.{name}"
        if path is None or not inputs.is_valid("data.prompt_field", key, *response_keys):
            continue

        data = fields_of(inputs.config.data, settings, plan.where)
        reader = RecordReader(data, key, key_by_field, settings.every_turn, template=inputs.template)
        limit = settings.max_row_tokens or longest_row(inputs.config)
        preview = _check_data_set(inputs, DataSet(path, reader, limit, f"{plan.where}.max_row_tokens"))
        if name == "data" and preview is not None and preview.count is not None:
            inputs.warnings.extend(repeated_record_warnings(plan, preview.count))


def _check_model(inputs: Inputs, path: str, key: str) -> ModelShape | None:
    """Check the model at ``path``, the value of ``key``; return its shape, or None if not available."""
    # Without the checkpoint, read the sizes from a config.json that ships with the configuration.
    shipped_config = _find_shipped_config(inputs.shipped_models, Path(path))
    config_file = shipped_config
    if Path(path).is_dir():
        config_file = Path(path) / "config.json"
    if config_file is not None and config_file.is_file():
        inputs.models[_role_at(key)] = config_file

    model = _check_model_files(Path(path), key, inputs.files, shipped_config)
    if model is None:
        return None
    inputs.errors.extend(_output_layer_errors(model, key, inputs.config))
    return model.shape


def _role_at(key: str) -> str:
    """Return the name of the role whose model path is at a configuration key."""
    if key == _ACTOR_PATH:
        return "actor"
    return role_of(key.removesuffix(".path"))


def _check_model_files(
    path: Path,
    key: str,
    files: FileFindings,
    shipped_config: Path | None,
) -> PretrainedModel | None:
    """Check a Hugging Face checkpoint and return its model, or None if it is not available.

    ``shipped_config`` is a config.json with the model's sizes, used if the checkpoint is not on this machine.
    """
    if path.is_file():
        files.errors.append(
            UserError(
                "the model path is a file",
                where=key,
                expected=_MODEL_FILES,
                got=str(path),
                fix="name the directory with the checkpoint",
            )
        )
        return None
    if not path.is_dir():
        fix = f"{download_command(str(path))}, or name it hf://ORGANISATION/NAME, or correct the path"
        files.record_missing(path, f"the model directory {path} does not exist", key, _MODEL_FILES, fix)
        if shipped_config is None or not shipped_config.is_file():
            return None
        return read_trainable(shipped_config, files.errors)

    # Read the model's sizes first: weights and tokenizer must match them.
    config_file = path / "config.json"
    model = None
    if config_file.is_file():
        model = check_model_config(config_file, files)
    else:
        expected = "a Hugging Face checkpoint directory"
        fix = "name the directory with config.json"
        files.record_missing(config_file, "the model has no config.json", key, expected, fix)

    check_weights(path, key, files, model)
    vocabulary = None
    if model is not None:
        vocabulary = model.shape.vocab
    check_tokenizer(path, key, files, vocabulary)
    return model


def _is_untrained_reward_model(config: RunConfig, section: str) -> bool:
    """Return whether a section is a reward model that is used without training."""
    settings = role_sections(config).get(section)
    return isinstance(settings, RewardModelConfig) and settings.training is None


def _output_layer_errors(model: PretrainedModel, key: str, config: RunConfig) -> Iterator[UserError]:
    """Yield the error for a policy with a scalar head, or for a reward model without one."""
    section = key.removesuffix(".path")
    family = model.family

    # A policy must have logits over tokens. A reward model must have a scalar head. Exception: a reward model
    # that this configuration trains may start from a policy.
    if key == _ACTOR_PATH or spec_at(section).head == VOCABULARY:
        if model.shape.scalar_head:
            yield UserError(
                f"{key} is a reward model, which has no logits over tokens",
                where=key,
                expected=family.architecture,
                got=model.shape.name,
                fix="name the checkpoint of a policy",
            )
    elif _is_untrained_reward_model(config, section) and not model.shape.scalar_head:
        yield UserError(
            f"{key} is a policy, which has no reward head",
            where=key,
            expected=family.scalar_architecture,
            got=model.shape.name,
            fix=f"name the checkpoint of a reward model, or train one: {section}.training",
        )


def _find_shipped_config(shipped_models: Path | None, path: Path) -> Path | None:
    """Return the config.json for the model at ``path`` in the folder ``shipped_models``, or None.

    It is in the subfolder OWNER/NAME or NAME, for a ``path`` that ends in OWNER/NAME.
    """
    if shipped_models is None:
        return None
    for model_folder in (Path(path.parent.name) / path.name, Path(path.name)):
        file = shipped_models / model_folder / "config.json"
        if file.is_file():
            return file
    return None


def _check_role_model(inputs: Inputs, path: str | None, section: str) -> None:
    """Check the model of a role other than the actor: its files, and that it has the actor's vocabulary."""
    if path is None:
        return

    # The files of the actor's model have been checked already.
    is_starting_model = path == starting_model(inputs.config)
    if is_starting_model and not _is_untrained_reward_model(inputs.config, section):
        return
    key = f"{section}.path"
    shape = _check_model(inputs, path, key)
    actor_shape = inputs.shape
    if shape is None:
        inputs.roles_without_shape.add(role_of(section))
        return

    # Roles exchange tokens as ids, so their vocabularies must be equal.
    inputs.shapes[role_of(section)] = shape
    if spec_at(section) in (TEACHER, TASK_TEACHERS):
        inputs.errors.extend(_teacher_token_errors(inputs, Path(path), key))
        # Models of one family may pad the same vocabulary to different sizes, such as Qwen2.5 from 7B on.
        if actor_shape is not None and shape.vocab > actor_shape.vocab:
            return
    if actor_shape is not None and shape.vocab != actor_shape.vocab:
        inputs.errors.append(
            UserError(
                f"the {section} and the model have different vocabularies",
                where=key,
                expected=f"{actor_shape.vocab} tokens",
                got=f"{shape.vocab} tokens",
                fix=f"use a {section} of the same model family and tokenizer",
            )
        )


def _teacher_token_errors(inputs: Inputs, path: Path, key: str) -> Iterator[UserError]:
    """Yield the error for a teacher whose tokenizer has different ids for the actor's tokens."""
    # Distillation compares log-probs of the actor's token ids, so each id must mean the same text. The
    # teacher may have additional tokens.
    actor_ids = read_token_ids(Path(inputs.config.model.path))
    teacher_ids = read_token_ids(path)
    different_tokens: list[str] = []
    for text, token_id in actor_ids.items():
        if teacher_ids.get(text) != token_id:
            different_tokens.append(text)
    if not actor_ids or not teacher_ids or not different_tokens:
        return
    example = different_tokens[0]
    yield UserError(
        "the teacher and the model have different tokenizers",
        where=key,
        expected=f"the {len(actor_ids)} tokens of {inputs.config.model.path} with their ids",
        got=f"{len(different_tokens)} that differ, such as {example!r}: {teacher_ids.get(example)} "
        f"in place of {actor_ids[example]}",
        fix="use a teacher of the same model family",
    )


def _absent_field_warning(
    data_set: DataSet, first_record: Mapping[str, Any], setting: str, noun: str, kind: str
) -> UserError:
    """Return the warning that a data set's first record lacks the optional field that ``setting`` names.

    ``noun`` is the content of the field, such as "tools", and ``kind`` its type, such as "a list".
    """
    data = data_set.data_config
    key = data.setting_of(setting)
    return UserError(
        f"the first record of {data_set.key} has no {noun}",
        where=key,
        expected=f"{kind} in the field `{getattr(data, setting)}` of each record with {noun}",
        got=f"fields {', '.join(first_record)}",
        fix=f"if no record has {noun}, correct {key}",
    )


def _check_data_set(inputs: Inputs, data_set: DataSet) -> DataPreview | None:
    """Check the records, the chat template and the token counts of a data set.

    Errors and warnings are added to ``inputs``. Returns a preview of the data set, or None if the data set
    cannot be read.
    """
    preview = check_data(data_set, inputs.files, inputs.read_budget)
    if preview is None or preview.first is None:
        return preview
    data = data_set.data_config
    first_record = preview.first

    # Records may lack optional fields, so a missing field is only a warning: its name may be misspelled. The
    # field of the template's arguments has a default name, which needs no warning.
    if data.tools_field not in (None, *first_record):
        inputs.warnings.append(
            _absent_field_warning(data_set, first_record, "tools_field", "tools", "a list")
        )
    if data.chat_template_kwargs_field not in (None, DataConfig.chat_template_kwargs_field, *first_record):
        noun = "arguments of the chat template"
        inputs.warnings.append(
            _absent_field_warning(data_set, first_record, "chat_template_kwargs_field", noun, "a mapping")
        )

    # Prompts that are lists of messages need the chat template; `chat_template: true` uses it for text too.
    template_key = data.setting_of("chat_template")
    uses_template = data.chat_template
    if uses_template is None:
        uses_template = isinstance(first_record.get(data.prompt_field), list)
        inputs.derived_templates.setdefault(template_key, uses_template)
    inputs.uses_template[data_set.key] = uses_template

    model_folder = Path(inputs.config.model.path)
    is_model_available = inputs.is_valid(template_key, _ACTOR_PATH) and model_folder.is_dir()
    if uses_template and is_model_available and not has_chat_template(model_folder):
        inputs.errors.append(
            UserError(
                "the tokenizer has no chat template",
                where=template_key,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                got=f"no template in {model_folder}, but the prompts of {data_set.key} need a template",
                fix=f"use an instruction-tuned model, or prompts that are text with {template_key}=false",
            )
        )
    elif inputs.token_counter is not None and inputs.is_valid(
        "data.max_prompt_tokens", "rollout", data_set.limited_by
    ):
        inputs.token_counter.check_records(data_set, preview, inputs.config.data.over_long, inputs.files)
    if uses_template and is_model_available and not data_set.response_fields:
        _check_later_turns(inputs, data)
    return preview


def _check_later_turns(inputs: Inputs, data: DataConfig) -> None:
    """Check that the chat template can continue a data set's conversations, if there is an environment."""
    if inputs.config.rollout.environment is None or inputs.token_counter is None:
        return
    conversation_renderer = inputs.token_counter.conversation_renderer
    if conversation_renderer is None:
        return
    try:
        require_multi_turn_template(conversation_renderer, data)
    except UserError as error:
        # Data sets that use the template arguments of `data` all have the same error: report it once.
        if all(error.where != earlier_error.where for earlier_error in inputs.errors):
            inputs.errors.append(error)


def _source_template_errors(inputs: Inputs) -> Iterator[UserError]:
    """Yield the error if some sources use the chat template and others do not.

    Only the first source that differs from the sources before it is reported. A source that cannot be read is
    skipped, since it has an error already.
    """
    first_source: str | None = None
    first_uses_template = False
    for source in inputs.config.data.sources:
        uses_template = inputs.uses_template.get(f"data.sources.{source}.path")
        if uses_template is None:
            continue

        if first_source is None:
            first_source = source
            first_uses_template = uses_template
        elif uses_template is not first_uses_template:
            yield mixed_templates_error(first_source, first_uses_template, source)
            return


def _mixed_template_errors(inputs: Inputs) -> Iterator[UserError]:
    """Yield the error for evaluation sets with the chat template and training data without it, or vice versa.

    An environment continues all conversations either with the chat template or as plain text.
    """
    # `_source_template_errors` compares the sources with each other, so the first source is enough here.
    training_keys = [key for key in inputs.uses_template if key.startswith("data.")]
    if not training_keys:
        return
    training_key = training_keys[0]
    training_uses_template = inputs.uses_template[training_key]

    descriptions = {True: "prompts that go through the chat template", False: "prompts of plain text"}
    for key, uses_template in inputs.uses_template.items():
        if key.startswith("evaluation.") and uses_template is not training_uses_template:
            setting = f"{key.removesuffix('.data')}.chat_template={str(training_uses_template).lower()}"
            yield UserError(
                "an environment continues all conversations in one way: with the chat template or as text",
                where=key,
                expected=f"{descriptions[training_uses_template]}, as {training_key}",
                got=descriptions[uses_template],
                fix=f"set {setting}, or convert the set",
            )


def _run_dir_errors(path: Path) -> Iterator[UserError]:
    """Yield the error for a run folder that cannot be created or written."""
    problem = _run_dir_problem(path)
    if problem is not None:
        yield UserError(
            "the run folder cannot be made",
            where="run_dir",
            expected="a directory, or a path where one can be made",
            got=problem,
            fix="choose another run_dir",
        )


def _run_dir_problem(path: Path) -> str | None:
    """Return why a run folder cannot be created at ``path``, or None if it can."""
    # Find the nearest existing parent, in which the missing folders would be made.
    existing_parent = path
    while not os.path.lexists(existing_parent) and existing_parent != existing_parent.parent:
        existing_parent = existing_parent.parent

    # The paths that a run writes must not exist as another type of file.
    folder = RunFolder(path)
    for directory in (existing_parent, *folder.directories(), folder.stages, folder.reward_models):
        if os.path.lexists(directory) and not directory.is_dir():
            return f"{directory} is not a folder"
    for file in (folder.config, folder.metrics):
        if os.path.lexists(file) and not file.is_file():
            return f"{file} is not a file"
    if path.parts and path.parts[0].startswith("~"):
        return f"{path.parts[0]}: only a shell replaces it by a home directory"

    # Missing permissions and full disks are only detected by writing.
    try:
        with tempfile.TemporaryDirectory(prefix=".check.", dir=existing_parent) as temporary_folder:
            Path(temporary_folder, "file").write_bytes(b"x")
    except OSError as error:
        return f"nothing can be written in {existing_parent}: {error.strerror}"
    return None
