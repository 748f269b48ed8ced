"""Save and restore a trained model with everything the next step depends on, across parallel layouts.

A checkpoint is a folder: one folder per role is Megatron's distributed checkpoint of weights and optimizer,
independent of the layout unless the optimizer lies in its shards (`SAME`); ``rng/`` has the generators of
each rank, ``state.pt`` what is equal on all ranks, ``meta.json`` what the checkpoint is of, and
``checksums.json`` the digest of each of these files.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_rl import durable
from megatron_rl.checkpoint.folders import (
    disk_or,
    everywhere,
    require_intact,
)
from megatron_rl.checkpoint.tensors import begin_tensors, load_tensors, require_shards
from megatron_rl.checkpoint.untrusted import refuse_code
from megatron_rl.checkpoint.writing import Saving, partial_of
from megatron_rl.config.checkpoint_meta import (
    ANY,
    SAME,
    check_same_model,
    model_identity,
    optimizer_kind,
    optimizer_layout,
    read_meta,
    require_layout,
    require_roles,
    require_same_build,
    require_state_format,
    write_meta,
)
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.errors import UserError
from megatron_rl.megatron.lora import adapter_parameters
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.model_spec import pretrained
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.shapes.lora import adapters_in_words
from megatron_rl.versions import NUMBERS_DEPEND_ON, installed_versions


class Part(NamedTuple):
    """Name what one role contributes to a checkpoint; both are None on ranks outside its layout."""

    model: ParallelModel | None
    optimizer: Optimizer | None


def save(
    directory: str | Path,
    parts: Mapping[str, Part],
    state: Mapping[str, Any],
    keep: int | None = None,
    best: Collection[int] = (),
    *,
    layout: str = ANY,
    beside: bool = False,
) -> Saving:
    """Write a checkpoint to ``directory``, complete or not at all, and prune older ones beyond ``keep``.

    Those of the steps ``best`` stay. Distributed optimizers are laid out as ``layout`` says: `ANY` or `SAME`.
    With ``beside`` it is written from a copy while models may change, until the caller finishes it.

    ``parts`` are the learning roles by name, the same on every rank; the first has the actor's place in
    meta.json. ``state`` is equal on all ranks: plain values and host tensors, with at least ``step`` and
    ``seed``. Files go into ``directory`` + ``.partial``, which is renamed at the end. Collective over the
    world; the folder is on a file system that all ranks share.
    """
    final, first_role = Path(directory), next(iter(parts))
    partial = partial_of(final)
    needed = sum(gather_objects(sum(_bytes(part) for part in parts.values())))
    schedules = {
        name: _from_member(part.optimizer.scheduler.num_steps if part.optimizer else None, part.model)
        for name, part in parts.items()
    }
    content = {"state": _from_member(dict(state), parts[first_role].model), "schedules": schedules}

    def write_own() -> None:
        torch.save(_generator_states(), partial / "rng" / f"rank_{device.rank()}.pt")
        if device.rank() == 0:
            torch.save(content, partial / "state.pt")
            write_meta(partial, meta)

    described = {
        name: _from_member(_describe(*part, layout) if part.model else None, part.model)
        for name, part in parts.items()
    }
    meta = {**described[first_role], **_facts(state), "roles": described}
    everywhere(lambda: _prepare(final, parts, layout, needed), "prepare the checkpoint's folder", final)
    everywhere(write_own, "write the state of the run", final)
    files = [partial / "rng" / f"rank_{device.rank()}.pt", *([partial / "state.pt"] * (device.rank() == 0))]
    writes = []
    try:
        for name, part in parts.items():
            writes.append(begin_tensors(partial / name, part.model, part.optimizer, layout, keep=beside))
            files += writes[-1].files
    except Exception as error:
        raise disk_or(error, final) from error
    saving = Saving(final, writes, files, keep, best)
    if not beside:
        saving.finish()
    return saving


def _prepare(final: Path, parts: Mapping[str, Part], layout: str, needed: float) -> None:
    """Make the folder that a checkpoint is written in; raise UserError where it cannot be."""
    for part in parts.values() if layout == SAME else ():
        require_shards(part.optimizer)
    if device.rank() == 0:
        durable.remove(partial_of(final))
        final.parent.mkdir(parents=True, exist_ok=True)
        durable.require_space(final.parent, needed, f"the checkpoint {final.name}")
        for name in (*parts, "rng"):
            (partial_of(final) / name).mkdir(parents=True)


def load(
    directory: str | Path, parts: Mapping[str, Part], types: Sequence[type] = (), *, trusted: bool = False
) -> dict[str, Any]:
    """Restore a checkpoint into models and their optimizers, in any layouts; return the saved ``state``.

    ``types`` are the classes that ``state`` may hold beside plain values and tensors. Unless ``trusted`` a
    checkpoint that would run code is refused.

    On the layouts it was saved from, the random generators of every rank continue too; on another they are
    seeded from the saved seed and step. Learning rate, decay and other settings stay as configured now.
    Raises UserError before any tensor is touched if the checkpoint is of another model or optimizer.
    Collective over the world.
    """
    folder = Path(directory)
    meta = read_meta(folder)
    require_state_format(folder, meta)
    require_roles(folder, meta, parts)
    for name, part in parts.items():
        if part.model is not None:
            _check(folder, meta["roles"][name], name, part.model, part.optimizer)
            if part.optimizer is not None:
                require_layout(folder, name, meta, _layout(part.model))
    for name in parts:
        refuse_code(folder / name, trusted=trusted)
    content = _read(folder / "state.pt", types)
    for name, part in parts.items():
        load_tensors(folder / name, part.model, part.optimizer, optimizer_layout(meta["roles"][name]))
        if part.optimizer is not None:
            # The schedule's position is state; its shape is the configuration's.
            part.optimizer.scheduler.num_steps = 0
            part.optimizer.scheduler.step(content["schedules"][name])
    layouts = {
        name: _from_member(_layout(part.model) if part.model else None, part.model)
        for name, part in parts.items()
    }
    if all(layouts[name] == meta["roles"][name]["layout"] for name in parts):
        generators = folder / "rng" / f"rank_{device.rank()}.pt"
        _set_generator_states(_read(generators))
    else:
        seed_generators(int(meta["seed"]), int(meta["step"]), next(iter(parts.values())).model)
    return content["state"]


def read_state(directory: str | Path) -> dict[str, Any]:
    """Return the saved ``state`` of a checkpoint of plain values and tensors alone."""
    require_state_format(directory, read_meta(directory))
    return _read(Path(directory) / "state.pt")["state"]


def _read(path: Path, types: Sequence[type] = ()) -> Any:
    try:
        with torch.serialization.safe_globals(list(types)):
            return torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(
            "a file of the checkpoint cannot be read",
            where=str(path),
            expected="plain values and tensors, as a save writes them",
            got=str(error).splitlines()[0],
            fix="use another checkpoint: this one is damaged, or of another version",
        ) from error


def load_model(
    directory: str | Path, model: ParallelModel | None, *, trusted: bool = False
) -> dict[str, Any]:
    """Restore only the actor's weights, into a model that need not train; return the checkpoint's meta.json.

    Raises UserError as `load`, and where a file is damaged. Collective over the world.
    """
    folder = Path(directory)
    require_intact(folder)
    meta = read_meta(folder)
    refuse_code(folder / "actor", trusted=trusted)
    if model is not None:
        _check(folder, meta, "actor", model, None)
    load_tensors(folder / "actor", model, None)
    return meta


# --- what the checkpoint says of itself


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(state["step"]),
        "seed": int(state["seed"]),
        "versions": installed_versions(NUMBERS_DEPEND_ON),
    }


def _describe(model: ParallelModel | None, optimizer: Optimizer | None, layout: str) -> dict[str, Any]:
    assert model is not None
    distributed = optimizer is not None and optimizer.config.distributed
    return {
        "model": model_identity(pretrained(model.hf_config)),
        "dtype": _dtype(model),
        "layers": _layer_kind(model),
        "optimizer": _optimizer_kind(optimizer),
        "optimizer_layout": layout if distributed else ANY,
        "adapters": _adapters(model),
        "base": None if model.adapters is None else model.adapters.base,
        "layout": _layout(model),
    }


def _layout(model: ParallelModel) -> dict[str, Any]:
    values = asdict(model.groups.layout)
    return {**values, "ranks": list(values["ranks"]), "world_size": device.world_size()}


def _dtype(model: ParallelModel) -> str:
    return str(model.transformer_config.params_dtype).removeprefix("torch.")


def _layer_kind(model: ParallelModel) -> str:
    return "transformer_engine" if model.uses_transformer_engine else "torch"


def _optimizer_kind(optimizer: Optimizer | None) -> str | None:
    return None if optimizer is None else optimizer_kind(optimizer.config.name, optimizer.config.distributed)


def _adapters(model: ParallelModel) -> str | None:
    adapters = model.adapters
    return None if adapters is None else adapters_in_words(adapters.rank, adapters.alpha, adapters.targets)


def _check(
    folder: Path, meta: Mapping[str, Any], role: str, model: ParallelModel, optimizer: Optimizer | None
) -> None:
    check_same_model(folder, meta["model"], pretrained(model.hf_config))
    built = {
        "layers": _layer_kind(model),
        "adapters": _adapters(model),
        "base": None if model.adapters is None else model.adapters.base,
    }
    if optimizer is not None:
        built |= {"optimizer": _optimizer_kind(optimizer), "dtype": _dtype(model)}
    require_same_build(folder, role, meta, built)


# --- random generators, files, agreement


def _generator_states() -> dict[str, Any]:
    array: Any = np.random.get_state(legacy=False)
    array = {**array, "state": {**array["state"], "key": array["state"]["key"].tolist()}}
    return {"python": random.getstate(), "numpy": array, "torch": device.generator_states()}


def _set_generator_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    array = states["numpy"]
    key = np.array(array["state"]["key"], dtype=np.uint32)
    np.random.set_state({**array, "state": {**array["state"], "key": key}})
    device.set_generator_states(states["torch"])


def seed_generators(seed: int, step: int, model: ParallelModel | None) -> None:
    """Seed every random generator of this rank from the run's seed and a step, for a model on its layout."""
    value = int(np.random.SeedSequence([seed, step]).generate_state(1)[0]) >> 1
    random.seed(value)
    np.random.seed(value)
    device.seed_generators(value, model.groups.coordinates.tensor if model is not None else 0)


def _bytes(part: Part) -> int:
    """Return what this rank's share of a role takes on the disk, counting each shard on one rank."""
    if part.model is None:
        return 0
    places = part.model.groups.coordinates
    first = places.data == 0 and places.context == 0
    weights = [parameter for chunk in part.model.chunks for parameter in chunk.parameters()]
    if part.model.adapters is not None:
        weights = list(adapter_parameters(part.model).values())
    total = sum(weight.numel() * weight.element_size() for weight in weights) if first else 0
    if part.optimizer is None:
        return total
    trained = sum(weight.numel() for weight in weights) if first else 0
    return total + 12 * trained  # a float32 copy and two moments


def _from_member(value: Any, model: ParallelModel | None) -> Any:
    """Return the value that the first rank of the model's layout holds. Collective over the world."""
    first = model is not None and model.groups.layout.ranks[0] == device.rank()
    return next((item[0] for item in gather_objects((value,) if first else None) if item is not None), value)
