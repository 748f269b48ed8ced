"""Seconds of moving weights from training to generation by planned copies between ranks."""

from __future__ import annotations

from megatron_rl.planner.constants import Machine
from megatron_rl.planner.generate import RolloutLayout
from megatron_rl.planner.memory import rollout_weight_bytes
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape


def sync_seconds(
    model: ModelShape, layout: ParallelLayout | None, rollout: RolloutLayout, machine: Machine
) -> float:
    """Return seconds of one weight sync; ``layout`` None says nothing of the senders.

    Every rollout GPU receives its shard over its own card; the senders share the replicas' demand. The
    fixed part and the network's share are fitted to published refit times (constants.json).
    """
    constants = machine.constants.weight_sync
    received = rollout_weight_bytes(model, rollout, machine.precision)
    if layout is not None:
        # Each byte leaves the trainer at least once; replicas relay to one another.
        received = max(received, machine.weight_bytes * model.parameters / layout.size)
    return constants.planned_fixed_seconds + received / (machine.cluster.network * constants.planned_network)
