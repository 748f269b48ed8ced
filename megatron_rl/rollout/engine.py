"""What the trainer and the hybrid engine ask of a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.sampling import Response
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import PromptBatch, Rollouts, TensorBox

ENGINES = ("vllm", "torch")


class Sampler(Protocol):
    """Sample responses from the weights that are there."""

    def generate(self, prompts: PromptBatch, *, seed: int, rows: Sequence[int] | None = None) -> Rollouts:
        """Sample one response per prompt, in the order given.

        A row's tokens depend on ``seed`` and its position only, not on what it is batched with.
        ``rows`` are the positions of these prompts in the global batch (default ``range(len(prompts))``).
        ``group`` of the result is ``arange(len(prompts))``; the caller knows which prompts are copies.
        Collective over the tensor-parallel ranks of one replica, which must give equal arguments.
        Raises RuntimeError while the engine needs weights.
        """
        ...

    def advance(
        self, prompts: PromptBatch, begun: Sequence[Response], *, seeds: Sequence[int], tokens: int | None
    ) -> list[Response]:
        """Continue one response per prompt and return what was added to each.

        ``begun`` are the responses so far, empty ones to start; each grows by at most ``tokens`` tokens (None
        for no limit) and is ``UNFINISHED`` where it is then to go on. ``seeds`` are the rows' own, the same
        for every part of a response. Nothing of a request stays in the engine between two calls, so the
        weights may change there. Collective over the tensor-parallel ranks of one replica, which must give
        equal arguments. Raises RuntimeError while the engine needs weights.
        """
        ...


class WeightStore(Protocol):
    """Say where weights lie that somebody else writes, and take them into use.

    A store may start without weights: copy every box into ``parameters()``, then call ``finish_update``.
    """

    @property
    def weights_version(self) -> int:
        """Return the version of the last finished update, -1 before it."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Say whether there are no weights, or no longer: every box must be written."""
        ...

    def boxes(self) -> list[TensorBox]:
        """Return where each box of a Hugging Face tensor lies in this rank's ``parameters()``."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage to write new weights into, by name; tied parameters appear once."""
        ...

    def finish_update(self, version: int) -> None:
        """Take the written weights into use as ``version`` and forget everything cached from older ones.

        Raises RuntimeError when requests are still running.
        """
        ...

    def sleep(self) -> None:
        """Give the engine's device memory back where the device supports it, else do nothing."""
        ...

    def wake(self) -> None:
        """Make ``parameters()`` writable again; ``needs_weights`` says whether they were lost."""
        ...


class Engine(Sampler, WeightStore, Protocol):
    """Sample from weights that somebody else writes into this process's storage."""

    def close(self) -> None:
        """Release the engine; the job's process groups stay as they are. May be called twice."""
        ...


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    seed: int,
    max_model_len: int,
) -> Engine | None:
    """Build ``config.engine`` for the rank, without weights; None on ranks outside ``layout``.

    Collective over the world.
    """
    # Each engine is imported where it is chosen: vLLM must not be imported before it is prepared.
    if config.engine == "vllm":
        from megatron_rl.rollout.vllm.engine import VllmEngine
        from megatron_rl.rollout.vllm.setup import join_groups, prepare_vllm

        prepare_vllm()
        join_groups(layout)
        if rank not in layout.ranks:
            return None
        return VllmEngine(
            model_path, config, layout=layout, rank=rank, dtype=dtype, seed=seed, max_model_len=max_model_len
        )
    if config.engine == "torch":
        from megatron_rl.rollout.torch import TorchEngine

        if rank not in layout.ranks:
            return None
        return TorchEngine.from_hf(
            model_path, rank=rank, dtype=getattr(torch, dtype), max_model_len=max_model_len
        )
    raise UserError(
        "unknown rollout engine",
        where="rollout.engine",
        expected=" or ".join(ENGINES),
        got=config.engine,
        fix="set rollout.engine to vllm",
    )
