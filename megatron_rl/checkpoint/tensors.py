"""Weights and optimizer in Megatron's distributed format, which any parallel layout can read.

Megatron's save and load expect process-global groups and Transformer Engine's layers. The models here may
have neither, and this module adapts the two functions to them.

Megatron's asynchronous save plans a write, copies tensors to the host, and starts another process that writes
them. A forked process loses the threads of vLLM and gloo. A spawned process creates another context on the
accelerator and fails without an accelerator, and if it dies, the job waits for it forever.

This module writes the copies from a thread instead. Writing files and computing digests release Python's
global lock, so the thread does not block other threads.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.dist_checkpointing.validation import determine_global_metadata
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import sum_over_ranks
from megatron_rl.errors import UserError
from megatron_rl.megatron.lora import build_sharded_adapters, load_adapters
from megatron_rl.megatron.model import ParallelModel, live_parameters
from megatron_rl.megatron.optimizer import HostOptimizer, Optimizer, set_states
from megatron_rl.megatron.parameter_mapping import global_name, vocabulary_names

_FILES_PER_RANK = 2
"""Number of files of about equal size that a rank writes in parallel. It is Megatron's default."""
_SHARDING_TYPES = {ANY: "fully_reshardable", SAME: "dp_reshardable"}
"""Value of `checkpoint.optimizer_layout` -> Megatron's name of the optimizer's checkpoint format."""


# --- Writing


class TensorWrite:
    """Planned write of a sharded state and its common values into an empty folder.

    The constructor copies this rank's shards from the accelerator into pinned host memory and, on the first
    rank, writes the common values. Then `write_shards` writes the shards, on any thread, and
    `write_tensor_index` writes the index of all tensors. Call the constructor inside `megatron_scope`.
    Collective over the world.

    Arguments:
        folder: an empty folder on a file system that all ranks share.
        model: the model, or None on ranks outside its layout.
        state: Megatron's sharded state.
        content_metadata: metadata that Megatron stores for readers of the checkpoint, or None.
        copy_host_tensors: also copy tensors that are already in host memory, because the job may change them
            before they are written.

    `files` are the paths of the files that this rank will write.
    """

    def __init__(
        self,
        folder: Path,
        model: ParallelModel | None,
        state: dict[str, Any],
        content_metadata: Mapping[str, Any] | None = None,
        *,
        copy_host_tensors: bool,
    ) -> None:
        strategy: Any
        if model is None:
            # Ranks outside the layout join the collectives of the save.
            strategy = _SaveOutsideLayout("torch_dist", 1, thread_count=_FILES_PER_RANK)
        else:
            # The wrapper distributes the writing of replicated tensors over the ranks that hold them.
            rank_strategy = _SaveInProcess("torch_dist", 1, thread_count=_FILES_PER_RANK)
            strategy = FullyParallelSaveStrategyWrapper(rank_strategy, model.groups.data_context)

        metadata = None
        if content_metadata:
            metadata = dict(content_metadata)
        self._request: Any = dist_checkpointing.save(
            state,
            str(folder),
            strategy,
            async_sharded_save=True,
            content_metadata=metadata,
        )
        self.files: list[Path] = []
        # Ranks without a shard write nothing.
        if self._request.async_fn is None:
            return

        # Each bucket becomes a file. It consists of the file's path, the file's name, and two lists of
        # (write item, value), for bytes and for tensors.
        buckets = self._request.async_fn_args[1]
        if copy_host_tensors:
            for _, _, (_, tensors) in buckets:
                for index, (write_item, tensor) in enumerate(tensors):
                    if tensor.is_cpu:
                        tensors[index] = (write_item, tensor.clone())
        buckets[:] = self._request.preload_fn()
        self.files += [Path(path) for path, _, _ in buckets]

    def write_shards(self) -> None:
        """Write the copied shards, on any thread, and release their memory; raise if a write fails."""
        if self._request.async_fn is None:
            return
        transforms = self._request.async_fn.args[0]
        _, buckets, results = self._request.async_fn_args
        # Bypass Megatron's decorator, which disables garbage collection in the whole process.
        writer: Any = filesystem_async.FileSystemWriterAsync
        write_file = writer.write_preloaded_data.__wrapped__

        def write_bucket(index: int) -> Any:
            # Megatron's function expects two queues: one for its result, one that counts pending files.
            result_queue: Any = queue.Queue()
            pending_queue: Any = queue.Queue()
            pending_queue.put(index)
            write_file(transforms, index, buckets[index], result_queue, pending_queue, True)
            # Release the copy as soon as it is written.
            buckets[index] = None
            _, write_result = result_queue.get()
            if isinstance(write_result, Exception):
                raise write_result
            return write_result

        # Megatron's finalize functions expect one dict: file index -> result.
        with ThreadPoolExecutor(_FILES_PER_RANK) as pool:
            write_results = pool.map(write_bucket, range(len(buckets)))
            results.put(dict(enumerate(write_results)))

    def write_tensor_index(self) -> None:
        """Write the index of the tensors of all ranks (.metadata). Call it inside `megatron_mode`.

        Collective over the world.
        """
        for finalize in self._request.finalize_fns:
            finalize()


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Save strategy whose files are written by this process, without Megatron's additional processes."""

    def async_save(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sharded_state_dict: Any, checkpoint_dir: Any, *writer_package: Any
    ) -> Any:
        """Plan a write and return Megatron's request for it; the first rank writes the common values.

        Common values are written to common.pt, which all versions of Megatron-Core can read. Since 0.19
        Megatron passes them in ``sharded_state_dict`` next to the tensors, and passes the package of the
        writer in ``writer_package``. This method always selects Megatron-Core's writer.
        """
        common = sharded_state_dict.pop("common_state", None)
        if common is not None and device.rank() == 0:
            torch.save(common.data, Path(checkpoint_dir) / "common.pt")

        # Versions before 0.19 pass no package.
        package = ["mcore"] * len(writer_package)

        # Without an existing queue, Megatron would start a process that creates it.
        filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().async_save(sharded_state_dict, checkpoint_dir, *package)
        finally:
            filesystem_async._results_queue = None


