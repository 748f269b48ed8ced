"""Forward and backward passes of packed micro-batches through Megatron's pipeline schedules.

Every rank of a model builds the same list of micro-batches from the same batch. Each stage can therefore
compute the shapes of the activations that it receives, and the schedules of all stages agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
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
from megatron_rl.megatron.experts import RoutedTokens, TokenRows
from megatron_rl.megatron.layers import warn_of_unfused_attention
from megatron_rl.megatron.log_probs import Support, TopTokens, make_support
from megatron_rl.megatron.logit_rules import RowRules, build_row_rules, token_temperatures
from megatron_rl.megatron.lora import sum_partial_gradients
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.packing import PackedRows, partition_rows
from megatron_rl.megatron.passes import PassGuard, Result
from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.progress import count_progress
from megatron_rl.types import LogitRules, token_index


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of the model's head for one micro-batch.

    Example: a language model, and a micro-batch of the batch's rows 4 and 7, which have 3 and 2 tokens.
    ``TokenOutputs(rows=(4, 7), outputs=(log_probs, entropy))`` has two outputs of shape [5]. If the first
    token of each row is not selected, the outputs are zero at the indices 0 and 3.
    """

    rows: tuple[int, ...]
    """Indices of the rows in the batch, in the order of their tokens."""
    outputs: tuple[Tensor, ...]
    """(log-probs, entropy) of a language model, (values,) of a scalar head; each [n] for the n tokens of the
    rows, 0 where a token is not selected. On request, the sum of the squared probabilities [n], and the
    log-probs [n, k + 1] and ids [n, k] of the most likely tokens follow."""
    experts: Tensor | None = None
    """[n, layers, k] int16 on the host: the experts that each token was routed to, or None if they were not
    recorded."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that pass through the pipeline together, with the inputs of this context-parallel rank."""

    rows: tuple[int, ...]
    """Indices of the rows in the batch."""
    inputs: Tensor
    """[1, T] token ids of this context-parallel rank; the sequence of all ranks is padded at the end to a
    multiple of `ParallelModel.token_multiple`."""
    packing: Any
    """Row boundaries, in the format of the model's attention."""
    index: Tensor
    """[n] positions in ``inputs`` of the hidden states that produce the outputs of the selected tokens."""
    selected: Tensor
    """[n] positions of the selected tokens among all ``tokens`` of the micro-batch."""
    targets: Tensor
    """[n] ids of the selected tokens."""
    temperature: Tensor
    """[n] sampling temperature of the selected tokens."""
    support: Support | None
    """Tokens to which each selected token's distribution is restricted, or None for the full vocabulary."""
    rules: tuple[RowRules, ...] | None
    """Rules that changed the logits before sampling, or None for a batch without rules."""
    top_tokens: Tensor | TopTokens | None
    """[n, k] tokens whose log-probs a distillation loss reads, or a request for the most likely tokens; None
    for passes without either."""
    squared_probs: bool
    """Whether the head returns the sum of the squared probabilities of each distribution."""
    tokens: int
    """Number of tokens over all context-parallel ranks, without padding."""
    routed: RoutedTokens | None
    """Expert routing of this rank's tokens, or None if routing is neither recorded nor replayed."""
    batch: Any
    """Rows of the batch for the loss, or None on ranks that do not compute the loss."""


