"""Make vLLM live inside the ranks of a training job: environment, groups, and what it must not touch."""

from __future__ import annotations

import inspect
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import communicator
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

_REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so its weights can be written
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would pin the trainer's threads too
}
_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # It returns no log-probs of the distribution that is sampled, so no request here could use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_HOST_CACHE_BYTES = 2**30
_HOST_CACHE_ROWS = 256
_HOST_BLOCK = 128  # tokens, as vLLM's attention on the host cuts its cache
_prepared = False
_writable = False
_engines = 0


def prepare_vllm() -> None:
    """Set vLLM's environment, import it and apply the changes it needs inside a training process, once.

    Must run before anything else imports vllm, since vLLM reads its environment on import.
    """
    global _prepared
    if _prepared:
        return
    os.environ |= _DEFAULTS | dict(os.environ) | _REQUIRED
    warnings.filterwarnings("ignore", message=".*reduce_op.*", category=FutureWarning)  # vLLM looks it up
    set_threads = torch.set_num_threads
    import vllm

    _keep_process_groups()
    _inspect_models_in_process()
    _leave_no_shared_memory()
    _start_without_message_queues()
    _compute_experts_without_adapters()
    if device.on_host():
        with device.preserve_stream_stand_ins():
            import vllm.v1.worker.cpu.shm  # noqa: F401 - where vLLM answers for the accelerator
    keep_weights_writable()
    torch.set_num_threads = set_threads
    _prepared = True


def keep_weights_writable() -> None:
    """Have vLLM keep weights that can be written in place, in models loaded from now on. May be repeated."""
    global _writable
    if device.on_host() and not _writable:
        _keep_weights_unpacked()
        _compile_nothing()
        _rotate_heads_apart()
    _writable = True


def weights_are_writable() -> bool:
    """Say whether vLLM keeps weights in place in this process, as models that are loaded from now on do."""
    return _writable


def _keep_process_groups() -> None:
    """Stop an engine that goes away from destroying the job's process groups."""
    from vllm.v1.engine import core

    # EngineCore.shutdown, also reached by the garbage collector, would destroy the default group.
    core.cleanup_dist_env_and_memory = lambda *_, **__: None


def _inspect_models_in_process() -> None:
    """Look at model classes here: vLLM would start a process per rank for it, only to keep devices unused."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def _leave_no_shared_memory() -> None:
    """Give shared-memory segments of tensor-parallel groups names of this job alone, and those only briefly.

    vLLM names them alike in every job on a host and keeps the names, which a killed job leaves behind. Ranks
    that have joined a segment need its name no more.
    """
    from _posixshmem import shm_unlink

    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    make_name, join = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm

    def name(group: Any) -> str:
        return shared_memory_name(make_name(group))

    def join_and_forget(group: Any) -> int:
        handle = join(group)  # which ends with a barrier
        shm_unlink(f"{group.group_name}_{group.communicator.rank}")
        return handle

    setattr(_CPUSHMDistributed, "make_group_name", staticmethod(name))
    setattr(_CPUSHMDistributed, "_init_cpu_shm", join_and_forget)


def _start_without_message_queues() -> None:
    """Make groups without vLLM's message queues: ranks of a launcher send nothing through them.

    Each leaves sockets in the temporary folder and shared memory when its process ends.
    """
    from vllm.distributed import parallel_state

    make_group = parallel_state.init_model_parallel_group

    def make(*values: Any, **named: Any) -> Any:
        return make_group(*values, **{**named, "use_message_queue_broadcaster": False})

    setattr(parallel_state, "init_model_parallel_group", make)


def _compute_experts_without_adapters() -> None:
    """Choose the kernels of experts as if there were no adapters: experts have none here, other layers may.

    vLLM would change to kernels that keep experts' weights in an order of their own, or that the host lacks.
    """
    from vllm.model_executor.layers.fused_moe import layer

    describe = layer.FusedMoEConfig

    def described(**named: Any) -> Any:
        return describe(**{**named, "is_lora_enabled": False})

    setattr(layer, "FusedMoEConfig", described)


def shared_memory_name(group: str) -> str:
    """Return the name of a group's shared-memory segments, equal on the group's ranks and unique to the job.

    Ranks of a job on one host have one parent, and segments do not cross hosts. ``shm_open`` takes slashes at
    the start of a name alone, and vLLM's own name, ``group``, starts with two in ranks that a launcher
    started: they must not end up behind anything.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}-{restart}"
    return f"{job}-{group.replace('/', '_')}"


