"""Check what a run reads and writes: model, data, reward function, run folder, checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron_rl.check.data.lengths import Tokens
from megatron_rl.check.data.sets import DataPreview, DataSet, Reading, check_data
from megatron_rl.check.engine.arguments import check_tool_parser
from megatron_rl.check.engine.servers import check_engine_servers
from megatron_rl.check.files import Files
from megatron_rl.check.model.config import check_model_config
from megatron_rl.check.model.provider import provider_errors
from megatron_rl.check.model.template import chat_templates, has_chat_template
from megatron_rl.check.model.tokenizer import check_tokenizer, stop_errors
from megatron_rl.check.model.weights import check_weights
from megatron_rl.check.resume import resume_errors
from megatron_rl.check.rewards.containment import check_enforced, check_limits, contained_sections
from megatron_rl.check.rewards.evaluation import best_errors, evaluation_set_errors
from megatron_rl.check.rewards.function import check_not_hidden, check_reward
from megatron_rl.check.rewards.servers import check_servers, silent_servers
from megatron_rl.check.rewards.user_functions import function_errors
from megatron_rl.check.stages import repeated_records
from megatron_rl.config.derive import has_transformer_engine, longest_row
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.load import flatten
from megatron_rl.config.roles import VOCABULARY, role_of, role_sections, spec_at, stated_models
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.data import fields_of
from megatron_rl.config.sections.rewards import RewardModelConfig
from megatron_rl.config.stage_plan import StagePlan, stage_plans, starting_model
from megatron_rl.data.forms import RecordReader, prompt_consumers, template_source
from megatron_rl.environments.hosts import environment_errors
from megatron_rl.errors import UserError
from megatron_rl.rewards.code import read_tests
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel, download_command, read_pretrained
from megatron_rl.shapes.published import read_trainable

_PATHS = ("path", "megatron", "hf_path", "train", "data", "held_out", "run_dir", "resume")
"""Last names of the settings that hold a path."""
_MODEL_FILES = "a directory with config.json, *.safetensors and tokenizer files"


@dataclass
class Inputs:
    """Collect what the inputs say: the model's shape, the first training record, and findings."""

    config: RunConfig
    files: Files
    fine: Callable[..., bool]  # whether no value below the given paths is known to be wrong
    shipped_models: Path | None
    before: bool = True  # the run, which reads all of the data itself, and asks servers
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    shape: ModelShape | None = None
    shapes: dict[str, ModelShape] = field(default_factory=dict)  # of roles whose model is another one
    shapeless: set[str] = field(default_factory=set)  # roles whose model is another one, which is not here
    models: dict[str, Path] = field(default_factory=dict)  # config.json by role, where one is here
    preview: DataPreview | None = None
    templated: dict[str, bool] = field(default_factory=dict[str, bool])  # by settings that are not stated
    wanted: dict[str, bool] = field(default_factory=dict[str, bool])  # by data set: takes the chat template
    tokens: Tokens | None = None
    reading: Reading = field(default_factory=Reading)

    @cached_property
    def template(self) -> str | None:
        """Return the source of the model's chat template, None where there is no model that can be read."""
        path = Path(self.config.model.path)
        return template_source(chat_templates(path)) if self.fine("model.path") and path.is_dir() else None

    def __post_init__(self) -> None:
        if not self.before:
            self.reading.left = 0
        elif self.fine("model.path"):
            self.tokens = Tokens(Path(self.config.model.path))


def check_paths(config: RunConfig) -> Iterator[UserError]:
    """Return the paths that no file can have, before anything looks for one."""
    stated = [
        (where, path)
        for where, value in flatten(config).items()
        if where.rpartition(".")[2] in _PATHS
        for path in (value if isinstance(value, tuple) else [value])
    ]
    for where, value in stated:
        if not isinstance(value, str):
            continue
        try:
            os.lstat(value)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # whether something is missing, or in the way, is said where it is read
        except (OSError, ValueError) as error:
            shown = value if len(value) <= 60 else f"{value[:60]}... ({len(value):,} characters)"
            yield UserError(
                f"{where} cannot be a path",
                where=where,
                expected="a path that this system takes",
                got=f"{shown!r}: {getattr(error, 'strerror', None) or error}",
                fix=f"correct {where}",
            )


