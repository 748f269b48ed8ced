"""vLLM inside the ranks of a training job: environment, process groups, and patches of vLLM.

vLLM expects to own its process: it starts further processes, destroys process groups, seeds generators and
names shared memory as if no other job ran. `prepare_vllm` patches these functions of vLLM before an engine
exists. Each patch is a function here whose docstring gives the reason. All patches were written for vLLM
0.32: after an upgrade, read the patched functions again, and remove patches that are no longer needed.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import communicator, create_communicators
from megatron_rl.imports import import_libraries
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import engine_config, read_config

_REQUIRED = {
    # The engine runs in this process, so that its weights can be written in place.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Binding would pin the trainer's threads, too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables that a user cannot override."""

_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # FlashInfer's sampler returns no log-probs of the filtered distribution.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Default values of environment variables, which a user's values override."""

_HOST_CACHE_BYTES = 2**30
"""Maximum size of a rank's key-value cache on the host, unless one sequence needs more."""
_HOST_CACHE_ROWS = 256
"""Number of sequences of maximum length that fit into the cache, if `_HOST_CACHE_BYTES` permits."""

_HOST_BLOCK = 128
"""Tokens per block of the key-value cache in vLLM's attention on the host."""

# State of the process: whether vLLM has been patched, and the number of engines.
_prepared = False
_writable = False
_engines = 0


def prepare_vllm() -> None:
    """Set vLLM's environment, import vLLM and patch it for a training process; do nothing in later calls.

    Must run before anything else imports vllm, since vLLM reads its environment on import.
    """
    global _prepared
    if _prepared:
        return

    # The user's variables override the defaults, but not the required variables.
    os.environ |= _DEFAULTS | dict(os.environ) | _REQUIRED
    # vLLM looks up torch's deprecated `reduce_op`.
    warnings.filterwarnings("ignore", message=".*reduce_op.*", category=FutureWarning)
    set_num_threads = torch.set_num_threads
    with import_libraries():
        import vllm

        _preserve_process_groups()
        _inspect_models_in_process()
        _name_shared_memory_by_job()
        _omit_message_queues()
        _choose_experts_without_adapters()
        if device.on_host():
            # The import replaces the streams and events of `torch.cuda`: restore this package's replacements.
            with device.preserve_stream_stand_ins():
                import vllm.v1.worker.cpu.shm  # noqa: F401
        keep_weights_writable()

    # vLLM's CPU code replaces `torch.set_num_threads`, which the trainer still needs: restore it.
    torch.set_num_threads = set_num_threads
    _prepared = True


def keep_weights_writable() -> None:
    """Patch vLLM's CPU backend, so that the weights of its models can be written in place.

    Also replaces functions of this backend that are slow or that fail. On accelerators nothing is patched.
    May be called repeatedly. Models that vLLM has loaded before the first call are not changed.
    """
    global _writable
    if device.on_host() and not _writable:
        _store_weights_unpacked()
        # Not for the weights: work-arounds that every process with vLLM's CPU backend needs.
        _run_sampler_eagerly()
        _apply_3d_rope_in_torch()
        _route_by_sigmoid_without_groups()
    _writable = True


def are_weights_writable() -> bool:
    """Return whether the weights of models that vLLM loads can be written in place."""
    return _writable


def _preserve_process_groups() -> None:
    """Prevent the shutdown of an engine from destroying the job's default process group.

    ``EngineCore.shutdown`` destroys the group, and the garbage collector can call ``shutdown``, too.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = lambda *_, **__: None


def _inspect_models_in_process() -> None:
    """Make vLLM inspect model classes in this process.

    By default, vLLM starts a subprocess per rank for this, only to avoid initialising the device here.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def _name_shared_memory_by_job() -> None:
    """Make vLLM name the shared memory of tensor-parallel groups by job, and unlink it early.

    vLLM uses the same names in every job on a host, and a killed job leaves them behind. A segment needs its
    name only until all ranks have joined it.
    """
    from _posixshmem import shm_unlink

    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_group_name = _CPUSHMDistributed.make_group_name
    join_segment = _CPUSHMDistributed._init_cpu_shm

    def make_job_name(group: Any) -> str:
        """Return a name of the group that is unique to the job."""
        return make_shared_memory_name(make_group_name(group))

    def join_and_unlink(group: Any) -> int:
        """Join the group's segment and unlink its name; return the segment's handle."""
        # The join ends with a barrier, so every rank has opened the segment.
        handle = join_segment(group)
        shm_unlink(f"{group.group_name}_{group.communicator.rank}")
        return handle

    setattr(_CPUSHMDistributed, "make_group_name", staticmethod(make_job_name))
    setattr(_CPUSHMDistributed, "_init_cpu_shm", join_and_unlink)


