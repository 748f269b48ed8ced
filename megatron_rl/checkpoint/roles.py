"""Save every trained role and the state of the run; restore them on any parallel layout.

A checkpoint is a folder:

```
ROLE/           Megatron's distributed checkpoint of a role's weights and optimizer; if the optimizer is
                stored in the shards of its layout (`SAME`), an index to load it on other layouts
rollout/        the actor weights from which responses are sampled, if these are older than actor/
rng/            the random generators of each rank
state.pt        values that are equal on all ranks
meta.json       step, seed, versions, and model, optimizer and layout of each role
checksums.json  digests of all other files
```
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rl import durable
from megatron_rl.checkpoint.folders import (
    PendingCheckpoint,
    convert_write_error,
    partial_path,
    require_intact_checkpoint,
    run_write_step,
)
from megatron_rl.checkpoint.shards import load_shards, write_shard_index
from megatron_rl.checkpoint.tensors import (
    TensorWrite,
    load_tensors,
    plan_tensor_write,
    require_savable_shards,
)
from megatron_rl.checkpoint.untrusted import refuse_code
from megatron_rl.config.checkpoint_meta import (
    ANY,
    SAME,
    loads_without_resharding,
    model_identity,
    optimizer_kind,
    read_meta,
    require_layout,
    require_roles,
    require_same_model,
    require_same_properties,
    require_state_format,
    saved_optimizer_format,
    write_meta,
)
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.errors import unreadable_file_error
from megatron_rl.megatron.lora import adapter_parameters
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.shapes.lora import format_adapters
from megatron_rl.versions import DISTRIBUTIONS_AFFECTING_RESULTS, installed_versions

_OPTIMIZER_BYTES = 12
"""Bytes of optimizer state per trained parameter: a float32 master weight and Adam's two moments."""


