"""PPO by hand, with a critic on a rank of its own: the same numbers as `megatron-rl train`."""

import sys

from megatron_rl import Run

SETTINGS = [
    "run_dir=runs/examples/dataflow_ppo",
    "algorithm={name: ppo}",
    "actor.layout={ranks: [0], tensor: 1}",
    "critic={layout: {ranks: [1]}, optimizer: {learning_rate: 1e-3}}",
]

with Run("launch/examples/dataflow/run.yaml", [*SETTINGS, *sys.argv[1:]]) as run:
    for step in run.steps():
        rollouts = run.generate(step.prompts)
        scores = run.score(rollouts, run.rewards(step.prompts, rollouts))

        batch = run.estimate(rollouts, scores)
        run.critic.update(batch)
        run.actor.update(batch)
