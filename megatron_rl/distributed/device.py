"""Device of this rank: the only module that names an accelerator or a communication backend.

Megatron-Core calls functions of torch.cuda. On a machine without an accelerator this module replaces these
functions by functions that use the CPU, so that the same Megatron code trains there. In names of functions,
``host`` means the CPU.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from megatron_rl.distributed.rendezvous import open_store, rendezvous_error
from megatron_rl.launcher import current_launch
from megatron_rl.shapes.accelerator import HOPPER

# Connect pairs of ranks on first use. Otherwise each gloo group connects all pairs by thousands of sockets.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

_ON_HOST = not torch.cuda.is_available()
_simulated = False

_megatron_prepared = False
_megatron_mode_depth = 0

_collective_timeout: timedelta | None = None
_WATCHED_TIMEOUT = timedelta(days=7)
"""Timeout of collectives in a job with a hang detector, which aborts a hanging job much earlier."""

_DETERMINISTIC_ENVIRONMENT = {
    # Otherwise the way in which cuBLAS splits a product depends on the workspace of its stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NVLink SHARP sums in the switch, in the order of arrival. Megatron-LM accepts this value.
    "NCCL_ALGO": "^NVLS",
    # Transformer Engine 2.20: cuDNN's and FlashAttention's backward passes add atomically by default.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # vLLM 0.32: its all-reduce over symmetric memory sums in the switch, too.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Environment variables that `use_deterministic_kernels` sets."""
_deterministic = False

_ALIGNMENT = 512
"""Bytes to which PyTorch's allocator aligns device memory; kernels may rely on it."""

_unbacked_bytes = 0
"""Bytes that PyTorch counts as allocated although no physical memory backs them."""
_earlier_peak = 0
"""Peak of allocated bytes from the last reset of `peak_memory` to the last `_reset_allocator_peak`."""


def become_simulated_rank() -> None:
    """Make this process a simulated rank. Call it before `initialize`; it cannot be undone.

    Tensors on its device are meta tensors, with a size but no values, and collectives transfer nothing.
    """
    global _simulated, _ON_HOST
    _simulated = _ON_HOST = True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def is_simulated() -> bool:
    """Return whether this is a simulated rank, whose tensors have no values to read."""
    return _simulated


def device() -> torch.device:
    """Return the device that this rank computes on."""
    if _simulated:
        return torch.device("meta")
    if _ON_HOST:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def product_name() -> str:
    """Return the product name of this rank's device, or "host" without an accelerator."""
    if _ON_HOST:
        return "host"
    return torch.cuda.get_device_name()


def host() -> torch.device:
    """Return the CPU as a device, also on a machine with an accelerator."""
    return torch.device("cpu")


def on_host() -> bool:
    """Return whether this rank computes on the CPU; False for a simulated rank."""
    return _ON_HOST and not _simulated


def on_accelerator() -> bool:
    """Return whether this rank computes on an accelerator; False for a simulated rank."""
    return not _ON_HOST


def compute_capability() -> int:
    """Return ten times the GPU's compute capability, such as 90 for an H100; also 90 without a GPU."""
    if _ON_HOST:
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def toolkit_version() -> int | None:
    """Return the major version of CUDA that torch is built for, or None without an accelerator."""
    version = torch.version.cuda
    if _ON_HOST or version is None:
        return None
    return int(version.partition(".")[0])


def needs_deterministic_attention() -> bool:
    """Return whether Transformer Engine is restricted to deterministic attention kernels."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables for the accelerator, unless they are set. Call it before `initialize`.

    CUDA and PyTorch's allocator read these variables once, when the device is initialized. Without a GPU
    nothing is set.
    """
    if _ON_HOST:
        return
    for name, value in variables.items():
        # The older name of PyTorch's variable takes precedence over the newer name.
        if name == "PYTORCH_ALLOC_CONF" and "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
            continue
        os.environ.setdefault(name, value)


def backend() -> str:
    """Return the communication backend of the device."""
    if _ON_HOST:
        return "gloo"
    return "nccl"


def backends() -> str:
    """Return the backend of each device type as torch.distributed parses it, such as "cpu:gloo,cuda:nccl"."""
    if _simulated:
        return "cpu:fake,meta:fake"
    if _ON_HOST:
        return backend()
    return f"cpu:gloo,cuda:{backend()}"


def can_split_groups() -> bool:
    """Return whether the backend can split a process group into smaller groups: NCCL can, gloo cannot."""
    return not _ON_HOST and not _simulated


