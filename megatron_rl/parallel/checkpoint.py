"""Save and restore a trained model with everything the next step depends on, across parallel layouts.

A checkpoint is a folder: ``model/`` is Megatron's distributed checkpoint of weights and optimizer, stored
independent of the layout; ``rng/`` has the generators of each rank, ``state.pt`` what is equal on all
ranks, and ``meta.json`` what the checkpoint is of. ``meta.json`` is written last.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.checkpoint_meta import (
    check_same_model,
    checkpoint_path,
    latest,
    model_identity,
    prune,
    read_meta,
    write_meta,
)
from megatron_rl.config.errors import UserError
from megatron_rl.parallel import device
from megatron_rl.parallel.checkpoint_tensors import load_tensors, save_tensors
from megatron_rl.parallel.model import ParallelModel
from megatron_rl.parallel.optimizer import Optimizer

__all__ = ["checkpoint_path", "latest", "load", "load_model", "prune", "read_meta", "save"]


def save(
    directory: str | Path, model: ParallelModel | None, optimizer: Optimizer | None, state: Mapping[str, Any]
) -> None:
    """Write a checkpoint to ``directory``, complete or not at all.

    ``model`` is None on ranks outside its layout. ``state`` is equal on all ranks: plain values and host
    tensors, with at least ``step`` and ``seed``. Files go into ``directory`` + ``.partial``, which is
    renamed at the end.
    Collective over the world; the folder is on a file system that all ranks share.
    """
    final = Path(directory)
    partial = final.with_name(final.name + ".partial")
    content = {"state": dict(state), "schedule": optimizer.scheduler.num_steps if optimizer else None}
    content = _from_member(content, model)

    def prepare() -> None:
        if device.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for name in ("model", "rng"):
                (partial / name).mkdir(parents=True)

    def write_own() -> None:
        torch.save(_generator_states(), partial / "rng" / f"rank_{device.rank()}.pt")
        if device.rank() == 0:
            torch.save(content, partial / "state.pt")

    def publish() -> None:
        if device.rank() == 0:
            write_meta(partial, meta)
            _replace(partial, final)

    meta = _from_member(_describe(model, optimizer, state) if model else None, model)
    _everywhere(prepare, "prepare the checkpoint's folder")
    _everywhere(write_own, "write the state of the run")
    save_tensors(partial / "model", model, optimizer)
    _everywhere(publish, "complete the checkpoint")


def load(directory: str | Path, model: ParallelModel | None, optimizer: Optimizer | None) -> dict[str, Any]:
    """Restore a checkpoint into a model and its optimizer, in any layout; return the saved ``state``.

    On the layout it was saved from, the random generators of every rank continue too; on another they are
    seeded from the saved seed and step. Learning rate, decay and other settings stay as configured now.
    Raises UserError before any tensor is touched if the checkpoint is of another model or optimizer.
    Collective over the world.
    """
    folder = Path(directory)
    meta = read_meta(folder)
    if model is not None:
        _check(folder, meta, model, optimizer)
    load_tensors(folder / "model", model, optimizer)
    content = torch.load(folder / "state.pt", weights_only=False)
    if optimizer is not None and model is not None:
        # The schedule's position is state; its shape is the configuration's.
        optimizer.scheduler.num_steps = 0
        optimizer.scheduler.step(content["schedule"])
    mine = _from_member(_layout(model) if model else None, model)
    if mine == meta["layout"]:
        own = folder / "rng" / f"rank_{device.rank()}.pt"
        _set_generator_states(torch.load(own, weights_only=False))
    else:
        tensor = model.groups.coordinates.tensor if model else 0
        _seed_generators(int(meta["seed"]), int(meta["step"]), tensor)
    return content["state"]


def load_model(directory: str | Path, model: ParallelModel | None) -> dict[str, Any]:
    """Restore only the weights, into a model that need not train; return the checkpoint's meta.json.

    Raises UserError as `load`. Collective over the world.
    """
    folder = Path(directory)
    meta = read_meta(folder)
    if model is not None:
        _check(folder, meta, model, None)
    load_tensors(folder / "model", model, None)
    return meta


# --- what the checkpoint says of itself


def _describe(model: ParallelModel, optimizer: Optimizer | None, state: Mapping[str, Any]) -> dict[str, Any]:
    names = ("megatron-rl", "megatron-core", "torch", "transformers", "vllm", "transformer-engine")
    return {
        "step": int(state["step"]),
        "seed": int(state["seed"]),
        "model": model_identity(model.hf_config.to_dict()),
        "dtype": _dtype(model),
        "layers": _layer_kind(model),
        "optimizer": _optimizer_kind(optimizer),
        "layout": _layout(model),
        "versions": {name: found for name in names if (found := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _layout(model: ParallelModel) -> dict[str, Any]:
    values = asdict(model.groups.layout)
    return {**values, "ranks": list(values["ranks"]), "world_size": device.world_size()}


def _dtype(model: ParallelModel) -> str:
    return str(model.transformer_config.params_dtype).removeprefix("torch.")


def _layer_kind(model: ParallelModel) -> str:
    return "transformer_engine" if model.uses_transformer_engine else "torch"


def _optimizer_kind(optimizer: Optimizer | None) -> str | None:
    if optimizer is None:
        return None
    return "distributed" if optimizer.config.distributed else "replicated"


def _check(folder: Path, meta: Mapping[str, Any], model: ParallelModel, optimizer: Optimizer | None) -> None:
    check_same_model(folder, meta, model.hf_config.to_dict())
    facts: list[tuple[str, str | None, str]] = [
        ("layers", _layer_kind(model), "set model.attention to the value it was trained with")
    ]
    if optimizer is not None:
        facts.append(("optimizer", _optimizer_kind(optimizer), "set actor.optimizer.distributed as it was"))
        facts.append(("dtype", _dtype(model), "set model.dtype as it was"))
    for name, value, fix in facts:
        if meta[name] != value:
            raise UserError(
                f"the checkpoint was saved with another {name}", str(folder), str(value), str(meta[name]), fix
            )


# --- random generators, files, agreement


def _generator_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": device.generator_states()}


def _set_generator_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    device.set_generator_states(states["torch"])


def _seed_generators(seed: int, step: int, tensor_rank: int) -> None:
    value = int(np.random.SeedSequence([seed, step]).generate_state(1)[0]) >> 1
    random.seed(value)
    np.random.seed(value)
    device.seed_generators(value, tensor_rank)


def _replace(partial: Path, final: Path) -> None:
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _from_member(value: Any, model: ParallelModel | None) -> Any:
    """Return the value that the first rank of the model's layout holds. Collective over the world."""
    first = model is not None and model.groups.layout.ranks[0] == device.rank()
    found: list[Any] = [None] * device.world_size()
    dist.all_gather_object(found, (value,) if first else None)
    return next((item[0] for item in found if item is not None), value)


def _everywhere(action: Callable[[], None], words: str) -> None:
    """Run ``action``; if it fails on one rank, fail on all. Collective over the world."""
    failure = None
    try:
        action()
    except Exception as error:
        failure = f"rank {device.rank()}: {error!r}"
    failures: list[Any] = [None] * device.world_size()
    dist.all_gather_object(failures, failure)
    if any(failures):
        raise RuntimeError(f"could not {words}: " + "; ".join(item for item in failures if item))
