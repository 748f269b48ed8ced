"""Rules on Megatron's own settings: ``megatron``, ``ddp`` and ``optimizer.megatron`` of each role.

A Megatron field is one of three kinds: the run sets it (from a key of this project, or to the only value that
works), it is refused because it has no effect, or it is passed through. Names and types of passed-through
fields are compared with the installed sources.

Then Megatron itself builds the configuration of every role, in a separate process
(`megatron_rl.megatron.trial`) that starts first and is awaited last: importing torch and Megatron takes
longer than all other checks. Fields that need hardware or packages which this machine lacks, such as a GPU,
are not tested and get a warning.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.engine.arguments import has_cpu_build
from megatron_rl.check.installed_source import class_fields, field_error
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.errors import UserError, join_names, requirement_error, unknown_choice_error
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.user_code import find_module

TRANSFORMER_CONFIG = (
    ("megatron.core.model_parallel_config", "ModelParallelConfig"),
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
)
"""Module and name of the classes whose fields ``megatron`` sets; each inherits from its predecessor."""

OPTIMIZER_CONFIG = (("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),)
"""Module and name of the class whose fields ``optimizer.megatron`` sets."""

DDP_CONFIG = (
    ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
)
"""Module and name of the class whose fields ``ddp`` sets."""

TRIAL_COMMAND = [sys.executable, "-m", "megatron_rl.megatron.trial"]
"""Command of the process that validates Megatron's settings."""

TRIAL_TIMEOUT = 30.0
"""Maximum seconds that Megatron's validation of its settings may take, from the start of the check."""

RUN_TRIAL_TIMEOUT = 120.0
"""`TRIAL_TIMEOUT` at the start of a run, when all ranks of a host start at once and share its cores."""

_MODEL_FIELDS = """
    activation_func activation_func_clamp_value gated_linear_unit glu_linear_offset add_bias_linear
    add_qkv_bias attention_output_gate normalization layernorm_epsilon layernorm_zero_centered_gamma
    qk_layernorm qk_l2_norm softmax_scale softmax_type apply_residual_connection_post_layernorm window_size
    window_attn_skip_freq no_rope_freq mrope_section rope_type rotary_base rotary_percent rotary_interleaved
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    moe_layer_freq moe_router_topk moe_router_score_function moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size init_method_std
    heterogeneous_block_specs hetereogenous_dist_checkpoint is_hybrid_model
    experimental_attention_variant linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
    mamba_training_ssm_states_dtype use_mamba_mem_eff_path dsa_indexer_head_dim dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk
    dsa_indexer_topk_freq dsa_indexer_use_sparse_loss dsa_kernel_backend"""
"""Fields of TransformerConfig that follow from config.json, in Megatron-Core 0.16.1 and 0.19.2."""

DERIVED_FIELDS: Mapping[str, str] = {
    "tensor_model_parallel_size": "actor.layout.tensor",
    "pipeline_model_parallel_size": "actor.layout.pipeline",
    "virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline",
    "context_parallel_size": "actor.layout.context",
    "expert_model_parallel_size": "actor.layout.expert",
    "expert_tensor_parallel_size": "actor.layout.expert_tensor",
    "sequence_parallel": "actor.layout.sequence_parallel",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            *_MODEL_FIELDS.split(),
        ),
        "model.path",
    ),
    "transformer_impl": "model.attention",
    "deterministic_mode": "deterministic",
}
"""Field of TransformerConfig -> key of the configuration from which it follows."""

ROUTER_LOSSES = ("moe_z_loss_coeff", "moe_aux_loss_coeff")
"""Fields with the coefficients of the routers' auxiliary losses (z-loss and load balancing)."""

_LAYOUT_DEPENDENT: Mapping[str, str] = {
    "aux_loss": "it balances the tokens of each micro-batch",
    "global_aux_loss": "it balances the micro-batches so far",
}
"""Balancing loss of Megatron whose value depends on the layout or the micro-batches -> the reason."""

_BALANCED_BY = "moe_router_load_balancing_type"
SEQUENCE_BALANCE = "seq_aux_loss"
"""Megatron's name of the balancing loss per sequence, the only one with the same value in every layout."""