def synchronize() -> None:
    """Wait for all kernels launched on the device, if this process has initialized it.

    torch's own call would initialize device 0 on every rank before `initialize` selects a device.
    """
    if _is_accelerator_initialized():
        torch.cuda.synchronize()


def _is_accelerator_initialized() -> bool:
    """Return whether this process has initialized an accelerator."""
    return not _ON_HOST and torch.cuda.is_initialized()


def empty_cache() -> None:
    """Return cached, unused device memory to the driver."""
    if _is_accelerator_initialized():
        torch.cuda.empty_cache()


def allocate_host_buffer(num_bytes: int) -> Tensor:
    """Allocate pinned host memory, [num_bytes] uint8; unpinned without an accelerator.

    Ordinary memory is pinned after its allocation, since torch's pinned allocator rounds sizes up to a power
    of two.
    """
    if _simulated:
        return torch.empty(1, dtype=torch.uint8).expand(num_bytes)

    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    if not _ON_HOST and num_bytes:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer


def upload_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy CPU tensors to the device and return the copies; without a GPU, return the tensors unchanged.

    All tensors are copied in one asynchronous transfer from pinned memory. The CPU waits neither for the
    transfer nor for earlier kernels. The copies are views of one buffer, which is freed with the last copy.
    """
    if on_host():
        return list(tensors)

    # Each copy starts at an aligned offset of the buffer.
    offsets: list[int] = []
    buffer_bytes = 0
    for tensor in tensors:
        offsets.append(buffer_bytes)
        padding = -tensor.nbytes % _ALIGNMENT
        buffer_bytes += tensor.nbytes + padding
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device())

    if _simulated:
        staging = torch.empty(1, dtype=torch.uint8).expand(buffer_bytes)
    else:
        # PyTorch reuses this memory only after the copy below has ended.
        staging = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
        for tensor, view in zip(tensors, _slice_views(staging, tensors, offsets), strict=True):
            view.copy_(tensor)
    buffer.copy_(staging, non_blocking=True)
    return _slice_views(buffer, tensors, offsets)


def _slice_views(buffer: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Return views of a byte buffer at ``offsets``, with the dtypes and shapes of ``tensors``."""
    views = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor_bytes = buffer[offset : offset + tensor.nbytes]
        views.append(tensor_bytes.view(tensor.dtype).view(tensor.shape))
    return views


def peak_memory(reset: bool = False) -> int:
    """Return the peak of bytes allocated on the device since the last reset; ``reset`` resets it afterwards.

    Memory that vLLM's sleep mode released is not counted: see `set_unbacked_bytes`. Without a GPU the peak is
    the largest resident set size of the process, which cannot be reset.
    """
    global _earlier_peak
    if _ON_HOST:
        import resource

        # Linux reports the size in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not _is_accelerator_initialized():
        return 0

    peak = max(_earlier_peak, torch.cuda.max_memory_allocated() - _unbacked_bytes)
    if reset:
        torch.cuda.reset_peak_memory_stats()
        _earlier_peak = 0
    return peak


@dataclass(frozen=True)
class MemoryReading:
    """Memory use of this rank's device at one moment, in bytes.

    Example: ``MemoryReading(allocated=40 << 30, peak=61 << 30, other_bytes=3 << 30, total=79 << 30)``.
    """

    allocated: int
    """Bytes of the tensors that exist now."""
    peak: int
    """Peak bytes of tensors since the last reset of PyTorch's peak statistics."""
    other_bytes: int
    """Bytes in use outside of PyTorch's allocator: CUDA, NCCL and other processes."""
    total: int
    """Capacity of the device in bytes."""


def read_memory(*, reset_peak: bool = False) -> MemoryReading | None:
    """Return the GPU's memory use, or None if this process has not initialized a GPU.

    With ``reset_peak`` PyTorch's peak statistics are reset first, so that the reading's ``peak`` equals
    ``allocated``. The result of `peak_memory` still includes the peak before the reset. The call does not
    wait for kernels, since PyTorch's allocator runs on the CPU.
    """
    if not _is_accelerator_initialized():
        return None
    if reset_peak:
        _reset_allocator_peak()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    reserved_bytes = torch.cuda.memory_reserved() - _unbacked_bytes
    return MemoryReading(
        allocated=torch.cuda.memory_allocated() - _unbacked_bytes,
        peak=torch.cuda.max_memory_allocated() - _unbacked_bytes,
        other_bytes=max(0, total_bytes - free_bytes - reserved_bytes),
        total=total_bytes,
    )


