"""Ranks of test_routing.py: vLLM with slightly changed routers, and a trainer that replays its routing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import SAMPLED, build_engine, random_prompts, write_weights

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.schedule import forward_only
from megatron_rl.types import Rollouts, TrainBatch
from tests.sampling import generate, make_prompts

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import training

ROUTING_SHAPE = (2, 2)
"""Number of layers, and of experts per token."""
BUDGET = 80
# The first layout is the reference of the others. Recomputation repeats the forward pass, and so the routing.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"expert": 2},
    {"tensor": 2, "sequence_parallel": True, "recompute": "full"},
    {"pipeline": 2, "recompute": "full"},
    {"context": 2, "recompute": "selective", "frozen": True},
)
# So large an epsilon makes Adam's step proportional to the gradient.
OPTIMIZER = {
    "epsilon": 1e3,
    "learning_rate": 1e5,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
}


class StepResult(NamedTuple):
    """Result of one training step with replayed routing."""

    agreement: float
    weight_changes: dict[str, torch.Tensor]


def generate_rollouts(path: Path) -> Rollouts:
    """Sample with vLLM after a change of its routers' weights by a millionth, which reroutes some tokens."""
    engine = build_engine(path, 2, routing_shape=ROUTING_SHAPE)
    write_weights(engine, path)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in engine.parameters().items():
        if ".mlp.gate." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + 1e-6 * noise)

    engine.finish_update(1)
    prompts = [*random_prompts(6, seed=3), list(range(60))]
    prompt_batch = make_prompts(prompts, SAMPLED)
    rollouts = generate(engine, prompt_batch, seed=5, routing=ROUTING_SHAPE)
    engine.close()
    return rollouts


def make_batch(rollouts: Rollouts, experts: torch.Tensor | None) -> TrainBatch:
    """Return a batch with advantages of both signs, and with ``experts`` to replay or without."""
    generator = torch.Generator().manual_seed(2)
    num_tokens = len(rollouts.tokens)
    return TrainBatch(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        response_mask=rollouts.response_mask,
        loss_weights=torch.zeros(num_tokens),
        temperature=rollouts.temperature,
        advantages=torch.randn(num_tokens, generator=generator),
        old_log_probs=rollouts.rollout_log_probs,
        ref_log_probs=rollouts.rollout_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        group=rollouts.group,
        experts=experts,
    )


def record_experts(model: ParallelModel, batch: TrainBatch) -> torch.Tensor:
    """Return the experts that a forward pass selected for each token, row by row."""
    local_outputs = forward_only(model, batch, BUDGET, batch.response_mask, record_experts=True)
    # Ranks return the rows of their data-parallel shard; together they are the batch.
    experts_by_row: dict[int, torch.Tensor] = {}
    for micro_batches in gather_objects(local_outputs):
        for micro_batch in micro_batches:
            lengths = [int(batch.lengths[row]) for row in micro_batch.rows]
            row_experts = micro_batch.experts.split(lengths)
            experts_by_row |= dict(zip(micro_batch.rows, row_experts, strict=True))
    return torch.cat([experts_by_row[row] for row in range(len(batch))])


def check(path: Path) -> None:
    """Check that log-probs and gradients of each layout use the engine's experts."""
    rollouts = generate_rollouts(path)
    engine_experts = rollouts.experts
    assert engine_experts is not None

    # No forward pass has read a row's last token, so it alone has no experts.
    lacks_experts = (engine_experts < 0).any(dim=-1).any(dim=-1)
    last_tokens = rollouts.lengths.cumsum(0) - 1
    assert lacks_experts.nonzero()[:, 0].tolist() == last_tokens.tolist()

    results = []
    for case in LAYOUTS:
        results.append(check_layout(path, case, rollouts, engine_experts, ~lacks_experts))
        barrier()

    check_against_first_layout(results)
    if device.rank() == 0:
        print("all checks passed", flush=True)


def check_layout(
    path: Path,
    case: dict[str, Any],
    rollouts: Rollouts,
    engine_experts: torch.Tensor,
    has_experts: torch.Tensor,
) -> StepResult:
    """Check log-probs and recorded experts of one layout; return the result of a training step."""
    model = training.build(path, case)
    model.watch_routing()
    if "frozen" in case:
        model.freeze_routers()
    optimizer = training.build_optimizer(model, **OPTIMIZER)

    # Only with the engine's experts are the log-probs the engine's.
    without_replay = make_batch(rollouts, None)
    with_replay = make_batch(rollouts, engine_experts)
    difference_without = max_log_prob_difference(model, without_replay, rollouts)
    difference_with = max_log_prob_difference(model, with_replay, rollouts)
    assert difference_without > 1e-2, (case, difference_without)
    assert difference_with < 1e-5, (case, difference_with)

    # A forward pass records the experts that it replays.
    selected_experts = record_experts(model, without_replay)
    replayed_experts = record_experts(model, with_replay)
    assert torch.equal(
        replayed_experts[has_experts].sort(dim=-1).values,
        engine_experts[has_experts].sort(dim=-1).values,
    )

    # It also records the experts that its routers select, which another pass can replay.
    log_probs, _ = training.compute_log_probs(model, without_replay, BUDGET)
    with_selected = replace(without_replay, experts=selected_experts)
    replayed_log_probs, _ = training.compute_log_probs(model, with_selected, BUDGET)
    mask = rollouts.response_mask
    torch.testing.assert_close(log_probs[mask], replayed_log_probs[mask])

    weights_before = training.gathered_weights(model)
    metrics = training.train_step(model, optimizer, with_replay, BUDGET)
    weights_after = training.gathered_weights(model)

    num_layers, _ = ROUTING_SHAPE
    load_metrics = {f"router/load_max/layer_{layer}" for layer in range(num_layers)}
    assert load_metrics <= metrics.keys()
    assert 0.5 < metrics["router/agreement"] < 1, metrics
    assert metrics["policy/kl"] < 1e-5, metrics

    weight_changes = {name: weights_after[name] - weight for name, weight in weights_before.items()}
    return StepResult(metrics["router/agreement"], weight_changes)


def max_log_prob_difference(model: ParallelModel, batch: TrainBatch, rollouts: Rollouts) -> float:
    """Return the largest difference between the model's log-probs of response tokens and the engine's."""
    log_probs, _ = training.compute_log_probs(model, batch, BUDGET)
    differences = (log_probs - rollouts.rollout_log_probs)[rollouts.response_mask]
    return differences.abs().max().item()


def check_against_first_layout(results: list[StepResult]) -> None:
    """Check that all layouts make the step of the first one, except for frozen routers."""
    reference = results[0]
    # Gradients reach the router.
    assert reference.weight_changes["model.layers.0.mlp.gate.weight"].abs().max() > 0

    for case, result in zip(LAYOUTS[1:], results[1:], strict=True):
        # Layouts round differently, which decides exact ties between experts.
        difference = abs(result.agreement - reference.agreement)
        assert difference < 0.02, (
            case,
            result.agreement,
            reference.agreement,
        )

        for name, expected in reference.weight_changes.items():
            actual = result.weight_changes[name]
            if "frozen" in case and ".mlp.gate." in name:
                assert not actual.any()
                continue

            scale = float(expected.abs().max())
            torch.testing.assert_close(
                actual,
                expected,
                rtol=0,
                atol=1e-4 * scale,
                msg=f"{case} {name}",
            )


if __name__ == "__main__":
    device.initialize(timeout=300)
    check(Path(sys.argv[1]))
