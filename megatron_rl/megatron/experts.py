"""Megatron's experts: without Transformer Engine or an accelerator, and with routing that is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.metrics import Metrics


def prepare_experts() -> None:
    """Define what Megatron-Core's router and dispatcher leave undefined on this machine. May be repeated."""
    utilities: Any = moe_utils
    if not hasattr(utilities, "te_general_gemm"):
        utilities.te_general_gemm = None  # the router asks whether it is None
    if device.on_host():
        dispatcher: Any = token_dispatcher
        dispatcher.maybe_move_tensor_to_cpu = host_counts
        regions: Any = mappings
        if regions._gather_along_first_dim is not _gather_uneven:
            _even["gather"] = regions._gather_along_first_dim
            _even["scatter"] = regions._reduce_scatter_along_first_dim
            regions._gather_along_first_dim = _gather_uneven
            regions._reduce_scatter_along_first_dim = _scatter_uneven


_even: dict[str, Any] = {}
"""Megatron's exchanges along the first dimension, which the host's communication has for equal parts."""


def _gather_uneven(
    value: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Gather parts of these sizes from the group's ranks, as Megatron's function does on an accelerator."""
    if output_split_sizes is None or group.size() == 1:
        return _even["gather"](value, group, output_split_sizes, use_global_buffer)
    longest = max(output_split_sizes)
    padded = value.new_zeros((longest, *value.shape[1:]))
    padded[: len(value)] = value
    parts = padded.new_empty((group.size(), *padded.shape))
    dist.all_gather_into_tensor(parts.view(-1), padded.view(-1), group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _scatter_uneven(
    value: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Add up the group's tensors and keep this rank's part of these sizes."""
    if input_split_sizes is None or group.size() == 1:
        return _even["scatter"](value, group, input_split_sizes, use_global_buffer)
    total = value.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(list(input_split_sizes))[group.rank()].contiguous()


def host_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a host tensor as the dispatcher wants it: Megatron converts only what comes from a device."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class RoutedTokens:
    """Hold which experts the tokens of one micro-batch go to on this rank.

    ``given`` [T, layers, k] are the experts that routers must take, with -1 where they choose; None where
    they always do. The first ``real`` of the T tokens are no padding. ``taken`` [T, k] is what each layer's
    router took.
    """

    def __init__(self, given: Tensor | None, real: int) -> None:
        self.given, self.real = given, real
        self.taken: dict[int, Tensor] = {}


class _RouterReplay:
    """Stand where the router of layer ``layer``, counted from 0, asks for the experts of its tokens.

    Megatron-Core's own class of this interface keeps one list for all models of a process, and of a
    pipeline's micro-batches the last.
    """

    def __init__(self, layer: int, routing: Routing) -> None:
        self.layer, self._routing = layer, routing
        self.repeated: deque[RoutedTokens] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids, both [T, k], of the experts; gradients go through the scores."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        tokens, learns = self._routing.tokens, self._routing.learns
        if tokens is None:
            # Recomputation in the backward pass, which takes micro-batches in the order of the forward pass.
            tokens = self.repeated.popleft()
        elif learns:
            self._routing.count(self.layer, tokens, chosen)
            if not torch.is_grad_enabled():
                self.repeated.append(tokens)
        if tokens.given is not None:
            given = tokens.given[:, self.layer].to(chosen.dtype)
            chosen = torch.where(given < 0, chosen, given)
            values = scores.gather(1, chosen)
        if not learns:
            tokens.taken[self.layer] = chosen
        return values, chosen


class Routing:
    """Know the experts that tokens go to in one model on this rank, and have routers take given ones.

    ``chunks`` are the model's; ``layers`` and ``experts`` count those of the whole model.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], layers: int, experts: int, topk: int) -> None:
        self.layers, self.experts, self.topk = layers, experts, topk
        self.tokens: RoutedTokens | None = None
        self.learns = False
        self._routers: list[_RouterReplay] = []
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    assert module.layer_number is not None
                    router: Any = _RouterReplay(module.layer_number - 1, self)
                    module.router_replay = router
                    self._routers.append(router)

    def begin(self, *, learns: bool) -> None:
        """Forget the last pass; ``learns`` says that the next has a backward pass."""
        self.learns = learns
        for router in self._routers:
            router.repeated.clear()
        place = device.device()
        self._loads = torch.zeros((self.layers, self.experts), dtype=torch.long, device=place)
        self._agreement = torch.zeros(2, dtype=torch.long, device=place)

    @contextmanager
    def forward(self, tokens: RoutedTokens) -> Iterator[None]:
        """Route a micro-batch's tokens in the forward pass inside the block."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    def count(self, layer: int, tokens: RoutedTokens, chosen: Tensor) -> None:
        """Add what a router would choose to the loads, and to the agreement with what is given."""
        chosen = chosen[: tokens.real]
        taken = chosen
        if tokens.given is not None:
            given = tokens.given[: tokens.real, layer].to(chosen.dtype)
            known = given >= 0
            same = (given[:, :, None] == chosen[:, None, :]).any(dim=-1)
            self._agreement += torch.stack([(same & known).sum(), known.sum()])
            taken = torch.where(known, given, chosen)
        taken = taken.flatten()
        self._loads[layer].index_add_(0, taken, torch.ones_like(taken))

    def metrics(self, group: Any) -> Metrics:
        """Return what was counted in a learn pass on all ranks of the ``group``. Collective over it.

        ``router/load_max/layer_N`` is the load of the busiest expert of a layer over the mean load, 1 where
        all are equal. ``router/agreement`` is the share of given experts that routers would choose too.
        """
        for counts in (self._loads, self._agreement):
            dist.all_reduce(counts, group=group)
        loads, (same, known) = self._loads.double(), self._agreement.tolist()
        largest = (loads.amax(dim=1) / loads.mean(dim=1)).tolist()
        metrics = Metrics.mean("router/agreement", same, known) if known else Metrics()
        # Layers without experts have no load.
        values = {f"router/load_max/layer_{n}": value for n, value in enumerate(largest) if value == value}
        return metrics + Metrics.of(values)
