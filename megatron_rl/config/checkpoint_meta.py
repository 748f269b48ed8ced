"""Checkpoint directories, their meta.json, and the rules for resuming from one; importable without torch.

A checkpoint is a directory ``step_N`` in the folder of a run or of one of its stages. It is written under a
temporary name and renamed when it is complete, so every ``step_N`` with a meta.json is a complete checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.config.run_folder import STAGES
from megatron_rl.durable import DOOMED, REPLACED, recoverable_folders, remove_path
from megatron_rl.errors import UserError, unreadable_file_error
from megatron_rl.shapes.pretrained import PretrainedModel

# Written last, so that a directory with it is a complete checkpoint.
META = "meta.json"

# Formats of a distributed optimizer in a checkpoint, the values of `checkpoint.optimizer_layout`. `ANY` is
# complete states, which can be loaded on any parallel layout. `SAME` is the shards of one parallel layout.
ANY = "any"
SAME = "same"

# Parallel sizes on which the shards of an optimizer depend.
_SHARD_SIZES = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")

# Property of a role that must be the same when its state is loaded -> fix for a different value.
_PROPERTY_FIXES = {
    "layers": "set model.attention to the value it was trained with",
    "adapters": "set rank, alpha and targets in the lora of this role as they were",
    "base": "set model.path to the weights that these adapters were trained on",
    "optimizer": "set the name of the optimizer, and whether it is distributed, as they were",
    "dtype": "set model.dtype as it was",
}

# Version of the state that a run resumes from. Increase it if this version would misread an older state.
# Model weights can be read from every version. A checkpoint without the number has version 0.
STATE_FORMAT = 2

# Version of the layout of the folder, of meta.json and of the weights.
_FORMAT = 3

_STEP = re.compile(r"step_(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path in ``folder`` of the checkpoint after ``step`` steps."""
    return folder / f"step_{step}"


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a complete training checkpoint."""
    try:
        return (path / META).is_file()
    except OSError:  # a directory without read permission
        return False


def named_checkpoints(folder: Path) -> list[Path]:
    """Return the paths ``step_N`` in a folder, complete or damaged, oldest first.

    They include ``step_N.old`` if the process that replaced ``step_N`` was killed between its two renames.
    """
    if not folder.is_dir():
        return []
    steps: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        match = _STEP.fullmatch(path.name)
        if match:
            steps.append((int(match.group(1)), path))

    # Include the folders that a restart will rename to checkpoints: `check` must find them, too.
    for path in recoverable_folders(folder):
        match = _STEP.fullmatch(path.stem)
        if match:
            steps.append((int(match.group(1)), path))
    return [path for _, path in sorted(steps)]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return [path for path in named_checkpoints(folder) if is_checkpoint(path)]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None if the folder contains no checkpoint."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def remove_interrupted_saves(folder: Path) -> list[Path]:
    """Delete incomplete folders left behind by interrupted saves and deletions; return their paths.

    Call on one rank, after `recover_replaced` and while no save is in progress.
    """
    leftover_suffixes = (".partial", REPLACED, DOOMED)
    leftovers = [path for path in sorted(folder.glob("step_*")) if path.suffix in leftover_suffixes]
    for path in leftovers:
        remove_path(path)
    return leftovers


def prune_checkpoints(last_saved: Path, keep: int, best_steps: Collection[int] = ()) -> list[Path]:
    """Delete all checkpoints except the newest ``keep``, and the folders left behind by interrupted saves.

    ``last_saved`` is the newest valid checkpoint. Newer checkpoints are damaged, since the run has resumed
    from an older one; they are retained, and are not counted in ``keep``. Checkpoints of ``best_steps`` are
    retained, too. Returns the deleted paths. Call this on one rank, while no save is in progress.
    """
    folder = last_saved.parent
    deleted = remove_interrupted_saves(folder)

    candidates = complete_checkpoints(folder)
    candidates = candidates[: candidates.index(last_saved) + 1]
    best_paths = [checkpoint_path(folder, step) for step in best_steps]
    num_surplus = max(len(candidates) - max(keep, 1), 0)
    for path in candidates[:num_surplus]:
        if path in best_paths:
            continue
        deleted.append(path)
        # Rename first: an interrupted deletion must not leave an incomplete checkpoint under a valid name.
        remove_path(path.rename(path.with_name(path.name + DOOMED)))
    return deleted


def model_identity(model: PretrainedModel) -> dict[str, Any]:
    """Return the properties that identify a model, as plain JSON values: its family and every size.

    The maximum number of positions is omitted, since the same weights work with another value.
    """
    # Convert through JSON, since the saved identity has lists where the shape has tuples.
    sizes = asdict(model.shape)
    del sizes["name"]
    del sizes["max_positions"]
    # Add `blocks` only if the model has any: earlier versions did not save this property.
    del sizes["blocks"]
    if model.shape.blocks:
        sizes["blocks"] = [repr(block) for block in model.shape.blocks]
    return {"model_type": model.family.model_type, **json.loads(json.dumps(sizes))}


def read_meta(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint's meta.json; raise UserError if it is missing, damaged or in a different format."""
    path = Path(directory) / META
    fix = "give the folder of a completed save, such as runs/NAME/checkpoints/step_50"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "this is not a complete training checkpoint",
            where=str(directory),
            expected=f"a folder with {META}",
            got=f"no {META} there" if Path(directory).is_dir() else "no such folder",
            fix=fix,
        ) from None
    except (OSError, ValueError) as error:
        raise unreadable_file_error(
            "the checkpoint's meta.json", path, error, expected="a JSON object", fix=fix
        ) from error

    got = type(meta).__name__
    if isinstance(meta, dict):
        got = meta.get("format")
    if got != _FORMAT:
        raise UserError(
            "the checkpoint was written by another version",
            where=str(path),
            expected=f"format {_FORMAT}",
            got=f"format {got}",
            fix=fix,
        )
    return meta


