"""Count the bytes, kernels, device reads and messages of a rank on a device without storage.

After `device.become_simulated_rank`, tensors on the device have shapes but no values, and other ranks do not
exist. Inside a `Simulation` the trainer's real code runs. Two assumptions replace unknown values: all experts
get equally many tokens, and every value that is read from the device is 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.budget import Usage
from megatron_rl.distributed import device
from megatron_rl.megatron.experts import convert_cpu_tensor

_aten = torch.ops.aten
_NO_KERNEL = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "detach", "_unsafe_view", "set_"}
)
"""Operators that allocate or alias memory without launching a kernel."""
_ATTENTION = "scaled_dot_product_attention"
_INDEXING = frozenset({"index", "index_put", "index_put_"})
"""Operators with indices; with a boolean index the size of the result depends on the index's values."""
_SELECTIONS = frozenset(
    {"nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "bincount"}
)
"""Operators whose output size depends on values."""
_MESSAGES = frozenset({"send", "recv_", "recv_any_source_"})
"""Point-to-point operators of c10d, torch's namespace of collectives."""


class Simulation(TorchDispatchMode):
    """Dispatch mode that counts a rank's bytes, kernels, device reads and messages by phase.

    Tests also use this mode on a device with storage: they compare the bytes of a real run with a simulation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.boundary_shape: tuple[int, ...] = ()
        """Shape of the activations that pipeline stages send to each other."""
        self.assumed_true_fraction = 1.0
        """Assumed fraction of true elements in a mask, for operators whose output size depends on it."""
        self.phases: dict[str, Usage] = {}

        self._usage = Usage()
        self._device = device.device().type
        # Address of a storage -> weak reference and size; several tensors with one storage count once.
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self._group_names: dict[tuple[int, ...], str] = {}
        # Address of a storage -> values that a read of the storage returns.
        self._values: dict[int, Tensor] = {}

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count bytes, kernels, device reads and messages of the code inside this context.

        Inside the context the trainer uses an accelerator's code paths, and tokens are routed evenly to
        experts.
        """
        with ExitStack() as stack:
            stack.enter_context(_patch_accelerator_functions())
            stack.enter_context(_route_evenly(self))
            stack.enter_context(self)
            yield

    def name_groups(self, groups: Mapping[str, Any]) -> None:
        """Set the names under which the traffic of process groups is counted.

        The first name applies if several groups have the same ranks.
        """
        for name, group in groups.items():
            if group is not None:
                self._group_names.setdefault(tuple(dist.get_process_group_ranks(group)), name)

    def group_name(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the process group of these ranks, or ``N ranks`` if it has no name."""
        return self._group_names.get(ranks, f"{len(ranks)} ranks")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the code inside this context as phase ``name``; contexts with the same name add up."""
        usage = self.phases.setdefault(name, Usage())
        outer_usage = self._usage
        self._usage = usage

        # The peak of a phase includes the bytes that were allocated before it.
        self._update_sizes()
        usage.begin = self._bytes
        usage.peak = max(usage.peak, self._bytes)
        yield
        self._update_sizes()
        usage.end = self._bytes

        self._usage = outer_usage

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Count one operator call and execute it; return assumed values if it reads the device."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._count_communication(func, args, kwargs)

        # Values on the device do not exist, so return assumed values for a read.
        read_assumed_values = _READS.get(func)
        if read_assumed_values is not None and _reads_device(func, args, kwargs):
            self._usage.reads += 1
            return read_assumed_values(self, *args, **kwargs)

        # Count pageable copies and selections: like reads, they make the host wait for the device.
        if self._is_pageable_copy(func, args, kwargs):
            self._usage.copies += 1
        if self._has_data_dependent_size(func, args, kwargs):
            self._usage.selections += 1

        if func is _aten.masked_select.default and args[0].is_meta:
            # The size of the result depends on values that do not exist: assume `assumed_true_fraction`.
            values, mask = args
            num_selected = round(mask.numel() * self.assumed_true_fraction)
            result = values.new_empty(num_selected)
        else:
            result = func(*args, **kwargs)
        self._count_result(func, result)
        return result

    def _count_result(self, func: Any, result: Any) -> None:
        """Count the bytes of the storages in ``result``, and the kernel that computes it."""
        device_tensors = [tensor for tensor in _iterate_tensors(result) if self._is_on_device(tensor)]
        for tensor in device_tensors:
            self._add_storage(tensor)

        launches_kernel = not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL
        if device_tensors and launches_kernel:
            self._usage.kernels += 1

    def _is_pageable_copy(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operator copies host memory to the device and makes the host wait.

        Only `device.upload_tensors` copies without waiting, from pinned memory.
        """
        if self._device == device.host().type:
            return False

        if func is _aten.copy_.default:
            target, source = args[:2]
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            return self._is_on_device(target) and not self._is_on_device(source) and not non_blocking

        if func is _aten._to_copy.default:
            target_device = kwargs.get("device")
            is_upload = target_device is not None and target_device.type == self._device
            return is_upload and not self._is_on_device(args[0])
        return False

    def _has_data_dependent_size(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the size of an operator's result depends on values on the device."""
        if not any(self._is_on_device(value) for value in _iterate_tensors(args)):
            return False

        name = func.overloadpacket.__name__
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name in _INDEXING:
            # Writing a single value at a boolean index is a masked fill, which needs no output size.
            if name != "index" and args[2].numel() == 1:
                return False
            return any(index.dtype == torch.bool for index in _iterate_tensors(args[1]))
        return name in _SELECTIONS

    def _is_on_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the measured device."""
        return tensor.device.type == self._device

    def _add_storage(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor's storage until it is freed."""
        # Views share a storage, which counts once.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return

        num_bytes = storage.nbytes()
        reference = weakref.ref(storage, lambda _: self._release_storage(key))
        self._alive[key] = (reference, num_bytes)
        self._bytes += num_bytes
        self._usage.peak = max(self._usage.peak, self._bytes)

    def _release_storage(self, key: int) -> None:
        """Subtract the bytes of a storage that was freed; ``key`` is its address."""
        # Remove its assigned values: another storage may get the same address.
        self._values.pop(key, None)
        _, size = self._alive.pop(key)
        self._bytes -= size

    def _update_sizes(self) -> None:
        """Update the sizes of all storages, since offload resizes them in place."""
        for key, (reference, _) in list(self._alive.items()):
            storage = reference()
            if storage is not None:
                self._alive[key] = (reference, storage.nbytes())
        self._bytes = sum(size for _, size in self._alive.values())

    def count_traffic(self, group: Any, num_bytes: int, is_message: bool = False) -> None:
        """Count a collective or a message of a process group, which transfers ``num_bytes`` bytes."""
        ranks = tuple(dist.get_process_group_ranks(group))
        name = self.group_name(ranks)
        # Messages between pipeline stages are counted separately from the group's collectives.
        if is_message:
            name = "messages"
        self._usage.calls[name] += 1
        self._usage.bytes[name] += num_bytes

    def _count_communication(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count the traffic of a collective or a message of the simulated rank, then run the operator.

        ``func`` is an operator of c10d, torch's namespace of collectives. The other ranks do not exist, so
        the process group does not communicate. Results that the trainer reads on the CPU are filled in here.
        """
        name = func.overloadpacket.__name__
        group = next(value for value in args if isinstance(value, torch.ScriptObject))

        # The traffic is the size of the largest argument: the output of a gather, the input of a scatter.
        if any(value.is_meta for value in _iterate_tensors(args)):
            num_bytes = 0
            for argument in args:
                argument_bytes = sum(value.nbytes for value in _iterate_tensors(argument))
                num_bytes = max(num_bytes, argument_bytes)
            self.count_traffic(dist.ProcessGroup.unbox(group), num_bytes, is_message=name in _MESSAGES)
        elif name in ("_allgather_base_", "allgather_"):
            _fill_gathered_tensor(name, args)

        # A pipeline stage receives the shape of its activations, as 64-bit integers, before the activations.
        if name == "recv_":
            received = args[0][0]
            if received.dtype == torch.int64:
                key = received.untyped_storage()._cdata
                self._values[key] = torch.tensor(self.boundary_shape)

        # PyTorch 2.13 has no coalesced collectives for meta tensors: call them on empty host tensors.
        if "_tensor_coalesced" in name:
            args = list(args)
            for index, argument in enumerate(args):
                if isinstance(argument, list):
                    args[index] = [torch.empty(0) for _ in argument]
        return func(*args, **kwargs)

    def _assumed_values(self, tensor: Tensor, *_: Any, **options: Any) -> Tensor:
        """Return the values that a copy of a simulated tensor to the CPU yields.

        Simulated tensors are on the meta device and have no data. If the simulation has assigned values to
        the tensor's storage, the result has these values; otherwise it has ones.
        """
        key = tensor.untyped_storage()._cdata
        assigned_values = self._values.get(key)
        if assigned_values is not None:
            return assigned_values.clone()

        dtype = options.get("dtype") or tensor.dtype
        return torch.ones(tensor.shape, dtype=dtype)

    def _assumed_scalar(self, tensor: Tensor) -> Any:
        """Return the value that ``.item()`` yields for a simulated tensor, which has no data: 1 or False."""
        # The trainer reads a boolean only to raise an error if it is true.
        if tensor.dtype == torch.bool:
            return False
        return torch.ones((), dtype=tensor.dtype).item()

    def _skip_copy(self, target: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the target of a device-to-host copy unchanged, since the source has no values."""
        return target


_READS: dict[Any, Callable[..., Any]] = {
    _aten._to_copy.default: Simulation._assumed_values,
    _aten.copy_.default: Simulation._skip_copy,
    _aten._local_scalar_dense.default: Simulation._assumed_scalar,
}
"""Operator that can copy values from the device to the host -> method that returns assumed values."""


def _reads_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an operator of `_READS` copies values from the simulated device to the CPU.

    Tensors on the simulated device are meta tensors.
    """
    if func is _aten.copy_.default:
        target, source = args[:2]
        return source.is_meta and not target.is_meta

    source = args[0]
    if func is _aten._to_copy.default:
        target_device = kwargs.get("device")
        has_cpu_target = target_device is not None and target_device.type != "meta"
        return source.is_meta and has_cpu_target
    return source.is_meta


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in an argument or a result, including nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_tensors(item)


def _fill_gathered_tensor(name: str, args: Any) -> None:
    """Fill a gathered tensor on the host as if every rank had this rank's values."""
    if name == "allgather_":
        for outputs, local_tensor in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(local_tensor)
        return

    output = args[0].view(-1)
    local_tensor = args[1].reshape(-1)
    world_size = output.numel() // local_tensor.numel()
    output.copy_(local_tensor.repeat(world_size))


@contextmanager
def _patch_accelerator_functions() -> Iterator[None]:
    """Patch attention to run an accelerator's fused kernel, and `torch.tensor` to count reads of the device.

    The functions are patched globally, since a dispatch mode is not active in the second forward pass of
    recomputation.
    """
    library: Any = torch
    torch_attention = functional.scaled_dot_product_attention
    torch_tensor = torch.tensor

    def fused_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Any,
    ) -> Tensor:
        """Run the fused attention kernel that torch selects on an accelerator."""
        if not query.is_meta:
            return torch_attention(query, key, value, **options)
        mask = options["attn_mask"]
        causal = options["is_causal"]
        scale = options["scale"]

        # Flash attention supports no mask, and only equal head sizes of queries and values.
        dropout = 0.0
        if mask is None and query.shape[-1] == value.shape[-1]:
            flash_attention = _aten._scaled_dot_product_flash_attention
            return flash_attention(query, key, value, dropout, causal, scale=scale)[0]

        # The kernel for masks takes the mask as a bias, which it adds to the scores in their dtype.
        bias = None
        if mask is not None:
            bias = torch.zeros_like(mask, dtype=query.dtype)
        return _aten._scaled_dot_product_efficient_attention(
            query,
            key,
            value,
            bias,
            query.requires_grad,
            dropout,
            causal,
            scale=scale,
        )[0]

    def tensor_of_values(data: Any, **options: Any) -> Tensor:
        """Create a tensor from ``data``, and count a read for each scalar on the device."""
        return torch_tensor(_read_device_scalars(data), **options)

    setattr(functional, _ATTENTION, fused_attention)
    library.tensor = tensor_of_values
    try:
        yield
    finally:
        setattr(functional, _ATTENTION, torch_attention)
        library.tensor = torch_tensor


def _read_device_scalars(value: Any) -> Any:
    """Replace scalars on the simulated device by Python numbers, also inside nested lists.

    Tensors on the simulated device are meta tensors. The call of ``.item()`` counts as a read of the device
    and returns an assumed value.
    """
    if isinstance(value, list | tuple):
        return [_read_device_scalars(item) for item in value]
    is_device_scalar = isinstance(value, Tensor) and value.is_meta and not value.dim()
    if is_device_scalar:
        return value.item()
    return value


@contextmanager
def _route_evenly(simulation: Simulation) -> Iterator[None]:
    """Route tokens evenly to experts inside this context.

    Megatron reads the number of tokens of each expert from the device. In a simulation the device has meta
    tensors, which have no data, so these numbers do not exist.
    """
    dispatcher: Any = token_dispatcher
    dispatcher_class = dispatcher.MoEAlltoAllTokenDispatcher
    original_preprocess = dispatcher_class.preprocess
    original_move_to_cpu = dispatcher.maybe_move_tensor_to_cpu
    original_gather = dispatcher.gather_from_sequence_parallel_region

    def preprocess_evenly(self: Any, routing: Tensor) -> Any:
        """Call Megatron's ``preprocess`` with an even routing mask on the CPU, which counts as one read."""
        num_tokens, num_experts = routing.shape
        experts_per_token = self.config.moe_router_topk
        simulation._usage.reads += 1

        # Later operators select elements with the mask on the device, which has no data. Set the fraction of
        # true elements that the simulation assumes.
        simulation.assumed_true_fraction = experts_per_token / num_experts

        # Route tokens to experts round robin, as a mask [tokens, experts] on the CPU.
        slots = torch.arange(num_tokens * experts_per_token)
        even_routing = torch.zeros(routing.shape, dtype=torch.bool)
        even_routing[slots // experts_per_token, slots % num_experts] = True

        # `preprocess` gathers the counts of all ranks from CPU tensors. Replace the gather only during this
        # call, since other functions use it for tensors on the device.
        dispatcher.gather_from_sequence_parallel_region = gather_copies
        try:
            return original_preprocess(self, even_routing)
        finally:
            dispatcher.gather_from_sequence_parallel_region = original_gather

    def gather_copies(counts: Tensor, group: Any) -> Tensor:
        """Count the gather of ``counts``, and repeat them as if all ranks had the same counts."""
        simulation.count_traffic(group, counts.nbytes * group.size())
        return counts.repeat(group.size())

    dispatcher_class.preprocess = preprocess_evenly
    dispatcher.maybe_move_tensor_to_cpu = convert_cpu_tensor
    try:
        yield
    finally:
        dispatcher_class.preprocess = original_preprocess
        dispatcher.maybe_move_tensor_to_cpu = original_move_to_cpu
