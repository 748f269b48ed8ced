"""Low-rank adapters on Megatron's linear layers, over a frozen base.

The layer computes W x, the adapter adds ``alpha / rank * B (A x)``. If W is sharded by rows (Megatron's
ColumnParallelLinear: linear_qkv, linear_fc1), B is sharded by rows and A is replicated. If W is sharded by
columns (RowParallelLinear: linear_proj, linear_fc2), A is sharded by columns and B is replicated. Ranks
exchange only A x, which has ``rank`` features per token.

A and B are imported, exported, sharded and checkpointed by the rules of the layer's own weight: A has the
weight's columns, and B has the weight's rows. Each routed expert has its own A and B.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import sum_over_ranks
from megatron_rl.errors import UserError
from megatron_rl.megatron.model import ChunkedModel, ParallelModel, is_expert_parameter, live_parameters
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.megatron.parameter_mapping import (
    EXPERT,
    global_name,
    import_parameters,
    shard_of,
    trace_import,
    weights_by_name,
)
from megatron_rl.shapes.lora import ADAPTER, ATTENTION, MLP, PEFT_PREFIX, make_adapted_model
from megatron_rl.shapes.pretrained import LAYER
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import view_of


class Adapter(nn.Module):
    """Low-rank adapter of one linear layer: this rank's A [projections x rank, in] and B [out, rank].

    A linear layer of Megatron may combine several projections, which are separate tensors in the checkpoint:
    linear_qkv combines query, key and value. Each projection has its own A.
    """

    projection_mask: Tensor
    """[out, projections], 1 where a row of B belongs to a projection, otherwise 0."""
    initial_A: Tensor | None
    """A of the initial policy, which is the reference; or None if the initial adapters add zero."""
    initial_B: Tensor | None
    """B of the initial policy, or None like ``initial_A``."""

    def __init__(
        self,
        weight: Tensor,
        rank: int,
        projection_mask: Tensor,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        num_projections = projection_mask.shape[1]
        options = {"dtype": weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(num_projections * rank, in_features, **options))
        self.B = nn.Parameter(torch.empty(out_features, rank, **options))
        self.scale = scale
        self.dropout = dropout
        self.state = "trained"
        """``trained`` or ``initial``: the values that `forward` uses."""

        # Not persistent: checkpoints and PEFT files contain only A and B.
        self.register_buffer("projection_mask", projection_mask.to(**options), persistent=False)
        self.register_buffer("initial_A", None, persistent=False)
        self.register_buffer("initial_B", None, persistent=False)

        # `set_sharding` and `set_expert_sharding` set these.
        self.by_columns = False
        """Whether the layer's weight is sharded by columns over ``group``, otherwise by rows."""
        self.sequence_parallel = False
        self.is_expert = False
        """Whether the layer is a routed expert's."""
        self.group: Any = None
        """Tensor-parallel group of the layer."""

    def set_sharding(
        self,
        by_columns: bool,
        group: Any,
        sequence_parallel: bool,
    ) -> None:
        """Set how the layer is sharded over a tensor-parallel group, and Megatron's attributes of A and B.

        ``by_columns``: whether the layer's weight is sharded by columns, otherwise by rows. The attribute
        ``tensor_model_parallel`` makes the gradient norm count a shard on every rank. ``sequence_parallel``
        makes finalize_model_grads sum the partial gradients of the replicated factor.
        """
        self.by_columns = by_columns
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size() > 1
        sharded, replicated = self._sharded_and_replicated_factors()
        set_tensor_model_parallel_attributes(sharded, True, int(by_columns), 1)
        setattr(replicated, "sequence_parallel", self.sequence_parallel)

    def set_expert_sharding(self, by_columns: bool, group: Any) -> None:
        """Set how an expert's layer is sharded over the expert's group, and Megatron's attributes of A and B.

        Tensor-parallel ranks may have different experts, so the attribute ``tensor_model_parallel`` makes the
        gradient norm count A and B on every rank. One factor is replicated over the expert's group: the
        attribute ``shared`` makes the gradient norm skip it on all ranks of the group except the first.
        """
        self.by_columns = by_columns
        self.group = group
        self.is_expert = True
        sharded, replicated = self._sharded_and_replicated_factors()
        for factor in (sharded, replicated):
            set_tensor_model_parallel_attributes(factor, True, int(by_columns), 1)
        setattr(replicated, "shared", group.rank() > 0)

    def _sharded_and_replicated_factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the factor that is sharded over the group, then the factor that is replicated."""
        if self.by_columns:
            return self.A, self.B
        return self.B, self.A

    def get_partial_gradient(self) -> Tensor | None:
        """Return the gradient to sum over an expert's tensor-parallel ranks, or None if it is complete."""
        if not self.is_expert or self.group.size() == 1:
            return None
        _, replicated = self._sharded_and_replicated_factors()
        return getattr(replicated, "main_grad", None)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Compute the adapter's output, which is added to the layer's output; None means zero.

        ``hidden`` [.., in] is the layer's input on this rank. Collective over the layer's group.
        """
        factor_a: Tensor = self.A
        factor_b: Tensor = self.B
        if self.state == "initial":
            if self.initial_A is None or self.initial_B is None:
                return None
            factor_a = self.initial_A
            factor_b = self.initial_B

        if self.dropout and self.training:
            hidden = self._apply_dropout(hidden)
        low_rank = self._exchange_low_rank(functional.linear(hidden, factor_a))
        return functional.linear(low_rank, self._expand_by_projection(factor_b)) * self.scale

    def _apply_dropout(self, hidden: Tensor) -> Tensor:
        """Apply dropout to the adapter's input, or to this rank's shard of it."""
        # Ranks with different tokens or features need different random numbers. Ranks with the same input
        # need equal random numbers.
        is_unsharded_expert = self.is_expert and self.group.size() == 1
        if self.by_columns or self.sequence_parallel or is_unsharded_expert:
            with device.tensor_parallel_generator():
                return functional.dropout(hidden, self.dropout)
        return functional.dropout(hidden, self.dropout)

    def _exchange_low_rank(self, low_rank: Tensor) -> Tensor:
        """Apply the tensor-parallel collective of the layer's input or output to A x.

        Collective over the layer's group.
        """
        if self.is_expert:
            # The dispatcher sends all tokens of an expert to each of the expert's ranks, and sums the outputs
            # of these ranks, both W x and B (A x). Each rank thus has a partial gradient of the replicated
            # factor: see `get_partial_gradient`.
            return low_rank

        if self.by_columns and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low_rank, group=self.group)
        if self.by_columns:
            return reduce_from_tensor_model_parallel_region(low_rank, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low_rank, group=self.group)

        # Every rank already has A x. In the backward pass each rank computes the gradient of A x for its own
        # rows of B, and the gradients are summed over the ranks.
        return copy_to_tensor_model_parallel_region(low_rank, group=self.group)

    def _expand_by_projection(self, factor_b: Tensor) -> Tensor:
        """Expand B to [out, projections x rank]; a row is zero in the columns of other projections."""
        if self.projection_mask.shape[1] == 1:
            return factor_b
        expanded = self.projection_mask[:, :, None] * factor_b[:, None, :]
        return expanded.flatten(1)

    @torch.no_grad()
    def compute_merged_weight(self, weight: Tensor) -> Tensor:
        """Compute this rank's shard of W + scale * B A in W's dtype, summed in float32."""
        product = self._expand_by_projection(self.B).float() @ self.A.float()
        return (weight.float() + self.scale * product).to(weight.dtype)


def add_adapter_output(
    linear: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Add the adapter's output to the output of its linear layer (forward hook of the layer).

    A grouped layer of many experts has one adapter per expert; its second input is the number of tokens of
    each expert.
    """
    adapter = getattr(linear, ADAPTER, None)
    if adapter is None:
        return output  # `remove_adapters` leaves the hook

    hidden = inputs[0]
    norm_weight = getattr(linear, "layer_norm_weight", None)
    if norm_weight is not None:
        # Transformer Engine fuses the norm into the linear layer, so `hidden` is not normalised yet. The
        # adapter's matrix A multiplies the normalised input: apply the same norm here.
        gain = norm_weight.float()
        if linear.zero_centered_gamma:
            gain = gain + 1.0
        hidden = functional.rms_norm(hidden.float(), gain.shape, gain, linear.eps).to(hidden.dtype)

    layer_output, bias = output
    if isinstance(adapter, Adapter):
        adapter_output = adapter(hidden)
        if adapter_output is None:
            return output
        return layer_output + adapter_output, bias

    # Each expert's adapter processes this expert's tokens, which are consecutive.
    expert_inputs = hidden.split(list(inputs[1]))
    expert_outputs = []
    for expert_adapter, expert_input in zip(adapter, expert_inputs, strict=True):
        expert_output = expert_adapter(expert_input)
        if expert_output is not None:
            expert_outputs.append(expert_output)

    # All adapters have the same state: either all of them returned a tensor, or all returned None.
    if not expert_outputs:
        return output
    return layer_output + torch.cat(expert_outputs), bias


