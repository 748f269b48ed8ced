"""Names from other projects and former names of our keys, and the errors for unknown names.

The dataclass field of a key lists the names of the key in other projects (see `setting`). This module inverts
this mapping. A listed name includes as many enclosing sections as make it unique, as in
``checkpointing.metric_name``; the longest match wins.

`record_unknown_name` records an unknown name with its value and the valid names of its section.
`check.unknown_names` later replaces the suggestion by a better one from the whole configuration, after
testing whether a run would accept it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_rl.config.field_types import field_hints, section_class
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.algorithm import FORMER_SETTINGS
from megatron_rl.config.setting import ForeignName, key_path, setting_of
from megatron_rl.config.source import Leaf, Section
from megatron_rl.errors import UserError, nearest

# Former key of this project -> current key, also for all keys below it. `resume` reads configurations of
# older runs, which contain former keys.
RENAMED: Mapping[str, str] = {
    **FORMER_SETTINGS,
    "data.eval": "evaluation.sets.NAME.data",
    "evaluation.samples": "evaluation.sets.NAME.samples",
    "evaluation.temperature": "evaluation.sets.NAME.temperature",
    "evaluation.max_prompts": "evaluation.sets.NAME.max_prompts",
}

# Reason why there is no counterpart, as an error prints it -> names of other projects.
_NO_COUNTERPART: Mapping[str, str] = {
    # Files.
    "base starts from another file, or from a list of files of which later ones win": "defaults",
    # Sampling.
    "rollout.no_repeat_ngram_size also bans n-grams of the prompt": "encoder_no_repeat_ngram_size",
    "it is for beam search, and responses are sampled": "length_penalty",
    (
        "rollout.temperature and rollout.top_p may change over steps or over tokens, and "
        "rollout.sampling_profiles sets them per task"
    ): """
        AdaptiveRolloutConfig adaptive_rollout""",
    "training uses the sampled token ids, special tokens included": """
        skip_special_tokens spaces_between_special_tokens detokenize""",
    "a stop text is part of the response, whose last token completes it": """
        include_stop_str_in_output""",
    "a response ends at the model's own end tokens or at `rollout.stop`": """
        ignore_eos stop_token_ids eos_token_id""",
    "responses are always sampled; an evaluation set with temperature 0 is greedy": """
        do_sample greedy num_beams""",
    (
        "data.sources.NAME.chat_template_kwargs sets the template's arguments for one source of prompts, and "
        "a field chat_template_kwargs for one record"
    ): """
        chat_template_kwargs apply_chat_template_kwargs enable_thinking""",
    "data.sources.NAME.system_prompt sets it for one source of prompts": "system_prompt",
    "the tokenizer's own chat template is used": """
        custom_chat_template chat_template_path""",
    # Features that this project does not have, or has under another subject.
    "metrics.jsonl and `report` have the time of each phase of a step": """
        profile profiler enable_profiling nsys_profile use_nsys global_profiler torch_profiler""",
    # Behaviour that cannot be configured.
    (
        "rows are always packed into micro-batches by their tokens, of which batch.memory_target or "
        "batch.tokens_per_microbatch sets the number"
    ): """
        use_dynamic_batching dynamic_batching use_dynamic_bsz log_prob_use_dynamic_bsz
        use_dynamic_batch_size use_remove_padding remove_padding sequence_packing packing_samples packing
        padding_free""",
    "rows are always balanced over data-parallel ranks by their work": """
        balance_batch balance_data""",
    "gradients are reduced during the backward pass if possible, see actor.ddp": """
        overlap_comm overlap_communication""",
    # The rollout engine.
    "the number of replicas follows from the ranks of the rollout and rollout.tensor": """
        num_rollout_workers rollout_workers num_engines vllm_num_workers""",
    "responses are returned when they are complete": """
        enable_streaming stream streaming""",
    # Backends and launchers.
    (
        "there is no ZeRO and no FSDP: actor.layout shards the model, and the optimizer is distributed "
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
    "rollout and trainer take turns on shared ranks, and the engine's memory is freed between phases": """
        free_cache_engine enable_sleep vllm_enable_sleep vllm_sleep_level vllm_enable_sleep_mode
        sleep_level""",
    "the rollout always returns log-probs with the tokens": """
        calculate_log_probs get_log_probs return_logprob""",
    (
        # Checkpoints and evaluation.
        "checkpoints contain everything that a run resumes from; `checkpoint.export` writes the Hugging "
        "Face model"
    ): """
        save_contents load_contents save_optimizer save_only_model save_safetensors no_save_optim
        ckpt_format default_hdfs_dir""",
    "the command `eval` only evaluates checkpoints": """
        val_only eval_only""",
    "the samples of every step are in the run's folder": """
        rollout_data_dir validation_data_dir log_completions dump_details""",
    # The user's code, rewards and data.
    "modules of yours are imported by the settings that name them": """
        external_lib""",
    "`reward` configures the source of rewards: a function, tests, a server, a judge or models": """
        reward_manager reward_model.enable enable_rm use_reward_model rm_type rm_hub reward_model.strategy
        launch_reward_fn_async""",
    "all rewards of an evaluation set are computed in one batch": """
        val_batch_size per_device_eval_batch_size eval_batch_size""",
    "code in a model's folder is never executed": """
        trust_remote_code""",
    "tools are in the field that data.tools_field names; rollout.environment runs them": """
        tool_config_path tools tool_path""",
    "data is read by the run itself": """
        num_workers dataloader_num_workers preprocessing_num_workers filter_overlong_prompts_workers
        return_raw_chat return_raw_input_ids custom_cls data_loader_seed remove_unused_columns max_samples
        train_max_samples""",
    "rows of a step are distributed over mini-batches by their work": """
        actor.shuffle ppo_shuffle""",
    # Training.
    "quantized weights are not synced": """
        quantization load_in_8bit load_in_4bit quant_method fp8 use_qlora""",
    "the decay lasts until the end of the run": """
        lr_decay_steps lr_decay_iters optim.total_training_steps lr_wsd_decay_steps num_cycles""",
    "every group is trained on, or replaced by algorithm.dynamic_sampling": """
        filter_groups.metric min_reward_std dynamic_filtering_reward_range""",
    "there is one reference policy, which never changes": """
        sync_ref_model ref_model_sync_steps ref_model_mixup_alpha ref_update_interval""",
}
NO_COUNTERPART: Mapping[str, str] = {
    name: reason for reason, names in _NO_COUNTERPART.items() for name in names.split()
}
"""Name in other projects without a counterpart -> the reason, or its replacement."""

# Sections of other projects whose keys are in several of our sections.
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
"""Section of another project -> the project, and a text with our sections that have the same keys."""


@dataclass(frozen=True)
class OtherName:
    """Counterpart of a former key or of another project's key: the key of this package that replaces it.

    If this package has no such key, ``ours`` has the value None and ``reason`` explains why.

    Example:
        >>> find_counterpart("train_batch_size").ours
        'batch.prompts_per_step'
    """

    project: str
    """Project that has the other name; ``common`` for several, empty for a former key of this package."""
    ours: str | None
    """Key of this package; None if no key corresponds to the other name."""
    conversion: str = ""
    """Difference between the values, see `ForeignName`."""
    values: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Their value -> ours, see `ForeignName`."""
    piece: str = ""
    """Piece of an algorithm that has the key, see `ForeignName`."""
    reason: str = ""
    """Why there is no counterpart, or what replaces it."""

    @property
    def origin_suffix(self) -> str:
        """Return a suffix for error messages that names the project from which the user's key comes.

        For example ``, a name of TRL``, or ``, the former name`` for a former key of this package. The suffix
        is empty if several projects have the name.
        """
        match self.project:
            case "common":
                return ""
            case "":
                return ", the former name"
            case project:
                return f", a name of {project}"


