"""Ranks of test_routing.py: vLLM with slightly changed routers, and a trainer that replays its routing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engines import SAMPLED, build, random_rows, write

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.schedule import forward_only
from megatron_rl.types import Rollouts, TrainBatch
from tests.sampling import generate, make_prompts

sys.path.insert(0, str(Path(__file__).parent / "workers"))
import training

RECORDS = (2, 2)  # layers, experts per token
BUDGET = 80
# The first layout is the reference of the others. Recomputation repeats the forward pass, and so the routing.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"expert": 2},
    {"tensor": 2, "sequence_parallel": True, "recompute": "full"},
    {"pipeline": 2, "recompute": "full"},
    {"context": 2, "recompute": "selective", "frozen": True},
)


def rollouts_of(path: Path) -> Rollouts:
    """Sample with vLLM after a change of its routers' weights by a millionth, which reroutes some tokens."""
    engine = build(path, 2, routing_shape=RECORDS)
    write(engine, path)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in engine.parameters().items():
        if ".mlp.gate." in name:
            parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))

    engine.finish_update(1)
    prompts = [*random_rows(6, seed=3), list(range(60))]
    rollouts = generate(engine, make_prompts(prompts, SAMPLED), seed=5, routing=RECORDS)
    engine.close()
    return rollouts


def batch_of(rollouts: Rollouts, experts: torch.Tensor | None) -> TrainBatch:
    """Return a batch that routes tokens to ``experts`` (None: freely), with advantages of both signs."""
    generator = torch.Generator().manual_seed(2)
    return TrainBatch(
        tokens=rollouts.tokens,
        lengths=rollouts.lengths,
        response_mask=rollouts.response_mask,
        loss_weights=torch.zeros(len(rollouts.tokens)),
        temperature=rollouts.temperature,
        advantages=torch.randn(len(rollouts.tokens), generator=generator),
        old_log_probs=rollouts.rollout_log_probs,
        ref_log_probs=rollouts.rollout_log_probs,
        rollout_log_probs=rollouts.rollout_log_probs,
        group=rollouts.group,
        experts=experts,
    )


def recorded(model: ParallelModel, batch: TrainBatch) -> torch.Tensor:
    """Return the experts that a scoring pass selected for each token, row by row."""
    local = forward_only(model, batch, BUDGET, batch.response_mask, record_experts=True)
    # Ranks return the rows of their data-parallel shard; together they are the batch.
    experts: dict[int, torch.Tensor] = {}
    for micro_batches in gather_objects(local):
        for micro_batch in micro_batches:
            lengths = [int(batch.lengths[row]) for row in micro_batch.rows]
            experts |= dict(
                zip(
                    micro_batch.rows,
                    micro_batch.experts.split(lengths),
                    strict=True,
                )
            )
    return torch.cat([experts[row] for row in range(len(batch))])


def check(path: Path) -> None:
    """Check that scores and gradients of each layout use the engine's experts."""
    rollouts = rollouts_of(path)
    mask = rollouts.response_mask
    engine = rollouts.rollout_log_probs
    engine_experts = rollouts.experts
    assert engine_experts is not None

    last_tokens = rollouts.lengths.cumsum(0) - 1
    lacks_experts = (engine_experts < 0).any(dim=-1).any(dim=-1)
    assert (
        lacks_experts.nonzero()[:, 0].tolist() == last_tokens.tolist()
    )  # no forward pass has read a row's last token

    results = []
    for case in LAYOUTS:
        model = training.build(path, case)
        model.watch_routing()
        if "frozen" in case:
            model.freeze_routers()

        # So large an epsilon makes Adam's step proportional to the gradient.
        settings = {
            "epsilon": 1e3,
            "learning_rate": 1e5,
            "warmup_steps": 0,
            "weight_decay": 0.0,
        }
        optimizer = training.build_optimizer(model, **settings, clip_grad=0.0)

        without_replay = batch_of(rollouts, None)
        with_replay = batch_of(rollouts, engine_experts)
        differences = [
            (training.compute_log_probs(model, batch, BUDGET)[0] - engine)[mask].abs().max().item()
            for batch in (without_replay, with_replay)
        ]
        assert differences[0] > 1e-2, (case, differences)
        assert differences[1] < 1e-5, (case, differences)

        # A scoring pass records the experts it replays or else selects, which a training step can replay.
        has_experts = ~lacks_experts
        recorded_experts = recorded(model, without_replay)
        replayed_experts = recorded(model, with_replay)
        assert torch.equal(
            replayed_experts[has_experts].sort(dim=-1).values,
            engine_experts[has_experts].sort(dim=-1).values,
        )

        log_probs = [
            training.compute_log_probs(model, replace(without_replay, experts=ids), BUDGET)[0][mask]
            for ids in (None, recorded_experts)
        ]
        torch.testing.assert_close(*log_probs)

        before = training.gathered_weights(model)
        result = training.train_step(model, optimizer, with_replay, BUDGET)
        after = training.gathered_weights(model)

        assert 0.5 < result["router/agreement"] < 1, result
        assert {f"router/load_max/layer_{layer}" for layer in range(RECORDS[0])} <= result.keys()
        assert result["policy/kl"] < 1e-5, result

        results.append(
            (
                result["router/agreement"],
                {name: after[name] - before[name] for name in before},
            )
        )
        barrier()

    (agreement, steps), *other_results = results
    assert steps["model.layers.0.mlp.gate.weight"].abs().max() > 0  # gradients reach the router
    # Layouts round differently, which decides exact ties between experts.
    for case, (other_agreement, other_steps) in zip(LAYOUTS[1:], other_results, strict=True):
        assert abs(other_agreement - agreement) < 0.02, (
            case,
            other_agreement,
            agreement,
        )
        for name, step in steps.items():
            if "frozen" in case and ".mlp.gate." in name:
                assert not other_steps[name].any()
                continue

            scale = float(step.abs().max())
            torch.testing.assert_close(
                other_steps[name],
                step,
                rtol=0,
                atol=1e-4 * scale,
                msg=f"{case} {name}",
            )

    if device.rank() == 0:
        print("all checks passed", flush=True)


if __name__ == "__main__":
    device.initialize(timeout=300)
    check(Path(sys.argv[1]))