_HEAD_KEY = "output_layer.weight"
"""Checkpoint key of a scalar head's weight."""


class TensorSource(Protocol):
    """Interface for reading slices of named tensors, for example from a safetensors file."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        ...

    def read(
        self,
        name: str,
        start: Sequence[int],
        size: Sequence[int],
    ) -> Tensor:
        """Read the slice of ``size`` elements per dimension that begins at ``start``."""
        ...


def attach_adapters(
    model: ParallelModel,
    config: LoraConfig,
    seed: int,
    *,
    trainable: bool,
    initial: TensorSource | None = None,
) -> None:
    """Freeze a model with loaded weights and attach adapters to its linear layers.

    ``initial`` has initial values by PEFT names. Tensors that it lacks get new values: A is drawn as torch
    initialises a linear layer and B is zero, so the output of a new adapter is zero. New values depend only
    on ``seed`` and on the tensors' names, not on the layout. ``trainable``: whether the adapters and a scalar
    head require gradients. Call before the model is wrapped in DDP.
    """
    model.adapters = make_adapted_model(
        describe_model(model.hf_config),
        config.rank,
        config.alpha,
        config.targets,
    )
    groups = model.groups
    settings = model.transformer_config

    # Freeze the base. A scalar head is trained together with the adapters.
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        head = _find_scalar_head(model, chunk)
        if head is not None:
            head.requires_grad_(trainable)

    masks: dict[str, Tensor] = {}

    def make_adapter(name: str, weight: Tensor) -> Adapter:
        assert model.adapters is not None
        # A mask selects the rows of B that belong to each projection of a fused layer, such as query, key and
        # value. All experts of a layer have the same mask: compute it once.
        mask_name = EXPERT.sub(r"\1{expert}", name)
        if mask_name not in masks:
            masks[mask_name] = _make_projection_mask(model, mask_name, len(weight))
        scale = model.adapters.alpha / config.rank
        adapter = Adapter(weight, config.rank, masks[mask_name], scale, config.dropout)

        # Megatron's RowParallelLinear layers, whose weights are sharded by columns.
        by_columns = "linear_proj." in name or "linear_fc2." in name
        if is_expert_parameter(name):
            adapter.set_expert_sharding(by_columns, groups.expert_tensor)
        else:
            adapter.set_sharding(by_columns, groups.tensor, settings.sequence_parallel)
        return adapter.requires_grad_(trainable)

    for layer_name, linear in _iterate_target_layers(model, model.adapters.targets):
        name = f"{layer_name}.{ADAPTER}"
        expert_count = getattr(linear, "num_gemms", None)
        if expert_count is None:
            linear.adapter = make_adapter(name, linear.weight)
        else:
            # Transformer Engine's grouped linear layer has the weights of all local experts.
            expert_adapters = []
            for expert_index in range(expert_count):
                weight = getattr(linear, f"weight{expert_index}")
                expert_adapters.append(make_adapter(f"{name}.{expert_index}", weight))
            linear.adapter = nn.ModuleList(expert_adapters)
        # Run before the layer's other hooks: Gemma's norm after the layer, for instance, applies to the sum.
        linear.register_forward_hook(add_adapter_output, prepend=True)

    if trainable and settings.recompute_granularity is not None and model.chunks[0].pre_process:
        # With recompute, a layer has gradients only if one of its inputs requires a gradient. The output of a
        # frozen embedding does not, and all gradients would be zero, without an error.
        model.chunks[0].embedding.register_forward_hook(_require_gradient)
    initialise_adapters(model, seed, initial)


@torch.no_grad()
def share_base(model: ParallelModel, base_model: ParallelModel) -> None:
    """Make a model use the frozen weights of another model of the same checkpoint and layout.

    Both models have adapters. The model's own frozen weights are freed. Call before the model is wrapped in
    DDP.
    """
    for chunk, base_chunk in zip(model.chunks, base_model.chunks, strict=True):
        frozen_base = {
            name: value for name, value in base_chunk.named_parameters() if not value.requires_grad
        }
        for name, parameter in chunk.named_parameters():
            base_parameter = frozen_base.get(name)
            if base_parameter is None or parameter.requires_grad:
                continue
            if parameter.shape == base_parameter.shape:
                parameter.data = base_parameter.data


def _find_scalar_head(model: ParallelModel, chunk: Any) -> Tensor | None:
    """Return the weight of a chunk's scalar head, or None for a chunk without a scalar head."""
    if not model.spec.model.shape.scalar_head or not chunk.post_process:
        return None
    return chunk.output_layer.weight