@functools.cache
def foreign_names() -> Mapping[str, OtherName]:
    """Map each key of another project to its counterpart in this package, or to the reason why it has none.

    If several sections of this package have the same keys, such as the layouts of roles, the counterpart is
    the key of the first section.
    """
    counterparts: dict[str, OtherName] = {}
    for path, foreign in foreign_keys():
        counterpart = OtherName(foreign.project, path, foreign.conversion, foreign.values, foreign.piece)
        counterparts.setdefault(foreign.name, counterpart)
    # `NO_COUNTERPART` takes precedence over a key of this package that lists the same foreign name.
    for name, reason in NO_COUNTERPART.items():
        counterparts[name] = OtherName("common", None, reason=reason)
    return counterparts


def find_counterpart(path: str) -> OtherName | None:
    """Return the key of this package for a former key or another project's key; None if ``path`` is neither.

    ``path`` is a dotted name, such as ``actor_rollout_ref.actor.optim.lr``.
    """
    # Command-line options of other projects have hyphens.
    path = path.replace("-", "_")
    for former_key, key in RENAMED.items():
        if path == former_key or path.startswith(f"{former_key}."):
            return OtherName("", key + path.removeprefix(former_key))

    # Try the longest suffix first, since a name with its section is more specific.
    names = path.split(".")
    for start in range(len(names)):
        suffix = ".".join(names[start:])
        if suffix in foreign_names():
            return foreign_names()[suffix]
    return None


