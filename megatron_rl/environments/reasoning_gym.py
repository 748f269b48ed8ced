"""Tasks of reasoning-gym as conversations, in which the policy may correct a wrong answer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.config.setting import setting
from megatron_rl.environments.environment import Environment, Episode, Truncated
from megatron_rl.rewards.reasoning_gym import score


@dataclass
class ReasoningGym(Environment):
    """Conversation about one problem of reasoning-gym, in which the policy gives up to ``attempts`` answers.

    The prompts are records that `megatron_rl.data.reasoning_gym` wrote. The episode ends after an answer with
    the full score or after the last attempt. The reward is the score of the last answer, which may be
    partial. The component ``first_attempt`` is the score of the first answer.
    """

    attempts: int = setting(1, "Answers that an episode may give.", at_least=1, at_most=1024)
    feedback: str = setting(
        "That is not right. Try again, and end with the answer between <answer> and </answer>.",
        "Message after an answer without the full score; `{score}` is replaced by its score.",
    )

    def __post_init__(self) -> None:
        # Import the package now: it takes seconds, which must not count towards the time limit of the first
        # turn. `check` reports a missing package.
        with contextlib.suppress(ImportError):
            import reasoning_gym  # noqa: F401

    async def run(self, episode: Episode) -> Mapping[str, float]:
        """Sample and score answers until an answer has the full score or all attempts are used.

        Raises Truncated if there is no room for the first answer.
        """
        scores: list[float] = []
        while not scores or (scores[-1] < 1 and len(scores) < self.attempts):
            if scores:
                episode.observe(self.feedback.replace("{score}", f"{scores[-1]:g}"))

            try:
                response = await episode.generate()
            except Truncated:
                # If there is no room for another answer, the last answer counts.
                if not scores:
                    raise
                break

            answer_score = score(
                prompt=episode.prompt,
                response=response,
                ground_truth=episode.ground_truth,
                metadata=episode.metadata,
            )
            scores.append(answer_score)
        return {"reward": scores[-1], "first_attempt": scores[0]}
