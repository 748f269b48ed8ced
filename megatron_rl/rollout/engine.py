"""What the trainer and the hybrid engine ask of a generation engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron_rl.rollout.sampling import Response
from megatron_rl.types import PromptBatch, Rollouts, TensorBox


class GenerationEngine(Protocol):
    """Sample responses from weights that somebody else writes into its storage.

    An engine starts without weights (``needs_weights`` true): copy every box into ``parameters()``, then
    call ``finish_update``. ``weights_version`` is the version of the last finished update, -1 before it.
    """

    weights_version: int
    needs_weights: bool

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

    def close(self) -> None:
        """Release the engine; the job's process groups stay as they are. May be called twice."""
        ...
