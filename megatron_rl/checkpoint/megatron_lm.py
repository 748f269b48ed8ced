"""Checkpoints for Megatron-LM: write weights that it loads, and read the state of Adam that it saved.

The idea: both directions go through Megatron's distributed format, which any layout can read. So a written
checkpoint has no layout, and a saved optimizer is read slice by slice on the layout of this run.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_rl import durable
from megatron_rl.checkpoint.folders import partial_of, run_write_step, write_error, write_tensors
from megatron_rl.checkpoint.tensors import initialise_states, megatron_scope, restore_steps, sharded_state
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.errors import UserError
from megatron_rl.hf.megatron_source import BufferFiles, MegatronFiles, read_pointed_checkpoint
from megatron_rl.hf.weights import assigned_parameters, fill_parameters, source_boxes
from megatron_rl.interop.megatron_lm.arguments import arguments_of
from megatron_rl.interop.megatron_lm.checkpoint import TRACKER, MegatronCheckpoint, read_pointer
from megatron_rl.interop.megatron_lm.pickles import MASTERS
from megatron_rl.megatron.lora import without_adapters
from megatron_rl.megatron.model import ParallelModel, live_parameters
from megatron_rl.megatron.optimizer import HostOptimizer, Optimizer, set_states
from megatron_rl.megatron.parameter_mapping import vocabulary_names
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import TensorBox

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by."""
_MOST_POSITIONS = 1 << 20
"""Largest --max-position-embeddings that is written."""
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Metadata that tells Megatron-LM's reader how sharded states are named."""
_LISTED = 6
"""Names that an error lists."""


# --- Writing for Megatron-LM


def checkpoint_arguments(source: str | Path) -> tuple[dict[str, Any], int]:
    """Return the arguments of a model's Megatron checkpoints, and the iteration that they count from.

    ``source`` is the folder of the model that training began with. If it points to a Megatron checkpoint,
    they are that checkpoint's; otherwise the arguments follow from config.json. Raises UserError for a model
    that Megatron-LM has no arguments for.
    """
    model = read_pretrained(Path(source) / "config.json")
    arguments = arguments_of(model)
    origin = read_pointer(source)
    if origin is not None:
        return dict(origin["arguments"]), int(origin["iteration"])

    positions = min(model.shape.max_positions, _MOST_POSITIONS)
    padding = -model.shape.vocab % VOCABULARY_MULTIPLE
    padded_vocabulary = model.shape.vocab + padding

    # Arguments that pretrain_gpt.py needs in addition to the model's.
    arguments |= {
        "seq_length": positions,
        "max_position_embeddings": positions,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(Path(source).resolve()),
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "padded_vocab_size": padded_vocabulary,
    }
    return arguments, 0


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder of one iteration in the --save folder of Megatron-LM."""
    return Path(folder) / f"iter_{iteration:07d}"


def save_megatron(
    folder: str | Path,
    model: ParallelModel | None,
    arguments: Mapping[str, Any],
    iteration: int,
    keep: int | None = None,
) -> Path:
    """Write ``iter_N`` and the tracker for pretrain_gpt.py --load; return the path of ``iter_N``.

    ``arguments`` come from `checkpoint_arguments`, equal on every rank. Adapters are merged into the
    weights. Optimizer and random generators are not stored, as the arguments state. Older iterations beyond
    ``keep`` are removed. Collective over the world; the folder is on a file system that all ranks share.
    """
    final = iteration_folder(folder, iteration)
    partial_folder = partial_of(final)

    def prepare() -> None:
        if device.rank() == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            # A kill may have interrupted the replacement of an iteration.
            durable.recover_replaced(final.parent)
            durable.remove(partial_folder)
            partial_folder.mkdir()

    def publish() -> None:
        if device.rank() == 0:
            durable.publish(partial_folder, final)
            # The tracker names an iteration only when it is complete.
            durable.write_text(final.parent / TRACKER, str(iteration))
            for old_folder in _surplus_iterations(final, keep):
                durable.remove(old_folder)

    run_write_step(prepare, "prepare the folder of the Megatron checkpoint", final)
    try:
        with megatron_scope(model), without_adapters(model):
            write_tensors(partial_folder, model, _state(model, arguments, iteration), _CONTENT)
    except Exception as error:
        raise write_error(error, final) from error
    run_write_step(publish, "complete the Megatron checkpoint", final)
    return final


def _surplus_iterations(final: Path, keep: int | None) -> list[Path]:
    """Return the oldest iterations before ``final`` that exceed ``keep``, which counts ``final`` too."""
    if keep is None:
        return []

    # Names sort as iterations do: their numbers have leading zeros.
    earlier: list[Path] = []
    for path in sorted(final.parent.glob("iter_*")):
        if re.fullmatch(r"iter_\d+", path.name) and path.name < final.name:
            earlier.append(path)
    surplus = len(earlier) + 1 - keep
    return earlier[: max(surplus, 0)]


def _state(
    model: ParallelModel | None,
    arguments: Mapping[str, Any],
    iteration: int,
) -> dict[str, Any]:
    """Return the state of a Megatron-LM checkpoint without optimizer, schedule and random generators."""
    namespace = {
        **{name: _torch_value(value) for name, value in arguments.items()},
        "iteration": iteration,
        # If the sizes are its own, Megatron-LM expects random generators, which are not stored.
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }

    state: dict[str, Any] = {
        "args": Namespace(**namespace),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0.0,
    }
    if model is None:
        return state

    vocabulary_rows = int(arguments["padded_vocab_size"])
    chunks, _ = sharded_state(model, None, is_loading=False)
    for index, chunk in enumerate(chunks.values()):
        # Megatron-LM numbers the chunks only if a stage has several.
        name = "model"
        if len(chunks) > 1:
            name = f"model{index}"
        state[name] = {key: _with_rows(model, value, vocabulary_rows) for key, value in chunk.items()}
    return state


def _torch_value(value: Any) -> Any:
    """Return the torch object that a string such as ``torch.bfloat16`` names; other values as they are."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def _with_rows(model: ParallelModel, value: Any, row_count: int) -> Any:
    """Return a sharded vocabulary tensor with ``row_count`` rows in all, and other values as they are.

    This layout pads the vocabulary to a multiple of its tensor-parallel ranks, Megatron-LM to its own
    multiple. The last rank adds or drops rows of padding.
    """
    vocabulary = vocabulary_names(model.spec.model.shape)
    if not isinstance(value, ShardedTensor) or value.key not in vocabulary:
        return value
    if value.data is None:
        return value

    data = value.data
    tensor_rank = model.groups.coordinates.tensor
    start = tensor_rank * len(data)
    is_last_rank = tensor_rank == model.groups.layout.tensor - 1
    if is_last_rank:
        rank_rows = row_count - start
        rows = data[:rank_rows]
        padding = rows.new_zeros(rank_rows - len(rows), data.shape[1])
        data = torch.cat([rows, padding])

    return replace(
        value,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(row_count, *value.global_shape[1:]),
        global_offset=(start, *value.global_offset[1:]),
        # The shards differ in size.
        axis_fragmentations=None,
    )


