"""Exchange of checkpoints with Megatron-LM: write weights for it, and read Adam's state that it saved.

The idea: both directions use Megatron's distributed format, which any parallel layout can read. Megatron-LM
can therefore load a written checkpoint on any layout, and each rank of this run reads only the slices of a
saved optimizer that its own layout needs.
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
from megatron_rl.checkpoint.folders import convert_write_error, partial_path, run_write_step, write_tensors
from megatron_rl.checkpoint.tensors import initialise_states, megatron_scope, restore_steps, sharded_state
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.errors import UserError
from megatron_rl.hf.megatron_source import BufferFiles, MegatronFiles, read_pointed_checkpoint
from megatron_rl.hf.weights import assigned_parameters, fill_parameters, source_boxes
from megatron_rl.interop.megatron_lm.arguments import derive_arguments
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
_MAX_POSITIONS = 1 << 20
"""Upper bound of --max-position-embeddings in written checkpoints."""
_CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Metadata from which Megatron-LM's loader derives the names of sharded states."""
_MAX_NAMES_LISTED = 6
"""Maximum number of tensor names in an error."""


# --- Writing for Megatron-LM


def checkpoint_arguments(source: str | Path) -> tuple[dict[str, Any], int]:
    """Return the Megatron-LM arguments to save with a model, and the iteration at the start of training.

    ``source`` is the folder of the model from which training started. If it points to a Megatron checkpoint,
    arguments and iteration are read from this checkpoint. Otherwise the arguments are derived from
    config.json, and the iteration is 0. Raises UserError for a model that Megatron-LM's arguments cannot
    describe.
    """
    model = read_pretrained(Path(source) / "config.json")
    arguments = derive_arguments(model)
    pointer = read_pointer(source)
    if pointer is not None:
        return dict(pointer["arguments"]), int(pointer["iteration"])

    positions = min(model.shape.max_positions, _MAX_POSITIONS)
    padding = -model.shape.vocab % VOCABULARY_MULTIPLE
    padded_vocabulary = model.shape.vocab + padding

    # Add further arguments that pretrain_gpt.py needs.
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
    """Return the path of one iteration, such as ``iter_0000100``, in Megatron-LM's --save folder."""
    return Path(folder) / f"iter_{iteration:07d}"


def save_megatron(
    folder: str | Path,
    model: ParallelModel | None,
    arguments: Mapping[str, Any],
    iteration: int,
    keep: int | None = None,
) -> Path:
    """Write ``iter_N`` and the tracker for pretrain_gpt.py --load; return the path of ``iter_N``.

    ``arguments`` come from `checkpoint_arguments` and are equal on every rank. Ranks outside the model's
    layout pass None as ``model``. Adapters are merged into the weights. Optimizer and random generators are
    not saved: the saved arguments contain --no-save-optim and --no-save-rng. The newest ``keep`` iterations
    are retained, by default all. Collective over the world; the folder is on a file system that all ranks
    share.
    """
    final = iteration_folder(folder, iteration)
    partial_folder = partial_path(final)

    def prepare() -> None:
        if device.rank() == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            # If a kill interrupted the replacement of an iteration, rename the old iteration back.
            durable.recover_replaced(final.parent)
            durable.remove_path(partial_folder)
            partial_folder.mkdir()

    def publish() -> None:
        if device.rank() == 0:
            durable.publish_folder(partial_folder, final)
            # Write the tracker last: it must never name an incomplete iteration.
            durable.write_text(final.parent / TRACKER, str(iteration))
            for old_folder in _surplus_iterations(final, keep):
                durable.remove_path(old_folder)

    run_write_step(prepare, "prepare the folder of the Megatron checkpoint", final)
    try:
        with megatron_scope(model), without_adapters(model):
            write_tensors(partial_folder, model, _build_state(model, arguments, iteration), _CONTENT_METADATA)
    except Exception as error:
        raise convert_write_error(error, final) from error
    run_write_step(publish, "complete the Megatron checkpoint", final)
    return final


def _surplus_iterations(final: Path, keep: int | None) -> list[Path]:
    """Return the oldest iterations to remove, so that ``keep`` iterations up to ``final`` remain."""
    if keep is None:
        return []

    # Alphabetical order is the order of iterations: their numbers have leading zeros.
    earlier_folders: list[Path] = []
    for path in sorted(final.parent.glob("iter_*")):
        if re.fullmatch(r"iter_\d+", path.name) and path.name < final.name:
            earlier_folders.append(path)
    num_surplus = len(earlier_folders) + 1 - keep
    return earlier_folders[: max(num_surplus, 0)]


