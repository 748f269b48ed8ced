"""What a training checkpoint says of itself in meta.json, and which ones a folder holds; without torch.

A checkpoint is a directory ``step_N`` in a folder of a run or of one of its stages. It is written under
another name and renamed when it is complete, so a directory of that name with a meta.json is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.config.run_folder import STAGES
from megatron_rl.durable import DOOMED, REPLACED, remove, without_final_name
from megatron_rl.errors import UserError
from megatron_rl.shapes.pretrained import PretrainedModel

META = "meta.json"
ANY, SAME = "any", "same"
"""How distributed optimizers lie in a checkpoint: as whole parameters, or in the shards of one layout."""
_CUTS = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
"""Sizes of a layout that the shards of an optimizer depend on."""
_BUILD = {
    "layers": "set model.attention to the value it was trained with",
    "adapters": "set rank, alpha and targets in the lora of this role as they were",
    "base": "set model.path to the weights that these adapters were trained on",
    "optimizer": "set the name of the optimizer, and whether it is distributed, as they were",
    "dtype": "set model.dtype as it was",
}
"""What the state of a role depends on beside its model, and how to have each again."""
STATE_FORMAT = 2
"""Form of the state that a run resumes from: raised where a change of it would misread what is on disks.

Models are read from checkpoints of every number; one that names none is of 0.
"""
_FORMAT = 3
"""Form of the folder, its meta.json and the weights in it."""
_STEP = re.compile(r"step_(\d+)")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the place in ``folder`` of the checkpoint after ``step`` steps."""
    return folder / f"step_{step}"


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory is a complete training checkpoint."""
    try:
        return (path / META).is_file()
    except OSError:  # a directory that may not be looked into
        return False


def named_checkpoints(folder: Path) -> list[Path]:
    """Return what has a checkpoint's name in a folder, complete or damaged, oldest first.

    So has the checkpoint that a kill of its replacement has left as ``step_N.old`` alone.
    """
    matches = [(_STEP.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    # Not only after `recover_replaced`: `check` reads what a restart will find, and renames nothing.
    matches += [(_STEP.fullmatch(path.stem), path) for path in without_final_name(folder)]
    return [path for _, path in sorted((int(match.group(1)), path) for match, path in matches if match)]


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return [path for path in named_checkpoints(folder) if is_checkpoint(path)]


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None."""
    complete = checkpoints(folder)
    return complete[-1] if complete else None


def remove_broken_saves(folder: Path) -> list[Path]:
    """Delete what killed saves and deletions left in a folder of checkpoints; return the paths.

    Call on one rank, after `recover_replaced` and while no save is under way.
    """
    broken = [path for path in sorted(folder.glob("step_*")) if path.suffix in (".partial", REPLACED, DOOMED)]
    for path in broken:
        remove(path)
    return broken


def prune(saved: Path, keep: int, best: Collection[int] = ()) -> list[Path]:
    """Delete what broken saves left beside a checkpoint and older ones beyond ``keep`` with it; return them.

    Those of the steps ``best`` stay. Newer ones do not count: the run went on from before them, because they
    are damaged. Call on one rank, while no save is under way.
    """
    folder = saved.parent
    doomed = remove_broken_saves(folder)
    complete = checkpoints(folder)
    complete = complete[: complete.index(saved) + 1]
    lasting = [checkpoint_path(folder, step) for step in best]
    for path in complete[: max(len(complete) - max(keep, 1), 0)]:
        if path in lasting:
            continue
        doomed.append(path)
        # Renamed first: a deletion that is cut off must not leave half a checkpoint under its name.
        remove(path.rename(path.with_name(path.name + DOOMED)))
    return doomed


def model_identity(model: PretrainedModel) -> dict[str, Any]:
    """Return what makes two models the same: their family and every size, as JSON has them.

    How long rows may be is none of it.
    """
    sizes = asdict(model.shape)
    del sizes["name"], sizes["max_positions"]
    return {"model_type": model.family.model_type, **json.loads(json.dumps(sizes))}


