"""Weights as a checkpoint that Megatron-LM loads, and the state of Adam that one has which it saved."""

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
from megatron_rl.checkpoint.folders import disk_or, everywhere
from megatron_rl.checkpoint.tensors import initialise_states, sharded_state
from megatron_rl.checkpoint.writing import partial_of, write
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.errors import UserError
from megatron_rl.hf.megatron_optimizer_source import BufferFiles
from megatron_rl.hf.megatron_source import MegatronFiles, read_pointed
from megatron_rl.hf.weights import assigned_parameters, fill, source_boxes
from megatron_rl.interop.megatron_lm.arguments import arguments_of
from megatron_rl.interop.megatron_lm.checkpoint import TRACKER, MegatronCheckpoint, pointer
from megatron_rl.interop.megatron_lm.pickles import MASTERS
from megatron_rl.megatron.host_optimizer import HostOptimizer, set_states
from megatron_rl.megatron.lora import without_adapters
from megatron_rl.megatron.model import ParallelModel, live_parameters
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.megatron.parameter_mapping import vocabulary_names
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import TensorBox

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's default of --make-vocab-size-divisible-by."""
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def checkpoint_arguments(source: str | Path) -> tuple[dict[str, Any], int]:
    """Return the arguments and the iteration that a model's Megatron checkpoints begin from.

    ``source`` is the folder of the model that training began with. If it points to a Megatron checkpoint
    these are that one's, else they follow from config.json. Raises UserError for a model that Megatron-LM has
    no arguments for.
    """
    model = read_pretrained(Path(source) / "config.json")
    expected, origin = arguments_of(model), pointer(source)
    if origin is not None:
        return dict(origin["arguments"]), int(origin["iteration"])
    positions = min(model.shape.max_positions, 1 << 20)
    padded = -(-model.shape.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    more = {
        "seq_length": positions,
        "max_position_embeddings": positions,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(Path(source).resolve()),
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "padded_vocab_size": padded,
    }
    return {**expected, **more}, 0


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder of one iteration below that of --save."""
    return Path(folder) / f"iter_{iteration:07d}"


def save_megatron(
    folder: str | Path,
    model: ParallelModel | None,
    arguments: Mapping[str, Any],
    iteration: int,
    keep: int | None = None,
) -> Path:
    """Write ``iter_N`` and the tracker into a folder for pretrain_gpt.py --load; return its place.

    ``arguments`` are those of `checkpoint_arguments`, the same on every rank. Adapters are added in. There is
    no optimizer and no random generator in it, and its arguments say so. Older iterations beyond ``keep`` are
    removed. Collective over the world; the folder is on a file system that all ranks share.
    """
    final = iteration_folder(folder, iteration)
    aside = partial_of(final)

    def prepare() -> None:
        if device.rank() == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            durable.recover_replaced(final.parent)
            durable.remove(aside)
            aside.mkdir()

    def publish() -> None:
        if device.rank() == 0:
            durable.publish(aside, final)
            durable.write_text(final.parent / TRACKER, str(iteration))
            for old in _older(final, keep):
                durable.remove(old)

    everywhere(prepare, "prepare the folder of the Megatron checkpoint", final)
    try:
        with device.megatron_mode() if model is None else model.scope(), without_adapters(model):
            write(aside, model, _state(model, arguments, iteration), _CONTENT)
    except Exception as error:
        raise disk_or(error, final) from error
    everywhere(publish, "complete the Megatron checkpoint", final)
    return final


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, source: str | Path) -> None:
    """Resume Adam from the Megatron checkpoint that a model's folder points to: moments and step count.

    Master weights in float32 are loaded too, if they were saved. Each rank reads the slices of its tensors,
    on any layout; learning rate and decay stay as configured. Raises UserError, on all ranks, if the float32
    weights in flat buffers differ from the checkpoint's weights. Collective over the model's ranks.
    """
    model = optimizer.model
    with model.scope():
        initialise_states(optimizer)
    checkpoint = read_pointed(source)
    assert checkpoint.steps is not None, "checked before"
    for state, opened in _states(model, source, checkpoint):
        # On the host, one kind at a time: a rank keeps its share of the data-parallel ranks alone.
        values = {
            name: torch.zeros(parameter.shape, device=device.host())
            for name, parameter in live_parameters(model).items()
        }
        fill(values, model, opened)
        name = "param" if state in MASTERS else state
        for part in optimizer.parts:
            _set_state(model, part, name, values)
    for part in optimizer.parts:
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = checkpoint.steps
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(checkpoint.steps)
        if isinstance(part.optimizer, HostOptimizer):
            part.optimizer.settle()


def _states(
    model: ParallelModel, source: str | Path, checkpoint: MegatronCheckpoint
) -> Iterator[tuple[str, Callable[[], MegatronFiles]]]:
    """Yield each optimizer state with a function that opens it. Collective over the model's ranks."""
    if checkpoint.states:
        for state in checkpoint.states:
            yield state, partial(MegatronFiles, source, checkpoint.state(state))
        return
    buffers = _proven(model, source, checkpoint)
    for state in checkpoint.buffers:
        yield state, partial(buffers.with_state, state)


def _proven(model: ParallelModel, source: str | Path, checkpoint: MegatronCheckpoint) -> BufferFiles:
    """Return the optimizer's flat buffers with a mapping of parameters that the master weights confirm.

    Flat buffers have no parameter names, but their float32 weights must equal the model's. Each rank compares
    the parameters that it reads in `fill`. Raises UserError on all ranks if no mapping agrees. Collective
    over the model's ranks.
    """
    weights, differing = MegatronFiles(source, checkpoint), []
    assigned = assigned_parameters(live_parameters(model), model)
    boxes = [box for box in source_boxes(model) if box.storage in assigned]
    for parameters in checkpoint.flat_parameters(read_pretrained(Path(source) / "config.json").shape):
        masters = BufferFiles(source, checkpoint, parameters)
        names = run_on_all_ranks_or_raise(
            partial(_differing, masters, weights, boxes), "read the optimizer's state", model.groups.all
        )
        differing = [name for name in names if name is not None]
        if not differing:
            return masters
    raise UserError(
        "the optimizer's buffers in the Megatron checkpoint hold other weights than its model does",
        where="model.resume_optimizer",
        expected="the weights in float32, from the last parameter of Megatron's GPTModel to its first, "
        "each from a multiple of 64 elements",
        got=f"{checkpoint.path}: other values in the place of {', '.join(sorted(set(differing))[:6])}",
        fix="load and save it with Megatron-LM on its layout, with --dist-ckpt-optim-fully-reshardable; "
        "or remove model.resume_optimizer: the optimizer starts anew",
    )


def _differing(masters: MegatronFiles, weights: MegatronFiles, boxes: Sequence[TensorBox]) -> str | None:
    """Return the tensor of the first of ``boxes`` whose master weights differ from the weights, or None."""
    return next((box.name for box in boxes if not _agree(masters, weights, box)), None)


def _agree(masters: MegatronFiles, weights: MegatronFiles, box: TensorBox) -> bool:
    """Return whether the master weights of a box equal the weights up to rounding."""
    precise, rounded = (files.read(box.name, box.start, box.size) for files in (masters, weights))
    rounding = torch.finfo(rounded.dtype)
    return torch.allclose(precise.float(), rounded.float(), rtol=rounding.eps, atol=rounding.smallest_normal)


def _set_state(model: ParallelModel, part: Any, state: str, values: Mapping[str, Tensor]) -> None:
    """Copy one optimizer state into one of Megatron's optimizers, from complete tensors by parameter name."""
    for index, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            value = values[f"{index}.{name}"]
            if not hasattr(part, "model_param_gbuf_map"):
                main = getattr(parameter, "main_param", parameter)
                if main in part.optimizer.state:
                    (main if state == "param" else part.optimizer.state[main][state]).copy_(value)
            elif parameter in part.model_param_gbuf_map:
                held = part._get_model_param_range_map(parameter)["param"]
                set_states(part, parameter, {state: value.flatten()[held.start : held.end]})


def _older(final: Path, keep: int | None) -> list[Path]:
    numbered = sorted(path for path in final.parent.glob("iter_*") if re.fullmatch(r"iter_\d+", path.name))
    before = [path for path in numbered if path.name < final.name]
    return [] if keep is None else before[: max(len(before) + 1 - keep, 0)]


def _state(model: ParallelModel | None, arguments: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Return the state of a Megatron-LM checkpoint without optimizer, schedule and random generators."""
    rows = int(arguments["padded_vocab_size"])
    types = {name: _type(value) for name, value in arguments.items()}
    values = {
        **types,
        "iteration": iteration,
        # Its reader compares these to know whether it may want generators, which are not here.
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
    }
    state: dict[str, Any] = {
        "args": Namespace(**values),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0.0,
    }
    if model is None:
        return state
    chunks, _ = sharded_state(model, None, is_loading=False)
    for index, chunk in enumerate(chunks.values()):
        name = "model" if len(chunks) == 1 else f"model{index}"
        state[name] = {key: _with_rows(model, value, rows) for key, value in chunk.items()}
    return state


def _type(value: Any) -> Any:
    """Return a type of torch for its name, any other value as it is."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."), value)
    return value


def _with_rows(model: ParallelModel, value: Any, rows: int) -> Any:
    """Return a tensor whose rows are the vocabulary's with as many as Megatron-LM has, others as they are.

    This layout pads the vocabulary to its own ranks; the last one holds what is more or less.
    """
    vocabulary = vocabulary_names(model.spec.model.shape)
    if not isinstance(value, ShardedTensor) or value.key not in vocabulary or value.data is None:
        return value
    places, data = model.groups.coordinates, value.data
    start = places.tensor * len(data)
    if places.tensor == model.groups.layout.tensor - 1:
        held = data[: rows - start]
        data = torch.cat([held, held.new_zeros(rows - start - len(held), data.shape[1])])
    return replace(
        value,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(rows, *value.global_shape[1:]),
        global_offset=(start, *value.global_offset[1:]),
        axis_fragmentations=None,  # the parts differ in size
    )
