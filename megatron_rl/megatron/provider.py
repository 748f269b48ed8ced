"""Models that the user's own code builds (``model.provider``), in a role's groups and adapted to packed rows.

The user's code may read Megatron's process-global groups and arguments, which are set while the code runs.
The resulting model is checked against config.json and the layout, field by field.
"""

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

from megatron_rl.check.model.megatron_lm import PROVIDER_ARGUMENTS
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.arguments import UNSUPPORTED_ARGUMENTS
from megatron_rl.megatron.layers import (
    PackedAttention,
    PackedRotaryEmbedding,
    RmsNorm,
    transformer_engine_attention,
)
from megatron_rl.megatron.model_spec import ModelSpec
from megatron_rl.shapes.accelerator import CHANGED_FIELDS
from megatron_rl.user_code import load_object

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
"""Megatron's process-global groups -> the role's groups, by attribute of `ParallelGroups`."""
# Megatron-Core 0.19 has variants of some groups, for weights that are stored in shards. They are not used
# here, and equal the plain groups.
GROUPS |= {
    f"{name}{suffix}": group
    for name, group in GROUPS.items()
    for suffix in ("_WITH_GTP_REMAT", "_WITH_EGTP")
    if hasattr(parallel_state, f"{name}{suffix}")
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
"""Megatron's process-global lists of ranks -> the role's groups, by attribute of `ParallelGroups`."""
_COMPARED_FIELDS = frozenset(UNSUPPORTED_ARGUMENTS) | {
    "layernorm_zero_centered_gamma", "softmax_scale", "apply_query_key_layer_scaling",
    "yarn_rotary_scaling_factor",
    "virtual_pipeline_model_parallel_size", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor",
}  # fmt: skip
"""Fields of a provider's TransformerConfig that must equal the spec's, besides `ModelSpec.set_fields`."""
_FIELDS_WITHOUT_EFFECT = CHANGED_FIELDS | {
    "init_method_std", "bias_activation_fusion", "bias_dropout_fusion", "moe_grouped_gemm",
    "moe_token_dispatcher_type",
}  # fmt: skip
"""TransformerConfig fields that do not change what a model computes from its weights."""
_TRAINER_FIELDS = {
    "calculate_per_token_loss", "variable_seq_lengths", "deallocate_pipeline_outputs", "overlap_p2p_comm",
    "batch_p2p_comm", "pipeline_dtype", "recompute_granularity", "recompute_method", "recompute_num_layers",
}  # fmt: skip
"""Fields that the trainer sets, also in a provider's own TransformerConfig."""


@dataclass(frozen=True)
class Provider:
    """Model provider: the user's function that builds a chunk of a model, and the arguments that it may read.

    Example: ``Provider("my_model.py:build", build, Namespace(num_layers=2))``.
    """

    reference: str
    """Path of the function in the configuration, ``module:function`` or ``file.py:function``."""
    function: Callable[..., Any]
    """Function that returns a GPTModel, called with the `PROVIDER_ARGUMENTS` for which it has parameters."""
    arguments: Namespace
    """Megatron-LM's arguments, which the function may read."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The provider's parameter names -> Megatron's names; names in layers omit ``decoder.layers.N.``"""

    def with_spec(self, spec: ModelSpec) -> Provider:
        """Return a copy of the provider whose Megatron-LM arguments equal the settings of a spec."""
        arguments = dict(vars(self.arguments))
        for name in spec.set_fields:
            arguments[name] = getattr(spec.transformer_config, name)

        # Megatron-LM's `vocab_size_with_padding`.
        multiple = arguments.get("make_vocab_size_divisible_by", 1) * arguments["tensor_model_parallel_size"]
        arguments["padded_vocab_size"] = -(-spec.model.shape.vocab // multiple) * multiple
        return replace(self, arguments=Namespace(**arguments))

    @contextmanager
    def scope(
        self,
        groups: ParallelGroups,
        stage: int | None = None,
    ) -> Iterator[None]:
        """Set Megatron's global state for the provider's code inside the block.

        The process-global groups become the role's groups, with ``stage`` as the virtual pipeline stage. If
        Megatron-LM is imported but not initialized, its ``get_args()`` returns the provider's arguments.
        """
        # The module is loaded only if the user's code imports Megatron-LM.
        global_vars: Any = sys.modules.get("megatron.training.global_vars")
        if global_vars is None or global_vars._GLOBAL_ARGS is not None:
            with use_global_groups(groups, stage):
                yield
            return

        global_vars._GLOBAL_ARGS = self.arguments
        try:
            with use_global_groups(groups, stage):
                yield
        finally:
            global_vars._GLOBAL_ARGS = None

    def build_chunk(
        self,
        spec: ModelSpec,
        groups: ParallelGroups,
        stage: int,
        config: Any,
    ) -> Any:
        """Call the user's function for a virtual pipeline stage, and return the checked chunk.

        ``config`` is a copy of the spec's TransformerConfig, which the provider may use or change. Raises
        UserError if the chunk cannot be trained.
        """
        layout = groups.layout
        pre_process = groups.is_first_stage and stage == 0
        post_process = groups.is_last_stage and stage == layout.virtual_pipeline - 1
        vp_stage = None
        if layout.virtual_pipeline > 1:
            vp_stage = stage
        # The values of `PROVIDER_ARGUMENTS`, in this order.
        argument_values = (
            pre_process,
            post_process,
            vp_stage,
            config,
            groups.megatron,
            self.arguments,
        )

        # Pass only the arguments for which the function has parameters.
        parameters = inspect.signature(self.function).parameters
        arguments: dict[str, Any] = {}
        for name, value in zip(PROVIDER_ARGUMENTS, argument_values, strict=True):
            if name in parameters:
                arguments[name] = value

        with self.scope(groups, stage), _replace_plain_norms():
            try:
                chunk = self.function(**arguments)
            except Exception as error:  # the user's code may raise anything
                raise UserError(
                    "the model provider raised an error",
                    where=f"model.provider {self.reference}",
                    expected=f"a GPTModel for the call with {', '.join(arguments)}",
                    got=f"{type(error).__name__}: {error}",
                    fix="correct the provider; it is called in the role's groups, for one pipeline stage",
                ) from error

        check_chunk(chunk, f"model.provider {self.reference}", pre_process, post_process, spec)
        use_packed_attention(chunk, spec)
        return chunk


def check_chunk(
    chunk: Any,
    subject: str,
    pre_process: bool,
    post_process: bool,
    spec: ModelSpec,
) -> None:
    """Raise UserError unless a chunk has the spec's settings; copy the trainer's settings into its configs.

    The trainer's settings are the fields of TransformerConfig that a provider need not set
    (`_TRAINER_FIELDS`). ``pre_process``: whether the chunk must have the embedding. ``post_process``: whether
    it must have the output layer. ``subject`` names the code that built the chunk, for errors.
    """
    if not isinstance(chunk, torch.nn.Module) or not hasattr(chunk, "decoder"):
        raise UserError(
            "the model provider did not return a bare GPTModel",
            where=subject,
            expected="a module with decoder.layers, not yet wrapped in Float16Module or DDP",
            got=type(chunk).__name__,
            fix="return the GPTModel itself",
        )

    # The embedding is in the first chunk of the pipeline, the output layer in the last chunk.
    for argument, module_name, is_expected in (
        ("pre_process", "embedding", pre_process),
        ("post_process", "output_layer", post_process),
    ):
        if hasattr(chunk, module_name) != is_expected:
            article = "no"
            got = f"chunk.{module_name}"
            if is_expected:
                article = "a"
                got = "none"
            raise UserError(
                f"the model provider does not follow {argument}",
                where=subject,
                expected=f"{article} chunk.{module_name} where {argument} is {is_expected}",
                got=got,
                fix=f"pass {argument} on to GPTModel",
            )

    # Settings of experts have no effect on a dense model.
    config: Any = chunk.config
    unused_fields: set[str] = set()
    if not spec.model.shape.experts:
        unused_fields = {name for name in spec.set_fields if "expert" in name}
    compared_fields = (_COMPARED_FIELDS | spec.set_fields) - unused_fields
    compared_fields -= _FIELDS_WITHOUT_EFFECT | _TRAINER_FIELDS
    for name in sorted(compared_fields):
        expected = getattr(spec.transformer_config, name, None)
        got = getattr(config, name, None)
        if expected != got:
            raise UserError(
                "the model differs from the one that config.json and the layout describe",
                where=subject,
                expected=f"{name}: {expected}",
                got=f"{name}: {got}",
                fix="correct the code's settings, which a provider gets as `config`, or name the right "
                "config.json",
            )

    # Some of Megatron's layers have copies of the configuration: set the fields in every copy.
    for module in chunk.modules():
        module_config = getattr(module, "config", None)
        if not isinstance(module_config, TransformerConfig):
            continue
        for name in _TRAINER_FIELDS & vars(module_config).keys():
            setattr(module_config, name, getattr(spec.transformer_config, name))


def load_provider(
    path: str,
    names_path: str | None,
    arguments: Mapping[str, Any],
) -> Provider:
    """Load a provider from ``path``, which is ``module:function`` or ``file.py:function``.

    ``names_path`` is the path of the mapping from the provider's parameter names to Megatron's parameter
    names, in the same format. Raises UserError if one of the objects does not exist.
    """
    names = {}
    if names_path is not None:
        names = load_object(names_path, "model.weights")
    if not isinstance(names, Mapping):
        raise UserError(
            "model.weights is not a mapping of parameter names",
            where="model.weights",
            expected='NAMES = {"your name": "Megatron\'s name"}',
            got=f"{names_path} is a {type(names).__name__}",
            fix="make it a dict, or name another object",
        )

    return Provider(path, load_object(path, "model.provider"), Namespace(**arguments), names)


@contextmanager
def use_global_groups(groups: ParallelGroups, stage: int | None = None) -> Iterator[None]:
    """Set Megatron's process-global groups, in `parallel_state`, to ``groups`` inside the block.

    ``stage`` is the virtual pipeline stage that code inside the block builds, or None.
    """
    state: Any = parallel_state
    virtual_pipeline = groups.layout.virtual_pipeline
    is_interleaved = virtual_pipeline > 1

    # Values by name of the attribute in Megatron's `parallel_state`.
    values: dict[str, Any] = {name: getattr(groups, attribute) for name, attribute in GROUPS.items()}
    for name, attribute in _RANKS.items():
        group = getattr(groups, attribute)
        values[name] = None
        if group is not None:
            values[name] = dist.get_process_group_ranks(group)

    # Megatron has a group of tensor- and data-parallel ranks without context parallelism. `ParallelGroups`
    # has only the group with context parallelism. Without context parallelism both groups have the same
    # ranks.
    values["_TENSOR_AND_DATA_PARALLEL_GROUP"] = None
    if groups.layout.context == 1:
        values["_TENSOR_AND_DATA_PARALLEL_GROUP"] = groups.tensor_data_context
    values["_POSITION_EMBEDDING_GLOBAL_RANKS"] = values["_PIPELINE_GLOBAL_RANKS"][:1]
    values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = None
    values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = None
    if is_interleaved:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = virtual_pipeline
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = stage

    # Clear the variables that would override the sizes and ranks of the groups.
    values |= {name: None for name in vars(state) if name.startswith("_MPU_")}

    original_values = {name: getattr(state, name) for name in values}
    vars(state).update(values)
    try:
        yield
    finally:
        vars(state).update(original_values)


@contextmanager
def _replace_plain_norms() -> Iterator[None]:
    """Replace Megatron's plain norm, which refuses sequence parallelism, by `RmsNorm` inside the block."""
    original_new = WrappedTorchNorm.__new__

    def new_norm(
        cls: Any,
        config: Any,
        hidden_size: int,
        *positional: Any,
        eps: float = 1e-5,
        **keywords: Any,
    ) -> Any:
        if config.normalization != "RMSNorm":
            return original_new(cls, config, hidden_size, *positional, eps=eps, **keywords)
        if positional:
            eps = positional[0]
        return RmsNorm(config, hidden_size, eps)

    setattr(WrappedTorchNorm, "__new__", new_norm)
    try:
        yield
    finally:
        setattr(WrappedTorchNorm, "__new__", original_new)


def use_packed_attention(chunk: Any, spec: ModelSpec) -> None:
    """Replace the core attention and the rotary embedding of Megatron's layers by modules for packed rows.

    Megatron's DotProductAttention is replaced by `PackedAttention`. Transformer Engine's attention is
    replaced by the class of `transformer_engine_attention`, but only if all layers of the chunk have it. If
    the chunk has another attention, such as a class of the user, beside Transformer Engine's, no layer is
    changed: all layers of a chunk receive rows in the same format.
    """
    attentions: list[Any] = [getattr(layer, "self_attention", None) for layer in chunk.decoder.layers]
    cores: list[Any] = [getattr(attention, "core_attention", None) for attention in attentions]
    has_plain_core = any(isinstance(core, DotProductAttention) for core in cores)
    all_fused = bool(cores) and all(type(core).__name__ == "TEDotProductAttention" for core in cores)
    if not has_plain_core and not all_fused:
        return

    for attention, core in zip(attentions, cores, strict=True):
        if isinstance(core, DotProductAttention):
            attention.core_attention = PackedAttention(
                chunk.config,
                core.layer_number,
                softmax_scale=core.softmax_scale,
                pg_collection=attention.pg_collection,
            )
        elif all_fused:
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
        parameter_device = next(chunk.parameters()).device
        chunk.rotary_pos_emb = PackedRotaryEmbedding(spec.inverse_frequencies.to(parameter_device))
