"""Every key of a run's configuration, as typed, frozen values; importable without torch.

A user states intent; a field left at None is derived, and ``check`` shows its value and the reason.
Meaning, unit and bounds stand on each field, written as `setting` says. `RunConfig` holds the sections; the
larger ones have a file each in `sections`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.config.sections.algorithm import AlgorithmConfig
from megatron_rl.config.sections.bounds import ENDLESS, MANY, POSITIVE, RANKS, SECONDS, STEPS, TOKENS, WAIT
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.evaluation import NEVER, EvaluationConfig
from megatron_rl.config.sections.logging import LoggingConfig
from megatron_rl.config.sections.models import ActorConfig, CriticConfig, ReferenceConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.config.sections.rollout import (
    AsynchronyConfig,
    HybridEngineConfig,
    MismatchConfig,
    RolloutConfig,
)
from megatron_rl.config.sections.stages import PreferenceConfig, SftConfig
from megatron_rl.config.sections.starting_model import ModelConfig
from megatron_rl.config.setting import required, setting

_OPTIMIZER_STEPS = "ours counts optimizer steps per batch: batch size / mini-batch size"
_EPOCHS = "ours counts steps: epochs x prompts / batch.prompts_per_step"
_PROCESSES = "ours is the number of processes: nodes x GPUs per node"


TRAIN = "train"
STAGE_JOBS = ("sft", "prefer", "reward-model")
JOBS = (TRAIN, *STAGE_JOBS)


@dataclass(frozen=True)
class BatchConfig:
    """State the batch in prompts; rows, mini-batches and micro-batches follow."""

    prompts_per_step: int = setting(
        64,
        "Prompts that a training step takes.",
        unit="prompts",
        **MANY,
        also_called={
            "verl": "train_batch_size, data.train_batch_size",
            "NeMo-RL": "num_prompts_per_step",
            "slime": "rollout_batch_size",
            "common": "prompts_per_step, batch_size",
            "TRL": "generation_batch_size",
        },
        conversion={
            "train_batch_size": "verl's counts prompts, as ours does; OpenRLHF's counts the "
            "rows of an optimizer step: see batch.optimizer_steps",
            "generation_batch_size": "ours counts prompts: generation_batch_size / num_generations",
            "batch_size": "ours counts the prompts of a step",
        },
    )
    samples_per_prompt: int = setting(
        8,
        "Responses sampled to each prompt, which form a group.",
        unit="rows",
        **MANY,
        also_called={
            "verl": "rollout.n",
            "slime": "n_samples_per_prompt",
            "NeMo-RL": "num_generations_per_prompt",
            "TRL": "num_generations",
            "AReaL": "group_size, n_samples",
            "common": "samples_per_prompt, num_samples_per_prompt, samples_per_group",
            "ROLL": "num_return_sequences_in_group",
        },
    )
    optimizer_steps: int = setting(
        1,
        "Mini-batches, each of one optimizer step, that a step's rows are dealt into.",
        unit="optimizer steps",
        **MANY,
        also_called={
            "slime": "global_batch_size, num_steps_per_rollout",
            "NeMo-RL": "train_global_batch_size",
            "verl": "ppo_mini_batch_size",
            "TRL": "steps_per_generation",
            "AReaL": "ppo_n_minibatches",
            "common": "mini_batch_size, num_minibatches",
        },
        conversion=_OPTIMIZER_STEPS,
    )
    epochs: int = setting(
        1,
        "Times that a step's rows are learned from.",
        at_least=1,
        at_most=10_000,
        also_called={"verl": "ppo_epochs", "TRL": "num_iterations, num_ppo_epochs", "OpenRLHF": "max_epochs"},
    )
    tokens_per_microbatch: int | None = setting(
        None,
        "Most tokens of a micro-batch; rows are packed up to it.",
        **TOKENS,
        unset="what keeps the pipeline busy, at least the longest row",
        also_called={
            "verl": "ppo_micro_batch_size, ppo_micro_batch_size_per_gpu, log_prob_micro_batch_size_per_gpu, "
            "ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu",
            "slime": "max_tokens_per_gpu",
            "OpenRLHF": "train_max_tokens_per_gpu, micro_train_batch_size, micro_rollout_batch_size",
            "NeMo-RL": "train_micro_batch_size, logprob_batch_size",
            "Megatron-LM": "micro_batch_size",
            "TRL": "per_device_train_batch_size",
            "AReaL": "max_tokens_per_mb",
            "common": "per_device_batch_size",
        },
        conversion=dict.fromkeys(
            (
                "ppo_micro_batch_size",
                "ppo_micro_batch_size_per_gpu",
                "log_prob_micro_batch_size_per_gpu",
                "train_micro_batch_size",
                "logprob_batch_size",
                "micro_batch_size",
                "per_device_train_batch_size",
                "micro_train_batch_size",
                "micro_rollout_batch_size",
                "per_device_batch_size",
            ),
            "ours bounds a micro-batch in tokens; leave it out to have it derived",
        ),
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Set how often state is saved, how many checkpoints stay, and whether to resume."""

    VALUE_KEY: ClassVar[str] = "every"

    every: int = setting(
        50,
        "Steps between checkpoints.",
        **STEPS,
        advice=NEVER,
        also_called={
            "verl": "save_freq",
            "NeMo-RL": "save_period",
            "slime": "save_interval",
            "TRL": "save_steps",
            "common": "checkpoint_interval, save_every",
        },
    )
    keep: int = setting(
        3,
        "Newest checkpoints that stay.",
        **ENDLESS,
        also_called={
            "NeMo-RL": "keep_top_k",
            "verl": "max_actor_ckpt_to_keep, max_ckpt_to_keep",
            "TRL": "save_total_limit",
            "OpenRLHF": "max_ckpt_num",
        },
    )
    best: str | None = setting(
        None,
        "Metric of an evaluation set, such as eval/NAME/accuracy: a checkpoint is saved where it is among "
        "the best measured, and the best stay.",
        unset="none",
        also_called={
            "NeMo-RL": "checkpointing.metric_name",
            "transformers": "metric_for_best_model",
            "OpenRLHF": "best_metric_key",
        },
        conversion="ours is eval/NAME/accuracy or another metric of an evaluation set",
    )
    best_is: str = setting(
        "highest",
        "Which measurement of `best` is the best.",
        choices=("highest", "lowest"),
        spelled={"max": "highest", "min": "lowest"},
        also_called={"NeMo-RL": "checkpointing.higher_is_better", "transformers": "greater_is_better"},
        their_values={
            "checkpointing.higher_is_better": {True: "highest", False: "lowest"},
            "greater_is_better": {True: "highest", False: "lowest"},
        },
    )
    keep_best: int = setting(1, "Best checkpoints that stay, beside the newest.", **ENDLESS)
    optimizer_layout: str = setting(
        ANY,
        "How distributed optimizers lie in checkpoints: any gathers whole parameters, for every layout; same "
        "writes each rank's shards as they are, for layouts of the same tensor, pipeline and expert sizes. "
        "Then the last checkpoint of a run, and that of a stop, are written once more for any.",
        choices=(ANY, SAME),
    )
    asynchronous: bool = setting(
        False,
        "Write a checkpoint while the next steps are taken, from a copy in the memory of the host; the next "
        "checkpoint, and the end of the job, wait until it is complete.",
        also_called={"Megatron-LM": "async_save"},
    )
    resume: str = setting(
        "auto",
        "auto (the newest checkpoint of the run folder, if any), never, or the path of a checkpoint.",
        also_called={
            "verl": "resume_mode, resume_from_path",
            "transformers": "resume_from_checkpoint",
            "OpenRLHF": "load_checkpoint",
            "common": "resume",
        },
        their_values={
            "resume_mode": {"disable": "never"},
            "resume_from_checkpoint": {True: "auto", False: "never"},
            "load_checkpoint": {True: "auto", False: "never"},
            "resume": {True: "auto", False: "never"},
        },
    )
    trust: bool = setting(
        False, "Load a checkpoint also where its files name more than data: loading it may run code."
    )
    stop_seconds: float = setting(
        25.0,
        "Time that a job which a signal asks to stop has until it has saved; torchrun kills its ranks 30 s "
        "after it was asked itself.",
        **WAIT,
    )
    export: bool = setting(
        True,
        "Write a Hugging Face checkpoint at the end of the run.",
        also_called={"OpenRLHF": "save_hf_ckpt", "NeMo-RL": "save_consolidated"},
    )
    megatron: str | None = setting(
        None,
        "Folder that takes the actor's weights for Megatron-LM: at each checkpoint of a run, `keep` of which "
        "stay, and at the end of a stage that is a job.",
        unset="none",
        also_called={"Megatron-LM": "save"},
    )