SET_BY_RUN: Mapping[str, str] = {
    "calculate_per_token_loss": "losses are sums with global weights, whose denominators are known before",
    "variable_seq_lengths": "packed micro-batches differ in length",
    "overlap_p2p_comm": "interleaved schedules give wrong results without it",
    "batch_p2p_comm": "interleaved schedules give wrong results with it",
    "deallocate_pipeline_outputs": "interleaved schedules would free tensors that are still being sent",
    "pipeline_model_parallel_layout": "uneven pipeline stages are set by "
    "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, which weight syncs follow",
}
"""Further field of TransformerConfig that the run sets itself -> the reason."""

_DROPPED_BY_REASON: Mapping[str, str] = {
    "context parallelism has one implementation, which gathers keys and values around attention": """
        cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel
        max_seqlen_per_dp_cp_rank""",
    "layers for multi-token prediction are not built, and exported unchanged": """
        mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_detach_heads mtp_grad_scale_func
        mtp_hybrid_override_pattern mtp_use_repeated_layer""",
    "the buffers for it are made by Megatron-LM's own training script": """
        tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bulk_dgrad tp_comm_bulk_wgrad
        tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend""",
    "a graph has fixed shapes, and packed micro-batches differ in length": """
        enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_modules
        delay_offload_until_cuda_graph moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size""",
    "the rollout engine samples, and Megatron does not": """
        flash_decode cache_mla_latents inference_fuse_tp_communication inference_rng_tracker
        inference_sampling_seed use_inference_optimized_layers symmetric_ar_type mlp_chunks_for_prefill
        inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill""",
    "log-probs are computed by this project's own kernels, without a cross entropy": """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit""",
    "actor.routing_replay decides what routers replay": "moe_enable_routing_replay",
    "weights come from a checkpoint": """
        init_method output_layer_init_method embedding_init_method embedding_init_method_std
        perform_initialization use_cpu_initialization init_model_with_meta_device use_mup
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult
        mup_width_mult""",
    "the schedule sets its own functions and timers": """
        grad_scale_func no_sync_func grad_sync_func param_sync_func finalize_model_grads_func timers
        barrier_with_L1_time moe_grad_scale_func experimental_attention_variant_loss_scale_func""",
    "only Megatron-LM's own training script uses it, after each step": """
        qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit moe_per_layer_logging""",
    "a forward and a backward pass that overlap need a plan of each layer, which steps here do not have": """
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream""",
    "weights are stored as checkpoints have them, which weight syncs and exports follow": """
        moe_use_legacy_grouped_gemm moe_extended_tp moe_single_grouped_weight moe_single_grouped_bias
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size use_grouped_gemm_for_dense_mlp
        use_grouped_gemm_for_shared_expert mla_down_proj_fusion fp8_param fp4_param""",
    "a layout has no groups of ranks that share one weight in parts": """
        gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards
        expert_tensor_parallel_num_weight_shards""",
    "the job makes its own groups of ranks, over NCCL": "pipeline_model_parallel_comm_backend",
    "no release of PyTorch has that exchange": "use_ring_exchange_p2p",
    "it takes an object of Python, which a configuration cannot name": """
        quant_recipe _cpu_offloading_context fp8_quantizer_factory fp4_quantizer_factory""",
    "models are computed in model.dtype, without automatic casts": "enable_autocast autocast_dtype",
}
DROPPED: Mapping[str, str] = {
    name: reason for reason, names in _DROPPED_BY_REASON.items() for name in names.split()
}
"""Field of TransformerConfig that is refused because it would have no effect -> the reason."""

OPTIMIZER_KEYS: Mapping[str, str] = {
    "optimizer": "name",
    "lr": "learning_rate",
    "min_lr": "minimum_learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "epsilon",
    "clip_grad": "clip_grad",
    "use_distributed_optimizer": "distributed",
    "optimizer_cpu_offload": "offload",
}
"""Field of Megatron's OptimizerConfig -> the key of the section ``optimizer`` that sets it."""

