"""A tool for the policy: a calculator that multiplies."""

from __future__ import annotations

import re

from megatron_rl import StepEnvironment


class Calculator(StepEnvironment):
    """Environment that answers `12*7=` with the product; a text without `=` is the policy's answer."""

    def reset(self, episode):
        self.truth = str(episode.ground_truth)

    def step(self, response):  # -> observation, reward, done
        if not response.endswith("="):
            return None, float(response == self.truth), True
        call = re.fullmatch(r"(\d{1,9})\*(\d{1,9})=", response)
        if call is None:  # a malformed call is a wrong answer: 0, and not an exception
            return None, 0.0, True
        return f"{int(call[1]) * int(call[2])},", 0.0, False
