"""Megatron's experts on CPU, and the recording and replay of expert routing.

Each model has one `Routing` that hooks into its routers. A forward-only pass records the experts of each
token, and a training pass replays them, so that tokens are routed to the same experts in training as in
sampling. `Routing` also adds the routers' own losses, normalised over the whole mini-batch like every loss of
this package.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.check.model.megatron_settings import SEQUENCE_BALANCE
from megatron_rl.distributed import device
from megatron_rl.metrics import Metrics

_megatron_collectives: dict[str, Any] = {}
"""Megatron's own collectives along the first dimension, which `prepare_experts` replaces: ``gather`` is the
all-gather, ``scatter`` the reduce-scatter. The replacements call them for tensors of equal length."""


def prepare_experts() -> None:
    """Replace functions of Megatron-Core's router and dispatcher that fail on this platform. Idempotent."""
    utilities: Any = moe_utils
    if not hasattr(utilities, "te_general_gemm"):
        # Megatron defines the name only if Transformer Engine has it, but its router always reads the name.
        utilities.te_general_gemm = None

    if not device.on_host():
        return

    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = convert_cpu_tensor

    # Experts receive uneven numbers of tokens, and gloo, the backend on CPU, has no uneven collectives.
    regions: Any = mappings
    if regions._gather_along_first_dim is not _gather_uneven:
        _megatron_collectives["gather"] = regions._gather_along_first_dim
        _megatron_collectives["scatter"] = regions._reduce_scatter_along_first_dim
        regions._gather_along_first_dim = _gather_uneven
        regions._reduce_scatter_along_first_dim = _reduce_scatter_uneven


def prepare_biased_experts(layers: Iterable[Any]) -> None:
    """Change Megatron's local experts (without Transformer Engine) so that autograd accepts their biases.

    Megatron (0.16.1 and 0.19.2) adds an expert's bias in place, which autograd refuses for the output of a
    collective over one rank. Megatron also marks the bias so that its gradient is summed over tensor-parallel
    ranks. That is one sum too many: the data-parallel sum over all copies of the expert includes these ranks.
    """
    for module in chain.from_iterable(layer.modules() for layer in layers):
        if not isinstance(module, SequentialMLP):
            continue
        for expert in module.local_experts:
            linear: Any = expert.linear_fc2
            # Each expert is on one rank: without this flag its layer would call a collective over that rank.
            linear.explicit_expert_comm = True
            linear.bias.sequence_parallel = False


