"""Models of one role: this rank's chunks of a GPTModel, in the role's own process groups.

A chunk returns hidden states and never logits: `ParallelModel.token_outputs` computes log-probs and
entropies, or values, from them in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.megatron.blocks import place_blocks
from megatron_rl.megatron.blocks.builder import LayerOptions
from megatron_rl.megatron.experts import Routing
from megatron_rl.megatron.layers import (
    PackedRotaryEmbedding,
    RowAttention,
    allow_plain_output_layer,
    block_spec,
    find_earlier_attention_backend,
    require_transformer_engine,
)
from megatron_rl.megatron.log_probs import (
    Support,
    TopTokens,
    VocabularyShard,
    vocab_parallel_log_probs,
    vocab_parallel_top_tokens,
)
from megatron_rl.megatron.logit_rules import RowRules
from megatron_rl.megatron.model_spec import ModelSpec, describe_model, model_spec, with_scalar_head
from megatron_rl.megatron.packing import make_bucketed_rows, make_row_boundaries, make_varlen_rows
from megatron_rl.megatron.provider import Provider
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.accelerator import LAYERS, MEGATRON, AcceleratedRole, accelerator_defaults
from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.layout import plain_experts_error
from megatron_rl.shapes.lora import ADAPTER, AdaptedModel
from megatron_rl.shapes.memory import LOGITS_ELEMENTS


class ChunkedModel(Protocol):
    """Interface of a Megatron model: its bare GPTModel chunks and its transformers config."""

    @property
    def chunks(self) -> Sequence[Any]: ...

    @property
    def hf_config(self) -> Any: ...


def live_parameters(model: ChunkedModel) -> dict[str, Tensor]:
    """Return this rank's weights by storage name, ``<chunk>.<parameter name>``, without adapters.

    Some weights are buffers (`is_buffer`), such as the biases that balance the load of experts.
    """
    weights: dict[str, Tensor] = {}
    for index, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            if f".{ADAPTER}." not in name:
                weights[f"{index}.{name}"] = parameter.data
        for name, buffer in chunk.named_buffers():
            if is_buffer(name):
                weights[f"{index}.{name}"] = buffer
    return weights


def is_expert_parameter(name: str) -> bool:
    """Return whether Megatron's parameter ``name`` belongs to a routed expert."""
    return ".experts." in name