def require_state_format(directory: str | Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError unless this version can resume from a checkpoint with the meta.json ``meta``."""
    got = meta.get("state_format", 0)
    if got == STATE_FORMAT:
        return
    raise UserError(
        "the checkpoint has a state that this version of megatron_rl cannot resume from",
        where=str(directory),
        expected=f"state of format {STATE_FORMAT}",
        got=f"format {got}, saved by {meta.get('versions')}",
        fix="resume with the version that saved it; or export its model, which any version can load "
        f"(megatron-rl export {directory} --out DIR), and start from that in a new run_dir",
    )


def saved_optimizer_format(role_meta: Mapping[str, Any]) -> str:
    """Return the format of a role's saved optimizer, a value of the setting `checkpoint.optimizer_layout`.

    `ANY` is complete states, which can be loaded on any parallel layout. `SAME` is the shards of one parallel
    layout. ``role_meta`` is ``meta["roles"][NAME]``.
    """
    return role_meta.get("optimizer_layout", ANY)


def is_gathered(meta: Mapping[str, Any]) -> bool:
    """Return whether all optimizers of a checkpoint with the meta.json ``meta`` are saved unsharded."""
    return all(saved_optimizer_format(role_meta) == ANY for role_meta in meta["roles"].values())


def fits_any_layout(meta: Mapping[str, Any]) -> bool:
    """Return whether a run can resume from a checkpoint on any parallel layout.

    ``meta`` is the content of the checkpoint's meta.json.
    """
    return all(_optimizer_loads_on_any_layout(role_meta) for role_meta in meta["roles"].values())


def _optimizer_loads_on_any_layout(role_meta: Mapping[str, Any]) -> bool:
    """Return whether a role's saved optimizer can be loaded on any parallel layout.

    This is possible for complete states (`ANY`), and for shards with an index (``indexed_shards``).
    ``role_meta`` is ``meta["roles"][NAME]``.
    """
    return saved_optimizer_format(role_meta) == ANY or bool(role_meta.get("indexed_shards"))


def loads_without_resharding(role_meta: Mapping[str, Any], layout: Mapping[str, Any]) -> bool:
    """Return whether a role's saved optimizer can be loaded on a parallel layout without resharding.

    ``role_meta`` is ``meta["roles"][NAME]``; ``layout`` maps the name of each parallel size to its value. An
    optimizer that is saved as complete states (`ANY`) needs no resharding on any layout.
    """
    if saved_optimizer_format(role_meta) == ANY:
        return True
    return all(role_meta["layout"][size] == layout[size] for size in _SHARD_SIZES)


def require_layout(
    directory: str | Path, role_name: str, meta: Mapping[str, Any], layout: Mapping[str, Any]
) -> None:
    """Raise UserError if a role's saved optimizer cannot be loaded on the parallel layout ``layout``.

    ``meta`` is the content of the checkpoint's meta.json; ``layout`` maps the name of each parallel size to
    its value.
    """
    role_meta = meta["roles"][role_name]
    saved_layout = role_meta["layout"]
    if _optimizer_loads_on_any_layout(role_meta) or loads_without_resharding(role_meta, layout):
        return

    fix = f"convert it first: resume on {saved_layout['world_size']} ranks of its own layout with "
    fix += "checkpoint.optimizer_layout=any"
    # If a run is resumed with `steps` equal to the checkpoint's step, it converts the checkpoint and ends. A
    # training stage, such as SFT, cannot be ended in this way: its steps are not limited by `steps`.
    if Path(directory).parent.parent.parent.name == STAGES:
        fix += " until its next save"
    else:
        fix += f" and steps={meta['step']}, which saves it for any layout without a training step"

    checkpoints = complete_checkpoints(Path(directory).parent)
    loadable_checkpoints = [path for path in checkpoints if fits_any_layout(read_meta(path))]
    if loadable_checkpoints:
        fix += f"; or resume from {loadable_checkpoints[-1]}, which can be loaded on any layout"
    raise UserError(
        "the checkpoint has the optimizer in the shards of another layout",
        where=f"{directory} ({role_name})",
        expected=", ".join(f"{size} {layout[size]}" for size in _SHARD_SIZES),
        got=", ".join(f"{size} {saved_layout[size]}" for size in _SHARD_SIZES),
        fix=fix,
    )


def require_roles(directory: str | Path, meta: Mapping[str, Any], learners: Collection[str]) -> None:
    """Raise UserError unless a checkpoint with the meta.json ``meta`` contains every role of ``learners``."""
    absent_roles = sorted(set(learners) - set(meta["roles"]))
    if not absent_roles:
        return
    raise UserError(
        f"the checkpoint has no {', '.join(absent_roles)}",
        where=str(directory),
        expected=f"the learning roles {', '.join(learners)}",
        got=", ".join(meta["roles"]),
        fix="resume with the algorithm of the run that saved it, or start over from an exported model",
    )


def optimizer_kind(name: str, distributed: bool) -> str:
    """Return the name of an optimizer in meta.json, derived from its ``name`` in the configuration.

    ``distributed`` is true if the optimizer state is sharded over data-parallel ranks.

    Example:
        >>> optimizer_kind("adam", True), optimizer_kind("sgd", False)
        ('distributed', 'replicated sgd')
    """
    kind = "distributed" if distributed else "replicated"
    if name == "adam":
        return kind
    return f"{kind} {name}"


def require_same_properties(
    directory: str | Path, role: str, saved: Mapping[str, Any], current: Mapping[str, str | None]
) -> None:
    """Raise UserError if a property of a role, such as its dtype, differs from the saved value.

    ``saved`` is ``meta["roles"][role]``; ``current`` maps the name of each property to its current value.
    """
    for name, current_value in current.items():
        if saved.get(name) == current_value:
            continue

        article = "other" if name.endswith("s") else "another"
        raise UserError(
            f"the checkpoint was saved with {article} {name}",
            where=f"{directory} ({role})",
            expected=current_value or "none",
            got=saved.get(name) or "none",
            fix=_PROPERTY_FIXES[name],
        )


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Write meta.json, the last file of a checkpoint, which marks it as complete."""
    text = json.dumps({"format": _FORMAT, "state_format": STATE_FORMAT, **meta}, indent=2, sort_keys=True)
    (directory / META).write_text(text + "\n", encoding="utf-8")


def require_same_model(
    directory: str | Path,
    saved: Mapping[str, Any],
    model: PretrainedModel,
    fix: str = "set model.path to the model that the run started from, or use another run_dir",
) -> None:
    """Raise UserError if a checkpoint was saved for another model; ``saved`` is its `model_identity`."""
    identity = model_identity(model)
    different_names = [name for name in identity if name in saved and saved[name] != identity[name]]
    if not different_names:
        return

    raise UserError(
        "the checkpoint was saved for another model",
        where=str(directory),
        expected=", ".join(f"{name} = {_value_text(identity[name])}" for name in different_names),
        got=", ".join(f"{name} = {_value_text(saved[name])}" for name in different_names),
        fix=fix,
    )


def _value_text(value: Any) -> str:
    """Format a property of a model as text; the items of a list are separated by commas."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
