"""Settings that are handed on to Megatron and vLLM as they are, and that no run of this project has tried.

A section such as ``actor.megatron`` takes every field of the installed version that neither the run sets nor
its layers would drop. Most of them were never seen at work here: a warning says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.placement import megatron_sections
from megatron_rl.config.roles import learner_sections
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError

_MEGATRON = """
    apply_rope_fusion attention_dropout attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion
    gradient_accumulation_fusion hidden_dropout moe_grouped_gemm moe_input_jitter_eps moe_router_dtype
    moe_token_dispatcher_type num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    recompute_method"""
_DDP = "bucket_size check_for_nan_in_grad grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather"
_OPTIMIZER = "adam_eps decoupled_weight_decay sgd_momentum use_precision_aware_optimizer"
_VLLM = """
    async_scheduling block_size disable_log_stats enable_chunked_prefill enable_expert_parallel
    enable_prefix_caching enforce_eager kv_cache_memory_bytes max_num_batched_tokens max_num_seqs
    scheduling_policy"""
TRIED: Mapping[str, frozenset[str]] = {
    "megatron": frozenset(_MEGATRON.split()),
    "ddp": frozenset(_DDP.split()),
    "optimizer.megatron": frozenset(_OPTIMIZER.split()),
    "rollout.vllm": frozenset(_VLLM.split()),
}
"""Kind of section -> the fields that tests or campaigns have run with other values than their own."""


def untried_settings(config: RunConfig) -> Iterator[UserError]:
    """Yield a warning for each section with fields that are handed on and have not been tried."""
    sections: dict[str, tuple[str, Mapping[str, Any] | None]] = {
        path: ("megatron", settings) for path, settings in megatron_sections(config).items()
    }
    for path, section in learner_sections(config).items():
        sections[f"{path}.ddp"] = "ddp", section.ddp
        sections[f"{path}.optimizer.megatron"] = "optimizer.megatron", section.optimizer.megatron
    sections["rollout.vllm"] = "rollout.vllm", config.rollout.vllm

    for path, (kind, settings) in sections.items():
        untried = {
            name: value
            for name, value in (settings or {}).items()
            if name not in TRIED[kind] and not is_off(value)
        }
        if untried:
            package = "vLLM" if kind == "rollout.vllm" else "Megatron-Core"
            yield UserError(
                f"{', '.join(untried)} of `{path}` passes to {package} as it is, and was never tried here",
                where=f"{path}.{next(iter(untried))}",
                expected=f"fields that runs of this project have had: {', '.join(sorted(TRIED[kind]))}",
                got=", ".join(f"{name}: {value}" for name, value in untried.items()),
                fix="compare a few steps with and without it: kl/rollout, policy/grad_norm and seconds",
            )


def is_off(value: Any) -> bool:
    """Say whether a value asks for nothing: null, false, 0, "none" or "auto", or no items."""
    return value is None or value in (False, "none", "auto", [], {})
