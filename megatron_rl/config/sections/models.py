"""What every role with a model says: layout, optimizer, adapters; actor, critic and reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import LARGE, MANY, MAX_WORLD, MOST_STEPS, POSITIVE, RANKS, SHARE
from megatron_rl.config.setting import REMOVED, setting

OWN_MEGATRON = "Fields of Megatron-Core's TransformerConfig for this model."
LIKE_ACTOR = "the actor's, without its uneven pipeline stages where the pipeline is another"
DDP_MEANING = (
    "Fields of Megatron-Core's DistributedDataParallelConfig; overlap_grad_reduce is true on an accelerator, "
    "and overlap_param_gather with it where the optimizer is distributed."
)
RECOMPUTED = "Activations that the backward pass computes again: none, attention (selective), or every layer."
RECOMPUTES = ("none", "selective", "full")
RANKS_LISTED = "ours lists the ranks"
_DATA_PARALLEL = "it is what remains of the ranks after tensor x pipeline x context; set those or world_size"


@dataclass(frozen=True)
class LayoutConfig:
    """Say which ranks a role uses and how its model is cut; data parallelism is what remains."""

    ranks: tuple[int, ...] | None = setting(
        None,
        'Ranks of the role: a list, or ranges such as "0-31,40".',
        unset="what `placement` gives the role",
        also_called={"slime": "actor_num_nodes, actor_num_gpus_per_node"},
        conversion=RANKS_LISTED,
    )
    tensor: int = setting(
        1,
        "Tensor parallelism: ranks that share each layer.",
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
        "Pipeline parallelism: stages that share the layers.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "pipeline_model_parallel_size",
            "common": "pp, pipeline_parallel, pp_size, pipeline_parallel_size",
        },
    )
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
        "Context parallelism: ranks that share each row.",
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
    expert: int = setting(
        1,
        "Expert parallelism: ranks that share a layer's experts.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "Megatron-LM": "expert_model_parallel_size",
            "common": "ep, expert_parallel, ep_size, expert_parallel_size",
        },
    )
    expert_tensor: int | None = setting(
        None,
        "Tensor parallelism inside each expert.",
        **RANKS,
        unset="1: experts are whole",
        advice="1 switches it off",
        also_called={"Megatron-LM": "expert_tensor_parallel_size", "common": "etp"},
    )
    sequence_parallel: bool | None = setting(
        None, "Cut activations between layers over the tensor-parallel ranks.", unset="on where tensor > 1"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Set the optimizer, its learning-rate schedule and gradient clipping."""

    VALUE_KEY: ClassVar[str] = "learning_rate"

    name: str = setting(
        "adam",
        "AdamW, or SGD with momentum, which needs `distributed: false`.",
        choices=("adam", "sgd"),
        spelled={"adamw": "adam"},
        refused={
            "muon": "Megatron-Core 0.16 makes it of emerging_optimizers, which no index has, and checkpoints "
            "do not know its state"
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
    minimum_learning_rate: float | None = setting(
        None,
        "Learning rate that the decay ends at.",
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
        at_most=MOST_STEPS,
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
        "Largest norm of the gradient; 0 switches clipping off.",
        at_least=0,
        at_most=LARGE,
        advice="0 switches clipping off",
        also_called={
            "NeMo-RL": "max_grad_norm",
            "verl": "grad_clip",
            "common": "gradient_clipping, max_norm, grad_norm_clip",
        },
    )
    distributed: bool = setting(
        True,
        "Shard optimizer state over data-parallel ranks.",
        also_called={"Megatron-LM": "use_distributed_optimizer"},
    )
    offload: bool = setting(
        False,
        "Keep Adam's moments and the weights in float32 in host memory, and step there; with `distributed`.",
        also_called={"Megatron-LM": "optimizer_cpu_offload", "OpenRLHF": "adam_offload"},
    )
    megatron: dict[str, Any] = setting(
        {},
        "Further fields of Megatron-Core's OptimizerConfig, types by name such as bfloat16.",
        also_called={"verl": "override_optimizer_config"},
    )


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters of the linear layers (arXiv 2106.09685) over weights that stay as they are."""

    VALUE_KEY: ClassVar[str] = "rank"

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
        "An adapter adds alpha / rank times the product of its matrices.",
        unset="rank: a factor of 1",
        **POSITIVE,
        also_called={"common": "lora_alpha"},
    )
    dropout: float = setting(
        0.0,
        "Share of an adapter's inputs that training drops.",
        at_least=0,
        less_than=1,
        also_called={"common": "lora_dropout"},
    )
    targets: tuple[str, ...] | None = setting(
        None,
        "Megatron's linear layers with adapters, of linear_qkv, linear_proj, linear_fc1 and linear_fc2; the "
        "last two are those of every MLP, in a mixture also of shared experts and of each routed expert, "
        "which has adapters of its own.",
        unset="those that the model has; in a mixture those of attention alone",
        also_called={"NeMo-RL": "lora_target_modules", "PEFT": "target_modules", "common": "lora_modules"},
        conversion=dict.fromkeys(
            ("lora_target_modules", "target_modules"),
            "linear_qkv is q_proj, k_proj and v_proj, linear_proj o_proj, linear_fc1 gate_proj and "
            "up_proj, linear_fc2 down_proj",
        ),
    )
    path: str | None = setting(
        None, "Adapter in PEFT's format to start from.", unset="new adapters, which change nothing"
    )
    sync: str = setting(
        "merged",
        "What each weight sync brings the rollout engine: weights with the adapters added in (merged), or "
        "the adapters alone, which vLLM adds while it samples (adapter).",
        choices=("merged", "adapter"),
    )


@dataclass(frozen=True)
class ActorConfig:
    """Describe the trained policy: its layout, optimizer and recompute of activations."""

    layout: LayoutConfig = setting(
        LayoutConfig(),
        "Ranks and parallelism of the actor.",
        also_called={"NeMo-RL": "megatron_cfg", "common": "dp, data_parallel_size"},
        conversion={"dp": _DATA_PARALLEL, "data_parallel_size": _DATA_PARALLEL},
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "Optimizer of the actor.")
    lora: LoraConfig | None = setting(
        None, "Adapters to train in the place of the weights.", unset="every weight is trained"
    )
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
        "Move training state to host memory during rollout.",
        also_called={
            "verl": "param_offload, grad_offload, optimizer_offload",
            "slime": "offload_train",
            "OpenRLHF": "deepspeed_enable_sleep",
        },
    )
    routing_replay: str = setting(
        "none",
        "Whose experts the tokens of a mixture go to in the actor's updates: those its routers choose anew, "
        "those of the pass that scored the old log-probs (update), or the rollout engine's, in that pass too "
        "(rollout).",
        choices=("none", "update", "rollout"),
        spelled={"R2": "update", "R3": "rollout", "disabled": "none"},
        also_called={"verl": "router_replay.mode", "slime": "use_routing_replay, use_rollout_routing_replay"},
        their_values={
            "use_routing_replay": {True: "update", False: "none"},
            "use_rollout_routing_replay": {True: "rollout", False: "none"},
        },
    )
    freeze_router: bool = setting(False, "Leave the weights of a mixture's routers as they are.")
    megatron: dict[str, Any] = setting(
        {},
        "Fields of Megatron-Core's TransformerConfig, for the model of every role that states none; "
        "apply_rope_fusion is true with Transformer Engine's layers on accelerators, latent attention apart.",
        also_called={"verl": "override_transformer_config"},
    )
    ddp: dict[str, Any] = setting({}, DDP_MEANING, also_called={"verl": "override_ddp_config"})


@dataclass(frozen=True)
class ReferenceConfig:
    """Describe the frozen reference policy."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "Hugging Face checkpoint of the reference.",
        unset="model.path, after `sft` and `preference` where they are",
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
    """Describe the critic of PPO: a model with a head of one number that learns beside the actor."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "A policy, whose output layer gives way to a new head, or a `*ForSequenceClassification` checkpoint "
        "with one label.",
        unset="model.path, after `sft` and `preference` where they are",
        also_called={"verl": "critic.model.path", "slime": "critic_load", "OpenRLHF": "critic_pretrain"},
    )
    layout: LayoutConfig | None = setting(None, "Ranks and parallelism of the critic.", unset="the actor's")
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
        "Adapters to train in the place of the weights, beside the head; where the actor has adapters too, "
        "over the same model on the same ranks, both have one base in memory.",
        unset="every weight is trained",
    )
    recompute: str = setting("none", RECOMPUTED, choices=RECOMPUTES)
    warmup_steps: int = setting(
        0,
        "First steps of the run, in which the critic learns alone.",
        unit="steps",
        at_least=0,
        at_most=MOST_STEPS,
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
        "Move training state to host memory while other roles work.",
        also_called={"verl": "critic.megatron.param_offload, critic.megatron.optimizer_offload"},
    )
    ddp: dict[str, Any] = setting({}, DDP_MEANING)
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)
