"""The configuration of a run as typed, frozen values; importable without torch.

A user states intent; a field left at None is derived and its value and reason are shown by ``check``.
Lengths are in tokens, batch sizes in prompts or rows as named, times in seconds, memory in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Name the Hugging Face checkpoint every role starts from.

    ``path`` is a local directory with config.json, safetensors and tokenizer files.
    ``dtype`` is the training and rollout dtype: ``bfloat16`` or ``float32``.
    """

    path: str
    dtype: str = "bfloat16"
    attention: str | None = None  # None: transformer_engine where it is installed, else torch


@dataclass(frozen=True)
class LayoutConfig:
    """Say which ranks a role uses and how it is cut; data parallelism is what remains.

    ``ranks`` None means every rank of the job; YAML may write a list or ranges such as ``"0-31,40"``.
    ``virtual_pipeline`` is the number of model chunks per pipeline stage.
    """

    ranks: tuple[int, ...] | None = None
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool | None = None  # None: on when tensor > 1


@dataclass(frozen=True)
class OptimizerConfig:
    """Set AdamW, its learning-rate schedule and gradient clipping."""

    learning_rate: float = 1e-6
    minimum_learning_rate: float | None = None  # None: equal to learning_rate (constant)
    warmup_steps: int = 0
    decay: str = "constant"  # constant, linear, cosine
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
    offload: bool = False


@dataclass(frozen=True)
class ActorConfig:
    """Describe the trained policy: its layout, optimizer and activation recompute.

    ``megatron`` passes fields through to Megatron-Core's TransformerConfig, checked against the
    installed version.
    """

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: str = "none"  # none, selective, full
    offload: bool = False  # training state to host memory during rollout
    megatron: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReferenceConfig:
    """Describe the frozen reference policy; ``layout`` None means the actor's."""

    path: str | None = None  # None: model.path, after `sft` where there is one
    layout: LayoutConfig | None = None
    offload: bool = False  # to host memory while other roles work


@dataclass(frozen=True)
class CriticConfig:
    """Describe the critic of PPO: a model with a head of one number that learns beside the actor.

    ``path`` is a policy, whose output layer gives way to a new head, or a ``*ForSequenceClassification``
    checkpoint with one label. In the first ``warmup_steps`` steps of the run the critic learns alone.
    """

    path: str | None = None  # None: model.path, after `sft` where there is one
    layout: LayoutConfig | None = None  # None: the actor's
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))
    recompute: str = "none"
    warmup_steps: int = 0
    offload: bool = False  # its training state to host memory while other roles work


@dataclass(frozen=True)
class RolloutConfig:
    """Describe generation: engine, its layout, and how responses are sampled.

    ``engine`` is ``vllm`` or ``torch``; ``tensor`` is the engine's tensor parallelism and the number of
    replicas follows from the ranks. ``vllm`` passes fields through to vLLM's engine arguments.

    ``oversample`` is the fraction of further prompts sampled beside those of a step, which then takes the
    groups that are complete first, looked at after every ``round_tokens`` tokens per response. The others are
    continued in the next step with ``partial``, else discarded; their prompts then come again, and prompts
    with short responses are learned from more often.
    """

    engine: str = "vllm"
    ranks: tuple[int, ...] | None = None
    tensor: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 256
    stop: tuple[str, ...] = ()
    sampling_profiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task name
    oversample: float = 0.0
    partial: bool = False
    round_tokens: int | None = None  # None: an eighth of max_response_tokens
    memory_fraction: float = 0.6
    vllm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HybridEngineConfig:
    """Bound and check the movement of weights from the actor into the rollout engine."""

    staging_bytes: int = 256 * 2**20
    verify: str = "full"  # full, sampled, off


