"""Time the learn phase and bare Megatron-Core steps in turns, on the same tokens: a rank of step_time.py."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bare_megatron import BareMegatron, Batch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from workload import Workload, lengths

from megatron_rl.algorithms import (
    build_train_batch,
    get_algorithm,
    initial_state,
    minibatches,
    policy_objective,
    sft_objective,
)
from megatron_rl.cli.common import load_and_check
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.megatron.schedule import build_microbatches
from megatron_rl.roles.build import build_actor
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.types import Rollouts, Scores, TrainBatch

OURS, SAME_LAYERS = "megatron_rl", "Megatron-Core, same layers"
PADDED, EQUAL = "Megatron-Core, its own layers, rows padded", "Megatron-Core, its own layers, equal rows"


def synthetic(work: Workload, actor: ModelRole, vocabulary: int) -> tuple[Rollouts, Scores]:
    """Return rows of random tokens with the workload's lengths, scored by the actor; equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    responses = torch.tensor(lengths(work, seed=1))
    prompts = torch.randint(8, work.max_prompt_tokens, (work.rows,), generator=generator)
    rows = prompts + responses
    count = int(rows.sum())
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(rows.tolist(), prompts.tolist(), strict=True)])
    rollouts = Rollouts(
        tokens=torch.randint(4, vocabulary, (count,), generator=generator),
        lengths=rows,
        response_mask=mask,
        rollout_log_probs=torch.zeros(count),
        group=torch.arange(work.rows) // work.samples,
        finish_reason=torch.zeros(work.rows, dtype=torch.long),
        policy_version=torch.zeros(work.rows, dtype=torch.long),
        temperature=torch.ones(work.rows),
    )
    old = torch.full((count,), -7.0) * mask
    rewards = torch.rand(work.rows, generator=generator)
    return rollouts, Scores(
        rewards, torch.ones(work.rows, dtype=torch.bool), {}, old_log_probs=old, entropy=-old
    )


def packed_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return exactly the micro-batches that the learn phase cuts on this rank."""
    assert actor.model is not None
    micros, _ = build_microbatches(actor.model, batch, actor.tokens_per_microbatch, batch.response_mask)
    result = []
    for micro in micros:
        labels, mask = (
            torch.zeros_like(micro.inputs),
            torch.zeros(micro.inputs.shape, device=micro.inputs.device),
        )
        labels[0, micro.index], mask[0, micro.index] = micro.targets, 1.0
        result.append(Batch(micro.inputs, labels, mask, micro.packing))
    return result


def padded_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return the same rows in the same micro-batches, padded for layers that know no packing.

    Their length is a multiple of what sequence parallelism cuts it into.
    """
    assert actor.model is not None
    unit = actor.model.groups.layout.tensor
    micros, _ = build_microbatches(actor.model, batch, actor.tokens_per_microbatch, batch.response_mask)
    rows = batch.tokens.split(batch.lengths.tolist())
    result = []
    for micro in micros:
        tokens = pad_sequence([rows[row] for row in micro.rows], batch_first=True)
        tokens = pad(tokens, (0, -tokens.shape[1] % unit)).to(device.device())
        real = torch.arange(tokens.shape[1]) < batch.lengths[list(micro.rows)][:, None]
        result.append(Batch(tokens, tokens.roll(-1, 1), real.float().to(tokens.device)))
    return result