def counterpart_in_section(path: str, section: str, value_paths: Iterable[str]) -> OtherName | None:
    """Return the key of a section that the user meant by a former key or another project's key, or None.

    ``section`` is the section in which the user wrote the unknown name ``path``. ``value_paths`` are the
    paths of all keys of the section, relative to the section.

    For example, OpenRLHF's ``eval_temperature`` in the section ``evaluation.sets.math`` stands for
    ``evaluation.sets.math.temperature``.
    """
    counterpart = find_counterpart(path)
    if counterpart is None or counterpart.ours is None or not section:
        return None

    names = counterpart.ours.split(".")
    for start in range(len(names)):
        suffix = ".".join(names[start:])
        if suffix in value_paths:
            return dataclasses.replace(counterpart, ours=f"{section}.{suffix}")
    return None


def foreign_keys() -> Iterator[tuple[str, ForeignName]]:
    """Yield (key, name in another project) for each name that a field of the configuration lists."""
    yield from _iter_foreign_names(RunConfig, "")


def _iter_foreign_names(cls: type, prefix: str) -> Iterator[tuple[str, ForeignName]]:
    """Yield (key, name in another project) for all keys of ``cls``; ``prefix`` is added to each key."""
    for item in dataclasses.fields(cls):
        path = prefix + item.name
        setting = setting_of(item)
        for name in setting.foreign_names:
            yield path, name
        for key, name in setting.foreign_names_below:
            yield f"{path}.{key}", name

        section = section_class(field_hints(cls)[item.name])
        if section is not None:
            yield from _iter_foreign_names(section, f"{path}.")


@dataclass(eq=False)
class UnknownName(UserError):
    """Error for a name that does not exist in its section.

    Example: ``actor: {optimiser: {}}`` has the key ``optimiser`` in the section ``actor`` with the value
    ``{}``.
    """

    key: str = ""
    """The name itself."""
    section: str = ""
    """Path of the section in which the name was written, empty at the top."""
    value: Any = None
    """Value of the name, a mapping for a section."""
    overrides: bool = False
    """Whether the name was given on the command line."""
    section_keys: tuple[str, ...] = ()
    """Paths of all keys of the section, relative to the section."""

    @property
    def path(self) -> str:
        """Return the dotted path of the name."""
        return key_path(self.section, self.key)


class ErrorCollector(Protocol):
    """Collector of errors in configuration values, see `parse.ParseState`."""

    def record_error(
        self, path: str, node: Leaf | Section | None, message: str, **fields: str | None
    ) -> None:
        """Record an error about the value at ``path``; ``fields`` are further fields of `UserError`."""
        ...

    def location_text(self, path: str, node: Leaf | Section | None) -> str:
        """Return the path followed by the file or override that set it."""
        ...

    errors: list[UserError]


def record_unknown_name(
    key: str, node: Leaf | Section, path: str, value_paths: list[str], collector: ErrorCollector
) -> None:
    """Append the error for the unknown name ``key`` in the section at ``path``, with a suggestion.

    ``value_paths`` are the paths of all keys of the section, relative to the section.
    """
    full_name = key_path(path, key)
    is_former_section = any(name.startswith(f"{full_name}.") for name in RENAMED)
    if is_former_section and isinstance(node, Section) and not node.children:
        return  # older versions wrote this section into each run folder, even if it was empty

    # The valid names in this section are the first components of the paths.
    valid_names = list(dict.fromkeys(name.partition(".")[0] for name in value_paths))
    noun = "section" if isinstance(node, Section) else "name"
    message = f"`{full_name}` is not a known {noun}"
    fix = "remove the line"
    counterpart = counterpart_in_section(full_name, path, value_paths)
    similar_name = nearest(key, valid_names)
    if counterpart is not None:
        message = f"`{full_name}` is called `{counterpart.ours}` here"
        fix = f"write `{counterpart.ours}`"
    elif similar_name is not None:
        suggestion = key_path(path, similar_name)
        message += f"; did you mean `{suggestion}`?"
        fix = f"write `{suggestion}`, or remove the line"

    expected = "no names: it has no settings"
    if valid_names:
        expected = f"one of {', '.join(valid_names)}"
    collector.errors.append(
        UnknownName(
            message,
            where=collector.location_text(full_name, node),
            expected=expected,
            got=_unknown_names_text(key, node),
            fix=fix,
            key=key,
            section=path,
            value=node.plain(),
            overrides=node.origin.kind == "override",
            section_keys=tuple(value_paths),
        )
    )


def _unknown_names_text(key: str, node: Leaf | Section) -> str:
    """Format an unknown name, or the first 8 paths in an unknown section, for the ``got`` of its error."""
    if isinstance(node, Leaf):
        return f"`{key}`"

    paths = [f"`{path}`" for path, _ in node.leaves(key)]
    if not paths:
        return "an empty section"
    if len(paths) > 8:
        return ", ".join(paths[:8]) + " ..."
    return ", ".join(paths)
