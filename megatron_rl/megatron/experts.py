"""Megatron's experts on the host, and the recording and replay of expert routing.

One `Routing` per model observes its routers: a forward-only pass records the experts of each token, a
training pass replays them, so that the policy that is trained routes as the policy that sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.metrics import Metrics

_megatron_exchanges: dict[str, Any] = {}
"""Megatron's own gather and reduce-scatter along the first dimension, which take equal parts on the host."""


def prepare_experts() -> None:
    """Define the names that Megatron-Core's router and dispatcher lack on this machine. Idempotent."""
    utilities: Any = moe_utils
    if not hasattr(utilities, "te_general_gemm"):
        # Megatron defines the name only where Transformer Engine has it; the router compares it with None.
        utilities.te_general_gemm = None

    if not device.on_host():
        return

    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = host_counts

    # Experts receive uneven numbers of tokens, and the host's communication has no uneven collectives.
    regions: Any = mappings
    if regions._gather_along_first_dim is not _gather_uneven:
        _megatron_exchanges["gather"] = regions._gather_along_first_dim
        _megatron_exchanges["scatter"] = regions._reduce_scatter_along_first_dim
        regions._gather_along_first_dim = _gather_uneven
        regions._reduce_scatter_along_first_dim = _reduce_scatter_uneven


