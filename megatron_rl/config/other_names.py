"""Names that are no keys here: what other projects call ours, and what ours were called before.

Other projects' names of a key stand on its field, see `setting`. A name may be written with the sections
above it, as far as they are needed to tell it from another; the longest match wins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_rl.config.field_types import hints, section_class
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.algorithm import FORMER_SETTINGS
from megatron_rl.config.setting import ForeignName, setting_of

RENAMED: Mapping[str, str] = {
    **FORMER_SETTINGS,
    "data.eval": "evaluation.sets.NAME.data",
    "evaluation.samples": "evaluation.sets.NAME.samples",
    "evaluation.temperature": "evaluation.sets.NAME.temperature",
    "evaluation.max_prompts": "evaluation.sets.NAME.max_prompts",
}
"""Former key of this project -> its key now; what stood below it stands below that."""

_NO_COUNTERPART: Mapping[str, str] = {
    (
        "a penalty changes the distribution token by token, and log-probs would be of another one "
        "than was sampled from"
    ): """
        repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size length_penalty""",
    (
        "temperature, top_p, top_k and min_p of `rollout` are the same in every step; "
        "rollout.sampling_profiles sets them per task"
    ): """
        temperature_schedule top_p_schedule AdaptiveRolloutConfig adaptive_rollout""",
    "the learner takes the tokens themselves, special ones included": """
        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output detokenize""",
    "a response ends at the model's own end or at `rollout.stop`": """
        ignore_eos min_new_tokens min_tokens stop_token_ids eos_token_id""",
    "responses are always sampled; an evaluation set with temperature 0 is greedy": """
        do_sample greedy num_beams""",
    "the chat template is called without arguments of its own": """
        chat_template_kwargs apply_chat_template_kwargs enable_thinking""",
    "the tokenizer's own chat template is used": """
        custom_chat_template chat_template_path system_prompt""",
    "no model teaches another": """
        teacher teacher_model teacher_path distillation""",
    "metrics.jsonl and `report` have the time of each phase of a step": """
        profile profiler enable_profiling nsys_profile use_nsys global_profiler torch_profiler""",
    "rows are always packed into micro-batches by their tokens, see batch.tokens_per_microbatch": """
        use_dynamic_batching dynamic_batching use_dynamic_bsz log_prob_use_dynamic_bsz
        use_dynamic_batch_size use_remove_padding remove_padding sequence_packing packing_samples packing
        padding_free""",
    "rows are always balanced over data-parallel ranks by their work": """
        balance_batch balance_data""",
    "weights move to the engine after every update": """
        enable_resharding reshard_interval weight_sync_interval update_weights_interval sync_every""",
    "gradients are reduced beside the backward pass wherever that works, see actor.ddp": """
        overlap_comm overlap_communication""",
    "the number of replicas follows from the ranks of the rollout and rollout.tensor": """
        num_rollout_workers rollout_workers num_engines vllm_num_workers""",
    "the engine runs in the ranks of the job, which wait for no utilization": """
        target_utilization""",
    "responses come when they are complete": """
        enable_streaming stream streaming""",
    (
        "a reward function may give a response no reward (an exception, or None in a group), and the "
        "sample is invalid then"
    ): """
        add_postprocess_filter postprocess_filter rollout_sample_filter_path""",
    (
        "there is no ZeRO and no FSDP: actor.layout cuts the model, and the optimizer is distributed "
        "over data-parallel ranks"
    ): """
        zero_stage deepspeed deepspeed_config fsdp fsdp_config fsdp_size reshard_after_forward strategy
        use_torch_compile torch_compile use_liger_kernel use_liger_loss ds_tensor_parallel_size""",
    "there is no Ray: torchrun starts every rank": """
        ray_init ray_kwargs ray_wait_register_center_timeout num_cpus ref_num_nodes
        critic_num_nodes use_ray""",
    "prompts are text": """
        image_key video_key images_key image_folder max_pixels min_pixels limit_images freeze_vision_tower
        freeze_vit""",
    (
        "`asynchrony.steps_ahead` samples ahead of the learner; vLLM runs in the ranks, or behind "
        "rollout.server"
    ): """
        rollout.mode use_async_rollout async_rollout async_engine""",
    "rollout and trainer share the ranks by turns, and the engine's memory is freed between phases": """
        free_cache_engine enable_sleep vllm_enable_sleep vllm_sleep_level vllm_enable_sleep_mode
        sleep_level""",
    "log-probs of the rollout always come with the tokens": """
        calculate_log_probs get_log_probs return_logprob""",
    (
        "checkpoints hold everything that a run resumes from; `checkpoint.export` writes the Hugging "
        "Face model"
    ): """
        save_contents load_contents save_optimizer save_only_model save_safetensors no_save_optim
        ckpt_format default_hdfs_dir""",
    "the command `eval` evaluates checkpoints alone": """
        val_only eval_only""",
    "the samples of every step are in the run's folder": """
        rollout_data_dir validation_data_dir log_completions dump_details""",
    "each module of the user is imported from its path alone": """
        external_lib""",
    "`reward` names what judges: a function, tests, a server, a judge or models": """
        reward_manager reward_model.enable enable_rm use_reward_model rm_type rm_hub reward_model.strategy
        launch_reward_fn_async""",
    "the reward of every set comes in one batch, whatever its size": """
        val_batch_size per_device_eval_batch_size eval_batch_size""",
    "code in a model's folder is not run": """
        trust_remote_code""",
    "tools are in the field that data.tools_field names; rollout.environment runs them": """
        tool_config_path tools tool_path""",
    "data is read by the run itself": """
        num_workers dataloader_num_workers preprocessing_num_workers filter_overlong_prompts_workers
        return_raw_chat return_raw_input_ids custom_cls data_loader_seed remove_unused_columns max_samples
        train_max_samples""",
    "rows of a step are dealt into mini-batches by their work": """
        actor.shuffle ppo_shuffle""",
    "quantized weights are not synced": """
        quantization load_in_8bit load_in_4bit quant_method fp8 use_qlora""",
    "the decay lasts until the end of the run": """
        lr_decay_steps lr_decay_iters optim.total_training_steps lr_wsd_decay_steps num_cycles""",
    "every group is learned from, or replaced by algorithm.dynamic_sampling": """
        filter_groups.metric min_reward_std dynamic_filtering_reward_range""",
    "there is one reference policy and it does not move": """
        sync_ref_model ref_model_sync_steps ref_model_mixup_alpha ref_update_interval""",
}
NO_COUNTERPART: Mapping[str, str] = {
    name: reason for reason, names in _NO_COUNTERPART.items() for name in names.split()
}
"""Name of other projects without a counterpart -> why there is none, or what there is instead."""

FOREIGN_SECTIONS: Mapping[str, ForeignName] = {
    "actor_rollout_ref": ForeignName("verl", "actor, rollout, reference"),
    "trainer": ForeignName("verl", "the top level (steps, run_dir, world_size), evaluation, checkpoint"),
    "custom_reward_function": ForeignName("verl", "reward"),
    "reward_model": ForeignName("verl", "reward"),
    "policy": ForeignName("NeMo-RL", "model, actor, rollout"),
    "grpo": ForeignName("NeMo-RL", "batch, algorithm"),
    "loss_fn": ForeignName("NeMo-RL", "algorithm"),
    "cluster": ForeignName("NeMo-RL", "world_size and gpus_per_node"),
    "checkpointing": ForeignName("NeMo-RL", "checkpoint"),
    "logger": ForeignName("NeMo-RL", "run_dir, logging"),
}
"""Sections of other projects that hold what stands in several of ours: name -> project and our names."""


@dataclasses.dataclass(frozen=True)
class OtherName:
    """Our key of a name that is no key, with the project that has the name, None for no counterpart.

    ``reason`` says why there is no counterpart, or what there is instead. For the other fields see
    `ForeignName`.
    """

    project: str
    ours: str | None
    conversion: str = ""
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    piece: str = ""
    reason: str = ""

    @property
    def source(self) -> str:
        """Return the project that has the name, as text that follows the name."""
        if self.project == "common":
            return ""
        return ", the former name" if self.project == "" else f", a name of {self.project}"


@functools.cache
def foreign_names() -> Mapping[str, OtherName]:
    """Return every name of other projects with ours; a key of a section means the section's first place."""
    names: dict[str, OtherName] = {}
    for path, name in stated_names():
        other = OtherName(name.project, path, name.conversion, name.values, name.piece)
        names.setdefault(name.name, other)
    for name, reason in NO_COUNTERPART.items():
        names[name] = OtherName("common", None, reason=reason)
    return names


