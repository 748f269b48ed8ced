"""Read a scenario: every field is optional except kind, model and cluster; defaults are stated here.

Defaults: gpus_per_node and network as the GPU's usual machine; placement colocated (disaggregated
when the cluster names train_gpus or rollout_gpus); layout and rollout absent: chosen by the planner;
disaggregated without counts: half the GPUs each; samples_per_prompt 1; optimizer_steps from
global_batch, else 1; micro_batch 1; packing off for pretraining, on for reinforcement learning;
prompt_tokens 256; response_tokens_mean: a quarter of the maximum when variable, else the maximum;
sequence_length prompt plus longest response; precision bf16; recompute none (full when that alone
fits); optimizer Adam, distributed, 4 + 12 bytes; algorithm grpo; weight sync: gather_and_load
colocated, planned_peer_to_peer disaggregated; memory_fraction 0.6 colocated, 0.9 otherwise; engine
current; attention counted in full, recompute not counted.
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

_ANSWERS = ("measured", "tolerance", "compare", "notes", "source")
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


def without_answers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that holds nothing a prediction must not see (measured values and tolerances)."""
    return deepcopy({key: value for key, value in raw.items() if key not in _ANSWERS})


@dataclass(frozen=True)
class Scenario:
    """Hold one scenario's inputs, typed; ``raw`` never has measured values or tolerances."""

    raw: Mapping[str, Any]
    constants: Constants

    @property
    def name(self) -> str:
        """Return the scenario's id."""
        return str(self.raw.get("id", "?"))

    @property
    def kind(self) -> str:
        """Return the kind; raises UserError on an unknown one."""
        kind = str(self.raw.get("kind"))
        if kind not in KINDS:
            raise self.error("kind", "one of " + ", ".join(KINDS), kind, nearest(kind, KINDS))
        return kind

    def error(self, where: str, expected: str, got: Any, guess: str | None = None) -> UserError:
        """Build an error that names this scenario and field."""
        return UserError(
            f"scenario {self.name}: field {where} is missing or wrong",
            where=f"{self.name}.{where}",
            expected=expected,
            got=str(got),
            fix=f"did you mean {guess}?" if guess else None,
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a nested mapping, empty when absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "a mapping", value)
        return value

    def model(self, role: str = "actor") -> ModelShape:
        """Return a role's model."""
        reference = self.section("roles").get(role) or self.raw.get("model")
        if reference is None:
            raise self.error("model", "a preset name or an inline configuration", None)
        return load_shape(reference)

    @property
    def machine(self) -> Machine:
        """Return the whole cluster; num_gpus absent: what layout and rollout use together."""
        given = self.section("cluster")
        gpu = given.get("gpu")
        if gpu is None:
            raise self.error("cluster.gpu", "a GPU name", None)
        count = given.get("num_gpus") or sum(given.get(side, 0) for side in ("train_gpus", "rollout_gpus"))
        if not count:
            layout, rollout = self.layout, self.rollout(1)
            count = layout.size if layout else rollout.replicas * rollout.gpus if rollout else 1
        cluster = self.constants.cluster(
            gpu,
            count,
            given.get("gpus_per_node"),
            given.get("network_gigabits_per_gpu"),
            given.get("network_gigabits_per_node"),
        )
        return Machine(cluster, self.constants, str(self.raw.get("precision") or "bf16"))

    @property
    def gpus(self) -> int:
        """Count the GPUs of the whole cluster."""
        return self.machine.cluster.num_gpus

    @property
    def disaggregated(self) -> bool:
        """Say whether training and rollout have GPUs of their own."""
        cluster = self.section("cluster")
        default = "disaggregated" if {"train_gpus", "rollout_gpus"} <= set(cluster) else "colocated"
        return self.raw.get("placement", default) == "disaggregated"

    @property
    def train_gpus(self) -> int:
        """Count the training GPUs."""
        if not self.disaggregated:
            return self.gpus
        given, total = self.section("cluster"), self.gpus
        if given.get("train_gpus"):
            return int(given["train_gpus"])
        if self.layout is not None:
            return self.layout.size
        return total - int(given["rollout_gpus"]) if given.get("rollout_gpus") else total // 2

    @property
    def rollout_gpus(self) -> int:
        """Count the rollout GPUs."""
        if not self.disaggregated:
            return self.gpus
        given = self.section("cluster")
        return int(given.get("rollout_gpus") or max(1, self.gpus - self.train_gpus))

    @property
    def layout(self) -> ParallelLayout | None:
        """Return the stated training layout, or None; an absent ``data`` is what remains."""
        given = self.raw.get("layout")
        if not given:
            return None
        names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        sizes = {name: int(given.get(name) or 1) for name in names}
        copy = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
        data = given.get("data")
        if data is None:
            cluster = self.section("cluster")
            data = max(1, int(cluster.get("train_gpus") or cluster.get("num_gpus") or 1) // copy)
        # Sequence parallelism came with Megatron-LM in 2022; older scenarios leave it out: it was off.
        sequence_parallel = bool(given.get("sequence_parallel", False))
        layout = ParallelLayout(tuple(range(copy * int(data))), sequence_parallel=sequence_parallel)
        return replace(layout, **sizes)

    @property
    def fully_sharded(self) -> bool:
        """Say whether weights, gradients and optimizer are sharded over data (FSDP)."""
        return bool(self.section("layout").get("fully_sharded"))

    def rollout(self, gpus: int) -> RolloutLayout | None:
        """Return the stated rollout layout on ``gpus`` GPUs, or None when no tensor size is stated."""
        given = self.section("rollout")
        if given.get("tensor") is None:
            return None
        return self.rollout_with(int(given["tensor"]), gpus)

    def rollout_with(self, tensor: int, gpus: int) -> RolloutLayout:
        """Return the scenario's rollout layout at a tensor size."""
        given = self.section("rollout")
        pipeline = int(given.get("pipeline") or 1)
        stated = given.get("replicas") if given.get("tensor") == tensor else None
        limit = given.get("max_sequences")
        return RolloutLayout(
            tensor=tensor,
            pipeline=pipeline,
            expert=int(given.get("expert") or 1),
            replicas=int(stated or max(1, gpus // (tensor * pipeline))),
            max_sequences=int(limit) if limit else None,
            memory_fraction=self.memory_fraction,
            engine=self.engine,
        )

    @property
    def engine(self) -> str:
        """Return the rollout engine's constant set."""
        engine = str(self.section("rollout").get("engine") or "current")
        if engine not in self.constants.engines:
            known = list(self.constants.engines)
            raise self.error("rollout.engine", "one of " + ", ".join(known), engine, nearest(engine, known))
        return engine

    @property
    def memory_fraction(self) -> float:
        """Return the share of GPU memory that the engine may use."""
        serving = self.kind in ("decode_latency", "serving_throughput")
        default = 0.9 if self.disaggregated or serving else 0.6
        return float(self.section("rollout").get("memory_fraction") or default)

    @property
    def optimizer(self) -> OptimizerChoice:
        """Return the optimizer."""
        given = self.section("optimizer")
        return OptimizerChoice(
            distributed=bool(given.get("distributed", True)),
            offload=bool(given.get("offload", False)),
            gradient_bytes=float(given.get("gradient_bytes_per_parameter", 4)),
            state_bytes=float(given.get("state_bytes_per_parameter", 12)),
        )

    @property
    def algorithm(self) -> str:
        """Return grpo or ppo for a reinforcement-learning step."""
        name = str(self.raw.get("algorithm") or "grpo")
        return "ppo" if name == "ppo" else "grpo"

    @property
    def sync_method(self) -> str:
        """Return the weight sync method."""
        default = "planned_peer_to_peer" if self.disaggregated else "gather_and_load"
        return str(self.section("weight_sync").get("method") or default)

    @property
    def batch(self) -> StepBatch:
        """Return a step's rows."""
        given = self.section("batch")
        prompt = float(given.get("prompt_tokens") or 256)
        longest = given.get("response_tokens_max")
        if longest is None:
            cap = given.get("sequence_length")
            longest = cap - prompt if cap else given.get("response_tokens_mean") or 1024
        variable = given.get("response_lengths", "variable" if "response_tokens_mean" in given else "fixed")
        default_mean = longest / 4 if variable == "variable" else longest
        mean = float(given.get("response_tokens_mean") or default_mean)
        kind = "fixed" if variable == "fixed" else "variable"
        lengths = response_lengths(mean, float(longest), kind)
        prompts, samples = int(given.get("prompts") or 1), int(given.get("samples_per_prompt") or 1)
        steps = given.get("optimizer_steps")
        if steps is None:
            steps = (
                max(1, round(prompts * samples / given["global_batch"])) if given.get("global_batch") else 1
            )
        return StepBatch(
            prompts=prompts,
            samples=samples,
            optimizer_steps=int(steps),
            prompt=prompt,
            lengths=lengths,
            longest=float(given.get("sequence_length") or prompt + longest),
            packing=bool(given.get("packing", self.kind != "pretrain_throughput")),
        )

    @property
    def sequence(self) -> float:
        """Return tokens per training row (pretraining and memory)."""
        given = self.section("batch")
        if given.get("sequence_length"):
            return float(given["sequence_length"])
        batch = self.batch
        return batch.prompt + batch.lengths.longest if "response_tokens_max" in given else 4096.0

    @property
    def roles(self) -> tuple[str, ...]:
        """Name the roles of the algorithm that hold a model."""
        return ROLES[self.algorithm]
