"""Rules on the checkpoint that a run resumes from, read from its meta.json before a model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.config.adapters import adapters_of, with_adapters
from megatron_rl.config.checkpoint_meta import (
    complete_checkpoints,
    latest_checkpoint,
    optimizer_kind,
    read_meta,
    require_layout,
    require_roles,
    require_same_model,
    require_same_properties,
    require_state_format,
)
from megatron_rl.config.derive import with_needed_roles
from megatron_rl.config.roles import learner_sections, role_of, spec_at
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.models import LoraConfig, OptimizerConfig
from megatron_rl.config.stage_plan import pending_stages
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import format_adapters
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained

_DAMAGED_META = (KeyError, TypeError, AttributeError)
"""Exceptions that reading a meta.json raises if it lacks entries or has malformed entries."""


class _ResumedCheckpoint(NamedTuple):
    """Checkpoint to resume from, and the optimizer settings of the trained roles that it must contain."""

    checkpoint: Path
    optimizers: dict[str, OptimizerConfig]


def resume_errors(config: RunConfig) -> list[UserError]:
    """Return the error for a checkpoint to resume from that is missing, broken or saved from another model.

    ``checkpoint.resume: auto`` resumes from the newest readable checkpoint, so broken checkpoints are an
    error only if none is readable.
    """
    resume = config.checkpoint.resume
    run_checkpoints = RunFolder(config.run_dir).checkpoints
    if resume == "never":
        return []

    # Newest first: skip damaged checkpoints as long as an older one can be read.
    if resume == "auto":
        unreadable_errors: list[UserError] = []
        for path in reversed(complete_checkpoints(run_checkpoints)):
            is_readable, error = _check_resumable(path, config)
            if is_readable:
                return [] if error is None else [error]
            if error is not None:
                unreadable_errors.append(error)
        return unreadable_errors[:1]

    # An explicit path must itself be readable.
    if Path(resume).is_dir():
        _, error = _check_resumable(Path(resume), config)
        return [] if error is None else [error]

    # The folder does not exist: suggest the newest checkpoint of the run.
    newest_checkpoint = latest_checkpoint(run_checkpoints)
    fix = "write auto, or a directory that exists"
    if newest_checkpoint is not None:
        fix = f"the newest of this run is {newest_checkpoint}"
    return [
        UserError(
            "the checkpoint to resume from does not exist",
            where="checkpoint.resume",
            expected="auto, never, or the directory of a checkpoint",
            got=repr(resume),
            fix=fix,
        )
    ]


def _check_resumable(path: Path, config: RunConfig) -> tuple[bool, UserError | None]:
    """Return whether a checkpoint's meta.json is readable, and the error that prevents resuming, or None."""
    try:
        meta = read_meta(path)
    except UserError as error:
        return False, replace(error, got=error.got or f"no such file in {path}")
    try:
        model = read_pretrained(Path(config.model.path) / "config.json")
    except UserError:
        return True, None  # reported by the rules on the model

    try:
        # The checkpoint needs a state of this format, the same model, and a step within the run.
        require_state_format(path, meta)
        require_same_model(path, meta["model"], model)
        if meta["step"] > config.steps:
            raise UserError(
                "the checkpoint is beyond the last step of the run",
                where="steps",
                expected=f"{meta['step']} or more, to resume from {path}",
                got=str(config.steps),
                fix="raise steps, name an earlier checkpoint in checkpoint.resume, or set another run_dir",
            )
    except UserError as error:
        return True, error
    except _DAMAGED_META as error:
        return False, UserError(
            "the checkpoint's meta.json is incomplete",
            where=str(path),
            expected="a meta.json that a finished save has written",
            got=f"{type(error).__name__}: {error}",
            fix="resume from another checkpoint, or checkpoint.resume=never with a new run_dir",
        )
    return True, None


def checkpoint_mismatch_errors(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shape: ModelShape | None,
    algorithm: Algorithm | None,
) -> list[UserError]:
    """Return the errors for trained roles that the resumed checkpoint lacks or has with different settings.

    Adapters, optimizers and dtypes must match the checkpoint, and its optimizer shards must fit ``layouts``.
    Without the actor's ``shape`` or the ``algorithm``, rules that need them are skipped.
    """
    if config.checkpoint.resume == "never":
        return []

    # Fill in default sections of roles that the algorithm needs, and derived settings of adapters: meta.json
    # contains these values too.
    config = with_adapters(with_needed_roles(config, algorithm, {}), shape, {})
    adapters = adapters_of(config)

    errors: list[UserError] = []
    for checkpoint, optimizers in _checkpoints_to_resume(config, algorithm):
        try:
            meta = read_meta(checkpoint)
        except UserError:
            continue  # reported by `resume_errors`
        try:
            require_roles(checkpoint, meta, optimizers)
            for name, optimizer in optimizers.items():
                # Optimizer shards can only be read on the layout that wrote them.
                role = role_of(name)
                if role in layouts:
                    require_layout(checkpoint, name, meta, asdict(layouts[role]))

                properties = _role_properties(config.model.dtype, optimizer, adapters.get(name))
                require_same_properties(checkpoint, name, meta["roles"][name], properties)
        except UserError as error:
            errors.append(error)
        except _DAMAGED_META:
            continue  # reported by `resume_errors`
    return errors


def _checkpoints_to_resume(config: RunConfig, algorithm: Algorithm | None) -> Iterator[_ResumedCheckpoint]:
    """Yield the checkpoints to resume from, with the optimizer settings of their roles.

    A training job consists of stages, such as supervised fine-tuning, and of reinforcement learning after
    them. If there is a checkpoint of the reinforcement learning, only this checkpoint is yielded. Otherwise
    the newest checkpoint of each unfinished stage is yielded.
    """
    folder = RunFolder(config.run_dir)
    if config.job == TRAIN and algorithm is not None:
        resume = config.checkpoint.resume
        checkpoint = Path(resume)
        if resume == "auto":
            checkpoint = latest_checkpoint(folder.checkpoints)
        if checkpoint is not None:
            optimizers: dict[str, OptimizerConfig] = {}
            for path, section in learner_sections(config).items():
                spec = spec_at(path)
                if spec.need is None or spec.is_needed_by(algorithm):
                    optimizers[path] = section.optimizer

            # Stages do not run again once reinforcement learning has started.
            yield _ResumedCheckpoint(checkpoint, optimizers)
            return

    for plan in pending_stages(config):
        checkpoint = latest_checkpoint(folder.stage_checkpoints(plan.name))
        if checkpoint is not None:
            yield _ResumedCheckpoint(checkpoint, {plan.role: plan.settings.optimizer})


def _role_properties(dtype: str, optimizer: OptimizerConfig, lora: LoraConfig | None) -> dict[str, Any]:
    """Return optimizer, dtype and adapters of a trained role, in the form of a checkpoint's meta.json.

    Adapters whose alpha or targets are not derived yet are omitted.
    """
    properties: dict[str, Any] = {
        "optimizer": optimizer_kind(optimizer.name, optimizer.distributed),
        "dtype": dtype,
    }
    if lora is None:
        properties["adapters"] = None
    elif lora.alpha is not None and lora.targets is not None:
        properties["adapters"] = format_adapters(lora.rank, lora.alpha, lora.targets)
    return properties
