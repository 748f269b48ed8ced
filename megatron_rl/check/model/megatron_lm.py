"""Models whose weights lie in a Megatron-LM checkpoint: what does not fit, and the folder that points there.

The folder has what transformers and vLLM need, config.json and the tokenizer, and in the place of weights the
name of the Megatron checkpoint. It takes the place of the model's path in the configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.check.model.tokenizer import vocabulary_of
from megatron_rl.check.rewards.functions import Called, check_function
from megatron_rl.config.roles import role_of, stated_models, with_role_sections
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.starting_model import ModelConfig
from megatron_rl.config.source import Origin
from megatron_rl.errors import UserError, UserErrors, each
from megatron_rl.interop.megatron_lm.arguments import arguments_of, contradictions, derived
from megatron_rl.interop.megatron_lm.checkpoint import (
    POINTER,
    MegatronCheckpoint,
    is_megatron,
    pointer,
    read_checkpoint,
)
from megatron_rl.shapes.pretrained import (
    TOKENIZER_FILES,
    PretrainedModel,
    describe,
    read_json,
    tokenizer_files,
)

Refused = dict[str, list[UserError]]
"""Errors by the path of the setting that is then known to be wrong."""


def with_megatron_models(
    config: RunConfig, broken: Collection[str] = (), *, absent: bool = False
) -> tuple[RunConfig, Mapping[str, Origin], Refused]:
    """Return the configuration with a folder to load for every model that is a Megatron checkpoint.

    The folders are written below ``run_dir`` where they are not there yet. Also returns where the changed
    paths come from, and what does not fit, by the setting that it makes wrong. With ``absent`` a checkpoint
    that is not on this machine is left to the rules on missing files.
    """
    refused, origins = {}, {}
    if config.model.hf_path is not None and config.model.megatron is None and "model.megatron" not in broken:
        refused["model.hf_path"] = [_without_checkpoint("model.hf_path", config.model.hf_path)]
    if config.model.resume_optimizer and "model.megatron" not in broken:
        refused["model.resume_optimizer"] = _optimizer_errors(config)
    named = {"model": config.model.megatron, **_megatron_paths(config)}
    folders: dict[str, Path] = {}
    for section, path in named.items():
        if path is None or (absent and not Path(path).exists()) or f"{section}.path" in broken:
            continue
        where = "model.megatron" if section == "model" else f"{section}.path"
        role = "actor" if section == "model" else role_of(section)
        folder = RunFolder(config.run_dir).megatron_model(role)
        folder = Path(config.model.path) if section == "model" else folder
        try:
            checkpoint = _write(config, Path(path), where, folder)
        except UserError as error:
            refused[f"{section}.path"] = list(each(error))
            continue
        folders[section] = folder
        words = f"written for {checkpoint.path}"
        if section == "model" and config.model.resume_optimizer:
            words += f"; {checkpoint.optimizer_words()}"
        origins[f"{section}.path"] = Origin("derived", words)
    problem = _target_error(config, folders)
    if problem is not None:
        refused["checkpoint.megatron"] = [problem]
    return _with_paths(config, folders), origins, refused


def _target_error(config: RunConfig, folders: Mapping[str, Path]) -> UserError | None:
    """Return the error of a folder that is to take what the run writes for Megatron-LM."""
    target = config.checkpoint.megatron
    if target is None:
        return None
    begun = RunFolder(config.run_dir).has_begun() and config.checkpoint.resume != "never"
    if is_megatron(target) and not begun:
        return UserError(
            "checkpoint.megatron holds checkpoints of another run",
            where="checkpoint.megatron",
            expected="a folder that is new, or that this run has written to",
            got=target,
            fix="choose another folder: older iterations in it are removed, as checkpoint.keep says",
        )
    file = folders.get("model", Path(config.model.path)) / "config.json"
    try:
        model = describe(read_json(file), str(file))
    except UserError:
        return None  # the model's own check says so
    try:
        arguments_of(model)
    except UserError as error:
        return replace(error, where="checkpoint.megatron", fix="remove checkpoint.megatron")
    return None


def _megatron_paths(config: RunConfig) -> dict[str, str]:
    """Return the Megatron checkpoints that roles beside the actor name as their path, by section."""
    paths = stated_models(config).items()
    return {name: path for name, path in paths if path is not None and is_megatron(path)}


def _with_paths(config: RunConfig, folders: Mapping[str, Path]) -> RunConfig:
    def at_folder(name: str, section: Any) -> Any:
        return replace(section, path=str(folders[name])) if name in folders else section

    return with_role_sections(config, at_folder)


def _write(config: RunConfig, path: Path, where: str, folder: Path) -> MegatronCheckpoint:
    """Write the folder of a model; raises UserError or UserErrors for what does not fit."""
    policy = where == "model.megatron"
    if (
        not (folder / POINTER).is_file()
        and folder.is_dir()
        and any(file.suffix != ".part" for file in folder.iterdir())
    ):
        raise UserError(
            "the folder that is to be written for the Megatron checkpoint holds something else",
            where="model.path" if policy else where,
            expected="a folder that is new or empty, or was written before for a Megatron checkpoint",
            got=str(folder),
            fix="remove model.path; name a folder with tokenizer and config.json in model.hf_path",
        )
    checkpoint = read_checkpoint(_begun_with(config, path, folder), where)
    tokenizer = _tokenizer(config, checkpoint, where)
    stated = tokenizer / "config.json" if tokenizer is not None else None
    raw, errors = None, []
    if stated is not None and stated.is_file():
        raw = read_json(stated)
        errors = contradictions(checkpoint.arguments, describe(raw, str(stated)), where, str(stated))
    if raw is None or (errors and not policy):  # another role's model may be of another size
        vocabulary = _vocabulary(config, policy, tokenizer)
        raw, errors = derived(checkpoint.arguments, where, vocabulary), []
    shape = describe(raw, where).shape
    errors += checkpoint.parameters(shape)[1] if not errors else []
    if policy and config.model.resume_optimizer and not errors:
        errors += checkpoint.optimizer_errors(shape, "model.resume_optimizer")
    errors += checkpoint.file_errors()
    if errors:
        raise UserErrors(errors)
    facts = {"checkpoint": str(checkpoint.path.resolve()), "iteration": checkpoint.iteration}
    contents = {  # the pointer first: it says whose folder it is
        POINTER: _json({**facts, "arguments": dict(checkpoint.arguments)}),
        "config.json": _json(raw),
    }
    if tokenizer is not None:
        contents |= {name: (tokenizer / name).read_bytes() for name in tokenizer_files(tokenizer)}
    try:
        _fill(folder, contents)
    except OSError as error:
        raise UserError(
            "the folder of the Megatron model cannot be written",
            where="run_dir" if policy else where,
            expected="a directory that can be made and written",
            got=str(error),
            fix="choose another run_dir, or state model.path",
        ) from error
    return checkpoint


def _begun_with(config: RunConfig, path: Path, folder: Path) -> Path:
    """Return the iteration that a run which goes on began with, though there may be newer ones now."""
    if config.checkpoint.resume == "never" or not RunFolder(config.run_dir).has_begun():
        return path
    before = Path(str((pointer(folder) or {}).get("checkpoint", "")))
    return before if before.parent == path.resolve() and before.is_dir() else path


def _tokenizer(config: RunConfig, checkpoint: MegatronCheckpoint, where: str) -> Path | None:
    """Return the folder of the tokenizer; for roles that read the actor's tokens it may be the actor's."""
    if config.model.hf_path is not None:
        folder = Path(config.model.hf_path)
        if folder.is_dir():
            return folder
        raise UserError(
            "the directory with the tokenizer does not exist",
            where="model.hf_path",
            expected="a directory with tokenizer files, and config.json if it is not to be derived",
            got=f"no directory {folder}",
            fix="correct the path",
        )
    if where != "model.megatron":
        return Path(config.model.path) if Path(config.model.path).is_dir() else None
    named = checkpoint.arguments.get("tokenizer_model")
    if checkpoint.arguments.get("tokenizer_type") == "HuggingFaceTokenizer" and Path(str(named)).is_dir():
        return Path(str(named))
    kind = checkpoint.arguments.get("tokenizer_type")
    raise UserError(
        "the Megatron checkpoint comes without a tokenizer",
        where="model.hf_path",
        expected="a directory with the tokenizer's files, as transformers reads them",
        got=f"nothing; the checkpoint was trained with {kind}" + (f" of {named}" if named else ""),
        fix="set model.hf_path",
    )


def _vocabulary(config: RunConfig, policy: bool, tokenizer: Path | None) -> int | None:
    """Return the tokens that a model has, where its checkpoint's arguments do not say it."""
    actor = Path(config.model.path) / "config.json"
    if not policy and actor.is_file():
        return read_json(actor).get("vocab_size")
    return None if tokenizer is None else vocabulary_of(tokenizer)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _fill(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Have a folder hold these files; every rank of a job may do the same at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*TOKENIZER_FILES} - {*contents}:  # of another tokenizer, before
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        file = folder / name
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(exist_ok=True)
            aside = folder / f"{name}.{os.getpid()}.part"
            aside.write_bytes(content)
            os.replace(aside, file)