OPTIMIZER_SET: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "fp16", "params_dtype"), "it follows from `model.dtype`"),
    "overlap_param_gather": "it follows from the role's `ddp`",
    "overlap_param_gather_with_optimizer_step": "weights are read as soon as a step is done",
    "optimizer_offload_fraction": "with `offload` all states are on the host, without it none",
    **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "all weights have one learning rate"),
    **dict.fromkeys(("timers", "barrier_with_L1_time"), "the step has its own timers"),
    **dict.fromkeys(("fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"), "weights of 8 bits are not synced"),
    "log_num_zeros_in_grad": "a step reports only the norm of its gradients",
    "optimizer_cuda_graph": "a graph would hold states that are moved to the host between phases",
    "use_layer_wise_distributed_optimizer": "checkpoints follow the distributed optimizer's buffers",
}
"""Field of Megatron's OptimizerConfig -> why the run sets it."""

_OVERLAPPED_PASSES = "a forward and a backward pass that overlap need a plan of each layer"
_NO_FP8 = "weights of 8 bits or fewer are not synced"
_NO_FSDP = "Megatron-FSDP stores weights in separate buffers, which weight syncs and checkpoints do not read"
_FSDP_FIELDS = """
    data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer fsdp_manual_registration
    fsdp_all_gather_in_start_param_sync fsdp_db_use_persist_buf_on_alloc_fail preserve_fp32_weights
    disable_symmetric_registration megatron_fsdp_cuda_graph_mode
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
    megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer
    megatron_fsdp_use_decoupled_grad"""
DDP_SET: Mapping[str, str] = {
    "use_distributed_optimizer": "it follows from `optimizer.distributed`",
    "average_in_collective": "loss weights are global already, and gradients are sums",
    "align_param_gather": "the forward pass of each stage gathers its own",
    "num_distributed_optimizer_instances": "a layout has one group of data-parallel ranks",
    "fp8_param_gather": _NO_FP8,
    "reuse_grad_buf_for_mxfp8_param_ag": _NO_FP8,
    "use_megatron_fsdp": _NO_FSDP,
    "use_custom_fsdp": _NO_FSDP,
    "fp4_param_gather": _NO_FP8,
    "keep_fp8_transpose_cache": _NO_FP8,
    "delay_wgrad_compute": _OVERLAPPED_PASSES,
    **dict.fromkeys(_FSDP_FIELDS.split(), _NO_FSDP),
}
"""Field of Megatron's DistributedDataParallelConfig -> why the run sets it."""

TRANSFORMER_ENGINE = "Transformer Engine"
GPU = "a GPU"
DEEP_EP = "DeepEP or HybridEP"
KITCHEN = "nvidia-kitchen"
EMERGING_OPTIMIZERS = "emerging_optimizers"
_PACKAGES = {
    TRANSFORMER_ENGINE: "transformer_engine",
    KITCHEN: "nvidia_kitchen",
    EMERGING_OPTIMIZERS: "emerging_optimizers",
    DEEP_EP: "deep_ep",
}
"""Requirement -> module that meets it. `GPU` has no module: it needs a torch build for accelerators."""

_FIELDS_BY_NEED: Mapping[str, str] = {
    TRANSFORMER_ENGINE: """
        attention_backend flash_attention_version gradient_accumulation_fusion apply_rope_fusion
        fused_single_qkv_rope moe_permute_fusion moe_router_fusion moe_grouped_gemm use_te_activation_func
        use_te_rng_tracker use_transformer_engine_op_fuser fused_residual_rmsnorm
        use_fused_weighted_squared_relu disable_parameter_transpose_cache batch_invariant_mode fp8
        fp8_recipe fp8_wgrad fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo
        fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj tp_only_amax_red
        activation_func_fp8_input_store first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 fp4 fp4_recipe moe_router_padding_for_fp8
        moe_router_padding_for_quantization use_precision_aware_optimizer store_param_remainders
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype""",
    GPU: """
        batch_p2p_sync cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        activation_offload_fraction delta_offload_bytes_across_pp_ranks
        fine_grained_offloading_max_inflight_offloads moe_shared_expert_overlap memory_efficient_layer_norm
        persist_layer_norm masked_softmax_fusion disable_bf16_reduced_precision_matmul
        pin_cpu_grads pin_cpu_params overlap_cpu_optimizer_d2h_h2d
        nccl_ub reduce_scatter_with_fp32_accumulation pad_buckets_for_high_nccl_busbw
        suggested_communication_unit_size""",
    DEEP_EP: """
        moe_enable_deepep moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_pad_uneven_dispatch_inputs
        moe_permute_fusion_into_hybridep moe_ncclep_static_shape moe_ncclep_zero_copy""",
    KITCHEN: "use_kitchen use_kitchen_attention kitchen_attention_backend",
    EMERGING_OPTIMIZERS: """
        muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_nesterov
        muon_use_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode
        adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method lion_beta1 lion_beta2
        soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo""",
}
NEEDS: Mapping[str, str] = {name: need for need, names in _FIELDS_BY_NEED.items() for name in names.split()}
"""Field of one of Megatron's classes -> requirement without which it has no effect and cannot be tested."""


