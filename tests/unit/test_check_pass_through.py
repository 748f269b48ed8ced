"""Values for Megatron-Core and vLLM are compared with the installed versions, and tried."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from config_workspace import write_model, write_workspace

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.check.engine.arguments import (
    ENGINE_ARGUMENTS,
    KEY_BY_ARGUMENT,
    REFUSED,
    TOOL_PARSERS,
    check_engine_arguments,
)
from megatron_rl.check.installed_source import class_fields, read_dict_keys
from megatron_rl.check.model import megatron_settings as model_settings
from megatron_rl.check.model.megatron_settings import (
    DERIVED_FIELDS,
    SET_BY_RUN,
    TRANSFORMER_CONFIG,
    check_model_settings,
    check_routing,
)
from megatron_rl.config.field_types import value_paths
from megatron_rl.config.load import load
from megatron_rl.config.schema import RunConfig
from megatron_rl.shapes.layout import ParallelLayout, trainer_problems
from megatron_rl.shapes.pretrained import parse_pretrained
from megatron_rl.user_code import find_module
from tests.hf_models import config_of

pytestmark = pytest.mark.usefixtures("functions_load_once")

FREE = """
    additional_config aggregate_engine_logging all2all_backend async_scheduling attention_backend
    attention_config aux_output_config block_size collect_detailed_traces compilation_config
    cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets disable_cascade_attn
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats disable_sliding_window
    enable_chunked_prefill enable_expert_parallel enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_prefix_caching
    enable_shm_tensor_arena enable_trace_replay enforce_eager engram_config
    fail_on_environ_validation gdn_prefill_backend ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config
    kv_sharing_fast_prefill log_config_file log_level logging_config long_prefill_token_threshold
    long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_dtype
    mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm
    max_cudagraph_capture_size max_logprobs max_num_active_seqs max_num_batched_tokens
    max_num_scheduled_tokens max_num_seqs num_gpu_blocks_override numa_bind numa_bind_cpus
    numa_bind_nodes optimization_level otlp_traces_endpoint per_request_spec_decode_metrics
    performance_mode prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit profiler_config replayssm_buffer_len
    scheduler_cls scheduler_reserve_full_isl scheduling_policy served_model_name
    show_hidden_metrics_for_version shutdown_timeout sleep_mode_offload_cudagraph
    sparse_indexer_topk_backend stream_interval structured_outputs_config swa_bounded_replay
    use_fp64_gumbel use_replayssm use_tqdm_on_load watermark
"""
"""Fields of vLLM's EngineArgs that were looked at and pass through."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    write_model(root / "six_layers", num_hidden_layers=6)
    return root


def check(workspace: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, **options: float) -> CheckReport:
    monkeypatch.chdir(workspace)
    return check_config(load("config.yaml", overrides), None, **options)


@pytest.mark.slow
def test_every_engine_argument_of_the_installed_version_is_sorted() -> None:
    """A field that a new version brings has to be looked at: does it work with weights written in place?"""
    from vllm.engine.arg_utils import EngineArgs

    fields = {item.name for item in dataclasses.fields(EngineArgs)}
    read = class_fields(ENGINE_ARGUMENTS)
    assert read is not None and fields == set(read)
    assert fields == set(KEY_BY_ARGUMENT) | set(REFUSED) | set(FREE.split())
    assert len(fields) == len(KEY_BY_ARGUMENT) + len(REFUSED) + len(FREE.split())


def test_parsers_of_tool_calls_are_those_of_the_installed_version() -> None:
    from vllm.tool_parsers import ToolParserManager

    assert set(read_dict_keys(*TOOL_PARSERS) or ()) == set(ToolParserManager.list_registered())


