"""Tasks of reasoning-gym as conversations: a wrong answer may be tried again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.setting import setting
from megatron_rl.environments.environment import Environment, Episode, Truncated
from megatron_rl.rewards.reasoning_gym import score


@dataclass
class ReasoningGym(Environment):
    """Ask a task of reasoning-gym until its own rules give an answer full marks, at most ``attempts`` times.

    The prompts are records that `megatron_rl.data.reasoning_gym` wrote. The reward is what the task gives the
    last answer, part of the marks included; ``first_attempt`` is what it gives the first.
    """

    attempts: int = setting(1, "Answers that an episode may give.", at_least=1, at_most=1024)
    feedback: str = setting(
        "That is not right. Try again, and end with the answer between <answer> and </answer>.",
        "What is said of an answer without full marks; `{score}` stands for its marks.",
    )

    def __post_init__(self) -> None:
        # Takes seconds, which no episode's first turn should have; `check` says where it is missing.
        with contextlib.suppress(ImportError):
            import reasoning_gym  # noqa: F401

    async def run(self, episode: Episode) -> Mapping[str, float]:
        """Take answers; raises Truncated where there is no room for the first."""
        marks: list[float] = []
        while not marks or (marks[-1] < 1 and len(marks) < self.attempts):
            if marks:
                episode.observe(self.feedback.replace("{score}", f"{marks[-1]:g}"))
            try:
                response = await episode.generate()
            except Truncated:
                if not marks:
                    raise
                break
            marks.append(
                score(
                    prompt=episode.prompt,
                    response=response,
                    ground_truth=episode.ground_truth,
                    metadata=episode.metadata,
                )
            )
        return {"reward": marks[-1], "first_attempt": marks[0]}