def _without_checkpoint(where: str, got: str) -> UserError:
    return UserError(
        f"{where} belongs to model.megatron, which is not set",
        where=where,
        expected="model.megatron, the checkpoint with the weights",
        got=got,
        fix="set model.megatron, or name a Hugging Face model in model.path alone",
    )


def _optimizer_errors(config: RunConfig) -> list[UserError]:
    """Return why the actor's optimizer is not one that the checkpoint's Adam could go on in."""
    where, actor = "model.resume_optimizer", config.actor
    if config.model.megatron is None:
        return [_without_checkpoint(where, "true")]
    others = {
        "actor.optimizer.name": actor.optimizer.name if actor.optimizer.name != "adam" else None,
        "actor.lora": "adapters" if actor.lora is not None else None,
        "sft": "a stage before" if config.sft is not None else None,
        "preference": "a stage before" if config.preference is not None else None,
    }
    return [
        UserError(
            f"{path} has the actor learn otherwise than the checkpoint's moments are for",
            where=where,
            expected="Adam on all of the weights, from those of the checkpoint",
            got=f"{path}: {got}",
            fix=f"remove {where} or {path}",
        )
        for path, got in others.items()
        if got is not None
    ]


ARGUMENTS = ("pre_process", "post_process", "vp_stage", "config", "pg_collection", "args")
"""What a provider is given of where it names them; the first two it must take."""


def provider_errors(settings: ModelConfig, model: PretrainedModel | None) -> Iterator[UserError]:
    """Yield what is wrong with `model.provider` and `model.weights`.

    ``model`` is what config.json describes, None where it is not known.
    """
    if settings.provider is None:
        if settings.weights is not None:
            yield UserError(
                "names of parameters are given, but no model provider",
                where="model.weights",
                expected="model.provider beside it",
                got=settings.weights,
                fix="set model.provider, or remove model.weights",
            )
        return
    stages, further = ARGUMENTS[:2], ARGUMENTS[2:]
    yield from check_function(Called(settings.provider, "model.provider", (), False, stages, further, False))
    if settings.weights is not None:
        yield from check_function(Called(settings.weights, "model.weights", (), False, (), (), False))
    try:
        if model is not None:
            arguments_of(model)
    except UserError as error:
        fix = "remove model.provider: Megatron's own GPTModel is built"
        yield replace(error, where="model.provider", fix=fix)