def test_megatron_fields_that_the_run_sets_exist() -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = {item.name for item in dataclasses.fields(MLATransformerConfig)}
    read = class_fields(*TRANSFORMER_CONFIG)
    assert read is not None and fields == set(read)
    assert {*DERIVED_FIELDS.values(), *KEY_BY_ARGUMENT.values()} <= set(value_paths(RunConfig))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("quantization", "fp8", "which quantized tensors do not have"),
        ("pipeline_parallel_size", 2, "sharded only by rollout.tensor"),
        ("data_parallel_size", 2, "make further replicas"),
        ("enable_lora", True, "called `actor.lora.sync` here"),
        ("max_loras", 4, "are the only ones"),
        ("speculative_config", {"model": "a"}, "draft model"),
        ("cpu_offload_gb", 4, "complete in the device's memory"),
        ("logits_processors", ["a:b"], "must match the trainer's"),
        ("max_num_seqs", "64", "wrong type"),
        ("max_num_seqs", True, "wrong type"),
        ("kv_cache_dtype", "fp9", "wrong type"),
        ("max_model_len", 4096, "called `rollout.max_response_tokens` here"),
    ],
)
def test_engine_arguments_that_cannot_work_are_refused(name: str, value: object, reason: str) -> None:
    (error,) = check_engine_arguments({name: value})
    assert reason in error.message
    assert error.where == f"rollout.vllm.{name}" and error.expected and error.got and error.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 1),
        ("max_loras", 1),
        ("quantization", None),
        ("cpu_offload_gb", 0),
        ("max_num_seqs", 64),
        ("kv_cache_dtype", "auto"),
        ("compilation_config", {"level": 0}),
        ("enable_expert_parallel", True),
    ],
)
def test_engine_arguments_that_work_pass(name: str, value: object) -> None:
    assert not check_engine_arguments({name: value})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_layers", 3, "called `model.path` here"),
        ("recompute_granularity", "full", "called `actor.recompute` here"),
        ("batch_p2p_comm", True, "wrong results"),
        ("moe_aux_loss_coeff", 0.01, "needs the balancing loss of each sequence"),
        ("moe_aux_loss_coeff", [0.01], "is not a coefficient"),
        ("moe_z_loss_coeff", 0.001, ""),
        ("moe_z_loss_coeff", -0.001, "is not a coefficient"),
        ("num_layers_in_first_pipeline_stage", "2", "wrong type"),
        ("hidden_dropout", "none", "wrong type"),
        ("moe_router_load_balancing_type", ["aux_loss"], ""),
    ],
)
def test_megatron_fields_of_the_run_and_wrong_types_are_refused(
    name: str, value: object, reason: str
) -> None:
    errors = check_model_settings({name: value})
    assert len(errors) == (reason != "")
    assert not errors or reason in errors[0].message


@pytest.mark.parametrize(
    ("changes", "path", "text"),
    [
        ({}, "actor.megatron", ""),
        (
            {"moe_router_load_balancing_type": "aux_loss"},
            "actor.megatron",
            "aux_loss: it balances the tokens",
        ),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "actor.megatron", "the micro-batches so far"),
        ({"moe_router_fusion": True}, "actor.megatron", "excludes losses of routers"),
        ({"moe_aux_loss_coeff": 0.0}, "critic.megatron", "only the actor's routers"),
    ],
)
def test_router_losses_that_depend_on_the_layout_are_refused(
    changes: dict[str, object], path: str, text: str
) -> None:
    losses = {"moe_z_loss_coeff": 1e-3, "moe_aux_loss_coeff": 1e-2}
    values = {**losses, "moe_router_load_balancing_type": "seq_aux_loss", **changes}
    errors = check_model_settings(values, path)
    assert len(errors) == (text != "")
    for error in errors:
        assert text in f"{error.message} {error.got}" and error.where and error.expected and error.fix


@pytest.mark.usefixtures("forked_trials")
def test_what_megatron_refuses_is_an_error(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = "actor.megatron.moe_pad_expert_input_to_capacity=true"
    report = check(workspace, monkeypatch, override, patience=120.0)
    (error,) = report.errors
    assert error.message == "Megatron refuses the settings of the actor's model"
    assert error.where and override.partition("=")[0] in error.where
    assert error.expected and error.got and error.fix


@pytest.mark.usefixtures("forked_trials")
def test_what_megatron_takes_passes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(workspace, monkeypatch, "actor.megatron.hidden_dropout=0.1", patience=120.0)
    assert not report.errors and not report.warnings


@pytest.mark.parametrize(
    ("overrides", "message", "where"),
    [
        (
            ["actor.megatron.moe_router_fusion=true"],
            "their kernel chooses the experts itself",
            "actor.megatron.moe_router_fusion",
        ),
        (["rollout.engine=torch"], "returns the experts of each token", "actor.routing_replay"),
        ([], "", ""),
    ],
)
def test_experts_that_cannot_be_repeated_are_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str, where: str
) -> None:
    monkeypatch.chdir(workspace)
    config = load("config.yaml", ["actor.routing_replay=rollout", *overrides]).config
    mixture = parse_pretrained(config_of("qwen3-moe").to_dict()).shape
    assert config is not None
    errors = list(check_routing(config, mixture))
    assert len(errors) == bool(message)
    assert not errors or (message in errors[0].message and errors[0].where == where)


