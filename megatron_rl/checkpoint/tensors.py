"""Weights and optimizer as Megatron's distributed checkpoint, which any parallel layout can read.

What Megatron's own save and load need beside the calls, on models outside its global groups and without
Transformer Engine, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.exchange_utils import exchange_loaded_objects_gather_object
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import extract_nonpersistent, extract_sharded_base
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.writing import TensorWrite
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import sum_over_ranks
from megatron_rl.errors import UserError
from megatron_rl.megatron.host_optimizer import HostOptimizer, set_states
from megatron_rl.megatron.lora import load_adapters, sharded_adapters
from megatron_rl.megatron.model import ParallelModel, live_parameters
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.megatron.parameter_mapping import global_name, vocabulary_names

_SHARDING = {ANY: "fully_reshardable", SAME: "dp_reshardable"}
"""Megatron's name for each way to lay out the distributed optimizer in a checkpoint."""


def begin_tensors(
    folder: Path, model: ParallelModel | None, optimizer: Optimizer | None, layout: str, *, keep: bool
) -> TensorWrite:
    """Plan the write of a model and its optimizer into an empty folder; ``model`` is None outside its ranks.

    ``layout`` is how the distributed optimizer is laid out: `ANY` gathers it, `SAME` leaves it in its shards.
    ``keep`` is that of `TensorWrite`. Collective over the world.
    """
    with device.megatron_mode() if model is None else model.scope():
        sharded: dict[str, Any] = {}
        if model is not None:
            if optimizer is not None:
                initialise_states(optimizer)
            sharded, _ = sharded_state(model, optimizer, is_loading=False, layout=layout)
        return TensorWrite(folder, model, sharded, keep=keep)


def require_shards(optimizer: Optimizer | None) -> None:
    """Raise UserError where this rank has nothing of a bucket of the optimizer: Megatron refuses."""
    parts = [] if optimizer is None else optimizer.parts
    buckets = [
        bucket
        for part in parts
        for types in getattr(part, "gbuf_ranges", ())
        for of_type in types.values()
        for bucket in of_type
    ]
    if not all(bucket["param_map"] for bucket in buckets):
        raise UserError(
            "the model is too small for its data-parallel ranks: one has no parameter of a bucket",
            where="checkpoint.optimizer_layout",
            expected=ANY,
            got=SAME,
            fix="set checkpoint.optimizer_layout=any",
        )


def load_tensors(
    folder: Path, model: ParallelModel | None, optimizer: Optimizer | None, layout: str = ANY
) -> None:
    """Read what was written with this ``layout``, in place; without ``optimizer`` the weights alone.

    Raises UserError where Megatron finds no checkpoint that it can read. Collective over the world.
    """
    sharing = model is not None and model.groups.data_context.size() > 1
    share = bool(sum_over_ranks(torch.tensor([int(sharing)])))
    with _readable(folder), device.megatron_mode() if model is None else model.scope():
        if model is None:
            dist_checkpointing.load({}, str(folder), _Beside(share))
            return
        if optimizer is not None:
            initialise_states(optimizer)
        sharded, local = sharded_state(model, optimizer, is_loading=True, layout=layout)
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), model.groups.data_context)
        loaded: Any = dist_checkpointing.load(sharded, str(folder), strategy)
        for index, chunk in enumerate(model.chunks):
            if model.adapters is not None:
                load_adapters(model, chunk, loaded[f"chunk{index}"])
            else:
                chunk.load_state_dict(loaded[f"chunk{index}"])
        _clear_padding(model)
        if optimizer is not None:
            state = merge(loaded["optimizer_common"], local)
            _load_optimizer(optimizer, merge(state, loaded["optimizer"]))


class _Beside(TorchDistLoadShardedStrategy):
    """Take part, with nothing to read, in what the ranks of a role load together.

    Megatron reads with all ranks of the job: once, and where a role's data-parallel ranks ``share`` the
    reading, objects, tensors and who has which objects, one after the other.
    """

    def __init__(self, share: bool) -> None:
        super().__init__()
        self._share = share

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *more: Any) -> Any:
        # Newer versions of Megatron pass ``more``: how the checkpoint was saved.
        loaded = super().load(sharded_state_dict, checkpoint_dir, *more)
        if self._share:
            super().load({}, checkpoint_dir, *more)
            exchange_loaded_objects_gather_object({})
        return loaded


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise UserError(
            "Megatron cannot read the weights and optimizer states of the checkpoint",
            where=str(folder),
            expected="a distributed checkpoint of this model",
            got=(str(error).strip().splitlines() or [type(error).__name__])[-1],
            fix="use another checkpoint: this one is damaged, or of another version",
        ) from error