class _SaveOutsideLayout(_SaveInProcess):
    """Save strategy of a rank outside the model's layout, which writes nothing."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *writer_package: Any) -> Any:
        """Save on a rank that has no shard of the model: take part in the collectives, and write nothing.

        ``sharded_state_dict`` is empty. Collective over the world.
        """
        # Ranks with a shard save through FullyParallelSaveStrategyWrapper, which first gathers metadata over
        # the world. This rank has no wrapper, so it calls the gather itself.
        determine_global_metadata(sharded_state_dict)
        return super().async_save(sharded_state_dict, checkpoint_dir, *writer_package)


def megatron_scope(model: ParallelModel | None) -> AbstractContextManager[None]:
    """Return the context manager in which Megatron's checkpoint functions are called.

    Ranks outside the model's layout pass None as ``model``, and join the collectives of these functions.
    """
    if model is None:
        return device.megatron_mode()
    return model.scope()


def plan_tensor_write(
    folder: Path,
    model: ParallelModel | None,
    optimizer: Optimizer | None,
    optimizer_format: str,
    *,
    copy_host_tensors: bool,
) -> TensorWrite:
    """Plan the write of a model and its optimizer into an empty folder, and copy this rank's shards.

    Ranks without a shard of the model pass None as ``model``. If ``optimizer_format`` is `ANY`, the complete
    states of a distributed optimizer are gathered and saved. If it is `SAME`, each rank saves its shards.
    ``copy_host_tensors``: whether tensors in CPU memory are copied too, as in `TensorWrite`. Collective over
    the world.
    """
    with megatron_scope(model):
        state: dict[str, Any] = {}
        if model is not None:
            if optimizer is not None:
                # Before the first step the optimizer has no states: create initial states to save.
                initialise_states(optimizer)
            state, _ = sharded_state(model, optimizer, is_loading=False, optimizer_format=optimizer_format)

        return TensorWrite(folder, model, state, copy_host_tensors=copy_host_tensors)


def require_savable_shards(optimizer: Optimizer | None) -> None:
    """Raise UserError if a bucket of the distributed optimizer has no parameter on this rank.

    With `checkpoint.optimizer_layout: same`, Megatron cannot save such a bucket.
    """
    if optimizer is None:
        return
    buckets: list[Any] = []
    for sub_optimizer in optimizer.sub_optimizers:
        for buckets_by_type in getattr(sub_optimizer, "gbuf_ranges", ()):
            for typed_buckets in buckets_by_type.values():
                buckets += typed_buckets

    if not all(bucket["param_map"] for bucket in buckets):
        raise UserError(
            "the model is too small for its data-parallel ranks: a rank has no parameter of some bucket",
            where="checkpoint.optimizer_layout",
            expected=ANY,
            got=SAME,
            fix="set checkpoint.optimizer_layout=any",
        )


# --- Loading


def load_tensors(
    folder: Path,
    model: ParallelModel | None,
    optimizer: Optimizer | None,
    optimizer_format: str = ANY,
) -> None:
    """Load a model's weights and, with ``optimizer``, its optimizer states in place.

    Ranks without a shard of the model pass None as ``model``. ``optimizer_format`` is `ANY` if the checkpoint
    contains complete states of a distributed optimizer, and `SAME` if it contains their shards. Raises
    UserError if Megatron cannot read the checkpoint. Collective over the world.
    """
    # If data-parallel ranks divide the reading, ranks outside the layout must join additional collectives.
    shares_reading = model is not None and model.groups.data_context.size() > 1
    num_sharing_ranks = sum_over_ranks(torch.tensor([int(shares_reading)]))
    any_shares_reading = bool(num_sharing_ranks)

    with _convert_load_errors(folder), megatron_scope(model):
        if model is None:
            dist_checkpointing.load({}, str(folder), _LoadOutsideLayout(any_shares_reading))
            return

        # Optimizer states must exist before their values can be restored in place.
        if optimizer is not None:
            initialise_states(optimizer)
        state, rank_state = sharded_state(
            model, optimizer, is_loading=True, optimizer_format=optimizer_format
        )
        # The type is Any, because in Megatron-Core 0.19.2 the wrapper is not a subclass of the annotated
        # strategy class.
        strategy: Any = FullyParallelLoadStrategyWrapper(
            TorchDistLoadShardedStrategy(),
            model.groups.data_context,
        )
        loaded: Any = dist_checkpointing.load(state, str(folder), strategy)

        for index, chunk in enumerate(model.chunks):
            chunk_state = loaded[f"chunk{index}"]
            if model.adapters is not None:
                load_adapters(model, chunk, chunk_state)
            else:
                chunk.load_state_dict(chunk_state)
        _clear_padding(model)

        # Megatron expects one state: common values, unsaved values of this rank, and sharded tensors.
        if optimizer is not None:
            optimizer_state = merge(loaded["optimizer_common"], rank_state)
            optimizer_state = merge(optimizer_state, loaded["optimizer"])
            _load_optimizer(optimizer, optimizer_state)


class _LoadOutsideLayout(TorchDistLoadShardedStrategy):
    """Load strategy of a rank outside the model's layout, which joins the collectives and reads nothing.

    Megatron's load is collective over the world. If the data-parallel ranks of the layout divide the reading
    among them (``shares_reading``), Megatron loads objects, then tensors, and then exchanges the objects.
    """

    def __init__(self, shares_reading: bool) -> None:
        super().__init__()
        self._shares_reading = shares_reading

    def load(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sharded_state_dict: Any, checkpoint_dir: Path, *async_strategy: Any
    ) -> Any:
        """Load on a rank that has no shard of the model: take part in the collectives, and read nothing.

        ``sharded_state_dict`` is empty. ``async_strategy`` is an argument that newer versions of Megatron
        pass, and older versions do not.
        """
        loaded = super().load(sharded_state_dict, checkpoint_dir, *async_strategy)
        if self._shares_reading:
            # The ranks with a shard load objects and tensors in two steps, then exchange the objects.
            super().load({}, checkpoint_dir, *async_strategy)
            exchange_loaded_objects_gather_object({})
        return loaded


@contextmanager
def _convert_load_errors(folder: Path) -> Iterator[None]:
    """Convert Megatron's errors about the checkpoint ``folder`` to UserError inside the block."""
    try:
        yield
    except (CheckpointingException, CheckpointException, OSError) as error:
        # Megatron's reason is in the last line.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            "Megatron cannot read the weights and optimizer states of the checkpoint",
            where=str(folder),
            expected="a distributed checkpoint of this model",
            got=lines[-1],
            fix="use another checkpoint: this one is damaged or from another version of megatron_rl",
        ) from error


