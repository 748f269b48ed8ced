"""Models: the starting model; a role's layout, optimizer and adapters; actor, critic and reference.

Every role has the same few sections. A role inherits each unset section from the actor. So the section
``actor`` alone describes the models of most runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import LARGE, MANY, MAX_STEPS, MAX_WORLD, POSITIVE, RANKS, SHARE
from megatron_rl.config.setting import REMOVED, required, setting

# Meanings and choices of keys that several roles have.
OWN_MEGATRON = "Fields of Megatron-Core's TransformerConfig for this model."
LIKE_ACTOR = "the actor's, without its uneven pipeline stages if the pipeline differs"
AFTER_STAGES = "model.path, after `sft` and `preference` if they are set"
DDP_MEANING = (
    "Fields of Megatron-Core's DistributedDataParallelConfig. On an accelerator some have other defaults "
    "(docs/accelerators.md), which `check` prints."
)
RECOMPUTED = "Activations that the backward pass computes again: none, attention (selective), or all (full)."
RECOMPUTES = ("none", "selective", "full")
# Conversions of other projects' keys.
RANKS_LISTED = "ours lists the ranks"
_DATA_PARALLEL = "it is what remains of the ranks after tensor x pipeline x context; set those or world_size"


@dataclass(frozen=True)
class ModelConfig:
    """Checkpoint that every role starts from: a Hugging Face model, or a checkpoint of Megatron-LM."""

    VALUE_KEY: ClassVar[str] = "path"

    # The model itself, in one of two formats.
    path: str = required(
        "Directory with config.json, safetensors and tokenizer files, or a name on the Hugging Face Hub such "
        "as hf://Qwen/Qwen2.5-7B-Instruct. With `megatron` the run writes it, "
        "with only config.json and tokenizer; the default is then a folder in run_dir.",
        example="hf://Qwen/Qwen2.5-7B-Instruct",
        also_called={
            "NeMo-RL": "model_name, tokenizer.name",
            "TRL": "model_name_or_path",
            "OpenRLHF": "pretrain",
            "slime": "hf_checkpoint",
            "common": "model.name, model_path, model_id, tokenizer_path, tokenizer_name",
        },
        conversion={
            "tokenizer.name": "the tokenizer is the model's own",
            "tokenizer_path": "the tokenizer is the model's own",
            "tokenizer_name": "the tokenizer is the model's own",
        },
    )
    megatron: str | None = setting(
        None,
        "Checkpoint of Megatron-LM (torch_dist) with the weights: the folder of --save, or one iter_* in it.",
        unset="the weights are those in `path`",
        also_called={"Megatron-LM": "load", "verl": "dist_checkpointing_path"},
    )
    resume_optimizer: bool = setting(
        False,
        "With `megatron`: the actor's Adam resumes from the moments and steps of the checkpoint. Learning "
        "rate and decay are those of actor.optimizer.",
        also_called={"Megatron-LM": "no_load_optim"},
        their_values={"no_load_optim": {True: False, False: True}},
    )
    hf_path: str | None = setting(
        None,
        "With `megatron`: directory with the tokenizer. A config.json in it is used in place of a derived "
        "one.",
        unset="the tokenizer's directory that the checkpoint's arguments name",
    )
    # No float16: it needs loss scaling.
    dtype: str = setting(
        "bfloat16",
        "Type of weights and activations in training and rollout.",
        choices=("bfloat16", "float32"),
        spellings={"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
        refusal_reasons={"float16": "it needs loss scaling, bfloat16 does not"},
        also_called={
            "NeMo-RL": "precision",
            "transformers": "torch_dtype",
            "OpenRLHF": "param_dtype",
            "TRL": "bf16",
            "Megatron-LM": "params_dtype",
        },
        their_values={"bf16": {True: "bfloat16", False: "float32"}},
    )
    # How the model is built.
    provider: str | None = setting(
        None,
        "Your function that builds the GPTModel of a pipeline stage: module:function or "
        "path/to/file.py:function. Its parameters are any of pre_process, post_process, vp_stage, config, "
        "pg_collection and args.",
        unset="Megatron's GPTModel",
        also_called={"Megatron-LM": "model_provider, gpt_builder", "slime": "custom_model_provider_path"},
    )
    weights: str | None = setting(
        None,
        "With `provider`: module:NAME or path/to/file.py:NAME of a mapping from your parameter names to "
        "Megatron's, both below decoder.layers.N.",
        unset="the provider's parameters have Megatron's names",
    )
    attention: str | None = setting(
        None,
        "Implementation of attention in the trained models.",
        unset="transformer_engine if it is installed, else torch",
        choices=("transformer_engine", "torch"),
        spellings={"te": "transformer_engine"},
        also_called={
            "transformers": "attn_implementation",
            "Megatron-LM": "attention_backend",
            "OpenRLHF": "flash_attn",
        },
    )


@dataclass(frozen=True)
class LayoutConfig:
    """Ranks of a role and the parallel sizes of its model.

    Data parallelism has no key: its size is the number of ranks / (tensor x pipeline x context).
    """

    ranks: tuple[int, ...] | None = setting(
        None,
        'Ranks of the role: a list, or ranges such as "0-31,40".',
        unset="the ranks that `placement` gives the role",
        also_called={"slime": "actor_num_nodes, actor_num_gpus_per_node"},
        conversion=RANKS_LISTED,
    )
    # Sizes. All are 1 by default, so that every rank has a complete model until the user divides it.
    tensor: int = setting(
        1,
        "Tensor parallelism: ranks that each layer is sharded over.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "tensor_model_parallel_size",
            "NeMo-RL": "tensor_parallel_size",
            "common": "tp, tensor_parallel, tp_size",
        },
    )
    pipeline: int = setting(
        1,
        "Pipeline parallelism: stages that the layers are divided into.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "pipeline_model_parallel_size",
            "common": "pp, pipeline_parallel, pp_size, pipeline_parallel_size",
        },
    )
    # This size does not multiply the number of ranks: all chunks of a stage are on one rank.
    virtual_pipeline: int = setting(
        1,
        "Model chunks per pipeline stage (interleaved schedule).",
        at_least=1,
        at_most=MAX_WORLD,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "virtual_pipeline_model_parallel_size, num_virtual_stages_per_pipeline_rank",
            "common": "vpp",
        },
    )
    context: int = setting(
        1,
        "Context parallelism: ranks that each row is divided over.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "context_parallel_size",
            "OpenRLHF": "ring_attn_size",
            "common": "cp, context_parallel, cp_size",
            "verl": "ulysses_sequence_parallel_size",
            "ms-swift": "sequence_parallel_size",
        },
    )
    # Experts divide the ranks independently of the dense layers.
    expert: int = setting(
        1,
        "Expert parallelism: ranks that the experts of a layer are distributed over.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "expert_model_parallel_size",
            "common": "ep, expert_parallel, ep_size, expert_parallel_size",
        },
    )
    # The default is 1, not `tensor` as in Megatron-LM: experts are sharded only on request.
    expert_tensor: int | None = setting(
        None,
        "Tensor parallelism inside each expert.",
        **RANKS,
        unset="1: each expert is on one rank",
        advice="1 switches it off",
        also_called={"Megatron-LM": "expert_tensor_parallel_size", "common": "etp"},
    )
    # With tensor parallelism it saves memory for the same communication.
    sequence_parallel: bool | None = setting(
        None,
        "Shard the activations between layers over the tensor-parallel ranks.",
        unset="on with tensor > 1",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, its learning-rate schedule and gradient clipping."""

    VALUE_KEY: ClassVar[str] = "learning_rate"

    # The choices are the optimizers whose state checkpoints support.
    name: str = setting(
        "adam",
        "AdamW (adam), or SGD with momentum (sgd), which needs `distributed: false`.",
        choices=("adam", "sgd"),
        spellings={"adamw": "adam"},
        refusal_reasons={
            "muon": "Megatron-Core takes it from the package emerging_optimizers, and checkpoints do not "
            "support its state"
        },
        also_called={"Megatron-LM": "optimizer", "TRL": "optim", "common": "optimizer_type, optimizer_name"},
    )
    learning_rate: float = setting(
        1e-6,
        "Learning rate after warm-up.",
        more_than=0,
        at_most=1,
        advice="1e-6 is a usual start for RL, 1e-5 for supervised training",
        also_called={"verl": "lr", "OpenRLHF": "actor_learning_rate", "common": "actor_lr"},
    )
    # Schedule: warm-up from 0, then a decay to the minimum at the end of the run.
    minimum_learning_rate: float | None = setting(
        None,
        "Learning rate at the end of the decay.",
        unset="learning_rate",
        **SHARE,
        also_called={"Megatron-LM": "min_lr", "verl": "min_lr_ratio", "transformers": "min_learning_rate"},
        conversion={"min_lr_ratio": "ours is the rate itself: ratio x learning_rate"},
    )
    warmup_steps: int = setting(
        0,
        "Steps over which the learning rate rises from 0.",
        unit="optimizer steps",
        at_least=0,
        at_most=MAX_STEPS,
        also_called={
            "verl": "lr_warmup_steps, lr_warmup_steps_ratio",
            "Megatron-LM": "lr_warmup_iters",
            "transformers": "warmup_ratio",
            "OpenRLHF": "lr_warmup_ratio",
            "common": "num_warmup_steps",
        },
        conversion={
            "lr_warmup_steps_ratio": "ours counts optimizer steps",
            "warmup_ratio": "ours counts optimizer steps",
            "lr_warmup_ratio": "ours counts optimizer steps",
        },
    )
    decay: str = setting(
        "constant",
        "Shape of the decay after warm-up.",
        choices=("constant", "linear", "cosine"),
        also_called={
            "Megatron-LM": "lr_decay_style",
            "TRL": "lr_scheduler_type",
            "OpenRLHF": "lr_scheduler",
            "verl": "warmup_style",
        },
    )
    # AdamW. The defaults are PyTorch's.
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay of AdamW.",
        at_least=0,
        at_most=LARGE,
        also_called={"OpenRLHF": "l2"},
    )
    beta1: float = setting(
        0.9,
        "Decay of Adam's first moment.",
        at_least=0,
        less_than=1,
        advice="0.9 is usual",
        also_called={"Megatron-LM": "adam_beta1", "verl": "betas", "OpenRLHF": "adam_betas"},
        conversion={
            "betas": "two numbers there: beta1 and beta2 here",
            "adam_betas": "two numbers there: beta1 and beta2 here",
        },
    )
    beta2: float = setting(
        0.999,
        "Decay of Adam's second moment.",
        at_least=0,
        less_than=1,
        advice="0.999 is usual",
        also_called={"Megatron-LM": "adam_beta2"},
    )
    epsilon: float = setting(
        1e-8,
        "Term that keeps Adam's denominator above 0.",
        more_than=0,
        at_most=1,
        advice="1e-8 is usual",
        also_called={"Megatron-LM": "adam_eps", "transformers": "adam_epsilon"},
    )
    clip_grad: float = setting(
        1.0,
        "Largest norm of the gradient, to which larger ones are scaled down; 0 switches clipping off.",
        at_least=0,
        at_most=LARGE,
        advice="0 switches clipping off",
        also_called={
            "NeMo-RL": "max_grad_norm",
            "verl": "grad_clip",
            "common": "gradient_clipping, max_norm, grad_norm_clip",
        },
    )
    # Memory of the state.
    distributed: bool = setting(
        True,
        "Shard optimizer state over data-parallel ranks.",
        also_called={"Megatron-LM": "use_distributed_optimizer"},
    )
    offload: bool = setting(
        False,
        "Keep Adam's moments and float32 weights in host memory and update them there; needs `distributed`.",
        also_called={"Megatron-LM": "optimizer_cpu_offload", "OpenRLHF": "adam_offload"},
    )
    megatron: dict[str, Any] = setting(
        {},
        "Further fields of Megatron-Core's OptimizerConfig; types are written by name, such as bfloat16.",
        also_called={"verl": "override_optimizer_config"},
    )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of linear layers (arXiv 2106.09685), trained in place of the frozen weights."""

    VALUE_KEY: ClassVar[str] = "rank"

    # Size and scale.
    rank: int = setting(
        32,
        "Rank of every adapter.",
        **MANY,
        advice="8 to 128 are usual",
        also_called={"verl": "lora_rank", "PEFT": "lora_r, peft.r", "common": "lora_dim"},
        their_values={"lora_rank": {0: REMOVED}, "lora_dim": {0: REMOVED}, "lora_r": {0: REMOVED}},
    )
    alpha: float | None = setting(
        None,
        "Factor of the adapters: each adds alpha / rank times the product of its matrices.",
        unset="rank: a factor of 1",
        **POSITIVE,
        also_called={"common": "lora_alpha"},
    )
    dropout: float = setting(
        0.0,
        "Probability that training drops an input of an adapter.",
        at_least=0,
        less_than=1,
        also_called={"common": "lora_dropout"},
    )
    targets: tuple[str, ...] | None = setting(
        None,
        "Megatron's linear layers with adapters, of linear_qkv, linear_proj, linear_fc1 and linear_fc2. The "
        "last two are those of every MLP; in a mixture of experts also those of shared experts and of each "
        "routed expert, which has its own adapters.",
        unset="all of these layers that the model has; in a mixture of experts, only those of attention",
        also_called={"NeMo-RL": "lora_target_modules", "PEFT": "target_modules", "common": "lora_modules"},
        conversion=dict.fromkeys(
            ("lora_target_modules", "target_modules"),
            "linear_qkv is q_proj, k_proj and v_proj, linear_proj o_proj, linear_fc1 gate_proj and "
            "up_proj, linear_fc2 down_proj",
        ),
    )
    # Start and transfer.
    path: str | None = setting(
        None, "Adapter in PEFT's format to start from.", unset="new adapters, which add 0"
    )
    sync: str = setting(
        "merged",
        "Transfer of each weight sync: the weights with the adapters added into them (merged), or "
        "only the adapters, which vLLM applies while it samples (adapter).",
        choices=("merged", "adapter"),
    )


@dataclass(frozen=True)
class ActorConfig:
    """Trained policy: its layout, optimizer and recompute of activations."""

    layout: LayoutConfig = setting(
        LayoutConfig(),
        "Ranks and parallelism of the actor.",
        also_called={"NeMo-RL": "megatron_cfg", "common": "dp, data_parallel_size"},
        conversion={"dp": _DATA_PARALLEL, "data_parallel_size": _DATA_PARALLEL},
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "Optimizer of the actor.")
    lora: LoraConfig | None = setting(
        None, "Adapters to train in place of the weights.", unset="every weight is trained"
    )
    # Trade memory for time: recompute activations, or move state to the host.
    recompute: str = setting(
        "none",
        RECOMPUTED,
        choices=RECOMPUTES,
        also_called={
            "Megatron-LM": "recompute_granularity",
            "NeMo-RL": "activation_checkpointing",
            "verl": "enable_gradient_checkpointing",
            "TRL": "gradient_checkpointing",
            "common": "use_gradient_checkpointing",
        },
        conversion=dict.fromkeys(
            (
                "recompute_granularity",
                "activation_checkpointing",
                "enable_gradient_checkpointing",
                "gradient_checkpointing",
            ),
            "none, selective or full",
        ),
        their_values={
            "enable_gradient_checkpointing": {True: "full", False: "none"},
            "gradient_checkpointing": {True: "full", False: "none"},
            "activation_checkpointing": {True: "full", False: "none"},
            "use_gradient_checkpointing": {True: "full", False: "none"},
        },
    )
    offload: bool = setting(
        False,
        "Move weights, gradients and optimizer state to host memory during rollout.",
        also_called={
            "verl": "param_offload, grad_offload, optimizer_offload",
            "slime": "offload_train",
            "OpenRLHF": "deepspeed_enable_sleep",
        },
    )
    # Mixture of experts. If the update routes tokens to other experts than the rollout did, the policy ratio
    # compares two different networks.
    routing_replay: str = setting(
        "none",
        "Experts of each token in the actor's updates of a mixture of experts: the routers choose them again "
        "(none), or they are those of the forward pass that computed the old log-probs (update), or those of "
        "the rollout engine, which that forward pass uses too (rollout).",
        choices=("none", "update", "rollout"),
        spellings={"R2": "update", "R3": "rollout", "disabled": "none"},
        also_called={"verl": "router_replay.mode", "slime": "use_routing_replay, use_rollout_routing_replay"},
        their_values={
            "use_routing_replay": {True: "update", False: "none"},
            "use_rollout_routing_replay": {True: "rollout", False: "none"},
        },
    )
    freeze_router: bool = setting(False, "Do not train the routers of a mixture of experts.")
    # Pass-through settings, under Megatron's own names.
    megatron: dict[str, Any] = setting(
        {},
        "Fields of Megatron-Core's TransformerConfig, also for the roles that have no such settings. "
        "On an accelerator some have other defaults (docs/accelerators.md), which `check` prints.",
        also_called={"verl": "override_transformer_config"},
    )
    ddp: dict[str, Any] = setting({}, DDP_MEANING, also_called={"verl": "override_ddp_config"})


@dataclass(frozen=True)
class TeacherConfig:
    """Frozen policy that the actor learns from, with the actor's tokenizer; see `algorithm.distillation`."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "Hugging Face checkpoint of the teacher.",
        unset="no default: a distillation needs it",
        also_called={
            "slime": "opd_teacher_load",
            "TRL": "teacher_model_name_or_path",
            "common": "teacher_model, teacher_path, teacher_model_path",
        },
        conversion="with algorithm.distillation: reverse_kl",
    )
    layout: LayoutConfig | None = setting(None, "Ranks and parallelism of the teacher.", unset="the actor's")
    offload: bool = setting(False, "Move the model to host memory while other roles work.")
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)