def other_name(path: str) -> OtherName | None:
    """Return what a dotted name that is no key is called here, or None when it is not known."""
    path = path.replace("-", "_")
    for former, ours in RENAMED.items():
        if path == former or path.startswith(f"{former}."):
            return OtherName("", ours + path.removeprefix(former))
    names = path.split(".")
    suffixes = (".".join(names[start:]) for start in range(len(names)))
    return next((foreign_names()[name] for name in suffixes if name in foreign_names()), None)


def name_in_section(path: str, section: str, below: Iterable[str]) -> OtherName | None:
    """Return what a dotted name that is no key is called in the section that it was written in.

    ``below`` are the paths of the section's own values, relative to it. None where the section has no such
    setting.
    """
    other = other_name(path)
    if other is None or other.ours is None or not section:
        return None
    words = other.ours.split(".")
    ends = [".".join(words[start:]) for start in range(len(words))]
    end = next((end for end in ends if end in below), None)
    return dataclasses.replace(other, ours=f"{section}.{end}") if end is not None else None


def stated_names() -> Iterator[tuple[str, ForeignName]]:
    """Yield our key and another project's name of it, for each name that stands on a field."""
    yield from _stated(RunConfig, "")


def _stated(cls: type, prefix: str) -> Iterator[tuple[str, ForeignName]]:
    for item in dataclasses.fields(cls):
        path = prefix + item.name
        said = setting_of(item)
        yield from ((path, name) for name in said.foreign_names)
        yield from ((f"{path}.{key}", name) for key, name in said.foreign_names_below)
        section = section_class(hints(cls)[item.name])
        if section is not None:
            yield from _stated(section, f"{path}.")
