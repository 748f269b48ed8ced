"""Names that other projects use for what this one has under another name.

Read in verl's ppo_trainer configuration, NeMo-RL's GRPO configuration, slime's and Megatron-LM's
arguments, and TRL's GRPOConfig. A key is a whole dotted path or its last parts; the longest match wins.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignName:
    """Say whose name it is, what it is called here, and how the value differs, if it does."""

    project: str
    ours: str
    note: str = ""


_V, _N, _S, _M, _T = "verl", "NeMo-RL", "slime", "Megatron-LM", "TRL"
_ROWS = "theirs counts responses, ours counts prompts: divide by batch.samples_per_prompt"
_STEPS = "ours counts optimizer steps per batch: batch size / mini-batch size"
_MICRO = "ours bounds a micro-batch in tokens; leave it out to have it derived"
_TOTAL = "the sum of max_prompt_tokens and rollout.max_response_tokens is the longest row"
_DERIVED = "it is what remains of the ranks after tensor x pipeline x context; set those or world_size"

_SETTING = "algorithm.settings."

FOREIGN_NAMES: dict[str, ForeignName] = {
    # How many prompts and samples.
    "rollout.n": ForeignName(_V, "batch.samples_per_prompt"),
    "n_samples_per_prompt": ForeignName(_S, "batch.samples_per_prompt"),
    "num_generations_per_prompt": ForeignName(_N, "batch.samples_per_prompt"),
    "num_generations": ForeignName(_T, "batch.samples_per_prompt"),
    "group_size": ForeignName("AReaL", "batch.samples_per_prompt"),
    "samples_per_prompt": ForeignName("a common spelling", "batch.samples_per_prompt"),
    "train_batch_size": ForeignName(_V, "batch.prompts_per_step", "both count prompts"),
    "gen_batch_size": ForeignName(_V, "batch.prompts_per_step"),
    "num_prompts_per_step": ForeignName(_N, "batch.prompts_per_step"),
    "prompts_per_step": ForeignName("a common spelling", "batch.prompts_per_step"),
    "rollout_batch_size": ForeignName(_S, "batch.prompts_per_step", "both count prompts"),
    "global_batch_size": ForeignName(_S, "batch.optimizer_steps", _STEPS),
    "train_global_batch_size": ForeignName(_N, "batch.optimizer_steps", _STEPS),
    "ppo_mini_batch_size": ForeignName(_V, "batch.optimizer_steps", _STEPS),
    "num_steps_per_rollout": ForeignName(_S, "batch.optimizer_steps"),
    "ppo_epochs": ForeignName(_V, "batch.epochs"),
    "num_iterations": ForeignName(_T, "batch.epochs"),
    "ppo_micro_batch_size": ForeignName(_V, "batch.tokens_per_microbatch", _MICRO),
    "ppo_micro_batch_size_per_gpu": ForeignName(_V, "batch.tokens_per_microbatch", _MICRO),
    "log_prob_micro_batch_size_per_gpu": ForeignName(_V, "batch.tokens_per_microbatch", _MICRO),
    "ppo_max_token_len_per_gpu": ForeignName(_V, "batch.tokens_per_microbatch"),
    "max_tokens_per_gpu": ForeignName(_S, "batch.tokens_per_microbatch"),
    "train_micro_batch_size": ForeignName(_N, "batch.tokens_per_microbatch", _MICRO),
    "logprob_batch_size": ForeignName(_N, "batch.tokens_per_microbatch", _MICRO),
    "micro_batch_size": ForeignName(_M, "batch.tokens_per_microbatch", _MICRO),
    "per_device_train_batch_size": ForeignName(_T, "batch.tokens_per_microbatch", _MICRO),
    "use_dynamic_bsz": ForeignName(_V, "batch.tokens_per_microbatch", "rows are always packed by tokens"),
    # Lengths.
    "max_prompt_length": ForeignName(_V, "data.max_prompt_tokens"),
    "max_input_seq_length": ForeignName(_N, "data.max_prompt_tokens"),
    "rollout_max_prompt_len": ForeignName(_S, "data.max_prompt_tokens"),
    "max_prompt_tokens": ForeignName("a common spelling", "data.max_prompt_tokens"),
    "max_response_length": ForeignName(_V, "rollout.max_response_tokens"),
    "response_length": ForeignName(_V, "rollout.max_response_tokens"),
    "rollout_max_response_len": ForeignName(_S, "rollout.max_response_tokens"),
    "max_new_tokens": ForeignName(_N, "rollout.max_response_tokens"),
    "max_completion_length": ForeignName(_T, "rollout.max_response_tokens"),
    "max_tokens": ForeignName("vLLM", "rollout.max_response_tokens"),
    "max_response_tokens": ForeignName("a common spelling", "rollout.max_response_tokens"),
    "max_total_sequence_length": ForeignName(_N, "rollout.max_response_tokens", _TOTAL),
    "max_model_len": ForeignName("vLLM", "rollout.max_response_tokens", _TOTAL),
    # Sampling.
    "rollout_temperature": ForeignName(_S, "rollout.temperature"),
    "rollout_top_p": ForeignName(_S, "rollout.top_p"),
    "rollout_top_k": ForeignName(_S, "rollout.top_k"),
    "gpu_memory_utilization": ForeignName("vLLM", "rollout.memory_fraction"),
    "sglang_mem_fraction_static": ForeignName(_S, "rollout.memory_fraction"),
    "mem_fraction_static": ForeignName("SGLang", "rollout.memory_fraction"),
    "rollout.tensor_model_parallel_size": ForeignName(_V, "rollout.tensor"),
    "rollout_num_gpus_per_engine": ForeignName(_S, "rollout.tensor"),
    "generation.vllm_cfg.tensor_parallel_size": ForeignName(_N, "rollout.tensor"),
    "rollout.name": ForeignName(_V, "rollout.engine"),
    "generation.backend": ForeignName(_N, "rollout.engine"),
    "rollout.mode": ForeignName(_V, "rollout.engine"),
    "rollout_num_gpus": ForeignName(_S, "rollout.ranks", "ours lists the ranks"),
    "engine_kwargs": ForeignName(_V, "rollout.vllm"),
    "vllm_cfg": ForeignName(_N, "rollout.vllm"),
    # Layout.
    "tensor_model_parallel_size": ForeignName(_M, "actor.layout.tensor"),
    "pipeline_model_parallel_size": ForeignName(_M, "actor.layout.pipeline"),
    "virtual_pipeline_model_parallel_size": ForeignName(_M, "actor.layout.virtual_pipeline"),
    "context_parallel_size": ForeignName(_M, "actor.layout.context"),
    "expert_model_parallel_size": ForeignName(_M, "actor.layout.expert"),
    "expert_tensor_parallel_size": ForeignName(_M, "actor.layout.expert_tensor"),
    "tensor_parallel_size": ForeignName(_N, "actor.layout.tensor"),
    "tp": ForeignName("a common spelling", "actor.layout.tensor"),
    "pp": ForeignName("a common spelling", "actor.layout.pipeline"),
    "vpp": ForeignName("a common spelling", "actor.layout.virtual_pipeline"),
    "cp": ForeignName("a common spelling", "actor.layout.context"),
    "ep": ForeignName("a common spelling", "actor.layout.expert"),
    "etp": ForeignName("a common spelling", "actor.layout.expert_tensor"),
    "dp": ForeignName("a common spelling", "actor.layout", _DERIVED),
    "data_parallel_size": ForeignName("a common spelling", "actor.layout", _DERIVED),
    "n_gpus_per_node": ForeignName(_V, "gpus_per_node"),
    "num_gpus_per_node": ForeignName(_S, "gpus_per_node"),
    "nnodes": ForeignName(_V, "world_size", "ours is the number of processes: nodes x GPUs per node"),
    "num_nodes": ForeignName(_N, "world_size", "ours is the number of processes: nodes x GPUs per node"),
    "actor_num_nodes": ForeignName(_S, "actor.layout.ranks", "ours lists the ranks"),
    "actor_num_gpus_per_node": ForeignName(_S, "actor.layout.ranks", "ours lists the ranks"),
    "colocate": ForeignName(_S, "rollout.ranks", "roles share ranks unless their ranks are set apart"),
    "recompute_granularity": ForeignName(_M, "actor.recompute", "none, selective or full"),
    "activation_checkpointing": ForeignName(_N, "actor.recompute", "none, selective or full"),
    "enable_gradient_checkpointing": ForeignName(_V, "actor.recompute", "none, selective or full"),
    "gradient_checkpointing": ForeignName(_T, "actor.recompute", "none, selective or full"),
    "override_transformer_config": ForeignName(_V, "actor.megatron"),
    "megatron_cfg": ForeignName(_N, "actor.layout"),
    "param_offload": ForeignName(_V, "actor.offload"),
    "grad_offload": ForeignName(_V, "actor.offload"),
    "optimizer_offload": ForeignName(_V, "actor.optimizer.offload"),
    # Model, data, reward.
    "model_name": ForeignName(_N, "model.path"),
    "model_name_or_path": ForeignName(_T, "model.path"),
    "hf_checkpoint": ForeignName(_S, "model.path"),
    "tokenizer.name": ForeignName(_N, "model.path", "the tokenizer is the model's own"),
    "ref_load": ForeignName(_S, "reference.path"),
    "precision": ForeignName(_N, "model.dtype"),
    "torch_dtype": ForeignName("transformers", "model.dtype"),
    "train_files": ForeignName(_V, "data.train"),
    "val_files": ForeignName(_V, "data.eval"),
    "train_data_path": ForeignName(_N, "data.train"),
    "val_data_path": ForeignName(_N, "data.eval"),
    "prompt_data": ForeignName(_S, "data.train"),
    "eval_prompt_data": ForeignName(_S, "data.eval"),
    "prompt_key": ForeignName(_V, "data.prompt_field"),
    "input_key": ForeignName(_S, "data.prompt_field"),
    "label_key": ForeignName(_S, "data.ground_truth_field"),
    "reward_fn_key": ForeignName(_V, "data.task_field"),
    "apply_chat_template": ForeignName(_S, "data.chat_template"),
    "filter_overlong_prompts": ForeignName(_V, "data.over_long", "drop or error"),
    "custom_reward_function.path": ForeignName(_V, "reward.function", "path/to/file.py:function"),
    "custom_reward_function.name": ForeignName(_V, "reward.function", "path/to/file.py:function"),
    "custom_rm_path": ForeignName(_S, "reward.function", "module:function"),
    "reward_kwargs": ForeignName(_V, "reward.arguments"),
    # Optimizer.
    "lr": ForeignName(_V, "actor.optimizer.learning_rate"),
    "min_lr": ForeignName(_M, "actor.optimizer.minimum_learning_rate"),
    "lr_warmup_steps": ForeignName(_V, "actor.optimizer.warmup_steps"),
    "lr_warmup_iters": ForeignName(_M, "actor.optimizer.warmup_steps"),
    "lr_decay_style": ForeignName(_M, "actor.optimizer.decay"),
    "lr_scheduler_type": ForeignName(_T, "actor.optimizer.decay"),
    "adam_beta1": ForeignName(_M, "actor.optimizer.beta1"),
    "adam_beta2": ForeignName(_M, "actor.optimizer.beta2"),
    "adam_eps": ForeignName(_M, "actor.optimizer.epsilon"),
    "max_grad_norm": ForeignName(_N, "actor.optimizer.clip_grad"),
    "grad_clip": ForeignName(_V, "actor.optimizer.clip_grad"),
    "use_distributed_optimizer": ForeignName(_M, "actor.optimizer.distributed"),
    "critic.optim.lr": ForeignName(_V, "critic.optimizer.learning_rate"),
    "critic_lr": ForeignName(_S, "critic.optimizer.learning_rate"),
    # Roles.
    "critic.model.path": ForeignName(_V, "critic.path"),
    "critic_load": ForeignName(_S, "critic.path"),
    "critic_warmup": ForeignName(_V, "critic.warmup_steps"),
    "num_critic_only_steps": ForeignName(_S, "critic.warmup_steps"),
    "reward_model.model.path": ForeignName(_V, "reward.models", "ours has a name for each: NAME.path"),
    "ref.megatron.param_offload": ForeignName(_V, "reference.offload"),
    "critic.megatron.param_offload": ForeignName(_V, "critic.offload"),
    "critic.megatron.optimizer_offload": ForeignName(_V, "critic.optimizer.offload"),
    "cluster.gpus_per_node": ForeignName(_N, "gpus_per_node"),
    "rollout_max_context_len": ForeignName(_S, "rollout.max_response_tokens", _TOTAL),
    # Algorithm.
    "reference_policy_kl_type": ForeignName(_N, _SETTING + "kl_estimator"),
    "eps_clip_c": ForeignName(_S, _SETTING + "dual_clip"),
    "use_tis": ForeignName(_S, _SETTING + "correction"),
    "adv_estimator": ForeignName(_V, "algorithm.name"),
    "advantage_estimator": ForeignName(_S, "algorithm.name"),
    "policy_loss.loss_mode": ForeignName(_V, "algorithm.name"),
    "clip_ratio": ForeignName(_V, _SETTING + "clip_ratio_low", "and clip_ratio_high"),
    "clip_ratio_low": ForeignName(_V, _SETTING + "clip_ratio_low"),
    "clip_ratio_high": ForeignName(_V, _SETTING + "clip_ratio_high"),
    "ratio_clip_min": ForeignName(_N, _SETTING + "clip_ratio_low"),
    "ratio_clip_max": ForeignName(_N, _SETTING + "clip_ratio_high"),
    "eps_clip": ForeignName(_S, _SETTING + "clip_ratio_low", "and clip_ratio_high"),
    "eps_clip_high": ForeignName(_S, _SETTING + "clip_ratio_high"),
    "kl_loss_coef": ForeignName(_V, _SETTING + "kl_coef"),
    "kl_loss_type": ForeignName(_V, _SETTING + "kl_estimator"),
    "use_kl_loss": ForeignName(_V, _SETTING + "kl_in", "none, loss or reward"),
    "kl_coef": ForeignName(_V, _SETTING + "kl_coef"),
    "reference_policy_kl_penalty": ForeignName(_N, _SETTING + "kl_coef"),
    "clip_ratio_c": ForeignName(_V, _SETTING + "dual_clip"),
    "lam": ForeignName(_V, _SETTING + "gae_lambda"),
    "gamma": ForeignName(_V, _SETTING + "gamma"),
    "beta": ForeignName(_T, _SETTING + "kl_coef"),
    "entropy_coeff": ForeignName(_V, _SETTING + "entropy_coef"),
    "entropy_coef": ForeignName(_S, _SETTING + "entropy_coef"),
    "loss_agg_mode": ForeignName(_V, _SETTING + "aggregation"),
    "norm_adv_by_std_in_grpo": ForeignName(_V, "algorithm.name", "false is algorithm dr_grpo"),
    # Run.
    "total_training_steps": ForeignName(_V, "steps"),
    "total_epochs": ForeignName(_V, "steps", "ours counts steps: epochs x prompts / batch.prompts_per_step"),
    "num_rollout": ForeignName(_S, "steps"),
    "max_num_steps": ForeignName(_N, "steps"),
    "max_steps": ForeignName(_T, "steps"),
    "max_num_epochs": ForeignName(
        _N, "steps", "ours counts steps: epochs x prompts / batch.prompts_per_step"
    ),
    "test_freq": ForeignName(_V, "evaluation.every"),
    "val_period": ForeignName(_N, "evaluation.every"),
    "eval_interval": ForeignName(_S, "evaluation.every"),
    "val_kwargs.n": ForeignName(_V, "evaluation.samples"),
    "val_kwargs.temperature": ForeignName(_V, "evaluation.temperature"),
    "n_samples_per_eval_prompt": ForeignName(_S, "evaluation.samples"),
    "max_val_samples": ForeignName(_N, "evaluation.max_prompts"),
    "val_before_train": ForeignName(_V, "evaluation.at_start"),
    "val_at_start": ForeignName(_N, "evaluation.at_start"),
    "save_freq": ForeignName(_V, "checkpoint.every"),
    "save_period": ForeignName(_N, "checkpoint.every"),
    "save_interval": ForeignName(_S, "checkpoint.every"),
    "save_steps": ForeignName(_T, "checkpoint.every"),
    "keep_top_k": ForeignName(_N, "checkpoint.keep"),
    "max_actor_ckpt_to_keep": ForeignName(_V, "checkpoint.keep"),
    "resume_mode": ForeignName(_V, "checkpoint.resume"),
    "default_local_dir": ForeignName(_V, "run_dir"),
    "checkpoint_dir": ForeignName(_N, "run_dir"),
    "output_dir": ForeignName(_T, "run_dir"),
    "log_dir": ForeignName(_N, "run_dir"),
}

FOREIGN_SECTIONS: dict[str, ForeignName] = {
    "actor_rollout_ref": ForeignName(_V, "actor, rollout, reference"),
    "trainer": ForeignName(_V, "the top level (steps, run_dir, world_size), evaluation, checkpoint"),
    "custom_reward_function": ForeignName(_V, "reward"),
    "reward_model": ForeignName(_V, "reward"),
    "policy": ForeignName(_N, "model, actor, rollout"),
    "grpo": ForeignName(_N, "batch, algorithm"),
    "loss_fn": ForeignName(_N, "algorithm.settings"),
    "cluster": ForeignName(_N, "world_size and gpus_per_node"),
    "checkpointing": ForeignName(_N, "checkpoint"),
    "logger": ForeignName(_N, "run_dir"),
}


def foreign_name(path: str) -> ForeignName | None:
    """Return what another project's dotted name is called here, or None when it is not known."""
    parts = path.replace("-", "_").split(".")
    for start in range(len(parts)):
        found = FOREIGN_NAMES.get(".".join(parts[start:]))
        if found is not None:
            return found
    return None
