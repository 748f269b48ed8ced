"""Check the checkpoint that a run goes on from, before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.config.adapters import adapters_of, with_adapters
from megatron_rl.config.checkpoint_meta import (
    check_same_model,
    checkpoints,
    latest,
    optimizer_kind,
    read_meta,
    require_layout,
    require_roles,
    require_same_build,
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
from megatron_rl.shapes.lora import adapters_in_words
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained


def resume_errors(config: RunConfig) -> list[UserError]:
    """Return the error of a checkpoint that is missing, broken or of another model.

    A broken one stops nothing while there is an older one to continue from.
    """
    resume, folder = config.checkpoint.resume, RunFolder(config.run_dir)
    if resume == "never":
        return []
    if resume == "auto":
        errors = []
        for path in reversed(checkpoints(folder.checkpoints)):
            readable, error = _resumable(path, config)
            if readable:
                return [error] if error is not None else []
            errors.append(error)
        return [error for error in errors[:1] if error is not None]
    if Path(resume).is_dir():
        error = _resumable(Path(resume), config)[1]
        return [error] if error is not None else []
    near = latest(folder.checkpoints)
    return [
        UserError(
            "the checkpoint to resume from does not exist",
            where="checkpoint.resume",
            expected="auto, never, or the directory of a checkpoint",
            got=repr(resume),
            fix=f"the newest of this run is {near}" if near else "write auto, or a directory that exists",
        )
    ]


def _resumable(path: Path, config: RunConfig) -> tuple[bool, UserError | None]:
    """Return whether a checkpoint says what it is of, and the error that stands against resuming from it."""
    try:
        meta = read_meta(path)
    except UserError as error:
        return False, replace(error, got=error.got or f"no such file in {path}")
    try:
        model = read_pretrained(Path(config.model.path) / "config.json")
    except UserError:
        return True, None  # the model's own check says so
    try:
        require_state_format(path, meta)
        check_same_model(path, meta["model"], model)
        if meta["step"] > config.steps:
            raise UserError(
                "the run has taken more steps than it is to take",
                where="steps",
                expected=f"{meta['step']} or more, to go on from {path}",
                got=str(config.steps),
                fix="raise steps, name an earlier checkpoint in checkpoint.resume, or set another run_dir",
            )
    except UserError as error:
        return True, error
    except (KeyError, TypeError, AttributeError) as error:
        return False, UserError(
            "the checkpoint's meta.json is not what a save leaves",
            where=str(path),
            expected="what a save has written",
            got=f"{type(error).__name__}: {error}",
            fix="resume from another checkpoint, or checkpoint.resume=never with a new run_dir",
        )
    return True, None


def resumed_build_errors(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shape: ModelShape | None,
    algorithm: Algorithm | None,
) -> list[UserError]:
    """Return the errors of learners that the checkpoint lacks, or has built otherwise.

    So are adapters, optimizers and types of numbers that differ, and optimizers in shards of other
    ``layouts`` than these. ``shape`` is that of the actor's model, where it and the ``algorithm`` are known.
    """
    resume, folder = config.checkpoint.resume, RunFolder(config.run_dir)
    if resume == "never":
        return []
    config = with_adapters(with_needed_roles(config, algorithm, {}), shape, {})
    adapters = adapters_of(config)
    begun: list[tuple[Path | None, dict[str, OptimizerConfig]]] = [
        (latest(folder.stage_checkpoints(plan.name)), {plan.role: plan.settings.optimizer})
        for plan in pending_stages(config)
    ]
    if config.job == TRAIN and algorithm is not None:
        learners = {
            path: section.optimizer
            for path, section in learner_sections(config).items()
            if spec_at(path).need is None or spec_at(path).needed(algorithm)
        }
        path = latest(folder.checkpoints) if resume == "auto" else Path(resume)
        begun = begun if path is None else [(path, learners)]  # a run that has begun is past its stages
    errors = []
    for path, optimizers in begun:
        if path is None:
            continue
        try:
            meta = read_meta(path)
        except UserError:
            continue  # who reads it says so
        try:
            require_roles(path, meta, optimizers)
            for name, optimizer in optimizers.items():
                if role_of(name) in layouts:
                    require_layout(path, name, meta, asdict(layouts[role_of(name)]))
                built = _built(config.model.dtype, optimizer, adapters.get(name))
                require_same_build(path, name, meta["roles"][name], built)
        except UserError as error:
            errors.append(error)
        except (KeyError, TypeError, AttributeError):
            pass  # who reads it says so
    return errors


def _built(dtype: str, optimizer: OptimizerConfig, lora: LoraConfig | None) -> dict[str, str | None]:
    """Return how a learner is built, where that is known before it is."""
    built: dict[str, str | None] = {
        "optimizer": optimizer_kind(optimizer.name, optimizer.distributed),
        "dtype": dtype,
    }
    if lora is None:
        built["adapters"] = None
    elif lora.alpha is not None and lora.targets is not None:
        built["adapters"] = adapters_in_words(lora.rank, lora.alpha, lora.targets)
    return built