@dataclass(frozen=True)
class TaskTeacherConfig:
    """Teacher for some tasks, see `data.task_field`. The section `teacher` is for all other tasks."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None, "Hugging Face checkpoint of the teacher.", unset="no default: a teacher needs it"
    )
    tasks: tuple[str, ...] = setting((), "Tasks of the teacher; without any, the task of its name.")
    layout: LayoutConfig | None = setting(None, "Ranks and parallelism of the teacher.", unset="the actor's")
    offload: bool = setting(False, "Move the model to host memory while other roles work.")
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)


@dataclass(frozen=True)
class ReferenceConfig:
    """Frozen reference policy."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "Hugging Face checkpoint of the reference.",
        unset=AFTER_STAGES,
        also_called={"slime": "ref_load", "common": "ref_model_path, ref_model, reference_model, ref.path"},
    )
    layout: LayoutConfig | None = setting(
        None, "Ranks and parallelism of the reference.", unset="the actor's"
    )
    offload: bool = setting(
        False,
        "Move the model to host memory while other roles work.",
        also_called={"verl": "ref.megatron.param_offload"},
    )
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)


@dataclass(frozen=True)
class CriticConfig:
    """Critic of PPO: a model with one output per token, which is trained together with the actor."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "Checkpoint of a policy, whose output layer is replaced by a new head, or of a "
        "`*ForSequenceClassification` model with one label.",
        unset=AFTER_STAGES,
        also_called={"verl": "critic.model.path", "slime": "critic_load", "OpenRLHF": "critic_pretrain"},
    )
    layout: LayoutConfig | None = setting(None, "Ranks and parallelism of the critic.", unset="the actor's")
    # Ten times the actor's: the critic fits a target, as in supervised training.
    optimizer: OptimizerConfig = setting(
        OptimizerConfig(learning_rate=1e-5),
        "Optimizer of the critic.",
        also_called_below={
            "learning_rate": {
                "verl": "critic.optim.lr",
                "slime": "critic_lr",
                "OpenRLHF": "critic_learning_rate",
            }
        },
    )
    lora: LoraConfig | None = setting(
        None,
        "Adapters to train in place of the weights, together with the head. If the actor has adapters too, "
        "over the same model on the same ranks, both share one base in memory.",
        unset="every weight is trained",
    )
    recompute: str = setting("none", RECOMPUTED, choices=RECOMPUTES)
    # A new value head is random at first, so advantages computed from it would be noise.
    warmup_steps: int = setting(
        0,
        "Number of steps at the start of the run that train only the critic.",
        unit="steps",
        at_least=0,
        at_most=MAX_STEPS,
        also_called={
            "verl": "critic_warmup",
            "slime": "num_critic_only_steps",
            "OpenRLHF": "freezing_actor_steps",
        },
        their_values={
            "critic_warmup": {0: REMOVED},
            "num_critic_only_steps": {0: REMOVED},
            "freezing_actor_steps": {0: REMOVED, -1: REMOVED},
        },
    )
    offload: bool = setting(
        False,
        "Move weights, gradients and optimizer state to host memory while other roles work.",
        also_called={"verl": "critic.megatron.param_offload, critic.megatron.optimizer_offload"},
    )
    ddp: dict[str, Any] = setting({}, DDP_MEANING)
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)
