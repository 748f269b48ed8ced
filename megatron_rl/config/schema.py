"""Every key of a run's configuration, as typed, frozen values; importable without torch.

A user sets only the keys that matter to the run. A field left at None is derived, and ``check`` prints its
value and the reason. Each field describes its own meaning, unit and bounds, see `setting`. `RunConfig`
contains all sections; each larger section has a file in `sections`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.config.sections.algorithm import AlgorithmConfig
from megatron_rl.config.sections.bounds import ENDLESS, MANY, POSITIVE, RANKS, SECONDS, STEPS, TOKENS, WAIT
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.evaluation import NEVER, EvaluationConfig
from megatron_rl.config.sections.health import HealthConfig
from megatron_rl.config.sections.logging import LoggingConfig
from megatron_rl.config.sections.models import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    ReferenceConfig,
    TaskTeacherConfig,
    TeacherConfig,
)
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.config.sections.rollout import (
    AsynchronyConfig,
    HybridEngineConfig,
    MismatchConfig,
    RolloutConfig,
)
from megatron_rl.config.sections.stages import PreferenceConfig, SftConfig
from megatron_rl.config.sections.teacher_server import TeacherServerConfig
from megatron_rl.config.setting import required, setting

# Conversions from names of other projects that several keys share.
_OPTIMIZER_STEPS = "ours counts optimizer steps per batch: batch size / mini-batch size"
_EPOCHS = "ours counts steps: epochs x prompts / batch.prompts_per_step"
_PROCESSES = "ours is the number of processes: nodes x GPUs per node"

# Jobs: a complete run with its stages, or one stage alone.
TRAIN = "train"
STAGE_JOBS = ("sft", "prefer", "reward-model")
JOBS = (TRAIN, *STAGE_JOBS)


@dataclass(frozen=True)
class BatchConfig:
    """Batch sizes of a step, in prompts; rows, mini-batches and micro-batches follow from them."""

    prompts_per_step: int = setting(
        64,
        "Number of prompts of a training step.",
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
        "Number of responses sampled for each prompt; together they are a group.",
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
    # One update per step by default, which makes training on-policy up to the engine's rounding.
    optimizer_steps: int = setting(
        1,
        "Number of mini-batches, each with one optimizer step, that the rows of a step are divided into.",
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
        "Number of passes over the rows of a step.",
        at_least=1,
        at_most=10_000,
        also_called={"verl": "ppo_epochs", "TRL": "num_iterations, num_ppo_epochs", "OpenRLHF": "max_epochs"},
    )
    # In tokens, since memory depends on tokens and rows have different lengths.
    tokens_per_microbatch: int | None = setting(
        None,
        "Largest number of tokens of a micro-batch, up to which rows are packed.",
        **TOKENS,
        unset="enough micro-batches to keep the pipeline busy, and at least the longest row",
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
    memory_target: float | None = setting(
        None,
        "Share of a GPU's memory that passes over micro-batches may occupy at their peak. It sets "
        "tokens_per_microbatch, which must then not be set: by the estimate of `check` first, and in "
        "reinforcement learning by the measured passes of each step.",
        at_least=0.1,
        at_most=0.98,
        unset="tokens_per_microbatch is the same in all steps",
        also_called={"common": "target_utilization"},
        conversion={
            "target_utilization": "ours is a share of the memory of a GPU; rollout.memory_fraction is that "
            "of the engine"
        },
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: their interval, the number that is retained, and the one to resume from."""

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
        "Number of newest checkpoints that are retained.",
        **ENDLESS,
        also_called={
            "NeMo-RL": "keep_top_k",
            "verl": "max_actor_ckpt_to_keep, max_ckpt_to_keep",
            "TRL": "save_total_limit",
            "OpenRLHF": "max_ckpt_num",
        },
    )
    # Retention of the best checkpoint, in addition to the newest ones.
    best: str | None = setting(
        None,
        "Metric of an evaluation set, such as eval/NAME/accuracy. A checkpoint is saved when its value is "
        "among the best, and the best checkpoints are retained.",
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
        "Whether the highest or the lowest value of `best` is the best.",
        choices=("highest", "lowest"),
        spellings={"max": "highest", "min": "lowest"},
        also_called={"NeMo-RL": "checkpointing.higher_is_better", "transformers": "greater_is_better"},
        their_values={
            "checkpointing.higher_is_better": {True: "highest", False: "lowest"},
            "greater_is_better": {True: "highest", False: "lowest"},
        },
    )
    keep_best: int = setting(
        1, "Number of best checkpoints that are retained in addition to the newest.", **ENDLESS
    )
    # How checkpoints are written.
    optimizer_layout: str | None = setting(
        None,
        "Layout of distributed optimizers in checkpoints. `any` gathers complete parameters, in host memory "
        "of every rank. `same` writes the shards of each rank as they are, with an index: layouts with other "
        "tensor, pipeline or expert sizes then read the ranges of their own parameters. Only Adam's shards "
        "have an index; of other optimizers the last checkpoint, and that of a stop, are written once more "
        "for any.",
        unset="same in a job of several nodes with a model of a billion parameters or more, else any",
        choices=(ANY, SAME),
    )
    asynchronous: bool = setting(
        False,
        "Write a checkpoint during the next steps, from a copy in host memory. The next checkpoint, and the "
        "end of the job, wait until it is complete.",
        also_called={"Megatron-LM": "async_save"},
    )
    # Resuming, and what is saved when a run is interrupted.
    resume: str = setting(
        "auto",
        "Checkpoint to resume from: the newest one of the run folder, if any (auto), none (never), or a "
        "path.",
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
        False, "Load a checkpoint even if its files contain more than data: loading it may run code."
    )
    stop_seconds: float | None = setting(
        None,
        "Time limit for the checkpoint of a job that a signal stops. torchrun kills its ranks "
        "`--shutdown-timeout` seconds after it has received the signal; give a large model the time that "
        "`check` estimates for its checkpoint.",
        unset="5 s less than TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which is 30 s if it is not set",
        **WAIT,
    )
    # Exported models, which other programs can load.
    export: bool = setting(
        True,
        "Write a Hugging Face checkpoint at the end of the run.",
        also_called={"OpenRLHF": "save_hf_ckpt", "NeMo-RL": "save_consolidated"},
    )
    megatron: str | None = setting(
        None,
        "Folder for the actor's weights in Megatron-LM's format. They are written at each checkpoint of a "
        "run, of which `keep` are retained, and at the end of the job of one stage.",
        unset="none",
        also_called={"Megatron-LM": "save"},
    )


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one run.

    Example: ``load_config("configs/quickstart.yaml").actor.layout.tensor``.
    """

    # The run: its inputs, its folder and its length.
    model: ModelConfig = required("The model that every role starts from.")
    data: DataConfig = required("Data sets.")
    reward: RewardConfig = required("Rewards of responses.")
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
        "Number of training steps of the run.",
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
            (
                "total_epochs",
                "max_num_epochs",
                "num_train_epochs",
                "num_episodes",
                "epochs",
                "num_epochs",
                "total_train_epochs",
                "num_epoch",
            ),
            _EPOCHS,
        ),
    )
    job: str = setting(
        TRAIN,
        "Complete run (train), or a single stage before reinforcement learning. The command sets it.",
        choices=JOBS,
    )
    seed: int = setting(
        1,
        "Seed of weights, data order and sampling.",
        at_least=0,
        at_most=2**32 - 1,
        also_called={"common": "random_seed", "slime": "rollout_seed"},
    )
    deterministic: bool = setting(
        False,
        "On accelerators, use only kernels whose results are equal to the last bit in every run. There, a "
        "resumed run equals an uninterrupted one only with this setting; on hosts it always does.",
        also_called={"Megatron-LM": "deterministic_mode", "verl": "full_determinism"},
    )
    # The machine.
    world_size: int | None = setting(
        None,
        "Number of processes (GPUs) of the job.",
        **RANKS,
        unset="the launcher's number of processes",
        also_called={"verl": "nnodes", "NeMo-RL": "num_nodes", "common": "num_gpus, n_gpus, num_processes"},
        conversion={"nnodes": _PROCESSES, "num_nodes": _PROCESSES},
    )
    gpus_per_node: int = setting(
        8,
        "Number of GPUs of a node.",
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
        "Name of the GPU, for the memory that `check` compares with and for predictions of speed.",
        unset="this machine; `check` predicts a step on an H100",
        also_called={"common": "gpu_type, gpu_name, gpu_model"},
    )
    gpu_memory_gib: float | None = setting(
        None,
        "Memory of a GPU that `check` compares its estimate with.",
        unit="GiB",
        unset="that of `gpu`; without `gpu` nothing is compared",
        **POSITIVE,
    )
    host_memory_gib: float | None = setting(
        None,
        "Memory of a node's host that `check` compares the memory of a checkpoint with.",
        unit="GiB",
        unset="nothing is compared",
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
        "Ranks of the layouts that set none: all ranks for every role (colocate), the second half for the "
        "rollout alone (standalone), or the second half for the critic and the reward models (split).",
        choices=("colocate", "standalone", "split"),
        also_called={"OpenRLHF": "colocate_all_models", "slime": "colocate"},
        their_values={
            "colocate_all_models": {True: "colocate"},
            "colocate": {True: "colocate", False: "standalone"},
        },
    )
    # Training.
    algorithm: AlgorithmConfig = setting(AlgorithmConfig(), "Algorithm that trains the actor on rewards.")
    batch: BatchConfig = setting(BatchConfig(), "Batch sizes of a step.")
    actor: ActorConfig = setting(ActorConfig(), "The trained policy.")
    critic: CriticConfig | None = setting(None, "The critic.", unset="one if the algorithm needs it")
    reference: ReferenceConfig | None = setting(
        None, "The reference policy.", unset="one if the algorithm needs it"
    )
    teacher: TeacherConfig | None = setting(None, "The teacher of a distillation.", unset="none")
    teachers: dict[str, TaskTeacherConfig] = setting(
        {},
        "Teachers of single tasks, by name, beside or in place of `teacher`.",
        also_called={"verl": "distillation.teacher_models"},
        conversion="ours has the tasks of each: NAME.tasks",
    )
    teacher_server: TeacherServerConfig | None = setting(
        None,
        "A teacher behind a vLLM server, in place of `teacher`.",
        unset="none",
        also_called={"TRL": "teacher_model_server_url"},
        conversion="with algorithm.distillation; ours is a section with url and model",
    )
    # Generation, and its connection with training.
    rollout: RolloutConfig = setting(RolloutConfig(), "Generation of responses.")
    hybrid_engine: HybridEngineConfig = setting(
        HybridEngineConfig(), "Weight sync from the actor to the engine."
    )
    mismatch: MismatchConfig = setting(
        MismatchConfig(), "Thresholds for the difference between the log-probs of trainer and engine."
    )
    asynchrony: AsynchronyConfig = setting(AsynchronyConfig(), "Sampling ahead of training.")
    # Everything around the steps.
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "Evaluation on held-out prompts.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "Saving and resuming.")
    health: HealthConfig = setting(HealthConfig(), "Rules that watch a run's metrics.")
    logging: LoggingConfig = setting(LoggingConfig(), "Experiment trackers.")
    callbacks: tuple[str, ...] = setting(
        (),
        "Classes of your own whose methods are called at each step: path/to/file.py:Class or module:Class.",
    )
    # Stages before reinforcement learning.
    sft: SftConfig | None = setting(None, "Supervised warm-up.", unset="none")
    preference: PreferenceConfig | None = setting(None, "Training on preferences.", unset="none")
    # PyTorch's default timeout for NCCL collectives is also 10 minutes.
    rank_timeout: float = setting(
        600.0,
        "Time without progress of any rank after which the job stops. A rank may wait longer for a rank that "
        "makes progress.",
        **SECONDS,
        also_called={"Megatron-LM": "distributed_timeout_minutes", "verl": "nccl_timeout"},
        conversion={"distributed_timeout_minutes": "ours is in seconds"},
    )
    prepare: dict[str, str] = setting(
        {},
        "Commands that create directories which the run needs: directory -> command. A missing file in such "
        "a directory is a warning of `check` until the directory exists, and an error of `train`.",
    )

    @property
    def reward_functions(self) -> dict[str, str]:
        """Map the configuration key of each reward function for training samples to its import path."""
        functions: dict[str, str] = {}
        if self.reward.function is not None:
            functions["reward.function"] = self.reward.function
        for source, function in self.data.source_rewards.items():
            functions[f"data.sources.{source}.reward"] = function
        return functions