def _omit_message_queues() -> None:
    """Make vLLM create its groups without message queues, which are unused if a launcher starts the ranks.

    When a process ends, each of its queues leaves behind sockets in the temporary folder, and shared memory.
    """
    from vllm.distributed import parallel_state

    make_group = parallel_state.init_model_parallel_group

    def make_without_queue(*arguments: Any, **options: Any) -> Any:
        """Create a group without a message queue."""
        options["use_message_queue_broadcaster"] = False
        return make_group(*arguments, **options)

    setattr(parallel_state, "init_model_parallel_group", make_without_queue)


def _choose_experts_without_adapters() -> None:
    """Make vLLM choose the kernels of experts as if the engine had no adapters.

    Experts never have adapters in the engine. With adapters, vLLM would choose kernels that store experts in
    another order, or that the host lacks.
    """
    from vllm.model_executor.layers.fused_moe import layer as expert_layer

    make_config = expert_layer.FusedMoEConfig

    def make_config_without_adapters(**options: Any) -> Any:
        """Create the configuration of an expert layer without adapters."""
        options["is_lora_enabled"] = False
        return make_config(**options)

    setattr(expert_layer, "FusedMoEConfig", make_config_without_adapters)


def make_shared_memory_name(group_name: str) -> str:
    """Make the name of a group's shared memory, equal on the group's ranks and unique to the job."""
    # All ranks of a job on a host have the same parent process, the launcher.
    num_restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}-{num_restarts}"
    # `shm_open` accepts slashes only at the start of a name.
    return f"{job}-{group_name.replace('/', '_')}"


def _store_weights_unpacked() -> None:
    """Make vLLM store linear and embedding weights as plain tensors on the host.

    vLLM would replace them by packed copies, so writes to the original tensors would have no effect. On
    accelerators vLLM stores plain tensors anyway.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def use_plain_linear(_: Any, layer: Any) -> None:
        """Set the layer's linear function, and leave its weight unpacked."""
        layer.cpu_linear = apply_linear

    setattr(UnquantizedLinearMethod, "process_weights_after_loading", use_plain_linear)
    setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", use_plain_linear)


def apply_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer with an unpacked weight; use oneDNN for float32.

    torch would use MKL, which packs the weight in each call. oneDNN does not pack it for a few rows. On AMD
    processors, MKL took 1.9 times as long from 16 rows on, and linear layers took most of a step.
    """
    if values.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(values, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")


def _run_sampler_eagerly() -> None:
    """Run vLLM's functions for token ranks and vocabulary masks without `torch.compile` on the host.

    Their compilation takes seconds and needs a compiler.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    def count_at_least(values: Tensor, thresholds: Tensor) -> Tensor:
        """Return, for each row, the number of values that are at least the row's threshold."""
        return (values >= thresholds).sum(-1)

    # The results are equal to the compiled functions' results.
    sampler.batched_count_greater_than = count_at_least
    compiled_mask = vocab_parallel_embedding.get_masked_input_and_mask
    vocab_parallel_embedding.get_masked_input_and_mask = inspect.unwrap(compiled_mask)


