"""Rules on models from Megatron-LM: weights in one of its checkpoints, and the user's model provider.

For a Megatron checkpoint this module writes a folder that transformers and vLLM can open: config.json, the
tokenizer, and a pointer to the checkpoint in place of weights. The folder becomes the model's path in the
configuration, so no later code treats such a model differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.check.model.tokenizer import read_vocabulary_size
from megatron_rl.check.rewards import FunctionRef, check_function
from megatron_rl.config.roles import explicit_model_paths, role_of, with_role_sections
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ModelConfig
from megatron_rl.config.source import Origin
from megatron_rl.errors import UserError, UserErrors, requirement_error, single_errors
from megatron_rl.interop.megatron_lm.arguments import contradiction_errors, derive_arguments, derive_config
from megatron_rl.interop.megatron_lm.checkpoint import (
    POINTER,
    MegatronCheckpoint,
    is_megatron_checkpoint,
    read_checkpoint,
    read_pointer,
)
from megatron_rl.shapes.pretrained import (
    TOKENIZER_FILES,
    PretrainedModel,
    parse_pretrained,
    read_json,
    tokenizer_files,
)
from megatron_rl.shapes.quantized import remove_quantization

ErrorsByKey = dict[str, list[UserError]]
"""Configuration key -> errors that make its value invalid."""

REQUIRED_ARGUMENTS = ("pre_process", "post_process")
"""Parameters that a model provider must have: whether the stage embeds, and whether it returns logits."""

PROVIDER_ARGUMENTS = (*REQUIRED_ARGUMENTS, "vp_stage", "config", "pg_collection", "args")
"""Arguments that a model provider is called with; optional ones only if it has a parameter of that name."""


def with_megatron_models(
    config: RunConfig,
    invalid_keys: Collection[str] = (),
    *,
    allow_missing: bool = False,
) -> tuple[RunConfig, Mapping[str, Origin], ErrorsByKey]:
    """Replace the path of every Megatron checkpoint by a folder that transformers and vLLM can load.

    Writes the folders below ``run_dir`` unless they are complete. ``invalid_keys`` are the keys that already
    have errors. With ``allow_missing``, a checkpoint that does not exist is skipped without an error.

    Returns:
        The configuration with the new paths, the origins of the replaced paths by key, and the errors.
    """
    errors: ErrorsByKey = {}

    # Settings that need a Megatron checkpoint.
    if "model.megatron" not in invalid_keys:
        if config.model.hf_path is not None and config.model.megatron is None:
            errors["model.hf_path"] = [_requires_megatron_error("model.hf_path", config.model.hf_path)]
        if config.model.resume_optimizer:
            errors["model.resume_optimizer"] = _resume_optimizer_errors(config)

    origins: dict[str, Origin] = {}
    folders: dict[str, Path] = {}
    for section, path in _find_megatron_checkpoints(config).items():
        if f"{section}.path" in invalid_keys:
            continue
        if allow_missing and not Path(path).exists():
            continue

        # The folder for the actor is model.path, and the folders for other roles are in the run folder.
        is_actor = section == "model"
        if is_actor:
            key = "model.megatron"
            folder = Path(config.model.path)
        else:
            key = f"{section}.path"
            folder = RunFolder(config.run_dir).megatron_model(role_of(section))

        try:
            checkpoint = _write_model_folder(config, Path(path), key, folder)
        except UserError as error:
            errors[f"{section}.path"] = list(single_errors(error))
            continue

        folders[section] = folder
        reason = f"written for {checkpoint.path}"
        if is_actor and config.model.resume_optimizer:
            reason += f"; {checkpoint.describe_optimizer()}"
        origins[f"{section}.path"] = Origin("derived", reason)

    # Exported checkpoints: the folder that the run writes in Megatron-LM's format.
    export_error = _export_error(config, folders)
    if export_error is not None:
        errors["checkpoint.megatron"] = [export_error]
    return _with_model_paths(config, folders), origins, errors


def provider_errors(settings: ModelConfig, model: PretrainedModel | None) -> Iterator[UserError]:
    """Yield the errors for ``model.provider`` and ``model.weights``, the user's own model code.

    ``model`` is the model in config.json, or None if not available; rules that need it are then skipped.
    """
    if settings.provider is None:
        if settings.weights is not None:
            fix = "set model.provider, or remove model.weights"
            yield requirement_error(
                "model.weights", settings.weights, "model.provider", got="no value", fix=fix
            )
        return

    # The provider's signature must fit its call.
    optional_arguments = PROVIDER_ARGUMENTS[len(REQUIRED_ARGUMENTS) :]
    provider = FunctionRef(
        settings.provider,
        "model.provider",
        accepts_group=False,
        arguments=REQUIRED_ARGUMENTS,
        optional_arguments=optional_arguments,
        passes_all=True,
    )
    yield from check_function(provider)
    if settings.weights is not None:
        # `model.weights` names a mapping of weight names in the user's code, which must exist.
        weight_table = FunctionRef(
            settings.weights,
            "model.weights",
            accepts_group=False,
            arguments=(),
            optional_arguments=(),
            passes_all=True,
        )
        yield from check_function(weight_table)

    if model is None:
        return
    try:
        derive_arguments(model)
    except UserError as error:
        fix = "remove model.provider; the run then builds Megatron's GPTModel"
        yield replace(error, where="model.provider", fix=fix)


def _find_megatron_checkpoints(config: RunConfig) -> dict[str, str]:
    """Return the path of each configured Megatron checkpoint: section -> path.

    The actor's section is ``model``.
    """
    # The actor first: other roles may use the tokenizer in its folder.
    checkpoints: dict[str, str] = {}
    if config.model.megatron is not None:
        checkpoints["model"] = config.model.megatron
    for section, path in explicit_model_paths(config).items():
        if path is not None and is_megatron_checkpoint(path):
            checkpoints[section] = path
    return checkpoints


def _with_model_paths(config: RunConfig, folders: Mapping[str, Path]) -> RunConfig:
    """Return the configuration with new model paths; ``folders`` maps sections to their new ``path``."""

    def replace_path(name: str, section: Any) -> Any:
        if name not in folders:
            return section
        return replace(section, path=str(folders[name]))

    return with_role_sections(config, replace_path)


def _export_error(config: RunConfig, written_folders: Mapping[str, Path]) -> UserError | None:
    """Return the error for the folder ``checkpoint.megatron``, or None for a valid or unset folder.

    The run exports checkpoints in Megatron-LM's format to this folder. ``written_folders`` has the roles that
    start from a Megatron checkpoint: section of the role -> Hugging Face folder that was written for it.
    """
    export_folder = config.checkpoint.megatron
    if export_folder is None:
        return None

    # A resumed run may have written earlier checkpoints into the folder.
    is_resumed = RunFolder(config.run_dir).has_begun() and config.checkpoint.resume != "never"
    if is_megatron_checkpoint(export_folder) and not is_resumed:
        return UserError(
            "checkpoint.megatron contains checkpoints of another run",
            where="checkpoint.megatron",
            expected="a folder that is new, or that this run has written to",
            got=export_folder,
            fix="choose another folder: older iterations in it are removed, by checkpoint.keep",
        )

    # Megatron-LM's arguments cannot describe every architecture.
    file = written_folders.get("model", Path(config.model.path)) / "config.json"
    try:
        model = parse_pretrained(read_json(file), str(file))
    except UserError:
        return None  # reported by the rules on the model
    try:
        derive_arguments(model)
    except UserError as error:
        return replace(error, where="checkpoint.megatron", fix="remove checkpoint.megatron")
    return None


def _write_model_folder(
    config: RunConfig,
    checkpoint_path: Path,
    key: str,
    folder: Path,
) -> MegatronCheckpoint:
    """Write a Hugging Face folder for a Megatron checkpoint: config.json, tokenizer, and a pointer file.

    ``folder`` is the folder that is written, and ``key`` the configuration key that names the checkpoint.
    Returns the checkpoint. Raises UserError or UserErrors for a folder with other files, and for a checkpoint
    that does not fit its model.
    """
    is_actor = key == "model.megatron"
    folder_key = key
    if is_actor:
        folder_key = "model.path"
    _require_no_foreign_files(folder, folder_key)
    checkpoint = read_checkpoint(_find_starting_checkpoint(config, checkpoint_path, folder), key)

    # Use the config.json in the tokenizer's folder, else derive one from the checkpoint's arguments.
    tokenizer_folder = _find_tokenizer_folder(config, checkpoint, key)
    hf_config: Mapping[str, Any] | None = None
    errors: list[UserError] = []
    if tokenizer_folder is not None and (tokenizer_folder / "config.json").is_file():
        config_file = tokenizer_folder / "config.json"
        # The tokenizer's folder may have quantised weights, a Megatron checkpoint has none.
        hf_config = remove_quantization(read_json(config_file))
        model = parse_pretrained(hf_config, str(config_file))
        errors = contradiction_errors(checkpoint.arguments, model, key, str(config_file))

    # The model of another role may differ in size from the config.json in the tokenizer's folder.
    if hf_config is None or (errors and not is_actor):
        vocabulary_size = _fallback_vocabulary_size(config, is_actor, tokenizer_folder)
        hf_config = derive_config(checkpoint.arguments, key, vocabulary_size)
        errors = []

    # The checkpoint must match the model: its parameters, optimizer state, and complete files.
    shape = parse_pretrained(hf_config, key).shape
    if not errors:
        _, parameter_errors = checkpoint.locate_parameters(shape)
        errors += parameter_errors
    if is_actor and config.model.resume_optimizer and not errors:
        errors += checkpoint.optimizer_errors(shape, "model.resume_optimizer")
    errors += checkpoint.file_errors()
    if errors:
        raise UserErrors(errors)

    # Write the pointer first: it marks a partly written folder as written by a run.
    pointer_values = {
        "checkpoint": str(checkpoint.path.resolve()),
        "iteration": checkpoint.iteration,
        "arguments": dict(checkpoint.arguments),
    }
    contents = {POINTER: _json_bytes(pointer_values), "config.json": _json_bytes(hf_config)}
    if tokenizer_folder is not None:
        for name in tokenizer_files(tokenizer_folder):
            contents[name] = (tokenizer_folder / name).read_bytes()

    try:
        _write_files(folder, contents)
    except OSError as error:
        writable_key = key
        if is_actor:
            writable_key = "run_dir"
        raise UserError(
            "the folder of the Megatron model cannot be written",
            where=writable_key,
            expected="a directory that can be made and written",
            got=str(error),
            fix="choose another run_dir, or set model.path",
        ) from error
    return checkpoint


def _require_no_foreign_files(folder: Path, key: str) -> None:
    """Raise UserError if the output folder of a converted Megatron checkpoint contains unrelated files.

    A folder from an earlier conversion is allowed.
    """
    if (folder / POINTER).is_file() or not folder.is_dir():
        return
    # Another rank may be writing the first file at this moment.
    if all(file.suffix == ".part" for file in folder.iterdir()):
        return
    raise UserError(
        "the folder for the Megatron checkpoint's model contains other files",
        where=key,
        expected="a folder that is new or empty, or was written before for a Megatron checkpoint",
        got=str(folder),
        fix="remove model.path; name a folder with tokenizer and config.json in model.hf_path",
    )


def _find_starting_checkpoint(config: RunConfig, checkpoint_folder: Path, model_folder: Path) -> Path:
    """Return the checkpoint to start from: ``checkpoint_folder``, or an iteration in this folder.

    A resumed run keeps the iteration that it began with, even if newer iterations exist. The pointer in
    ``model_folder`` names this iteration (`read_pointer`).
    """
    if config.checkpoint.resume == "never" or not RunFolder(config.run_dir).has_begun():
        return checkpoint_folder

    pointer = read_pointer(model_folder) or {}
    recorded_checkpoint = Path(str(pointer.get("checkpoint", "")))
    if recorded_checkpoint.parent == checkpoint_folder.resolve() and recorded_checkpoint.is_dir():
        return recorded_checkpoint
    return checkpoint_folder


def _find_tokenizer_folder(config: RunConfig, checkpoint: MegatronCheckpoint, key: str) -> Path | None:
    """Return the folder with the model's tokenizer; raise UserError for an actor without a tokenizer.

    An explicit ``model.hf_path`` is this folder. Without it, the actor uses the tokenizer folder that the
    checkpoint's arguments name, and other roles use the actor's model folder. Returns None for such a role if
    the actor's model folder is not written yet.
    """
    if config.model.hf_path is not None:
        folder = Path(config.model.hf_path)
        if folder.is_dir():
            return folder
        raise UserError(
            "the directory with the tokenizer does not exist",
            where="model.hf_path",
            expected="a directory with tokenizer files; a config.json in it describes the model",
            got=f"no directory {folder}",
            fix="correct the path",
        )

    if key != "model.megatron":
        actor_folder = Path(config.model.path)
        if not actor_folder.is_dir():
            return None
        return actor_folder

    # Of Megatron-LM's tokenizer types, only HuggingFaceTokenizer has a folder that transformers can load.
    tokenizer_type = checkpoint.arguments.get("tokenizer_type")
    tokenizer_model = checkpoint.arguments.get("tokenizer_model")
    if tokenizer_type == "HuggingFaceTokenizer" and Path(str(tokenizer_model)).is_dir():
        return Path(str(tokenizer_model))

    got = f"nothing; the checkpoint was trained with {tokenizer_type}"
    if tokenizer_model:
        got += f" of {tokenizer_model}"
    raise UserError(
        "the Megatron checkpoint comes without a tokenizer",
        where="model.hf_path",
        expected="a directory with the tokenizer's files, as transformers reads them",
        got=got,
        fix="set model.hf_path",
    )


def _fallback_vocabulary_size(config: RunConfig, is_actor: bool, tokenizer_folder: Path | None) -> int | None:
    """Return the vocabulary size for a Megatron-LM checkpoint that was saved without it.

    For the actor, this is the size of its tokenizer. A role that is not the actor has the actor's vocabulary,
    so the size is read from the actor's config.json, if that file exists. Returns None if no file has a size.
    """
    actor_config = Path(config.model.path) / "config.json"
    if not is_actor and actor_config.is_file():
        return read_json(actor_config).get("vocab_size")
    if tokenizer_folder is None:
        return None
    return read_vocabulary_size(tokenizer_folder)


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    """Encode values as the content of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write ``contents`` (name -> content) into a folder, and remove files of a previous tokenizer.

    All ranks of a job may call this at the same time: each process writes a file under a unique temporary
    name and renames it, which is atomic.
    """
    # Leftover files of another tokenizer would be loaded together with the new files.
    folder.mkdir(parents=True, exist_ok=True)
    for name in {*TOKENIZER_FILES} - {*contents}:
        (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        # Do not replace unchanged files, which another rank may be reading.
        file = folder / name
        if file.is_file() and file.read_bytes() == content:
            continue
        file.parent.mkdir(exist_ok=True)

        temporary_file = folder / f"{name}.{os.getpid()}.part"
        temporary_file.write_bytes(content)
        os.replace(temporary_file, file)


def _requires_megatron_error(key: str, value: str) -> UserError:
    """Return the error for a setting, ``key: value``, that has no effect without ``model.megatron``."""
    fix = "set model.megatron, or set only model.path to a Hugging Face model"
    condition = "model.megatron, the checkpoint with the weights"
    return requirement_error(key, value, condition, got="no value", fix=fix)


def _resume_optimizer_errors(config: RunConfig) -> list[UserError]:
    """Return the errors for settings with which the actor cannot resume the checkpoint's Adam moments."""
    key = "model.resume_optimizer"
    if config.model.megatron is None:
        return [_requires_megatron_error(key, "true")]

    # The checkpoint has Adam's moments of all weights, which are only valid for exactly these weights.
    conflicts: dict[str, str] = {}
    if config.actor.optimizer.name != "adam":
        conflicts["actor.optimizer.name"] = config.actor.optimizer.name
    if config.actor.lora is not None:
        conflicts["actor.lora"] = "adapters"
    if config.sft is not None:
        conflicts["sft"] = "a stage before reinforcement learning"
    if config.preference is not None:
        conflicts["preference"] = "a stage before reinforcement learning"
    return [
        UserError(
            f"{conflict_key} is incompatible with the checkpoint's optimizer state",
            where=key,
            expected="Adam on all weights, starting from the checkpoint's",
            got=f"{conflict_key}: {got}",
            fix=f"remove {key} or {conflict_key}",
        )
        for conflict_key, got in conflicts.items()
    ]