class TrainedRole(NamedTuple):
    """A role's model and optimizer on this rank.

    Example: ``TrainedRole(model, optimizer)`` on the role's ranks, ``TrainedRole(None, None)`` on others.
    """

    model: ParallelModel | None
    """This rank's shard of the model; None on ranks outside the role's layout."""
    optimizer: Optimizer | None
    """Optimizer of this shard; None on ranks outside the role's layout, or if only weights are stored."""
    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Function that returns a context in which ``model`` has the weights to save or restore."""


# --- Saving


def save_checkpoint(
    directory: str | Path,
    roles: Mapping[str, TrainedRole],
    state: Mapping[str, Any],
    keep: int | None = None,
    best_steps: Collection[int] = (),
    *,
    optimizer_format: str = ANY,
    in_background: bool = False,
) -> PendingCheckpoint:
    """Write a checkpoint into ``directory``, complete or not at all, and prune older checkpoints.

    Files are written into ``directory`` + ``.partial``, which is renamed at the end. Collective over the
    world; the folder is on a file system that all ranks share.

    Arguments:
        roles: the trained roles by name, in the same order on every rank. The first role is the actor, whose
            values are repeated at the top level of meta.json.
        state: plain values and host tensors, equal on all ranks, with at least ``step`` and ``seed``.
        keep: number of checkpoints to retain, or None for all.
        best_steps: steps whose checkpoints are retained in addition.
        optimizer_format: how distributed optimizers are saved, a value of `checkpoint.optimizer_layout`.
            `ANY` saves complete states, which every parallel layout can load. `SAME` saves the shards of
            this layout.
        in_background: write from copies, so that the models may change meanwhile; the caller must call
            `PendingCheckpoint.finish`. Otherwise the returned checkpoint is finished.
    """
    final = Path(directory)
    partial_folder = partial_path(final)
    actor_name = next(iter(roles))

    # Before anything is written, `_prepare_folders` compares the free space with the checkpoint's total size.
    rank_bytes = sum(_stored_bytes(role) for role in roles.values())
    checkpoint_bytes = sum(gather_objects(rank_bytes))

    # The first rank of the world writes meta.json and state.pt for all roles, even for roles whose layout
    # excludes this rank.
    schedules: dict[str, Any] = {}
    roles_meta: dict[str, Any] = {}
    for name, role in roles.items():
        step_count = None
        if role.optimizer is not None:
            step_count = role.optimizer.scheduler.num_steps
        schedules[name] = _broadcast_from_layout(step_count, role.model)

        role_meta = None
        if role.model is not None:
            role_meta = _role_meta(role.model, role.optimizer, optimizer_format)
        roles_meta[name] = _broadcast_from_layout(role_meta, role.model)

    run_state = _broadcast_from_layout(dict(state), roles[actor_name].model)
    content = {"state": run_state, "schedules": schedules}
    meta = dict(roles_meta[actor_name])
    meta.update(_run_meta(state))
    meta["roles"] = roles_meta
    generator_path = partial_folder / "rng" / f"rank_{device.rank()}.pt"
    state_path = partial_folder / "state.pt"

    def prepare() -> None:
        _prepare_folders(final, roles, optimizer_format, checkpoint_bytes)

    def write_rank_files() -> None:
        torch.save(_generator_states(), generator_path)
        if device.rank() == 0:
            torch.save(content, state_path)
            write_meta(partial_folder, meta)

    run_write_step(prepare, "prepare the checkpoint's folder", final)
    run_write_step(write_rank_files, "write the state of the run", final)

    # Copy the tensors of each role, then write them from a thread.
    files = [generator_path]
    if device.rank() == 0:
        files.append(state_path)
    writes: list[TensorWrite] = []
    try:
        for name, role in roles.items():
            # Copy tensors that may change before they are written: a background write runs while the model is
            # trained, and `role.weights()` puts other weights into the model only for a moment.
            needs_copies = in_background or role.weights is not nullcontext
            with role.weights():
                write = plan_tensor_write(
                    partial_folder / name,
                    role.model,
                    role.optimizer,
                    optimizer_format,
                    copy_host_tensors=needs_copies,
                )
            writes.append(write)
            files += write.files
            if optimizer_format == SAME:
                files += write_shard_index(partial_folder / name, role.model, role.optimizer)
    except Exception as error:
        raise convert_write_error(error, final) from error

    checkpoint = PendingCheckpoint(final, writes, files, keep, best_steps)
    if not in_background:
        checkpoint.finish()
    return checkpoint


def _prepare_folders(
    checkpoint_folder: Path,
    roles: Mapping[str, TrainedRole],
    optimizer_format: str,
    checkpoint_bytes: float,
) -> None:
    """Create the partial folder of a checkpoint; raise UserError if the checkpoint cannot be written.

    The partial folder is renamed to ``checkpoint_folder`` when the checkpoint is complete.
    ``optimizer_format`` is `ANY` if distributed optimizers are saved as complete states, and `SAME` if they
    are saved as shards. ``checkpoint_bytes`` is the size of the complete checkpoint, which is compared with
    the free disk space.
    """
    if optimizer_format == SAME:
        for role in roles.values():
            require_savable_shards(role.optimizer)

    if device.rank() == 0:
        # Remove the partial folder of a save that was killed.
        partial_folder = partial_path(checkpoint_folder)
        durable.remove_path(partial_folder)
        parent = checkpoint_folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        durable.require_space(parent, checkpoint_bytes, f"the checkpoint {checkpoint_folder.name}")
        for name in (*roles, "rng"):
            (partial_folder / name).mkdir(parents=True)


def _stored_bytes(role: TrainedRole) -> int:
    """Return this rank's contribution to the size of a role's checkpoint, in bytes.

    The sum over all ranks is the size of the role's files.
    """
    if role.model is None:
        return 0

    # Data- and context-parallel ranks hold the same weights: count only the weights of the first rank.
    coordinates = role.model.groups.coordinates
    if coordinates.data != 0 or coordinates.context != 0:
        return 0

    parameters: list[Tensor] = []
    if role.model.adapters is not None:
        parameters += adapter_parameters(role.model).values()
    else:
        for chunk in role.model.chunks:
            parameters += chunk.parameters()

    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    if role.optimizer is not None:
        num_bytes += _OPTIMIZER_BYTES * sum(parameter.numel() for parameter in parameters)
    return num_bytes


def _broadcast_from_layout(value: Any, model: ParallelModel | None) -> Any:
    """Broadcast the value of the first rank in the model's layout to all ranks of the world.

    Ranks outside the layout pass None as ``model``. Collective over the world.
    """
    # Wrap the value in a tuple, since the value itself may be None.
    boxed_value = None
    if model is not None and model.groups.layout.ranks[0] == device.rank():
        boxed_value = (value,)

    for rank_value in gather_objects(boxed_value):
        if rank_value is not None:
            return rank_value[0]
    return value


# --- Loading


def load_checkpoint(
    directory: str | Path,
    roles: Mapping[str, TrainedRole],
    value_types: Sequence[type] = (),
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Restore a checkpoint into models and optimizers on any layouts; return the saved ``state``.

    ``value_types`` are classes that ``state`` may contain besides plain values and tensors. Raises UserError
    if loading could run code from the checkpoint, unless it is ``trusted``.

    If all roles have the layouts of the save, the random generators of every rank are restored; otherwise
    they are seeded from the saved seed and step. Learning rate, decay and other configured settings are not
    restored. Raises UserError, before any tensor changes, if the checkpoint has a different model or
    optimizer. Collective over the world.
    """
    folder = Path(directory)

    # Verify everything before the first tensor is read.
    meta = read_meta(folder)
    require_state_format(folder, meta)
    require_roles(folder, meta, roles)
    roles_meta = meta["roles"]
    for name, role in roles.items():
        if role.model is not None:
            _require_same_role(folder, roles_meta[name], name, role.model, role.optimizer)
            if role.optimizer is not None:
                require_layout(folder, name, meta, _layout_meta(role.model))

    # Inspect the pickles of the checkpoint before any of them is loaded.
    for name in roles:
        refuse_code(folder / name, trusted=trusted)
    content = _read_file(folder / "state.pt", value_types)

    # Both load functions below are collective over the world: every rank needs every role's layout to select
    # the same function.
    layouts: dict[str, Any] = {}
    for name, role in roles.items():
        role_layout = None
        if role.model is not None:
            role_layout = _layout_meta(role.model)
        layouts[name] = _broadcast_from_layout(role_layout, role.model)

    for name, role in roles.items():
        role_meta = roles_meta[name]
        role_folder = folder / name
        with role.weights():
            if loads_without_resharding(role_meta, layouts[name]):
                load_tensors(role_folder, role.model, role.optimizer, saved_optimizer_format(role_meta))
            else:
                load_shards(role_folder, role.model, role.optimizer)

        # Restore only the position in the learning-rate schedule: the configuration determines the schedule.
        if role.optimizer is not None:
            scheduler = role.optimizer.scheduler
            scheduler.num_steps = 0
            scheduler.step(content["schedules"][name])

    # The state of a rank's generators depends on its shards, so it is valid only for the layouts of the save.
    if all(layouts[name] == roles_meta[name]["layout"] for name in roles):
        generator_path = folder / "rng" / f"rank_{device.rank()}.pt"
        _set_generator_states(_read_file(generator_path))
    else:
        actor = next(iter(roles.values()))
        seed_all_generators(int(meta["seed"]), int(meta["step"]), actor.model)
    return content["state"]