def equal_batches(batches: list[Batch], length: int) -> list[Batch]:
    """Cut the same number of tokens into sequences of ``length``, without any padding."""
    result = []
    for batch in batches:
        count = max(1, round(batch.tokens.numel() / length))
        tokens = batch.tokens[0].repeat(2)[: count * length].view(count, length)
        result.append(Batch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape, device=tokens.device)))
    return result


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds until the slowest rank is done, and the result."""
    dist.barrier()
    device.synchronize()
    begun = time.perf_counter()
    result = run()
    device.synchronize()
    dist.barrier()
    return time.perf_counter() - begun, result


def in_turns(methods: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each method, run one after the other in every round; the first one warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, run in methods.items():
            taken, _ = timed(run)
            if repeat:
                seconds[name].append(taken)
    return seconds


def learn(actor: ModelRole, batch: TrainBatch, algorithm: Any, objective: Any) -> Any:
    """Run the learn phase as `train_step` does."""
    metrics = None
    for minibatch in minibatches(batch, algorithm, 1, 1, 1):
        metrics = actor.update(minibatch, objective)
    return metrics


def check_equal(
    actor: ModelRole, batch: TrainBatch, algorithm: Any, peer: BareMegatron, batches: list[Batch]
) -> dict[str, float]:
    """Take one supervised step with both: same loss, same gradient norm, so the same work.

    Returns the four numbers; raises RuntimeError where they differ.
    """
    found: list[Any] = [None] * dist.get_world_size()
    metrics = learn(actor, batch, algorithm, lambda rows, log_probs, entropy: sft_objective(rows, log_probs))
    dist.all_gather_object(found, metrics)
    values = sum(found[1:], found[0]).values()
    loss, norm = peer.step(batches)
    result = {
        "loss": values["sft/loss"],
        "peer_loss": loss,
        "norm": values["policy/grad_norm"],
        "peer_norm": norm,
    }
    for name in ("loss", "norm"):
        if abs(result[name] - result[f"peer_{name}"]) > 1e-3 * abs(result[name]):
            raise RuntimeError(f"the learn phase and the peer do not do the same work: {result}")
    return result


def tokens_of(actor: ModelRole, batches: list[Batch]) -> int:
    """Return the tokens of all data-parallel ranks' batches."""
    assert actor.model is not None
    count = torch.tensor(sum(batch.tokens.numel() for batch in batches))
    dist.all_reduce(count)
    layout = actor.model.groups.layout
    return int(count) // (layout.tensor * layout.pipeline)


def main() -> None:
    """Measure and write a JSON file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--work", required=True, help="fields of the Workload as JSON")
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--overrides", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads()))
    config: RunConfig = load_and_check(options, device.world_size(), training=False).valid()
    device.initialize()
    work = Workload(**json.loads(options.work))
    actor = build_actor(config, updates=config.steps)
    assert actor.model is not None
    algorithm = get_algorithm("grpo", {"aggregation": "token-mean"})
    state = initial_state(algorithm)
    rollouts, scores = synthetic(work, actor, work.vocabulary)
    batch, _ = build_train_batch(rollouts, scores, algorithm, state)
    packed = packed_batches(actor, batch)
    pairs = int(rollouts.lengths.square().sum())  # of tokens, in attention
    unit = actor.model.groups.layout.tensor  # sequence parallelism cuts rows into as many parts
    equal = equal_batches(packed, unit * round(pairs / len(rollouts.tokens) / unit))
    learning_rate = config.actor.optimizer.learning_rate
    same, own = (BareMegatron(actor.model, learning_rate, own_layers=flag) for flag in (False, True))
    facts: dict[str, Any] = {"check": check_equal(actor, batch, algorithm, same, packed)}
    padded = padded_batches(actor, batch)
    work_of = {OURS: packed, SAME_LAYERS: packed, PADDED: packed, EQUAL: equal}  # padding is no work
    facts["tokens"] = {name: tokens_of(actor, batches) for name, batches in work_of.items()}
    objective = partial(policy_objective, algorithm, state=state)
    seconds = in_turns(
        {
            OURS: lambda: learn(actor, batch, algorithm, objective),
            SAME_LAYERS: lambda: same.step(packed),
            EQUAL: lambda: own.step(equal),
        },
        options.repeats,
    )
    # By itself: the host needs a while to find its memory again after so much of it was given back.
    seconds |= in_turns({PADDED: lambda: own.step(padded)}, min(options.repeats, 2))
    if device.rank() == 0:
        options.result.write_text(json.dumps({**facts, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