def initialise_adapters(
    model: ParallelModel,
    seed: int,
    initial: TensorSource | None = None,
) -> None:
    """Initialise the adapters: copy the tensors that ``initial`` has, and draw values for all other tensors.

    ``initial`` has tensors by PEFT names. Drawn values depend on ``seed`` and on the tensor's name. With
    ``initial``, the initial policy (the reference) is the base with the initial adapters. Without
    ``initial``, it is the base without adapters.
    """
    assert model.adapters is not None
    initial_names = set()
    if initial is not None:
        initial_names = initial.names()
    shapes = model.adapters.tensor_shapes()
    parameters = adapter_parameters(model)

    # A box is the region of a PEFT tensor that one of this rank's parameters contains.
    for box in adapter_boxes(model):
        view = view_of(parameters[box.storage], box)
        peft_name = PEFT_PREFIX + box.name
        if initial is not None and peft_name in initial_names:
            view.copy_(initial.read(peft_name, box.start, box.size))
        elif box.name.endswith("lora_B.weight"):
            view.zero_()
        else:
            # Every rank draws the complete tensor and copies a slice, so values do not depend on the layout.
            complete_tensor = _draw_initial_values(box.name, shapes[box.name], seed)
            ranges = zip(box.start, box.size, strict=True)
            view.copy_(complete_tensor[tuple(slice(start, start + size) for start, size in ranges)])

    for _, adapter in _iterate_adapters(model):
        adapter.initial_A = None
        adapter.initial_B = None
        if initial is not None:
            adapter.initial_A = adapter.A.detach().clone()
            adapter.initial_B = adapter.B.detach().clone()


