"""Typed inputs of a scenario: every field is optional except kind, model and cluster.

Defaults:

- gpus_per_node and network: as in the GPU's usual machine
- placement: colocated; disaggregated if the cluster has train_gpus and rollout_gpus
- train_gpus and rollout_gpus of a disaggregated placement: half of the GPUs each
- layout and rollout: chosen by the planner
- batch: samples_per_prompt 1, micro_batch 1, prompt_tokens 256; optimizer_steps from global_batch, or 1;
  packing off for pretraining, on for reinforcement learning
- response_tokens_mean: a quarter of the maximum for variable lengths, otherwise the maximum
- sequence_length: the prompt plus the longest response
- precision bf16; recompute none, or full if nothing else fits; algorithm grpo; engine current
- optimizer: distributed Adam with 4 + 12 bytes per parameter
- weight_sync: gather_and_load if colocated, planned_peer_to_peer if disaggregated
- memory_fraction: 0.6 if colocated, otherwise 0.9
- FLOPs: attention counted in full, recomputation not counted
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.errors import UserError, nearest
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.generate import RolloutLayout
from megatron_rl.planning.predict.placement import ROLES
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import OptimizerChoice
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

_MEASUREMENT_FIELDS = ("measured", "tolerance", "compare", "notes", "source")
"""Fields that a prediction must not use."""
KINDS = (
    "pretrain_throughput",
    "training_memory",
    "decode_latency",
    "serving_throughput",
    "rl_step",
    "weight_sync",
    "weight_sync_volume",
    "placement_choice",
    "rollout_tensor_choice",
    "fits_in_memory",
)


def without_measurements(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a scenario without measured values and tolerances."""
    return deepcopy({key: value for key, value in entry.items() if key not in _MEASUREMENT_FIELDS})


