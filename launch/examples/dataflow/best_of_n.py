"""Best-of-n distillation (rejection sampling): imitate the best sample of each prompt."""

import sys

import torch

from megatron_rl import Run, sft_objective

with Run("launch/examples/dataflow/run.yaml", ["run_dir=runs/examples/best_of_n", *sys.argv[1:]]) as run:
    for step in run.steps():
        rollouts = run.generate(step.prompts)
        scores = run.rewards(step.prompts, rollouts)

        # The samples of a prompt are consecutive. The reward of a failed one is NaN.
        rewards = scores.rewards.view(len(step.prompts), -1).nan_to_num(-torch.inf)
        first = torch.arange(0, rewards.numel(), rewards.shape[1])
        best = (first + rewards.argmax(dim=1))[rewards.amax(dim=1) > 0]

        batch = run.batch(rollouts.rows(best.tolist()), torch.ones(len(best)))
        run.actor.update(batch, loss=lambda rows, log_probs, entropy: sft_objective(rows, log_probs))
        step.log({"best/fraction": len(best) / len(step.prompts)})
