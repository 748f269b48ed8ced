"""Plan the weight syncs of large jobs without GPUs: peers, messages and bytes of the busiest rank.

    python benchmarks/sync_plans.py [CASE ...] [--json FILE]

The counts are exact and the same in every call. cpu_seconds is the processor time that a rank takes to build
the plan and its schedule from the layouts of all ranks. The predicted seconds come from the planner's
constants.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import HERE, Report, print_progress

from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.planning.reshard import (
    actor_layout,
    find_config,
    parse_layout,
    plan_offline,
    summarise_transfer,
)
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.weights.plan import build_plan, schedule_phases

MODELS = HERE.parent / "configs/models"
# As in machines with eight H100.
RANKS_PER_NODE = 8
STAGING = HybridEngineConfig.staging_bytes
CLUSTER = "H100-80GB"


class Case(NamedTuple):
    """Case of one plan: a model, and the layouts of actor and engine on the same ranks."""

    model: str
    """Folder of the model in configs/models."""
    actor: str
    """Layout of the actor, such as ``tp2pp2dp2``."""
    tensor: int
    """Tensor parallelism of the engine."""
    whole_experts: bool = False
    """Whether the engine distributes complete experts over its ranks, instead of slices of every expert."""


CASES = {
    "7b": Case("Qwen2.5-7B-Instruct", "tp2pp2dp2", 4),
    "70b": Case("Llama-3.1-70B-Instruct", "tp4pp4vpp4dp8", 8),
    "405b": Case("Llama-3.1-405B-Instruct", "tp8pp16dp4", 16),
    "235b": Case("Qwen3-235B-A22B", "tp4pp8ep16dp8", 8, True),
    "v3": Case("DeepSeek-V3", "pp16ep64dp64", 32, True),
}


def measure(name: str, case: Case, report: Report) -> None:
    """Plan one case and add its numbers."""
    print_progress("sync_plans", name)
    actor = actor_layout(parse_layout(case.actor))
    plan = plan_offline(
        find_config(str(MODELS / case.model)), actor, actor.ranks, case.tensor, torch.bfloat16,
        ranks_per_node=RANKS_PER_NODE, whole_experts=case.whole_experts,
    )  # fmt: skip

    # Measure the time to build the plan again. The layouts are not included: in a run, each rank computes
    # only its own. Other work on the machine does not change the processor time.
    nodes = {rank: rank // RANKS_PER_NODE for rank in actor.ranks}
    start = time.process_time()
    schedule_phases(build_plan(plan.sources, plan.destinations, nodes), STAGING)
    cpu_seconds = time.process_time() - start

    # No weights are transferred: the planner's constants predict the seconds.
    summary = summarise_transfer(
        plan,
        RANKS_PER_NODE,
        STAGING,
        load_constants(),
        [CLUSTER],
    )
    values = {
        "peers_max": (summary.peers_most, "ranks"),
        "messages_max": (summary.messages_most, "messages"),
        "bytes_received_max": (summary.received_most, "bytes"),
        "bytes_sent_max": (summary.sent_most, "bytes"),
        "bytes_across_nodes": (summary.across_nodes, "bytes"),
        "predicted_seconds": (summary.seconds[CLUSTER], "s"),
        "cpu_seconds": (cpu_seconds, "s"),
    }
    for metric, (value, unit) in values.items():
        report.add(name, "hybrid_engine", metric, unit, [float(value)], None)


def main() -> int:
    """Plan the cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases",
        nargs="*",
        default=list(CASES),
        metavar="CASE",
        help=", ".join(CASES),
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    report = Report("sync_plans")
    for name in options.cases:
        measure(name, CASES[name], report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