def _build_state(
    model: ParallelModel | None,
    arguments: Mapping[str, Any],
    iteration: int,
) -> dict[str, Any]:
    """Build Megatron-LM's checkpoint state: arguments, iteration and the sharded weights of this rank.

    The state has no optimizer, learning-rate schedule or random generators.
    """
    saved_arguments = {name: _torch_value(value) for name, value in arguments.items()}
    saved_arguments |= {
        "iteration": iteration,
        # If Megatron-LM runs with these tensor- and pipeline-parallel sizes, it loads the states of the
        # random generators. The checkpoint has no such states, so `no_save_rng` below disables this.
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }

    state: dict[str, Any] = {
        "args": Namespace(**saved_arguments),
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
        state[name] = {key: _resize_vocabulary(model, value, vocabulary_rows) for key, value in chunk.items()}
    return state


def _torch_value(value: Any) -> Any:
    """Convert a string like "torch.bfloat16" to the attribute of torch; return other values unchanged."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def _resize_vocabulary(model: ParallelModel, value: Any, num_rows: int) -> Any:
    """Pad or shorten a sharded embedding or output tensor to ``num_rows`` rows in total.

    This run pads the vocabulary to a multiple of its tensor-parallel size, Megatron-LM to a multiple of 128.
    The last tensor-parallel rank adds or removes rows of padding. Other values are returned unchanged.
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
        num_rank_rows = num_rows - start
        rows = data[:num_rank_rows]
        padding = rows.new_zeros(num_rank_rows - len(rows), data.shape[1])
        data = torch.cat([rows, padding])

    return replace(
        value,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(num_rows, *value.global_shape[1:]),
        global_offset=(start, *value.global_offset[1:]),
        # Megatron stores the number of equal shards here. None allows a last shard of a different size.
        axis_fragmentations=None,
    )


# --- Adam's state from Megatron-LM


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, source: str | Path) -> None:
    """Restore Adam's moments and step count from a Megatron checkpoint.

    ``source`` is a model folder that points to the checkpoint. Float32 master weights are restored too, if
    they were saved. Each rank reads only the slices that its shard of the model needs, on any layout. The
    configured learning rate and decay are not changed. Raises UserError, on all ranks, if master weights in
    flat buffers differ from the checkpoint's weights. Collective over the model's ranks.
    """
    model = optimizer.model
    with model.scope():
        initialise_states(optimizer)
    checkpoint = read_pointed_checkpoint(source)
    assert checkpoint.steps is not None, "model.resume_optimizer has been validated"

    # Restore one optimizer state at a time: host memory holds its values for all parameters of this rank.
    for stored_name, open_files in _iterate_optimizer_states(model, source, checkpoint):
        values: dict[str, Tensor] = {}
        for parameter_name, parameter in live_parameters(model).items():
            values[parameter_name] = torch.zeros(parameter.shape, device=device.host())
        fill_parameters(values, model, open_files)

        # Megatron's optimizers call the master weights "param".
        state_name = stored_name
        if stored_name in MASTERS:
            state_name = "param"
        for sub_optimizer in optimizer.sub_optimizers:
            _set_state(model, sub_optimizer, state_name, values)

    restore_steps(optimizer, checkpoint.steps)
    for sub_optimizer in optimizer.sub_optimizers:
        if isinstance(sub_optimizer.optimizer, HostOptimizer):
            sub_optimizer.optimizer.copy_restored_state()


def _iterate_optimizer_states(
    model: ParallelModel,
    source: str | Path,
    checkpoint: MegatronCheckpoint,
) -> Iterator[tuple[str, Callable[[], MegatronFiles]]]:
    """Yield each optimizer state's name with a function that opens its tensors for reading.

    Collective over the model's ranks.
    """
    # An optimizer in the fully reshardable format has a named tensor per parameter and state.
    if checkpoint.states:
        for state in checkpoint.states:
            yield state, partial(MegatronFiles, source, checkpoint.with_state(state))
        return

    # Other formats have flat buffers without parameter names.
    buffers = _open_verified_buffers(model, source, checkpoint)
    for state in checkpoint.buffers:
        yield state, partial(buffers.with_state, state)