def test_fused_rotary_embedding_is_refused_for_latent_attention_alone() -> None:
    layout = ParallelLayout((0,), path="critic.layout")
    for family, refused in (("deepseek-v3", True), ("qwen2", False)):
        shape = parse_pretrained(config_of(family).to_dict()).shape
        errors = trainer_problems(shape, layout, {"apply_rope_fusion": True})
        assert [error.where for error in errors] == ["critic.megatron.apply_rope_fusion"] * refused


def test_values_that_were_not_tried_are_a_warning(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = "actor.megatron.hidden_dropout=0.1"
    (warning,) = check(workspace, monkeypatch, override, patience=0.01).warnings
    assert "were not tried" in warning.message and "did not answer" in (warning.got or "")
    monkeypatch.setattr(model_settings, "find_module", lambda name: (None, name))
    (warning,) = check(workspace, monkeypatch, override, patience=120.0).warnings
    assert "torch is not installed here" in (warning.got or "")


@pytest.mark.usefixtures("forked_trials")
def test_settings_are_tried_for_every_role(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles without settings have the actor's, but not its uneven stages for a pipeline of their own."""
    uneven = "actor.megatron={num_layers_in_first_pipeline_stage: 2, num_layers_in_last_pipeline_stage: 4}"
    overrides = ("model.path=six_layers", uneven, "reference={layout: {pipeline: 1}}")
    assert not check(workspace, monkeypatch, *overrides, patience=120.0).errors
    refused = "reference.megatron={moe_pad_expert_input_to_capacity: true}"
    (error,) = check(workspace, monkeypatch, *overrides, refused, patience=120.0).errors
    assert error.message == "Megatron refuses the settings of the reference's model"
    assert error.where and error.where.startswith("reference.megatron.moe_pad")


TRIED_HERE = {
    "megatron": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        apply_query_key_layer_scaling async_tensor_model_parallel_allreduce attention_dropout
        attention_softmax_in_fp32 bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding
        config_logger_dir distribute_saved_activations fp32_residual_connection
        hidden_dropout microbatch_group_size_per_vp_stage mlp_chunks_for_training moe_apply_probs_on_input
        moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_input_jitter_eps moe_layer_recompute
        moe_pad_expert_input_to_capacity moe_router_bias_update_rate moe_router_dtype moe_router_force_biased
        moe_aux_loss_coeff moe_z_loss_coeff
        moe_router_force_load_balancing moe_router_load_balancing_type moe_router_quantile_balancing_ema
        moe_router_topk_limited_devices moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        num_microbatches_with_partial_activation_checkpoints overlap_p2p_comm_warmup_flush recompute_method
        recompute_modules recompute_num_layers test_mode""",
    "optimizer.megatron": """
        apply_wd_to_qk_layernorm config_logger_dir decoupled_weight_decay grad_norm_skip_threshold hysteresis
        initial_loss_scale loss_scale loss_scale_window min_loss_scale sgd_momentum
        use_torch_optimizer_for_cpu_offload""",
    "ddp": """
        bucket_size check_for_large_grads check_for_nan_in_grad grad_reduce_in_fp32 gradient_reduce_div_fusion
        num_buckets overlap_grad_reduce overlap_param_gather
        param_name_patterns_for_fp32_local_accumulation""",
}
"""Fields, of Megatron-Core 0.16.1 and 0.19.2, that Megatron's own trial tries on any machine."""


@pytest.mark.parametrize(
    ("kind", "classes", "run_sets"),
    [
        (
            "megatron",
            TRANSFORMER_CONFIG,
            {*DERIVED_FIELDS, *SET_BY_RUN, "recompute_granularity"} | set(model_settings.DROPPED),
        ),
        (
            "optimizer.megatron",
            model_settings.OPTIMIZER_CONFIG,
            {*model_settings.OPTIMIZER_KEYS, *model_settings.OPTIMIZER_SET},
        ),
        ("ddp", model_settings.DDP_CONFIG, set(model_settings.DDP_SET)),
    ],
)
def test_every_field_of_megatron_is_in_one_class(
    kind: str, classes: tuple[tuple[str, str], ...], run_sets: set[str]
) -> None:
    """Set or refused by the run, tried, or untried where a machine lacks what it needs.

    A field that a new version brings has to be looked at.
    """
    fields = set(class_fields(*classes) or ())
    owner = getattr(importlib.import_module(classes[-1][0]), classes[-1][1])
    assert fields == {item.name for item in dataclasses.fields(owner)}

    tried = set(TRIED_HERE[kind].split())
    needs = set(model_settings.NEEDS) - run_sets
    assert not tried & run_sets and not tried & needs
    unsorted = fields - tried - run_sets - needs
    assert not unsorted, f"to be sorted: {sorted(unsorted)}"


def test_no_class_has_two_reasons_for_one_field() -> None:
    settings = model_settings
    assert not set(DERIVED_FIELDS) & set(SET_BY_RUN)
    assert not set(settings.DROPPED) & {*DERIVED_FIELDS, *SET_BY_RUN, *settings.NEEDS}
    assert not set(settings.NEEDS) & {
        *DERIVED_FIELDS,
        *SET_BY_RUN,
        *settings.OPTIMIZER_KEYS,
        *settings.DDP_SET,
    }
    keys = {f"actor.optimizer.{key}" for key in settings.OPTIMIZER_KEYS.values()}
    assert keys <= set(value_paths(RunConfig))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("normalization", "LayerNorm", "called `model.path` here"),
        ("moe_router_score_function", "sigmoid", "called `model.path` here"),
        ("transformer_impl", "local", "called `model.attention` here"),
        ("overlap_moe_expert_parallel_comm", True, "a plan of each layer"),
        ("fp8_param", True, "weight syncs and exports follow"),
        ("attention_backend", "fusd", "not a choice"),
    ],
)
def test_fields_that_would_make_another_model_are_refused(name: str, value: object, reason: str) -> None:
    (error,) = check_model_settings({name: value})
    assert reason in error.message and error.where == f"actor.megatron.{name}" and error.fix


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optimizer.name=sgd", "saves only the state of Adam"),
        ("actor.optimizer.megatron={use_precision_aware_optimizer: true}", "Transformer Engine's FusedAdam"),
        ("actor.optimizer.name=muon", "emerging_optimizers"),
        ("critic.optimizer.megatron.adam_beta2=0.9", "`critic.optimizer.beta2` here"),
        ("actor.optimizer.megatron={sgd_momentun: 0.9}", "did you mean `sgd_momentum`"),
        ("actor.ddp.use_megatron_fsdp=true", "weight syncs and checkpoints do not read"),
        ("actor.ddp.bucket_size=big", "wrong type"),
        (
            "actor.ddp={overlap_param_gather: true, overlap_grad_reduce: false}",
            "reduced in the backward pass",
        ),
        ("sft={data: train.jsonl, steps: 1, optimizer: {megatron: {lr: 1.0}}}", "learning_rate` here"),
    ],
)
def test_optimizer_and_ddp_settings_that_cannot_work_are_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    errors = check(workspace, monkeypatch, "algorithm=ppo", override, patience=0.0).errors
    (error,) = [error for error in errors if words in error.message + str(error.expected) + str(error.fix)]
    assert error.where and error.fix


