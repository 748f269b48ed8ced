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
    """Have a verifiers environment lead the episode, about the record that the prompt's ``row`` names."""

    environment: Any

    async def lead(self, episode: Any, base_url: str, api_key: str) -> str:
        """Return the reward that the environment's own rubric gives."""
        held_out = episode.metadata["held_out"]
        data = self.environment.get_eval_dataset() if held_out else self.environment.get_dataset()
        client = OpenAIChatCompletionsClient(AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))
        output = await self.environment.run_rollout(data[episode.metadata["row"]], client, "policy", {})
        if output.get("error"):
            raise RuntimeError(str(output["error"]))
        return str(output["reward"])

    async def judge(self, episode: Any, written: str) -> float | Mapping[str, float] | None:
        """Return what `lead` was told."""
        return float(written)


class Sums(Verifiers):
    """The environment of `sums.py`; verifiers makes environments in the main thread, so here."""

    environment = sums.load_environment()