def sharded_state(
    model: ParallelModel, optimizer: Optimizer | None, is_loading: bool, layout: str = ANY
) -> tuple[dict[str, Any], Any]:
    """Return what is stored of a model, and the part of the optimizer's state that stays on this rank.

    Of a model with adapters these alone are stored: its base is the checkpoint that it started from.
    """
    groups = model.groups
    metadata = {
        "distrib_optim_sharding_type": _SHARDING[layout],
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_context,
    }
    with _tied_replicas(model):
        chunks = {
            f"chunk{index}": chunk.sharded_state_dict(metadata=metadata)
            if model.adapters is None
            else sharded_adapters(model, chunk)
            for index, chunk in enumerate(model.chunks)
        }
    if optimizer is None:
        return dict(chunks), {}
    with (
        _replaced(optimizer, "get_parameter_state_dp_zero", _with_bucket_padding),
        _replaced(optimizer, "state_dict", partial(_with_step, _step(optimizer))),
    ):
        state = optimizer.megatron.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
    local, rest = extract_nonpersistent(state)
    tensors, common = extract_sharded_base(rest)
    # An object of its own, because Megatron would take the common part from the world's rank 0 only.
    replica = (0, 0, groups.layout.ranks.index(groups.rank))
    shared = ShardedObject("optimizer.common", common, (1,), (0,), replica)
    return {**chunks, "optimizer": tensors, "optimizer_common": shared}, _unwrapped(local)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unwrapped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    return value.unwrap()


@contextmanager
def _tied_replicas(model: ParallelModel) -> Iterator[None]:
    # The last stage's copy of tied embeddings asks Megatron's global groups, which do not exist here.
    original = parallel_state.get_data_parallel_rank
    rank = model.groups.data_context.rank()
    parallel_state.get_data_parallel_rank = lambda *_, **__: rank
    try:
        yield
    finally:
        parallel_state.get_data_parallel_rank = original


def _clear_padding(model: ParallelModel) -> None:
    """Zero the rows that pad the vocabulary: a checkpoint from another layout may lack them."""
    shape = model.spec.model.shape
    for storage, parameter in live_parameters(model).items():
        if global_name(model, storage) in vocabulary_names(shape):
            real = shape.vocab - model.groups.coordinates.tensor * len(parameter)
            parameter[max(real, 0) :].zero_()


def initialise_states(optimizer: Optimizer) -> None:
    """Give every parameter its optimizer state, as before the first step, where it has none yet."""
    for part in optimizer.parts:
        inner = part.optimizer
        if len(inner.state):
            continue
        rates = [group["lr"] for group in inner.param_groups]
        parameters = [p for group in inner.param_groups for p in group["params"] if p.numel()]
        gradients = [parameter.grad for parameter in parameters]
        for group in inner.param_groups:
            group["lr"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
            if "step" in group:
                group["step"] = 0
        _separate_steps(inner, reset=True)


def _separate_steps(inner: Any, reset: bool = False) -> None:
    """Give each parameter its own step counter: Megatron's load shares one, which then counts too fast."""
    for state in inner.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = torch.zeros_like(state["step"]) if reset else state["step"].clone()


def _step(optimizer: Optimizer) -> int:
    """Return the steps that the optimizer has taken, which its parts agree on."""
    for part in optimizer.parts:
        for counted in (*part.optimizer.state.values(), *part.optimizer.param_groups):
            if "step" in counted:
                return int(counted["step"])
    return 0


def _with_step(step: int, part: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    """Let a part that has no parameters on this rank say its step, too.

    Megatron asks the parameters. Experts are a part of their own, and all else that learns may be in other
    stages.
    """

    def state_dict() -> Any:
        inner = part.optimizer
        if inner.state or not hasattr(part, "gbuf_ranges"):
            return original()
        groups = inner.state_dict()["param_groups"]
        kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return {"optimizer": {"param_groups": [group | {"step": step} for group in kept]}}

    return state_dict


def _load_optimizer(optimizer: Optimizer, state: Any) -> None:
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.megatron.param_groups
    ]
    # Shards are copied into views of parameters.
    with torch.no_grad(), _replaced(optimizer, "_set_main_param_and_optimizer_states", _keeping_step):
        optimizer.megatron.load_state_dict(state)
    for group, values in zip(optimizer.megatron.param_groups, settings, strict=True):
        group.update(values)
    for part in optimizer.parts:
        _separate_steps(part.optimizer)
        if isinstance(part.optimizer, HostOptimizer):
            part.optimizer.settle()


@contextmanager
def _replaced(
    optimizer: Optimizer, name: str, build: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put ``build(part, its method)`` in the place of a method of the optimizer's parts that have it."""
    parts = [part for part in optimizer.parts if hasattr(part, name)]
    for part in parts:
        setattr(part, name, build(part, getattr(part, name)))
    try:
        yield
    finally:
        for part in parts:
            delattr(part, name)


def _with_bucket_padding(part: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Lay the gathered state out as its reader indexes it.

    Megatron gathers without the padding between buckets and reads with it: where a bucket is padded (as
    the tied embedding of the last stage, in a bucket of its own) everything behind it would be shifted.
    """

    def gather(**arguments: Any) -> Any:
        state = original(**arguments)
        for index, buffer in enumerate(part.buffers):
            for tensors in (state or {}).get(index, {}).values():
                for name in [name for name, value in tensors.items() if isinstance(value, Tensor)]:
                    spread = tensors[name].new_zeros(buffer.numel)
                    start = 0
                    for bucket in buffer.buckets:
                        end = start + bucket.numel_unpadded
                        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensors[name][
                            start:end
                        ]
                        start = end
                    tensors[name] = spread
        return state

    return gather


def _keeping_step(part: Any, _: Callable[..., None]) -> Callable[..., None]:
    """Let the restore of one parameter leave its step alone: it was restored with the groups already."""

    def restore(parameter: Any, tensors: Mapping[str, Tensor]) -> None:
        states = part._get_main_param_and_optimizer_states(parameter).keys() - {"step"}
        set_states(part, parameter, {name: tensors[name] for name in states})

    return restore