def _reset_allocator_peak() -> None:
    """Reset PyTorch's peak memory statistics, after storing their peak for `peak_memory`."""
    global _earlier_peak
    _earlier_peak = peak_memory()
    torch.cuda.reset_peak_memory_stats()


def set_unbacked_bytes(num_bytes: int) -> None:
    """Set the number of bytes that PyTorch counts as allocated although no physical memory backs them.

    vLLM's sleep mode unmaps the memory of an engine, which PyTorch continues to count.
    """
    global _unbacked_bytes
    if _is_accelerator_initialized():
        # PyTorch's peak so far was counted with the previous number of unbacked bytes: store this peak, then
        # reset the statistics.
        _reset_allocator_peak()
    _unbacked_bytes = num_bytes


def rank() -> int:
    """Return this process's rank in the job, from the launcher."""
    return current_launch().rank


def world_size() -> int:
    """Return the number of processes of the job, from the launcher."""
    return current_launch().world_size


def initialize(timeout: float = 600.0, *, watched: bool = False) -> None:
    """Join the job: select the device, initialize torch.distributed, prepare Megatron for the device.

    ``timeout`` in seconds bounds the rendezvous and every collective. In a ``watched`` job, collectives have
    a timeout of a week, because a hang detector aborts the job earlier. Without a launcher the job is this
    one process. Raises UserError if the rendezvous fails. Collective over the world.
    """
    global _collective_timeout
    _collective_timeout = timedelta(seconds=timeout)
    if watched:
        _collective_timeout = _WATCHED_TIMEOUT

    # Without a launcher, set the environment as torchrun would for a job of one process.
    defaults = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)

    # A host may have fewer accelerators than ranks.
    if not _ON_HOST:
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank % torch.cuda.device_count())

    # A training script that embeds this package may have initialized torch.distributed already.
    if not dist.is_initialized():
        try:
            store = _open_store(timedelta(seconds=timeout))
            dist.init_process_group(
                backends(),
                timeout=_collective_timeout,
                store=store,
                rank=rank(),
                world_size=world_size(),
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise rendezvous_error(error, timeout) from error

    prepare_megatron()


def use_deterministic_kernels() -> None:
    """Restrict this process to deterministic kernels. Call it before `initialize`.

    Without a GPU this does nothing, since CPU kernels are deterministic. Environment variables that the user
    has set are not changed.

    Inside `megatron_mode` PyTorch raises for an operation without a deterministic kernel. Outside of it
    PyTorch only warns, because sampling needs such operations, for example the cumulative sum of a top-p
    filter. PyTorch has no deterministic kernel for the cumulative sum, but the results of its kernel are
    bitwise equal for batches of equal size.
    """
    global _deterministic
    if _ON_HOST:
        return
    for name, value in _DETERMINISTIC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    torch.use_deterministic_algorithms(True, warn_only=True)
    # Do not fill new tensors: this costs a pass over their memory, and no kernel reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    _deterministic = True


def is_deterministic() -> bool:
    """Return whether this process is restricted to deterministic kernels."""
    return _deterministic


def _open_store(timeout: timedelta) -> dist.Store:
    """Return the store of the job, or a fake store for a simulated rank."""
    if not _simulated:
        return open_store(timeout)

    # The import registers the fake backend, whose collectives transfer nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def collective_timeout() -> timedelta | None:
    """Return the timeout for new process groups, or None before `initialize`.

    Groups must be created with this timeout, since torch's default is half an hour.
    """
    return _collective_timeout


def dump_flight_record() -> bytes:
    """Return a record of this process's last collectives, in the format of PyTorch's flight recorder."""
    # NCCL has a separate recorder.
    function_name = "_dump_nccl_trace"
    if _ON_HOST:
        function_name = "_dump_fr_trace"
    return getattr(c10d, function_name)()


def prepare_megatron() -> None:
    """Patch Megatron-Core and torch.cuda in this process so that Megatron's models run. Idempotent.

    Without a GPU, functions of torch.cuda are replaced by CPU functions. Megatron's fused functions are
    compiled with dynamic shapes. Megatron's global memory buffer is created.
    """
    global _megatron_prepared
    if _megatron_prepared:
        return
    _megatron_prepared = True

    if _ON_HOST:
        _install_host_stand_ins()

    from megatron.core import parallel_state

    from megatron_rl.distributed.compiled import compile_for_any_shape

    compile_for_any_shape()

    # Layers read this buffer from Megatron's global state even if process groups are passed to them.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def seed_generators(seed: int, tensor_rank: int) -> None:
    """Seed torch's generator and the device's generators.

    torch's generator has the same seed on all ranks. The device's generators are seeded by
    `seed_tensor_parallel`.
    """
    torch.manual_seed(seed)
    with megatron_mode():
        seed_tensor_parallel(seed, tensor_rank)


def generator_states() -> dict[str, Any]:
    """Return the states of this rank's random generators, of torch and of Megatron."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    megatron_states = {name: state.clone() for name, state in tracker.get_states().items()}
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": megatron_states,
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore states that `generator_states` returned on a device of the same type."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["host"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(states["megatron"])


def tensor_parallel_generator() -> AbstractContextManager[None]:
    """Return a context in which the device's random numbers differ between tensor-parallel ranks."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    return tracker.fork()


def seed_tensor_parallel(seed: int, tensor_rank: int) -> None:
    """Seed the device's default generator, and Megatron's generator for tensor-parallel shards.

    The default generator has the same seed on all ranks. The generator for shards has a separate seed on each
    tensor-parallel rank, since each rank draws the values of its own shard.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=0)


class _HostMode(TorchFunctionMode):
    """Mode that replaces the accelerator by the CPU where Megatron-Core creates or moves tensors."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}

        if func is torch.Tensor.cuda:
            return args[0].to(device())

        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's distributed optimizer distinguishes dtypes by names such as torch.cuda.HalfTensor.
            type_name = func(args[0]).replace("torch.meta.", "torch.")
            return type_name.replace("torch.", "torch.cuda.")

        if "device" in kwargs and _is_cuda_device(kwargs["device"]):
            kwargs = {**kwargs, "device": device()}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda_device(args[1]):
            args = (args[0], device(), *args[2:])

        return func(*args, **kwargs)


def _is_cuda_device(value: Any) -> bool:
    """Return whether a value is a CUDA device, or the name of a CUDA device such as "cuda:0"."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


@contextmanager
def megatron_mode() -> Iterator[None]:
    """Redirect Megatron-Core's GPU calls to the CPU inside the block, on a rank without a GPU; reentrant.

    On a GPU the block has an effect only after `use_deterministic_kernels`: PyTorch then raises for an
    operation that has no deterministic kernel.
    """
    global _megatron_mode_depth

    # Only the outermost block redirects, since nested modes would redirect twice.
    is_outermost = _megatron_mode_depth == 0
    _megatron_mode_depth += 1
    try:
        if is_outermost and _ON_HOST:
            with _HostMode():
                yield
        elif is_outermost and _deterministic:
            with _raise_for_nondeterministic_kernels():
                yield
        else:
            yield
    finally:
        _megatron_mode_depth -= 1


@contextmanager
def _raise_for_nondeterministic_kernels() -> Iterator[None]:
    """Raise for operations without a deterministic kernel inside the block, instead of warning.

    With mere warnings, PyTorch 2.13 selects a backward pass of FlashAttention that sums in any order.
    """
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class _HostStream:
    """Replacement for CUDA streams and events on CPU, where operations run in order: it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = host()

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _HostStream:
        return self

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True


@contextmanager
def preserve_stream_stand_ins() -> Iterator[None]:
    """Restore torch.cuda's stream and event classes after a block that imports vLLM's CPU worker.

    Without a GPU, `prepare_megatron` has replaced these classes by `_HostStream`. The import of vLLM's CPU
    worker replaces them again, by classes without some methods that Megatron-Core calls.
    """
    names = ("Stream", "Event", "stream", "current_stream")
    originals = {name: getattr(torch.cuda, name) for name in names}
    yield
    for name, original in originals.items():
        setattr(torch.cuda, name, original)


def _install_host_stand_ins() -> None:
    """Replace the functions of torch.cuda that Megatron-Core calls by functions that use the CPU."""
    accelerator: Any = torch.cuda
    accelerator.current_device = device
    accelerator.synchronize = lambda *_: None
    accelerator.empty_cache = lambda: None

    accelerator.current_stream = lambda *_: _HostStream()
    accelerator.Stream = _HostStream
    accelerator.Event = _HostStream
    accelerator.stream = lambda stream: stream

    accelerator.manual_seed = torch.manual_seed
    accelerator.get_rng_state = lambda *_, **__: torch.get_rng_state()
    accelerator.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    from megatron.core.tensor_parallel import random

    # On CPU the default and the tracked generator are the same: silence the tracker's warning at each fork.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