def _apply_3d_rope_in_torch() -> None:
    """Make vLLM rotate queries and keys of shape [tokens, heads, size] in torch on the host.

    Latent attention has tensors of this shape. vLLM's kernel (csrc/cpu/pos_encoding.cpp, called by
    RotaryEmbedding.forward_cpu) would read the heads as further tokens.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def rotate(
        self: Any,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Rotate queries and keys: in torch if they have three dimensions, otherwise with vLLM's kernel."""
        # The kernel reads only two dimensions correctly: [tokens, heads * size].
        if query.dim() == 3:
            return self.forward_native(positions, query, key, **options)
        return kernel(self, positions, query, key, **options)

    setattr(RotaryEmbedding, "forward_cpu", rotate)


def _route_by_sigmoid_without_groups() -> None:
    """Make vLLM's CPU router compute sigmoid scores for models without expert groups, such as MiniMax-M2.

    In vllm-cpu 0.32 the router computes sigmoid scores only for models with expert groups. So all experts of
    a layer become one group.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    compute_routing = CPURouter._compute_routing

    def route(self: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute the routing; with sigmoid scores, treat experts without groups as one group."""
        is_ungrouped = not self.use_grouped_topk and self.custom_routing_function is None
        if is_ungrouped and self.scoring_func == "sigmoid":
            self.use_grouped_topk = True
            self.num_expert_group = 1
            self.topk_group = 1
        return compute_routing(self, *args, **options)

    setattr(CPURouter, "_compute_routing", route)


def count_sleeping_bytes() -> int:
    """Count the bytes that vLLM's sleep mode has released, but that torch still counts as allocated."""
    from vllm.device_allocator.cumem import CuMemAllocator

    # A handle is (device, size in bytes, address, memory handle).
    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(allocation.handle[1] for allocation in allocations if allocation.is_asleep)


def compute_host_cache_bytes(
    shape: ModelShape,
    tensor_parallel_size: int,
    dtype: str,
    max_model_len: int,
) -> int:
    """Compute the size of a rank's key-value cache on the host: 256 sequences of full length, at most 1 GiB.

    One sequence of full length always fits. vLLM writes to the complete cache at its start, so a larger cache
    would occupy memory that is never used.
    """
    token_bytes = shape.kv_bytes_per_gpu(tensor_parallel_size, getattr(torch, dtype).itemsize)
    # Add a block to the blocks of the sequence: vLLM's block pool reserves one as its null block.
    num_blocks = math.ceil(max_model_len / _HOST_BLOCK) + 1
    row_bytes = num_blocks * _HOST_BLOCK * token_bytes
    desired_bytes = min(_HOST_CACHE_ROWS * row_bytes, _HOST_CACHE_BYTES)
    return int(max(2 * row_bytes, desired_bytes))


class _DistributedOfLayout:
    """Replacement of torch.distributed whose world consists of a layout's ranks, in the layout's order."""

    def __init__(self, distributed: Any, layout: ParallelLayout) -> None:
        self._distributed = distributed
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)

    def get_world_size(self, group: Any = None) -> int:
        """Return the number of ranks in the layout, or in ``group``."""
        if group is None:
            return self._layout.size
        return self._distributed.get_world_size(group)

    def new_group(self, ranks: Any, **options: Any) -> Any:
        """Return a process group of ``ranks``.

        On accelerators, if the layout consists of all ranks of the job, the group is created. Otherwise the
        group is one that `create_layout_groups` has already created.
        """
        spans_world = self._layout.size == self._distributed.get_world_size()
        if spans_world and not device.on_host():
            # Do not sort the ranks: the order of a layout's ranks need not be ascending.
            options |= {"sort_ranks": False, "timeout": device.collective_timeout()}
            return self._distributed.new_group(ranks, **options)
        # Creating a group is collective over the job, but ranks outside the layout do not call this method.
        return communicator(tuple(ranks))


class _TorchOfLayout:
    """Replacement of the torch module in which ``torch.distributed`` is a `_DistributedOfLayout`."""

    def __init__(self, distributed: Any) -> None:
        self.distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def create_layout_groups(layout: ParallelLayout) -> None:
    """Create the process groups that the engines on ``layout`` use.

    Collective over the world, before ranks of the layout build their engines. If the layout is the whole
    world, the engines create the groups themselves.
    """
    # Create the groups of vLLM's world, of tensor parallelism, and of single ranks for all other parallelism,
    # in the same order on every rank.
    create_communicators([layout.ranks])
    create_communicators(layout.groups("tensor"))
    create_communicators([(rank,) for rank in layout.ranks])