def read_state(directory: str | Path) -> dict[str, Any]:
    """Return the ``state`` that `save_checkpoint` stored; it must consist of plain values and tensors."""
    require_state_format(directory, read_meta(directory))
    return _read_file(Path(directory) / "state.pt")["state"]


def load_actor_weights(
    directory: str | Path,
    model: ParallelModel | None,
    *,
    trusted: bool = False,
) -> dict[str, Any]:
    """Restore the actor's weights without its optimizer; return the content of meta.json.

    Raises UserError as `load_checkpoint` does, and for damaged files. Collective over the world.
    """
    folder = Path(directory)
    require_intact_checkpoint(folder)
    meta = read_meta(folder)
    refuse_code(folder / "actor", trusted=trusted)
    if model is not None:
        _require_same_role(folder, meta, "actor", model, None)
    load_tensors(folder / "actor", model, None)
    return meta


def _read_file(path: Path, value_types: Sequence[type] = ()) -> Any:
    """Read a file of plain values, tensors and ``value_types`` that torch.save wrote.

    Raises UserError if the file is unreadable or contains an object of the wrong type.
    """
    try:
        with torch.serialization.safe_globals(list(value_types)):
            return torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise unreadable_file_error(
            "a file of the checkpoint",
            path,
            error,
            expected="plain values and tensors, as a save writes them",
            fix="use another checkpoint: this one is damaged or from another version of megatron_rl",
        ) from error


# --- meta.json


