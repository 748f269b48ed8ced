"""Models that the user's own code builds: called in a role's groups, then fitted to packed rows."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_rl.errors import UserError
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.model_spec import ModelSpec
from megatron_rl.parallel.layers import PackedAttention, PackedRotaryEmbedding, RmsNorm
from megatron_rl.user_code import load_module

_GROUPS = {
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
_COMPARED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias",
    "qk_layernorm", "num_moe_experts", "moe_router_topk", "multi_latent_attention", "params_dtype",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "sequence_parallel", "hidden_dropout",
    "attention_dropout",
)  # fmt: skip
"""Fields in which a provider's own TransformerConfig must say what config.json and the layout do."""
_SCHEDULED = (
    "calculate_per_token_loss", "variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm",
    "pipeline_dtype", "recompute_granularity", "recompute_method", "recompute_num_layers",
)  # fmt: skip
"""Fields that the trainer decides, whatever a provider's own TransformerConfig says."""


@dataclass(frozen=True)
class Provider:
    """Hold the user's function that builds a chunk of a model, and what its parameters are called.

    ``names`` has Megatron's own name of a parameter whose module is called otherwise there, both below
    ``decoder.layers.N`` or, outside of layers, whole. ``arguments`` are Megatron-LM's, for code that asks.
    """

    place: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def build(self, spec: ModelSpec, groups: ParallelGroups, stage: int, config: Any) -> Any:
        """Return the chunk of a virtual pipeline stage; raises UserError for what cannot be trained.

        ``config`` is the model's copy of the spec's TransformerConfig, which the provider may use or change.
        """
        layout = groups.layout
        given = {
            "pre_process": groups.is_first_stage and stage == 0,
            "post_process": groups.is_last_stage and stage == layout.virtual_pipeline - 1,
            "vp_stage": stage if layout.virtual_pipeline > 1 else None,
            "config": config,
            "pg_collection": groups.megatron,
            "args": Namespace(**self.arguments),
        }
        parameters = inspect.signature(self.function).parameters
        asked = {name: value for name, value in given.items() if name in parameters}
        _offer_arguments(given["args"])
        with global_groups(groups, stage), _norms_of_any_layout():
            try:
                chunk = self.function(**asked)
            except Exception as error:  # whatever the user's code raises
                raise self._error(
                    "the model provider raised an error",
                    expected=f"a GPTModel for the call with {', '.join(asked)}",
                    got=f"{type(error).__name__}: {error}",
                    fix="correct the provider; it is called in the role's groups, for one pipeline stage",
                ) from error
        self._check(chunk, given, spec)
        return _fitted(chunk, spec)

    def _check(self, chunk: Any, given: Mapping[str, Any], spec: ModelSpec) -> None:
        if not isinstance(chunk, torch.nn.Module) or not hasattr(chunk, "decoder"):
            raise self._error(
                "the model provider returned something else than a bare GPTModel",
                expected="a module with decoder.layers, not yet wrapped in Float16Module or DDP",
                got=type(chunk).__name__,
                fix="return the GPTModel itself",
            )
        for part, name in (("pre_process", "embedding"), ("post_process", "output_layer")):
            if hasattr(chunk, name) != given[part] and not (name == "output_layer" and spec.tied):
                raise self._error(
                    f"the model provider does not follow {part}",
                    expected=f"{'a' if given[part] else 'no'} chunk.{name} where {part} is {given[part]}",
                    got="none" if given[part] else f"chunk.{name}",
                    fix=f"pass {part} on to GPTModel",
                )
        config: Any = chunk.config
        for name in _COMPARED:
            expected, got = getattr(spec.transformer_config, name, None), getattr(config, name, None)
            if expected != got:
                raise self._error(
                    "the provider's model is another than config.json and the layout describe",
                    expected=f"{name}: {expected}",
                    got=f"{name}: {got}",
                    fix="take the `config` that the provider is given, or name the model's own config.json",
                )
        modules = chunk.named_modules()
        others = [path for path, module in modules if getattr(module, "config", config) is not config]
        if others:
            raise self._error(
                "modules of the provider's model have a TransformerConfig of their own",
                expected="the chunk's, in every module",
                got=f"another one in {others[0]}",
                fix="pass the same object on",
            )
        for name in _SCHEDULED:
            if hasattr(config, name):
                setattr(config, name, getattr(spec.transformer_config, name))

    def _error(self, message: str, *, expected: str, got: str, fix: str) -> UserError:
        return UserError(message, where=f"model.provider {self.place}", expected=expected, got=got, fix=fix)

    def unnamed(self, parameter: str, known: list[str]) -> UserError:
        """Return the error of a parameter that corresponds to nothing in the model's checkpoint."""
        return UserError(
            f"nothing says which of the checkpoint's tensors {parameter} holds",
            where=f"model.provider {self.place}",
            expected=f"a parameter called as Megatron's own: {', '.join(known)}",
            got=parameter,
            fix='write a file with NAMES = {"your name": "Megatron\'s name"}, both below decoder.layers.N, '
            "and set model.weights=that_file.py:NAMES",
        )


def load_provider(place: str, names: str | None, arguments: Mapping[str, Any]) -> Provider:
    """Return the provider at ``module:function`` or ``file.py:function``; raises UserError where none is."""
    return Provider(
        place,
        _imported(place, "model.provider"),
        arguments,
        {} if names is None else dict(_imported(names, "model.weights")),
    )


def _imported(place: str, where: str) -> Any:
    module, _, name = place.rpartition(":")
    try:
        return getattr(load_module(module), name)
    except Exception as error:  # whatever the user's code raises
        raise UserError(
            "the user's code cannot be imported",
            where=where,
            expected=f"{name} in {module}",
            got=f"{type(error).__name__}: {error}",
            fix="correct the file, or what it imports",
        ) from error


def _offer_arguments(arguments: Namespace) -> None:
    """Have Megatron-LM's get_args() answer where the provider's file imports it and nobody set arguments."""
    held: Any = sys.modules.get("megatron.training.global_vars")
    if held is not None and held._GLOBAL_ARGS is None:
        held.set_args(arguments)


@contextmanager
def global_groups(groups: ParallelGroups, stage: int | None = None) -> Iterator[None]:
    """Have Megatron's process-global groups be a role's inside the block, for code that asks for them."""
    state: Any = parallel_state
    virtual = groups.layout.virtual_pipeline
    values: dict[str, Any] = {name: getattr(groups, group) for name, group in _GROUPS.items()}
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
    """Have Megatron's plain RMS norm be one that sequence parallelism is right with."""
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


def _fitted(chunk: Any, spec: ModelSpec) -> Any:
    """Give Megatron's plain layers attention and rotary angles of packed rows; others bring their own."""
    plain = False
    for layer in chunk.decoder.layers:
        attention: Any = getattr(layer, "self_attention", None)
        core = getattr(attention, "core_attention", None)
        if isinstance(core, DotProductAttention):
            plain = True
            attention.core_attention = PackedAttention(
                chunk.config, core.layer_number, pg_collection=attention.pg_collection
            )
    if plain and hasattr(chunk, "rotary_pos_emb"):
        place = next(chunk.parameters()).device
        chunk.rotary_pos_emb = PackedRotaryEmbedding(spec.inverse_frequencies.to(place))
    return chunk