# --- Adam's state from Megatron-LM


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, source: str | Path) -> None:
    """Restore Adam's moments and step count from the Megatron checkpoint that a model's folder points to.

    float32 master weights are restored too, if they were saved. Each rank reads the slices of its own
    tensors, on any layout; learning rate and decay stay as configured. Raises UserError, on all ranks, if
    master weights in flat buffers differ from the checkpoint's weights. Collective over the model's ranks.
    """
    model = optimizer.model
    with model.scope():
        initialise_states(optimizer)
    checkpoint = read_pointed_checkpoint(source)
    assert checkpoint.steps is not None, "checked before"

    # One state at a time, on the host: a rank keeps only its data-parallel share of it.
    for state, open_files in _states(model, source, checkpoint):
        values: dict[str, Tensor] = {}
        for parameter_name, parameter in live_parameters(model).items():
            values[parameter_name] = torch.zeros(parameter.shape, device=device.host())
        fill_parameters(values, model, open_files)

        # Megatron's optimizers call the master weights "param".
        state_name = state
        if state in MASTERS:
            state_name = "param"
        for sub_optimizer in optimizer.parts:
            _set_state(model, sub_optimizer, state_name, values)

    restore_steps(optimizer, checkpoint.steps)
    for sub_optimizer in optimizer.parts:
        if isinstance(sub_optimizer.optimizer, HostOptimizer):
            sub_optimizer.optimizer.copy_restored_state()


def _states(
    model: ParallelModel,
    source: str | Path,
    checkpoint: MegatronCheckpoint,
) -> Iterator[tuple[str, Callable[[], MegatronFiles]]]:
    """Yield each optimizer state with a function that opens its files. Collective over the model's ranks."""
    # A fully reshardable optimizer has a tensor per parameter and state.
    if checkpoint.states:
        for state in checkpoint.states:
            yield state, partial(MegatronFiles, source, checkpoint.state(state))
        return

    # Any other one has flat buffers without names.
    buffers = _verified_buffers(model, source, checkpoint)
    for state in checkpoint.buffers:
        yield state, partial(buffers.with_state, state)