def _run_meta(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of meta.json about the run: step, seed and package versions."""
    return {
        "step": int(state["step"]),
        "seed": int(state["seed"]),
        "versions": installed_versions(DISTRIBUTIONS_AFFECTING_RESULTS),
    }


def _role_meta(
    model: ParallelModel,
    optimizer: Optimizer | None,
    optimizer_format: str,
) -> dict[str, Any]:
    """Return the description of a role's model and optimizer for meta.json.

    When the checkpoint is loaded, the description is compared with the model and optimizer of the loading
    run. ``optimizer_format`` is `ANY` if distributed optimizers are saved as complete states, and `SAME` if
    they are saved as shards.
    """
    is_distributed = optimizer is not None and optimizer.config.distributed
    is_adam = optimizer is not None and optimizer.config.name == "adam"

    # If an optimizer is not distributed, Megatron saves complete states whatever the format is.
    saved_format = ANY
    if is_distributed:
        saved_format = optimizer_format

    # Shards of Adam can be loaded on other parallel layouts, with the index that `write_shard_index` writes.
    # Shards of any other optimizer cannot.
    has_loadable_index = is_distributed and is_adam and optimizer_format == SAME

    return {
        "model": model_identity(describe_model(model.hf_config)),
        "dtype": _dtype_name(model),
        "layers": _layer_kind(model),
        "optimizer": _optimizer_kind(optimizer),
        "optimizer_layout": saved_format,
        "indexed_shards": has_loadable_index,
        "adapters": _describe_adapters(model),
        "base": _adapter_base_checksum(model),
        "layout": _layout_meta(model),
    }


def _layout_meta(model: ParallelModel) -> dict[str, Any]:
    """Return the parallel layout of a model as it is stored in meta.json."""
    layout_fields = asdict(model.groups.layout)
    # JSON has no tuples, and the result is compared with a layout that was read from a file.
    layout_fields["ranks"] = list(layout_fields["ranks"])
    layout_fields["world_size"] = device.world_size()
    return layout_fields


def _dtype_name(model: ParallelModel) -> str:
    """Return the name of the dtype of the model's parameters, such as "bfloat16"."""
    return str(model.transformer_config.params_dtype).removeprefix("torch.")


def _layer_kind(model: ParallelModel) -> str:
    """Return the implementation of the model's layers: "transformer_engine" or "torch"."""
    if model.uses_transformer_engine:
        return "transformer_engine"
    return "torch"


def _optimizer_kind(optimizer: Optimizer | None) -> str | None:
    """Return the name of the optimizer in meta.json, or None without an optimizer."""
    if optimizer is None:
        return None
    return optimizer_kind(optimizer.config.name, optimizer.config.distributed)


def _describe_adapters(model: ParallelModel) -> str | None:
    """Describe rank, alpha and targets of the model's LoRA adapters, or return None without adapters."""
    adapters = model.adapters
    if adapters is None:
        return None
    return format_adapters(adapters.rank, adapters.alpha, adapters.targets)


def _adapter_base_checksum(model: ParallelModel) -> str | None:
    """Return the checksum of the base weights of the model's adapters, or None without adapters."""
    if model.adapters is None:
        return None
    return model.adapters.base


def _require_same_role(
    folder: Path,
    meta: Mapping[str, Any],
    role: str,
    model: ParallelModel,
    optimizer: Optimizer | None,
) -> None:
    """Raise UserError if a role was saved with a different model, layer kind, adapter or optimizer.

    ``meta`` is the role's entry in meta.json. Without ``optimizer``, optimizer and dtype are not compared.
    """
    require_same_model(folder, meta["model"], describe_model(model.hf_config))
    properties = {
        "layers": _layer_kind(model),
        "adapters": _describe_adapters(model),
        "base": _adapter_base_checksum(model),
    }

    if optimizer is not None:
        properties |= {"optimizer": _optimizer_kind(optimizer), "dtype": _dtype_name(model)}
    require_same_properties(folder, role, meta, properties)


# --- Random generators


def _generator_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch as plain values and tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)
    # Convert the array to a list, because torch.load(weights_only=True) refuses NumPy arrays.
    generator = dict(numpy_state["state"])
    generator["key"] = generator["key"].tolist()
    numpy_state["state"] = generator
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": device.generator_states(),
    }


def _set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the random generators of Python, NumPy and torch to the states from `_generator_states`."""
    random.setstate(states["python"])

    numpy_state = dict(states["numpy"])
    generator = dict(numpy_state["state"])
    generator["key"] = np.array(generator["key"], dtype=np.uint32)
    numpy_state["state"] = generator
    np.random.set_state(numpy_state)

    device.set_generator_states(states["torch"])


def seed_all_generators(seed: int, step: int, model: ParallelModel | None) -> None:
    """Seed every random generator of this rank from the run's seed and a step.

    The seed of the device's generators also depends on the tensor-parallel rank in ``model``.
    """
    # SeedSequence hashes both numbers, so that consecutive steps have unrelated seeds. All generators accept
    # a seed of 31 bits.
    seed_sequence = np.random.SeedSequence([seed, step])
    hashed_seed = int(seed_sequence.generate_state(1)[0]) >> 1
    random.seed(hashed_seed)
    np.random.seed(hashed_seed)

    tensor_rank = 0
    if model is not None:
        tensor_rank = model.groups.coordinates.tensor
    device.seed_generators(hashed_seed, tensor_rank)