def build_microbatches(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    output_mask: Tensor,
    from_previous_token: bool = True,
    rows_per_unit: int = 1,
    for_loss: bool = False,
    top_tokens: TopTokens | None = None,
    squared_probs: bool = False,
) -> tuple[list[MicroBatch], Metrics]:
    """Split this data-parallel rank's shard of ``batch`` into packed micro-batches on the device.

    ``batch`` has ``tokens`` [N], ``lengths`` [B] and ``temperature`` [B]; ``support_sizes`` and ``support``
    if sampling was truncated; ``experts`` if routers replay recorded choices. ``output_mask`` [N] bool marks
    the tokens whose outputs are computed. With ``from_previous_token`` the output of a token is computed from
    the hidden state of the preceding token, as for log-probs. Otherwise it is computed from the hidden state
    of the token itself.

    ``rows_per_unit`` consecutive rows, such as the two responses of a preference pair, stay in one
    micro-batch. With ``for_loss``, each micro-batch on the last pipeline stage also carries the fields of the
    batch that the loss reads. ``top_tokens`` and ``squared_probs`` request further outputs: the most likely
    tokens of each distribution, and the sum of its squared probabilities.

    Returns the micro-batches and two metrics of this rank's shard. ``padding/fraction`` is the fraction of
    padding among the tokens of the micro-batches. Attention without a variable-length kernel pads batches of
    rows of similar length; ``padding/attention_fraction`` is the fraction of padding in these batches.
    """
    layout = model.groups.layout
    data_rank = model.groups.coordinates.data

    # The interleaved schedule requires that the pipeline's size divides the number of micro-batches.
    microbatch_count_multiple = 1
    if layout.virtual_pipeline > 1:
        microbatch_count_multiple = layout.pipeline

    # Linear layers cost about 24 h^2 per token and layer, causal attention 2 h per token pair: attention of a
    # row of 12 h tokens costs as much as its linear layers.
    attention_crossover_length = 12.0 * model.transformer_config.hidden_size

    # All ranks compute the same partition of units of rows, and select the units of their data-parallel rank.
    unit_lengths = batch.lengths.view(-1, rows_per_unit).sum(dim=1).tolist()
    units_by_rank = partition_rows(
        unit_lengths,
        model.groups.data.size(),
        tokens_per_microbatch,
        microbatch_count_multiple,
        attention_crossover_length,
    )
    microbatches = []
    for units in units_by_rank[data_rank]:
        rows: list[int] = []
        for unit in units:
            first_row = unit * rows_per_unit
            rows += range(first_row, first_row + rows_per_unit)
        microbatches.append(
            _pack_microbatch(
                model, batch, rows, output_mask, from_previous_token, for_loss, top_tokens, squared_probs
            )
        )

    # Measure the padding at the end of micro-batches: their number of tokens is a multiple of
    # `ParallelModel.token_multiple`.
    padded_tokens = sum(microbatch.inputs.shape[1] for microbatch in microbatches) * layout.context
    num_tokens = sum(microbatch.tokens for microbatch in microbatches)
    padding_metrics = Metrics.mean("padding/fraction", padded_tokens - num_tokens, padded_tokens)

    # Measure the padding of rows in the buckets of `PackedRows`, if attention uses buckets.
    packings = [
        microbatch.packing for microbatch in microbatches if isinstance(microbatch.packing, PackedRows)
    ]
    bucket_tokens = sum(packing.bucket_tokens for packing in packings)
    if bucket_tokens:
        padding_metrics += Metrics.mean(
            "padding/attention_fraction", bucket_tokens - num_tokens, bucket_tokens
        )
    return _upload_microbatches(microbatches), padding_metrics


def _upload_microbatches(microbatches: list[MicroBatch]) -> list[MicroBatch]:
    """Copy the tensors of micro-batches to the device, in one transfer."""
    # Micro-batches share tensors: copy each only once.
    tensor_by_id: dict[int, Tensor] = {}

    def collect_tensor(tensor: Tensor) -> Tensor:
        tensor_by_id[id(tensor)] = tensor
        return tensor

    _map_tensors(microbatches, collect_tensor)
    device_tensors = device.upload_tensors(list(tensor_by_id.values()))
    device_tensor_by_id = dict(zip(tensor_by_id, device_tensors, strict=True))

    def replace_tensor(tensor: Tensor) -> Tensor:
        return device_tensor_by_id[id(tensor)]

    return _map_tensors(microbatches, replace_tensor)