def _draw_initial_values(
    name: str,
    shape: tuple[int, ...],
    seed: int,
) -> Tensor:
    """Draw uniform values between -1 / sqrt(inputs) and 1 / sqrt(inputs), as ``torch.nn.Linear`` does.

    The values depend only on ``seed`` and on the tensor's ``name`` and ``shape``.
    """
    # Use a checksum, because Python's hash() differs from process to process.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = shape[1] ** -0.5
    return torch.rand(shape, generator=generator) * 2 * bound - bound


def _iterate_target_layers(model: ParallelModel, targets: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (Megatron's name with the global layer index, linear layer) for each linear layer to adapt."""
    for chunk_index, chunk in enumerate(model.chunks):
        for layer_index, layer in enumerate(chunk.decoder.layers):
            for path, module, linear_names in _iterate_adaptable_modules(layer):
                for name in targets:
                    if name not in linear_names:
                        continue
                    linear = getattr(module, name, None)
                    if linear is None:
                        raise _missing_layer_error(f"{path}.{name}", name, targets)
                    local_name = f"{chunk_index}.decoder.layers.{layer_index}.{path}.{name}"
                    yield global_name(model, local_name), linear


def _iterate_adaptable_modules(layer: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield (path in the layer, module, names of its linear layers) for attention, MLP and experts."""
    yield "self_attention", getattr(layer, "self_attention", None), ATTENTION

    mlp: Any = getattr(layer, "mlp", None)
    experts = getattr(mlp, "experts", None)
    if experts is None:
        yield "mlp", mlp, MLP
        return

    if getattr(mlp, "shared_experts", None) is not None:
        yield "mlp.shared_experts", mlp.shared_experts, MLP
    local_experts = getattr(experts, "local_experts", None)
    if local_experts is None:
        # Transformer Engine's grouped linear layers.
        yield "mlp.experts", experts, MLP
        return

    # Each of Megatron's local experts (without Transformer Engine) is a separate module.
    for expert_index, expert in enumerate(local_experts):
        yield f"mlp.experts.local_experts.{expert_index}", expert, MLP


def _missing_layer_error(
    path: str,
    target: str,
    targets: Iterable[str],
) -> UserError:
    """Return the error for a user's model without a linear layer that ``actor.lora.targets`` names."""
    return UserError(
        f"a layer of the model provider has no {path} to adapt",
        where="actor.lora.targets",
        expected="linear layers that every layer of the model has, under Megatron's names",
        got=", ".join(targets),
        fix=f"remove {target}",
    )


def _make_projection_mask(
    model: ParallelModel,
    name: str,
    rows: int,
) -> Tensor:
    """Return the mask [rows, projections] that is 1 where a row of an adapter's B belongs to a projection.

    Projections are the checkpoint tensors that a layer combines, such as query, key and value. ``name`` is
    the adapter's name, with layers counted over the whole model and ``{expert}`` for the number of an expert.
    """
    assert model.adapters is not None
    layer_number, module = name.removeprefix("decoder.layers.").split(".", 1)
    weights = weights_by_name(model.adapters.weights(int(layer_number)))
    projection_names = [source.name for source in weights[f"{module}.A"].sources]
    shard = shard_of(model)
    first_expert = shard.expert * (model.adapters.shape.experts // shard.expert_size)

    # Replace each checkpoint tensor of B by a tensor that is filled with the index of its projection.
    index_tensors: dict[str, Tensor] = {}
    for source in weights[f"{module}.B"].sources:
        projection_index = projection_names.index(source.name.replace("lora_B", "lora_A"))
        tensor_name = LAYER.format(layer=layer_number) + source.name.format(expert=first_expert)
        index_tensors[tensor_name] = torch.full((source.end, 1), projection_index)

    # The import orders and shards these rows like the rows of B: each row then contains the index of the
    # projection that it belongs to.
    row_projections = torch.empty(rows, 1, dtype=torch.long)
    import_parameters(
        {f"{name.format(expert=0)}.B": row_projections},
        index_tensors,
        model.adapters,
        shard,
    )
    return functional.one_hot(row_projections[:, 0], len(projection_names))


def _require_gradient(
    module: Any,
    inputs: Any,
    output: Tensor,
) -> Tensor:
    """Make the embedding's output require a gradient (forward hook)."""
    if torch.is_grad_enabled():
        return output.requires_grad_()
    return output


def _iterate_adapters(model: ChunkedModel) -> Iterator[tuple[str, Adapter]]:
    """Yield (local name ``<chunk>.<module name>``, adapter) for every adapter on this rank."""
    for index, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                yield f"{index}.{name}", module


def _adapted_weight_name(adapter_name: str) -> str:
    """Return the local name, ``<chunk>.<parameter name>``, of the weight that an adapter adapts."""
    layer, _, expert = adapter_name.rpartition(f".{ADAPTER}")
    return f"{layer}.weight{expert.removeprefix('.')}"


def adapter_parameters(model: ChunkedModel) -> dict[str, Tensor]:
    """Return this rank's A and B of all adapters by local name, ``<chunk>.<parameter name>``."""
    parameters: dict[str, Tensor] = {}
    for name, adapter in _iterate_adapters(model):
        for factor, parameter in adapter.named_parameters():
            parameters[f"{name}.{factor}"] = parameter.data
    return parameters


def sum_partial_gradients(chunks: Iterable[nn.Module]) -> None:
    """Sum the partial gradients of experts' adapters over the experts' tensor-parallel ranks.

    If an expert is sharded over ranks, one of its adapter's matrices A and B is sharded, too. The other
    matrix is replicated, and each rank has a partial gradient of it. Collective over the experts'
    tensor-parallel group.
    """
    gradients: list[Tensor] = []
    group: Any = None
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapter):
                gradient = module.get_partial_gradient()
                if gradient is not None:
                    gradients.append(gradient)
                    group = group or module.group

    # This early return cannot deadlock: the ranks of a group have the same layers, and return here together.
    if not gradients:
        return

    # Use one collective for all gradients, because they are small.
    flat_sum = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients]), group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat_sum[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def adapter_boxes(model: ParallelModel) -> list[TensorBox]:
    """Return, for this rank's `adapter_parameters`, the slices of PEFT's tensors that they contain.

    A `TensorBox` describes one slice of a PEFT tensor and its location in a parameter.
    """
    assert model.adapters is not None
    parameters = adapter_parameters(model)
    local_names = {global_name(model, local_name): local_name for local_name in parameters}

    # Load PEFT's tensors into meta tensors: `trace_import` records the slices that would be copied.
    meta_parameters: dict[str, Tensor] = {}
    for name, local_name in local_names.items():
        meta_parameters[name] = torch.empty_like(parameters[local_name], device="meta")
    return trace_import(
        meta_parameters,
        model.adapters,
        shard_of(model),
        device.rank(),
        local_names,
    )


def policy_weights(model: ChunkedModel) -> dict[str, Tensor]:
    """Return `live_parameters` with adapters merged: new tensors W + scale * B A for adapted weights."""
    weights = live_parameters(model)
    for name, adapter in _iterate_adapters(model):
        weight_name = _adapted_weight_name(name)
        weights[weight_name] = adapter.compute_merged_weight(weights[weight_name])
    return weights


def engine_adapters(model: ChunkedModel) -> dict[str, Tensor]:
    """Return `adapter_parameters` with each B multiplied by the scale, for an engine that adds B A x."""
    parameters = adapter_parameters(model)
    for name, adapter in _iterate_adapters(model):
        if adapter.scale != 1:
            parameters[f"{name}.B"] = parameters[f"{name}.B"] * adapter.scale
    return parameters


@torch.no_grad()
def merge_adapters(model: ParallelModel, seed: int) -> None:
    """Merge a model's adapters into its base weights, in place, and initialise new adapters from ``seed``."""
    weights = live_parameters(model)
    for name, adapter in _iterate_adapters(model):
        weight = weights[_adapted_weight_name(name)]
        weight.copy_(adapter.compute_merged_weight(weight))
    initialise_adapters(model, seed)


def remove_adapters(model: ParallelModel) -> list[tuple[Any, Any]]:
    """Detach a model's adapters without merging them; return the (linear layer, adapter) pairs.

    The layers keep their forward hooks, which have no effect without an adapter.
    """
    pairs: list[tuple[Any, Any]] = []
    for chunk in model.chunks:
        for module in chunk.modules():
            if hasattr(module, ADAPTER):
                pairs.append((module, module.adapter))
    for linear, _ in pairs:
        del linear.adapter
    model.adapters = None
    return pairs


@contextmanager
def without_adapters(model: ParallelModel | None) -> Iterator[None]:
    """Remove a model's adapters inside the block, and use weights into which the adapters are merged.

    The merged weights are copies. The adapters and the base weights are restored after the block. A model
    without adapters is unchanged. Do not train inside the block.
    """
    if model is None:
        yield
        return

    # The base weights stay in memory, and replace the merged copies at the end.
    adapted_model = model.adapters
    base_weights: list[tuple[Tensor, Tensor]] = []
    for name, adapter in _iterate_adapters(model):
        chunk_index, weight_name = _adapted_weight_name(name).split(".", 1)
        parameter = model.chunks[int(chunk_index)].get_parameter(weight_name)
        base_weights.append((parameter, parameter.data))
        parameter.data = adapter.compute_merged_weight(parameter.data)

    linear_adapter_pairs = remove_adapters(model)
    try:
        yield
    finally:
        model.adapters = adapted_model
        for linear, adapter in linear_adapter_pairs:
            linear.adapter = adapter
        for parameter, weight in base_weights:
            parameter.data = weight


@contextmanager
def use_initial_policy(model: ChunkedModel) -> Iterator[None]:
    """Use the adapters' initial values inside the block: the model is then the initial policy."""
    for _, adapter in _iterate_adapters(model):
        adapter.state = "initial"
    try:
        yield
    finally:
        for _, adapter in _iterate_adapters(model):
            adapter.state = "trained"


def build_sharded_adapters(model: ParallelModel, chunk: Any) -> dict[str, Any]:
    """Return a chunk's trainable tensors for Megatron's distributed checkpoint, loadable in any layout.

    The experts of a layer are stacked into one tensor along its first dimension.
    """
    chunk_index = model.chunks.index(chunk)
    groups = model.groups
    tensors: dict[str, Any] = {}

    # The scalar head is replicated over tensor-parallel ranks.
    head = _find_scalar_head(model, chunk)
    if head is not None:
        head_replica = (0, groups.coordinates.tensor, groups.data_context.rank())
        tensors[_HEAD_KEY] = ShardedTensor.from_rank_offsets(_HEAD_KEY, head, replica_id=head_replica)

    for adapter_name, adapter in _iterate_adapters(model):
        if not adapter_name.startswith(f"{chunk_index}."):
            continue
        tensor_rank = adapter.group.rank()
        tensor_size = adapter.group.size()
        data_group = groups.data_context
        if adapter.is_expert:
            data_group = groups.expert_data

        for factor, parameter in adapter.named_parameters():
            name = global_name(model, f"{adapter_name}.{factor}")
            key, expert_offset = _checkpoint_key(model, name)

            # One factor is replicated over tensor-parallel ranks, and Megatron saves replica 0. The other
            # factor is sharded along a dimension, which is counted after the dimension of experts.
            is_replicated = adapter.by_columns == (factor == "B")
            tensor_offset: tuple[tuple[int, int, int], ...] = ()
            replica_id = (0, tensor_rank, data_group.rank())
            if not is_replicated:
                dimension = len(expert_offset) + int(adapter.by_columns)
                tensor_offset = ((dimension, tensor_rank, tensor_size),)
                replica_id = (0, 0, data_group.rank())

            sharded_tensor: Any = ShardedTensor.from_rank_offsets(
                key,
                parameter,
                *expert_offset,
                *tensor_offset,
                replica_id=replica_id,
                prepend_axis_num=len(expert_offset),
            )
            if factor == "B" and ".linear_fc1." in name and model.transformer_config.gated_linear_unit:
                # A rank's rows are a shard of the gate and a shard of the up projection.
                sharded_tensor = apply_swiglu_sharded_factory(sharded_tensor, expert_offset)
            tensors[name] = sharded_tensor
    return tensors


def _checkpoint_key(model: ParallelModel, name: str) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    """Return the checkpoint key of an adapter's parameter, and its expert's offset in the checkpoint tensor.

    The offset is ((0, index of the expert, number of experts),), in Megatron's format: a layer's experts are
    stacked along dimension 0. The offset is empty for a parameter that belongs to no expert.
    """
    match = EXPERT.search(name)
    if match is None:
        return name, ()

    # Local experts are numbered from 0 on each rank; the checkpoint has all experts in one tensor.
    shard = shard_of(model)
    num_experts = model.spec.model.shape.experts
    expert_index = shard.expert * (num_experts // shard.expert_size) + int(match.group(2))
    key = EXPERT.sub(r"\1", name).replace("..", ".")
    return key, ((0, expert_index, num_experts),)


@torch.no_grad()
def load_adapters(
    model: ParallelModel,
    chunk: Any,
    tensors: dict[str, Tensor],
) -> None:
    """Copy loaded ``tensors``, by the names of `build_sharded_adapters`, into a chunk's trainable tensors."""
    chunk_index = model.chunks.index(chunk)
    head = _find_scalar_head(model, chunk)
    if head is not None:
        head.copy_(tensors[_HEAD_KEY])
    for local_name, parameter in adapter_parameters(model).items():
        if local_name.startswith(f"{chunk_index}."):
            parameter.copy_(tensors[global_name(model, local_name)])