def read_meta(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint's meta.json; raise UserError if it is missing, broken or of another format."""
    path = Path(directory) / META
    fix = "name a folder such as runs/NAME/checkpoints/step_50 that a finished save has left"
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
        raise UserError(
            "the checkpoint's meta.json cannot be read", str(path), "a JSON object", str(error), fix
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        got = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise UserError(
            "the checkpoint was written by another version",
            str(path),
            f"format {_FORMAT}",
            f"format {got}",
            fix,
        )
    return meta


def require_state_format(directory: str | Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError unless this version resumes from a checkpoint with the meta.json ``meta``."""
    got = meta.get("state_format", 0)
    if got != STATE_FORMAT:
        raise UserError(
            "the checkpoint holds another state than this version of megatron_rl resumes from",
            where=str(directory),
            expected=f"state of format {STATE_FORMAT}",
            got=f"format {got}, saved by {meta.get('versions')}",
            fix="resume with the version that saved it; or export its model, which any version reads "
            f"(python -m megatron_rl export {directory} --out DIR), and start from that in a new run_dir",
        )


def optimizer_layout(role: Mapping[str, Any]) -> str:
    """Return how the optimizer of a role lies in a checkpoint, whose meta.json describes the ``role``."""
    return role.get("optimizer_layout", ANY)


def reads_anywhere(meta: Mapping[str, Any]) -> bool:
    """Return whether any layout can resume from a checkpoint, of which ``meta`` is the meta.json."""
    return all(optimizer_layout(role) == ANY for role in meta["roles"].values())


def require_layout(
    directory: str | Path, name: str, meta: Mapping[str, Any], layout: Mapping[str, Any]
) -> None:
    """Raise UserError unless the role ``name``'s optimizer can be read on a layout, given by its sizes."""
    role = meta["roles"][name]
    saved = role["layout"]
    if optimizer_layout(role) == ANY or all(saved[size] == layout[size] for size in _CUTS):
        return
    whole = [path for path in checkpoints(Path(directory).parent) if reads_anywhere(read_meta(path))]
    other = f"; or resume from {whole[-1]}, which any layout reads" if whole else ""
    in_stage = Path(directory).parent.parent.parent.name == STAGES
    does = "its next save does" if in_stage else f"a run with steps={meta['step']} does and no more"
    raise UserError(
        "the checkpoint holds the optimizer in the shards of another layout",
        where=f"{directory} ({name})",
        expected=", ".join(f"{size} {layout[size]}" for size in _CUTS),
        got=", ".join(f"{size} {saved[size]}" for size in _CUTS),
        fix=f"have its own layout, on {saved['world_size']} ranks, write it for any: go on there with "
        f"checkpoint.optimizer_layout=any, which {does}{other}",
    )


def require_roles(directory: str | Path, meta: Mapping[str, Any], learners: Collection[str]) -> None:
    """Raise UserError unless a checkpoint with the meta.json ``meta`` has the roles that learn."""
    missing = sorted(set(learners) - set(meta["roles"]))
    if missing:
        raise UserError(
            f"the checkpoint has no {', '.join(missing)}",
            where=str(directory),
            expected=f"the learning roles {', '.join(learners)}",
            got=", ".join(meta["roles"]),
            fix="resume with the algorithm of the run that saved it, or start over from an exported model",
        )


def optimizer_kind(name: str, distributed: bool) -> str:
    """Return what a checkpoint calls an optimizer, by its name in the configuration."""
    kind = "distributed" if distributed else "replicated"
    return kind if name == "adam" else f"{kind} {name}"


def require_same_build(
    directory: str | Path, role: str, saved: Mapping[str, Any], built: Mapping[str, str | None]
) -> None:
    """Raise UserError unless a role was saved as it is built now.

    ``saved`` is what meta.json says of the role, ``built`` the facts of `_BUILD` that are known.
    """
    for fact, value in built.items():
        if saved.get(fact) != value:
            raise UserError(
                f"the checkpoint was saved with {'other' if fact.endswith('s') else 'another'} {fact}",
                where=f"{directory} ({role})",
                expected=value or "none",
                got=saved.get(fact) or "none",
                fix=_BUILD[fact],
            )


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Write meta.json, the last file of a checkpoint."""
    text = json.dumps({"format": _FORMAT, "state_format": STATE_FORMAT, **meta}, indent=2, sort_keys=True)
    (directory / META).write_text(text + "\n", encoding="utf-8")


def check_same_model(
    directory: str | Path,
    saved: Mapping[str, Any],
    model: PretrainedModel,
    fix: str = "set model.path to the model that the run started from, or use another run_dir",
) -> None:
    """Raise UserError if a folder is of another model than this; ``saved`` is its `model_identity`."""
    identity = model_identity(model)
    differing = [name for name in identity if name in saved and saved[name] != identity[name]]
    if differing:
        raise UserError(
            "the checkpoint is of another model",
            where=str(directory),
            expected=", ".join(f"{name} = {_shown(identity[name])}" for name in differing),
            got=", ".join(f"{name} = {_shown(saved[name])}" for name in differing),
            fix=fix,
        )


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
