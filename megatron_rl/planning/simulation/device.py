"""Measure what a rank does on a device that holds nothing: bytes, kernels, reads of the device, messages.

After `device.simulate` tensors on the device have sizes and no values, and no other rank answers. All that
runs inside a `Simulation` is the real code. What it cannot know is set: experts get equal numbers of tokens,
and whatever is read from the device is 1.
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
from megatron_rl.megatron.experts import host_counts

_aten = torch.ops.aten
_NO_KERNEL = frozenset(
    {"empty", "empty_strided", "empty_like", "new_empty", "detach", "_unsafe_view", "set_"}
)
_ATTENTION = "scaled_dot_product_attention"
_MESSAGES = frozenset({"send", "recv_", "recv_any_source_"})


class Simulation(TorchDispatchMode):
    """Count what happens inside, by phase; ``boundary`` is the shape of what pipeline stages exchange.

    On a device that holds values it counts the bytes of a real run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.boundary: tuple[int, ...] = ()
        self.true_share = 1.0
        self.phases: dict[str, Usage] = {}
        self._usage = Usage()
        self._device = device.device().type
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self._kinds: dict[tuple[int, ...], str] = {}
        self._known: dict[int, Tensor] = {}

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run the block as a rank whose device this mode is."""
        with ExitStack() as stack:
            stack.enter_context(_answers())
            stack.enter_context(_even_experts(self))
            stack.enter_context(self)
            yield

    def name_groups(self, groups: Mapping[str, Any]) -> None:
        """Call the communicators by these kinds in what is counted; the first name of one stays."""
        for kind, group in groups.items():
            if group is not None:
                self._kinds.setdefault(tuple(dist.get_process_group_ranks(group)), kind)

    def kind(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the communicator of these ranks."""
        return self._kinds.get(ranks, f"{len(ranks)} ranks")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as ``name``; blocks of one name add up."""
        usage = self.phases.setdefault(name, Usage())
        outer, self._usage = self._usage, usage
        self._count_again()
        usage.begin = self._bytes
        usage.peak = max(usage.peak, self._bytes)
        yield
        self._count_again()
        usage.end = self._bytes
        self._usage = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        answer = _READS.get(func)
        if answer is not None and _reads_device(func, args, kwargs):
            self._usage.reads += 1
            return answer(self, *args, **kwargs)
        if func is _aten.masked_select.default and args[0].is_meta:
            count = round(args[1].numel() * self.true_share)
            result = args[0].new_empty(count)
        else:
            result = func(*args, **kwargs)
        self._note(func, result)
        return result

    def _note(self, func: Any, result: Any) -> None:
        """Count the storages that ``result`` brings, and the kernel that makes it."""
        values = result if isinstance(result, list | tuple) else (result,)
        computes = False
        for value in values:
            if isinstance(value, Tensor) and value.device.type == self._device:
                computes = True
                self._hold(value)
        if computes and not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL:
            self._usage.kernels += 1

    def _hold(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = (weakref.ref(storage, lambda _: self._release(key)), size)
        self._bytes += size
        self._usage.peak = max(self._usage.peak, self._bytes)

    def _release(self, key: int) -> None:
        self._known.pop(key, None)
        self._bytes -= self._alive.pop(key)[1]

    def _count_again(self) -> None:
        """Take over the sizes of storages that were emptied or refilled in place."""
        for key, (reference, _) in list(self._alive.items()):
            storage = reference()
            if storage is not None:
                self._alive[key] = (reference, storage.nbytes())
        self._bytes = sum(size for _, size in self._alive.values())

    def count(self, group: Any, size: int, message: bool = False) -> None:
        """Count a call of a group about ``size`` bytes."""
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = "messages" if message else self.kind(ranks)
        self._usage.calls[kind] += 1
        self._usage.bytes[kind] += size

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        tensors = [list(_tensors(value)) for value in args]
        group = next(value for value in args if isinstance(value, torch.ScriptObject))
        if any(value.is_meta for values in tensors for value in values):
            size = max(sum(value.nbytes for value in values) for values in tensors)
            self.count(dist.ProcessGroup.unbox(group), size, message=name in _MESSAGES)
        elif name in ("_allgather_base_", "allgather_"):
            _gather_alike(name, args)
        if name == "recv_" and args[0][0].dtype == torch.int64:
            value = args[0][0]
            self._known[value.untyped_storage()._cdata] = torch.tensor(self.boundary)
        if "_tensor_coalesced" in name:
            # PyTorch has these for devices that hold something; only what waits for them is wanted.
            args = [[torch.empty(0) for _ in value] if isinstance(value, list) else value for value in args]
        return func(*args, **kwargs)

    def _read(self, value: Tensor, *_: Any, **how: Any) -> Tensor:
        known = self._known.get(value.untyped_storage()._cdata)
        if known is not None:
            return known.clone()
        return torch.ones(value.shape, dtype=how.get("dtype") or value.dtype)

    def _scalar(self, value: Tensor) -> Any:
        return False if value.dtype == torch.bool else torch.ones((), dtype=value.dtype).item()

    def _ignore(self, target: Tensor, *_: Any, **__: Any) -> Tensor:
        return target


_READS: dict[Any, Callable[..., Any]] = {
    _aten._to_copy.default: Simulation._read,
    _aten.copy_.default: Simulation._ignore,
    _aten._local_scalar_dense.default: Simulation._scalar,
}


def _reads_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Say whether values of the device come to the host."""
    if func is _aten.copy_.default:
        return not args[0].is_meta and args[1].is_meta
    if func is _aten._to_copy.default:
        target = kwargs.get("device")
        return args[0].is_meta and target is not None and target.type != "meta"
    return args[0].is_meta


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _gather_alike(name: str, args: Any) -> None:
    """Fill a gathered tensor of the host as if every rank had this one's."""
    if name == "allgather_":
        for outputs, value in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(value)
        return
    output, value = args[0].view(-1), args[1].reshape(-1)
    output.copy_(value.repeat(output.numel() // value.numel()))


@contextmanager
def _answers() -> Iterator[None]:
    """Choose the fused kernel that an accelerator has for attention; read values that make a new tensor.

    The functions themselves are replaced: a mode would not see what a backward pass computes again.
    """
    library: Any = torch
    attend, make = functional.scaled_dot_product_attention, torch.tensor

    def fused(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        if not query.is_meta:
            return attend(query, key, value, **how)
        mask, causal, scale = how["attn_mask"], how["is_causal"], how["scale"]
        if mask is None and query.shape[-1] == value.shape[-1]:
            return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]
        bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, 0.0, causal, scale=scale
        )[0]

    def made(data: Any, **how: Any) -> Tensor:
        return make(_values(data), **how)

    setattr(functional, _ATTENTION, fused)
    library.tensor = made
    try:
        yield
    finally:
        setattr(functional, _ATTENTION, attend)
        library.tensor = make


def _values(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_values(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.is_meta and not value.dim() else value


@contextmanager
def _even_experts(simulation: Simulation) -> Iterator[None]:
    """Have tokens spread evenly over experts, whose numbers of tokens a device would tell the host."""
    dispatcher: Any = token_dispatcher
    kind = dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, move = kind.preprocess, dispatcher.maybe_move_tensor_to_cpu
    gather = dispatcher.gather_from_sequence_parallel_region

    def spread(self: Any, routing: Tensor) -> Any:
        tokens, experts = routing.shape
        simulation._usage.reads += 1
        simulation.true_share = self.config.moe_router_topk / experts
        chosen = torch.arange(tokens * self.config.moe_router_topk) % experts
        even = torch.zeros(routing.shape, dtype=torch.bool)
        even[torch.arange(len(chosen)) // self.config.moe_router_topk, chosen] = True
        dispatcher.gather_from_sequence_parallel_region = gather_alike
        try:
            return preprocess(self, even)
        finally:
            dispatcher.gather_from_sequence_parallel_region = gather

    def gather_alike(counts: Tensor, group: Any) -> Tensor:
        simulation.count(group, counts.nbytes * group.size())
        return counts.repeat(group.size())

    kind.preprocess, dispatcher.maybe_move_tensor_to_cpu = spread, host_counts
    try:
        yield
    finally:
        kind.preprocess, dispatcher.maybe_move_tensor_to_cpu = preprocess, move
