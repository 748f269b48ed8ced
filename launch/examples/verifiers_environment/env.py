"""Environments of PrimeIntellect's verifiers lead the episodes of a run, as they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl import AgentEnvironment

# Behind the packages of this process, which stay its own.
sys.path += [str(Path(__file__).parent), "runs/examples/verifiers/packages"]

import sums
from openai import AsyncOpenAI
from verifiers import OpenAIChatCompletionsClient


class Verifiers(AgentEnvironment):
    """Agent that runs a verifiers environment on the record with the prompt's ``row``."""

    environment: Any

    async def lead(self, episode: Any, base_url: str, api_key: str) -> str:
        """Return the reward that the environment's own rubric gives."""
        held_out = episode.metadata["held_out"]
        data = self.environment.get_dataset()
        if held_out:
            data = self.environment.get_eval_dataset()

        # A retry would generate a second response for the same turn.
        client = OpenAIChatCompletionsClient(
            AsyncOpenAI(
                base_url=base_url,
                api_key=api_key,
                max_retries=0,
            )
        )
        output = await self.environment.run_rollout(data[episode.metadata["row"]], client, "policy", {})
        # verifiers returns an error; raised, it makes the sample invalid and not a reward of 0.
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return str(output["reward"])

    async def judge(self, episode: Any, output: str) -> float | Mapping[str, float] | None:
        """Return the reward of `lead`, which it passes on as text."""
        return float(output)


class Sums(Verifiers):
    """The environment of `sums.py`; verifiers makes environments in the main thread, so here."""

    environment = sums.load_environment()