def _gather_uneven(
    tensor: Tensor,
    group: Any,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """All-gather tensors of different lengths along the first dimension.

    ``output_split_sizes`` are the lengths by rank; None means equal lengths. Collective over ``group``.
    """
    if output_split_sizes is None or group.size() == 1:
        return _megatron_collectives["gather"](tensor, group, output_split_sizes, use_global_buffer)

    # Pad to the longest tensor, so that an even all-gather can be used.
    padded_size = max(output_split_sizes)
    padded_tensor = tensor.new_zeros((padded_size, *tensor.shape[1:]))
    padded_tensor[: len(tensor)] = tensor
    gathered_tensors = padded_tensor.new_empty((group.size(), *padded_tensor.shape))
    dist.all_gather_into_tensor(gathered_tensors.view(-1), padded_tensor.view(-1), group=group)
    return torch.cat([shard[:size] for shard, size in zip(gathered_tensors, output_split_sizes, strict=True)])


def _reduce_scatter_uneven(
    tensor: Tensor,
    group: Any,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """Sum ``tensor`` over the ranks and return this rank's slice of the sum along the first dimension.

    ``input_split_sizes`` are the lengths of the slices by rank; None means equal lengths. Collective over
    ``group``.
    """
    if input_split_sizes is None or group.size() == 1:
        return _megatron_collectives["scatter"](tensor, group, input_split_sizes, use_global_buffer)

    # Gloo, the backend on CPU, has no reduce-scatter: all-reduce, then keep this rank's slice.
    tensor_sum = tensor.contiguous().clone()
    dist.all_reduce(tensor_sum, group=group)
    return tensor_sum.split(list(input_split_sizes))[group.rank()].contiguous()


def convert_cpu_tensor(
    tensor: Any,
    as_numpy: bool = False,
    record_stream: bool = False,
) -> Any:
    """Return a CPU tensor unchanged, or as a NumPy array if ``as_numpy`` is set.

    Replaces Megatron's `maybe_move_tensor_to_cpu`, which returns a CPU tensor unchanged in either case.
    """
    if as_numpy and isinstance(tensor, Tensor):
        return tensor.numpy()
    return tensor


@dataclass(frozen=True)
class TokenRows:
    """Row (sequence) of each token of a micro-batch, and the denominators of router losses.

    T is the number of the micro-batch's tokens on this rank. Example: rows of 2 and 3 tokens with one token
    of padding, in a mini-batch of 4 rows with 12 tokens, have ``index=[0, 0, 1, 1, 1, 2]``,
    ``lengths=[2, 3, 1]``, ``batch_rows=4``, ``batch_tokens=12``.
    """

    index: Tensor
    """[T] int64, row of each token; padding is a separate row, the last one."""
    lengths: Tensor
    """[rows + 1] int64, number of tokens of each row over all ranks; the last entry, for padding, is 1."""
    batch_rows: int
    """Number of rows of the mini-batch over all ranks."""
    batch_tokens: int
    """Number of tokens of the mini-batch over all ranks."""


class RoutedTokens:
    """Expert routing of one micro-batch, which has T tokens on this rank."""

    def __init__(
        self,
        replayed: Tensor | None,
        num_real_tokens: int,
        rows: TokenRows | None = None,
    ) -> None:
        self.replayed = replayed
        """[T, layers, k] experts that routers must select, -1 where the router decides; or None if routers
        decide for all tokens."""
        self.num_real_tokens = num_real_tokens
        """Number of real tokens; padding comes after them."""
        self.rows = rows
        """Rows of the tokens for the routers' losses, or None if no router has a loss."""
        self.choices: dict[int, Tensor] = {}
        """Layer -> experts [T, k] that the layer's router selected."""


LOSS_METRICS = ("router/z_loss", "router/seq_aux_loss")
"""Names of the metrics of the routers' own losses."""


class _RouterReplay:
    """Recording and replay of expert choices for the router of one layer.

    ``layer`` is counted from 0 over the whole model. The class has the interface of Megatron-Core's
    RouterReplay, which the router calls for the top-k. Megatron's own class has one list for all models of a
    process, which would mix actor and reference. It also records only the last micro-batch of a pipeline.
    """

    def __init__(self, layer: int, routing: Routing) -> None:
        self.layer = layer
        self.pending_recompute: deque[RoutedTokens] = deque()
        """Routing of the micro-batches for which the backward pass will recompute this layer, in order."""
        self.microbatch: RoutedTokens | None = None
        """Routing of the micro-batch of the last call of `get_replay_topk`, also in a recomputation."""
        self._routing = routing

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the experts that process each token, both [T, k].

        ``scores`` [T, E] are the router's scores. If the micro-batch has replayed experts, these are returned
        in place of the router's choices. Gradients flow through the returned scores.
        """
        values, experts = default_compute_topk(
            scores,
            topk,
            num_groups=num_groups,
            group_topk=group_topk,
        )
        microbatch = self._routing.microbatch
        is_training = self._routing.is_training

        if microbatch is None:
            # This is the backward pass. It recomputes the layer for the micro-batches in the order of the
            # forward pass.
            microbatch = self.pending_recompute.popleft()
        elif is_training:
            self._routing.count_choices(self.layer, microbatch, experts)
            # Gradients are disabled only in the forward pass of a layer that the backward pass recomputes.
            if not torch.is_grad_enabled():
                self.pending_recompute.append(microbatch)
        self.microbatch = microbatch

        if microbatch.replayed is not None:
            replayed = microbatch.replayed[:, self.layer].to(experts.dtype)
            experts = torch.where(replayed < 0, experts, replayed)
            values = scores.gather(1, experts)
        if not is_training:
            microbatch.choices[self.layer] = experts
        return values, experts


class Routing:
    """Recording, replay and counts of the experts that one model's routers select, on this rank.

    Fused routers select experts inside their kernel, so only the number of tokens per expert is counted.

    ``num_layers`` is the number of all layers of the model, ``num_experts`` the number of experts of a layer,
    and ``topk`` the number of experts of a token. ``token_groups`` are the process groups over which the
    tokens of a row are sharded: context parallelism, and tensor parallelism under sequence parallelism.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        num_layers: int,
        num_experts: int,
        topk: int,
        token_groups: tuple[Any, ...] = (),
    ) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.topk = topk
        self.microbatch: RoutedTokens | None = None
        """Routing of the micro-batch whose forward pass is running; None during the backward pass."""
        self.is_training = False
        """Whether the current pass has a backward pass."""
        self.has_losses = False
        """Whether any router has a z-loss or a balancing loss. `RoutedTokens.rows` must then be set."""
        # Process groups over which the tokens of a row are sharded.
        self._token_groups = token_groups
        self._routers: list[_RouterReplay] = []

        modules = chain.from_iterable(chunk.modules() for chunk in chunks)
        routers = [module for module in modules if isinstance(module, TopKRouter)]
        for router in routers:
            assert router.layer_number is not None
            if router.config.moe_router_fusion:
                router.register_forward_hook(
                    partial(self._count_fused_router_tokens, router.layer_number - 1)
                )
                continue
            replay: Any = _RouterReplay(router.layer_number - 1, self)
            router.router_replay = replay
            self._routers.append(replay)
            self._replace_losses(router, replay)

    def begin_pass(self, *, is_training: bool) -> None:
        """Reset counts and pending recomputation before a pass.

        ``is_training``: whether the pass has a backward pass.
        """
        self.is_training = is_training
        for router in self._routers:
            router.pending_recompute.clear()
        target_device = device.device()
        self._loads = torch.zeros((self.num_layers, self.num_experts), dtype=torch.long, device=target_device)
        self._agreement = torch.zeros(2, dtype=torch.long, device=target_device)
        # Sum and number of the terms of each loss.
        self._losses = {
            name: torch.zeros(2, dtype=torch.double, device=target_device) for name in LOSS_METRICS
        }

    def _replace_losses(self, router: Any, replay: _RouterReplay) -> None:
        """Replace the methods of a router that add its z-loss and its balancing loss.

        ``replay`` is the router's `_RouterReplay`, which has the current micro-batch's `RoutedTokens`.

        Megatron multiplies the mean loss of a micro-batch by its number of tokens, because it later divides
        all gradients by the number of tokens of the batch. In this package gradients are not divided later.
        The new methods therefore use the totals of the mini-batch: they divide the z-loss by its number of
        tokens, and the balancing loss by its number of rows (sequences).
        """
        z_coefficient = router.config.moe_z_loss_coeff or 0.0
        balance_coefficient = router.get_aux_loss_coeff(SEQUENCE_BALANCE)
        if z_coefficient:
            router.apply_z_loss = partial(self._add_z_loss, replay, z_coefficient)
        if balance_coefficient:
            router._apply_seq_aux_loss = partial(self._add_balance_loss, replay, balance_coefficient)
        self.has_losses = self.has_losses or bool(z_coefficient or balance_coefficient)

    def _add_z_loss(
        self,
        replay: _RouterReplay,
        coefficient: float,
        logits: Tensor,
        **_: Any,
    ) -> Tensor:
        """Attach the router's z-loss to its ``logits`` [T, experts] (Zoph et al. 2022, arXiv 2202.08906).

        The loss is ``coefficient`` times the mean over the mini-batch's tokens of logsumexp(logits)^2.
        ``replay`` has the current micro-batch's `RoutedTokens`. Returns the logits, whose backward pass adds
        the gradient of the loss.
        """
        # Gradients are disabled in the forward pass of a layer that the backward pass recomputes: the loss is
        # added by the recomputation.
        if not self.is_training or not torch.is_grad_enabled():
            return logits

        # In the backward pass the layer is recomputed for the micro-batch at the front of
        # `pending_recompute`, which `get_replay_topk` removes later.
        microbatch = self.microbatch
        if microbatch is None:
            microbatch = replay.pending_recompute[0]
        assert microbatch.rows is not None
        squares = logits[: microbatch.num_real_tokens].float().logsumexp(dim=-1).square().sum()
        self._accumulate_loss("router/z_loss", squares, microbatch.num_real_tokens)
        loss = squares * (coefficient / microbatch.rows.batch_tokens)
        return MoEAuxLossAutoScaler.apply(logits, loss)  # pyright: ignore[reportReturnType]

    def _add_balance_loss(
        self,
        replay: _RouterReplay,
        coefficient: float,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Attach the balancing loss of each row to ``probs`` (DeepSeek-AI 2024, arXiv 2412.19437, eq. 17).

        The loss is ``coefficient`` times the mean over the mini-batch's rows of
        E / (k L^2) sum_i c_i sum_t s_ti. For a row of L tokens and E experts, c_i is the number of tokens
        that selected expert i, and s_ti are the ``scores`` [T, E]. ``routing_map`` [T, E] bool marks the
        selected experts. ``replay`` has the current micro-batch's `RoutedTokens`. Returns ``probs``, whose
        backward pass adds the gradient of the loss.
        """
        if not self.is_training:
            return probs
        microbatch = replay.microbatch
        assert microbatch is not None and microbatch.rows is not None
        rows = microbatch.rows

        # The counts include the choices for tokens of the same rows on other ranks. Choices have no gradient,
        # so the all-reduce needs no backward pass.
        expert_counts = torch.zeros((len(rows.lengths), self.num_experts), device=scores.device)
        expert_counts.index_add_(0, rows.index, routing_map.float())
        for group in self._token_groups:
            dist.all_reduce(expert_counts, group=group)
        lengths = rows.lengths.float()
        expert_weights = expert_counts * (self.num_experts / self.topk / lengths.square())[:, None]

        weighted_scores = scores.float() * expert_weights[rows.index]
        loss_sum = weighted_scores[: microbatch.num_real_tokens].sum()
        # The mean is over rows: each token counts 1 / length of its row.
        row_count = (1 / lengths)[rows.index][: microbatch.num_real_tokens].sum()
        self._accumulate_loss("router/seq_aux_loss", loss_sum, row_count)
        loss = loss_sum * (coefficient / rows.batch_rows)
        return MoEAuxLossAutoScaler.apply(probs, loss)  # pyright: ignore[reportReturnType]

    def _accumulate_loss(
        self,
        name: str,
        total: Tensor,
        count: Tensor | int,
    ) -> None:
        """Add ``total`` to the accumulated loss and ``count`` to its number of terms, on the device."""
        self._losses[name][0] += total.detach()
        self._losses[name][1] += count

    @contextmanager
    def route_tokens(self, microbatch: RoutedTokens) -> Iterator[None]:
        """Make the routers record or replay the routing of ``microbatch`` inside the block."""
        self.microbatch = microbatch
        try:
            yield
        finally:
            self.microbatch = None

    def count_choices(
        self,
        layer: int,
        microbatch: RoutedTokens,
        experts: Tensor,
    ) -> None:
        """Count the tokens of each expert, and how many of the router's choices match the replayed experts.

        ``experts`` [T, k] are the experts that the router of ``layer`` chose. A token with replayed experts
        is counted for these, since they process it.
        """
        experts = experts[: microbatch.num_real_tokens]
        routed = experts
        if microbatch.replayed is not None:
            replayed = microbatch.replayed[: microbatch.num_real_tokens, layer].to(experts.dtype)
            is_replayed = replayed >= 0
            # The order of a token's k experts does not matter.
            matches = (replayed[:, :, None] == experts[:, None, :]).any(dim=-1)
            self._agreement += torch.stack([(matches & is_replayed).sum(), is_replayed.sum()])
            routed = torch.where(is_replayed, replayed, experts)

        routed = routed.flatten()
        self._loads[layer].index_add_(0, routed, torch.ones_like(routed))

    def _count_fused_router_tokens(
        self,
        layer: int,
        router: Any,
        inputs: Any,
        output: Any,
    ) -> None:
        """Count the tokens of each expert from the output of a fused router (forward hook of the router).

        The router's second output [T, experts] bool marks the selected experts of each token.
        """
        # Without a micro-batch this is the recomputation of a layer, whose tokens were counted already.
        if self.microbatch is not None and self.is_training:
            self._loads[layer] += output[1][: self.microbatch.num_real_tokens].sum(dim=0)

    def metrics(self, group: Any) -> Metrics:
        """Return loads, agreement and losses of a training pass over all ranks of the ``group``.

        The load of an expert is its number of tokens. ``router/load_max/layer_N`` is the load of a layer's
        busiest expert divided by the mean load, 1 if all loads are equal. ``router/agreement`` is the
        fraction of replayed experts that routers would select too. ``router/z_loss`` is the mean loss over
        tokens and layers, ``router/seq_aux_loss`` the mean loss over rows and layers; the losses are not
        multiplied by their coefficients. Collective over the group.
        """
        # Every rank takes part in both sums: a stage without routers has zeros.
        for counts in (self._loads, self._agreement):
            dist.all_reduce(counts, group=group)

        metrics = Metrics()
        num_matches, num_replayed = self._agreement.tolist()
        if num_replayed:
            metrics = Metrics.mean("router/agreement", num_matches, num_replayed)

        if self.has_losses:
            for name, sums in self._losses.items():
                dist.all_reduce(sums, group=group)
                total, count = sums.tolist()
                if count:
                    metrics += Metrics.mean(name, total, count)

        loads = self._loads.double()
        load_ratios = (loads.amax(dim=1) / loads.mean(dim=1)).tolist()
        metric_values = {}
        for layer, load_ratio in enumerate(load_ratios):
            # Skip layers without experts: their ratio 0 / 0 is NaN.
            if not math.isnan(load_ratio):
                metric_values[f"router/load_max/layer_{layer}"] = load_ratio
        return metrics + Metrics.of(metric_values)
