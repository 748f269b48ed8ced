"""The ``plan-reshard`` command: predict the cost of a weight transfer without the machines."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.check.model.adapters import check_adapted_model, check_lora
from megatron_rl.cli.common import require_counts
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.errors import UserError, UserErrors, divisor_error
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.planning.reshard import (
    TransferSummary,
    actor_layout,
    find_config,
    parse_layout,
    plan_offline,
    summarise_transfer,
)
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.traffic import byte_text, received_by_other_projects

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
"""Value of ``--dtype`` -> dtype of the engine's weights."""
CLUSTERS = ("A100-80GB", "H100-80GB", "B200")
"""GPU types for which transfer times are predicted by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``plan-reshard`` to its parser."""
    parser.add_argument(
        "model", metavar="MODEL", help="preset name, directory with config.json, or the config.json itself"
    )
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="LAYOUT",
        help="layout of the actor, such as tp8pp8dp2",
    )
    parser.add_argument(
        "--to",
        dest="target",
        required=True,
        metavar="LAYOUT",
        help="layout of an engine replica: tp8, or ep8 for experts that are not sharded",
    )
    parser.add_argument(
        "--rollout-ranks",
        type=int,
        metavar="N",
        help="N ranks other than the actor's (default: the same ranks)",
    )

    parser.add_argument(
        "--ranks-per-node", type=int, default=8, metavar="N", help="ranks of a node (%(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="dtype of the engine's weights"
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        metavar="N",
        help="transfer only LoRA adapters of this rank, as with actor.lora.sync=adapter",
    )
    parser.add_argument(
        "--staging-bytes",
        type=int,
        default=HybridEngineConfig.staging_bytes,
        metavar="BYTES",
        help="memory of a rank for weights in transfer (%(default)s)",
    )

    parser.add_argument(
        "--cluster",
        action="append",
        metavar="NAME",
        help="predict seconds on machines of this GPU (repeatable; default " + ", ".join(CLUSTERS) + ")",
    )
    parser.add_argument("--constants", metavar="FILE", help="JSON file that overrides packaged constants")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plan the transfer and print its summary; raises UserError for arguments that contradict each other."""
    start = time.perf_counter()
    require_counts(arguments, "ranks_per_node", "rollout_ranks", at_most=MAX_WORLD)
    require_counts(arguments, "staging_bytes", "lora_rank")
    constants = load_constants(arguments.constants)
    clusters = arguments.cluster or CLUSTERS
    for name in clusters:
        # Report an unknown GPU before the plan is computed.
        constants.gpu(name)

    config = find_config(arguments.model)
    actor = actor_layout(parse_layout(arguments.source, "--from"))
    replica_size, whole_experts = _parse_engine_layout(arguments.target)

    # By default the engine shares the actor's ranks.
    rollout_ranks = actor.ranks
    if arguments.rollout_ranks:
        rollout_ranks = tuple(range(actor.size, actor.size + arguments.rollout_ranks))
    if len(rollout_ranks) % replica_size:
        fix = "change --to, the actor's dp, or --rollout-ranks"
        raise divisor_error("--to", replica_size, len(rollout_ranks), "ranks of the engine", fix=fix)

    plan = plan_offline(
        config,
        actor,
        rollout_ranks,
        replica_size,
        DTYPES[arguments.dtype],
        ranks_per_node=arguments.ranks_per_node,
        whole_experts=whole_experts,
        lora=_transferred_adapters(config, arguments.lora_rank),
    )

    # Our traffic is counted in the plan; for comparison, formulas give the traffic of other systems.
    summary = summarise_transfer(plan, arguments.ranks_per_node, arguments.staging_bytes, constants, clusters)
    is_colocated = not arguments.rollout_ranks
    bytes_by_method = received_by_other_projects(
        summary.model_bytes, actor, replica_size, colocated=is_colocated
    )
    planning_seconds = time.perf_counter() - start

    if arguments.json:
        rank_counts = {
            "actor_ranks": actor.size,
            "rollout_ranks": len(rollout_ranks),
            "engine_ranks": replica_size,
        }
        record = rank_counts | dataclasses.asdict(summary)
        record |= {"peers": bytes_by_method, "planning_seconds": planning_seconds}
        print(json.dumps(record, indent=1))
    else:
        num_replicas = len(rollout_ranks) // replica_size
        layouts = f"{actor.size} actor ranks -> {num_replicas} engine replicas of {replica_size} ranks"
        print("\n".join(_summary_lines(summary, bytes_by_method, layouts, planning_seconds)))
    return 0


def _transferred_adapters(config: Any, rank: int | None) -> Lora | None:
    """Return the LoRA adapters that are transferred instead of the weights; None without a LoRA ``rank``.

    ``config`` is the model's Hugging Face configuration. Raises UserErrors for invalid adapters.
    """
    if rank is None:
        return None

    model = describe_model(config)
    lora = LoraConfig(rank, sync="adapter")
    # Apply the same rules as for a run.
    errors = [*check_lora(lora, "vllm"), *check_adapted_model(lora, model)]
    if errors:
        raise UserErrors(errors)
    return Lora.for_model(model.shape, rank)


def _parse_engine_layout(text: str) -> tuple[int, bool]:
    """Parse the layout of the engine, ``tpN`` or ``epN``.

    Returns N, the number of ranks of a replica, and whether each expert is complete on one rank (``epN``)
    instead of being sharded over all ranks of the replica (``tpN``).
    """
    sizes = parse_layout(text, "--to")
    if len(sizes) != 1 or not set(sizes) <= {"tensor", "expert"}:
        raise UserError(
            "not a layout of the engine",
            where="--to",
            expected="tpN, or epN for complete experts distributed over the N ranks of a replica",
            got=text,
        )

    # The layout has a single size, tensor or expert: the number of ranks of a replica.
    (num_ranks,) = sizes.values()
    if num_ranks < 1:
        raise UserError("a replica needs ranks", where="--to", expected="1 or more", got=text)
    return num_ranks, "expert" in sizes


def _summary_lines(
    summary: TransferSummary,
    bytes_by_method: Mapping[str, float],
    layouts: str,
    planning_seconds: float,
) -> list[str]:
    """Format the summary of a planned transfer as lines of text.

    ``bytes_by_method`` maps the transfer methods of other projects to the bytes that a rank receives with
    each method. ``layouts`` describes both layouts, and ``planning_seconds`` is the time spent on planning.
    """
    rows = [
        ("model", f"{byte_text(summary.model_bytes)}, {layouts}"),
        (
            "received per rank",
            f"least {byte_text(summary.received_least)}, mean {byte_text(summary.received_mean)}, "
            f"most {byte_text(summary.received_most)}",
        ),
        ("sent per rank", f"most {byte_text(summary.sent_most)}"),
        ("copied inside a rank", f"mean {byte_text(summary.local_mean)}"),
        ("inside nodes", f"{byte_text(summary.inside_nodes)} in all"),
        ("across nodes", f"{byte_text(summary.across_nodes)} in all"),
        ("messages per rank", f"most {summary.messages_most:,}; {summary.messages:,} in all"),
        ("peers per rank", f"most {summary.peers_most}, mean {summary.peers_mean:.1f}"),
        ("staging per rank", f"at most {byte_text(summary.staging_most)}"),
        ("received needlessly", byte_text(summary.redundant_most)),
    ]
    for gpu, seconds in summary.seconds.items():
        rows.append((f"on {gpu}", f"{seconds:.2f} s predicted"))
    rows.append(("first sync", f"{summary.connect_seconds:.1f} s more to connect, assumed"))
    for method, received_bytes in bytes_by_method.items():
        rows.append((method, f"{byte_text(received_bytes)} received per rank (formula)"))
    rows.append(("planned in", f"{planning_seconds:.1f} s"))

    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]