# --- Megatron's sharded state


def sharded_state(
    model: ParallelModel,
    optimizer: Optimizer | None,
    is_loading: bool,
    optimizer_format: str = ANY,
) -> tuple[dict[str, Any], Any]:
    """Return Megatron's sharded state of a model and its optimizer, and the optimizer's rank-local values.

    Rank-local values are not saved. For a model with adapters the state contains only the adapters, since the
    base weights are in the model's folder.

    ``optimizer_format`` selects Megatron's format of a distributed optimizer. `ANY` is fully_reshardable: the
    shards of the data-parallel ranks are gathered, and Megatron can load the states on any parallel layout.
    `SAME` is dp_reshardable: the shards are not gathered, and Megatron can load them only on the same layout.
    """
    groups = model.groups
    metadata = {
        "distrib_optim_sharding_type": _SHARDING_TYPES[optimizer_format],
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.data_context,
    }
    chunks: dict[str, Any] = {}
    with _use_model_data_parallel_rank(model):
        for index, chunk in enumerate(model.chunks):
            if model.adapters is None:
                chunks[f"chunk{index}"] = chunk.sharded_state_dict(metadata=metadata)
            else:
                chunks[f"chunk{index}"] = build_sharded_adapters(model, chunk)

    if optimizer is None:
        return chunks, {}

    with (
        _replace_method(optimizer, "get_parameter_state_dp_zero", _make_padded_gather),
        _replace_method(optimizer, "state_dict", partial(_make_state_dict_with_step, step_count(optimizer))),
    ):
        state = optimizer.megatron.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
    rank_state, stored_state = extract_nonpersistent(state)
    tensors, common = extract_sharded_base(stored_state)

    # Common values become a sharded object: Megatron stores plain values only from the world's first rank,
    # which may be outside the layout.
    replica_id = (0, 0, groups.layout.ranks.index(groups.rank))
    common_object = ShardedObject("optimizer.common", common, (1,), (0,), replica_id)
    complete_state = dict(chunks)
    complete_state["optimizer"] = tensors
    complete_state["optimizer_common"] = common_object
    return complete_state, _unwrap_values(rank_state)