def _open_verified_buffers(
    model: ParallelModel,
    source: str | Path,
    checkpoint: MegatronCheckpoint,
) -> BufferFiles:
    """Return a reader of the optimizer's flat buffers that uses the correct order of parameters.

    Flat buffers have no parameter names, so the order of the parameters has to be found. An order is correct
    if the float32 master weights in the buffers then equal the checkpoint's model weights. Each rank compares
    the parameters that it will read. Raises UserError on all ranks if no order is correct. Collective over
    the model's ranks.
    """
    # Model weights to compare the master weights with.
    weights = MegatronFiles(source, checkpoint)
    assigned_names = assigned_parameters(live_parameters(model), model)
    boxes = [box for box in source_boxes(model) if box.storage in assigned_names]

    shape = read_pretrained(Path(source) / "config.json").shape
    differing_names: list[str] = []
    for parameters in checkpoint.list_arrangements(shape):
        master_weights = BufferFiles(source, checkpoint, parameters)
        names = run_on_all_ranks_or_raise(
            partial(_find_first_difference, master_weights, weights, boxes),
            "read the optimizer's state",
            model.groups.all,
        )
        differing_names = [name for name in names if name is not None]
        if not differing_names:
            return master_weights

    listed_names = ", ".join(sorted(set(differing_names))[:_MAX_NAMES_LISTED])
    raise UserError(
        "the master weights in the Megatron checkpoint's optimizer differ from the weights of its model",
        where="model.resume_optimizer",
        expected="the float32 weights in the reverse order of GPTModel's parameters, with each parameter "
        "aligned to 64 elements",
        got=f"{checkpoint.path}: other values at the positions of {listed_names}",
        fix="load and save the checkpoint with Megatron-LM on the layout that saved it, with "
        "--dist-ckpt-optim-fully-reshardable; "
        "or remove model.resume_optimizer: the optimizer starts from zero",
    )


def _find_first_difference(
    master_weights: MegatronFiles,
    weights: MegatronFiles,
    boxes: Sequence[TensorBox],
) -> str | None:
    """Return the name of the first tensor in ``boxes`` whose master weights differ from the model weights.

    Returns None if all tensors are equal up to rounding.
    """
    for box in boxes:
        if not _is_equal_up_to_rounding(master_weights, weights, box):
            return box.name
    return None


def _is_equal_up_to_rounding(master_weights: MegatronFiles, weights: MegatronFiles, box: TensorBox) -> bool:
    """Return whether master weights equal the model weights in a box (slice) of a tensor, up to rounding."""
    master = master_weights.read(box.name, box.start, box.size)
    weight = weights.read(box.name, box.start, box.size)

    # A weight is its master weight rounded to the model's dtype. The rounding error is relative, except below
    # the smallest normal number, where it is absolute.
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
    state_name: str,
    values: Mapping[str, Tensor],
) -> None:
    """Copy one optimizer state into one of Megatron's optimizers.

    ``values`` has a tensor of the parameter's shape for each storage name, ``<chunk>.<parameter name>``.
    """
    is_distributed = hasattr(sub_optimizer, "model_param_gbuf_map")
    for index, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            value = values[f"{index}.{name}"]
            if is_distributed:
                _set_state_shard(sub_optimizer, parameter, state_name, value)
            else:
                _set_complete_state(sub_optimizer, parameter, state_name, value)


def _set_state_shard(
    sub_optimizer: Any,
    parameter: Any,
    state_name: str,
    value: Tensor,
) -> None:
    """Copy this rank's data-parallel range of a state into a distributed optimizer.

    Does nothing if the optimizer does not have the parameter.
    """
    # Dense and expert parameters are in separate optimizers.
    if parameter not in sub_optimizer.model_param_gbuf_map:
        return

    shard = sub_optimizer._get_model_param_range_map(parameter)["param"]
    shard_values = value.flatten()[shard.start : shard.end]
    set_states(sub_optimizer, parameter, {state_name: shard_values})


def _set_complete_state(
    sub_optimizer: Any,
    parameter: Any,
    state_name: str,
    value: Tensor,
) -> None:
    """Copy a state into an optimizer that is not distributed.

    Does nothing if the optimizer does not have the parameter.
    """
    # The states of a half-precision parameter belong to its float32 master weight.
    main_parameter = getattr(parameter, "main_param", parameter)
    optimizer_state = sub_optimizer.optimizer.state
    if main_parameter not in optimizer_state:
        return

    if state_name == "param":
        main_parameter.copy_(value)
    else:
        optimizer_state[main_parameter][state_name].copy_(value)