_PRECISION_AWARE = "use_precision_aware_optimizer"
_STATE_DTYPES = frozenset({"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"})
"""Fields that Megatron refuses without `_PRECISION_AWARE`, on any machine."""

ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
"""Names of the members of Megatron's enumeration AttnBackend."""


def _is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it."""
    _, missing_module = find_module(module)
    return not missing_module


def untestable_fields(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the Megatron fields that cannot be validated on this machine, since a requirement is missing.

    The result maps each field to the requirement, such as a GPU or Transformer Engine. ``values`` are the
    fields of a section.
    """
    need_by_field: dict[str, str] = {}
    for name, value in values.items():
        need = NEEDS.get(name)
        if need is None or is_off(value):
            continue

        # Without `_PRECISION_AWARE`, Megatron refuses these dtypes on every machine, also on this one.
        if name in _STATE_DTYPES and not values.get(_PRECISION_AWARE):
            continue

        if need == GPU:
            # The CPU build of torch or vLLM cannot use a GPU.
            is_missing = has_cpu_build()
        else:
            is_missing = not _is_installed(_PACKAGES[need])
        if is_missing:
            need_by_field[name] = need
    return need_by_field


def _select_testable_settings(values: Mapping[str, Any], training: bool) -> dict[str, Any]:
    """Return the settings that Megatron can validate on this machine.

    At the start of a run (``training``) all settings are returned.
    """
    if training:
        return dict(values)
    unmet_need_by_field = untestable_fields(values)
    return {name: value for name, value in values.items() if name not in unmet_need_by_field}


def is_off(value: Any) -> bool:
    """Return whether a value switches its feature off: null, false, 0, "none", "auto", or no items."""
    return value is None or value in (False, "none", "auto", [], {})


def check_model_settings(
    values: Mapping[str, Any],
    path: str = "actor.megatron",
    *,
    on_other_machines: bool = False,
) -> list[UserError]:
    """Return the errors for a role's settings of Megatron's TransformerConfig, at the key ``path``.

    ``on_other_machines``: whether the run will be on other machines than this one.
    """
    # Megatron's fields that the run sets itself -> the key to use instead. `DERIVED_FIELDS` has the actor's
    # keys: replace the section ``actor.layout`` by the layout of this role.
    section = path.removesuffix("megatron")
    key_by_field: dict[str, str] = {}
    for name, key in DERIVED_FIELDS.items():
        key_by_field[name] = key.replace("actor.layout", f"{section}layout")
    key_by_field["pipeline_model_parallel_layout"] = f"{path}.num_layers_in_first_pipeline_stage"
    key_by_field["recompute_granularity"] = "actor.recompute"

    # A dropped field is a field that has no effect in this package. It gets one error below, so do not check
    # it here.
    dropped_names = {name for name, value in values.items() if name in DROPPED and not is_off(value)}
    effective_values = {name: value for name, value in values.items() if name not in dropped_names}
    errors = _megatron_field_errors(effective_values, path, TRANSFORMER_CONFIG, key_by_field, SET_BY_RUN)
    if not errors:
        errors += _router_loss_errors(effective_values, path)

    for name in sorted(dropped_names):
        errors.append(
            UserError(
                f"`{path}.{name}` would have no effect: {DROPPED[name]}",
                where=f"{path}.{name}",
                expected="no value",
                got=f"`{name}: {values[name]}`",
                fix=f"remove `{path}.{name}`",
            )
        )

    # Without Transformer Engine, Megatron's layers accept fp8 and fp4, but compute in the model's own dtype.
    low_precision_fields = [name for name in ("fp8", "fp4") if not is_off(values.get(name))]
    if low_precision_fields and not on_other_machines and not _is_installed("transformer_engine"):
        for name in low_precision_fields:
            errors.append(
                requirement_error(
                    f"{path}.{name}",
                    values[name],
                    "Transformer Engine: only its layers compute in that format",
                    got="no installed transformer_engine",
                    fix=f"install it as launch/setup.sh --gpu does, or remove `{path}.{name}`",
                )
            )

    backend = values.get("attention_backend")
    if backend is not None and backend not in ATTENTION_BACKENDS:
        errors.append(unknown_choice_error(f"{path}.attention_backend", backend, ATTENTION_BACKENDS))
    return errors