def _unwrap_values(nested_state: Any) -> Any:
    """Replace each of Megatron's wrappers in nested dicts and lists by the wrapped value."""
    if isinstance(nested_state, dict):
        return {key: _unwrap_values(child) for key, child in nested_state.items()}
    if isinstance(nested_state, list):
        return [_unwrap_values(child) for child in nested_state]
    return nested_state.unwrap()


@contextmanager
def _use_model_data_parallel_rank(model: ParallelModel) -> Iterator[None]:
    """Patch Megatron's get_data_parallel_rank to return the rank in the model's data-parallel group.

    The patch is active inside the context. Megatron calls get_data_parallel_rank for the copy of tied
    embeddings on the last pipeline stage, and Megatron's implementation needs process-global groups, which do
    not exist here.
    """

    def get_rank_in_model_group(*_: Any, **__: Any) -> int:
        return model.groups.data_context.rank()

    original_function = parallel_state.get_data_parallel_rank
    parallel_state.get_data_parallel_rank = get_rank_in_model_group
    try:
        yield
    finally:
        parallel_state.get_data_parallel_rank = original_function


def _clear_padding(model: ParallelModel) -> None:
    """Zero the rows of the embedding and output weights after the last token of the vocabulary.

    These padding rows may be absent from the checkpoint.
    """
    shape = model.spec.model.shape
    for storage_name, parameter in live_parameters(model).items():
        if global_name(model, storage_name) in vocabulary_names(shape):
            # Tensor-parallel ranks have equal, consecutive ranges of rows; the last rows are padding.
            first_row = model.groups.coordinates.tensor * len(parameter)
            token_rows = max(shape.vocab - first_row, 0)
            parameter[token_rows:].zero_()