@dataclass
class ParallelModel:
    """Model on one rank: a chunk of layers for each virtual pipeline stage.

    The constructor raises UserError for context parallelism with a provider's own attention, which needs
    complete rows.
    """

    chunks: list[GPTModel]
    """The bare chunks, by virtual pipeline stage."""
    wrapped: list[torch.nn.Module]
    """The chunks as the schedule runs them: in Megatron's DDP if the model trains, otherwise `chunks`."""
    groups: ParallelGroups
    """Process groups of the role's layout."""
    spec: ModelSpec
    """Arguments from which the chunks were built."""
    uses_transformer_engine: bool
    """Whether the layers are Transformer Engine's."""
    routing: Routing | None = None
    """Recorder of expert routing, or None if routing is neither recorded nor replayed."""
    adapters: AdaptedModel | None = None
    """Description of the low-rank adapters, or None for a model without them."""
    provider: Provider | None = None
    """The user's function that built the chunks, or None if `build_model` built them."""
    accepts_packed_rows: bool = field(init=False)
    """Whether attention gets its row boundaries as `PackedRows`, this package's class. It is False if the
    user's model has a custom attention class in Transformer Engine's layers: that class gets Megatron's own
    ``PackedSeqParams`` (format THD)."""
    uses_varlen_kernel: bool = field(init=False)
    """Whether all attention layers use variable-length kernels, whose input is a packed sequence with
    ``cu_seqlens``. Otherwise attention needs bucketed rows: padded batches of rows of similar length."""
    needs_bucketed_rows: bool = field(init=False)
    """Whether other layers than attention need bucketed rows."""

    def __post_init__(self) -> None:
        row_attentions: list[RowAttention] = []
        other_attentions: list[Any] = []
        for chunk in self.chunks:
            for name, module in chunk.named_modules():
                if not name.endswith(".core_attention"):
                    continue
                if isinstance(module, RowAttention):
                    row_attentions.append(module)
                else:
                    other_attentions.append(module)

        # Use variable-length kernels only if all attention layers support them. If Megatron's local layers
        # (without Transformer Engine) have a custom attention class of the user, attention receives bucketed
        # rows: batches of rows of similar length, with padding. Any attention can process these batches.
        self.uses_varlen_kernel = all(attention.uses_varlen_kernel for attention in row_attentions)
        if not self.uses_transformer_engine and (other_attentions or not row_attentions):
            self.uses_varlen_kernel = False

        # Layers that replace attention, such as gated delta nets, may need bucketed rows even if the
        # attention layers read ``cu_seqlens``.
        modules = chain.from_iterable(chunk.modules() for chunk in self.chunks)
        self.needs_bucketed_rows = any(getattr(module, "needs_bucketed_rows", False) for module in modules)

        # If Transformer Engine's layers have a custom attention class of the user, the class does not accept
        # `PackedRows`, but only Megatron's packed sequences (THD). Such a class needs complete rows, since
        # only `RowAttention` exchanges tokens between context-parallel ranks.
        self.accepts_packed_rows = not (self.uses_transformer_engine and other_attentions)
        if not self.accepts_packed_rows and self.groups.layout.context > 1:
            raise UserError(
                "the model provider's own attention needs complete rows, which context parallelism cuts",
                where="layout.context",
                expected="1, or Megatron's TEDotProductAttention",
                got=f"context {self.groups.layout.context}, and {type(other_attentions[0]).__name__}",
                fix="set layout.context=1, or build the layers with TEDotProductAttention",
            )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Set the device mode and, for a model with a provider, Megatron's global groups inside the block."""
        groups: AbstractContextManager[None] = nullcontext()
        if self.provider is not None:
            groups = self.provider.scope(self.groups)
        with device.megatron_mode(), groups:
            yield

    @property
    def names(self) -> Mapping[str, str]:
        """Return the mapping from the provider's parameter names to Megatron's."""
        if self.provider is None:
            return {}
        return self.provider.names

    @property
    def transformer_config(self) -> Any:
        """Return Megatron's configuration of the model."""
        return self.spec.transformer_config

    @property
    def hf_config(self) -> Any:
        """Return the transformers configuration of the model."""
        return self.spec.hf_config

    def freeze(self) -> None:
        """End training: remove DDP wrappers and gradient buffers, and freeze the weights."""
        for wrapped in self.wrapped:
            if getattr(wrapped, "use_forward_hook", False):
                # The hook would gather the weights of a distributed optimizer that no longer exists.
                wrapped.disable_forward_pre_hook(param_sync=False)  # pyright: ignore[reportCallIssue]

        self.wrapped = list(self.chunks)
        self.transformer_config.no_sync_func = None
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def watch_routing(self) -> None:
        """Record and replay expert routing from now on, if the model has experts whose routers support it.

        Fused routers select experts inside their kernel, so only the loads of their experts are counted.
        """
        config = self.transformer_config

        # Sinkhorn routers select experts by other scores, and do not call the replay.
        if config.num_moe_experts and config.moe_router_load_balancing_type != "sinkhorn":
            # The ranks of these groups have different tokens of the same rows.
            token_groups = [self.groups.context]
            if config.sequence_parallel:
                token_groups.append(self.groups.tensor)
            self.routing = Routing(
                self.chunks,
                config.num_layers,
                config.num_moe_experts,
                config.moe_router_topk,
                tuple(token_groups),
            )

    def freeze_routers(self) -> None:
        """Freeze the routers' weights. Call before the model is wrapped."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if ".mlp.router." in name:
                    parameter.requires_grad_(False)

    @property
    def token_multiple(self) -> int:
        """Return the number that must divide the padded number of tokens of every micro-batch.

        Context and sequence parallelism divide the tokens into equal shards. Matrix products in 8 or 4 bits
        need a multiple of 16 or 32 tokens in each shard.
        """
        config = self.transformer_config
        layout = self.groups.layout
        multiple = layout.context
        if config.sequence_parallel:
            multiple *= layout.tensor
        if config.fp8 or config.fp4:
            multiple *= get_align_size_for_quantization(config)
        return multiple

    def local_tokens(self, num_tokens: int) -> slice:
        """Return this rank's shard of a micro-batch's ``num_tokens`` tokens, padding included, as a slice.

        Context parallelism and sequence parallelism divide the tokens over ranks.
        """
        layout = self.groups.layout
        coordinates = self.groups.coordinates
        shards = layout.context
        shard = coordinates.context

        # Sequence parallelism divides each context-parallel shard further.
        if self.transformer_config.sequence_parallel:
            shards *= layout.tensor
            shard = shard * layout.tensor + coordinates.tensor

        size = num_tokens // shards
        return slice(size * shard, size * (shard + 1))

    def pack(self, lengths: Sequence[int]) -> Any:
        """Return the packing of consecutive rows into one sequence, in the format of this model's attention.

        ``lengths`` are the rows' numbers of tokens. The result has ``cu_seqlens`` for variable-length
        kernels, the token indices of bucketed rows (padded batches of rows of similar length), or both. Its
        tensors are on the CPU.
        """
        if not self.accepts_packed_rows:
            return make_row_boundaries(lengths)
        context_rank = self.groups.coordinates.context
        context = self.groups.layout.context
        if self.needs_bucketed_rows:
            # Some layers, such as gated delta nets, need buckets, and attention may need ``cu_seqlens``: the
            # result has both.
            rows = make_bucketed_rows(lengths, context_rank, context)
            return replace(rows, boundaries=make_row_boundaries(lengths))
        if self.uses_varlen_kernel:
            return make_varlen_rows(lengths, context_rank, context)
        return make_bucketed_rows(lengths, context_rank, context)

    def token_outputs(
        self,
        chunk: GPTModel,
        hidden: Tensor,
        index: Tensor,
        targets: Tensor,
        temperature: Tensor,
        support: Support | None = None,
        rules: Sequence[RowRules] | None = None,
        buckets: Tensor | TopTokens | None = None,
        squared_probs: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute the head's outputs for tokens from the last stage's hidden states.

        Returns (log-probs, entropy) of ``targets`` for a language model, (values,) for a scalar head, each
        [n]. ``hidden`` [1, T, h] is the chunk's output, a shard of T under sequence parallelism. ``index``
        [n] are the positions of the hidden states from which outputs are computed. ``support`` restricts each
        distribution to the tokens that sampling allowed. ``rules`` are the logit rules of sampling, such as
        penalties and biases, which are applied to the logits here, too.

        ``buckets`` are the ids [n, k] of further tokens: a language model then also returns the log-probs
        [n, k + 1] of these k tokens and of all other tokens together. If ``buckets`` is a `TopTokens`, these
        are the model's k most likely tokens, and their ids are returned, too. With ``squared_probs`` the sum
        of the squared probabilities [n] follows the entropy. Collective over the tensor-parallel group.
        """
        token_states = hidden[0]
        shape = self.spec.model.shape
        sequence_parallel = self.transformer_config.sequence_parallel
        if sequence_parallel:
            # The vocabulary is sharded over the ranks, so each rank computes a partial gradient of the hidden
            # states, and these are summed. A scalar head is not sharded: its gradients are equal on all
            # ranks, and a sum would count them tp times.
            token_states = gather_from_sequence_parallel_region(
                token_states, tensor_parallel_output_grad=not shape.scalar_head, group=self.groups.tensor
            )

        if shape.scalar_head:
            head: Any = chunk.output_layer
            return (token_states[index].float() @ head.weight[0].float(),)

        weight: Any = chunk.output_layer.weight
        if shape.tied:
            weight = chunk.shared_embedding_or_output_weight()
        shard = VocabularyShard(
            start=self.groups.coordinates.tensor * len(weight),
            vocabulary_size=shape.vocab,
            group=self.groups.tensor,
            cap=self.spec.model.config.get("final_logit_softcapping"),
        )
        # With fewer tokens per tile, the matrix products would be too small to use the device well.
        tile_tokens = max(64, LOGITS_ELEMENTS // len(weight))
        token_states = token_states[index]

        if isinstance(buckets, TopTokens):
            top_ids = vocab_parallel_top_tokens(
                token_states, weight, shard, buckets, tile_tokens, support, rules
            )
        else:
            top_ids = buckets
        outputs = vocab_parallel_log_probs(
            token_states,
            weight,
            targets,
            temperature,
            shard,
            chunk_tokens=tile_tokens,
            reduce_hidden_gradient=not sequence_parallel,
            support=support,
            rules=rules,
            top_ids=top_ids,
        )
        if squared_probs:
            # At half the temperature, the probabilities q are the normalised squares of the probabilities p
            # at the full temperature: log q = 2 log p - log sum p^2.
            sharp_log_probs, _ = vocab_parallel_log_probs(
                token_states,
                weight,
                targets,
                temperature / 2,
                shard,
                chunk_tokens=tile_tokens,
                support=support,
                rules=rules,
            )
            log_probs, entropy, *top_outputs = outputs
            outputs = (log_probs, entropy, (2 * log_probs - sharp_log_probs).exp(), *top_outputs)
        if isinstance(buckets, TopTokens):
            assert top_ids is not None
            return (*outputs, top_ids)
        return outputs


def build_model(
    hf_config: Any,
    groups: ParallelGroups,
    *,
    dtype: torch.dtype,
    recompute: str = "none",
    overrides: Mapping[str, Any] | None = None,
    attention: str | None = None,
    head: str = "lm",
    trainable: bool = True,
    seed: int = 1,
    provider: Provider | None = None,
    replays_routing: bool = True,
    adapted: bool = False,
) -> ParallelModel:
    """Build this rank's chunks of the model that ``hf_config`` describes, with random weights.

    ``attention`` is ``transformer_engine``, ``torch``, or None for Transformer Engine if it is installed and
    torch otherwise. ``head`` is ``lm``, or ``value`` for a scalar head in place of the output layer.
    ``overrides`` are TransformerConfig fields that the user has set; ``recompute`` is as in `role_settings`.
    A ``provider`` builds the chunks itself, and their TransformerConfig becomes the model's. Call only on the
    ranks of ``groups``.

    The defaults on an accelerator depend on ``replays_routing`` (whether recorded choices of experts may be
    replayed) and on ``adapted`` (whether the model will have low-rank adapters).
    """
    layout = groups.layout
    if head == "value":
        hf_config = with_scalar_head(hf_config)
    shape = describe_model(hf_config).shape
    fused = attention == "transformer_engine" or (attention is None and has_transformer_engine())
    fused = fused and not shape.needs_plain_layers

    # On an accelerator, fill in defaults. The user's overrides take precedence.
    role = AcceleratedRole(
        shape,
        layout,
        fused=fused,
        half_precision=dtype in (torch.bfloat16, torch.float16),
        capability=device.compute_capability(),
        deterministic=device.needs_deterministic_attention(),
        has_flash_attention=find_spec("flash_attn") is not None,
        replays_routing=replays_routing,
        adapted=adapted,
    )
    core_attention = None
    if not device.on_host():
        explicit: dict[str, Any] = dict(find_earlier_attention_backend())
        if overrides is not None:
            explicit.update(overrides)
        if provider is not None:
            # The user's code may have plain linear layers, which would need Apex.
            explicit.setdefault("gradient_accumulation_fusion", False)
        overrides = accelerator_defaults(role, MEGATRON, explicit)
        core_attention = accelerator_defaults(role, LAYERS).get("core_attention")

    if shape.experts and not fused and device.on_accelerator():
        raise plain_experts_error(shape.name)
    spec = model_spec(
        hf_config,
        layout,
        dtype,
        role_settings(layout, recompute, overrides),
        fused,
    )
    if device.on_host():
        # The fused kernel needs a GPU: ignore the user's setting.
        spec.transformer_config.gradient_accumulation_fusion = False
    if fused:
        require_transformer_engine()
    if provider is not None:
        provider = provider.with_spec(spec)
    provider_config = copy(spec.transformer_config)

    # Weights are random until a checkpoint is loaded; with the same seed replicas start with equal weights.
    chunks = []
    with device.megatron_mode(), allow_plain_output_layer(fused and provider is None):
        device.seed_tensor_parallel(seed, groups.coordinates.tensor)
        for stage in range(layout.virtual_pipeline):
            if provider is None:
                chunk = _build_chunk(spec, groups, stage, fused, core_attention)
            else:
                chunk = provider.build_chunk(spec, groups, stage, provider_config)
            finish_chunk(chunk, spec, seed)
            chunks.append(chunk.to(device.device()))

    for chunk in chunks:
        chunk.requires_grad_(trainable)
    if provider is not None:
        spec = replace(spec, transformer_config=chunks[0].config)
        fused = has_fused_layers(chunks[0])
    return ParallelModel(chunks, list(chunks), groups, spec, fused, provider=provider)


def has_fused_layers(chunk: Any) -> bool:
    """Return whether a chunk has layers of Transformer Engine, whose classes in Megatron begin with TE."""
    return any(type(module).__name__.startswith("TE") for module in chunk.modules())


class ScalarHead(torch.nn.Module):
    """Weight [1, h] of a head with one output per token, replicated over tensor-parallel ranks.

    The weight is initialised as in a ``*ForSequenceClassification`` model of transformers: its standard
    ``deviation`` is the checkpoint's ``initializer_range``. Much smaller initial weights train slowly.
    """

    def __init__(
        self,
        hidden_size: int,
        deviation: float,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) * deviation
        self.weight = torch.nn.Parameter(weight.to(dtype))


def _build_chunk(
    spec: ModelSpec,
    groups: ParallelGroups,
    stage: int,
    fused: bool,
    core_attention: str | None,
) -> GPTModel:
    """Build the chunk of one virtual pipeline ``stage``, before `finish_chunk`.

    ``fused``: whether its layers are Transformer Engine's. ``core_attention`` as in `block_spec`.
    """
    layout = groups.layout
    config = spec.transformer_config

    # Megatron counts layers per virtual stage unless the stage is None.
    vp_stage = None
    if layout.virtual_pipeline > 1:
        vp_stage = stage
    is_last_chunk = stage == layout.virtual_pipeline - 1
    layers: Any = block_spec(
        config,
        fused,
        vp_stage,
        groups.coordinates.pipeline,
        core_attention,
    )

    # Replace the modules of blocks that Megatron's own specs do not cover.
    first_layer = get_transformer_layer_offset(config, vp_stage, groups.coordinates.pipeline)
    options = LayerOptions(config, groups.tensor, fused)
    place_blocks(layers.layer_specs, spec.model.shape, first_layer, options)

    chunk: Any = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        pre_process=groups.is_first_stage and stage == 0,
        post_process=groups.is_last_stage and is_last_chunk,
        parallel_output=True,
        pg_collection=groups.megatron,
        vp_stage=vp_stage,
        **spec.gpt_kwargs,
    )
    # `prepare_latent_attention` sets the rotary embedding of latent attention.
    if not config.multi_latent_attention:
        chunk.rotary_pos_emb = PackedRotaryEmbedding(spec.inverse_frequencies.to(device.device()))
    return chunk


def finish_chunk(
    chunk: Any,
    spec: ModelSpec,
    seed: int,
) -> None:
    """Add to a chunk its scalar head, if any, and the features that Megatron's settings do not express.

    ``seed`` determines the head's initial values.
    """
    spec.finish(chunk)
    if chunk.post_process:
        if spec.model.shape.scalar_head:
            config: Any = spec.transformer_config
            chunk.output_layer = ScalarHead(
                config.hidden_size, config.init_method_std, config.params_dtype, seed
            )
        # The chunk returns hidden states: `token_outputs` projects them in bounded memory.
        chunk.output_layer.forward = _pass_hidden


def _pass_hidden(
    hidden: Tensor,
    weight: Any = None,
    runtime_gather_output: Any = None,
) -> tuple[Tensor, None]:
    """Return the hidden states unchanged; replaces the forward pass of the output layer."""
    return hidden, None