def _router_loss_errors(values: Mapping[str, Any], path: str) -> Iterator[UserError]:
    """Yield the errors for the routers' auxiliary losses in the Megatron settings ``values`` at ``path``.

    The types of ``values`` must be valid.
    """
    coefficients = {name: values[name] for name in ROUTER_LOSSES if not is_off(values.get(name))}
    for name, coefficient in coefficients.items():
        if path != "actor.megatron":
            yield UserError(
                f"`{path}.{name}` has no effect: only the actor's routers have auxiliary losses",
                where=f"{path}.{name}",
                expected="no value",
                got=str(coefficient),
                fix=f"remove `{path}.{name}`",
            )
        elif isinstance(coefficient, list) or coefficient < 0:
            yield UserError(
                f"`{path}.{name}` is not a coefficient",
                where=f"{path}.{name}",
                expected="one number of at least 0",
                got=str(coefficient),
                fix=f"set `{path}.{name}` to the coefficient",
            )
            return

    # The balancing loss must not depend on the layout.
    balancing_type = values.get(_BALANCED_BY, "none")
    if "moe_aux_loss_coeff" in coefficients and balancing_type != SEQUENCE_BALANCE:
        reason = _LAYOUT_DEPENDENT.get(str(balancing_type), f"no loss is called {balancing_type}")
        yield UserError(
            f"`{path}.moe_aux_loss_coeff` needs the balancing loss of each sequence",
            where=f"{path}.{_BALANCED_BY}",
            expected=f"{SEQUENCE_BALANCE}, which depends on neither the layout nor the micro-batches",
            got=f"{balancing_type}: {reason}",
            fix=f"set `{path}.{_BALANCED_BY}` to {SEQUENCE_BALANCE}, or remove `{path}.moe_aux_loss_coeff`",
        )

    # Either setting selects routing code to which Megatron does not attach the auxiliary losses.
    for name, excluded in (("moe_router_fusion", True), (_BALANCED_BY, "sinkhorn")):
        if coefficients and values.get(name) == excluded:
            yield UserError(
                f"`{path}.{name}` excludes losses of routers",
                where=f"{path}.{name}",
                expected=f"another value with {join_names([*coefficients], len(coefficients))}",
                got=str(excluded).lower(),
                fix=f"remove `{path}.{name}`, or the coefficients of the losses",
            )


def check_optimizer(
    optimizer: OptimizerConfig, path: str, ddp: Mapping[str, Any], *, on_other_machines: bool = False
) -> Iterator[UserError]:
    """Yield the errors for the optimizer at the key ``path``, and for the ``ddp`` settings of its role.

    ``on_other_machines`` is whether the run will be on other machines.
    """
    ddp_path = f"{path.removesuffix('.optimizer')}.ddp"
    key_by_field = {name: f"{path}.{key}" for name, key in OPTIMIZER_KEYS.items()}
    optimizer_path = f"{path}.megatron"
    yield from _megatron_field_errors(
        optimizer.megatron,
        optimizer_path,
        OPTIMIZER_CONFIG,
        key_by_field,
        OPTIMIZER_SET,
    )
    yield from _megatron_field_errors(ddp, ddp_path, DDP_CONFIG, {}, DDP_SET)

    # Combinations of optimizer features that exclude each other.
    if optimizer.offload:
        yield from _host_optimizer_errors(optimizer, path)
    elif optimizer.name == "sgd" and optimizer.distributed:
        yield UserError(
            "Megatron-Core's distributed optimizer saves only the state of Adam",
            where=f"{path}.distributed",
            expected="false with name: sgd",
            got="true",
            fix=f"set {path}.distributed to false",
        )

    # Features that require a package or another setting.
    needs_fused_adam = optimizer.megatron.get(_PRECISION_AWARE) and not optimizer.offload
    if needs_fused_adam and not on_other_machines and not _is_installed("transformer_engine"):
        yield requirement_error(
            f"{optimizer_path}.{_PRECISION_AWARE}",
            "true",
            "Transformer Engine's FusedAdam, whose state has fewer bits",
            got="no installed transformer_engine",
            fix="install it, or remove the setting",
        )

    reduces_in_backward = optimizer.distributed and ddp.get("overlap_grad_reduce", True)
    if ddp.get("overlap_param_gather") and not reduces_in_backward:
        yield requirement_error(
            f"{ddp_path}.overlap_param_gather",
            "true",
            "a distributed optimizer whose gradients are reduced in the backward pass (overlap_grad_reduce)",
            got="gradients that are reduced after it",
            fix=f"remove `{ddp_path}.overlap_param_gather`",
        )


