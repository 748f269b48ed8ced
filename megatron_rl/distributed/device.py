"""Know the machine: the only module that names an accelerator or a communication backend.

Megatron-Core asks for its accelerator by name. On a machine without one this module answers those
requests with the host, so that the same Megatron code trains there.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from megatron_rl.distributed.rendezvous import no_meeting, open_store
from megatron_rl.launcher import launch

# Megatron's overlap of tensor parallelism needs it, and an accelerator reads it when it is first asked for.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Otherwise each group connects every pair of its ranks: thousands of the host's sockets a rank.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
_ON_HOST = not torch.cuda.is_available()
_simulated = False
_installed = False
_depth = 0
_timeout: timedelta | None = None
_unbacked = _earlier_peak = 0
_DAYS = timedelta(days=7)


def simulate() -> None:
    """Make this process a rank of a job without machines, before it is initialised; it cannot be undone.

    What lies on its device has a size and no values, and the other ranks' messages never come.
    """
    global _simulated, _ON_HOST
    _simulated = _ON_HOST = True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def simulated() -> bool:
    """Say whether `simulate` was called: nothing can be read from the device."""
    return _simulated


def device() -> torch.device:
    """Return the device that this rank computes on."""
    if _simulated:
        return torch.device("meta")
    return torch.device("cpu") if _ON_HOST else torch.device("cuda", torch.cuda.current_device())


def name() -> str:
    """Return what the device that this rank computes on is called."""
    return "host" if _ON_HOST else torch.cuda.get_device_name()


def host() -> torch.device:
    """Return the host as a device, whatever else there is."""
    return torch.device("cpu")


def on_host() -> bool:
    """Say whether this machine computes without an accelerator."""
    return _ON_HOST and not _simulated


def backend() -> str:
    """Return the communication backend that fits the device."""
    return "gloo" if _ON_HOST else "nccl"


def backends() -> str:
    """Return the backends by kind of device, in the words of torch.distributed."""
    if _simulated:
        return "cpu:fake,meta:fake"
    return backend() if _ON_HOST else f"cpu:gloo,cuda:{backend()}"


def synchronize() -> None:
    """Wait until everything launched on the device is done; one that nobody has used stays unused.

    Asked too early, it would be the first device of the machine on every rank.
    """
    if _in_use():
        torch.cuda.synchronize()


def _in_use() -> bool:
    return not _ON_HOST and torch.cuda.is_initialized()


def empty_cache() -> None:
    """Give cached, unused device memory back to the driver."""
    if _in_use():
        torch.cuda.empty_cache()


def host_buffer(size: int) -> Tensor:
    """Return ``size`` bytes of host memory that an accelerator copies to and from by itself.

    They are pinned as they are: torch's own allocator would round them up to a power of two.
    """
    if _simulated:
        return torch.empty(1, dtype=torch.uint8).expand(size)
    buffer = torch.empty(size, dtype=torch.uint8)
    if not _ON_HOST and size:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    return buffer


def peak_memory(reset: bool = False) -> int:
    """Return the largest number of bytes allocated on the device since the last reset.

    PyTorch counts what vLLM's sleep has given back as allocated: see `set_unbacked`.
    On the host it is the largest resident set of the process, which cannot be reset.
    """
    if _ON_HOST:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    global _earlier_peak
    if not _in_use():
        return 0
    peak = max(_earlier_peak, torch.cuda.max_memory_allocated() - _unbacked)
    if reset:
        torch.cuda.reset_peak_memory_stats()
        _earlier_peak = 0
    return peak


def set_unbacked(size: int) -> None:
    """Say how many bytes of what counts as allocated have no memory behind them, as in a sleeping engine."""
    global _unbacked, _earlier_peak
    if _in_use():
        _earlier_peak = peak_memory()
        torch.cuda.reset_peak_memory_stats()
    _unbacked = size


def rank() -> int:
    """Return this process's rank as the launcher gave it."""
    return launch().rank


def world_size() -> int:
    """Return the number of processes as the launcher gave it."""
    return launch().world_size