def _gather_uneven(
    value: Tensor,
    group: Any,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """Gather parts of the given sizes along the first dimension. Collective over ``group``."""
    if output_split_sizes is None or group.size() == 1:
        return _megatron_exchanges["gather"](value, group, output_split_sizes, use_global_buffer)

    # Pad to the largest part, so that an even all-gather serves.
    padded_size = max(output_split_sizes)
    padded = value.new_zeros((padded_size, *value.shape[1:]))
    padded[: len(value)] = value
    gathered = padded.new_empty((group.size(), *padded.shape))
    dist.all_gather_into_tensor(gathered.view(-1), padded.view(-1), group=group)
    return torch.cat([shard[:size] for shard, size in zip(gathered, output_split_sizes, strict=True)])


def _reduce_scatter_uneven(
    value: Tensor,
    group: Any,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """Sum the group's tensors and return this rank's part of the given sizes. Collective over ``group``."""
    if input_split_sizes is None or group.size() == 1:
        return _megatron_exchanges["scatter"](value, group, input_split_sizes, use_global_buffer)

    total = value.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(list(input_split_sizes))[group.rank()].contiguous()


def host_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert a host tensor as the dispatcher expects: Megatron's function converts device tensors only."""
    if as_numpy and isinstance(tensor, Tensor):
        return tensor.numpy()
    return tensor


class RoutedTokens:
    """Expert routing of one micro-batch's T tokens on this rank.

    ``replayed`` [T, layers, k] are the experts that routers must select, -1 where the router decides; None if
    it decides for all tokens. The first ``real`` of the T tokens are not padding. ``choices`` maps a layer to
    the experts [T, k] that its router selected.
    """

    def __init__(self, replayed: Tensor | None, real: int) -> None:
        self.replayed = replayed
        self.real = real
        self.choices: dict[int, Tensor] = {}


class _RouterReplay:
    """Recording and replay for the router of one layer, counted from 0.

    It has the interface of Megatron-Core's RouterReplay, which the router calls for the top-k. Megatron's own
    class has one list for all models of a process, so that actor and reference would mix, and records only
    the last of a pipeline's micro-batches.
    """

    def __init__(self, layer: int, routing: Routing) -> None:
        self.layer = layer
        self.pending_recompute: deque[RoutedTokens] = deque()
        self._routing = routing

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the experts, both [T, k]; gradients flow through the scores."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        tokens = self._routing.tokens
        trains = self._routing.trains

        if tokens is None:
            # Recomputation in the backward pass, where micro-batches have the order of the forward pass.
            tokens = self.pending_recompute.popleft()
        elif trains:
            self._routing.count(self.layer, tokens, experts)
            # A training pass without gradients is the forward pass of a recomputed layer.
            if not torch.is_grad_enabled():
                self.pending_recompute.append(tokens)

        if tokens.replayed is not None:
            replayed = tokens.replayed[:, self.layer].to(experts.dtype)
            experts = torch.where(replayed < 0, experts, replayed)
            values = scores.gather(1, experts)
        if not trains:
            tokens.choices[self.layer] = experts
        return values, experts


class Routing:
    """Routers of one model on this rank: records the experts of tokens, replays them, and counts loads.

    Of fused routers, which choose inside their kernel, loads alone are counted.

    ``chunks`` are the model's; ``layers`` and ``experts`` are the numbers in the whole model.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        layers: int,
        experts: int,
        topk: int,
    ) -> None:
        self.layers = layers
        self.experts = experts
        self.topk = topk
        self.tokens: RoutedTokens | None = None
        """Micro-batch in its forward pass; None in the backward pass, where layers may be recomputed."""
        self.trains = False
        self._routers: list[_RouterReplay] = []

        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        for router in routers:
            assert router.layer_number is not None
            if router.config.moe_router_fusion:
                router.register_forward_hook(partial(self._count_map, router.layer_number - 1))
                continue
            replay: Any = _RouterReplay(router.layer_number - 1, self)
            router.router_replay = replay
            self._routers.append(replay)

    def begin(self, *, trains: bool) -> None:
        """Reset counts and pending recomputation before a pass; ``trains`` if it has a backward pass."""
        self.trains = trains
        for router in self._routers:
            router.pending_recompute.clear()
        target = device.device()
        self._loads = torch.zeros((self.layers, self.experts), dtype=torch.long, device=target)
        self._agreement = torch.zeros(2, dtype=torch.long, device=target)

    @contextmanager
    def forward(self, tokens: RoutedTokens) -> Iterator[None]:
        """Route a micro-batch's tokens in its forward pass inside the block."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    def count(
        self,
        layer: int,
        tokens: RoutedTokens,
        experts: Tensor,
    ) -> None:
        """Count the experts' loads, and how often the router's ``experts`` [T, k] match replayed ones."""
        experts = experts[: tokens.real]
        routed = experts
        if tokens.replayed is not None:
            replayed = tokens.replayed[: tokens.real, layer].to(experts.dtype)
            recorded = replayed >= 0
            # The order of a token's k experts does not matter.
            matches = (replayed[:, :, None] == experts[:, None, :]).any(dim=-1)
            self._agreement += torch.stack([(matches & recorded).sum(), recorded.sum()])
            routed = torch.where(recorded, replayed, experts)

        routed = routed.flatten()
        self._loads[layer].index_add_(0, routed, torch.ones_like(routed))

    def _count_map(
        self,
        layer: int,
        router: Any,
        inputs: Any,
        output: Any,
    ) -> None:
        """Count the loads of a fused router, whose second output is the map [T, experts] of its choices."""
        # Without a micro-batch this is the recomputation of a layer that was counted.
        if self.tokens is not None and self.trains:
            self._loads[layer] += output[1][: self.tokens.real].sum(dim=0)

    def metrics(self, group: Any) -> Metrics:
        """Return the counts of a training pass over all ranks of the ``group``. Collective over it.

        ``router/load_max/layer_N`` is the load of the busiest expert of a layer over the mean load, 1 if all
        are equal. ``router/agreement`` is the share of replayed experts that routers would choose too.
        """
        # Every rank takes part in both sums: a stage without routers has zeros.
        for counts in (self._loads, self._agreement):
            dist.all_reduce(counts, group=group)

        metrics = Metrics()
        matches, recorded = self._agreement.tolist()
        if recorded:
            metrics = Metrics.mean("router/agreement", matches, recorded)

        loads = self._loads.double()
        load_max = (loads.amax(dim=1) / loads.mean(dim=1)).tolist()
        # 0 / 0 in layers without experts: NaN, which differs from itself.
        values = {f"router/load_max/layer_{n}": value for n, value in enumerate(load_max) if value == value}
        return metrics + Metrics.of(values)