def _host_optimizer_errors(optimizer: OptimizerConfig, path: str) -> Iterator[UserError]:
    """Yield the errors for settings that cannot be combined with ``offload``, an optimizer on the CPU.

    `megatron_rl.megatron.optimizer` implements only one optimizer that steps on the CPU: the distributed
    AdamW with float32 states.
    """
    conflicts: list[tuple[str, Any, str]] = []  # setting, its value, the expected value
    if optimizer.name != "adam":
        conflicts.append(("name", optimizer.name, "adam"))
    if not optimizer.distributed:
        conflicts.append(("distributed", "false", "true (even with one data-parallel rank)"))
    if optimizer.megatron.get(_PRECISION_AWARE) is True:
        conflicts.append((f"megatron.{_PRECISION_AWARE}", True, "no value"))
    if optimizer.megatron.get("decoupled_weight_decay") is False:
        conflicts.append(("megatron.decoupled_weight_decay", False, "no value"))

    for setting, value, expected in conflicts:
        yield UserError(
            "the optimizer that steps on the host is the distributed one: AdamW with float32 states",
            where=f"{path}.{setting}",
            expected=f"{expected}, with {path}.offload",
            got=str(value),
            fix=f"remove `{path}.{setting}`, or set {path}.offload=false",
        )


def check_routing(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    """Yield the errors for router settings of a model without experts, and for unsupported routing replay."""
    actor = config.actor
    key = "actor.routing_replay"
    replay = actor.routing_replay

    # A dense model has no router to configure.
    if not shape.experts:
        router_settings: dict[str, str] = {}
        if replay != "none":
            router_settings[key] = replay
        if actor.freeze_router:
            router_settings["actor.freeze_router"] = "true"
        for path, value in router_settings.items():
            yield UserError(
                "a model without experts has no routers",
                where=path,
                expected="a mixture of experts",
                got=f"{value}, and {shape.name} without experts",
                fix=f"remove `{path}`",
            )
        return
    if replay == "none":
        return

    # The kernels of the fused and the Sinkhorn router choose the experts, and accept no replayed choice.
    excluding_setting = None
    if actor.megatron.get("moe_router_fusion"):
        excluding_setting = "moe_router_fusion"
    elif actor.megatron.get("moe_router_load_balancing_type") == "sinkhorn":
        excluding_setting = "moe_router_load_balancing_type"
    if excluding_setting is not None:
        yield UserError(
            "fused and Sinkhorn routers cannot replay choices: their kernel chooses the experts itself",
            where=f"actor.megatron.{excluding_setting}",
            expected=f"no fused or Sinkhorn routers with {key}",
            got=f"{actor.megatron[excluding_setting]} with {key}: {replay}",
            fix=f"remove actor.megatron.{excluding_setting}, or set {key}=none",
        )
    elif replay == "rollout" and not config.rollout.capabilities.routing_replay:
        engines = engines_with(routing_replay=True)
        yield requirement_error(
            key,
            replay,
            f"{engines}, which returns the experts of each token",
            got=f"rollout.engine={config.rollout.engine}",
            fix=f"set {engines}, or {key}=update",
        )


def _megatron_field_errors(
    values: Mapping[str, Any],
    path: str,
    classes: Sequence[tuple[str, str]],
    key_by_field: Mapping[str, str],
    reason_by_field: Mapping[str, str],
) -> list[UserError]:
    """Return the errors for configured fields that a run passes to Megatron-Core unchanged.

    A field is refused if the run sets the field itself, if the installed Megatron-Core does not have the
    field, or if the value has the wrong type.

    ``values`` are the fields at the key ``path``, and ``classes`` the (module, name) of the classes that have
    the fields, the most derived class last. ``key_by_field`` maps fields to the configuration key that sets
    them, and ``reason_by_field`` to the reason why the run sets them.
    """
    # Parse the installed sources only if there is a field to compare: most sections are empty.
    installed_fields = class_fields(*classes) if values else None
    class_name = f"Megatron-Core's {classes[-1][1].removeprefix('MLA')}"

    errors: list[UserError] = []
    for name, value in values.items():
        key = key_by_field.get(name)
        reason = reason_by_field.get(name)
        if reason is None and key is not None:
            reason = f"it is called `{key}` here"
        if reason is not None:
            errors.append(_set_by_run_error(f"{path}.{name}", name, value, reason, key))
        elif installed_fields is not None:
            known_fields = installed_fields
            if name not in installed_fields:
                # The error suggests the nearest field: leave out the fields that are not passed through.
                refused_names = {*key_by_field, *reason_by_field, *DROPPED}
                known_fields = {
                    field: installed_fields[field] for field in installed_fields if field not in refused_names
                }
            error = field_error(path, name, value, known_fields, class_name)
            if error is not None:
                errors.append(error)
    return errors


def _set_by_run_error(path: str, name: str, value: Any, reason: str, key: str | None) -> UserError:
    """Return the error for the field at ``path``, which the run sets itself.

    ``key`` is the configuration key with the value of the field, or None for a fixed value.
    """
    expected = "no value"
    fix = f"remove `{path}`"
    if key is not None:
        expected = f"`{key}`"
        fix = f"write `{key}`"
    message = f"`{path}` is set by the run itself: {reason}"
    return UserError(message, where=path, expected=expected, got=f"`{name}: {value}`", fix=fix)


@dataclass(frozen=True)
class TrialRole:
    """Role whose Megatron configuration `Trial` builds.

    Example: the critic with the model ``models/8b/config.json`` and settings at ``critic.megatron``.
    """

    role: str
    """Name of the role."""
    model: Path
    """The config.json of the role's model."""
    layout: ParallelLayout
    """Parallel layout of the role."""
    scalar_head: bool
    """Whether the model has a scalar output instead of logits over tokens."""
    recompute: str
    """The role's ``recompute`` setting."""
    fused: bool
    """Whether the model's layers are Transformer Engine's."""
    settings_key: str
    """Key of the role's Megatron settings, such as ``actor.megatron``."""
    settings: Mapping[str, Any]
    """The role's Megatron settings."""
    optimizer: OptimizerConfig | None
    """The role's optimizer, or None for a role that is not trained."""
    ddp: Mapping[str, Any]
    """The role's settings of Megatron's DDP."""

    def build_request(self, dtype: str, training: bool) -> dict[str, Any]:
        """Return the role's settings as a request to `megatron_rl.megatron.trial`.

        Fields that cannot be tested on this machine are left out, except at the start of a run
        (``training``).
        """
        optimizer = None
        if self.optimizer is not None:
            optimizer = dataclasses.asdict(self.optimizer)
            optimizer["megatron"] = _select_testable_settings(self.optimizer.megatron, training)

        return {
            "role": self.role,
            "model": str(self.model),
            "layout": dataclasses.asdict(self.layout),
            "scalar_head": self.scalar_head,
            "recompute": self.recompute,
            "fused": self.fused,
            "dtype": dtype,
            "overrides": _select_testable_settings(self.settings, training),
            "optimizer": optimizer,
            "ddp": _select_testable_settings(self.ddp, training),
        }

    def refusal_errors(self, refusals: Mapping[str, str]) -> Iterator[UserError]:
        """Yield the errors for settings of this role that Megatron refuses.

        ``refusals`` is the result of the validation: refused component -> Megatron's message. A component is
        ``ROLE ddp``, ``ROLE optimizer``, or ``ROLE`` for the role's model.
        """
        message = refusals.get(self.role)
        if message is not None:
            yield self._refusal_error("model", message, self.settings_key, self.settings)

        section = self.layout.path.removesuffix("layout")
        message = refusals.get(f"{self.role} ddp")
        if message is not None:
            yield self._refusal_error("DDP", message, f"{section}ddp", self.ddp)

        message = refusals.get(f"{self.role} optimizer")
        if self.optimizer is not None and message is not None:
            path = f"{section}optimizer.megatron"
            yield self._refusal_error("optimizer", message, path, self.optimizer.megatron)

    def _refusal_error(self, component: str, message: str, path: str, values: Mapping[str, Any]) -> UserError:
        """Return the error for Megatron's ``message`` about one of the ``values`` at the key ``path``.

        ``component`` is the refused part of the role: "model", "DDP" or "optimizer".
        """
        # Megatron's message usually names the field.
        fields = [name for name in values if name in message or len(values) == 1]
        key = path
        fix = f"correct or remove one of {', '.join(values)}"
        if fields:
            key = f"{path}.{fields[0]}"
            fix = f"correct or remove `{key}`"

        return UserError(
            f"Megatron refuses the settings of the {self.role}'s {component}",
            where=key,
            expected=f"values that fit the model and {self.layout.path}: {self.layout.text()}",
            got=message,
            fix=fix,
        )


class Trial:
    """Separate process in which Megatron validates the configurations of all roles by building them.

    The constructor starts the process. ``setting_keys`` are the keys of all Megatron settings. Without keys
    no process is started. ``time_limit`` is in seconds from the start of the process.
    """

    def __init__(self, setting_keys: list[str], time_limit: float) -> None:
        self._setting_keys = setting_keys
        self._time_limit = time_limit
        self._start = time.monotonic()
        self._process: subprocess.Popen[str] | None = None

        # Without torch or Megatron, the process is not started: `wait_for_result` returns a warning that
        # names the missing package.
        self._missing_package: str | None = None
        for package in ("torch", "megatron.core"):
            if not _is_installed(package):
                self._missing_package = package
                break

        # Start the process now: it imports torch and Megatron while `check` applies its other rules.
        if setting_keys and self._missing_package is None:
            self._process = subprocess.Popen(
                TRIAL_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def wait_for_result(
        self,
        roles: list[TrialRole],
        dtype: str,
        training: bool,
    ) -> tuple[list[UserError], list[UserError]]:
        """Wait for the process in which Megatron validates the settings, and return its errors and warnings.

        Each setting that Megatron refuses is an error. A process without a result is one warning.
        ``training`` is whether the run itself starts now (`train`). Then all settings are validated. For
        `check`, settings that need a package or hardware that this machine lacks are omitted.
        """
        if not self._setting_keys:
            return [], []
        if self._process is None:
            return [], [self._not_tried_warning(f"{self._missing_package} is not installed here")]

        # The process has been running since the constructor, so subtract that time from the limit.
        request = json.dumps([role.build_request(dtype, training) for role in roles])
        elapsed = time.monotonic() - self._start
        timeout = max(0.1, self._time_limit - elapsed)
        try:
            stdout, stderr = self._process.communicate(request, timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            reason = f"Megatron did not answer within {self._time_limit:g} seconds"
            return [], [self._not_tried_warning(reason)]

        # A failed process is only a warning, since `train` builds the same configurations.
        if self._process.returncode != 0:
            _, _, last_line = stderr.strip().rpartition("\n")
            return [], [self._not_tried_warning(last_line or "the process died")]
        try:
            refusals = json.loads(stdout)
        except ValueError:  # the output is not JSON, such as the message of an imported package
            return [], [self._not_tried_warning(f"malformed answer: {stdout[:80]!r}")]

        errors: list[UserError] = []
        for role in roles:
            errors.extend(role.refusal_errors(refusals))
        return errors, []

    def stop(self) -> None:
        """End the process if it still runs, without waiting for a result."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _not_tried_warning(self, reason: str) -> UserError:
        """Return the warning that Megatron has not validated the settings, for the given ``reason``."""
        return UserError(
            f"the values of {', '.join(self._setting_keys)} were not tried",
            where=self._setting_keys[0],
            expected="torch and megatron-core, to make the TransformerConfig of every role",
            got=reason,
            fix="run `check` on the machine of the run; `train` also validates the settings",
        )