def _keep_weights_unpacked() -> None:
    """Keep linear and embedding weights as plain tensors on the host, so that they can be written in place.

    vLLM would replace them by packed copies that no write reaches. Accelerators keep them plain anyway.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def use_plain_linear(_: Any, layer: Any) -> None:
        layer.cpu_linear = linear

    setattr(UnquantizedLinearMethod, "process_weights_after_loading", use_plain_linear)
    setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", use_plain_linear)


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a plain weight: in float32 by oneDNN, which packs no weights for a few rows, as MKL does.

    With MKL on AMD's processors that took most of a step: 1.9 times oneDNN's time from 16 rows on.
    """
    if values.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(values, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")


def _compile_nothing() -> None:
    """Mask tokens and count their ranks eagerly on the host: compiling it takes seconds and a compiler."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    def count(values: Tensor, thresholds: Tensor) -> Tensor:
        return (values >= thresholds).sum(-1)

    sampler.batched_count_greater_than = count
    mask = inspect.unwrap(vocab_parallel_embedding.get_masked_input_and_mask)
    vocab_parallel_embedding.get_masked_input_and_mask = mask


def _rotate_heads_apart() -> None:
    """Rotate queries and keys of [tokens, heads, size], as latent attention's are, in torch on the host.

    vLLM's kernel (csrc/cpu/pos_encoding.cpp, behind RotaryEmbedding.forward_cpu) takes the heads of such a
    tensor for further tokens.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None, **more: Any) -> Any:
        apart = query.dim() == 3
        return (self.forward_native if apart else partial(kernel, self))(positions, query, key, **more)

    setattr(RotaryEmbedding, "forward_cpu", rotate)


def bytes_asleep() -> int:
    """Return how many bytes of vLLM's sleeping allocations are given back, and still count as allocated."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(allocation.handle[1] for allocation in allocations if allocation.is_asleep)


def host_cache_bytes(shape: ModelShape, tensor: int, dtype: str, max_model_len: int) -> int:
    """Return the size of one rank's key-value cache on the host: 256 rows of full length, at most 1 GiB.

    One row of full length always fits. vLLM touches all of it at once, so more costs memory unused.
    """
    token = shape.kv_bytes_per_gpu(tensor, getattr(torch, dtype).itemsize)
    row = (-(-max_model_len // _HOST_BLOCK) + 1) * _HOST_BLOCK * token
    return int(max(2 * row, min(_HOST_CACHE_ROWS * row, _HOST_CACHE_BYTES)))


class _Distributed:
    """Show vLLM a world that is one layout, in its order, while it builds its groups."""

    def __init__(self, real: Any, layout: ParallelLayout) -> None:
        self._real = real
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_world_size(self, group: Any = None) -> int:
        return self._layout.size if group is None else self._real.get_world_size(group)

    def new_group(self, ranks: Any, **more: Any) -> Any:
        whole = self._layout.size == self._real.get_world_size()
        if whole and not device.on_host():
            return self._real.new_group(
                ranks, **{**more, "sort_ranks": False, "timeout": device.collective_timeout()}
            )
        return communicator(tuple(ranks))


class _Torch:
    """Stand for the torch module with another ``distributed``."""

    def __init__(self, distributed: Any) -> None:
        self.distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def join_groups(layout: ParallelLayout) -> None:
    """Make the process groups that engines on ``layout`` use.

    Collective over the world: call it on every rank before the members build their engines. Where the
    layout is the whole world the engines do it themselves.
    """
    communicator(layout.ranks)
    for ranks in layout.groups("tensor"):
        communicator(ranks)
    for rank in layout.ranks:
        communicator((rank,))


@contextmanager
def local_rank(index: int | None) -> Iterator[None]:
    """Let vLLM find the device of this ``index``: it counts by the launcher's local rank.

    That is another number where a process sees its own device alone.
    """
    before = os.environ.get("LOCAL_RANK")
    if index is not None:
        os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_RANK"] = before


@contextmanager
def layout_as_world(layout: ParallelLayout) -> Iterator[None]:
    """Let vLLM build its groups as if ``layout.ranks``, in that order, were the world.

    Replica r is then ``layout.ranks[r * tensor : (r + 1) * tensor]``.
    """
    from vllm.distributed import parallel_state

    world, model = parallel_state.init_world_group, parallel_state.init_model_parallel_group

    def place(positions: list[int]) -> list[int]:
        return [layout.ranks[position] for position in positions]

    def place_world(ranks: list[int], *args: Any, **more: Any) -> Any:
        return world(place(ranks), *args, **more)

    def place_groups(group_ranks: list[list[int]], *args: Any, **more: Any) -> Any:
        return model([place(ranks) for ranks in group_ranks], *args, **more)

    parallel_state.init_world_group = place_world
    parallel_state.init_model_parallel_group = place_groups
    parallel_state.torch = _Torch(_Distributed(parallel_state.torch.distributed, layout))
    try:
        yield
    finally:
        parallel_state.init_world_group = world
        parallel_state.init_model_parallel_group = model
        parallel_state.torch = torch


def count_engine(change: int) -> int:
    """Count this process's engines up or down and return how many there are now."""
    global _engines
    _engines += change
    return _engines


def forget_groups() -> None:
    """Drop vLLM's groups after its last engine, so that the next one may have another layout."""
    from vllm.distributed import parallel_state

    names = "_TP _ETP _ENGRAM_DP _DCP _PCP _PP _DP _EP _EPLB _INNER_DP_WORLD _WORLD _NODE_COUNT"
    for name in names.split():
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, None)


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Run something that seeds or draws from the process's generators, and leave no trace in them."""
    python, array = random.getstate(), numpy.random.get_state()
    accelerators: dict[str, Any] = {"enabled": True}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        accelerators |= {"devices": [torch.accelerator.current_device_index()]}
        accelerators |= {"device_type": kind.type if kind is not None else ""}
    else:
        accelerators |= {"devices": []}
    with torch.random.fork_rng(**accelerators):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(array)