def check_attention(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a stated attention whose package is not on this machine."""
    if config.model.attention != "transformer_engine" or has_transformer_engine():
        return
    yield UserError(
        "Transformer Engine is not installed on this machine, or not its extension of PyTorch",
        where="model.attention",
        expected="the package transformer_engine[pytorch] where the run is started",
        got="transformer_engine",
        fix="install it (pip install transformer_engine[pytorch]), or set model.attention=torch, "
        "whose activations take more memory",
    )


def _check_reward(check: Inputs) -> None:
    reward, first = check.config.reward, check.preview.first if check.preview else None
    errors = [*check_reward(reward), *check_servers(reward)]
    if reward.code is not None and first is not None:
        try:
            read_tests(first.get(check.config.data.ground_truth_field))
        except ValueError as error:
            errors.append(
                UserError(
                    "the ground truth of the first record holds no tests",
                    where="reward.code",
                    expected="a list of {stdin, stdout}, {call, returns} or 'assert f(x) == y'",
                    got=str(error),
                    fix="correct the data, or name the field that holds tests in data.ground_truth_field",
                )
            )
    check.errors.extend(errors)
    if check.before and not check.files.absent and not errors:
        rollout = check.config.rollout
        urls, health_path = (), None
        if not rollout.capabilities.in_process and not list(check_engine_servers(rollout)):
            urls, health_path = rollout.server.urls, ENGINES[rollout.engine].health_path
        check.warnings.extend(silent_servers(reward, urls, health_path))


def check_inputs(check: Inputs) -> None:
    """Fill in what the inputs say."""
    config = check.config

    _check_models(check)
    _check_data(check)
    if check.fine("evaluation", "checkpoint"):
        check.errors.extend(best_errors(config))

    if config.job == TRAIN and check.fine("reward"):
        _check_reward(check)
        if check.before and check.fine("evaluation.sets"):
            check.errors.extend(function_errors(config))
    _check_containment(check)
    _check_environment(check)
    check.errors.extend(check_not_hidden("rollout.vllm", config.rollout.vllm))

    if check.fine("run_dir"):
        check.errors.extend(_run_dir(Path(config.run_dir)))
    if config.job == TRAIN and check.fine("checkpoint.resume", "run_dir", "model.path"):
        check.errors.extend(resume_errors(config))


def _check_models(check: Inputs) -> None:
    """Check the model of the run, its provider, and the models of roles that name another."""
    config = check.config
    if check.fine("model.path"):
        check.shape = _model(check, config.model.path, "model.path")
        if config.job == TRAIN and check.fine("rollout.stop", "rollout.sampling_profiles"):
            check.errors.extend(stop_errors(Path(config.model.path), config.rollout))
    provided = config.model.provider is not None and check.shape is not None
    actor = read_pretrained(check.models["actor"]) if provided else None
    check.errors.extend(provider_errors(config.model, actor))
    for role, path in stated_models(config).items():
        if check.fine(role if role.startswith("reward.") else f"{role}.path"):  # a name may be wrong itself
            _same_vocabulary(check, path, role)


def _check_data(check: Inputs) -> None:
    """Check the records of training, of evaluation sets and of stages."""
    config = check.config
    limit = config.data.max_prompt_tokens
    if config.data.train is not None and check.fine(
        "data.prompt_field", "data.ground_truth_field", "data.train"
    ):
        reader = RecordReader(
            config.data, "data.train", consumers=prompt_consumers(config), template=check.template
        )
        check.preview = _look(check, DataSet(config.data.train, reader, limit))
    for name, described in config.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        if check.fine("data.prompt_field", "data.ground_truth_field", where):
            data = fields_of(config.data, described, where)
            consumers = prompt_consumers(config, name)
            reader = RecordReader(data, f"{where}.data", consumers=consumers, template=check.template)
            _look(check, DataSet(described.data, reader, limit))
            check.errors.extend(evaluation_set_errors(name, described))
    if config.rollout.environment is not None:
        check.errors.extend(_other_kinds(check))
    for plan in stage_plans(config):
        _check_stage_data(check, plan)
    if check.tokens is not None:
        check.tokens.close()


def _check_containment(check: Inputs) -> None:
    """Check the limits of every section whose code runs contained, and what the kernel enforces of them."""
    sections = contained_sections(check.config)
    contained = {where: limits for where, limits in sections.items() if check.fine(where)}
    errors = [
        error for where, limits in contained.items() for error in check_limits(where, limits, check.files)
    ]
    check.errors.extend(errors)

    # A run reports on its own processes.
    if check.before and not check.files.absent and not errors:
        check.warnings.extend(check_enforced(contained))


def _check_environment(check: Inputs) -> None:
    environment = check.config.rollout.environment
    if check.config.job != TRAIN or environment is None or not check.fine("rollout.environment"):
        return

    hidden = check_not_hidden("rollout.environment", environment.settings)
    check.errors.extend(hidden or environment_errors(environment))
    check.errors.extend(check_tool_parser(environment.tool_parser))


def _check_stage_data(check: Inputs, plan: StagePlan) -> None:
    """Check the data sets of a stage, whose records hold the prompt and each response."""
    settings = {name: f"{plan.where}.{name}" for name in plan.settings.RESPONSES}
    responses = {getattr(plan.settings, name): where for name, where in settings.items()}
    for name in ("data", "held_out"):
        path, where = getattr(plan.settings, name), f"{plan.where}.{name}"
        if path is not None and check.fine("data.prompt_field", where, *settings.values()):
            data = fields_of(check.config.data, plan.settings, plan.where)
            every_turn = plan.settings.every_turn
            described = DataSet(
                path,
                RecordReader(data, where, responses, every_turn, template=check.template),
                plan.settings.max_row_tokens or longest_row(check.config),
                f"{plan.where}.max_row_tokens",
            )
            preview = _look(check, described)
            if name == "data" and preview is not None and preview.count is not None:
                check.warnings.extend(repeated_records(plan, preview.count))


def _model(check: Inputs, path: str, where: str) -> ModelShape | None:
    shipped = _shipped(check.shipped_models, Path(path))
    role = "actor" if where == "model.path" else role_of(where.removesuffix(".path"))
    file = Path(path) / "config.json" if Path(path).is_dir() else shipped
    if file is not None and file.is_file():
        check.models[role] = file
    model = _model_files(Path(path), where, check.files, shipped)
    if model is not None:
        check.errors.extend(_output_errors(model, where, check.config))
    return None if model is None else model.shape


def _model_files(path: Path, where: str, files: Files, shipped: Path | None) -> PretrainedModel | None:
    """Check a Hugging Face checkpoint and return its model.

    ``shipped`` is a config.json to take the sizes from where the checkpoint is not on this machine.
    """
    if not path.is_dir():
        if path.is_file():
            files.errors.append(
                UserError(
                    "the model path is a file",
                    where=where,
                    expected=_MODEL_FILES,
                    got=str(path),
                    fix="name the directory that holds the checkpoint",
                )
            )
            return None
        download = f"{download_command(str(path))}, or correct the path"
        files.miss(path, f"the model directory {path} does not exist", where, _MODEL_FILES, download)
        return read_trainable(shipped, files.errors) if shipped is not None and shipped.is_file() else None
    config, model = path / "config.json", None
    if config.is_file():
        model = check_model_config(config, files)
    else:
        files.miss(
            config,
            "the model has no config.json",
            where,
            "a Hugging Face checkpoint directory",
            "name the directory that holds config.json",
        )
    check_weights(path, where, files, model)
    check_tokenizer(path, where, files, None if model is None else model.shape.vocab)
    return model


def _judges(config: RunConfig, role: str) -> bool:
    """Say whether the model of the role at a path is a reward model that is taken as it is."""
    section = role_sections(config).get(role)
    return isinstance(section, RewardModelConfig) and section.training is None


def _output_errors(model: PretrainedModel, where: str, config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a policy without a vocabulary, or of a judge without a head of one number."""
    role = where.removesuffix(".path")
    policy = where == "model.path" or spec_at(role).head == VOCABULARY
    if model.shape.scalar_head if policy else _judges(config, role) and not model.shape.scalar_head:
        family = model.family
        yield UserError(
            f"{where} is a reward model, which gives no next tokens"
            if policy
            else f"{where} is a policy, which gives no scores",
            where=where,
            expected=family.architecture if policy else family.scalar_architecture,
            got=model.shape.name,
            fix="name the checkpoint of a policy"
            if policy
            else f"name the checkpoint of a reward model, or train one: {role}.training",
        )


def _shipped(folder: Path | None, path: Path) -> Path | None:
    """Return the config.json that comes with the configurations for a model of this name."""
    if folder is None:
        return None
    names = (Path(path.parent.name) / path.name, Path(path.name))
    files = (folder / name / "config.json" for name in names)
    return next((file for file in files if file.is_file()), None)


def _same_vocabulary(check: Inputs, path: str | None, role: str) -> None:
    """Check the files of the model of the role at a path, which reads the actor's tokens."""
    if path is None or (path == starting_model(check.config) and not _judges(check.config, role)):
        return  # the actor's own model, or what the run makes of it
    where = f"{role}.path"
    shape, actor = _model(check, path, where), check.shape
    if shape is None:
        check.shapeless.add(role_of(role))
        return
    check.shapes[role_of(role)] = shape
    if actor is None or shape.vocab == actor.vocab:
        return
    check.errors.append(
        UserError(
            f"the {role} has another vocabulary than the model",
            where=where,
            expected=f"{actor.vocab} tokens",
            got=f"{shape.vocab} tokens",
            fix=f"use a {role} of the same model family and tokenizer",
        )
    )


def _look(check: Inputs, described: DataSet) -> DataPreview | None:
    """Check a data set, and whether its prompts become tokens; return what was read."""
    preview = check_data(described, check.files, check.reading)
    if preview is None or preview.first is None:
        return preview
    data, first, path = described.data, preview.first, Path(check.config.model.path)
    template, tools = data.setting_of("chat_template"), data.tools_field
    messages = isinstance(first.get(data.prompt_field), list)
    if data.chat_template is None:
        check.templated.setdefault(template, messages)
    if tools is not None and tools not in first:
        check.warnings.append(
            UserError(
                f"the first record of {described.where} has no tools",
                where=data.setting_of("tools_field"),
                expected=f"a list in the field `{tools}` where a record has tools",
                got=f"fields {', '.join(first)}",
                fix=f"correct {data.setting_of('tools_field')}, if no record has them",
            )
        )
    wants = check.wanted[described.where] = messages if data.chat_template is None else data.chat_template
    if wants and check.fine(template, "model.path") and path.is_dir() and not has_chat_template(path):
        check.errors.append(
            UserError(
                "the tokenizer has no chat template",
                where=template,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                got=f"neither in {path}, and prompts of {described.where} that need one",
                fix=f"use an instruction-tuned model, or prompts that are text with {template}=false",
            )
        )
    elif check.tokens is not None and check.fine("data.max_prompt_tokens", "rollout", described.limited_by):
        check.tokens.look(described, preview, check.config.data.over_long, check.files)
    return preview


def _other_kinds(check: Inputs) -> Iterator[UserError]:
    """Yield the errors of sets that an environment would go on with otherwise than with the training data."""
    wanted = check.wanted.get("data.train")
    for where, other in check.wanted.items():
        if wanted is not None and where.startswith("evaluation.") and other is not wanted:
            setting = f"{where.removesuffix('.data')}.chat_template={str(wanted).lower()}"
            words = {True: "prompts that go through the chat template", False: "prompts of plain text"}
            yield UserError(
                "an environment goes on with all conversations in one way, and the data has two",
                where=where,
                expected=f"{words[wanted]}, as data.train",
                got=words[other],
                fix=f"set {setting}, or convert the set",
            )


def _run_dir(path: Path) -> Iterator[UserError]:
    """Yield the error of a run folder that cannot be made or written in: a folder is made in its place."""
    place, folder, first = path, RunFolder(path), path.parts[0] if path.parts else ""
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    below = (place, *folder.directories(), folder.stages, folder.reward_models)
    problems = [f"{item} is no folder" for item in below if os.path.lexists(item) and not item.is_dir()]
    files = (folder.config, folder.metrics)
    problems += [f"{item} is no file" for item in files if os.path.lexists(item) and not item.is_file()]
    problems += [f"{first}: only a shell replaces it by a home"] if first.startswith("~") else []
    problem = problems[0] if problems else None
    if problem is None:
        try:
            with tempfile.TemporaryDirectory(prefix=".check.", dir=place) as probe:
                Path(probe, "file").write_bytes(b"x")
        except OSError as error:
            problem = f"nothing can be written in {place}: {error.strerror}"
    if problem is None:
        return
    yield UserError(
        "the run folder cannot be made",
        where="run_dir",
        expected="a directory, or a path where one can be made",
        got=problem,
        fix="choose another run_dir",
    )