# --- Optimizer state


def initialise_states(optimizer: Optimizer) -> None:
    """Create the optimizer's initial state for every parameter, unless it already exists."""
    for sub_optimizer in optimizer.sub_optimizers:
        torch_optimizer = sub_optimizer.optimizer
        if len(torch_optimizer.state):
            continue

        learning_rates = [group["lr"] for group in torch_optimizer.param_groups]
        parameters: list[Tensor] = []
        for group in torch_optimizer.param_groups:
            parameters += [parameter for parameter in group["params"] if parameter.numel()]
        gradients = [parameter.grad for parameter in parameters]

        # A step with zero learning rate and zero gradients creates the states and changes no weight.
        for group in torch_optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        torch_optimizer.step()

        # Restore gradients, learning rates and step counts.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, learning_rate in zip(torch_optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = learning_rate
            if "step" in group:
                group["step"] = 0
        _separate_steps(torch_optimizer, reset=True)


def _separate_steps(torch_optimizer: Any, reset: bool = False) -> None:
    """Replace the step counter of each parameter by a separate copy, which is zero if ``reset``.

    After Megatron's load all parameters share one counter, and each parameter's update would increment it.
    """
    for state in torch_optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.clone()
            if reset:
                state["step"].zero_()


def step_count(optimizer: Optimizer) -> int:
    """Return the number of steps that the optimizer has taken, which is equal in all sub-optimizers."""
    # torch's Adam stores the count in the state of each parameter, Transformer Engine's Adam in the parameter
    # group.
    for sub_optimizer in optimizer.sub_optimizers:
        torch_optimizer = sub_optimizer.optimizer
        for state_or_group in (*torch_optimizer.state.values(), *torch_optimizer.param_groups):
            if "step" in state_or_group:
                return int(state_or_group["step"])
    return 0


def restore_steps(optimizer: Optimizer, steps: int) -> None:
    """Set the step count of every parameter and parameter group to ``steps``."""
    for sub_optimizer in optimizer.sub_optimizers:
        for group in sub_optimizer.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps
        for parameter_state in sub_optimizer.optimizer.state.values():
            if "step" in parameter_state:
                parameter_state["step"].fill_(steps)


def _make_state_dict_with_step(
    step: int,
    sub_optimizer: Any,
    original_method: Callable[[], Any],
) -> Callable[[], Any]:
    """Return a ``state_dict`` method that includes the step count even if this rank has no parameters.

    Megatron reads the step count from the states of parameters. Dense and expert parameters have separate
    optimizers, and either may have no parameters in this rank's pipeline stage.
    """

    def state_dict() -> Any:
        torch_optimizer = sub_optimizer.optimizer
        if torch_optimizer.state or not hasattr(sub_optimizer, "gbuf_ranges"):
            return original_method()

        groups = []
        for group in torch_optimizer.state_dict()["param_groups"]:
            group_settings = {name: value for name, value in group.items() if name != "params"}
            group_settings["step"] = step
            groups.append(group_settings)
        return {"optimizer": {"param_groups": groups}}

    return state_dict


