"""A tool for the policy: a calculator that multiplies."""

from __future__ import annotations

from megatron_rl import StepEnvironment


class Calculator(StepEnvironment):
    """Answers `12*7=` with the product; what does not end in `=` is the policy's answer."""

    def reset(self, episode):
        self.truth = str(episode.ground_truth)

    def step(self, response):  # -> observation, reward, done
        if not response.endswith("="):
            return None, float(response == self.truth), True
        left, _, right = response[:-1].partition("*")
        return f"{int(left) * int(right)},", 0.0, False
