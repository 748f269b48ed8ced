"""Worker of step_time.py: time the learn phase and bare Megatron-Core steps in turns, on the same tokens."""

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


def make_random_batch(work: Workload, vocabulary: int) -> tuple[Rollouts, Scores]:
    """Return rows of random tokens with the workload's lengths, and random rewards.

    The batch is equal on every rank.
    """
    generator = torch.Generator().manual_seed(1)
    response_lengths = torch.tensor(lengths(work, seed=1))
    prompt_lengths = torch.randint(
        8,
        work.max_prompt_tokens,
        (work.rows,),
        generator=generator,
    )
    row_lengths = prompt_lengths + response_lengths
    num_tokens = int(row_lengths.sum())

    # The mask excludes the prompt of each row.
    row_masks = []
    for length, start in zip(row_lengths.tolist(), prompt_lengths.tolist(), strict=True):
        row_masks.append(torch.arange(length) >= start)
    mask = torch.cat(row_masks)
    rollouts = Rollouts(
        tokens=torch.randint(4, vocabulary, (num_tokens,), generator=generator),
        lengths=row_lengths,
        response_mask=mask,
        rollout_log_probs=torch.zeros(num_tokens),
        group=torch.arange(work.rows) // work.samples,
        finish_reason=torch.zeros(work.rows, dtype=torch.long),
        policy_version=torch.zeros(work.rows, dtype=torch.long),
        temperature=torch.ones(work.rows),
    )

    # -7 is about the log-prob of a random token in this vocabulary.
    old_log_probs = torch.full((num_tokens,), -7.0) * mask
    rewards = torch.rand(work.rows, generator=generator)
    valid = torch.ones(work.rows, dtype=torch.bool)
    return rollouts, Scores(rewards, valid, {}, old_log_probs=old_log_probs, entropy=-old_log_probs)


def packed_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return the micro-batches of this rank, as in the learn phase, with packed rows."""
    assert actor.model is not None

    microbatches, _ = build_microbatches(
        actor.model,
        batch,
        actor.tokens_per_microbatch,
        batch.response_mask,
    )
    batches = []
    for microbatch in microbatches:
        # Only positions with outputs have a label and a loss.
        labels = torch.zeros_like(microbatch.inputs)
        mask = torch.zeros(microbatch.inputs.shape, device=microbatch.inputs.device)
        labels[0, microbatch.index] = microbatch.targets
        mask[0, microbatch.index] = 1.0
        batches.append(Batch(microbatch.inputs, labels, mask, microbatch.packing))
    return batches


def padded_batches(actor: ModelRole, batch: TrainBatch) -> list[Batch]:
    """Return the micro-batches of `packed_batches` with padded rows, for layers without packing.

    The padded length is a multiple of the tensor ranks, over which sequence parallelism splits it.
    """
    assert actor.model is not None

    tensor_ranks = actor.model.groups.layout.tensor
    microbatches, _ = build_microbatches(
        actor.model,
        batch,
        actor.tokens_per_microbatch,
        batch.response_mask,
    )
    rows = batch.tokens.split(batch.lengths.tolist())

    batches = []
    for microbatch in microbatches:
        tokens = pad_sequence([rows[row] for row in microbatch.rows], batch_first=True)
        tokens = pad(tokens, (0, -tokens.shape[1] % tensor_ranks)).to(device.device())
        mask = torch.arange(tokens.shape[1]) < batch.lengths[list(microbatch.rows)][:, None]
        batches.append(Batch(tokens, tokens.roll(-1, 1), mask.float().to(tokens.device)))
    return batches


def equal_batches(packed: list[Batch], length: int) -> list[Batch]:
    """Return micro-batches with about as many tokens as ``packed``, in rows of equal ``length``."""
    batches = []
    for batch in packed:
        num_rows = max(1, round(batch.tokens.numel() / length))
        tokens = batch.tokens[0].repeat(2)[: num_rows * length].view(num_rows, length)
        batches.append(Batch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape, device=tokens.device)))
    return batches


def measure(run: Callable[[], Any]) -> tuple[float, Any]:
    """Call ``run`` on all ranks; return the seconds until the slowest rank has finished, and the result."""
    dist.barrier()
    device.synchronize()
    start = time.perf_counter()
    result = run()
    device.synchronize()
    dist.barrier()
    return time.perf_counter() - start, result


def measure_in_turns(methods: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Run all methods one after the other, ``repeats`` times; return the seconds of each method."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, run in methods.items():
            run_seconds, _ = measure(run)
            # The first round is a warm-up.
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

    Raises RuntimeError if they differ, since the two methods must do the same work.
    """
    # The metrics of the learn phase are sums over a rank's rows: add up all ranks.
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
        # Kernels sum in different orders: the tolerance of 1e-3 covers only rounding.
        if abs(result[name] - result[f"peer_{name}"]) > 1e-3 * abs(result[name]):
            raise RuntimeError(f"the learn phase and the peer do not do the same work: {result}")
    return result


def count_tokens(actor: ModelRole, batches: list[Batch]) -> int:
    """Return the number of tokens in the batches of all data-parallel ranks."""
    assert actor.model is not None
    num_tokens = torch.tensor(sum(batch.tokens.numel() for batch in batches))
    dist.all_reduce(num_tokens)
    # Ranks of a tensor and pipeline group have the same batches.
    layout = actor.model.groups.layout
    return int(num_tokens) // (layout.tensor * layout.pipeline)


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

    # Prepare the batch in three forms: packed, in rows of equal length, and padded.
    algorithm = get_algorithm("grpo", {"aggregation": "token-mean"})
    state = initial_state(algorithm)
    rollouts, scores = make_random_batch(work, work.vocabulary)
    batch, _ = build_train_batch(rollouts, scores, algorithm, state)
    packed = packed_batches(actor, batch)

    # Choose the length of the equal rows such that attention has as many pairs of tokens. It is a multiple of
    # the tensor ranks, over which sequence parallelism splits it.
    num_pairs = int(rollouts.lengths.square().sum())
    tensor_ranks = actor.model.groups.layout.tensor
    equal_length = tensor_ranks * round(num_pairs / len(rollouts.tokens) / tensor_ranks)
    equal = equal_batches(packed, equal_length)
    padded = padded_batches(actor, batch)

    learning_rate = config.actor.optimizer.learning_rate
    # The peers copy the actor's weights, so that all methods start from the same weights.
    same_layers = BareMegatron(actor.model, learning_rate, local_layers=False)

    local_layers = BareMegatron(actor.model, learning_rate, local_layers=True)
    measurement: dict[str, Any] = {"check": check_equal(actor, batch, algorithm, same_layers, packed)}
    # Padding does not count as tokens.
    counted_batches = {
        OURS: packed,
        SAME_LAYERS: packed,
        PADDED: packed,
        EQUAL: equal,
    }
    measurement["tokens"] = {name: count_tokens(actor, batches) for name, batches in counted_batches.items()}

    objective = partial(policy_objective, algorithm, state=state)
    seconds = measure_in_turns(
        {
            OURS: lambda: learn(actor, batch, algorithm, objective),
            SAME_LAYERS: lambda: same_layers.step(packed),
            EQUAL: lambda: local_layers.step(equal),
        },
        options.repeats,
    )

    # Measure the padded rows separately: they release so much memory that the next allocations are slow.
    seconds |= measure_in_turns({PADDED: lambda: local_layers.step(padded)}, min(options.repeats, 2))
    # With barriers around each run, all ranks measure nearly the same seconds: the first rank writes them.
    if device.rank() == 0:
        options.result.write_text(json.dumps({**measurement, "seconds": seconds}))

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