def _load_optimizer(optimizer: Optimizer, state: Any) -> None:
    """Restore optimizer states; parameter groups retain their configured settings, such as weight decay."""
    configured_settings: list[dict[str, Any]] = []
    for group in optimizer.megatron.param_groups:
        group_settings = dict(group)
        del group_settings["params"]
        group_settings.pop("step", None)
        configured_settings.append(group_settings)

    # Disable gradients, because autograd does not allow copies into views of parameters.
    restore_method = "_set_main_param_and_optimizer_states"
    with torch.no_grad(), _replace_method(optimizer, restore_method, _make_restore_without_step):
        optimizer.megatron.load_state_dict(state)

    for group, group_settings in zip(optimizer.megatron.param_groups, configured_settings, strict=True):
        group.update(group_settings)
    for sub_optimizer in optimizer.sub_optimizers:
        _separate_steps(sub_optimizer.optimizer)
        if isinstance(sub_optimizer.optimizer, HostOptimizer):
            sub_optimizer.optimizer.copy_restored_state()


@contextmanager
def _replace_method(
    optimizer: Optimizer,
    name: str,
    make_method: Callable[[Any, Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Replace the method ``name`` inside the block, in every Megatron optimizer that has the method.

    ``make_method(sub_optimizer, original_method)`` returns the new method.
    """
    sub_optimizers = []
    for sub_optimizer in optimizer.sub_optimizers:
        if hasattr(sub_optimizer, name):
            sub_optimizers.append(sub_optimizer)
    for sub_optimizer in sub_optimizers:
        method = getattr(sub_optimizer, name)
        setattr(sub_optimizer, name, make_method(sub_optimizer, method))

    try:
        yield
    finally:
        # The replacement is an attribute of the instance; without it, lookup returns the method of the class.
        for sub_optimizer in sub_optimizers:
            delattr(sub_optimizer, name)


def _make_padded_gather(sub_optimizer: Any, original_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's gather of a distributed optimizer's state, and insert the padding between buckets.

    Megatron's gather omits this padding, but Megatron's load expects it. After a padded bucket, such as the
    separate bucket of the last stage's tied embedding, every element would be at a wrong offset.
    """

    def gather_with_padding(**arguments: Any) -> Any:
        state = original_gather(**arguments)
        # Only the first data-parallel rank receives the gathered state.
        if not state:
            return state

        for index, buffer in enumerate(sub_optimizer.buffers):
            for tensors in state.get(index, {}).values():
                for name, value in list(tensors.items()):
                    if isinstance(value, Tensor):
                        tensors[name] = _insert_padding(value, buffer)
        return state

    return gather_with_padding


def _insert_padding(values: Tensor, buffer: Any) -> Tensor:
    """Insert zeros between the gathered buckets, so that each element is at its offset in the buffer."""
    padded = values.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        num_elements = bucket.numel_unpadded
        padded[bucket.offset : bucket.offset + num_elements] = values[start : start + num_elements]
        start += num_elements
    return padded


def _make_restore_without_step(sub_optimizer: Any, _: Callable[..., None]) -> Callable[..., None]:
    """Return a method that restores one parameter's states except its step.

    Megatron restores the step with the parameter groups.
    """

    def restore_states(parameter: Any, tensors: Mapping[str, Tensor]) -> None:
        current_states = sub_optimizer._get_main_param_and_optimizer_states(parameter)
        state_names = current_states.keys() - {"step"}
        set_states(sub_optimizer, parameter, {name: tensors[name] for name in state_names})

    return restore_states
