"""Seconds of moving weights from training to generation by planned copies between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_rl.planner.constants import Machine
from megatron_rl.planner.generate import RolloutLayout
from megatron_rl.planner.search import stage_settings
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.traffic import SharedBytes, WeightTraffic, shared_bytes


def copy_seconds(received: float, sent: float, machine: Machine) -> float:
    """Return seconds until a rank that receives, or sends, the most bytes over its own card is done.

    The fixed part and the network's share are fitted to published refit times (constants.json).
    """
    constants = machine.constants.weight_sync
    rate = machine.cluster.network * constants.planned_network
    return constants.planned_fixed_seconds + max(received, sent) / rate


def sync_seconds(traffic: WeightTraffic, senders: int, machine: Machine) -> float:
    """Return seconds of one weight sync out of ``senders`` ranks.

    Each byte that moves leaves the trainer at least once, and replicas relay it to one another.
    """
    moved = min(sum(traffic.received.values()), traffic.model_bytes)
    return copy_seconds(traffic.received_most, moved / senders, machine)


@lru_cache(maxsize=4096)
def _shared(model: ModelShape, layout: ParallelLayout, tensor: int, itemsize: int) -> SharedBytes:
    return shared_bytes(model, layout, tensor, itemsize, settings=stage_settings(model, layout))


def planned_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    rollout: RolloutLayout,
    ranks: Sequence[int],
    machine: Machine,
) -> float:
    """Return seconds of one weight sync into an engine on ``ranks``, in the order they are given."""
    traffic = _shared(model, layout, rollout.tensor, machine.weight_bytes).traffic(ranks)
    return sync_seconds(traffic, layout.size, machine)
