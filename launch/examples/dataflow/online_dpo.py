"""Online DPO (arXiv 2402.04792): of each prompt's samples, the best is preferred to the worst."""

import sys

import torch

from megatron_rl import Run

# A KL penalty of GRPO is not used here; it asks for a reference, which DPO reads.
SETTINGS = ["run_dir=runs/examples/online_dpo", "algorithm.kl={name: loss, coef: 0.1}"]

with Run("launch/examples/dataflow/run.yaml", [*SETTINGS, *sys.argv[1:]]) as run:
    for step in run.steps():
        rollouts = run.generate(step.prompts)
        scores = run.score(rollouts, run.rewards(step.prompts, rollouts))

        # The samples of a prompt are consecutive. The reward of a failed one is NaN.
        rewards = scores.rewards.view(len(step.prompts), -1)
        highest, best = rewards.nan_to_num(-torch.inf).max(dim=1)
        lowest, worst = rewards.nan_to_num(torch.inf).min(dim=1)
        first = torch.arange(0, rewards.numel(), rewards.shape[1])
        differ = highest > lowest

        pairs = run.pairs(rollouts, (first + best)[differ].tolist(), (first + worst)[differ].tolist(), scores)
        run.actor.update(pairs)
        step.log({"dpo/pairs": len(pairs)})
