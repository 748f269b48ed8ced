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

OURS = "megatron_rl"
SAME_LAYERS = "Megatron-Core, same layers"
PADDED = "Megatron-Core, its own layers, rows padded"
EQUAL = "Megatron-Core, its own layers, equal rows"


def synthetic(
    work: Workload,
    actor: ModelRole,
    vocabulary: int,
) -> tuple[Rollouts, Scores]:
    """Return rows of random tokens with the workload's lengths, scored by the actor; equal on every rank."""
    # Seeded: every rank draws the same batch.
    generator = torch.Generator().manual_seed(1)
    responses = torch.tensor(lengths(work, seed=1))
    prompts = torch.randint(
        8,
        work.max_prompt_tokens,
        (work.rows,),
        generator=generator,
    )
    rows = prompts + responses
    count = int(rows.sum())

    # Of each row the prompt is masked out.
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

    # About the log-prob of a random token in this vocabulary.
    old_log_probs = torch.full((count,), -7.0) * mask
    rewards = torch.rand(work.rows, generator=generator)
    valid = torch.ones(work.rows, dtype=torch.bool)
    return rollouts, Scores(rewards, valid, {}, old_log_probs=old_log_probs, entropy=-old_log_probs)


def packed_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return exactly the micro-batches that the learn phase cuts on this rank."""
    assert actor.model is not None

    micros, _ = build_microbatches(
        actor.model,
        batch,
        actor.tokens_per_microbatch,
        batch.response_mask,
    )
    result = []
    for micro in micros:
        # Labels at the positions with outputs; other tokens have no loss.
        labels = torch.zeros_like(micro.inputs)
        mask = torch.zeros(micro.inputs.shape, device=micro.inputs.device)
        labels[0, micro.index] = micro.targets
        mask[0, micro.index] = 1.0
        result.append(Batch(micro.inputs, labels, mask, micro.packing))
    return result


def padded_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return the same rows in the same micro-batches, padded for layers without packing.

    Their length is a multiple of the tensor ranks, over which sequence parallelism cuts it.
    """
    assert actor.model is not None

    unit = actor.model.groups.layout.tensor
    micros, _ = build_microbatches(
        actor.model,
        batch,
        actor.tokens_per_microbatch,
        batch.response_mask,
    )
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
    start = time.perf_counter()
    result = run()
    device.synchronize()
    dist.barrier()
    return time.perf_counter() - start, result


def in_turns(methods: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each method by round; in every round the methods run one after the other."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, run in methods.items():
            run_seconds, _ = timed(run)
            # The first round warms up.
            if repeat:
                seconds[name].append(run_seconds)
    return seconds


def learn(
    actor: ModelRole,
    batch: TrainBatch,
    algorithm: Any,
    objective: Any,
) -> Any:
    """Run the learn phase as `train_step` does."""
    metrics = None
    for minibatch in minibatches(batch, algorithm, 1, 1, 1):
        metrics = actor.update(minibatch, objective)
    return metrics


def check_equal(
    actor: ModelRole,
    batch: TrainBatch,
    algorithm: Any,
    peer: BareMegatron,
    batches: list[Batch],
) -> dict[str, float]:
    """Run a supervised step with the learn phase and bare Megatron; return losses and gradient norms.

    Raises RuntimeError where they differ: then the two do not do the same work.
    """
    # Metrics of the learn phase are sums over a rank's own rows: add up all ranks.
    rank_metrics: list[Any] = [None] * dist.get_world_size()
    metrics = learn(
        actor,
        batch,
        algorithm,
        lambda rows, log_probs, entropy: sft_objective(rows, log_probs),
    )
    dist.all_gather_object(rank_metrics, metrics)
    values = sum(rank_metrics[1:], rank_metrics[0]).values()
    loss, norm = peer.step(batches)

    result = {
        "loss": values["sft/loss"],
        "peer_loss": loss,
        "norm": values["policy/grad_norm"],
        "peer_norm": norm,
    }
    for name in ("loss", "norm"):
        # Kernels sum in different orders: 1e-3 allows for rounding, but for no difference of work.
        if abs(result[name] - result[f"peer_{name}"]) > 1e-3 * abs(result[name]):
            raise RuntimeError(f"the learn phase and the peer do not do the same work: {result}")
    return result


def tokens_of(actor: ModelRole, batches: list[Batch]) -> int:
    """Return the tokens of all data-parallel ranks' batches."""
    assert actor.model is not None
    count = torch.tensor(sum(batch.tokens.numel() for batch in batches))
    dist.all_reduce(count)
    # Ranks of a tensor and pipeline group have the same batches.
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

    # The same tokens in three forms: packed, in rows of one length, and padded.
    algorithm = get_algorithm("grpo", {"aggregation": "token-mean"})
    state = initial_state(algorithm)
    rollouts, scores = synthetic(work, actor, work.vocabulary)
    batch, _ = build_train_batch(rollouts, scores, algorithm, state)
    packed = packed_batches(actor, batch)

    # Equal rows have as many pairs of tokens in attention; sequence parallelism cuts them over tensor ranks.
    pairs = int(rollouts.lengths.square().sum())
    unit = actor.model.groups.layout.tensor
    equal = equal_batches(packed, unit * round(pairs / len(rollouts.tokens) / unit))
    padded = padded_batches(actor, batch)

    learning_rate = config.actor.optimizer.learning_rate
    # The peers copy the actor's weights, so that all start from the same ones.
    same_layers = BareMegatron(actor.model, learning_rate, own_layers=False)

    own_layers = BareMegatron(actor.model, learning_rate, own_layers=True)
    measurement: dict[str, Any] = {"check": check_equal(actor, batch, algorithm, same_layers, packed)}
    # Padding is no work: padded rows count their own tokens.
    counted_batches = {
        OURS: packed,
        SAME_LAYERS: packed,
        PADDED: packed,
        EQUAL: equal,
    }
    measurement["tokens"] = {name: tokens_of(actor, batches) for name, batches in counted_batches.items()}

    objective = partial(policy_objective, algorithm, state=state)
    seconds = in_turns(
        {
            OURS: lambda: learn(actor, batch, algorithm, objective),
            SAME_LAYERS: lambda: same_layers.step(packed),
            EQUAL: lambda: own_layers.step(equal),
        },
        options.repeats,
    )

    # Apart from the others: it frees so much memory that the host takes a while to allocate it again.
    seconds |= in_turns({PADDED: lambda: own_layers.step(padded)}, min(options.repeats, 2))
    # Barriers around each run make the seconds alike on all ranks: the first rank writes them.
    if device.rank() == 0:
        options.result.write_text(json.dumps({**measurement, "seconds": seconds}))

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