def _map_tensors(nested: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested dataclasses, tuples and lists with ``function`` applied to every tensor."""
    if isinstance(nested, Tensor):
        return function(nested)

    if isinstance(nested, list | tuple):
        elements = [_map_tensors(element, function) for element in nested]
        # The constructor of a named tuple expects one argument per field.
        if hasattr(nested, "_fields"):
            return type(nested)(*elements)
        return type(nested)(elements)

    if not is_dataclass(nested) and not isinstance(nested, RoutedTokens):
        return nested

    # Copy without `dataclasses.replace`, which would run the constructors of Megatron's classes again.
    mapped = copy.copy(nested)
    attributes = vars(mapped)
    for name, attribute in vars(nested).items():
        attributes[name] = _map_tensors(attribute, function)
    return mapped


def _pack_microbatch(
    model: ParallelModel,
    batch: Any,
    rows: list[int],
    output_mask: Tensor,
    from_previous_token: bool,
    for_loss: bool,
    top_tokens: TopTokens | None = None,
    squared_probs: bool = False,
) -> MicroBatch:
    """Build the micro-batch of some ``rows`` of the batch, in host memory.

    The other arguments have the same meaning as in `build_microbatches`.
    """
    layout = model.groups.layout
    shift = int(from_previous_token)

    # Concatenate the tokens of the rows, and select the tokens whose outputs are computed.
    row_index = torch.tensor(rows, dtype=torch.long)
    lengths = batch.lengths[row_index]
    positions = token_index(batch.lengths, row_index)
    tokens = batch.tokens[positions]
    selected_mask = output_mask[positions].clone()
    if from_previous_token:
        first_tokens = lengths.cumsum(0) - lengths
        selected_mask[first_tokens] = False  # no hidden state predicts a row's first token
    selected = selected_mask.nonzero()[:, 0]
    rules = _select_rules(batch, rows)
    temperature = torch.repeat_interleave(batch.temperature[row_index], lengths)
    if rules is not None:
        temperature = token_temperatures(temperature, lengths, rules)

    # Pad to a multiple of `token_multiple`. A micro-batch without rows has only padding, since every
    # data-parallel rank runs equally many micro-batches.
    multiple = model.token_multiple
    padding = -len(tokens) % multiple
    if not rows:
        padding = multiple
    packed_lengths = lengths.tolist()
    if padding:
        packed_lengths.append(padding)

    # Context-parallel ranks have equal, contiguous shards, and compute the outputs of their hidden states.
    context_rank = model.groups.coordinates.context
    shards = torch.nn.functional.pad(tokens, (0, padding)).chunk(layout.context)
    inputs = shards[context_rank]
    shard_start = context_rank * len(shards[0])
    state_positions = selected - shift
    selected = selected[(state_positions >= shard_start) & (state_positions < shard_start + len(inputs))]

    loss_batch = None
    if for_loss and model.groups.is_last_stage:
        # The loss reads neither experts, supports nor a teacher's tokens, so they are not copied.
        loss_batch = replace(
            batch, experts=None, support_sizes=None, support=None, teacher_top_ids=None
        ).rows(rows)

    row_rules = None
    if rules is not None:
        row_rules = build_row_rules(rules, lengths, tokens, selected)
    requested_tokens: Tensor | TopTokens | None = top_tokens
    top_ids = getattr(batch, "teacher_top_ids", None)
    if top_ids is not None:
        requested_tokens = top_ids[positions[selected]].long()

    return MicroBatch(
        rows=tuple(rows),
        inputs=inputs[None],
        packing=model.pack(packed_lengths),
        index=selected - shift - shard_start,
        selected=selected,
        targets=tokens[selected],
        temperature=temperature[selected],
        support=_select_support(batch, positions[selected]),
        rules=row_rules,
        top_tokens=requested_tokens,
        squared_probs=squared_probs,
        tokens=len(tokens),
        routed=_select_routed_tokens(model, batch, rows, positions, padding),
        batch=loss_batch,
    )


def _select_routed_tokens(
    model: ParallelModel,
    batch: Any,
    rows: list[int],
    positions: Tensor,
    padding: int,
) -> RoutedTokens | None:
    """Return the routing of this rank's tokens of a micro-batch, or None for a model without a `Routing`.

    ``positions`` are the indices of the tokens of ``rows`` in the batch; ``padding`` is the number of padding
    tokens after them.
    """
    if model.routing is None:
        return None

    # Tokens of this rank under context and sequence parallelism.
    local_range = model.local_tokens(len(positions) + padding)
    num_real_tokens = max(0, min(len(positions), local_range.stop) - local_range.start)
    token_rows = None
    if model.routing.has_losses:
        lengths = batch.lengths[torch.tensor(rows, dtype=torch.long)]
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        token_rows = TokenRows(
            # Padding is at the end, and counts as a separate row.
            torch.nn.functional.pad(row_of_token, (0, padding), value=len(rows))[local_range],
            torch.nn.functional.pad(lengths, (0, 1), value=1),
            len(batch.lengths),
            int(batch.lengths.sum()),
        )
    experts = getattr(batch, "experts", None)
    if experts is None:
        return RoutedTokens(None, num_real_tokens, token_rows)

    # -1 means that the router selects the experts, as for padding tokens.
    replayed = torch.full((local_range.stop - local_range.start, *experts.shape[1:]), -1, dtype=experts.dtype)
    replayed[:num_real_tokens] = experts[positions[local_range]]
    return RoutedTokens(replayed, num_real_tokens, token_rows)


def _select_support(batch: Any, positions: Tensor) -> Support | None:
    """Return the `Support` of the tokens at ``positions``, or None for a batch without truncated sampling."""
    sizes = getattr(batch, "support_sizes", None)
    if sizes is None or not len(batch.support):
        return None
    return make_support(sizes[positions], batch.support[token_index(sizes, positions)])


def _select_rules(batch: Any, rows: list[int]) -> list[LogitRules | None] | None:
    """Return the rules of the rows of a micro-batch, or None for a batch without rules."""
    rules = getattr(batch, "rules", None)
    if rules is None:
        return None
    return [rules[row] for row in rows]


def forward_only(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    output_mask: Tensor,
    *,
    from_previous_token: bool = True,
    record_experts: bool = False,
    guard: PassGuard | None = None,
    top_tokens: TopTokens | None = None,
    squared_probs: bool = False,
) -> list[TokenOutputs]:
    """Compute the head's outputs for the selected tokens of this rank's rows, without a gradient.

    ``from_previous_token``, ``top_tokens`` and ``squared_probs`` as in `build_microbatches`.
    ``record_experts``: whether to also return the experts that processed each token. ``guard`` repeats a pass
    that runs out of memory.

    Returns one `TokenOutputs` per micro-batch of this data-parallel rank on the last stage, and an empty list
    on other stages. Collective over the model's ranks.
    """

    def collect_outputs(microbatch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, TokenOutputs]:
        # Megatron's schedule needs a loss.
        return outputs[0].sum() * 0, TokenOutputs(microbatch.rows, outputs)

    def compute(max_tokens: int) -> tuple[list[MicroBatch], list[TokenOutputs]]:
        microbatches, _ = build_microbatches(
            model,
            batch,
            max_tokens,
            output_mask,
            from_previous_token,
            top_tokens=top_tokens,
            squared_probs=squared_probs,
        )
        for chunk in model.wrapped:
            chunk.eval()
        with torch.no_grad():
            outputs = _run_schedule(model, microbatches, collect_outputs, forward_only=True, guard=guard)
        return microbatches, outputs

    microbatches, outputs = _run_guarded(guard, compute, tokens_per_microbatch, batch)
    if not record_experts:
        return outputs

    # The gather is collective: every stage takes part, although only the last stage has outputs.
    recorded_experts = _gather_recorded_experts(model, microbatches)
    outputs_with_experts = []
    for output, experts in zip(outputs, recorded_experts, strict=False):
        outputs_with_experts.append(replace(output, experts=experts))
    return outputs_with_experts


def _run_guarded(
    guard: PassGuard | None,
    compute: Callable[[int], Result],
    tokens_per_microbatch: int,
    batch: Any,
    rows_per_unit: int = 1,
    clear: Callable[[], None] | None = None,
) -> Result:
    """Return ``compute(tokens_per_microbatch)``; with a guard, call it through `PassGuard.run_pass`.

    The other arguments have the same meaning as in `forward_backward`.
    """
    if guard is None:
        return compute(tokens_per_microbatch)
    unit_tokens = max(batch.lengths.view(-1, rows_per_unit).sum(dim=1).tolist(), default=1)
    return guard.run_pass(compute, tokens_per_microbatch, unit_tokens, clear=clear)


def _gather_recorded_experts(model: ParallelModel, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
    """Return the experts [n, layers, k] of each micro-batch's tokens, assembled from all ranks.

    Collective over the tensor, context and pipeline groups.
    """
    routing = model.routing
    groups = model.groups
    assert routing is not None, "experts are recorded only by a model whose routing is watched"

    # A rank records its own tokens (a shard under sequence and context parallelism) in its own layers. All
    # other elements are zero, so sums over these groups assemble the complete tensor. Without sequence
    # parallelism all tensor ranks route the same tokens: a sum over them would count each choice repeatedly.
    sum_groups = [groups.context, groups.pipeline]
    if model.transformer_config.sequence_parallel:
        sum_groups.insert(0, groups.tensor)

    recorded_experts = []
    for microbatch in microbatches:
        assert microbatch.routed is not None
        num_tokens = microbatch.inputs.shape[1] * groups.layout.context
        local_range = model.local_tokens(num_tokens)
        shape = (num_tokens, routing.num_layers, routing.topk)
        experts = torch.zeros(shape, dtype=torch.int32, device=device.device())
        for layer, choices in microbatch.routed.choices.items():
            experts[local_range, layer] = choices.to(torch.int32)

        for group in sum_groups:
            sum_over_ranks(experts, group)
        recorded_experts.append(experts[: microbatch.tokens].to(torch.int16).cpu())
    return recorded_experts


def forward_backward(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    output_mask: Tensor,
    objective: Callable[..., tuple[Tensor, Metrics]],
    *,
    from_previous_token: bool = True,
    rows_per_unit: int = 1,
    guard: PassGuard | None = None,
    clear: Callable[[], None] | None = None,
) -> tuple[list[TokenOutputs], Metrics]:
    """Add the gradient of a mini-batch's loss to the model's gradient buffers.

    ``objective(rows, *outputs)`` returns a loss and metrics of one micro-batch. ``rows`` has the
    micro-batch's rows of the batch. ``outputs`` are the head's outputs for the n tokens of these rows, each
    [n]: log-probs and entropy, or values. The loss is a weighted sum over the n tokens, whose weights are
    normalised over the whole mini-batch. Gradients add up over micro-batches and data-parallel ranks without
    any scaling.

    If the batch has a teacher's k most likely tokens, ``objective`` has the keyword argument
    ``top_log_probs`` [n, k + 1]: the model's log-probs of these tokens, then of all other tokens together.

    ``from_previous_token`` and ``rows_per_unit`` as in `build_microbatches`. ``guard`` repeats a pass that
    runs out of memory, after ``clear`` has zeroed the gradients.

    Returns the outputs like `forward_only`, and this rank's metrics; stages before the last have only metrics
    of padding and routing. Collective over the model's ranks.
    """

    def compute(max_tokens: int) -> tuple[list[Any], Metrics]:
        microbatches, padding_metrics = build_microbatches(
            model, batch, max_tokens, output_mask, from_previous_token, rows_per_unit, for_loss=True
        )
        for chunk in model.wrapped:
            chunk.train()
        loss_function = _make_loss_function(objective)
        results = _run_schedule(model, microbatches, loss_function, forward_only=False, guard=guard)
        return results, padding_metrics

    results, metrics = _run_guarded(guard, compute, tokens_per_microbatch, batch, rows_per_unit, clear)
    if model.routing is not None:
        metrics += model.routing.metrics(model.groups.all)
    token_outputs = [token_output for token_output, _ in results]
    loss_metrics = merge_metrics(microbatch_metrics for _, microbatch_metrics in results)
    return token_outputs, loss_metrics + metrics


def forward_loss(
    model: ParallelModel,
    batch: Any,
    tokens_per_microbatch: int,
    output_mask: Tensor,
    objective: Callable[..., tuple[Tensor, Metrics]],
    *,
    from_previous_token: bool = True,
    rows_per_unit: int = 1,
    guard: PassGuard | None = None,
) -> Metrics:
    """Compute an objective's metrics on this rank without a gradient.

    The arguments have the same meaning as in `forward_backward`. Collective over the model's ranks.
    """

    def compute(max_tokens: int) -> list[Any]:
        microbatches, _ = build_microbatches(
            model,
            batch,
            max_tokens,
            output_mask,
            from_previous_token,
            rows_per_unit,
            for_loss=True,
        )
        for chunk in model.wrapped:
            chunk.eval()
        with torch.no_grad():
            loss_function = _make_loss_function(objective)
            return _run_schedule(model, microbatches, loss_function, forward_only=True, guard=guard)

    results = _run_guarded(guard, compute, tokens_per_microbatch, batch, rows_per_unit)
    return merge_metrics(metrics for _, metrics in results)


def _make_loss_function(
    objective: Callable[..., tuple[Tensor, Metrics]],
) -> Callable[..., tuple[Tensor, tuple[TokenOutputs, Metrics]]]:
    """Return a function that computes a micro-batch's loss, `TokenOutputs` and metrics from its outputs."""

    def loss_function(
        microbatch: MicroBatch, *outputs: Tensor
    ) -> tuple[Tensor, tuple[TokenOutputs, Metrics]]:
        # If the batch has a teacher's k most likely tokens, the last output [n, k + 1] has the log-probs of
        # these tokens and of all other tokens together. The other outputs have one dimension.
        arguments: dict[str, Tensor] = {}
        if outputs[-1].dim() > 1:
            arguments["top_log_probs"] = outputs[-1]
            outputs = outputs[:-1]

        loss, metrics = objective(microbatch.batch, *outputs, **arguments)
        if not microbatch.rows:
            metrics = Metrics()
        detached_outputs = TokenOutputs(microbatch.rows, tuple(output.detach() for output in outputs))
        return loss, (detached_outputs, metrics)

    return loss_function


def _run_schedule(
    model: ParallelModel,
    microbatches: Sequence[MicroBatch],
    loss_function: Callable[..., tuple[Tensor, Any]],
    forward_only: bool,
    guard: PassGuard | None = None,
) -> list[Any]:
    """Run micro-batches through the pipeline schedule; return their results on the last stage.

    ``loss_function(micro-batch, *outputs)`` returns (loss, result). The ``guard`` is notified when the
    micro-batches begin and end. Collective over the model's ranks.
    """
    layout = model.groups.layout
    config = model.transformer_config
    interleaved = layout.virtual_pipeline > 1
    config.finalize_model_grads_func = None
    if not forward_only:
        config.finalize_model_grads_func = partial(_finalize_gradients, guard)

    # Each virtual stage consumes a separate iterator over the micro-batches.
    iterators = [iter(microbatches) for _ in model.wrapped]
    chunks: Any = model.wrapped
    data_iterator: Any = iterators
    if not interleaved:
        chunks = model.wrapped[0]
        data_iterator = iterators[0]

    communicator = None
    if layout.pipeline > 1:
        # Sequence parallelism divides the activations between stages, too.
        shards = 1
        if config.sequence_parallel:
            shards = layout.tensor
        microbatch_tokens = [microbatch.inputs.shape[1] // shards for microbatch in microbatches]
        communicator = PipelineExchange(
            model.groups.pipeline,
            config,
            microbatch_tokens,
            layout.virtual_pipeline,
        )

    if model.routing is not None:
        model.routing.begin_pass(is_training=not forward_only)

    virtual_pipeline = None
    if interleaved:
        virtual_pipeline = layout.virtual_pipeline
    run_schedule = get_forward_backward_func(layout.pipeline, virtual_pipeline)
    if guard is not None:
        guard.begin_microbatches(max(microbatch.tokens for microbatch in microbatches))
    with model.scope():
        results = run_schedule(
            forward_step_func=partial(_forward_step, model, loss_function),
            data_iterator=data_iterator,
            model=chunks,
            num_microbatches=len(microbatches),
            seq_length=1,  # unused: lengths vary, and the communicator computes shapes
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=model.groups.megatron,
        )
        # In a training pass `_finalize_gradients` has called this already, before gradients were reduced.
        if guard is not None and forward_only:
            guard.end_microbatches()
        if model.adapters is not None and not forward_only:
            # Megatron lacks this sum over the experts' tensor-parallel ranks. It may follow the data-parallel
            # reduction at the end of the schedule, because the order of sums does not matter.
            sum_partial_gradients(model.chunks)

    if model.uses_transformer_engine:
        warn_of_unfused_attention()
    return results


class PipelineExchange(P2PCommunicator):
    """Point-to-point exchange between pipeline stages, with shapes that are known in advance.

    All stages pack the same micro-batches, so a receiver can compute the shape of the next tensor. Megatron's
    class sends the shape before every tensor and synchronizes the device each time. ``microbatch_tokens`` has
    the number of tokens of each micro-batch on one rank; ``num_chunks`` is the number of virtual stages of a
    rank.
    """

    def __init__(
        self,
        group: Any,
        config: Any,
        microbatch_tokens: Sequence[int],
        num_chunks: int = 1,
    ) -> None:
        super().__init__(group, config)
        self._hidden = config.hidden_size
        is_first = group.rank() == 0
        is_last = group.rank() == group.size() - 1

        # List the number of tokens of each tensor that this stage receives, in the order of the sender's
        # (micro-batch, chunk) pairs. The last stage sends the outputs of its chunks to the first stage,
        # except for the chunk with the model's output. The first stage sends the input gradients of its
        # chunks to the last stage, except for the chunk with the model's input. The backward pass numbers
        # chunks in reverse, so the chunk that sends nothing has the highest number in both directions.
        table = get_schedule_table(
            len(microbatch_tokens), num_chunks, config.microbatch_group_size_per_vp_stage
        )
        self._forward_tokens: list[int] = []
        self._backward_tokens: list[int] = []
        for microbatch, chunk in table:
            is_last_chunk = chunk == num_chunks - 1
            if not (is_first and is_last_chunk):
                self._forward_tokens.append(microbatch_tokens[microbatch])
            if not (is_last and is_last_chunk):
                self._backward_tokens.append(microbatch_tokens[microbatch])

    def _communicate_shapes(
        self,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Any, Any]:
        """Return the shapes [tokens, 1, hidden size] of the next activations and gradients to receive."""
        activations = None
        if recv_prev:
            activations = (self._forward_tokens.pop(0), 1, self._hidden)
        gradients = None
        if recv_next:
            gradients = (self._backward_tokens.pop(0), 1, self._hidden)
        return activations, gradients


def _finalize_gradients(
    guard: PassGuard | None,
    chunks: Any,
    num_tokens: Any,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> None:
    """Run Megatron's finalize_model_grads in the role's groups, without its division by the token count.

    Megatron's schedule calls this function after the last micro-batch. With a guard, all ranks first check
    that no rank has run out of memory.
    """
    if guard is not None:
        guard.end_microbatches()

    def get_role_group(*_: Any, **__: Any) -> Any:
        return pg_collection.tp_dp_cp

    # Megatron updates the balancing biases of routers over a process-global group, which does not exist.
    original_getter = parallel_state.get_tensor_and_data_parallel_group
    parallel_state.get_tensor_and_data_parallel_group = get_role_group
    try:
        # No token count: loss weights are global already, and gradients must not be divided again.
        finalize_model_grads(
            chunks,
            None,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    finally:
        parallel_state.get_tensor_and_data_parallel_group = original_getter


def _forward_step(
    model: ParallelModel,
    loss_function: Callable[..., tuple[Tensor, Any]],
    iterator: Iterator[MicroBatch],
    wrapped: Any,
) -> tuple[Tensor, Callable[..., Any]]:
    """Run one chunk on the next micro-batch; return its output, and the loss function for the last stage."""
    microbatch = next(iterator)
    count_progress("micro-batches")

    routing_scope = nullcontext()
    if model.routing is not None and microbatch.routed is not None:
        routing_scope = model.routing.route_tokens(microbatch.routed)
    with routing_scope:
        output = wrapped(microbatch.inputs, None, None, packed_seq_params=microbatch.packing)
    chunk = model.chunks[model.wrapped.index(wrapped)]

    def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        selected_outputs = model.token_outputs(
            chunk,
            hidden,
            microbatch.index,
            microbatch.targets,
            microbatch.temperature,
            microbatch.support,
            microbatch.rules,
            microbatch.top_tokens,
            microbatch.squared_probs,
        )

        # Scatter the outputs to all tokens: zero for unselected tokens, and for tokens of other
        # context-parallel ranks.
        outputs: list[Tensor] = []
        for output in selected_outputs:
            zeros = output.new_zeros((microbatch.tokens, *output.shape[1:]))
            outputs.append(zeros.index_put((microbatch.selected,), output))
        if model.groups.layout.context > 1:
            # All ranks of the context group compute the loss of all tokens. The backward pass of this sum is
            # the identity: each rank receives the gradient with respect to its own tokens exactly once.
            outputs = [
                reduce_from_tensor_model_parallel_region(output, model.groups.context) for output in outputs
            ]

        loss, result = loss_function(microbatch, *outputs)
        no_tokens = torch.zeros([], dtype=torch.int, device=loss.device)
        # Clone the loss, because Megatron's schedule scales it in place.
        return loss.clone(), no_tokens, result

    return output, compute_loss
