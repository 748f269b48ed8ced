"""Run packed micro-batches through Megatron's pipeline schedules: forward only, or forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import sum_over_ranks
from megatron_rl.megatron.experts import RoutedTokens
from megatron_rl.megatron.layers import warn_of_unfused_attention
from megatron_rl.megatron.log_probs import Support
from megatron_rl.megatron.lora import sum_partial_gradients
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.packing import PackedRows, partition
from megatron_rl.metrics import Metrics
from megatron_rl.metrics import merge as merge_metrics
from megatron_rl.progress import advance
from megatron_rl.types import token_index


@dataclass(frozen=True)
class TokenScores:
    """Hold one micro-batch's results: ``rows`` ids and the head's ``outputs``, each [n], 0 where unselected.

    Outputs are (log-probs, entropy) of a language model, (values,) of a model with a scalar head. ``experts``
    [n, layers, k] int16 on the host are those that the tokens went to, where that was asked.
    """

    rows: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    experts: Tensor | None = None


@dataclass(frozen=True)
class _MicroBatch:
    rows: tuple[int, ...]
    inputs: Tensor  # [1, T] tokens of this context-parallel rank, padded at the end where the layout asks
    packing: Any
    index: Tensor  # [n] whose hidden state here speaks for each selected token
    selected: Tensor  # [n] positions of these tokens among all of the micro-batch's
    targets: Tensor  # [n]
    temperature: Tensor  # [n]
    support: Support | None  # of these tokens' distributions
    tokens: int
    routed: RoutedTokens | None  # of a model whose routing is known


def microbatches(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    select: Tensor,
    before: bool = True,
    unit: int = 1,
) -> tuple[list[_MicroBatch], Metrics]:
    """Cut this rank's share of ``batch`` into packed micro-batches.

    ``batch`` has ``tokens`` [N], ``lengths`` [B] and ``temperature`` [B], ``support_sizes`` and ``support``
    where sampling was truncated, and ``experts`` where routers are to take given ones; ``select`` [N] bool
    marks tokens of which the head speaks: from the state ``before`` the token, which predicts it, or from the
    token's own, which has read it. ``unit`` rows after one another stay in one micro-batch. Returns the
    micro-batches and ``padding/fraction``, the share of padding among the tokens of this rank's data-parallel
    share, with ``padding/attention_fraction``, the same for what attention works on where it is our own.
    """
    layout = model.groups.layout
    multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
    lengths = batch.lengths.view(-1, unit).sum(dim=1).tolist()
    config = model.transformer_config
    # Linear layers cost about 24 h^2 per token and layer, causal attention 2 h per token pair.
    shares = partition(
        lengths, model.groups.data.size(), tokens_per_microbatch, multiple, 12.0 * config.hidden_size
    )
    share = shares[model.groups.coordinates.data]
    parts = [[row for first in rows for row in range(first * unit, (first + 1) * unit)] for rows in share]
    result = [_pack(model, batch, rows, select, before) for rows in parts]
    padded = sum(micro.inputs.shape[1] for micro in result) * layout.context
    tokens = sum(micro.tokens for micro in result)
    padding = Metrics.mean("padding/fraction", padded - tokens, padded)
    places = sum(micro.packing.places for micro in result if isinstance(micro.packing, PackedRows))
    if places:
        padding += Metrics.mean("padding/attention_fraction", places - tokens, places)
    return result, padding


def _pack(model: ParallelModel, batch: Any, rows: list[int], select: Tensor, before: bool) -> _MicroBatch:
    index = torch.tensor(rows, dtype=torch.long)
    counts = batch.lengths[index]
    places = token_index(batch.lengths, index)
    tokens, chosen = batch.tokens[places], select[places].clone()
    if before:
        chosen[counts.cumsum(0) - counts] = False  # nothing predicts a row's first token
    selected = chosen.nonzero()[:, 0]
    temperature = torch.repeat_interleave(batch.temperature[index], counts)
    unit = model.token_multiple
    padding = -len(tokens) % unit or (unit if not rows else 0)
    inputs = torch.nn.functional.pad(tokens, (0, padding)).chunk(model.groups.layout.context)
    begin = model.groups.coordinates.context * len(inputs[0])
    inputs = inputs[model.groups.coordinates.context]
    speaking = selected - int(before)
    selected = selected[(speaking >= begin) & (speaking < begin + len(inputs))]
    target = device.device()
    return _MicroBatch(
        rows=tuple(rows),
        inputs=inputs[None].to(target),
        packing=model.pack([*counts.tolist(), *([padding] if padding else [])]),
        index=(selected - int(before) - begin).to(target),
        selected=selected.to(target),
        targets=tokens[selected].to(target),
        temperature=temperature[selected].to(target),
        support=_support(batch, places[selected]),
        tokens=len(tokens),
        routed=_routed(model, batch, places, padding),
    )


def _routed(model: ParallelModel, batch: Any, places: Tensor, padding: int) -> RoutedTokens | None:
    """Return the experts that are given for this rank's share of the tokens at ``places`` and the padding."""
    if model.routing is None:
        return None
    local = model.local_tokens(len(places) + padding)
    real = max(0, min(len(places), local.stop) - local.start)
    experts, given = getattr(batch, "experts", None), None
    if experts is not None:
        given = torch.full((local.stop - local.start, *experts.shape[1:]), -1, dtype=experts.dtype)
        given[:real] = experts[places[local]]
        given = given.to(device.device())
    return RoutedTokens(given, real)