def _verified_buffers(
    model: ParallelModel,
    source: str | Path,
    checkpoint: MegatronCheckpoint,
) -> BufferFiles:
    """Return the optimizer's flat buffers with the parameter order that agrees with the model's weights.

    Flat buffers have no parameter names, but their float32 master weights must equal the model's weights.
    Each rank compares the parameters that it reads in `fill_parameters`. Raises UserError on all ranks if no
    order agrees. Collective over the model's ranks.
    """
    # The model weights, to compare the master weights with.
    weights = MegatronFiles(source, checkpoint)
    assigned_names = assigned_parameters(live_parameters(model), model)
    boxes = [box for box in source_boxes(model) if box.storage in assigned_names]

    shape = read_pretrained(Path(source) / "config.json").shape
    differing: list[str] = []
    for parameters in checkpoint.flat_parameters(shape):
        masters = BufferFiles(source, checkpoint, parameters)
        names = run_on_all_ranks_or_raise(
            partial(_first_difference, masters, weights, boxes),
            "read the optimizer's state",
            model.groups.all,
        )
        differing = [name for name in names if name is not None]
        if not differing:
            return masters

    names = ", ".join(sorted(set(differing))[:_LISTED])
    raise UserError(
        "the optimizer's buffers in the Megatron checkpoint hold other weights than its model does",
        where="model.resume_optimizer",
        expected="the weights in float32, from the last parameter of Megatron's GPTModel to its first, "
        "each from a multiple of 64 elements",
        got=f"{checkpoint.path}: other values in the place of {names}",
        fix="load and save it with Megatron-LM on its layout, with --dist-ckpt-optim-fully-reshardable; "
        "or remove model.resume_optimizer: the optimizer starts from zero",
    )


def _first_difference(
    masters: MegatronFiles,
    weights: MegatronFiles,
    boxes: Sequence[TensorBox],
) -> str | None:
    """Return the tensor of the first of ``boxes`` whose master weights differ from the weights, or None."""
    for box in boxes:
        if not _agree(masters, weights, box):
            return box.name
    return None


def _agree(masters: MegatronFiles, weights: MegatronFiles, box: TensorBox) -> bool:
    """Return whether the master weights of a box equal the weights up to rounding."""
    master = masters.read(box.name, box.start, box.size)
    weight = weights.read(box.name, box.start, box.size)

    # A weight is its master rounded to the weight's dtype; below the smallest normal number absolutely.
    rounding = torch.finfo(weight.dtype)
    return torch.allclose(
        master.float(),
        weight.float(),
        rtol=rounding.eps,
        atol=rounding.smallest_normal,
    )


def _set_state(
    model: ParallelModel,
    sub_optimizer: Any,
    state: str,
    values: Mapping[str, Tensor],
) -> None:
    """Copy one optimizer state into one of Megatron's optimizers, from complete tensors by parameter name."""
    is_distributed = hasattr(sub_optimizer, "model_param_gbuf_map")
    for index, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            value = values[f"{index}.{name}"]
            if is_distributed:
                _set_shard(sub_optimizer, parameter, state, value)
            else:
                _set_complete(sub_optimizer, parameter, state, value)


def _set_shard(
    sub_optimizer: Any,
    parameter: Any,
    state: str,
    value: Tensor,
) -> None:
    """Copy this rank's range of a flattened parameter into a distributed optimizer that has the parameter."""
    # Dense and expert parameters are in optimizers of their own.
    if parameter not in sub_optimizer.model_param_gbuf_map:
        return

    shard = sub_optimizer._get_model_param_range_map(parameter)["param"]
    shard_values = value.flatten()[shard.start : shard.end]
    set_states(sub_optimizer, parameter, {state: shard_values})


def _set_complete(
    sub_optimizer: Any,
    parameter: Any,
    state: str,
    value: Tensor,
) -> None:
    """Copy a state into an optimizer that is not distributed and has the parameter."""
    # It has a master weight for each half-precision one.
    main_parameter = getattr(parameter, "main_param", parameter)
    optimizer_state = sub_optimizer.optimizer.state
    if main_parameter not in optimizer_state:
        return

    if state == "param":
        main_parameter.copy_(value)
    else:
        optimizer_state[main_parameter][state].copy_(value)
