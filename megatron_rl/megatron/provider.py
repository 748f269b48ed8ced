"""Models that the user's own code builds: called in a role's groups, then fitted to packed rows."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.check.model.megatron_lm import ARGUMENTS
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.arguments import ABSENT
from megatron_rl.megatron.layers import (
    PackedAttention,
    PackedRotaryEmbedding,
    RmsNorm,
    transformer_engine_attention,
)
from megatron_rl.megatron.model_spec import ModelSpec
from megatron_rl.user_code import load_path

GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "_MODEL_PARALLEL_GROUP": "model",
    "_EMBEDDING_GROUP": "embedding",
    "_DATA_PARALLEL_GROUP": "data",
    "_DATA_PARALLEL_GROUP_WITH_CP": "data_context",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "data_context",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tensor_context",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tensor_data_context",
    "_CONTEXT_PARALLEL_GROUP": "context",
    "_EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expert_tensor",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert_tensor_and_expert",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "expert_model",
    "_EXPERT_DATA_PARALLEL_GROUP": "expert_data",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expert_data",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "all",
}
"""Megatron's process-global groups -> those of a role."""
# Newer versions have some of them once more, with the ranks that hold a weight in parts: none here.
GROUPS |= {
    f"{name}{further}": group
    for name, group in GROUPS.items()
    for further in ("_WITH_GTP_REMAT", "_WITH_EGTP")
    if hasattr(parallel_state, f"{name}{further}")
}
_RANKS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tensor",
    "_PIPELINE_GLOBAL_RANKS": "pipeline",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "model",
    "_EMBEDDING_GLOBAL_RANKS": "embedding",
    "_DATA_PARALLEL_GLOBAL_RANKS": "data",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "data_context",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "context",
    "_EXPERT_MODEL_PARALLEL_RANKS": "expert",
}
_COMPARED = frozenset(ABSENT) | {
    "layernorm_zero_centered_gamma", "softmax_scale", "apply_query_key_layer_scaling",
    "yarn_rotary_scaling_factor",
    "virtual_pipeline_model_parallel_size", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
}  # fmt: skip
"""Fields in which a provider's own TransformerConfig must be as expected, beside those that a run states."""
_ITS_OWN = {
    "init_method_std", "bias_activation_fusion", "bias_dropout_fusion", "moe_grouped_gemm",
    "moe_token_dispatcher_type",
}  # fmt: skip
"""Fields that do not change what a model computes from its weights."""
_SCHEDULED = {
    "calculate_per_token_loss", "variable_seq_lengths", "deallocate_pipeline_outputs", "overlap_p2p_comm",
    "batch_p2p_comm", "pipeline_dtype", "recompute_granularity", "recompute_method", "recompute_num_layers",
}  # fmt: skip
"""Fields that the trainer decides, whatever a provider's own TransformerConfig says."""


