"""Build one role's share of a GPTModel in the role's own process groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from torch import Tensor

from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.megatron.experts import Routing
from megatron_rl.megatron.latent import fit_latent_spec
from megatron_rl.megatron.layers import (
    PackedRotaryEmbedding,
    RowAttention,
    block_spec,
    require_transformer_engine,
)
from megatron_rl.megatron.log_probs import Support, VocabularyShard, vocab_parallel_log_probs
from megatron_rl.megatron.model_spec import ModelSpec, model_spec, with_scalar_head
from megatron_rl.megatron.packing import pack_for_transformer_engine, pack_rows, pack_whole_rows
from megatron_rl.megatron.provider import Provider
from megatron_rl.megatron.transformer_settings import role_settings
from megatron_rl.shapes.lora import ADAPTER, AdaptedModel
from megatron_rl.shapes.memory import LOGITS_ELEMENTS


class Chunked(Protocol):
    """What any Megatron model has: bare GPTModel chunks and the transformers config."""

    @property
    def chunks(self) -> Sequence[Any]: ...

    @property
    def hf_config(self) -> Any: ...


def live_parameters(model: Chunked) -> dict[str, Tensor]:
    """Return this rank's weights by storage name, ``<chunk>.<parameter name>``, without those of adapters.

    Biases that balance experts are buffers in Megatron, but weights of the checkpoint.
    """
    weights: dict[str, Tensor] = {}
    for index, chunk in enumerate(model.chunks):
        parameters = chunk.named_parameters()
        weights |= {f"{index}.{name}": value.data for name, value in parameters if f".{ADAPTER}." not in name}
        buffers = chunk.named_buffers()
        weights |= {f"{index}.{name}": buffer for name, buffer in buffers if name.endswith(".expert_bias")}
    return weights


def of_experts(name: str) -> bool:
    """Say whether a parameter of Megatron's, by its name, is a routed expert's: other ranks hold it alike."""
    return ".experts." in name


@dataclass
class ParallelModel:
    """Hold this rank's chunks of a model, one per virtual pipeline stage.

    ``wrapped`` are the chunks as the schedule runs them: Megatron's DDP wrappers where the model trains,
    else the chunks themselves. ``routing`` is None where nobody asks which experts tokens go to, ``adapters``
    where every weight is the model's own. Attention of a user's own among Transformer Engine's layers knows
    rows by their boundaries alone, as Megatron gives them (``takes_rows`` is False); a UserError says where
    context parallelism would cut them.
    """

    chunks: list[GPTModel]
    wrapped: list[torch.nn.Module]
    groups: ParallelGroups
    spec: ModelSpec
    uses_transformer_engine: bool
    routing: Routing | None = None
    adapters: AdaptedModel | None = None
    provider: Provider | None = None
    takes_rows: bool = field(init=False)

    def __post_init__(self) -> None:
        modules = [named for chunk in self.chunks for named in chunk.named_modules()]
        cores = [module for name, module in modules if name.endswith(".core_attention")]
        foreign = [core for core in cores if not isinstance(core, RowAttention)]
        self.takes_rows = not (self.uses_transformer_engine and foreign)
        if not self.takes_rows and self.groups.layout.context > 1:
            raise UserError(
                "attention of one's own is given whole rows, which context parallelism cuts",
                where="layout.context",
                expected="1, or Megatron's TEDotProductAttention",
                got=f"context {self.groups.layout.context}, and {type(foreign[0]).__name__}",
                fix="set layout.context=1, or build the layers with TEDotProductAttention",
            )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Call Megatron with this model inside: on any device, and in its groups for a user's own code."""
        groups = nullcontext() if self.provider is None else self.provider.scope(self.groups)
        with device.megatron_mode(), groups:
            yield

    @property
    def names(self) -> Mapping[str, str]:
        """Return Megatron's names of parameters by what the provider calls them."""
        return {} if self.provider is None else self.provider.names

    @property
    def transformer_config(self) -> Any:
        """Return Megatron's configuration of the model."""
        return self.spec.transformer_config

    @property
    def hf_config(self) -> Any:
        """Return the transformers configuration of the model."""
        return self.spec.hf_config

    def freeze(self) -> None:
        """End training: gradient buffers and wrappers go, the weights stay where they are."""
        for wrapped in self.wrapped:
            if getattr(wrapped, "use_forward_hook", False):
                wrapped.disable_forward_pre_hook(param_sync=False)  # pyright: ignore[reportCallIssue]
        self.wrapped = list(self.chunks)
        self.transformer_config.no_sync_func = None
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def watch_routing(self) -> None:
        """Have routers say, and be told, which experts tokens go to; a model without experts has none."""
        config = self.transformer_config
        # Fused routers choose inside their kernel, and Sinkhorn's by other scores.
        asks = not config.moe_router_fusion and config.moe_router_load_balancing_type != "sinkhorn"
        if config.num_moe_experts and asks:
            self.routing = Routing(
                self.chunks, config.num_layers, config.num_moe_experts, config.moe_router_topk
            )

    def freeze_routers(self) -> None:
        """Leave the routers' weights as they are in training; call before the model is wrapped."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if ".mlp.router." in name:
                    parameter.requires_grad_(False)

    @property
    def token_multiple(self) -> int:
        """Return what the tokens of a micro-batch must be a multiple of.

        Context and sequence parallelism cut them into equal shards; matrix products in 8 or 4 bits want a
        multiple of 16 or 32 rows in each.
        """
        config = self.transformer_config
        shards = self.groups.layout.context * (self.groups.layout.tensor if config.sequence_parallel else 1)
        return shards * (get_align_size_for_quantization(config) if config.fp8 or config.fp4 else 1)

    def local_tokens(self, count: int) -> slice:
        """Return which of a micro-batch's ``count`` tokens, padding included, layers work on on this rank."""
        layout, coordinates = self.groups.layout, self.groups.coordinates
        parts, part = layout.context, coordinates.context
        if self.transformer_config.sequence_parallel:
            parts, part = parts * layout.tensor, part * layout.tensor + coordinates.tensor
        return slice(count // parts * part, count // parts * (part + 1))

    def pack(self, lengths: Sequence[int]) -> Any:
        """Return the row boundaries in the form this model's attention takes."""
        if not self.takes_rows:
            return pack_for_transformer_engine(lengths, device.device())
        pack = pack_whole_rows if self.uses_transformer_engine else pack_rows
        return pack(lengths, device.device(), self.groups.coordinates.context, self.groups.layout.context)

    def token_outputs(
        self,
        chunk: GPTModel,
        hidden: Tensor,
        index: Tensor,
        targets: Tensor,
        temperature: Tensor,
        support: Support | None = None,
    ) -> tuple[Tensor, ...]:
        """Return what the head says of tokens, from the last stage's hidden states.

        A language model gives log-prob and entropy [n] of ``targets``, a model with a scalar head one value
        [n]. ``hidden`` [1, T, h] is the chunk's output (a shard of T under sequence parallelism); ``index``
        [n] says whose hidden state speaks for each token, and ``support`` over which tokens its distribution
        is. Collective over the tensor-parallel group.
        """
        states, shape = hidden[0], self.spec.model.shape
        sequence_parallel = self.transformer_config.sequence_parallel
        if sequence_parallel:
            # Each rank applies the whole scalar head, so gradients of its states are equal, not partial.
            states = gather_from_sequence_parallel_region(
                states, tensor_parallel_output_grad=not shape.scalar_head, group=self.groups.tensor
            )
        if shape.scalar_head:
            head: Any = chunk.output_layer
            return (states[index].float() @ head.weight[0].float(),)
        weight: Any = chunk.shared_embedding_or_output_weight() if shape.tied else chunk.output_layer.weight
        start = self.groups.coordinates.tensor * len(weight)
        shard = VocabularyShard(
            start, shape.vocab, self.groups.tensor, self.spec.model.config.get("final_logit_softcapping")
        )
        return vocab_parallel_log_probs(
            states[index],
            weight,
            targets,
            temperature,
            shard,
            chunk=max(64, LOGITS_ELEMENTS // len(weight)),
            reduce_hidden_gradient=not sequence_parallel,
            support=support,
        )


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
) -> ParallelModel:
    """Build this rank's chunks of the model that ``hf_config`` describes, with random weights.

    ``attention`` is ``transformer_engine``, ``torch`` or None for the first that is installed. ``head`` is
    ``lm``, or ``value`` for one number per token in the place of the output layer. A ``provider`` builds
    the chunks, and its settings are the model's.
    Call on member ranks only.
    """
    layout = groups.layout
    if head == "value":
        hf_config = with_scalar_head(hf_config)
    fused = attention == "transformer_engine" or (attention is None and has_transformer_engine())
    spec = model_spec(hf_config, layout, dtype, role_settings(layout, recompute, overrides), fused)
    if device.on_host():
        spec.transformer_config.gradient_accumulation_fusion = False
    fused = fused and not spec.model.shape.plain_layers
    if fused and not device.on_host() and not spec.model.shape.mla:
        spec.transformer_config.apply_rope_fusion = (overrides or {}).get("apply_rope_fusion", True)
    if fused:
        require_transformer_engine()
    coordinates, settings = groups.coordinates, copy(spec.transformer_config)
    provider = None if provider is None else provider.of(spec)
    chunks = []
    with device.megatron_mode():
        device.seed_tensor_parallel(seed, coordinates.tensor)
        for stage in range(layout.virtual_pipeline):
            if provider is None:
                chunk = _build_chunk(spec, groups, stage, fused)
            else:
                chunk = provider.build(spec, groups, stage, settings)
            finish_chunk(chunk, spec, seed)
            chunks.append(chunk.to(device.device()))
    for chunk in chunks:
        chunk.requires_grad_(trainable)
    if provider is not None:
        spec = replace(spec, transformer_config=chunks[0].config)
        fused = has_fused_layers(chunks[0])
    return ParallelModel(chunks, list(chunks), groups, spec, fused, provider=provider)


def has_fused_layers(chunk: Any) -> bool:
    """Say whether a chunk's layers are Transformer Engine's."""
    return any(type(module).__name__.startswith("TE") for module in chunk.modules())


class ScalarHead(torch.nn.Module):
    """Hold the weight [1, h] of a head that gives one number, whole on every tensor-parallel rank.

    It starts as transformers starts the head of a ``*ForSequenceClassification`` model, with the standard
    deviation that the checkpoint's ``initializer_range`` names. Much smaller heads learn late.
    """

    def __init__(self, hidden_size: int, deviation: float, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator) * deviation
        self.weight = torch.nn.Parameter(weight.to(dtype))


def _build_chunk(spec: ModelSpec, groups: ParallelGroups, stage: int, fused: bool) -> GPTModel:
    layout, config = groups.layout, spec.transformer_config
    vp_stage = stage if layout.virtual_pipeline > 1 else None
    last = stage == layout.virtual_pipeline - 1
    layers: Any = block_spec(config, fused, vp_stage, groups.coordinates.pipeline)
    if config.multi_latent_attention:
        for layer in layers.layer_specs:
            fit_latent_spec(layer, groups.tensor)
    chunk: Any = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        pre_process=groups.is_first_stage and stage == 0,
        post_process=groups.is_last_stage and last,
        parallel_output=True,
        pg_collection=groups.megatron,
        vp_stage=vp_stage,
        **spec.gpt_kwargs,
    )
    if not config.multi_latent_attention:
        chunk.rotary_pos_emb = PackedRotaryEmbedding(spec.inverse_frequencies.to(device.device()))
    return chunk


def finish_chunk(chunk: Any, spec: ModelSpec, seed: int) -> None:
    """Give a chunk the head of its model, and what Megatron's settings do not express."""
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
    hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None
) -> tuple[Tensor, None]:
    return hidden, None