@pytest.mark.usefixtures("forked_trials")
def test_megatron_tries_the_optimizer(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precise = "actor.optimizer.megatron={exp_avg_dtype: bfloat16}"
    (error,) = check(workspace, monkeypatch, precise, patience=120.0).errors
    assert error.message == "Megatron refuses the settings of the actor's optimizer"
    assert "exp_avg_dtype can only be fp32 when not using precision-aware optimizer" in str(error.got)
    assert error.where and error.where.startswith("actor.optimizer.megatron.exp_avg_dtype")


def test_names_and_stages_are_checked_for_every_role(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "reference={layout: {pipeline: 2}, megatron: {num_layers_in_first_pipeline_stage: 5}}"
    overrides = ("model.path=six_layers", ends, "critic.megatron={hidden_dropuot: 0.1, num_layers: 3}")
    errors = check(workspace, monkeypatch, "algorithm=ppo", *overrides, patience=0.0).errors
    places = {error.where.partition(" ")[0]: error for error in errors if error.where}
    assert "did you mean `hidden_dropout`" in places["critic.megatron.hidden_dropuot"].message
    assert "`model.path` here" in places["critic.megatron.num_layers"].message


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_formats_of_few_bits_need_the_layers_that_compute_in_them(name: str) -> None:
    """Megatron's plain layers take them without a word, and compute as without."""
    assert not [error for error in check_model_settings({name: None}) if name in error.message]
    errors = [str(error) for error in check_model_settings({name: "hybrid"})]
    installed = not find_module("transformer_engine")[1]
    assert any("requires Transformer Engine" in error for error in errors) != installed