@dataclass(frozen=True)
class Provider:
    """Hold the user's function that builds a chunk of a model, and what its parameters are called.

    ``names`` has Megatron's own name of a parameter whose module is called otherwise there, both below
    ``decoder.layers.N`` or, outside of layers, whole. ``arguments`` are Megatron-LM's, for code that asks.
    """

    place: str
    function: Callable[..., Any]
    arguments: Namespace
    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, spec: ModelSpec) -> Provider:
        """Return the provider with arguments that say of layout, precision and dropout what the spec does."""
        values = {**vars(self.arguments)}
        values |= {name: getattr(spec.transformer_config, name) for name in spec.stated}
        multiple = values.get("make_vocab_size_divisible_by", 1) * values["tensor_model_parallel_size"]
        values["padded_vocab_size"] = -(-spec.model.shape.vocab // multiple) * multiple
        return replace(self, arguments=Namespace(**values))

    @contextmanager
    def scope(self, groups: ParallelGroups, stage: int | None = None) -> Iterator[None]:
        """Have Megatron's global groups, and Megatron-LM's get_args() where nobody set it, be the role's."""
        held: Any = sys.modules.get("megatron.training.global_vars")
        if held is None or held._GLOBAL_ARGS is not None:
            with global_groups(groups, stage):
                yield
            return
        held._GLOBAL_ARGS = self.arguments
        try:
            with global_groups(groups, stage):
                yield
        finally:
            held._GLOBAL_ARGS = None

    def build(self, spec: ModelSpec, groups: ParallelGroups, stage: int, config: Any) -> Any:
        """Return the chunk of a virtual pipeline stage; raises UserError for what cannot be trained.

        ``config`` is the model's copy of the spec's TransformerConfig, which the provider may use or change.
        """
        layout = groups.layout
        values = (
            groups.is_first_stage and stage == 0,
            groups.is_last_stage and stage == layout.virtual_pipeline - 1,
            stage if layout.virtual_pipeline > 1 else None,
            config,
            groups.megatron,
            self.arguments,
        )
        given = dict(zip(ARGUMENTS, values, strict=True))
        parameters = inspect.signature(self.function).parameters
        asked = {name: value for name, value in given.items() if name in parameters}
        with self.scope(groups, stage), _norms_of_any_layout():
            try:
                chunk = self.function(**asked)
            except Exception as error:  # whatever the user's code raises
                raise UserError(
                    "the model provider raised an error",
                    where=f"model.provider {self.place}",
                    expected=f"a GPTModel for the call with {', '.join(asked)}",
                    got=f"{type(error).__name__}: {error}",
                    fix="correct the provider; it is called in the role's groups, for one pipeline stage",
                ) from error
        check_chunk(chunk, f"model.provider {self.place}", values[0], values[1], spec)
        fit_packed_rows(chunk, spec)
        return chunk


def check_chunk(chunk: Any, place: str, pre_process: bool, post_process: bool, spec: ModelSpec) -> None:
    """Raise UserError for what is no chunk of the model that a spec describes.

    Fields of its TransformerConfig that the trainer decides are set. ``place`` says whose code built it.
    """
    if not isinstance(chunk, torch.nn.Module) or not hasattr(chunk, "decoder"):
        raise UserError(
            "the model provider returned something else than a bare GPTModel",
            where=place,
            expected="a module with decoder.layers, not yet wrapped in Float16Module or DDP",
            got=type(chunk).__name__,
            fix="return the GPTModel itself",
        )
    stages = ("pre_process", "embedding", pre_process), ("post_process", "output_layer", post_process)
    for part, name, wanted in stages:
        if hasattr(chunk, name) != wanted:
            raise UserError(
                f"the model provider does not follow {part}",
                where=place,
                expected=f"{'a' if wanted else 'no'} chunk.{name} where {part} is {wanted}",
                got="none" if wanted else f"chunk.{name}",
                fix=f"pass {part} on to GPTModel",
            )
    config: Any = chunk.config
    dense = {name for name in spec.stated if "expert" in name and not spec.model.shape.experts}
    for name in sorted((_COMPARED | spec.stated) - _ITS_OWN - _SCHEDULED - dense):
        expected, got = getattr(spec.transformer_config, name, None), getattr(config, name, None)
        if expected != got:
            raise UserError(
                "the model is another than config.json and the layout describe",
                where=place,
                expected=f"{name}: {expected}",
                got=f"{name}: {got}",
                fix="correct the code's settings, which a provider is given as `config`, or name the right "
                "config.json",
            )
    # Some layers of Megatron's have copies of it.
    for other in {id(config): config for config in _configs(chunk)}.values():
        for name in _SCHEDULED & vars(other).keys():
            setattr(other, name, getattr(spec.transformer_config, name))


def _configs(chunk: Any) -> Iterator[Any]:
    for module in chunk.modules():
        if isinstance(getattr(module, "config", None), TransformerConfig):
            yield module.config


def load_provider(place: str, names: str | None, arguments: Mapping[str, Any]) -> Provider:
    """Return the provider at ``module:function`` or ``file.py:function``; raises UserError where none is."""
    named = {} if names is None else load_path(names, "model.weights")
    if not isinstance(named, Mapping):
        raise UserError(
            "the names of parameters are no mapping",
            where="model.weights",
            expected='NAMES = {"your name": "Megatron\'s name"}',
            got=f"{names} is a {type(named).__name__}",
            fix="correct it, or name another",
        )
    return Provider(place, load_path(place, "model.provider"), Namespace(**arguments), named)


@contextmanager
def global_groups(groups: ParallelGroups, stage: int | None = None) -> Iterator[None]:
    """Have Megatron's process-global groups be a role's inside the block, for code that asks for them."""
    state: Any = parallel_state
    virtual = groups.layout.virtual_pipeline
    values: dict[str, Any] = {name: getattr(groups, group) for name, group in GROUPS.items()}
    values |= {
        name: dist.get_process_group_ranks(group) if group is not None else None
        for name, group in ((name, getattr(groups, attribute)) for name, attribute in _RANKS.items())
    }
    values["_TENSOR_AND_DATA_PARALLEL_GROUP"] = (
        groups.tensor_data_context if groups.layout.context == 1 else None
    )
    values["_POSITION_EMBEDDING_GLOBAL_RANKS"] = values["_PIPELINE_GLOBAL_RANKS"][:1]
    values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual if virtual > 1 else None
    values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = stage if virtual > 1 else None
    values |= {name: None for name in vars(state) if name.startswith("_MPU_")}
    before = {name: getattr(state, name) for name in values}
    vars(state).update(values)
    try:
        yield
    finally:
        vars(state).update(before)


@contextmanager
def _norms_of_any_layout() -> Iterator[None]:
    """Have Megatron's plain RMS norm, which refuses sequence parallelism, be one that any layout takes."""
    plain = WrappedTorchNorm.__new__

    def make(cls: Any, config: Any, hidden_size: int, *further: Any, eps: float = 1e-5, **more: Any) -> Any:
        if config.normalization != "RMSNorm":
            return plain(cls, config, hidden_size, *further, eps=eps, **more)
        return RmsNorm(config, hidden_size, further[0] if further else eps)

    setattr(WrappedTorchNorm, "__new__", make)
    try:
        yield
    finally:
        setattr(WrappedTorchNorm, "__new__", plain)


def fit_packed_rows(chunk: Any, spec: ModelSpec) -> None:
    """Give Megatron's plain layers and Transformer Engine's attention and rotary angles of packed rows.

    Attention of a user's own stays. Where it stands among Transformer Engine's layers, all of them keep
    theirs, for a chunk is given rows in one form.
    """
    attentions: list[Any] = [getattr(layer, "self_attention", None) for layer in chunk.decoder.layers]
    cores: list[Any] = [getattr(attention, "core_attention", None) for attention in attentions]
    plain = [isinstance(core, DotProductAttention) for core in cores]
    fused = [type(core).__name__ == "TEDotProductAttention" for core in cores]
    whole = bool(fused) and all(fused)
    if not any(plain) and not whole:
        return
    for attention, core in zip(attentions, cores, strict=True):
        if isinstance(core, DotProductAttention):
            attention.core_attention = PackedAttention(
                chunk.config,
                core.layer_number,
                softmax_scale=core.softmax_scale,
                pg_collection=attention.pg_collection,
            )
        elif whole:
            attention.core_attention = transformer_engine_attention()(
                core.config,
                attention.layer_number,
                attention.attn_mask_type,
                attention.attention_type,
                softmax_scale=core.softmax_scale,
                k_channels=core.hidden_size_per_attention_head_k,
                v_channels=core.hidden_size_per_attention_head_v,
                pg_collection=attention.pg_collection,
            )
    if hasattr(chunk, "rotary_pos_emb"):
        place = next(chunk.parameters()).device
        chunk.rotary_pos_emb = PackedRotaryEmbedding(spec.inverse_frequencies.to(place))
