"""GRPO by hand: the same numbers as `megatron-rl train`, to the last bit."""

import sys

from megatron_rl import Run

with Run("launch/examples/dataflow/run.yaml", sys.argv[1:]) as run:
    for step in run.steps():
        rollouts = run.generate(step.prompts)
        scores = run.rewards(step.prompts, rollouts)
        scores = run.score(rollouts, scores)
        run.actor.update(run.estimate(rollouts, scores))
