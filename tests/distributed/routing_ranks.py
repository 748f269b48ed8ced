"""What the ranks of test_routing.py run: vLLM with routers a trifle off, and the trainer that follows."""

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
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"expert": 2},
    {"tensor": 2, "sequence_parallel": True, "recompute": "full"},
    {"pipeline": 2, "recompute": "full"},
    {"context": 2, "recompute": "selective", "frozen": True},
)


def rollouts_of(path: Path) -> Rollouts:
    """Sample with vLLM, whose routers' weights are changed by a millionth."""
    engine = build(path, 2, records=RECORDS)
    write(engine, path)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in engine.parameters().items():
        if ".mlp.gate." in name:
            parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))

    engine.finish_update(1)
    rows = [*random_rows(6, seed=3), list(range(60))]
    rollouts = generate(engine, make_prompts(rows, SAMPLED), seed=5, routing=RECORDS)
    engine.close()
    return rollouts


def batch_of(rollouts: Rollouts, experts: torch.Tensor | None) -> TrainBatch:
    """Return a batch whose tokens go to ``experts``, with advantages that have both signs."""
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
    """Return the experts of a scoring pass's tokens, row by row."""
    mine = forward_only(model, batch, BUDGET, batch.response_mask, record=True)
    rows: dict[int, torch.Tensor] = {}
    for some in gather_objects(mine):
        for micro in some:
            lengths = [int(batch.lengths[row]) for row in micro.rows]
            rows |= dict(zip(micro.rows, micro.experts.split(lengths), strict=True))
    return torch.cat([rows[row] for row in range(len(batch))])


def check(path: Path) -> None:
    """Each layout repeats the engine's experts, in its scores and, computed again, in its gradient."""
    rollouts = rollouts_of(path)
    mask = rollouts.response_mask
    engine = rollouts.rollout_log_probs
    given = rollouts.experts
    assert given is not None

    last = rollouts.lengths.cumsum(0) - 1
    unknown = (given < 0).any(dim=-1).any(dim=-1)
    assert unknown.nonzero()[:, 0].tolist() == last.tolist()  # nothing was sampled after a row's last token

    results = []
    for case in LAYOUTS:
        model = training.build(path, case)
        model.watch_routing()
        if "frozen" in case:
            model.freeze_routers()

        plain = {
            "epsilon": 1e3,
            "learning_rate": 1e5,
            "warmup_steps": 0,
            "weight_decay": 0.0,
        }
        optimizer = training.optimizer_of(model, **plain, clip_grad=0.0)

        free = batch_of(rollouts, None)
        replayed = batch_of(rollouts, given)
        apart = [
            (training.scores(model, batch, BUDGET)[0] - engine)[mask].abs().max().item()
            for batch in (free, replayed)
        ]
        assert apart[0] > 1e-2, (case, apart)

        assert apart[1] < 1e-5, (case, apart)

        # What a scoring pass tells is what was given, or else what a learn pass then repeats.
        known = ~unknown
        own = recorded(model, free)
        repeated = recorded(model, replayed)
        assert torch.equal(repeated[known].sort(dim=-1).values, given[known].sort(dim=-1).values)

        alike = [training.scores(model, replace(free, experts=ids), BUDGET)[0][mask] for ids in (None, own)]
        torch.testing.assert_close(*alike)
        before = training.gathered_weights(model)
        result = training.train_step(model, optimizer, replayed, BUDGET)
        after = training.gathered_weights(model)

        assert 0.5 < result["router/agreement"] < 1, result
        assert {f"router/load_max/layer_{layer}" for layer in range(RECORDS[0])} <= result.keys()
        assert result["policy/kl"] < 1e-5, result

        results.append((result["router/agreement"], {name: after[name] - before[name] for name in before}))
        barrier()

    (agreement, steps), *others = results
    assert steps["model.layers.0.mlp.gate.weight"].abs().max() > 0  # gradients reach the router
    for case, (other, different) in zip(LAYOUTS[1:], others, strict=True):
        assert abs(other - agreement) < 0.02, (case, other, agreement)  # exact ties, broken by rounding
        for name, step in steps.items():
            if "frozen" in case and ".mlp.gate." in name:
                assert not different[name].any()
                continue

            scale = float(step.abs().max())
            torch.testing.assert_close(
                different[name],
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