def _support(batch: Any, places: Tensor) -> Support | None:
    """Return the supports of the tokens at ``places``, None where no filter left any out."""
    sizes = getattr(batch, "support_sizes", None)
    if sizes is None or not len(batch.support):
        return None
    index, place = token_index(sizes, places), device.device()
    return Support(sizes[places].to(place), batch.support[index].to(place))


def score(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    select: Tensor,
    *,
    before: bool = True,
    record: bool = False,
) -> list[TokenScores]:
    """Return what the head says of the selected tokens of this rank's rows; empty except on output ranks.

    ``before`` as in `microbatches`; ``record`` asks for the experts too. Every last-stage rank gets the
    scores of its data-parallel share. Collective over the model's ranks.
    """
    micros, _ = microbatches(model, batch, tokens_per_microbatch, select, before)

    def keep(micro: _MicroBatch, *outputs: Tensor) -> tuple[Tensor, TokenScores]:
        return outputs[0].sum() * 0, TokenScores(micro.rows, outputs)

    for chunk in model.wrapped:
        chunk.eval()
    with torch.no_grad():
        scores = _run(model, micros, keep, forward_only=True)
    if record:
        experts = _recorded(model, micros)
        scores = [replace(score, experts=some) for score, some in zip(scores, experts, strict=False)]
    return scores


def _recorded(model: ParallelModel, micros: Sequence[_MicroBatch]) -> list[Tensor]:
    """Return the experts [n, layers, k] of each micro-batch's tokens, from all ranks that share them.

    Collective over the tensor, context and pipeline groups.
    """
    routing, groups = model.routing, model.groups
    assert routing is not None, "only a model whose routing is watched can tell it"
    result = []
    for micro in micros:
        assert micro.routed is not None
        count = micro.inputs.shape[1] * groups.layout.context
        local = model.local_tokens(count)
        shape = (count, routing.layers, routing.topk)
        experts = torch.zeros(shape, dtype=torch.int32, device=device.device())
        for layer, taken in micro.routed.taken.items():
            experts[local, layer] = taken.to(torch.int32)
        shared = (groups.tensor,) if model.transformer_config.sequence_parallel else ()
        for group in (*shared, groups.context, groups.pipeline):
            sum_over_ranks(experts, group)
        result.append(experts[: micro.tokens].to(torch.int16).cpu())
    return result


def learn(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    select: Tensor,
    objective: Callable[..., tuple[Tensor, Metrics]],
    *,
    before: bool = True,
    unit: int = 1,
) -> tuple[list[TokenScores], Metrics]:
    """Add the gradient of the whole mini-batch's loss to the model's gradient buffers.

    ``objective(rows of batch, *outputs of the head, each [n])`` returns a loss that sums over its tokens with
    global weights, so gradients add up over micro-batches and data-parallel ranks without any scaling.
    ``before`` and ``unit`` as in `microbatches`. Returns what `score` would have said with these weights, and
    this rank's metrics, those of padding among them; on other stages than the last there is padding alone.
    Collective over the model's ranks.
    """
    micros, padding = microbatches(model, batch, tokens_per_microbatch, select, before, unit)
    for chunk in model.wrapped:
        chunk.train()
    results = _run(model, micros, _loss_of(batch, objective), forward_only=False)
    scores, metrics = [score for score, _ in results], merge_metrics(metrics for _, metrics in results)
    if model.routing is not None:
        padding += model.routing.metrics(model.groups.all)
    return scores, metrics + padding


def measure(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    select: Tensor,
    objective: Callable[..., tuple[Tensor, Metrics]],
    *,
    before: bool = True,
    unit: int = 1,
) -> Metrics:
    """Return this rank's metrics of an objective as `learn` does, without a gradient.

    Collective over the model's ranks.
    """
    micros, _ = microbatches(model, batch, tokens_per_microbatch, select, before, unit)
    for chunk in model.wrapped:
        chunk.eval()
    with torch.no_grad():
        results = _run(model, micros, _loss_of(batch, objective), forward_only=True)
    return merge_metrics(metrics for _, metrics in results)


def _loss_of(
    batch: Any, objective: Callable[..., tuple[Tensor, Metrics]]
) -> Callable[..., tuple[Tensor, tuple[TokenScores, Metrics]]]:
    """Return what makes loss, scores and metrics of a micro-batch of ``batch`` from the head's outputs."""
    if getattr(batch, "experts", None) is not None:
        batch = replace(batch, experts=None)  # routers have them; no objective asks

    def loss(micro: _MicroBatch, *outputs: Tensor) -> tuple[Tensor, tuple[TokenScores, Metrics]]:
        rows = batch.rows(micro.rows).to(outputs[0].device)
        value, metrics = objective(rows, *outputs)
        scores = TokenScores(micro.rows, tuple(output.detach() for output in outputs))
        return value, (scores, metrics if micro.rows else Metrics())

    return loss