@contextmanager
def set_local_rank(index: int | None) -> Iterator[None]:
    """Set LOCAL_RANK to ``index``, the index of this process's device, within the context.

    vLLM selects its device by LOCAL_RANK. The launcher's value differs from the device's index if each
    process has only one visible device. Without an ``index``, LOCAL_RANK is unchanged.
    """
    launcher_value = os.environ.get("LOCAL_RANK")
    if index is not None:
        os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        if launcher_value is not None:
            os.environ["LOCAL_RANK"] = launcher_value
        else:
            os.environ.pop("LOCAL_RANK", None)


@contextmanager
def use_layout_as_world(layout: ParallelLayout) -> Iterator[None]:
    """Make vLLM build its groups within the context as if the world consisted of ``layout.ranks``, in order.

    Replica r then has the ranks ``layout.ranks[r * tensor : (r + 1) * tensor]``.
    """
    from vllm.distributed import parallel_state

    init_world = parallel_state.init_world_group
    init_model_parallel = parallel_state.init_model_parallel_group

    def to_ranks(positions: list[int]) -> list[int]:
        """Convert positions in the layout to ranks of the job."""
        return [layout.ranks[position] for position in positions]

    def init_world_of_layout(positions: list[int], *arguments: Any, **options: Any) -> Any:
        """Initialise vLLM's world group with the layout's ranks at ``positions``."""
        return init_world(to_ranks(positions), *arguments, **options)

    def init_groups_of_layout(
        groups: list[list[int]],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Initialise vLLM's groups with the layout's ranks at the positions in ``groups``."""
        rank_groups = [to_ranks(positions) for positions in groups]
        return init_model_parallel(rank_groups, *arguments, **options)

    parallel_state.init_world_group = init_world_of_layout
    parallel_state.init_model_parallel_group = init_groups_of_layout
    parallel_state.torch = _TorchOfLayout(_DistributedOfLayout(parallel_state.torch.distributed, layout))
    try:
        yield
    finally:
        parallel_state.init_world_group = init_world
        parallel_state.init_model_parallel_group = init_model_parallel
        parallel_state.torch = torch


@contextmanager
def prepare_language_model_arguments(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the engine arguments with which vLLM builds only the language model of a checkpoint.

    The arguments name a temporary folder with the config.json of `engine_config`. If this config.json is that
    of the checkpoint, there are no arguments.
    """
    # With the checkpoint's config.json, vLLM would also build the vision tower of a multimodal model, and
    # reserve memory for images. It would also replace the `model_type` of transformers' class by an alias of
    # vLLM, such as kimi_k2, and this process would write the alias into exports.
    config = read_config(path / "config.json")
    language_model_config = engine_config(config)
    if language_model_config is config:
        yield {}
        return

    with TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(json.dumps(language_model_config), encoding="utf-8")
        yield {"hf_config_path": folder}


def change_engine_count(change: int) -> int:
    """Add ``change`` to the number of engines in this process; return the new number."""
    global _engines
    _engines += change
    return _engines


def drop_vllm_groups() -> None:
    """Drop vLLM's groups after its last engine, so that the next engine can have a different layout."""
    from vllm.distributed import parallel_state

    # Variables of all process-wide groups; some exist only in newer or only in older versions of vLLM.
    variables = "_TP _ETP _ENGRAM_DP _DCP _PCP _PP _DP _EP _EPLB _INNER_DP_WORLD _WORLD _NODE_COUNT"
    for name in variables.split():
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, None)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of the process's random generators at the end of the context.

    The trainer also draws from these generators, and its draws must not depend on the engine.
    """
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()

    # Without an accelerator, torch has only the generator of the host.
    fork_options: dict[str, Any] = {"enabled": True, "devices": []}
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        fork_options["devices"] = [torch.accelerator.current_device_index()]
        fork_options["device_type"] = "" if accelerator is None else accelerator.type

    with torch.random.fork_rng(**fork_options):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)