@dataclass(frozen=True)
class RunConfig:
    """Hold one whole run."""

    model: ModelConfig = required("The model that every role starts from.")
    data: DataConfig = required("Data sets.")
    reward: RewardConfig = required("What judges responses.")
    run_dir: str = required(
        "Folder of the run: metrics, rollouts, checkpoints, report.",
        example="runs/first",
        also_called={
            "verl": "default_local_dir",
            "NeMo-RL": "checkpoint_dir, log_dir",
            "TRL": "output_dir",
            "OpenRLHF": "save_path, ckpt_path",
            "common": "output_path, save_dir",
            "Megatron-LM": "tensorboard_dir",
            "AReaL": "fileroot",
        },
    )
    steps: int = required(
        "Training steps of the run.",
        jobs=(TRAIN,),
        **STEPS,
        example="200",
        also_called={
            "verl": "total_training_steps, total_epochs",
            "slime": "num_rollout, num_epoch",
            "NeMo-RL": "max_num_steps, max_num_epochs",
            "TRL": "max_steps, num_train_epochs",
            "OpenRLHF": "num_episodes",
            "common": "epochs, num_epochs, num_steps, total_steps",
            "Megatron-LM": "train_iters",
            "AReaL": "total_train_epochs, total_train_steps",
        },
        conversion=dict.fromkeys(
            ("total_epochs", "max_num_epochs", "num_train_epochs", "num_episodes"), _EPOCHS
        )
        | {
            "epochs": "ours counts steps: epochs x prompts / batch.prompts_per_step",
            "num_epochs": "ours counts steps: epochs x prompts / batch.prompts_per_step",
            "total_train_epochs": "ours counts steps: epochs x prompts / batch.prompts_per_step",
            "num_epoch": "ours counts steps: epochs x prompts / batch.prompts_per_step",
        },
    )
    job: str = setting(
        TRAIN,
        "What is run: everything, or one stage before reinforcement learning alone. The command says it.",
        choices=JOBS,
    )
    seed: int = setting(
        1,
        "Seed of weights, data order and sampling.",
        at_least=0,
        at_most=2**32 - 1,
        also_called={"common": "random_seed", "slime": "rollout_seed"},
    )
    world_size: int | None = setting(
        None,
        "Processes (GPUs) of the job.",
        **RANKS,
        unset="what the launcher says",
        also_called={"verl": "nnodes", "NeMo-RL": "num_nodes", "common": "num_gpus, n_gpus, num_processes"},
        conversion=dict.fromkeys(("nnodes", "num_nodes"), _PROCESSES)
        | {"num_gpus": "", "n_gpus": "", "num_processes": ""},
    )
    gpus_per_node: int = setting(
        8,
        "GPUs of a node.",
        at_least=1,
        at_most=1024,
        also_called={
            "verl": "n_gpus_per_node",
            "slime": "num_gpus_per_node",
            "NeMo-RL": "cluster.gpus_per_node",
            "common": "gpus_per_host",
        },
    )
    gpu: str | None = setting(
        None,
        "Name of the GPU, whose memory `check` compares and whose speed predictions are of.",
        unset="no predictions",
        also_called={"common": "gpu_type, gpu_name, gpu_model"},
    )
    gpu_memory_gib: float | None = setting(
        None,
        "Memory of a GPU, which `check` compares its estimate with.",
        unit="GiB",
        unset="that of `gpu`; without one nothing is compared",
        **POSITIVE,
    )
    network_gigabits_per_gpu: float | None = setting(
        None,
        "Bandwidth of the network per GPU, for predictions.",
        unit="Gbit/s",
        unset="that of the GPU's usual machine",
        **POSITIVE,
    )
    placement: str = setting(
        "colocate",
        "Ranks of layouts that name none: every rank to every role (colocate), the second half to the "
        "rollout alone (standalone), or the second half to the critic and the reward models (split).",
        choices=("colocate", "standalone", "split"),
        also_called={"OpenRLHF": "colocate_all_models", "slime": "colocate"},
        their_values={
            "colocate_all_models": {True: "colocate"},
            "colocate": {True: "colocate", False: "standalone"},
        },
    )
    algorithm: AlgorithmConfig = setting(AlgorithmConfig(), "How the actor learns from rewards.")
    batch: BatchConfig = setting(BatchConfig(), "Sizes of a step's batches.")
    actor: ActorConfig = setting(ActorConfig(), "The trained policy.")
    critic: CriticConfig | None = setting(None, "The critic.", unset="one where the algorithm needs it")
    reference: ReferenceConfig | None = setting(
        None, "The reference policy.", unset="one where the algorithm needs it"
    )
    rollout: RolloutConfig = setting(RolloutConfig(), "Generation of responses.")
    hybrid_engine: HybridEngineConfig = setting(HybridEngineConfig(), "Weights from actor to engine.")
    mismatch: MismatchConfig = setting(MismatchConfig(), "Difference of trainer and engine.")
    asynchrony: AsynchronyConfig = setting(AsynchronyConfig(), "Sampling ahead of the learner.")
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "Evaluation on held-out prompts.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "Saving and resuming.")
    logging: LoggingConfig = setting(LoggingConfig(), "Experiment trackers.")
    sft: SftConfig | None = setting(None, "Supervised warm-up.", unset="none")
    preference: PreferenceConfig | None = setting(None, "Training on preferences.", unset="none")
    rank_timeout: float = setting(
        600.0,
        "Time after which a job stops in which no rank gets on. A rank may wait longer for one that does.",
        **SECONDS,
        also_called={"Megatron-LM": "distributed_timeout_minutes", "verl": "nccl_timeout"},
        conversion={"distributed_timeout_minutes": "ours is in seconds"},
    )
    prepare: dict[str, str] = setting(
        {},
        "Commands that make directories which the run needs: directory -> command. Files missing below one "
        "that is not there yet are a warning of `check` and an error of `train`.",
    )