@dataclass(frozen=True)
class Scenario:
    """Inputs of one scenario."""

    raw: Mapping[str, Any]
    """Fields as they are written, without measured values and tolerances."""
    constants: Constants
    """Constants of the prediction."""

    @property
    def name(self) -> str:
        """Return the scenario's id."""
        return str(self.raw.get("id", "?"))

    @property
    def kind(self) -> str:
        """Return the kind of the scenario; raises UserError for an unknown kind."""
        kind = str(self.raw.get("kind"))
        if kind not in KINDS:
            raise self.error("kind", "one of " + ", ".join(KINDS), kind, nearest(kind, KINDS))
        return kind

    def error(self, key: str, expected: str, got: Any, guess: str | None = None) -> UserError:
        """Return the error for a missing or wrong field of this scenario; ``guess`` is a similar value."""
        return UserError(
            f"scenario {self.name}: field {key} is missing or wrong",
            where=f"{self.name}.{key}",
            expected=expected,
            got=str(got),
            fix=f"did you mean {guess}?" if guess else None,
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a nested mapping of the scenario, or an empty mapping if it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "a mapping", value)
        return value

    def model(self, role: str = "actor") -> ModelShape:
        """Return the model of a role."""
        # A role without a separate model has the model of the scenario.
        reference = self.section("roles").get(role) or self.raw.get("model")
        if reference is None:
            raise self.error("model", "a preset name or an inline configuration", None)
        return load_shape(reference)

    @property
    def machine(self) -> Machine:
        """Return the cluster of all GPUs with the constants and the precision of the prediction."""
        # Take absent numbers from the GPU's usual machine.
        section = self.section("cluster")
        gpu = section.get("gpu")
        if gpu is None:
            raise self.error("cluster.gpu", "a GPU name", None)

        cluster = self.constants.cluster(
            gpu,
            self._gpu_count(section),
            section.get("gpus_per_node"),
            section.get("network_gigabits_per_gpu"),
            section.get("network_gigabits_per_node"),
        )
        return Machine(cluster, self.constants, str(self.raw.get("precision") or "bf16"))

    def _gpu_count(self, section: Mapping[str, Any]) -> int:
        """Return the number of GPUs of the cluster; if absent, the number that layout or rollout use."""
        # The cluster has one number of GPUs, or separate numbers for training and rollout.
        count = section.get("num_gpus") or sum(
            section.get(side, 0) for side in ("train_gpus", "rollout_gpus")
        )
        if count:
            return count
        if self.layout:
            return self.layout.size

        rollout = self.rollout(1)
        if rollout is None:
            return 1
        return rollout.replicas * rollout.gpus

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the complete cluster."""
        return self.machine.cluster.num_gpus

    @property
    def disaggregated(self) -> bool:
        """Return whether training and rollout use separate GPUs."""
        cluster = self.section("cluster")
        # A cluster with separate numbers for training and rollout is disaggregated.
        default = "colocated"
        if {"train_gpus", "rollout_gpus"} <= set(cluster):
            default = "disaggregated"
        return self.raw.get("placement", default) == "disaggregated"

    @property
    def train_gpus(self) -> int:
        """Return the number of training GPUs."""
        if not self.disaggregated:
            return self.gpus

        section = self.section("cluster")
        if section.get("train_gpus"):
            return int(section["train_gpus"])
        if self.layout is not None:
            return self.layout.size
        if section.get("rollout_gpus"):
            return self.gpus - int(section["rollout_gpus"])
        return self.gpus // 2

    @property
    def rollout_gpus(self) -> int:
        """Return the number of rollout GPUs."""
        if not self.disaggregated:
            return self.gpus
        count = self.section("cluster").get("rollout_gpus")
        return int(count or max(1, self.gpus - self.train_gpus))

    @property
    def layout(self) -> ParallelLayout | None:
        """Return the scenario's training layout, or None; an absent ``data`` fills the remaining GPUs."""
        section = self.raw.get("layout")
        if not section:
            return None

        # Absent sizes are 1.
        names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        sizes = {name: int(section.get(name) or 1) for name in names}
        model_ranks = sizes["tensor"] * sizes["pipeline"] * sizes["context"]

        data = section.get("data")
        if data is None:
            cluster = self.section("cluster")
            data = max(1, int(cluster.get("train_gpus") or cluster.get("num_gpus") or 1) // model_ranks)

        # Sequence parallelism is off by default, because Megatron-LM has it only since 2022.
        sequence_parallel = bool(section.get("sequence_parallel", False))
        ranks = tuple(range(model_ranks * int(data)))
        return replace(ParallelLayout(ranks, sequence_parallel=sequence_parallel), **sizes)

    @property
    def fully_sharded(self) -> bool:
        """Return whether weights, gradients and optimizer are sharded over data-parallel ranks (FSDP)."""
        return bool(self.section("layout").get("fully_sharded"))

    def rollout(self, gpus: int) -> RolloutLayout | None:
        """Return the scenario's rollout layout on ``gpus`` GPUs, or None without a tensor size."""
        tensor = self.section("rollout").get("tensor")
        if tensor is None:
            return None
        return self.rollout_with(int(tensor), gpus)

    def rollout_with(self, tensor: int, gpus: int) -> RolloutLayout:
        """Return the scenario's rollout layout on ``gpus`` GPUs with the tensor size ``tensor``."""
        section = self.section("rollout")
        pipeline = int(section.get("pipeline") or 1)
        # The scenario's number of replicas is for its tensor size. For another size, as many as fit are used.
        replicas = None

        if section.get("tensor") == tensor:
            replicas = section.get("replicas")

        limit = section.get("max_sequences")

        return RolloutLayout(
            tensor=tensor,
            pipeline=pipeline,
            expert=int(section.get("expert") or 1),
            replicas=int(replicas or max(1, gpus // (tensor * pipeline))),
            max_sequences=int(limit) if limit else None,
            memory_fraction=self.memory_fraction,
            engine=self.engine,
        )

    @property
    def engine(self) -> str:
        """Return the name of the rollout engine's constants."""
        engine = str(self.section("rollout").get("engine") or "current")
        if engine not in self.constants.engines:
            names = list(self.constants.engines)
            raise self.error("rollout.engine", "one of " + ", ".join(names), engine, nearest(engine, names))
        return engine

    @property
    def memory_fraction(self) -> float:
        """Return the fraction of GPU memory that the engine may use."""
        is_serving = self.kind in ("decode_latency", "serving_throughput")
        # An engine without a trainer on the same GPUs uses nearly all memory.
        default = 0.6
        if self.disaggregated or is_serving:
            default = 0.9
        return float(self.section("rollout").get("memory_fraction") or default)

    @property
    def optimizer(self) -> OptimizerChoice:
        """Return the optimizer's placement and its bytes per parameter."""
        # The default is Adam with gradients, states and a copy of the weights in float32.
        section = self.section("optimizer")
        return OptimizerChoice(
            distributed=bool(section.get("distributed", True)),
            offload=bool(section.get("offload", False)),
            gradient_bytes=float(section.get("gradient_bytes_per_parameter", 4)),
            state_bytes=float(section.get("state_bytes_per_parameter", 12)),
        )

    @property
    def algorithm(self) -> str:
        """Return the algorithm whose roles and phases a reinforcement-learning step has: grpo or ppo."""
        name = str(self.raw.get("algorithm") or "grpo")
        # Variants of GRPO have the same roles and phases.
        if name != "ppo":
            return "grpo"
        return name

    @property
    def sync_method(self) -> str:
        """Return the name of the weight sync method."""
        # Most systems gather complete tensors on shared GPUs, and send planned copies between separate GPUs.
        default = "gather_and_load"
        if self.disaggregated:
            default = "planned_peer_to_peer"
        return str(self.section("weight_sync").get("method") or default)

    @property
    def batch(self) -> StepBatch:
        """Return the batch of a step."""
        section = self.section("batch")
        prompt = float(section.get("prompt_tokens") or 256)
        limit = section.get("response_tokens_max")
        if limit is None and section.get("sequence_length"):
            limit = section["sequence_length"] - prompt
        elif limit is None:
            limit = section.get("response_tokens_mean") or 1024

        # A mean implies that lengths vary.
        default_kind = "variable" if "response_tokens_mean" in section else "fixed"
        kind = section.get("response_lengths", default_kind)
        default_mean = limit

        if kind == "variable":
            default_mean = limit / 4

        mean = float(section.get("response_tokens_mean") or default_mean)
        lengths = response_lengths(mean, float(limit), "fixed" if kind == "fixed" else "variable")

        prompts = int(section.get("prompts") or 1)
        samples = int(section.get("samples_per_prompt") or 1)

        # A scenario has the number of optimizer steps, or the number of rows of an optimizer step.
        optimizer_steps = section.get("optimizer_steps")
        if optimizer_steps is None:
            global_batch = section.get("global_batch")
            optimizer_steps = 1
            if global_batch:
                optimizer_steps = max(1, round(prompts * samples / global_batch))

        return StepBatch(
            prompts=prompts,
            samples=samples,
            optimizer_steps=int(optimizer_steps),
            prompt_length=prompt,
            lengths=lengths,
            row_limit=float(section.get("sequence_length") or prompt + limit),
            packing=bool(section.get("packing", self.kind != "pretrain_throughput")),
        )

    @property
    def sequence(self) -> float:
        """Return the number of tokens of a training row, for predictions of pretraining and memory."""
        section = self.section("batch")
        if section.get("sequence_length"):
            return float(section["sequence_length"])
        if "response_tokens_max" not in section:
            return 4096.0
        batch = self.batch
        return batch.prompt_length + batch.lengths.limit

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the names of the algorithm's roles that have a model."""
        return ROLES[self.algorithm]