def initialize(timeout: float = 600.0, *, waits: bool = False) -> None:
    """Join the job: pick the device, start torch.distributed, prepare Megatron for the device.

    ``timeout`` in seconds bounds the meeting and, unless something else ends a job that ``waits`` in vain,
    every collective. Without a launcher the job is this one process. Collective over the world.
    """
    global _timeout
    _timeout = _DAYS if waits else timedelta(seconds=timeout)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    if not _ON_HOST:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                backends(),
                timeout=_timeout,
                store=_no_store() if _simulated else open_store(timedelta(seconds=timeout)),
                rank=rank(),
                world_size=world_size(),
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise no_meeting(error, timeout) from error
    prepare_megatron()


def _no_store() -> dist.Store:
    """Return a store that nobody else opens; its module declares the backend whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def collective_timeout() -> timedelta | None:
    """Return how long a collective may take; a group made without it would wait half an hour."""
    return _timeout


def flight_record() -> bytes:
    """Return which collectives this process has called last, as PyTorch's flight recorder writes them."""
    return getattr(c10d, "_dump_fr_trace" if _ON_HOST else "_dump_nccl_trace")()


def prepare_megatron() -> None:
    """Install what Megatron-Core needs in this process, once."""
    global _installed
    if _installed:
        return
    _installed = True
    if _ON_HOST:
        _answer_for_the_accelerator()
    from megatron.core import parallel_state

    from megatron_rl.distributed.compiled import compile_for_any_shape

    compile_for_any_shape()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def seed_generators(seed: int, tensor_rank: int) -> None:
    """Seed torch's generators, equal on all ranks, and the device's as `seed_tensor_parallel` does."""
    torch.manual_seed(seed)
    with megatron_mode():
        seed_tensor_parallel(seed, tensor_rank)


def generator_states() -> dict[str, Any]:
    """Return the states of torch's and Megatron's random generators of this rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    of_megatron = {name: state.clone() for name, state in tracker.get_states().items()}
    return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state(), "megatron": of_megatron}


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore what `generator_states` returned on a machine of the same kind."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["host"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(states["megatron"])


def tensor_parallel_generator() -> AbstractContextManager[None]:
    """Return a context in which random numbers are another sequence on each tensor-parallel rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    return tracker.fork()


def seed_tensor_parallel(seed: int, tensor_rank: int) -> None:
    """Seed the device's generators: differently on tensor-parallel ranks, equally on all others."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, tp_rank=tensor_rank, ep_rank=0, etp_rank=0)


class _HostMode(TorchFunctionMode):
    """Answer requests for the accelerator with the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(device())
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer tells float32 from half precision by the accelerator's type names.
            return func(args[0]).replace("torch.meta.", "torch.").replace("torch.", "torch.cuda.")
        if "device" in kwargs and _names_accelerator(kwargs["device"]):
            kwargs = {**kwargs, "device": device()}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_accelerator(args[1]):
            args = (args[0], device(), *args[2:])
        return func(*args, **kwargs)


def _names_accelerator(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


@contextmanager
def megatron_mode() -> Iterator[None]:
    """Run Megatron-Core code inside; on an accelerator this does nothing. May be nested."""
    global _depth
    if not _ON_HOST or _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    _depth = 1
    try:
        with _HostMode():
            yield
    finally:
        _depth = 0


class _HostStream:
    """Stand for a stream where everything runs in order anyway."""

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
def keep_answers() -> Iterator[None]:
    """Undo what an import inside the block makes of the answers for the accelerator.

    The rollout engine brings answers of its own to the same questions, and Megatron-Core needs more of them.
    """
    names = ("Stream", "Event", "stream", "current_stream")
    kept = {name: getattr(torch.cuda, name) for name in names}
    yield
    for name, answer in kept.items():
        setattr(torch.cuda, name, answer)


def _answer_for_the_accelerator() -> None:
    """Replace the accelerator queries that Megatron-Core makes by answers of the host."""
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

    # Both generators are the same one here, which the tracker would report at every fork.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