def _run(
    model: ParallelModel,
    micros: Sequence[_MicroBatch],
    consume: Callable[..., tuple[Tensor, Any]],
    forward_only: bool,
) -> list[Any]:
    """Send micro-batches through the pipeline; ``consume`` makes (loss, result) from each at its end."""
    layout = model.groups.layout
    config = model.transformer_config
    groups = model.groups.megatron
    config.finalize_model_grads_func = None if forward_only else _finalize
    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    run = get_forward_backward_func(layout.pipeline, virtual)
    iterators = [iter(micros) for _ in model.wrapped]
    communicator = None
    if layout.pipeline > 1:
        shards = layout.tensor if config.sequence_parallel else 1
        tokens = [micro.inputs.shape[1] // shards for micro in micros]
        communicator = PipelineExchange(model.groups.pipeline, config, tokens, layout.virtual_pipeline)
    if model.routing is not None:
        model.routing.begin(learns=not forward_only)
    with model.scope():
        results = run(
            forward_step_func=partial(_forward_step, model, consume),
            data_iterator=iterators if virtual else iterators[0],
            model=model.wrapped if virtual else model.wrapped[0],
            num_microbatches=len(micros),
            seq_length=1,  # unused: lengths vary, and the communicator knows them
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        if model.adapters is not None and not forward_only:
            sum_partial_gradients(model.chunks)
    if model.uses_transformer_engine:
        warn_of_unfused_attention()
    return results


class PipelineExchange(P2PCommunicator):
    """Send activations and gradients between stages that all know how many tokens each micro-batch has.

    Stages pack the same micro-batches, in ``tokens`` of a rank each, so a receiver knows what comes next.
    Megatron would send the shape before every tensor, and wait for the whole device each time. ``chunks`` are
    the virtual stages of a rank.
    """

    def __init__(self, group: Any, config: Any, tokens: Sequence[int], chunks: int = 1) -> None:
        super().__init__(group, config)
        self._hidden = config.hidden_size
        first, last = group.rank() == 0, group.rank() == group.size() - 1
        order = get_schedule_table(len(tokens), chunks, config.microbatch_group_size_per_vp_stage)
        # The neighbours' order of work, without what ends with them: the outputs of the last stage's last
        # chunk, and the gradients of the first stage's first chunk, which is its last in the backward pass.
        self._forward = [tokens[micro] for micro, chunk in order if not (first and chunk == chunks - 1)]
        self._backward = [tokens[micro] for micro, chunk in order if not (last and chunk == chunks - 1)]

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Return the shapes [tokens, 1, hidden size] of the next activations and gradients to come."""
        shapes = [
            (coming.pop(0), 1, self._hidden) if received else None
            for coming, received in ((self._forward, recv_prev), (self._backward, recv_next))
        ]
        return shapes[0], shapes[1]


def _finalize(
    chunks: Any, num_tokens: Any, pg_collection: Any = None, force_all_reduce: bool = False
) -> None:
    # The routers' biases are balanced over a process-global group, which does not exist here.
    original = parallel_state.get_tensor_and_data_parallel_group
    parallel_state.get_tensor_and_data_parallel_group = lambda *_, **__: pg_collection.tp_dp_cp
    try:
        # The token count is withheld: loss weights are global already, gradients must not be divided again.
        finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    finally:
        parallel_state.get_tensor_and_data_parallel_group = original


def _forward_step(
    model: ParallelModel,
    consume: Callable[..., tuple[Tensor, Any]],
    iterator: Iterator[_MicroBatch],
    wrapped: Any,
) -> tuple[Tensor, Callable[..., Any]]:
    micro = next(iterator)
    advance("micro-batches")
    routing, routed = model.routing, micro.routed
    with nullcontext() if routing is None or routed is None else routing.forward(routed):
        output = wrapped(micro.inputs, None, None, packed_seq_params=micro.packing)
    chunk = model.chunks[model.wrapped.index(wrapped)]

    def finish(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        answers = model.token_outputs(
            chunk, hidden, micro.index, micro.targets, micro.temperature, micro.support
        )
        zeros = torch.zeros(micro.tokens, dtype=answers[0].dtype, device=answers[0].device)
        outputs = [zeros.index_put((micro.selected,), output) for output in answers]
        if model.groups.layout.context > 1:
            # Each rank takes the loss of all tokens, and its gradient with respect to its own.
            outputs = [
                reduce_from_tensor_model_parallel_region(output, model.groups.context) for output in outputs
            ]
        loss, result = consume(micro, *outputs)
        # Cloned because the schedule scales the loss in place.
        return loss.clone(), torch.zeros([], dtype=torch.int, device=loss.device), result

    return output, finish