@dataclass(frozen=True)
class MismatchConfig:
    """Set when the difference of trainer and rollout log-probs warns and when it stops the run.

    Both are the mean absolute difference per response token. None derives it from the dtype.
    """

    warn: float | None = None
    stop: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """Name the data sets and the fields of a record.

    ``train`` and ``eval`` are .jsonl or .parquet files or directories saved by HF ``datasets``.
    """

    train: str
    eval: str | None = None
    prompt_field: str = "prompt"
    ground_truth_field: str = "ground_truth"
    task_field: str = "task"
    chat_template: bool | None = None  # None: when the prompt field holds a list of messages
    max_prompt_tokens: int = 1024
    over_long: str = "drop"  # drop (counted and reported) or error
    shuffle: bool = True


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Train a reward model on preferences (Bradley-Terry) before the run's first step.

    ``data`` has the prompt field, ``chosen_field`` and ``rejected_field``.
    """

    data: str
    steps: int
    pairs_per_step: int = 32
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))


@dataclass(frozen=True)
class RewardModelConfig:
    """Describe one reward model: it scores a row at its last token, and ``weight`` scales the score.

    ``path`` is a ``*ForSequenceClassification`` checkpoint with one label and the actor's tokenizer, or,
    with ``training``, any policy of that tokenizer.
    """

    path: str | None = None  # None, with training: model.path, after `sft` where there is one
    weight: float = 1.0
    layout: LayoutConfig | None = None  # None: the actor's
    offload: bool = False  # to host memory while other roles work
    training: RewardTrainingConfig | None = None


@dataclass(frozen=True)
class RewardConfig:
    """Say what judges a response: a function, reward models, or a weighted sum of both.

    ``function`` is ``module:function`` or ``path/to/file.py:function``. It is called in worker
    processes as ``function(prompt=, response=, ground_truth=, metadata=, **arguments)`` and returns a
    number, or a mapping of named components that holds ``reward``. The reward of a row is ``weight`` times
    the function's plus the sum over ``models`` of their weights times their scores; where one of them fails
    the row is invalid.
    """

    function: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0
    workers: int = 1
    weight: float = 1.0
    models: dict[str, RewardModelConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgorithmConfig:
    """Choose a named algorithm and override its settings (names of its own dataclass fields)."""

    name: str = "grpo"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchConfig:
    """State the batch in prompts; rows, mini-batches and micro-batches follow.

    ``optimizer_steps`` mini-batches are made of each step's rows, ``epochs`` times over.
    ``tokens_per_microbatch`` bounds a micro-batch; None derives it from the longest row.
    """

    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    optimizer_steps: int = 1
    epochs: int = 1
    tokens_per_microbatch: int | None = None


@dataclass(frozen=True)
class AsynchronyConfig:
    """Let rollout ranks sample ahead of the learner: a step learns from rollouts ``steps_ahead`` updates old.

    0 is the synchronous order. More than 0 needs rollout ranks that no other role uses. No token that is
    learned from is more than ``max_staleness`` updates old: a response carried so long is waited for.
    """

    steps_ahead: int = 0
    max_staleness: int | None = None  # None: steps_ahead, and with rollout.partial two more


@dataclass(frozen=True)
class EvaluationConfig:
    """Set how often and how the evaluation set is answered; ``temperature`` 0 is greedy."""

    every: int = 10
    at_start: bool = True
    temperature: float = 0.0
    samples: int = 1
    max_prompts: int | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """Set how often state is saved, how many checkpoints stay, and whether to resume.

    ``resume`` is ``auto`` (newest checkpoint of the run folder, if any), ``never``, or a path.
    """

    every: int = 50
    keep: int = 3
    resume: str = "auto"
    export: bool = True  # an HF checkpoint at the end of the run


@dataclass(frozen=True)
class SftConfig:
    """Warm the actor up by supervised training before reinforcement learning.

    ``data`` has the prompt field and ``response_field``; the loss is on response tokens.
    """

    data: str
    steps: int
    rows_per_step: int = 64
    response_field: str = "response"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-5))


@dataclass(frozen=True)
class PreferenceConfig(RewardTrainingConfig):
    """Train the actor on preferences (DPO) before reinforcement learning, after ``sft`` where there is one.

    The reference is the policy that this training starts from. ``loss`` is sigmoid, robust, hinge, ipo or
    simpo; ``label_smoothing`` the assumed share of flipped labels (sigmoid, robust), ``margin`` SimPO's
    gamma, ``sft_coef`` weighs the chosen response's mean negative log-likelihood beside it.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.5
    sft_coef: float = 0.0


@dataclass(frozen=True)
class RunConfig:
    """Hold one whole run.

    ``prepare`` says which command makes a directory that the run needs (directory -> command): ``check``
    only warns of files missing below a directory that is not there yet, ``train`` stops and names it.
    ``gpu_memory_gib`` lets ``check`` compare its estimate with what a GPU has; ``gpu`` (a name that ``plan``
    knows) and ``network_gigabits_per_gpu`` are what predictions of the run's speed are for.
    ``placement`` gives ranks to the layouts that name none: ``colocate`` every rank to every role,
    ``standalone`` the second half of the ranks to the rollout alone, ``split`` the second half to the critic
    and the reward models.
    """

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    run_dir: str
    steps: int
    seed: int = 1
    world_size: int | None = None  # None: what the launcher says
    gpus_per_node: int = 8
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    network_gigabits_per_gpu: float | None = None  # None: the GPU's usual machine
    placement: str = "colocate"
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig | None = None
    reference: ReferenceConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    hybrid_engine: HybridEngineConfig = field(default_factory=HybridEngineConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    asynchrony: AsynchronyConfig = field(default_factory=AsynchronyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sft: SftConfig | None = None
    preference: PreferenceConfig | None = None
    rank_timeout: float = 600.0
    prepare: dict[str, str] = field(default_factory=dict)
